"""What an operator's schema says: its tensors and values, which of them have a gradient, which results the backward pass reads.

Lists of tensors exist in schemas only. All code behind the schema sees *flat* arguments: the entries of a list take its place, and
there is one flat signature for each combination of list lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Lengths = tuple[int, ...]  # of the lists of a call, in order


@dataclass(frozen=True)
class Signature:
    """Positions count the operator's arguments, tensors first, or its results."""

    name: str
    inputs: str  # as written in the schema
    result: str
    names: tuple[str, ...]
    tensors: int  # how many of the arguments are tensors; the rest are values
    differentiable: tuple[int, ...]  # arguments with a gradient, in the order of the gradients
    unbatched: frozenset[int]  # tensors without a batch dimension
    channels_last: frozenset[int]  # arguments whose gradient keeps that layout
    forward_only: frozenset[int]  # tensors that backward does not need
    graded: tuple[int, ...]  # results with a gradient
    ungraded: tuple[int, ...]
    saved: tuple[int, ...]  # results that backward reads
    lists: tuple[int, ...] = ()  # arguments that are lists of tensors; a flat signature has none
    namespace: str = "sonde"

    @staticmethod
    def parse(
        schema: str,
        differentiable: Sequence[str],
        channels_last: Sequence[str] = (),
        unbatched: Sequence[str] = (),
        forward_only: Sequence[str] = (),
        saved: Sequence[int] = (),
        no_grad: Sequence[int] = (),
        namespace: str = "sonde",
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
            tuple(i for i, (kind, _) in enumerate(declared) if kind == "Tensor[]"),
            namespace=namespace,
        )

    @property
    def qualname(self) -> str:
        return f"{self.namespace}::{self.name}"

    @property
    def title(self) -> str:
        """The name in messages: users know ours without a namespace."""
        return self.name if self.namespace == "sonde" else self.qualname

    @property
    def forward_schema(self) -> str:
        return f"({self.inputs}, str impl, bool deterministic) -> {self.result}"

    @property
    def backward_schema(self) -> str:
        """Gradients of results, arguments, saved results; every gradient is returned, an empty one where it is not needed."""
        grads, kept = [f"Tensor grad{i}" for i in self.graded], [f"Tensor result{i}" for i in self.saved]
        returned = ", ".join("Tensor[]" if i in self.lists else "Tensor" for i in self.differentiable)
        return f"({', '.join([*grads, self.inputs, *kept])}, bool[] needs, str impl, bool deterministic) -> ({returned})"

    @property
    def backward_reads_its_result(self) -> bool:
        return any(i in self.graded for i in self.saved)

    # lists of tensors; call these on the schema's own signature, not on a flat one

    def flat(self, lengths: Lengths) -> Signature:
        """The signature of calls whose lists have these lengths: each entry of a list is an argument."""
        if not self.lists:
            return self
        counts = self._counts(lengths)
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]

        def spread(positions: Iterable[int]) -> list[int]:
            return [j for i in positions for j in range(starts[i], starts[i + 1])]

        names = [f"{name}[{j}]" if i in self.lists else name for i, name in enumerate(self.names) for j in range(counts[i])]
        return replace(
            self,
            names=tuple(names),
            tensors=starts[self.tensors],
            differentiable=tuple(spread(self.differentiable)),
            unbatched=frozenset(spread(self.unbatched)),
            channels_last=frozenset(spread(self.channels_last)),
            forward_only=frozenset(spread(self.forward_only)),
            lists=(),
        )

    def unpacked(self, args: Sequence[Any], first: int = 0) -> tuple[list[Any], Lengths]:
        """The schema's arguments, which begin at position `first`, made flat; and the lengths of their lists."""
        lists = [first + i for i in self.lists]
        return [x for i, arg in enumerate(args) for x in (arg if i in lists else [arg])], tuple(len(args[i]) for i in lists)

    def packed(self, args: Sequence[Any], lengths: Lengths, first: int = 0) -> list[Any]:
        """The inverse of :meth:`unpacked`: flat arguments, which begin at position `first`, as the schema's arguments."""
        rest = iter(args[first:])
        counts = enumerate(self._counts(lengths))
        packed = [[next(rest) for _ in range(count)] if i in self.lists else next(rest) for i, count in counts]
        return [*args[:first], *packed, *rest]

    def packed_gradients(self, grads: Sequence[Any], lengths: Lengths) -> Any:
        """One gradient for each flat differentiable argument, as the schema of the backward operator returns them."""
        rest, counts = iter(grads), self._counts(lengths)
        out = [[next(rest) for _ in range(counts[i])] if i in self.lists else next(rest) for i in self.differentiable]
        return out[0] if len(out) == 1 else tuple(out)

    def _counts(self, lengths: Lengths) -> list[int]:
        """How many flat arguments each argument of the schema becomes."""
        of_list = dict(zip(self.lists, lengths))
        return [of_list.get(i, 1) for i in range(len(self.names))]
