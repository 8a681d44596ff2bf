"""Kinds of calls: what is decided at the first call of a kind is done by all of them, and nothing is asked twice.

An eager call of a small operator is all host time, so this is written for speed: a key of plain values, one look into a
dictionary, and no function between there and the launch that need not be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..jit import settings, token
from . import plan

_TENSORS = {Tensor, torch.nn.Parameter}
_remembered: list[dict] = []
_modes, _transforms, _profiled, _traced, _deterministic, _grad_enabled = (
    torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active, torch.autograd._profiler_enabled,
    torch._C._get_tracing_state, torch._C._get_deterministic_algorithms, torch.is_grad_enabled,
)  # fmt: skip
_unfilled, _filled, _lock = 0, True, threading.Lock()


class Kind:
    """What calls of one kind do."""

    __slots__ = ("backward", "deterministic", "forward", "impl", "recorded", "settings", "values")

    def __init__(self, impl: str, deterministic: bool, values: tuple, forward: Callable, recorded: bool = True):
        self.impl, self.deterministic, self.values = impl, deterministic, values
        self.forward = forward  # takes the operator's arguments
        self.recorded = recorded  # somebody may ask for gradients
        self.settings = settings.current()  # the engine calls backward() from a thread of its own, with settings of its own
        self.backward: dict[tuple, Callable] = {}  # by layouts: what takes gradients and arguments to the inputs' gradients


def new() -> dict:
    """Room for what is to be remembered, until :func:`forget`."""
    _remembered.append({})
    return _remembered[-1]


def forget() -> None:
    """Decide anew: for tests, which change what decisions depend on."""
    for known in _remembered:
        known.clear()


def key_of(args: Sequence) -> tuple:
    """What decisions depend on in these arguments; a key for them if they are :func:`plain`."""
    return tuple([
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad, x.is_neg())
        if type(x) in _TENSORS else (type(x), x)
        for x in args
    ])  # fmt: skip


def plain(args: Sequence) -> tuple | None:
    """Their key, if tensors are memory and strides, not something that looks like it, and everything else can be part of one."""
    try:
        key = key_of(args)
        hash(key)
    except (RuntimeError, TypeError):
        return None
    other = any(isinstance(x, Tensor) and (type(x) not in _TENSORS or x.is_neg()) for x in args)  # its memory has the opposite
    return None if other else key


def frozen(args: Sequence) -> tuple:
    """The dispatcher hands over lists, of which no key can be made."""
    return tuple([tuple(x) if type(x) is list else x for x in args])


def resolved(args: Sequence) -> tuple:
    return tuple([a.resolve_neg() if isinstance(a, Tensor) else a for a in args])


def layouts(tensors: Sequence, asked: Sequence[bool]) -> tuple | None:
    """What backward passes of one kind of call depend on, as what was saved may come back otherwise; None where none can tell."""
    key: list = [asked]
    try:
        for x in tensors:
            if type(x) in _TENSORS and not x.is_neg():
                key += (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)
            elif x is not None:
                return None
    except RuntimeError:  # no strides, no memory
        return None
    return tuple(key)


def watched() -> bool:
    """Whether somebody could tell an operator from its function: a mode, a transform, a profiler, a trace, a plan."""
    return (
        _modes() > 0 or _transforms() or _profiled() or _traced() is not None or forward_ad._current_level >= 0 or plan.recording()
    )  # fmt: skip


def circumstances() -> tuple:
    """What decisions depend on beside the arguments."""
    return _deterministic(), _grad_enabled(), token()


def placed(function: Callable, device: torch.device, deterministic: bool) -> Callable[..., Any]:
    """The same on the tensors' device, whichever is current; in the deterministic mode without filling what kernels will write."""
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    if not several and not deterministic:
        return function

    def act(*args):
        elsewhere = several and torch._C._cuda_getDevice() != device.index
        if not elsewhere and not deterministic:
            return function(*args)
        with torch.cuda.device(device) if elsewhere else nullcontext(), unfilled():
            return function(*args)

    return act


@contextmanager
def unfilled() -> Iterator[None]:
    """The setting is the process's: the first of several threads takes it away, the last puts it back."""
    global _unfilled, _filled
    with _lock:
        if not _unfilled:
            _filled = torch._C._get_deterministic_fill_uninitialized_memory()
            torch._C._set_deterministic_fill_uninitialized_memory(False)
        _unfilled += 1
    try:
        yield
    finally:
        with _lock:
            _unfilled -= 1
            if not _unfilled:
                torch._C._set_deterministic_fill_uninitialized_memory(_filled)
