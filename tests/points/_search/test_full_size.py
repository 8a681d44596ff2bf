"""On a GPU, at real workload sizes: neighbours equal those from all distances, rounded alike, computed in chunks."""

import pytest
import torch

import sonde
from sonde.points._search import cases as _cases


def nearest(queries, points, k):
    """Indices of the k smallest (d², index)."""
    found, number = [], torch.arange(points.shape[0], device=points.device)
    for rows in queries.split(max(1, 2**26 // points.shape[0])):
        x, y, z = (a[:, None] - b[None] for a, b in zip(rows.unbind(-1), points.unbind(-1)))
        keys = (((x * x + y * y) + z * z).view(torch.int32).long() << 32) | number
        found.append(keys.topk(k, largest=False).indices)
    return torch.cat(found)


def check(layout, M, N, k, device):
    queries, points = (x[0] for x in _cases.cloud(M, N, layout=layout, device=device))
    want = nearest(queries, points, k)
    index = sonde.PointIndex.build(points)
    found = sonde.knn(queries, points, k, index=index)
    assert torch.equal(found.indices, want)
    assert torch.equal(found.indices, sonde.knn(queries, points, k).indices)
    some = queries[:2000]
    apart = torch.cdist(some, points, compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(found.distances[:2000], apart.topk(k, largest=False).values, rtol=1e-6, atol=1e-7)
    far = found.distances[:, -1].median().item()
    within = sonde.radius_search(queries, points, far, index=index)
    inside = found.distances <= far
    assert within.offsets[-1] == within.indices.numel() >= inside.sum()
    first = within.offsets[:-1][inside[:, 0]]
    assert torch.equal(within.indices[first], want[inside[:, 0], 0])


SIZES = [
    ("tutorial", 27_000, 100_000, 7),
    ("uniform_cube", 100_000, 300_000, 7),
    ("clusters", 100_000, 300_000, 7),
    ("ellipsoid", 100_000, 300_000, 16),
    ("near_surface", 200_000, 300_000, 7),
    ("box_of_surface", 524_288, 300_000, 7),
    ("uniform_cube", 5_000, 10**6, 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "M", "N", "k"), SIZES)
def test_neighbours(layout, M, N, k):
    check(layout, M, N, k, "cuda")


@pytest.mark.parametrize("layout", ["tutorial", "clusters"])
def test_neighbours_of_a_part(layout):
    check(layout, 1_000, 5_000, 7, "cpu")
