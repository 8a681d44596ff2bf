"""Neighbour searches find the same points as brute force with the same rounded distances, in the same order, on every cloud."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import sonde
from helpers.exactness import same_bits
from helpers.neighbours import cloud, neighbours, padded, squared
from helpers.operators import leaves
from helpers.versions import sizes_from_data
from sonde.points._search import arguments

pytestmark = pytest.mark.interpreted(False)  # seconds each in the interpreter; a few tests stand for all


@pytest.fixture(params=["by default", "by boxes"])
def algorithm(request, monkeypatch):
    """Both algorithms: the one chosen by size, and the search by boxes at any size."""
    if request.param == "by boxes":
        monkeypatch.setattr(arguments, "FEW", 0)
        monkeypatch.setattr(arguments, "PAIRS", 0)
    return request.param


def close(distances, queries, points, indices):
    """Distances are the correctly rounded square roots of the rounded d², to the last bit."""
    if not indices.numel() or not points.numel():
        assert (distances == torch.inf).all()
        return
    d2 = torch.from_numpy(squared(queries, points))
    want = np.sqrt(torch.where(indices >= 0, d2.gather(1, indices.clamp(min=0)), torch.inf).numpy())
    assert same_bits([distances], [torch.from_numpy(want)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_have_the_same_bits(impl, algorithm, dtype):
    """knn, radius_neighbors and radius_search return the same distance bits with any kernel, on clouds of every scale, down to
    denormal squares."""
    g = torch.Generator().manual_seed(0)
    low, high = (-72, 60) if dtype == torch.float32 else (-535, 500)
    for power in range(low, high, (high - low) // 6):
        q, p = ((2 * torch.rand(n, 3, generator=g, dtype=torch.float64) - 1) * 2.0**power for n in (6, 70))
        queries, points = q.to(dtype), p.to(dtype)
        given, reach = (queries.to(impl.device), points.to(impl.device)), 0.9 * 2.0**power
        everyone, inside = neighbours(queries, points), neighbours(queries, points, reach)
        close(sonde.knn(*given, 50, impl=impl.impl).distances.cpu(), queries, points, padded(everyone, 50))
        close(sonde.radius_neighbors(*given, reach, 9, impl=impl.impl).distances.cpu(), queries, points, padded(inside, 9))
        ball = sonde.radius_search(*given, reach, impl=impl.impl).distances.cpu()
        d2 = squared(queries, points)
        want = np.concatenate([np.sqrt(d2[i, row]) for i, row in enumerate(inside)])
        assert same_bits([ball], [torch.from_numpy(want)]), power
        assert len(want) > 30


@pytest.mark.interpreted(True)
@pytest.mark.parametrize("tens", [0, *(pytest.param(tens, marks=pytest.mark.interpreted(False)) for tens in range(1, 20))])
def test_200_clouds(impl, algorithm, tens):
    """Same as brute force on clouds with ties, duplicates, outliers or non-finite points, on flat, distant and empty ones."""
    for seed in range(10 * tens, 10 * tens + 10):
        kind, queries, points, k, radius = cloud(seed)
        note = f"{kind} {seed}"
        given = queries.to(impl.device), points.to(impl.device)
        everyone, inside = neighbours(queries, points), neighbours(queries, points, radius)

        found = sonde.knn(*given, k, impl=impl.impl)
        assert torch.equal(found.indices.cpu(), padded(everyone, k)), note
        close(found.distances.cpu(), queries, points, padded(everyone, k))

        within = sonde.radius_neighbors(*given, radius, k, impl=impl.impl)
        assert torch.equal(within.indices.cpu(), padded(inside, k)), note
        assert within.truncated.tolist() == [max(0, len(row) - k) for row in inside], note
        close(within.distances.cpu(), queries, points, padded(inside, k))

        ball = sonde.radius_search(*given, radius, impl=impl.impl)
        assert ball.offsets.tolist() == np.cumsum([0, *map(len, inside)]).tolist(), note
        assert ball.indices.tolist() == [j for row in inside for j in row], note
        for i, row in enumerate(inside):
            mine = ball.distances[ball.offsets[i] : ball.offsets[i + 1]].cpu()
            close(mine[None], queries[i : i + 1], points, padded([row], len(row)))


def test_agrees_with_a_k_d_tree(impl):
    """An independent search in float64 finds the same points."""
    spatial = pytest.importorskip("scipy.spatial")
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (60, 500))
    distances, indices = spatial.cKDTree(points.numpy()).query(queries.numpy(), k=6)
    found = sonde.knn(queries.to(impl.device), points.to(impl.device), 6, impl=impl.impl)
    assert torch.equal(found.indices.cpu(), torch.from_numpy(indices))
    torch.testing.assert_close(found.distances.cpu(), torch.from_numpy(distances), rtol=1e-14, atol=0)
    inside = spatial.cKDTree(points.numpy()).query_ball_point(queries.numpy(), 0.5, return_length=True)
    ball = sonde.radius_search(queries.to(impl.device), points.to(impl.device), 0.5, impl=impl.impl)
    assert ball.offsets.diff().tolist() == inside.tolist()


def test_many_queries_and_points(numba_target):
    """Large enough that queries are sorted before the search and threads share a tree of many levels."""
    g = torch.Generator().manual_seed(0)
    for dims in (1, 2, 3):
        queries, points = torch.randn(5000, dims, generator=g), torch.randn(9000, dims, generator=g)
        queries[7], points[5:9] = torch.nan, torch.inf
        found = sonde.knn(queries, points, 5)
        some = [7, *torch.randperm(5000, generator=g)[:200].tolist()]
        assert torch.equal(found.indices[some], padded(neighbours(queries[some], points), 5))


@pytest.mark.parametrize("n", [5000, 20_000])
def test_degenerate_clouds_are_not_slow(numba_target, n):
    """With all points in one place, sorted or reversed, the tree is still built and searched."""
    for points in (
        torch.zeros(n, 3),
        torch.arange(n).float()[:, None].expand(n, 3),
        -torch.arange(n).float()[:, None].expand(n, 3),
    ):
        found = sonde.knn(points[:3], points, 4)
        assert torch.equal(found.indices, padded(neighbours(points[:3], points), 4))


def test_ragged_batches_are_loops(impl, algorithm):
    """A query sees only its own segment, of any size; indices count through all segments."""
    g = torch.Generator().manual_seed(0)
    queries, points, features = (torch.rand(n, c, generator=g).to(impl.device) for n, c in ((13, 3), (120, 3), (120, 4)))
    at, of = [0, 4, 4, 9, 13], [0, 80, 90, 90, 120]
    calls = {
        "knn": lambda q, p, f, **o: sonde.knn(q, p, 5, impl=impl.impl, **o),
        "radius_neighbors": lambda q, p, f, **o: sonde.radius_neighbors(q, p, 0.4, 5, impl=impl.impl, **o),
        "knn_aggregate": lambda q, p, f, **o: (sonde.knn_aggregate(q, p, f, 5, impl=impl.impl, **o),),
        "radius_aggregate": lambda q, p, f, **o: (sonde.radius_aggregate(q, p, f, 0.4, impl=impl.impl, **o),),
    }
    for batch in ((at, of), (torch.tensor(at, device=impl.device), torch.tensor(of, dtype=torch.int32, device=impl.device))):
        for name, call in calls.items():
            whole = call(queries, points, features, batch=batch)
            for (a, b), (c, d) in zip(pairwise(at), pairwise(of)):
                part = call(queries[a:b], points[c:d], features[c:d])
                for x, y in zip(whole, part):
                    y = torch.where(y >= 0, y + c, y) if y.dtype == torch.int64 and y.ndim == 2 else y
                    torch.testing.assert_close(x[a:b], y, msg=name, rtol=1e-5, atol=1e-6)
        ball = sonde.radius_search(queries, points, 0.4, batch=batch, impl=impl.impl)
        lists = [sonde.radius_search(queries[a:b], points[c:d], 0.4, impl=impl.impl) for a, b, c, d in zip(at, at[1:], of, of[1:])]
        assert torch.equal(ball.indices, torch.cat([part.indices + c for part, c in zip(lists, of)]))
        assert torch.equal(ball.offsets.diff(), torch.cat([part.offsets.diff() for part in lists]))


ENDS = {
    "early": ([0, 1, 3], [0, 30, 70]),
    "late": ([1, 2, 4], [5, 30, 80]),
    "too far": ([0, 2, 4], [0, 30, 2**31]),
    "before the first": ([0, 2, 4], [-(2**33), 30, 80]),
}


@pytest.mark.interpreted(True)
@pytest.mark.parametrize("ends", ENDS)
def test_offsets_that_nobody_could_check(ends, impl, algorithm, monkeypatch):
    """Offsets on a device are not checked on the host: rows outside all segments get no neighbours, and nothing out of bounds is
    read."""
    if impl.impl == "numba":
        pytest.skip("a CPU's are always looked at")
    monkeypatch.setattr(arguments, "offsets", lambda name, which, given, count, device: torch.tensor(given, device=device))
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.rand(n, 3, generator=g).to(impl.device) for n in (4, 80))
    found, want = (sonde.knn(queries, points, 3, batch=ENDS[ends], impl=which) for which in (impl.impl, "reference"))
    assert torch.equal(found.indices, want.indices)


def test_batches_are_loops(impl, algorithm):
    """[B, M, D] is B calls; indices count within their row."""
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.rand(3, n, 2, generator=g).to(impl.device) for n in (6, 90))
    found = sonde.knn(queries, points, 4, impl=impl.impl)
    ball = sonde.radius_search(queries, points, 0.2, impl=impl.impl)
    lists = [sonde.radius_search(q, p, 0.2, impl=impl.impl) for q, p in zip(queries, points)]
    assert torch.equal(ball.indices, torch.cat([part.indices for part in lists]))
    assert torch.equal(ball.offsets.diff(), torch.cat([part.offsets.diff() for part in lists]))
    for b in range(3):
        assert same_bits(found[0][b : b + 1], sonde.knn(queries[b], points[b], 4, impl=impl.impl)[0][None])
        assert torch.equal(found.indices[b], sonde.knn(queries[b], points[b], 4, impl=impl.impl).indices)


def test_half_precision_coordinates(impl):
    """Half-precision coordinates are converted to float32; distances are float32's."""
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.rand(n, 3, generator=g).to(impl.device, torch.bfloat16) for n in (5, 80))
    found = sonde.knn(queries, points, 4, impl=impl.impl)
    assert found.distances.dtype == torch.float32
    assert same_bits(found, sonde.knn(queries.float(), points.float(), 4, impl=impl.impl))


