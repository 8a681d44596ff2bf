"""Every private name of torch that we use, each with the public way that serves where it is missing.

A release of torch that moves one of them costs time, never a result. ``MISSING`` has those that this torch does not know, with what
that costs; ``sonde doctor`` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

MISSING: dict[str, str] = {}  # name: what is done without it


def _find(path: str, without: str, instead: Any = None) -> Any:
    try:
        with suppress(ImportError):
            import_module(f"torch.{path.rpartition('.')[0]}")  # a submodule is no attribute until somebody imports it
        return attrgetter(path)(torch)
    except AttributeError:
        MISSING[f"torch.{path}"] = without
        return instead


_UNSEEN = "every call goes through torch's dispatcher, since nobody can tell whether it is observed"

# who may observe a call
_dispatch_modes = _find("_C._len_torch_dispatch_stack", _UNSEEN)
_function_modes = _find("_C._len_torch_function_stack", _UNSEEN)
_profiling = _find("autograd._profiler_enabled", _UNSEEN)
_tracing_state = _find("_C._get_tracing_state", _UNSEEN)
_level = _find("autograd.forward_ad._current_level", _UNSEEN)
_included = _find("_C._dispatch_tls_is_dispatch_key_included", _UNSEEN)
_pre_dispatch_key = _find("_C.DispatchKey.PreDispatch", _UNSEEN)
_transforms = _find("_C._are_functorch_transforms_active", _UNSEEN)
_CAN_SEE = not MISSING

_function_mode_at = _find("_C._get_function_stack_at", "calls under torch.device(...) go through torch's dispatcher")
_device_context = _find("utils._device.DeviceContext", "calls under torch.device(...) go through torch's dispatcher")

# of functorch
transforming: Callable[[], bool] = _transforms or (lambda: False)
_innermost = _find("_C._functorch.peek_interpreter_stack", "torch.func.functionalize does not work")
_functionalize = _find("_C._functorch.TransformType.Functionalize", "torch.func.functionalize does not work")
_single_level = _find("autograd.function._SingleLevelFunction", "torch.func does not work inside torch.compile")

_UNSEEN_LEVELS = "an index of points is not compared with points that torch.vmap maps"
_is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", _UNSEEN_LEVELS)
_is_batched = _find("_C._functorch.is_batchedtensor", _UNSEEN_LEVELS)
_level_of = _find("_C._functorch.maybe_get_level", _UNSEEN_LEVELS)
_unwrap = _find("_C._functorch.get_unwrapped", _UNSEEN_LEVELS)
_CAN_UNWRAP = None not in (_is_wrapped, _is_batched, _level_of, _unwrap)
_clear_transforms = _find("_functorch.pyfunctorch.temporarily_clear_interpreter_stack", _UNSEEN_LEVELS)

# shorter ways
deterministic: Callable[[], bool] = _find(
    "_C._get_deterministic_algorithms", "a slower question is asked", torch.are_deterministic_algorithms_enabled
)
TensorGuards: Any = _find("_C._dynamo.guards.TensorGuards", "calls are looked up by a key, which takes three times as long")
storage_use_count: Callable[[int], int] | None = _find("_C._storage_Use_Count", "memory of CPU results is not used again")
_unpack_dual = _find("_VF._unpack_dual", "a slower question is asked")
_is_zero = _find("Tensor._is_zerotensor", "tensors of zeros that forward mode makes are not filled")
_below_autograd = _find("_C._AutoDispatchBelowAutograd", "operators call each other once more")


def observed() -> bool:
    """True if a mode, a transform, a tracer, a profiler or forward-mode AD must see this call."""
    return (
        not _CAN_SEE
        or _dispatch_modes() > 0
        or (_function_modes() > 0 and not _only_default_devices())
        or _transforms()
        or _profiling()
        or _tracing_state() is not None
        or _included(_pre_dispatch_key)
        or forward_ad._current_level >= 0
    )


def dispatch_modes() -> bool:
    """True under a dispatch mode; also where nobody can tell."""
    return _dispatch_modes is None or _dispatch_modes() > 0


def forward_mode() -> bool:
    """True inside of a ``forward_ad.dual_level``."""
    return _level is not None and forward_ad._current_level >= 0


def is_pre_dispatch() -> bool:
    """True while a trace is made above autograd, as ``torch.export`` does."""
    return _included is not None and _pre_dispatch_key is not None and _included(_pre_dispatch_key)


def _only_default_devices() -> bool:
    """True if every function mode is a ``torch.device(...)`` context, which looks at the making of new tensors only."""
    if _function_mode_at is None or _device_context is None:
        return False
    return all(isinstance(_function_mode_at(i), _device_context) for i in range(_function_modes()))


def functionalizing() -> bool:
    """True if the innermost transform is ``functionalize``, which has no rule for an ``autograd.Function``."""
    innermost = _innermost and _innermost()
    return innermost is not None and innermost.key() == _functionalize


def is_wrapped(x: Tensor) -> bool:
    """True inside of a torch.func transform that has this tensor in hand."""
    return _CAN_UNWRAP and _is_wrapped(x)


def is_batched(x: Tensor) -> bool:
    """True where ``torch.vmap`` maps this tensor."""
    return _CAN_UNWRAP and _is_batched(x)


def unwrapped(x: Tensor) -> tuple[Tensor, set[int]]:
    """The tensor that transforms have wrapped, and the levels of ``torch.vmap`` that map it."""
    levels: set[int] = set()
    while is_wrapped(x):
        if _is_batched(x):
            levels.add(_level_of(x))
        x = _unwrap(x)
    return x, levels


def without_transforms() -> Any:
    """A context in which no transform wraps what is computed."""
    return nullcontext() if _clear_transforms is None else _clear_transforms()


def is_fake(x: Tensor) -> bool:
    """True for a tensor of a trace, which has no memory; their module takes long to import, and without it there are none."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(x, kind)


