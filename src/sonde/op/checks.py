"""Argument checks at the public boundary: what was expected, what was given, what to do. Nothing is launched before they pass."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .torch_private import dispatch_modes, is_fake, transforming

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_jit_traces: Callable[[], bool] = torch.jit.is_tracing  # which has no annotations
REALS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def shapes(name: str, **operands: tuple[Any, str]) -> dict[str, int]:
    """Check tensors against patterns such as ``"B C H W"`` and return the size of each letter.

    A letter stands for one size wherever it occurs; a number stands for itself. All tensors must be floating point
    and on one device.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    device = None
    for argument, (tensor, pattern) in operands.items():
        letters = pattern.split()
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor [{', '.join(letters)}]; got {type(tensor).__name__}")
        dense(name, argument, tensor)
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name}: {argument} must be float16, bfloat16, float32 or float64; got {tensor.dtype}. "
                f"Convert it, for example with {argument}.float()"
            )
        if device is None:
            device, first = tensor.device, argument
        elif tensor.device != device:
            raise ValueError(
                f"{name}: {argument} must be on {device}, where {first} is; got {tensor.device}. Use {argument}.to({first}.device)"
            )
        if tensor.ndim != len(letters):
            raise ValueError(
                f"{name}: {argument} must have {len(letters)} dimensions [{', '.join(letters)}]; "
                f"got {tensor.ndim}: {list(tensor.shape)}"
            )
        for letter, size in zip(letters, tensor.shape):
            if letter not in sizes:
                sizes[letter], origin[letter] = int(letter) if letter.isdigit() else size, argument
            if size != sizes[letter]:
                known = [f"{k}={sizes[k]} (from {origin[k]})" for k in letters if origin.get(k, argument) != argument]
                expected = f" with {', '.join(known)}" if known else ""
                raise ValueError(f"{name}: {argument} must be [{', '.join(letters)}]{expected}; got {list(tensor.shape)}")
    return sizes


def broadcast(
    name: str,
    argument: str,
    tensor: Any,
    pattern: str,
    sizes: Mapping[str, int],
    device: torch.device,
    dtypes: Collection[torch.dtype] = REALS,
) -> None:
    """Check a tensor against a pattern of letters from `sizes`; a dimension may also be 1, to be broadcast."""
    letters = pattern.split()
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {argument} must be a tensor [{', '.join(letters)}]; got {kind(tensor)}. Use torch.as_tensor")
    dense(name, argument, tensor)
    if tensor.dtype not in dtypes:
        which = "float16, bfloat16, float32 or float64" if dtypes is FLOATS else "real numbers"
        raise TypeError(f"{name}: {argument} must be {which}; got {tensor.dtype}. Convert it, for example with .float()")
    if tensor.device != device:
        raise ValueError(f"{name}: {argument} must be on {device}, as other arguments are; got {tensor.device}. Use .to({device})")
    fits = tensor.ndim == len(letters)
    for letter, size in zip(letters, tensor.shape):
        fits = fits and (size == int(letter) if letter.isdigit() else size == 1 or size == sizes[letter])
    if not fits:
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters if not letter.isdigit())
        raise ValueError(f"{name}: {argument} must be [{', '.join(letters)}] with {known}, or 1; got {list(tensor.shape)}")


def mask(name: str, argument: str, tensor: Any, pattern: str, sizes: Mapping[str, int], device: torch.device) -> None:
    """Check a boolean tensor against a pattern whose letters stand for `sizes`."""
    letters = pattern.split()
    expected = f"[{', '.join(letters)}]"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {argument} must be a boolean tensor {expected}; got {kind(tensor)}")
    dense(name, argument, tensor)
    if tensor.dtype is not torch.bool:
        raise TypeError(f"{name}: {argument} must be boolean; got {tensor.dtype}. Use {argument}.bool()")
    if tensor.device != device:
        raise ValueError(f"{name}: {argument} must be on {device}, as other arguments are; got {tensor.device}. Use .to({device})")
    if tuple(tensor.shape) != tuple(sizes[letter] for letter in letters):
        known = ", ".join(f"{letter}={sizes[letter]}" for letter in letters)
        raise ValueError(f"{name}: {argument} must be {expected} with {known}; got {list(tensor.shape)}")


