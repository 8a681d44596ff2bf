"""PhysicsNeMo's names: the same arguments in the same order, and the results of plain PyTorch wherever those are right."""

import inspect

import pytest
import torch

from helpers.operators import cotangents
from sonde.compat import physicsnemo


def made(*batch, M=7, N=40, F=3):
    g = torch.Generator().manual_seed(0)
    return [torch.rand(*batch, *s, generator=g, dtype=torch.float64).requires_grad_() for s in ((M, 3), (N, 3), (N, F))]


def tutorial_knn(p1, p2, p2_features, k, sigma):
    """The tutorial's formula, by brute force."""
    distances, indices = (p1[:, None] - p2[None]).norm(dim=-1).topk(k, dim=1, largest=False)
    return (torch.softmax(-distances / sigma, 1)[..., None] * p2_features[indices]).sum(1)


def tutorial_radius(p1, p2, p2_features, radius, sigma):
    distances = (p1[:, None] - p2[None]).norm(dim=-1)
    weights = torch.exp(-distances / sigma) * (distances <= radius)
    return (weights / (weights.sum(1, keepdim=True) + 1e-8)) @ p2_features


@pytest.mark.parametrize(
    ("ours", "theirs", "more", "tolerance"),
    [
        (physicsnemo.knn_weighted_feature_aggregation, tutorial_knn, (5, 0.1), 1e-10),
        (physicsnemo.radius_bounded_feature_aggregation, tutorial_radius, (0.4, 0.1), 1e-5),  # their epsilon
    ],
)
def test_aggregations(ours, theirs, more, tolerance):
    """Values and all three gradients; the original's faster routes have only one of them."""
    inputs = made()
    results = []
    for function in (ours, theirs):
        out = function(*inputs, *more)
        results.append([out, *torch.autograd.grad(out, inputs, cotangents([out]))])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_small_sigma_does_not_make_weights_vanish():
    """The original returns nearly nothing where exp(−d/σ) is smaller than its epsilon."""
    p1, p2, features = (x.detach() for x in made())
    ones = physicsnemo.radius_bounded_feature_aggregation(p1, p2, torch.ones_like(features), 0.5, 1e-3)
    assert tutorial_radius(p1, p2, torch.ones_like(features), 0.5, 1e-3).max() < 0.5
    torch.testing.assert_close(ones, torch.ones_like(ones))


def test_knn():
    queries, points, _ = made()
    indices, distances = physicsnemo.knn(points, queries, 4)
    want = (queries[:, None] - points[None]).norm(dim=-1).topk(4, largest=False)
    assert torch.equal(indices, want.indices)
    torch.testing.assert_close(distances, want.values)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_radius_search_of_all(batch):
    """Index pairs, or triples for batches; points and distances on request; a single tensor when nothing else is requested."""
    queries, points, _ = made(*batch)
    d = torch.cdist(queries, points)
    want = (d <= 0.4).nonzero().T
    indices = physicsnemo.radius_search(points, queries, 0.4)
    assert torch.equal(indices[:, torch.argsort(indices[-2] * 1000 + indices[-1] + 10**6 * indices[0] * bool(batch))], want)
    indices, chosen, distances = physicsnemo.radius_search(points, queries, 0.4, None, True, True)
    rows = tuple(indices[: len(batch)])
    torch.testing.assert_close(distances, d[(*rows, indices[-2], indices[-1])])
    assert torch.equal(chosen, points[(*rows, indices[-1])])


@pytest.mark.parametrize("batch", [(), (2,)])
def test_radius_search_of_the_nearest(batch):
    """The nearest points within the radius, padded with zeros."""
    queries, points, _ = made(*batch)
    want = torch.cdist(queries, points).topk(9, largest=False)
    inside = want.values <= 0.4
    assert inside.any()
    assert not inside.all()
    indices, chosen, distances = physicsnemo.radius_search(points, queries, 0.4, 9, return_dists=True, return_points=True)
    assert torch.equal(indices, torch.where(inside, want.indices, 0))
    torch.testing.assert_close(distances, torch.where(inside, want.values, 0))
    torch.testing.assert_close((queries[..., None, :] - chosen).norm(dim=-1)[inside], distances[inside])
    assert (chosen[~inside] == 0).all()
    assert torch.equal(physicsnemo.radius_search(points, queries, 0.4, 9), indices)
    assert physicsnemo.radius_search(points[..., :0, :], queries, 0.4, 9, return_points=True)[1].shape == chosen.shape


def test_gradients_of_points_and_distances():
    queries, points, _ = made()
    _, chosen, distances = physicsnemo.radius_search(points, queries, 0.4, 9, True, True)
    grads = torch.autograd.grad(chosen.square().sum() + distances.sum(), (queries, points))
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in grads)


def test_arguments():
    """Argument names and order match the originals."""
    expected = {
        "knn_weighted_feature_aggregation": ["p1", "p2", "p2_features", "k", "sigma", "eps"],
        "radius_bounded_feature_aggregation": ["p1", "p2", "p2_features", "radius", "sigma"],
        "knn": ["points", "queries", "k", "implementation"],
        "radius_search": ["points", "queries", "radius", "max_points", "return_dists", "return_points", "implementation"],
    }
    assert sorted(physicsnemo.__all__) == sorted(expected)
    for name, arguments in expected.items():
        assert list(inspect.signature(getattr(physicsnemo, name)).parameters) == arguments


def test_flags_are_flags():
    """A tensor in place of a flag is refused by name."""
    queries, points, _ = made()
    for name in ("return_dists", "return_points"):
        for bad in (points, "yes", None):
            with pytest.raises(TypeError, match=rf"radius_search: {name} must be True or False; got {type(bad).__name__}"):
                physicsnemo.radius_search(points, queries, 0.4, **{name: bad})


def test_one_graph():
    """One graph when the number of neighbours is given; the original breaks the graph without Warp's operator."""
    torch._dynamo.reset()
    queries, points, features = (x.detach() for x in made())

    def function(queries, points, features):
        indices, distances = physicsnemo.radius_search(points, queries, 0.4, 9, return_dists=True)
        return physicsnemo.knn_weighted_feature_aggregation(queries, points, features) + distances.sum() + indices.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(queries, points, features), function(queries, points, features))
    torch._dynamo.reset()
