"""Every private name of torch that we use, and what happens where it is missing.

If a release of torch moves one of them, no import breaks and no bit of a result changes. Nearly all have a slower public
substitute. Where there is none, a call that needs the name raises ``NotImplementedError`` and names it, or behaves as said here:

- ``torch.func`` inside of ``torch.compile`` needs ``enable_single_level_autograd_function``,
- ``torch.func.functionalize`` needs ``peek_interpreter_stack``,
- an index of points inside of ``torch.vmap`` needs ``maybe_get_level``,
- without ``_len_torch_dispatch_stack`` a stale index of points gives NaN instead of an error, as it does on GPUs,
- commands that plan for an absent device need ``FakeTensorMode``.

``missing()`` lists the names that this torch lacks, with their consequences; ``sonde doctor`` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

MISSING: dict[str, str] = {}  # name: the consequence


def _find(path: str, without: str, instead: Any = None) -> Any:
    try:
        with suppress(ImportError):
            import_module(f"torch.{path.rpartition('.')[0]}")  # a submodule is no attribute of its package until it is imported
        return attrgetter(path)(torch)
    except AttributeError:
        MISSING[f"torch.{path}"] = without
        return instead


_UNSEEN = "every call goes through torch's dispatcher, since nobody can tell whether it is observed"

# what may observe a call
_dispatch_modes = _find("_C._len_torch_dispatch_stack", f"{_UNSEEN}; a stale index of points gives NaN, not an error")
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

# functorch
_innermost = _find("_C._functorch.peek_interpreter_stack", "torch.func.functionalize is refused")
_functionalize = _find("_C._functorch.TransformType.Functionalize", "the transform is recognised by its name")
_single_level = _find("autograd.function._SingleLevelFunction", "the base class's apply is used")
_in_single_level = _find(
    "_functorch.autograd_function.enable_single_level_autograd_function", "torch.func is refused inside of torch.compile"
)
_is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", "a slower check is used")
_is_batched = _find("_C._functorch.is_batchedtensor", "a slower check is used")
_unwrap = _find("_C._functorch.get_unwrapped", "a slower check is used")
_level_of = _find("_C._functorch.maybe_get_level", "an index of points is refused inside of torch.vmap")
_clear_transforms = _find(
    "_functorch.pyfunctorch.temporarily_clear_interpreter_stack", "hashes of points are made inside of transforms"
)

# faster than the public way
deterministic: Callable[[], bool] = _find(
    "_C._get_deterministic_algorithms", "a slower check is used", torch.are_deterministic_algorithms_enabled
)
TensorGuards: Any = _find("_C._dynamo.guards.TensorGuards", "calls are looked up by a key, which takes three times as long")
_storage_use_count = _find("_C._storage_Use_Count", "memory of CPU results is not reused")
_storage_address = _find("UntypedStorage._cdata", "memory of CPU results is not reused")
_unpack_dual = _find("_VF._unpack_dual", "a slower check is used")
_is_zero = _find("Tensor._is_zerotensor", "tensors of zeros without memory are recognised by their address")
_version_of = _find("Tensor._version", "writes to points are detected by their hash alone")
_empty_strided_cpu = _find("_C._dynamo.guards._empty_strided_cpu", "results take longer to allocate")
_empty_strided_cuda = _find("_C._dynamo.guards._empty_strided_cuda", "results take longer to allocate")
_raw_stream = torch.backends.cuda.is_built() and _find("_C._cuda_getCurrentRawStream", "a shared pool takes longer to allocate")
flash_attention = _find("ops.aten._scaled_dot_product_flash_attention_for_cpu", "attention on CPUs takes several times as long")
flash_attention_backward = _find(
    "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "gradients of attention on CPUs take several times as long"
)
_below_autograd = _find("_C._AutoDispatchBelowAutograd", "each operator calls a second one that does its work")


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
    """True under a dispatch mode, or if that cannot be known."""
    return _dispatch_modes is None or _dispatch_modes() > 0


def forward_mode(args: Sequence) -> bool:
    """True inside a ``forward_ad.dual_level``; if that cannot be known, True if one of `args` has a tangent."""
    if _level is not None:
        return forward_ad._current_level >= 0
    try:
        return any(map(has_tangent, args))
    except RuntimeError:  # torch.vmap maps one of them, and mapped tensors hide their tangents
        return False


def is_pre_dispatch() -> bool:
    """True while tracing above autograd, as ``torch.export`` does."""
    return _included is not None and _pre_dispatch_key is not None and _included(_pre_dispatch_key)


def _only_default_devices() -> bool:
    """True if every function mode is a ``torch.device(...)`` context, which only affects the creation of tensors."""
    if _function_mode_at is None or _device_context is None:
        return False
    return all(isinstance(_function_mode_at(i), _device_context) for i in range(_function_modes()))


def _transforms_by_stack() -> bool:
    return _innermost() is not None


transforming: Callable[[], bool] = _transforms or (_transforms_by_stack if _innermost is not None else lambda: False)


def functionalizing() -> bool:
    """True if the innermost transform is ``functionalize``, which has no rule for an ``autograd.Function``."""
    innermost = _innermost and _innermost()
    if innermost is None:
        return False
    return innermost.key().name == "Functionalize" if _functionalize is None else innermost.key() == _functionalize


def refusing_functionalize(apply: Callable) -> Callable:
    """``apply`` with a clear error under ``functionalize``, in case :func:`functionalizing` could not detect it."""
    if _innermost is not None:
        return apply

    def applied(*args):
        try:
            return apply(*args)
        except RuntimeError as problem:
            if "Functionalize" not in str(problem):
                raise
            raise NotImplementedError(
                "this torch lacks torch._C._functorch.peek_interpreter_stack, without which torch.func.functionalize cannot be "
                "served; use impl='reference'"
            ) from problem

    return applied


def is_wrapped(x: Tensor) -> bool:
    """True for a tensor that a torch.func transform has wrapped."""
    return torch.func.debug_unwrap(x) is not x if _is_wrapped is None else _is_wrapped(x)


def is_batched(x: Tensor) -> bool:
    """True for a tensor that ``torch.vmap`` maps."""
    return torch.func.debug_unwrap(x, recurse=False).ndim > x.ndim if _is_batched is None else _is_batched(x)


def unwrapped(x: Tensor) -> tuple[Tensor, set[int]]:
    """The tensor inside all wrappers of transforms, and the levels of ``torch.vmap`` that map it."""
    levels: set[int] = set()
    while is_wrapped(x):
        if is_batched(x):
            if _level_of is None:
                raise NotImplementedError(
                    "PointIndex: this torch lacks torch._C._functorch.maybe_get_level, without which an index cannot be compared "
                    "with points that torch.vmap maps; call without index="
                )
            levels.add(_level_of(x))
        x = torch.func.debug_unwrap(x, recurse=False) if _unwrap is None else _unwrap(x)
    return x, levels


def outside_of_transforms(function: Callable[..., Any], *args: Tensor) -> Any:
    """``function(*args)`` with transforms suspended: neither the tensors nor the result are wrapped."""
    if _clear_transforms is None:
        found = function(*args)
        return unwrapped(found)[0] if isinstance(found, Tensor) else found
    with _clear_transforms():
        return function(*args)


_FAKE = "_subclasses.fake_tensor"  # takes long to import


@cache
def _fake(name: str, without: str) -> Any:
    return _find(f"{_FAKE}.{name}", without)


def is_fake(x: Tensor) -> bool:
    """True for a fake tensor, which has no memory. There are none until their module is imported."""
    if type(x) is Tensor or f"torch.{_FAKE}" not in sys.modules:
        return False
    kind = _fake_tensor()
    return type(x) is not torch.nn.Parameter if kind is None else isinstance(x, kind)


def _fake_tensor() -> Any:
    return _fake("FakeTensor", "subclasses of Tensor are treated as if they had no memory")


def _fake_tensor_mode() -> Any:
    return _fake("FakeTensorMode", "commands that plan allocate their arguments, on a device that must exist")


def fake_mode() -> Any:
    """A context in which new tensors are fake; without FakeTensorMode, one that does nothing."""
    kind = _fake_tensor_mode()
    return nullcontext() if kind is None else kind()


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call the function while it traces, and put the result into the graph.

    ``torch.compiler.assume_constant_result`` does the same, but imports Dynamo. If a release uses another mark, the function breaks
    the graph.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def missing() -> dict[str, str]:
    """The names that this torch lacks, with their consequences."""
    _fake_tensor(), _fake_tensor_mode()  # they are looked up lazily
    return MISSING


def has_tangent(x: Any) -> bool:
    """True if `x` is a dual tensor. Needed because graphs may enter forward mode without any call in Python."""
    if not isinstance(x, Tensor):
        return False
    return (forward_ad.unpack_dual(x, level=0) if _unpack_dual is None else _unpack_dual(x, level=0))[1] is not None


def _is_zero_by_address(x: Tensor) -> bool:
    """The public substitute: only a tensor of zeros has elements, a real device, and no address."""
    if (type(x) is not Tensor and type(x) is not torch.nn.Parameter) or x.layout is not torch.strided or x.is_nested:
        return False
    try:
        return x.data_ptr() == 0 and x.numel() > 0 and x.device.type != "meta"
    except RuntimeError:  # a tensor that a transform has wrapped
        return False


is_zero: Callable[[Tensor], bool] = _is_zero or _is_zero_by_address  # forward mode makes tensors of zeros without memory


def version(x: Tensor) -> int:
    """The version counter of `x`, which counts writes; −1 if it has none."""
    return -1 if _version_of is None or x.is_inference() else x._version


def storage_owners(storage: torch.UntypedStorage) -> int:
    """The number of C++ owners of a storage; only call it if ``CAN_COUNT_OWNERS``."""
    return _storage_use_count(storage._cdata)


CAN_COUNT_OWNERS = _storage_use_count is not None and _storage_address is not None
CAN_SKIP_AUTOGRAD = _below_autograd is not None


def below_autograd() -> Any:
    """A context in which the dispatcher skips autograd."""
    return _below_autograd() if CAN_SKIP_AUTOGRAD else torch.no_grad()


def current_stream(device: int) -> int:
    """The address of torch's current stream on this device; 0 is the default stream."""
    found: int = _raw_stream(device) if _raw_stream else torch.cuda.current_stream(device).cuda_stream
    return found