@pytest.mark.parametrize("name", ["knn", "radius_neighbors", "radius_search"])
def test_gradients_of_distances(impl, algorithm, name):
    """∂d/∂q = (q − p)/d for both sets; zero at d = 0 and for missing neighbours, never NaN."""
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.rand(n, 3, generator=g, dtype=torch.float64) for n in (9, 50))
    points[:3] = queries[:3]
    queries[4] = torch.nan
    args = {"knn": (55,), "radius_neighbors": (0.6, 7), "radius_search": (0.5,)}[name]
    at = 2 if name == "radius_search" else 0

    def gradients(which, device):
        leaf = leaves([queries.to(device), points.to(device)])
        d = getattr(sonde, name)(*leaf, *args, impl=which)[at]
        found = torch.where(d < torch.inf, d, 0)
        found.backward(torch.arange(1.0, 1 + d.numel(), dtype=d.dtype).view(d.shape).to(device).sin())
        return [x.grad.cpu() for x in leaf]

    got, want = gradients(impl.impl, impl.device), gradients("reference", "cpu")
    for a, b in zip(got, want):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert (got[0][4] == 0).all()


def test_second_derivatives_of_distances(numba_target):
    """Second derivatives come from the reference."""
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.rand(n, 3, generator=g, dtype=torch.float64).requires_grad_() for n in (4, 70))
    assert torch.autograd.gradgradcheck(lambda q, p: sonde.knn(q, p, 3).distances, (queries, points))
    assert torch.autograd.gradcheck(lambda q, p: sonde.radius_search(q, p, 0.3).distances, (queries, points))


