"""Call cache: the first call with given shapes, strides, dtypes and flags prepares a launch; later ones reuse it.

A small operator's eager call is dominated by host time, so a hit must cost only a few microseconds: one guard on the tensors of the
previous call, or one dictionary lookup on a tuple of plain values. A call that a tracer, a mode, a transform or a profiler must
observe never uses the cache: ``is_observed()`` is asked before anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..jit import settings, token
from .cache import CallCache
from .plan import recording
from .torch_private import TensorGuards, deterministic, is_zero, observed

Guard = Callable[[Sequence], bool]
Needs = tuple[bool, ...]  # which gradients torch asks for, as `ctx.needs_input_grad` has them
_TENSORS = {Tensor, torch.nn.Parameter}
_grad_enabled = torch.is_grad_enabled


class PreparedBackward(NamedTuple):
    guard: Guard  # on the gradients and the saved tensors
    run: Callable[..., tuple]  # takes gradients, arguments and saved results


class PreparedCall:
    """What calls of one kind do, decided once."""

    __slots__ = ("backward", "deterministic", "forward", "guard", "impl", "recorded", "settings", "values")

    def __init__(self, impl: str, deterministic: bool, values: tuple, forward: Callable, recorded: bool = True):
        self.impl, self.deterministic, self.values = impl, deterministic, values
        self.forward = forward  # takes the operator's arguments
        self.recorded = recorded  # autograd records it, since somebody may ask for gradients
        self.settings = settings.current()  # the engine calls backward() from a thread of its own, with settings of its own
        self.guard: Guard = lambda args: False  # True if these arguments may reuse this call
        self.backward: dict[Needs, tuple[PreparedBackward, ...]] = {}  # newest first, at most four for each set of needs

    def add_backward(self, needs: Needs, tensors: Sequence, run: Callable[..., tuple]) -> None:
        self.backward[needs] = (PreparedBackward(guard_of(tensors), run), *self.backward.get(needs, ())[:3])


class PreparedCalls:
    """Those of one operator."""

    def __init__(self) -> None:
        self.by_key: CallCache[PreparedCall] = CallCache()
        self.latest: CallCache[PreparedCall] = CallCache()  # the last call with such a first shape, whose guard is asked first

    def find(self, impl: str, args: Sequence) -> tuple[tuple | None, PreparedCall | None]:
        """The key of such a call, if it has one and was asked for it, and what was prepared, if anything was."""
        if is_observed():
            return None, None
        try:
            first = impl, deterministic(), _grad_enabled(), token(), args[0].shape
            call = self.latest.get(first)
            if call is not None and call.guard(args):
                return None, call
            key = first, key_of(args)
            call = self.by_key.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no shape, no memory, no strides, no hash
            return None, None
        if call is not None:
            self.latest.put(first, call)
        return key, call

    def add(self, key: tuple, args: Sequence, call: PreparedCall) -> None:
        call.guard = guard_of(args)
        self.latest.put(key[0], self.by_key.put(key, call))

    def clear(self) -> None:
        self.by_key.clear()
        self.latest.clear()


def is_observed() -> bool:
    """True if torch or ``explain`` must see this call as an operator."""
    return observed() or recording()


def key_of(args: Sequence) -> tuple:
    """What a prepared call depends on in these arguments; a key for them if they are :func:`plain`."""
    return tuple([
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad, is_lazy(x))
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
    other = any(isinstance(x, Tensor) and (type(x) not in _TENSORS or of_x[-1]) for x, of_x in zip(args, key))  # lazy ones
    return None if other else key


def is_lazy(x: Tensor) -> bool:
    """True if memory does not hold the numbers of `x`: a negated view, or a tensor of zeros that forward mode makes without any."""
    return x.is_neg() or is_zero(x)


def resolved(args: Sequence) -> tuple:
    """The same numbers, all of them in memory."""
    return tuple([x.clone() if isinstance(x, Tensor) and is_lazy(x) else x for x in args])


def frozen(args: Sequence) -> tuple:
    """The dispatcher hands over lists, of which no key can be made."""
    return tuple([tuple(x) if type(x) is list else x for x in args])


def guard_of(args: Sequence) -> Guard:
    """A guard that tells whether others are of the kind that these are; when in doubt it says no.

    It takes a third of the time of a key, since torch's compiler has a guard for most of it.
    """
    if TensorGuards is None:
        key = key_of(args)
        return lambda args: plain(args) == key
    first: dict[int, int] = {}
    place = [first.setdefault(id(x), i) for i, x in enumerate(args)]  # where each came first: torch's guard takes nothing twice
    tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor) and place[i] == i]
    again = [(i, place[i]) for i, x in enumerate(args) if isinstance(x, Tensor) and place[i] != i]
    values = [(i, type(x), x) for i, x in enumerate(args) if not isinstance(x, Tensor)]
    sizes: Any = [list(args[i].shape) for i in tensors]
    strides: Any = [list(args[i].stride()) for i in tensors]
    alignment = [args[i].data_ptr() & 15 for i in tensors]
    check = TensorGuards(*[args[i] for i in tensors], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def guard_tensors(args: Sequence) -> bool:
        try:
            if True in [x.is_nested for x in args]:  # at these torch's guard ends the process
                return False
        except AttributeError:  # no tensor
            return False
        return check(*args) and [x.data_ptr() & 15 for x in args] == alignment

    def guard(args: Sequence) -> bool:
        return (
            guard_tensors([args[i] for i in tensors])
            and all([args[i] is args[j] for i, j in again])
            and all([args[i] is x or (type(args[i]) is kind and args[i] == x) for i, kind, x in values])
        )

    return guard if values or again else guard_tensors


def placed(run: Callable, device: torch.device, deterministic: bool) -> Callable[..., Any]:
    """The same on the tensors' device, whichever is current; in the deterministic mode without filling what kernels will write."""
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    if not several and not deterministic:
        return run

    def act(*args):
        elsewhere = several and torch.cuda.current_device() != device.index
        if not elsewhere and not deterministic:
            return run(*args)
        with torch.cuda.device(device) if elsewhere else nullcontext(), unfilled():
            return run(*args)

    return act


_lock = threading.Lock()
_threads, _filled = 0, True  # that are inside of unfilled(), and the setting before the first of them


@contextmanager
def unfilled() -> Iterator[None]:
    """The setting is the process's: the first of several threads takes it away, the last puts it back."""
    global _threads, _filled
    setting: Any = torch.utils.deterministic
    with _lock:
        if not _threads:
            _filled, setting.fill_uninitialized_memory = setting.fill_uninitialized_memory, False
        _threads += 1
    try:
        yield
    finally:
        with _lock:
            _threads -= 1
            if not _threads:
                setting.fill_uninitialized_memory = _filled
