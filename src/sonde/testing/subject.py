"""One implementation of an operator, with the arguments of one case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..op.autograd import as_tuple
from ..op.custom import CustomOperator

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    op: CustomOperator
    impl: str
    args: tuple[Any, ...]  # all arguments, in the operator's order; no tensor requires a gradient
    tolerance: float | None = None

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor arguments by name; entries of lists are called ``xs[0]``."""
        found: dict[str, Tensor] = {}
        for name, arg in zip(self.op._names, self.args):
            entries = {f"{name}[{i}]": x for i, x in enumerate(arg)} if isinstance(arg, (list, tuple)) else {name: arg}
            found |= {key: x for key, x in entries.items() if isinstance(x, Tensor)}
        return found

    @cached_property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def deterministic(self) -> bool:
        return self.op._registry.known[self.impl].deterministic

    @cached_property
    def differentiable(self) -> list[str]:
        """Names of the tensors that may have a gradient."""
        about = self.op._about.signature
        names = {about.names[i] for i in about.differentiable}
        return [key for key, x in self.tensors.items() if key.split("[")[0] in names and x.is_floating_point()]

    @property
    def graded(self) -> tuple[int, ...]:
        """Positions of the results with a gradient."""
        return self.op._about.signature.graded

    def using(self, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
        """The arguments with some tensors replaced."""

        def one(name: str, arg: Any) -> Any:
            if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor):
                return [tensors.get(f"{name}[{i}]", x) for i, x in enumerate(arg)]
            return tensors.get(name, arg)

        return tuple(one(name, arg) for name, arg in zip(self.op._names, self.args))

    def run(self, args: Sequence[Any] | None = None, impl: str | None = None) -> Results:
        out = self.op(*(self.args if args is None else args), impl=impl or self.impl)
        return as_tuple(out)

    def reference(self, args: Sequence[Any] | None = None) -> Results:
        return self.run(args, "reference")

    @cached_property
    def value(self) -> Results:
        """The implementation's results for the unchanged case."""
        with torch.no_grad():
            return self.run()

    @cached_property
    def want(self) -> Results:
        with torch.no_grad():
            return self.reference()

    @cached_property
    def exact(self) -> Results | None:
        """The reference in float64; None if it does not run in float64."""
        try:
            with torch.no_grad():
                found = self.reference(self.using({k: x.double() for k, x in self.tensors.items() if x.is_floating_point()}))
        except Exception:  # the reference takes only one dtype
            return None
        return found if [x.shape for x in found] == [x.shape for x in self.want] else None

    @cached_property
    def cotangents(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)

        def one(x: Tensor) -> Tensor:
            return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)

        return tuple(one(self.want[i]) for i in self.graded)

    def gradients(
        self,
        names: Sequence[str] | None = None,
        impl: str | None = None,
        cotangents: Sequence[Tensor] | None = None,
        tensors: dict[str, Tensor] | None = None,
        call: Callable[..., Any] | None = None,
    ) -> dict[str, Tensor | None]:
        """The gradients of these tensors; None where autograd returns none."""
        names = self.differentiable if names is None else list(names)
        given = {**self.tensors, **(tensors or {})}
        leaves = {key: given[key].detach().requires_grad_() for key in names}
        args = self.using({**given, **leaves})
        out = as_tuple(call(*args)) if call is not None else self.run(args, impl)
        outs = [out[i] for i in self.graded]
        grads = [g.clone() for g in self.cotangents] if cotangents is None else list(cotangents)
        pairs = [(x, g) for x, g in zip(outs, grads) if x.requires_grad]
        if not pairs:
            return dict.fromkeys(names)
        xs, gs = zip(*pairs)
        found = torch.autograd.grad(xs, list(leaves.values()), gs, allow_unused=True)
        return dict(zip(names, found))

    @cached_property
    def gradient(self) -> dict[str, Tensor | None]:
        return self.gradients()

    @cached_property
    def wanted_gradient(self) -> dict[str, Tensor | None]:
        return self.gradients(impl="reference")

    @cached_property
    def exact_gradient(self) -> dict[str, Tensor | None] | None:
        wide = {k: x.double() for k, x in self.tensors.items() if x.is_floating_point()}
        if self.exact is None or any(self.exact[i].dtype is not torch.float64 for i in self.graded):
            return None
        return self.gradients(impl="reference", tensors=wide, cotangents=[g.double() for g in self.cotangents])

    def __str__(self) -> str:
        def words(x: Any) -> str:
            if isinstance(x, Tensor):
                return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            if isinstance(x, (list, tuple)):
                return f"[{', '.join(map(words, x))}]"
            return repr(x)

        given = ", ".join(f"{name}={words(x)}" for name, x in zip(self.op._names, self.args))
        return f"{self.op.name}({given}, impl={self.impl!r})"
