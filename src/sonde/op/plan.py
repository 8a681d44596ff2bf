"""Which implementation and which kernels run: one selector, asked by the call itself and by :func:`explain`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .dtypes import accumulator

Impl = Literal["auto", "triton", "numba", "reference"]
HAS_TRITON = find_spec("triton") is not None
HAS_NUMBA = find_spec("numba") is not None
only_compiled = False  # True in processes that compile but do not launch: tensors may be on the CPU


def choose(name: str, impl: str, tensor: Tensor) -> str:
    """``"auto"`` picks the fastest implementation that is installed; an explicit request is met or refused, never replaced."""
    kind = tensor.device.type
    if torch.onnx.is_in_onnx_export() and impl in ("auto", "triton", "numba"):
        if impl == "auto":
            return "reference"  # plain tensor operations, which ONNX supports
        raise ValueError(f"{name}: impl={impl!r} has no translation to ONNX; export with impl='auto' or impl='reference'")
    if impl == "auto":
        if kind == "cuda" and HAS_TRITON:
            return "triton"
        return "numba" if kind == "cpu" and HAS_NUMBA else "reference"
    reason = refusal(impl, kind)
    if reason:
        raise ValueError(f"{name}: impl={impl!r} {reason}")
    return impl


def refusal(impl: str, kind: str) -> str | None:
    """Why `impl` cannot run on devices of this kind, and what to do about it; None if it can."""
    if impl not in get_args(Impl):
        return f"must be one of {', '.join(map(repr, get_args(Impl)))}"
    if impl == "triton" and not HAS_TRITON:
        return "needs triton, which is not installed; install it or use impl='auto'"
    if impl == "numba" and not HAS_NUMBA:
        return "needs numba, which is not installed; install it or use impl='auto'"
    without = only_compiled or os.environ.get("TRITON_INTERPRET") == "1"
    if impl == "triton" and kind != "cuda" and not (kind == "cpu" and without):
        return f"needs GPU tensors, got {kind}; move them with .cuda() or use impl='auto'"
    if impl == "numba" and kind != "cpu":
        return f"needs CPU tensors, got {kind}; move them with .cpu() or use impl='auto'"
    return None


class Determinism(Enum):
    """What a kernel promises about the bits of its results."""

    NONE = "none"
    RUN_TO_RUN = "run to run"  # the same call gives the same bits
    BATCH_INVARIANT = "batch invariant"  # also, the bits of row b do not depend on the batch size or on other rows


@dataclass(frozen=True)
class Kernel:
    """One launch: what it writes, its accumulator's dtype, what it promises."""

    name: str
    writes: tuple[str, ...]
    accumulator: torch.dtype | None  # None: unknown, as for a user's function
    determinism: Determinism
    workspace: int | None = 0  # bytes beyond inputs and results, if gradients have their layout; None: unknown
    phase: Literal["forward", "backward"] = "forward"
    config: str = ""  # the configuration that runs, if there is a choice
    origin: str = ""  # where that configuration comes from: tuned, shipped, default or fixed
    candidates: int = 1  # how many configurations a search would try
    key: Any = field(default=None, compare=False)  # of its winner in the store, if there is a choice; it names the device


@dataclass(frozen=True)
class Plan:
    """What one operator call launches, in order; ``str()`` of it is a table."""

    operator: str
    impl: str
    kernels: tuple[Kernel, ...]

    @property
    def determinism(self) -> Determinism:
        """The promise of the weakest kernel."""
        order = list(Determinism)
        return min((k.determinism for k in self.kernels), key=order.index, default=Determinism.BATCH_INVARIANT)

    @property
    def workspace(self) -> int:
        """The most bytes in use at one time beyond inputs and results, over the kernels for which it is known."""
        return max((k.workspace or 0 for k in self.kernels), default=0)

    def __str__(self) -> str:
        head = ("phase", "kernel", "writes", "accumulates in", "deterministic", "workspace", "configuration", "from")
        rows = [
            (
                k.phase,
                k.name,
                ", ".join(k.writes) or "(layout)",
                "not known" if k.accumulator is None else str(k.accumulator).removeprefix("torch."),
                k.determinism.value,
                "not known" if k.workspace is None else f"{k.workspace:,} B",
                k.config,
                k.origin,
            )
            for k in self.kernels
        ]
        width = [max(map(len, column)) for column in zip(head, *rows)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, width)).rstrip() for row in (head, *rows)]
        return "\n".join([f"{self.operator}, {self.impl}", *(f"  {line}" for line in lines)])


_plans: ContextVar[list[Plan] | None] = ContextVar("sonde_plans", default=None)


def recording() -> bool:
    return _plans.get() is not None


@contextmanager
def unrecorded() -> Iterator[None]:
    """Calls inside are not recorded in a plan."""
    token = _plans.set(None)
    try:
        yield
    finally:
        _plans.reset(token)


def record(name: str, impl: str, kernels: Sequence[Kernel]) -> None:
    """Record what a call would launch."""
    plans = _plans.get()
    assert plans is not None
    plans.append(Plan(name, impl, tuple(kernels)))


def hold(*tensors: Tensor | None, backward: bool = False) -> None:
    """Count tensors that a public function made for itself as workspace of the operator recorded last, or also of its gradients."""
    plans = None if torch.compiler.is_compiling() else _plans.get()
    if plans:
        held = sum(t.nbytes for t in tensors if t is not None)
        more = {"forward": held, "backward": held if backward else 0}
        kernels = tuple(replace(k, workspace=(k.workspace or 0) + more[k.phase]) for k in plans[-1].kernels)
        plans[-1] = replace(plans[-1], kernels=kernels)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """What ``function(*args, **kwargs)`` would launch, for its value and for the gradients that its arguments require.

    Nothing is launched. Arguments may be meta tensors.

    Example:
        >>> import torch, sonde
        >>> images, samples = torch.randn(1, 8, 4, 4), torch.zeros(1, 5, 3, 2)
        >>> plan = sonde.explain(sonde.sample_sum, images, samples, torch.ones(1, 2, 5, 3))
        >>> plan.determinism.name
        'BATCH_INVARIANT'
    """
    if not callable(function):
        got = "a tensor. Write explain(sonde.knn, queries, points, 3)" if isinstance(function, Tensor) else f"{function!r:.80}"
        raise TypeError(f"explain: the first argument must be a function, such as sonde.knn; got {got}")
    token = _plans.set([])
    try:
        function(*args, **kwargs)
        plans = _plans.get()
    finally:
        _plans.reset(token)
    if not plans:
        raise ValueError(f"explain: {getattr(function, '__name__', function)!r} calls no operator of sonde")
    if len(plans) == 1:
        return plans[0]
    kernels = tuple(replace(k, name=f"{p.operator}: {k.name}") for p in plans for k in p.kernels)
    return Plan(", ".join(p.operator for p in plans), plans[0].impl, kernels)


def of_reference(args: Sequence[Any]) -> Kernel:
    """The entry of a plan for the reference, which launches whatever torch does."""
    wide = accumulator(*[a for a in args if isinstance(a, Tensor)])
    return Kernel("PyTorch", ("everything",), wide, Determinism.NONE)
