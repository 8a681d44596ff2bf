"""Memory of CPU results: reused once nothing references it, left alone while something does."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sonde
from sonde.op import allocator


@pytest.mark.parametrize("size", [(2, 3, 5), (1, 1, 1 << 20), (2, 3, 1001, 777)], ids=str)
def test_memory_of_results(size, monkeypatch):
    """Large pages are requested only for ranges inside a result, and do not change its contents."""
    allocator.forget()
    advice = []
    monkeypatch.setattr(allocator, "_madvise", lambda *given: advice.append(given))
    out = allocator.empty(size, torch.float32)
    assert out.shape == size
    assert out.is_contiguous()
    assert len(advice) == (out.nbytes >= 2 * allocator.LARGE_PAGE)
    for start, length, _ in advice:
        assert start % allocator.LARGE_PAGE == length % allocator.LARGE_PAGE == 0
        assert out.data_ptr() <= start < start + length <= out.data_ptr() + out.nbytes
    monkeypatch.undo()
    layout = torch.channels_last if len(size) == 4 else torch.contiguous_format
    out = allocator.zeros(size, torch.float64, layout)
    assert out.is_contiguous(memory_format=layout)
    assert out.dtype == torch.float64
    assert not out.any()


def test_no_large_pages_where_they_go_back_to_a_host(tmp_path):
    order = tmp_path / "order"
    assert not allocator._gives_pages_back(order)
    for words, given in (("9\n", True), ("0\n", True), ("11\n", False), (f"{2**32 - 1}\n", False), ("-1\n", False), ("", False)):
        order.write_text(words)
        assert allocator._gives_pages_back(order) == given


def test_memory_of_results_is_used_again():
    """The next result of the same number of bytes reuses it, whatever its shape, dtype and layout."""
    allocator.forget()
    out = allocator.empty((4, 8, 64, 512), torch.float32).fill_(3)
    place = out.data_ptr()
    assert allocator.empty((4, 8, 64, 512), torch.float32).data_ptr() != place
    del out
    again = allocator.zeros((8, 16, 64, 64), torch.float64, torch.channels_last)
    assert again.data_ptr() == place
    assert again.is_contiguous(memory_format=torch.channels_last)
    assert not again._is_view()
    assert not again.any()
    del again
    for count in (1 << 18, 1 << 19, 1 << 21):
        assert allocator.empty((count,), torch.float32).untyped_storage().nbytes() == 4 * count


KEEPERS = {
    "view": lambda x: x[5:9],
    "dtype": lambda x: x.view(torch.int32),
    "numpy": lambda x: x.numpy(),
    "storage": lambda x: x.untyped_storage(),
    "graph": lambda x: (x * torch.ones(1, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_memory_that_somebody_has_is_left_alone(keeper):
    allocator.forget()
    out = allocator.empty((1 << 20,), torch.float32).fill_(3)
    place, kept = out.data_ptr(), KEEPERS[keeper](out)
    del out
    other = allocator.empty((1 << 20,), torch.float32)
    assert other.data_ptr() != place
    del kept
    if keeper == "numpy":  # a storage that NumPy has read cannot be resized any more, so a new one is made
        assert allocator.empty((1 << 20,), torch.float32).untyped_storage().resizable()
    else:
        assert allocator.empty((1 << 20,), torch.float32).data_ptr() == place


def test_shared_memory_is_not_kept():
    """Shared memory is never reused: another process may still read it."""
    allocator.forget()
    out = allocator.empty((1 << 20,), torch.float32).share_memory_()
    place = out.data_ptr()
    del out
    again = allocator.empty((1 << 20,), torch.float32)
    assert not again.is_shared()
    assert again.data_ptr() != place


CHANGES = {
    "grown": lambda x: x.resize_(1 << 21),
    "freed": lambda x: x.untyped_storage().resize_(0),
    "read by NumPy": lambda x: x.numpy(),
    "shared": lambda x: x.share_memory_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_memory_that_was_changed_is_not_used_again(change):
    """Results can be resized like any tensor; memory that was resized, shared or read by NumPy is not reused."""
    allocator.forget()
    out = allocator.empty((1 << 20,), torch.float32)
    assert out.untyped_storage().resizable()
    CHANGES[change](out)
    del out
    again = allocator.empty((1 << 20,), torch.float32).fill_(1)
    storage = again.untyped_storage()
    assert storage.nbytes() == 4 << 20
    assert storage.resizable()
    assert not storage.is_shared()
    assert len(allocator._kept) == 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_results_grow_where_torch_writes_into_them():
    """``out=`` of torch's functions resizes a result on reused memory, and the next result is right; done twice."""
    images, samples = torch.rand(1, 64, 32, 32), torch.rand(1, 4096, 2, 2)
    weights = torch.rand(1, 1, 4096, 2)
    for _ in range(2):
        out = sonde.sample_sum(images, samples, weights)
        assert out.nbytes >= allocator.SMALLEST
        want = out.clone()
        torch.cat([want, want, want], out=out)
        assert torch.equal(out, torch.cat([want, want, want]))
        assert torch.equal(sonde.sample_sum(images, samples, weights), want)


def test_an_index_knows_its_points_from_later_ones():
    """An index rejects points that reuse the address of the points it was built from."""
    pytest.importorskip("numba")
    queries, anchors, index, places = torch.rand(9000, 3), torch.rand(9000, 3), None, []
    for _ in range(3):
        points = sonde.knn_aggregate(queries, anchors, torch.rand(9000, 3), 4, impl="numba")
        if index is not None:
            with pytest.raises(ValueError, match="index"):
                sonde.knn(queries, points, 3, index=index, impl="numba")
        places.append(points.data_ptr())
        index = sonde.PointIndex.build(points)
        del points
    assert len(set(places)) < 3


def test_memory_is_kept_within_bounds():
    allocator.forget()
    for size in (allocator.SMALLEST - 8, allocator.ROOM + 8):
        allocator.empty((size // 8,), torch.float64)
        assert not allocator._kept
    for mib in (60, 30, 20, 50, 10, 128, 40, 1):
        allocator.empty((mib, 1 << 20), torch.uint8)
        assert 0 < sum(kept.size for kept in allocator._kept) <= allocator.ROOM
    allocator.forget()
    assert not allocator._kept


def test_threads_share_no_memory():
    allocator.forget()

    def work(number: int) -> bool:
        right = True
        for _ in range(200):
            out = allocator.empty((1 << 18,), torch.float32).fill_(number)
            right = right and bool((out[:: 1 << 12] == number).all())
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_results_are_not_written_again():
    """Later calls of an operator never write to a result that is still referenced."""
    pytest.importorskip("numba")
    images, samples = torch.rand(1, 64, 32, 32), torch.rand(1, 4096, 2, 2)
    weights = torch.rand(1, 1, 4096, 2)
    first = sonde.sample_sum(images, samples, weights, impl="numba")
    assert first.nbytes >= allocator.SMALLEST
    copy = first.clone()
    for _ in range(3):
        sonde.sample_sum(2 * images, samples, weights, impl="numba")
    assert torch.equal(first, copy)
