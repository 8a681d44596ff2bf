"""What is special about the GPU's search: its boxes, levels, ties and pairs. In the interpreter where there is no GPU."""

import pytest
import torch

import sonde
from helpers.neighbours import neighbours, padded
from sonde.points._search import arguments

pytest.importorskip("triton")
import triton.language as tl

from helpers.operators import HAS_GPU
from sonde.points._search import gpu as passes
from sonde.points._search import gpu_pairs, gpu_walk
from sonde.points._search.index import gpu_kernels as index_kernels

DEVICE = "cuda" if HAS_GPU else "cpu"


def build(*given) -> tuple:
    """The index of points and their offsets, on the device."""
    given = [None if t is None else t.to(DEVICE) for t in given]
    return index_kernels.build(*given).bind()(*given)


@pytest.fixture
def boxes(monkeypatch):
    """Forces the search by boxes, however few points there are."""
    monkeypatch.setattr(arguments, "PAIRS", 0)
    monkeypatch.setattr(arguments, "FEW", 0)


@pytest.fixture
def three_levels(monkeypatch, boxes):
    if HAS_GPU:
        pytest.skip("a compiled kernel has its constants")
    for module in (index_kernels, gpu_walk):
        monkeypatch.setattr(module, "FLAT", tl.constexpr(1024))