def test_radius_search_compiles(numba_target):
    """The size of its result is unknown to the graph."""
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.rand(n, 3, generator=g) for n in (9, 80))
    compiled = torch.compile(lambda q, p: sonde.radius_search(q, p, 0.3).distances * 2, fullgraph=True, backend="aot_eager")
    with sizes_from_data():
        torch.testing.assert_close(compiled(queries, points), sonde.radius_search(queries, points, 0.3).distances * 2)
    torch._dynamo.reset()


def test_radius_search_is_not_mapped(numba_target):
    """vmap is refused by name, since rows would have results of different sizes."""
    with pytest.raises(ValueError, match=r"radius_search: .*vmap.*radius_neighbors"):
        torch.vmap(lambda q, p: sonde.radius_search(q, p, 0.3).indices)(torch.rand(2, 5, 3), torch.rand(2, 9, 3))


def test_more_dimensions(numba_target):
    """Beyond three dimensions `auto` uses the reference, and a kernel requested by name says that it has none."""
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.rand(n, 5, generator=g) for n in (9, 80))
    assert torch.equal(sonde.knn(queries, points, 4).indices, padded(neighbours(queries, points), 4))
    assert sonde.explain(sonde.knn, queries, points, 4).impl == "reference"
    with pytest.raises(sonde.jit.Unsupported, match=r"knn: impl='numba' has kernels for 1 to 3 dimensions, got 5; use impl='auto'"):
        sonde.knn(queries, points, 4, impl="numba")
    index = sonde.PointIndex.build(points)
    assert torch.equal(sonde.knn(queries, points, 4, index=index).indices, sonde.knn(queries, points, 4).indices)


@pytest.mark.parametrize("name", ["knn", "radius_neighbors", "knn_aggregate"])
def test_more_neighbours_than_points(name, impl):
    """Any k is allowed as long as the result fits: missing neighbours are padded."""
    g = torch.Generator().manual_seed(0)
    queries, points = (torch.rand(n, 3, generator=g).to(impl.device) for n in (2, 5))
    k = 64 if impl.impl == "triton" else 1000
    if name == "knn_aggregate":
        few, many = (sonde.knn_aggregate(queries, points, points, n, impl=impl.impl) for n in (5, k))
        return torch.testing.assert_close(few, many)
    args = (0.7, k) if name == "radius_neighbors" else (k,)
    found = getattr(sonde, name)(queries, points, *args, impl=impl.impl)
    assert found.indices.shape == (2, k)
    assert (found.indices[:, 5:] == -1).all()
    assert (found.distances[:, 5:] == torch.inf).all()
