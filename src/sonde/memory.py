"""One pool of GPU memory for PyTorch and another library.

Two caching allocators in one process do not share freed memory: what one caches, the other cannot use. With a shared pool, CuPy or
RMM allocates from PyTorch's caching allocator instead. Memory freed by one library can be reused by the other,
``torch.cuda.memory_stats`` counts both, and few allocations reach the CUDA driver, where they would synchronize with the device.
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

_cuda: Any = torch.cuda  # as Any, because its streams have no annotations

Library = Literal["cupy", "rmm"]


class SharedPool:
    """Returned by :func:`share_pool`. The pool is shared until :meth:`close` is called or the ``with`` block ends."""

    def __init__(self, library: Library, restore: Callable[[], None]) -> None:
        self.library, self._restore = library, restore
        self.closed = False

    def close(self) -> None:
        """Restore the library's previous allocator. Arrays allocated from the shared pool remain valid."""
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
    """Let CuPy or RMM (and with it cuML and cuDF) allocate from PyTorch's pool: from now on, or inside a ``with`` block.

    Convention:
        A block is allocated on the library's current stream. After it is freed, it is not reused until the work already queued on
        that stream and on the current streams of both libraries has finished. If a kernel on any other stream uses the memory,
        call ``Tensor.record_stream``, as for any tensor. Neither allocating nor freeing waits for the device.

    Args:
        library: ``"cupy"`` sets CuPy's allocator; ``"rmm"`` sets RMM's resource of the current device.

    Returns:
        A context manager with a ``close`` method. Ignore it to share the pool until the process ends.

    Example:
        >>> import sonde
        >>> with sonde.memory.share_pool("cupy"):  # doctest: +SKIP
        ...     array = cupy.empty(1 << 20)  # allocated by torch
    """
    if library not in _SHARING:
        raise ValueError(f"share_pool: library must be {' or '.join(map(repr, _SHARING))}; got {library!r}")
    try:
        module = import_module(library)
    except ImportError as problem:
        raise ValueError(f"share_pool: {library} is not installed; install it, or do not call share_pool") from problem
    if not torch.cuda.is_available():
        raise ValueError("share_pool: there is no GPU, so there is no memory to share")
    return SharedPool(library, _SHARING[library](module))


class _Blocks:
    """Blocks of torch's pool that another library holds, keyed by address."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[torch.Tensor, int, int]] = {}  # the tensor that owns the block, its device and stream
        self._device: Callable[[int], torch.device] = cache(lambda index: torch.device("cuda", index))

    def allocate(self, size: int, device: int, stream: int) -> int:
        """Allocate a block on this stream and return its address. The device need not be the current one."""
        if size == 0:
            return 0
        if stream == current_stream(device):  # the usual case, without the cost of switching streams
            block = torch.empty(size, dtype=torch.uint8, device=self._device(device))
        else:
            with torch.cuda.stream(_stream(stream, device)):
                block = torch.empty(size, dtype=torch.uint8, device=self._device(device))
        address = block.data_ptr()
        self._held[address] = block, device, stream
        return address

    def free(self, address: int, stream: int) -> None:
        """Free a block that kernels already queued on the library's stream or on torch's current one may still use."""
        found = self._held.pop(address, None)
        if found is None:  # 0 bytes were allocated
            return
        block, device, made_for = found
        torchs = current_stream(device)
        if stream == made_for == torchs:
            return
        for each in {stream, torchs} - {made_for}:
            block.record_stream(_stream(each, device))


def _stream(address: int, device: int) -> Any:
    """torch's object for a CUDA stream of another library; address 0 is the default stream in both."""
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
    """The stream's address, by the ``__cuda_stream__`` protocol. 1 also means the default stream (cudaStreamLegacy)."""
    address = int(stream.__cuda_stream__()[1])
    return 0 if address == 1 else address


_SHARING: dict[str, Callable[[Any], Callable[[], None]]] = {"cupy": _share_with_cupy, "rmm": _share_with_rmm}


def __dir__() -> list[str]:
    return __all__
