"""One pool of GPU memory for PyTorch and another library.

A library that allocates for itself keeps what was freed, and the other cannot have it. With a shared pool, arrays of CuPy or RMM
lie in blocks of PyTorch's caching allocator: what one frees the other may have, ``torch.cuda.memory_stats`` counts both, and
neither asks the driver, which would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import Any, Literal

import torch

from .op.torch_private import current_stream

__all__ = ["SharedPool", "share_pool"]

_cuda: Any = torch.cuda  # whose streams have no annotations

Library = Literal["cupy", "rmm"]


class SharedPool:
    """What :func:`share_pool` returns: in force until :meth:`close`, or the end of its ``with`` block."""

    def __init__(self, library: Library, restore: Callable[[], None]) -> None:
        self.library, self._restore = library, restore
        self.closed = False

    def close(self) -> None:
        """Give the library back the allocator that it had. Arrays that it allocated meanwhile stay what they are."""
        if not self.closed:
            self.closed = True
            self._restore()

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.library} {'has its own pool again' if self.closed else 'allocates from the pool of torch'}>"


def share_pool(library: Library) -> SharedPool:
    """Let CuPy or RMM (and with it cuML and cuDF) allocate from PyTorch's pool: from now on, or inside of a ``with`` block.

    Convention:
        Memory belongs to the stream on which the library allocates it. When it is freed, what the current streams of both libraries
        still do with it is waited for, on the device, before anybody gets it again. A kernel on a third stream must be told
        of, as always: ``Tensor.record_stream``. Neither an allocation nor its end waits for the device.

    Args:
        library: ``"cupy"`` sets CuPy's allocator; ``"rmm"`` sets RMM's resource of the current device.

    Returns:
        What ends it: use it in a ``with`` statement, or keep it for good.

    Example:
        >>> import sonde
        >>> with sonde.memory.share_pool("cupy"):  # doctest: +SKIP
        ...     array = cupy.empty(1 << 20)  # lies in a block of torch's
    """
    if library not in _SHARING:
        raise ValueError(f"share_pool: library must be {' or '.join(map(repr, _SHARING))}; got {library!r}")
    try:
        module = import_module(library)
    except ImportError as problem:
        raise ValueError(f"share_pool: {library} is not installed; install it, or leave its allocations to itself") from problem
    if not torch.cuda.is_available():
        raise ValueError("share_pool: there is no GPU whose memory could be shared")
    return SharedPool(library, _SHARING[library](module))


class _Blocks:
    """Blocks of torch's pool that another library has, by their address."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[torch.Tensor, int, int]] = {}  # what keeps the block, its device, the stream it is for
        self._device: Callable[[int], torch.device] = cache(lambda index: torch.device("cuda", index))

    def allocate(self, size: int, device: int, stream: int) -> int:
        """A block for work on this stream. The device need not be the current one."""
        if size == 0:
            return 0
        if stream == current_stream(device):  # as nearly always
            block = torch.empty(size, dtype=torch.uint8, device=self._device(device))
        else:
            with torch.cuda.stream(_stream(stream, device)):
                block = torch.empty(size, dtype=torch.uint8, device=self._device(device))
        address = block.data_ptr()
        self._held[address] = block, device, stream
        return address

    def free(self, address: int, stream: int) -> None:
        """The library is done with it, but for what its own stream and torch's current one still have to do."""
        found = self._held.pop(address, None)
        if found is None:  # an allocation of no bytes
            return
        block, device, made_for = found
        torchs = current_stream(device)
        if stream == made_for == torchs:
            return
        for each in {stream, torchs} - {made_for}:
            block.record_stream(_stream(each, device))


def _stream(address: int, device: int) -> Any:
    """Another library's stream, as torch has it; 0 is the default one of both."""
    return _cuda.ExternalStream(address, device=device) if address else _cuda.default_stream(device)


def _share_with_cupy(cupy: Any) -> Callable[[], None]:
    blocks, before = _Blocks(), cupy.cuda.get_allocator()

    def allocate(size: int, device: int) -> int:
        return blocks.allocate(size, device, cupy.cuda.get_current_stream(device).ptr)

    def free(address: int, device: int) -> None:
        blocks.free(address, cupy.cuda.get_current_stream(device).ptr)

    mine = cupy.cuda.PythonFunctionAllocator(allocate, free)
    cupy.cuda.set_allocator(mine.malloc)
    return lambda: cupy.cuda.set_allocator(before)


def _share_with_rmm(rmm: Any) -> Callable[[], None]:
    blocks, device = _Blocks(), torch.cuda.current_device()
    before = rmm.mr.get_current_device_resource()

    def allocate(size: int, stream: Any) -> int:
        return blocks.allocate(size, device, _address(stream))

    def free(address: int, size: int, stream: Any) -> None:
        blocks.free(address, _address(stream))

    rmm.mr.set_current_device_resource(rmm.mr.CallbackMemoryResource(allocate, free))
    return lambda: rmm.mr.set_current_device_resource(before)


def _address(stream: Any) -> int:
    """By the protocol that CUDA's Python libraries have for streams. 1 is another name of the default one."""
    address = int(stream.__cuda_stream__()[1])
    return 0 if address == 1 else address


_SHARING: dict[str, Callable[[Any], Callable[[], None]]] = {"cupy": _share_with_cupy, "rmm": _share_with_rmm}


def __dir__() -> list[str]:
    return __all__
