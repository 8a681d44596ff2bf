"""The implementations of an operator: the kernels of a package, for our own; functions that were registered by name, for users'.

:class:`~sonde.op.register.Operator` asks three questions: which implementation runs this call, whether it has a gradient of its
own, and what one of its passes does with such arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from . import plan
from .autograd import as_tuple
from .layout import outline_of

if TYPE_CHECKING:
    from .register import Operator

FILES = {"triton": "gpu", "numba": "cpu"}  # of a package


class Kernels(Protocol):
    """One implementation."""

    keeps: bool  # a pass may be cached and reused for all arguments with the same key
    own: bool  # one of ours: it writes every element that it allocates, and returns new memory

    def decide(self, args: Sequence, needs: Sequence[bool], deterministic: bool) -> Callable[..., Any]:
        """The function that runs a pass over such arguments: the backward pass if there are `needs`."""

    def plan(self, op: Operator, args: Sequence, needs: Sequence[bool], deterministic: bool) -> list[plan.Kernel]:
        """The kernels of a call, and of the gradients that are needed."""


class Implementations(Protocol):
    """All implementations of one operator."""

    def choose(self, impl: str, args: Sequence) -> str:
        """The name of the one that runs; an error if an explicit request cannot be met."""

    def kernels(self, impl: str) -> Kernels: ...

    def differentiates(self, impl: str) -> bool:
        """Whether it has a backward pass; without one, gradients come from the reference."""


class OfPackage:
    """Kernels in ``gpu.py`` (Triton) and ``cpu.py`` (Numba) of a package, imported by the first call that needs them."""

    def __init__(self, name: str, package: str | None) -> None:
        self.name, self.package = name, package
        self.kernels: Callable[[str], Kernels] = cache(lambda impl: OfModule(import_module(f"{package}.{FILES[impl]}")))

    def choose(self, impl: str, args: Sequence) -> str:
        return plan.choose(self.name, impl, args[0])

    def differentiates(self, impl: str) -> bool:
        return True


class OfModule:
    """A module with ``forward_pass`` and ``backward_pass``, or with ``forward``, ``backward`` and ``plan``."""

    own = True

    def __init__(self, module: Any) -> None:
        self.module, self.keeps = module, hasattr(module, "forward_pass")

    def decide(self, args: Sequence, needs: Sequence[bool] = (), deterministic: bool = False) -> Callable[..., Any]:
        return decide(self.module, args, needs, deterministic)

    def plan(self, op: Operator, args: Sequence, needs: Sequence[bool], deterministic: bool) -> list[plan.Kernel]:
        if not self.keeps:
            found: list[plan.Kernel] = self.module.plan(*args, needs=needs, deterministic=deterministic)
            return found
        found = self.module.forward_pass(*args).plan("forward")
        if any(needs):
            made = as_tuple(op.fake(*[outline_of(a) if isinstance(a, Tensor) else a for a in args]))
            grads, saved = ([made[i] for i in which] for which in (op.signature.graded, op.signature.saved))
            given = [None if i in op.signature.forward_only else a for i, a in enumerate(args)]
            found += self.module.backward_pass(*grads, *given, *saved, needs=needs, deterministic=deterministic).plan("backward")
        return found


def decide(kernels: Any, args: Sequence, needs: Sequence[bool] = (), deterministic: bool = False) -> Callable[..., Any]:
    """The function that runs a pass of this module over such arguments: the backward pass if there are `needs`."""
    how = dict(needs=needs, deterministic=deterministic)
    if hasattr(kernels, "forward_pass"):
        bound: Callable[..., Any] = (kernels.backward_pass(*args, **how) if needs else kernels.forward_pass(*args)).bind()
        return bound
    return partial(kernels.backward, **how) if needs else kernels.forward
