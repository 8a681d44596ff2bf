"""``sonde.memory.share_pool``: with stand-ins for CuPy and RMM on any machine, with CuPy itself on a GPU.

Where RMM is not installed, a stand-in with the interface that ``rmm.mr`` documents (26.10) takes its place.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

import sonde
from sonde import memory


class Blocks:
    """Stands in for torch's pool and records allocations and frees."""

    def __init__(self):
        self.held: dict[int, tuple[int, int, int]] = {}
        self.freed: list[tuple[int, ...]] = []

    def allocate(self, size, device, stream):
        self.held[address := 4096 * (len(self.held) + 1)] = size, device, stream
        return address

    def free(self, address, *streams):
        del self.held[address]
        self.freed.append((address, *streams))


@pytest.fixture
def blocks(monkeypatch):
    made = Blocks()
    monkeypatch.setattr(memory, "_Blocks", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy's allocator interface: an object holds both functions, and its ``malloc`` is set as the allocator."""
    state = SimpleNamespace(allocator="its own", stream=7)

    class PythonFunctionAllocator:
        def __init__(self, malloc, free):
            self.malloc = lambda size: malloc(size, 0)
            self.free = lambda address: free(address, 0)
            state.made = self

    module = ModuleType("cupy")
    module.cuda = SimpleNamespace(
        PythonFunctionAllocator=PythonFunctionAllocator,
        get_allocator=lambda: state.allocator,
        set_allocator=lambda allocator: setattr(state, "allocator", allocator),
        get_current_stream=lambda device: SimpleNamespace(ptr=state.stream),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return state


@pytest.fixture
def rmm(monkeypatch):
    """A stand-in for RMM's: a memory resource made of two callbacks, with streams passed by the ``__cuda_stream__`` protocol."""
    state = SimpleNamespace(resource="its own")

    class CallbackMemoryResource:
        def __init__(self, allocate_func, deallocate_func):
            self.allocate, self.deallocate = allocate_func, deallocate_func

    module = ModuleType("rmm")
    module.mr = SimpleNamespace(
        CallbackMemoryResource=CallbackMemoryResource,
        get_current_device_resource=lambda: state.resource,
        set_current_device_resource=lambda resource: setattr(state, "resource", resource),
    )
    monkeypatch.setitem(sys.modules, "rmm", module)
    return state


def test_cupy_allocates_from_the_pool_until_the_end_of_the_block(cupy, blocks):
    with sonde.memory.share_pool("cupy") as pool:
        address = cupy.allocator(1000)
        assert blocks.held == {address: (1000, 0, 7)}
        assert "allocates from the pool of torch" in repr(pool)
    assert cupy.allocator == "its own"
    cupy.stream = 9
    cupy.made.free(address)  # arrays may outlive the shared pool
    assert blocks.freed == [(address, 9)]


def test_share_without_a_block_and_close_twice(cupy, blocks):
    pool = sonde.memory.share_pool("cupy")
    assert cupy.allocator == cupy.made.malloc
    pool.close()
    cupy.allocator = "another"
    pool.close()
    assert cupy.allocator == "another"


def test_rmm_allocates_from_the_pool(rmm, blocks):
    stream, legacy = (SimpleNamespace(__cuda_stream__=lambda address=address: (0, address)) for address in (64, 1))
    with sonde.memory.share_pool("rmm"):
        address = rmm.resource.allocate(10, stream)
        other = rmm.resource.allocate(20, legacy)
        assert blocks.held == {address: (10, 0, 64), other: (20, 0, 0)}
        rmm.resource.deallocate(address, 10, legacy)
        assert blocks.freed == [(address, 0)]
    assert rmm.resource == "its own"


def test_bad_arguments_and_missing_libraries_are_errors(monkeypatch, cupy):
    with pytest.raises(ValueError, match="library must be 'cupy' or 'rmm'; got 'jax'"):
        sonde.memory.share_pool("jax")
    monkeypatch.setitem(sys.modules, "rmm", None)
    with pytest.raises(ValueError, match="rmm is not installed"):
        sonde.memory.share_pool("rmm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no GPU"):
        sonde.memory.share_pool("cupy")


def test_blocks_wait_for_the_streams_that_use_them(monkeypatch):
    """A stream is recorded on a block only if the block was allocated on another one."""
    entered, recorded, now = [], [], SimpleNamespace(stream=0)
    monkeypatch.setattr(memory, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(memory, "_stream", lambda address, device: address)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda block, stream: recorded.append(stream))
    blocks = memory._Blocks()
    blocks._device = lambda index: torch.device("cpu")
    blocks.free(blocks.allocate(100, 0, 0), 0)
    assert (entered, recorded) == ([], [])
    address = blocks.allocate(100, 0, 7)  # the library's stream is not torch's
    assert entered == [7]
    blocks.free(address, 7)
    assert recorded == [0]
    address, now.stream = blocks.allocate(100, 0, 0), 5
    blocks.free(address, 9)
    assert sorted(recorded[1:]) == [5, 9]
    blocks.free(blocks.allocate(0, 0, 0), 0)
    assert not blocks._held


@pytest.mark.gpu
def test_both_libraries_have_one_pool():
    """torch counts CuPy's memory and reuses what CuPy has freed."""
    cupy = pytest.importorskip("cupy")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with sonde.memory.share_pool("cupy"):
        array = cupy.zeros(1 << 24, dtype=cupy.uint8)
        assert torch.cuda.memory_allocated() - before == 1 << 24
        address = array.data.ptr
        del array
        assert torch.cuda.memory_allocated() == before
        assert torch.empty(1 << 24, dtype=torch.uint8, device="cuda").data_ptr() == address
    assert cupy.zeros(10).sum() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_memory_in_use_on_another_stream_is_not_handed_out(monkeypatch, recorded):
    """CuPy frees an array that a queued kernel on torch's stream still reads. Without ``record_stream`` the next allocation
    overwrites it."""
    cupy = pytest.importorskip("cupy")
    if not recorded:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    work, side = torch.randn(6144, 6144, device="cuda"), torch.cuda.Stream()
    work @ work
    torch.cuda.synchronize()
    with sonde.memory.share_pool("cupy"):
        array = cupy.ones(1 << 22, dtype=cupy.float32)
        seen = torch.from_dlpack(array)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(40):
                work @ work
            copy = seen.clone()
            del array, seen  # freed while the copy is still queued
        other = cupy.full(1 << 22, 2, dtype=cupy.float32)
        torch.cuda.synchronize()
        assert bool((copy == 1).all()) is recorded
        assert float(other[0]) == 2


@pytest.mark.gpu
def test_rmm_itself():
    """torch counts RMM's buffers and reuses what they free."""
    rmm = pytest.importorskip("rmm")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with sonde.memory.share_pool("rmm"):
        buffer = rmm.DeviceBuffer(size=1 << 24)
        assert torch.cuda.memory_allocated() - before == 1 << 24
        address = buffer.ptr
        del buffer
        assert torch.cuda.memory_allocated() == before
        assert torch.empty(1 << 24, dtype=torch.uint8, device="cuda").data_ptr() == address


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_rmm_frees_memory_in_use_on_another_stream(monkeypatch, recorded):
    """As with CuPy: a queued kernel on torch's stream reads memory that RMM has freed on its own stream."""
    rmm = pytest.importorskip("rmm")
    if not recorded:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    work, side = torch.randn(6144, 6144, device="cuda"), torch.cuda.Stream()
    work @ work
    torch.cuda.synchronize()
    with sonde.memory.share_pool("rmm"):
        buffer = rmm.DeviceBuffer(size=1 << 24)
        seen = torch.as_tensor(buffer, device="cuda").view(torch.uint8)
        seen.fill_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(40):
                work @ work
            copy = seen.clone()
            del buffer, seen
        other = rmm.DeviceBuffer(size=1 << 24)
        torch.as_tensor(other, device="cuda").view(torch.uint8).fill_(2)
        torch.cuda.synchronize()
        assert bool((copy == 1).all()) is recorded
