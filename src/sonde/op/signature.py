"""What a schema says of an operator: its tensors and values, which have a gradient, which results backward reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """Positions count the operator's arguments, tensors first, or its results."""

    name: str
    inputs: str  # as the schema has them
    result: str
    names: tuple[str, ...]
    tensors: int  # how many of the arguments are tensors; the rest are values
    differentiable: tuple[int, ...]  # arguments with a gradient, in the order of the gradients
    unbatched: frozenset[int]  # tensors without a batch dimension
    channels_last: frozenset[int]  # arguments whose gradient keeps that layout
    forward_only: frozenset[int]  # tensors that backward has no use for
    graded: tuple[int, ...]  # results with a gradient
    ungraded: tuple[int, ...]
    saved: tuple[int, ...]  # results that backward reads

    @staticmethod
    def parse(
        schema: str,
        differentiable: Sequence[str],
        channels_last: Sequence[str] = (),
        unbatched: Sequence[str] = (),
        forward_only: Sequence[str] = (),
        saved: Sequence[int] = (),
        no_grad: Sequence[int] = (),
    ) -> Signature:
        head, result = schema.split(" -> ")
        name, inputs = head.rstrip(")").split("(", 1)
        declared = [declaration.split() for declaration in inputs.split(", ")]
        names = [name for _, name in declared]
        tensors = sum(kind.startswith("Tensor") for kind, _ in declared)
        assert all(kind.startswith("Tensor") for kind, _ in declared[:tensors]), "tensors come first"

        def places(these: Sequence[str]) -> list[int]:
            return [names.index(name) for name in these]

        return Signature(
            name,
            inputs,
            result,
            tuple(names),
            tensors,
            tuple(places(differentiable)),
            frozenset(places(unbatched)),
            frozenset(places(channels_last)),
            frozenset(places(forward_only)),
            tuple(i for i in range(result.count("Tensor")) if i not in no_grad),
            tuple(no_grad),
            tuple(saved),
        )

    @property
    def forward_schema(self) -> str:
        return f"({self.inputs}, str impl, bool deterministic) -> {self.result}"

    @property
    def backward_schema(self) -> str:
        """Gradients of results, arguments, saved results; every gradient is returned, an empty one where it is not needed."""
        grads, kept = [f"Tensor grad{i}" for i in self.graded], [f"Tensor result{i}" for i in self.saved]
        returned = ", ".join(["Tensor"] * len(self.differentiable))
        return f"({', '.join([*grads, self.inputs, *kept])}, bool[] needs, str impl, bool deterministic) -> ({returned})"

    @property
    def backward_reads_its_result(self) -> bool:
        return any(i in self.graded for i in self.saved)
