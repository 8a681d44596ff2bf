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
Needs = tuple[bool, ...]  # which gradients torch asks for, as in `ctx.needs_input_grad`
_TENSORS = {Tensor, torch.nn.Parameter}
_grad_enabled = torch.is_grad_enabled


class PreparedBackward(NamedTuple):
    guard: Guard  # on the gradients and the saved tensors
    run: Callable[..., tuple]  # takes gradients, arguments and saved results


class PreparedCall:
    """A prepared call: what all calls with the same key do, decided once."""

    __slots__ = ("backward", "deterministic", "forward", "guard", "impl", "recorded", "settings", "values")

    def __init__(self, impl: str, deterministic: bool, values: tuple, forward: Callable, recorded: bool = True):
        self.impl, self.deterministic, self.values = impl, deterministic, values
        self.forward = forward  # takes the operator's arguments
        self.recorded = recorded  # autograd must record the call, since a gradient may be needed
        self.settings = settings.current()  # autograd's engine runs backward() in its own thread, which has other settings
        self.guard: Guard = lambda args: False  # True if these arguments may reuse this call
        self.backward: dict[Needs, tuple[PreparedBackward, ...]] = {}  # newest first, at most four for each set of needs

    def add_backward(self, needs: Needs, tensors: Sequence, run: Callable[..., tuple]) -> None:
        self.backward[needs] = (PreparedBackward(guard_of(tensors), run), *self.backward.get(needs, ())[:3])


class PreparedCalls:
    """The prepared calls of one operator."""

    def __init__(self) -> None:
        self.by_key: CallCache[PreparedCall] = CallCache()
        self.latest: CallCache[PreparedCall] = CallCache()  # the last call with this first shape: its guard is tried first

    def find(self, impl: str, args: Sequence) -> tuple[tuple | None, PreparedCall | None]:
        """The call's key and its prepared call. The key is None if it was not needed, or if the call cannot be cached."""
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
    """Everything about the arguments that a prepared call depends on. Only a valid key if they are :func:`plain`."""
    return tuple([
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad, is_lazy(x))
        if type(x) in _TENSORS else (type(x), x, spelling(x))
        for x in args
    ])  # fmt: skip


def spelling(value: Any) -> str | None:
    """What tells a value from others that equal it: 0.0 == -0.0 and, in a tuple, 1 == 1.0 == True. None if its type does.

    Tuples of ints need none, and may be long: the sizes of a pyramid's levels.
    """
    if isinstance(value, tuple):
        return None if {*map(type, value)} <= {int} else repr(value)
    return repr(value) if isinstance(value, float) and value == 0 else None


def plain(args: Sequence) -> tuple | None:
    """The key of the arguments if all tensors are ordinary memory with strides and all values are hashable, else None."""
    try:
        key = key_of(args)
        hash(key)
    except (RuntimeError, TypeError):
        return None
    other = any(isinstance(x, Tensor) and (type(x) not in _TENSORS or of_x[-1]) for x, of_x in zip(args, key))  # lazy ones
    return None if other else key


def is_lazy(x: Tensor) -> bool:
    """True if the numbers of `x` are not in memory: a negated view, or one of forward mode's zero tensors without memory."""
    return x.is_neg() or is_zero(x)


def resolved(args: Sequence) -> tuple:
    """The arguments, with lazy tensors written to memory."""
    return tuple([x.clone() if isinstance(x, Tensor) and is_lazy(x) else x for x in args])


def frozen(args: Sequence) -> tuple:
    """The arguments with lists as tuples: the dispatcher passes lists, which are not hashable."""
    return tuple([tuple(x) if type(x) is list else x for x in args])


def guard_of(args: Sequence) -> Guard:
    """A guard that is True for arguments with the same key as these; in doubt it is False.

    It takes a third of the time of a key, because torch's compiler provides a fast guard for most of it.
    """
    if TensorGuards is None:
        key = key_of(args)
        return lambda args: plain(args) == key
    first: dict[int, int] = {}
    place = [first.setdefault(id(x), i) for i, x in enumerate(args)]  # first position of each: torch's guard refuses duplicates
    tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor) and place[i] == i]
    again = [(i, place[i]) for i, x in enumerate(args) if isinstance(x, Tensor) and place[i] != i]
    values = [(i, type(x), x, spelling(x)) for i, x in enumerate(args) if not isinstance(x, Tensor)]
    sizes: Any = [list(args[i].shape) for i in tensors]
    strides: Any = [list(args[i].stride()) for i in tensors]
    alignment = [args[i].data_ptr() & 15 for i in tensors]
    check = TensorGuards(*[args[i] for i in tensors], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def guard_tensors(args: Sequence) -> bool:
        try:
            if True in [x.is_nested for x in args]:  # torch's guard crashes the process on nested tensors
                return False
        except AttributeError:  # not a tensor
            return False
        return check(*args) and [x.data_ptr() & 15 for x in args] == alignment

    def guard(args: Sequence) -> bool:
        return (
            guard_tensors([args[i] for i in tensors])
            and all([args[i] is args[j] for i, j in again])
            and all([
                args[i] is x or (type(args[i]) is kind and args[i] == x and spelling(args[i]) == spelled)
                for i, kind, x, spelled in values
            ])
        )  # fmt: skip

    return guard if values or again else guard_tensors


def placed(run: Callable, device: torch.device, deterministic: bool) -> Callable[..., Any]:
    """`run` on the tensors' device, whichever is current. In deterministic mode torch need not fill memory that kernels write."""
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
_threads, _filled = 0, True  # how many threads are inside unfilled(), and the setting before the first entered


@contextmanager
def unfilled() -> Iterator[None]:
    """Turn off ``fill_uninitialized_memory``. It belongs to the process: the first thread in saves it, the last restores it."""
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