def lattice(M: int, N: int, D: int, dtype=torch.float32, seed: int = 0):
    """Coordinates with few distinct values, so that ties are everywhere; some points are non-finite."""
    g = torch.Generator().manual_seed(seed)
    queries, points = (torch.randint(0, 4, (n, D), generator=g).to(dtype) / 2 for n in (M, N))
    points[N // 2], points[N // 3] = torch.nan, torch.inf
    return queries, points


def check_index(points, order, ordered, boxes):
    """Every level bounds the one below it, and no box includes non-finite points."""
    N, count = points.shape[0], index_kernels.levels(points.shape[0])
    assert order.sort()[0].tolist() == list(range(N))
    torch.testing.assert_close(ordered, points[order.long()], rtol=0, atol=0, equal_nan=True)
    start = 0
    for nodes, span in zip(count, (32, 1024, 32768)):
        for i in range(nodes):
            inside = ordered[i * span : (i + 1) * span]
            inside = inside[inside.isfinite().all(1)]
            low, high = boxes[start + i]
            if len(inside):
                assert torch.equal(low, inside.amin(0))
                assert torch.equal(high, inside.amax(0))
            else:
                assert (low > high).all()
        start += nodes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("D", [1, 2, 3])
def test_index(D, dtype):
    for N in (1, 33, 1100):
        points = torch.randn(2, N, D, dtype=dtype)
        if N > 1:
            points[:, N // 2], points[1, 3] = torch.nan, -torch.inf
        order, ordered, made = (t.cpu() for t in build(points, None))
        for b in range(2):
            check_index(points[b], order[b], ordered[b], made[b])
            finite = ordered[b].isfinite().all(1)
            assert (finite[:-1] >= finite[1:]).all()  # non-finite points come last


def test_an_outlier_takes_no_room():
    """A few distant outliers do not enlarge the leaves of a small cloud."""
    points = torch.rand(1, 2000, 3)
    points[0, ::100] *= 1e6
    made = build(points, None)[2].cpu()
    size = (made[0, :62, 1] - made[0, :62, 0]).amax(1)
    assert size.median() < 0.6


def test_segments_stay_together():
    points, offsets = torch.randn(1, 300, 3), torch.tensor([0, 10, 10, 150, 300])
    order = build(points, offsets)[0][0].cpu()
    for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        assert order[a:b].sort()[0].tolist() == list(range(a, b))


@pytest.mark.parametrize("k", [1, 7, 16, 64])
@pytest.mark.parametrize("D", [1, 2, 3])
def test_ties(D, k, boxes):
    """Ties resolve as by brute force, to the last index, also with more neighbours than a leaf holds."""
    queries, points = lattice(5, 90, D, torch.float64 if k == 7 else torch.float32)
    found = sonde.knn(queries.to(DEVICE), points.to(DEVICE), k, impl="triton")
    assert torch.equal(found.indices.cpu(), padded(neighbours(queries, points), k))


def test_three_levels(three_levels):
    """Three levels of boxes, as clouds of more than a hundred thousand points have."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(2_100, 3, generator=g)
    queries = torch.cat([points[:1], torch.randn(2, 3, generator=g), torch.full((1, 3), 9.0)])
    index = sonde.PointIndex.build(points, impl="triton")
    assert index_kernels.levels(2_100) == (66, 3, 1)
    found = sonde.knn(queries, points, 7, index=index, impl="triton")
    assert torch.equal(found.indices, padded(neighbours(queries, points), 7))
    ball = sonde.radius_search(queries, points, 0.3, index=index, impl="triton")
    assert ball.indices.tolist() == [j for row in neighbours(queries, points, 0.3) for j in row]


@pytest.mark.parametrize("which", ["knn", "radius"])
@pytest.mark.parametrize("int64", [False, True])
def test_ragged_and_odd(which, int64, boxes, monkeypatch):
    """Segments across leaves and tiles, empty segments at both ends, odd feature counts, 64-bit offsets: values and gradients."""
    monkeypatch.setattr(passes, "FORCE_INT64", int64)
    g = torch.Generator().manual_seed(0)
    given = [torch.rand(*s, generator=g, dtype=torch.float64) for s in ((9, 3), (70, 3), (70, 3))]
    batch = ([0, 3, 3, 5, 9], [0, 30, 40, 40, 70])
    found = []
    for impl in ("triton", "reference"):
        x = [t.to(DEVICE).requires_grad_() for t in given]
        sigma = torch.tensor(0.2, dtype=torch.float64, device=DEVICE, requires_grad=True)
        name, value = {"knn": ("knn_aggregate", 3), "radius": ("radius_aggregate", 0.4)}[which]
        out = getattr(sonde, name)(*x, value, sigma, batch=batch, impl=impl)
        found.append((out, *torch.autograd.grad(out.square().sum(), (*x, sigma))))
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_offsets_that_are_nonsense_read_nothing_outside(boxes):
    """Offsets on a device are not checked on the host; kernels stay within the points all the same."""
    of_queries, of_points = torch.tensor([0, 900, -5, 3, 8]), torch.tensor([-70, 999_999, 5, -1, 2**40])
    queries, points = torch.rand(1, 8, 3), torch.rand(1, 90, 3)
    tensors = [t.to(DEVICE) for t in (queries, points, of_queries, of_points)]
    index = (*build(tensors[1], tensors[3]), *build(tensors[0], tensors[2]))
    for given in (index, (None,) * 6):
        operands = arguments.named(*tensors[:2], None, *given, *tensors[2:])
        search, found = passes.nearest(operands, 5)
        distances, indices = (t.cpu() for t in search.returns(*found.values()).bind()(*operands.values()))
        assert ((indices >= -1) & (indices < 90)).all()
        assert torch.equal(distances < torch.inf, indices >= 0)


@pytest.mark.parametrize("F", [1, 130])
def test_everybody_has_the_same_neighbours(F, boxes, monkeypatch):
    """A point with many pairs is summed in chunks, including the partial chunks at both ends of its run."""
    monkeypatch.setattr(gpu_pairs, "CHUNK", 16)
    M = 3 * 16 + 5
    g = torch.Generator().manual_seed(0)
    given = [torch.rand(M, 2, generator=g), torch.rand(3, 2, generator=g) + 3, torch.rand(3, F, generator=g)]
    rows = torch.randn(M, F, generator=g)
    found = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        x = [t.to(DEVICE, dtype).requires_grad_() for t in given]
        out = sonde.knn_aggregate(*x, 2, 0.5, impl=impl)
        found.append(torch.autograd.grad(out, x, rows.to(DEVICE, dtype)))
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["knn", "radius"])
def test_one_neighbour_moves_nothing(which, boxes):
    """A single neighbour has weight 1 anywhere: gradients of coordinates and σ are exactly zero."""
    points = torch.arange(40.0)[:, None] * 3
    x = [t.to(DEVICE).requires_grad_() for t in (points[:20] + 0.3, points, torch.randn(40, 5))]
    sigma = torch.tensor(0.1, device=DEVICE, requires_grad=True)
    if which == "knn":
        out = sonde.knn_aggregate(*x, 1, sigma, impl="triton")
    else:
        out = sonde.radius_aggregate(*x, 1.0, sigma, impl="triton")
    found = torch.autograd.grad(out.sin().sum(), (x[0], x[1], sigma))
    assert all((g == 0).all() for g in found)


def test_features_of_others_do_not_poison(boxes):
    """A non-finite feature reaches only the queries that have its point as a neighbour."""
    points, features = torch.rand(60, 3), torch.randn(60, 4)
    features[7] = torch.nan
    queries = torch.cat([points[7:8], torch.rand(9, 3)])
    near = (torch.cdist(queries, points)[:, 7] <= 0.3).tolist()
    out = sonde.radius_aggregate(*(t.to(DEVICE) for t in (queries, points, features)), 0.3, impl="triton").cpu()
    assert [row.isnan().any().item() for row in out] == near