def one_level(function: type[torch.autograd.Function]) -> Callable:
    """``function.apply`` for calls from torch.func through the dispatcher: it must record one level of transforms only."""
    if _in_single_level is None:
        name = function.__name__

        def refuse(*args: Any) -> Any:
            raise NotImplementedError(
                f"{name}: this torch lacks torch._functorch.autograd_function.enable_single_level_autograd_function, without which "
                "torch.func cannot be served inside of torch.compile; use impl='reference', or torch.func without torch.compile"
            )

        return refuse
    level: Any = function
    if _single_level is not None:
        parts = {part: staticmethod(getattr(function, part)) for part in ("forward", "setup_context", "backward")}
        level = type(function.__name__, (_single_level,), parts)
    run = level.apply if _single_level is not None else unbound_apply(function)

    def apply(*args):
        with _in_single_level():
            return run(*args)

    return apply


def unbound_apply(function: type[torch.autograd.Function]) -> Callable:
    """``function.apply`` without binding the signature, which costs as much as a launch. No transform may be active."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def empty_strided(kind: str) -> Callable | None:
    """The allocator of compiled graphs: ``(size, strides, dtype)`` → an uninitialised tensor, in half ``torch.empty``'s time."""
    return {"cpu": _empty_strided_cpu, "cuda": _empty_strided_cuda}.get(kind)
