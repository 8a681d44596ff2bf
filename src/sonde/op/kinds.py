"""Kinds of calls: what is decided at the first call of a kind is done by all of them, and nothing is asked twice.

An eager call of a small operator is all host time, so this is written for speed: a guard of torch's own for calls like the last
one, else a key of plain values and one look into a dictionary, and no function between there and the launch that need not be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ..jit import settings, token
from . import plan
from .cache import CallCache

_TENSORS = {Tensor, torch.nn.Parameter}
_dispatch_modes, _function_modes, _transforms, _profiled, _tracing, _deterministic, _grad_enabled = (
    torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, torch._C._are_functorch_transforms_active,
    torch.autograd._profiler_enabled, torch._C._get_tracing_state, torch._C._get_deterministic_algorithms, torch.is_grad_enabled,
)  # fmt: skip
is_pre_dispatch = partial(torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch)
_Guards = torch._C._dynamo.guards.TensorGuards
_unfilled, _filled, _lock = 0, True, threading.Lock()


class Kind:
    """What calls of one kind do."""

    __slots__ = ("backward", "deterministic", "forward", "impl", "like", "recorded", "settings", "values")

    def __init__(self, impl: str, deterministic: bool, values: tuple, forward: Callable, recorded: bool = True):
        self.impl, self.deterministic, self.values = impl, deterministic, values
        self.forward = forward  # takes the operator's arguments
        self.recorded = recorded  # somebody may ask for gradients
        self.settings = settings.current()  # the engine calls backward() from a thread of its own, with settings of its own
        self.like: Callable[[Sequence], bool] = lambda args: False  # whether arguments are of this kind
        # by whose gradients are asked for: for tensors like which the last passes were, and what they did with these and the values
        self.backward: dict[tuple, tuple[tuple[Callable, Callable], ...]] = {}


class Kinds:
    """Those of an operator's calls that were met."""

    def __init__(self) -> None:
        self.known: CallCache[Kind] = CallCache()
        self.latest: CallCache[Kind] = CallCache()  # the last call with such a first shape, whose guard is asked first

    def find(self, impl: str, args: Sequence) -> tuple[tuple | None, Kind | None]:
        """The key of such a call, if it has one and was asked for it, and its kind, if that is known."""
        if is_observed():  # before anything else: a guard on the tensors alone does not see who is watching
            return None, None
        try:
            first = impl, _deterministic(), _grad_enabled(), token(), args[0].shape
            kind = self.latest.get(first)
            if kind is not None and kind.like(args):
                return None, kind
            key = first, key_of(args)
            kind = self.known.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no shape, no memory, no strides, no hash
            return None, None
        if kind is not None:
            self.latest.put(first, kind)
        return key, kind

    def add(self, key: tuple, args: Sequence, kind: Kind) -> None:
        kind.like = like(args)
        self.latest.put(key[0], self.known.put(key, kind))


def key_of(args: Sequence) -> tuple:
    """What decisions depend on in these arguments; a key for them if they are :func:`plain`."""
    return tuple([
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad, x.is_neg(), x._is_zerotensor())
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
    other = any(isinstance(x, Tensor) and (type(x) not in _TENSORS or _is_lazy(x)) for x in args)
    return None if other else key


def frozen(args: Sequence) -> tuple:
    """The dispatcher hands over lists, of which no key can be made."""
    return tuple([tuple(x) if type(x) is list else x for x in args])


def resolved(args: Sequence) -> tuple:
    """The same numbers, all of them in memory."""
    return tuple([x.clone() if isinstance(x, Tensor) and _is_lazy(x) else x for x in args])


def _is_lazy(x: Tensor) -> bool:
    """True if memory does not hold the numbers of `x`: a negated view, or a tensor of zeros that forward mode makes without any."""
    return x.is_neg() or x._is_zerotensor()


def like(args: Sequence) -> Callable[[Sequence], bool]:
    """What tells whether others are of the kind that these are.

    It takes a third of the time of a key: torch's compiler has a guard for the most of it. When in doubt it says no.
    """
    first: dict[int, int] = {}
    place = [first.setdefault(id(x), i) for i, x in enumerate(args)]  # where each came first: the guard takes nothing twice
    tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor) and place[i] == i]
    again = [(i, place[i]) for i, x in enumerate(args) if isinstance(x, Tensor) and place[i] != i]
    others = [(i, type(x), x) for i, x in enumerate(args) if not isinstance(x, Tensor)]
    sizes: Any = [list(args[i].shape) for i in tensors]
    strides: Any = [list(args[i].stride()) for i in tensors]
    alignment = [args[i].data_ptr() & 15 for i in tensors]
    check = _Guards(*[args[i] for i in tensors], dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def same(args: Sequence) -> bool:
        return (
            usual([args[i] for i in tensors])
            and all([args[i] is args[j] for i, j in again])
            and all([args[i] is x or (type(args[i]) is kind and args[i] == x) for i, kind, x in others])
        )

    def usual(args: Sequence) -> bool:
        try:
            if True in [x.is_nested for x in args]:  # at these the guard ends the process
                return False
        except AttributeError:  # no tensor
            return False
        return check(*args) and [x.data_ptr() & 15 for x in args] == alignment

    return same if others or again else usual


def is_observed() -> bool:
    """True if a profiler, forward-mode AD, ``explain``, a mode, a transform or a tracer must see this call as an operator."""
    return (
        _dispatch_modes() > 0
        or (_function_modes() > 0 and not _only_default_devices())
        or _transforms()
        or _profiled()
        or _tracing() is not None
        or is_pre_dispatch()
        or forward_ad._current_level >= 0
        or plan.recording()
    )


def _only_default_devices() -> bool:
    """True if every function mode is a ``torch.device(...)`` context, which looks at the making of new tensors only."""
    return all(isinstance(torch._C._get_function_stack_at(i), DeviceContext) for i in range(_function_modes()))


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