def positive(name: str, argument: str, value: Any) -> None:
    """A finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: {argument} must be a finite number > 0; got {kind(value)}")
    if not 0 < value < float("inf"):  # false for NaN
        raise ValueError(f"{name}: {argument} must be a finite number > 0; got {value}")


def dense(name: str, argument: str, tensor: Tensor) -> None:
    """Refuse tensors that are not strided memory, and say how to convert each kind."""
    if tensor.is_nested:
        raise TypeError(f"{name}: {argument} must be a dense tensor; got a nested one. Use {argument}.to_padded_tensor(0)")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: {argument} must be a dense tensor; got {tensor.layout}. Use {argument}.to_dense()")
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        return  # a failed attribute lookup on these takes longer than all other checks
    if hasattr(tensor, "device_mesh"):
        raise NotImplementedError(
            f"{name}: {argument} must be a tensor of one device; got a DTensor, and operators have no sharding rules yet. "
            f"Use {argument}.full_tensor(), or {argument}.to_local() where every rank works on its own part"
        )
    if hasattr(tensor, "get_mask"):
        raise TypeError(f"{name}: {argument} must be a dense tensor; got a MaskedTensor. Use {argument}.to_tensor(0)")


def readable(*tensors: Tensor) -> bool:
    """Whether the host may read values: no tracing, no planning, no functorch transform."""
    return in_memory(*tensors) and not transforming()


def in_memory(*tensors: Tensor) -> bool:
    """Whether tensors have values: no tracing, no planning."""
    if torch.compiler.is_compiling() or dispatch_modes():
        return False
    return all(t.device.type != "meta" and not is_fake(t) for t in tensors)


def refuse_scripting(*functions: Callable[..., Any]) -> None:
    """Make ``torch.jit.script`` fail with a useful message: it cannot compile these sources, and would blame an argument."""

    def refusal(name: str) -> Callable[..., Any]:
        def refuse() -> None:
            raise NotImplementedError(
                f"{name}: torch.jit.script cannot compile it; use torch.jit.trace, torch.compile or torch.export, "
                "or call it from a function decorated with torch.jit.ignore"
            )

        return refuse

    for function in functions:
        function.__prepare_scriptable__ = refusal(function.__name__)  # type: ignore[attr-defined]  # the hook that torch.jit asks


def count(name: str, argument: str, value: Any, least: int = 0) -> Any:
    """Check an integer of at least `least`; booleans do not count as integers."""
    if isinstance(value, Tensor) and _jit_traces() and value.ndim == 0 and value.dtype == torch.int64:
        return value  # a size, which torch.jit.trace records as a tensor
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        hint = f". Use int({argument})" if hasattr(value, "__index__") and not isinstance(value, bool) else ""  # of NumPy, say
        raise TypeError(f"{name}: {argument} must be an integer >= {least}; got {value!r} ({type(value).__name__}){hint}")
    if value < least:
        raise ValueError(f"{name}: {argument} must be an integer >= {least}; got {value}")
    return value


def counts(name: str, **values: Any) -> None:
    """Check integers of at least 1."""
    for argument, value in values.items():
        count(name, argument, value, least=1)


def divides(name: str, parts: str, whole: str, **values: int) -> None:
    """Check that the count called `parts` divides the one called `whole`."""
    if values[whole] % values[parts]:
        raise ValueError(f"{name}: {whole} must be a multiple of {parts}; got {values[whole]} and {values[parts]}")


def flags(name: str, **values: Any) -> None:
    for argument, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {argument} must be True or False; got {kind(value)}")


def probability(name: str, argument: str, value: Any, below_one: bool = False) -> None:
    """Check a number in [0, 1], or in [0, 1)."""
    interval = "[0, 1)" if below_one else "[0, 1]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {argument} must be a number in {interval}; got {kind(value)}")
    if not 0 <= value <= 1 or (below_one and value == 1):  # NaN is in neither
        raise ValueError(f"{name}: {argument} must be a number in {interval}; got {value}")


def choice(name: str, argument: str, value: Any, known: Collection[Any]) -> None:
    if not any(type(value) is type(x) and value == x for x in known):
        *most, last = map(repr, known)
        raise ValueError(f"{name}: {argument} must be {', '.join(most)} or {last}; got {kind(value)}")


def kind(value: Any) -> str:
    """A short description of a value that was passed, however large it is."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor {list(value.shape)} of {value.dtype}"
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def parted(function: Callable[..., Any]) -> tuple[int, list[str]]:
    """The number of positional parameters, and the names of the keyword-only ones other than `impl`."""
    known = inspect.signature(function).parameters.values()
    options = [p.name for p in known if p.kind is p.KEYWORD_ONLY]
    return len(known) - len(options), [name for name in options if name != "impl"]