def fake_mode() -> Any:
    """A context in which tensors take no memory, if there is one."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        return nullcontext()
    return FakeTensorMode()


def has_tangent(x: Any) -> bool:
    """True if `x` is a dual tensor; graphs enter forward mode without Python's noticing."""
    if not isinstance(x, Tensor):
        return False
    tangent = forward_ad.unpack_dual(x).tangent if _unpack_dual is None else _unpack_dual(x, level=0)[1]
    return tangent is not None


def is_zero(x: Tensor) -> bool:
    """True for a tensor of zeros without memory, which forward mode makes."""
    return _is_zero is not None and _is_zero(x)


CAN_SKIP_AUTOGRAD = _below_autograd is not None


def below_autograd() -> Any:
    """A context in which operators are dispatched as if autograd were done with them."""
    return _below_autograd() if CAN_SKIP_AUTOGRAD else torch.no_grad()


def one_level(function: type[torch.autograd.Function]) -> Callable:
    """``function.apply`` for where torch.func calls us through the dispatcher: it wants the level that it has in hand recorded."""
    if _single_level is None:
        return function.apply
    from torch._functorch.autograd_function import enable_single_level_autograd_function

    parts = {part: staticmethod(getattr(function, part)) for part in ("forward", "setup_context", "backward")}
    level: Any = type(function.__name__, (_single_level,), parts)

    def apply(*args):
        with enable_single_level_autograd_function():
            return level.apply(*args)

    return apply


def unbound_apply(function: type[torch.autograd.Function]) -> Callable:
    """``function.apply`` without binding a signature, which costs as much as a launch; no transform may be active."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def empty_strided(kind: str) -> Callable | None:
    """``(size, strides, dtype)`` → an uninitialised tensor, in half the time of ``torch.empty``: what compiled graphs call."""
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) if TensorGuards is not None else None
