"""Samples along epipolar lines, checked against projective geometry computed another way: 4×4 matrices and the fundamental matrix
F."""

import math

import pytest
import torch
from torch import Tensor

import sonde.nn
from helpers.refusals import assert_refused

H, W, D = 6, 8, 7
NEAR, FAR = 0.8, 40.0


def turned(axis: int, degrees: float) -> Tensor:
    """A rotation about x, y or z."""
    a, b = [i for i in range(3) if i != axis]
    m, angle = torch.eye(3, dtype=torch.float64), math.radians(degrees)
    m[a, a] = m[b, b] = math.cos(angle)
    m[a, b], m[b, a] = -math.sin(angle), math.sin(angle)
    return m


def camera(centre=(0.0, 0.0, 0.0), rotation=None) -> Tensor:
    m = torch.eye(4, dtype=torch.float64)
    m[:3, 3] = torch.tensor(centre, dtype=torch.float64)
    if rotation is not None:
        m[:3, :3] = rotation
    return m


def lens(focal_x=0.9, focal_y=1.2, x=0.5, y=0.5, skew=0.0) -> Tensor:
    return torch.tensor([[focal_x, skew, x], [0, focal_y, y], [0, 0, 1]], dtype=torch.float64)


QUERY = camera((0.3, -0.2, 0.1), turned(1, 4) @ turned(0, -3))


def relative(centre=(0.0, 0.0, 0.0), rotation=None) -> Tensor:
    """Pose of a source camera relative to the query's."""
    return QUERY @ camera(centre, rotation)


SOURCES = {
    "beside": relative((1.0, 0, 0)),  # parallel views: the epipole is at infinity
    "above": relative((0, -0.7, 0)),
    "converging": relative((2.0, 0.3, 0.5), turned(1, 25)),
    "tilted": relative((-1.0, 0.5, 0.2), turned(2, 35) @ turned(1, 15)),
    "ahead": relative((0.05, 0.03, 1.5)),  # the epipole lies inside the image; nearer points are behind it
    "behind": relative((-0.04, 0.02, -2.0)),  # also inside
    "ahead_of_centre": relative((0.0, 0.0, 3.0)),
    "facing": relative((0.2, 0.1, 10.0), turned(1, 180)),  # looks back at the query's camera: it sees less than depth 10
}


def lines(source: Tensor, *, K=None, source_K=None, near=NEAR, far=FAR, points=None, num_samples=D, query=QUERY):
    K, source_K = lens() if K is None else K, lens(1.1, 0.8, 0.45, 0.55) if source_K is None else source_K
    points = sonde.nn.pixel_centres(H, W, dtype=torch.float64) if points is None else points
    return sonde.nn.epipolar_samples(
        points[None], K[None], query[None], source_K[None, None], source[None, None], near, far, num_samples
    )


def lifted(points: Tensor, depths: Tensor, K: Tensor, pose: Tensor) -> Tensor:
    """World points ``[Q, D, 4]`` of image points ``[Q, 2]`` at depths z ``[Q, D]``."""
    homogeneous = torch.cat([(points + 1) / 2, torch.ones_like(points[:, :1])], -1)
    rays = torch.linalg.solve(K, homogeneous.T).T  # z = 1
    local = rays[:, None] * depths[..., None]
    return torch.cat([local, torch.ones_like(local[..., :1])], -1) @ pose.T


def projected(world: Tensor, K: Tensor, pose: Tensor) -> tuple[Tensor, Tensor]:
    """Image coordinates of world points in a camera, in [−1, 1], and their depths."""
    local = (world @ torch.linalg.inv(pose).T)[..., :3]
    seen = local @ K.T
    return 2 * seen[..., :2] / seen[..., 2:] - 1, local[..., 2]


def fundamental(K: Tensor, pose: Tensor, source_K: Tensor, source: Tensor) -> Tensor:
    """F with x'ᵀ F x = 0, from the relative pose."""
    between = torch.linalg.inv(source) @ pose
    x, y, z = between[:3, 3].tolist()
    cross = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)
    return torch.linalg.inv(source_K).T @ cross @ between[:3, :3] @ torch.linalg.inv(K)


@pytest.mark.parametrize("name", SOURCES)
def test_samples_lie_on_lines_at_their_depths(name):
    """Each sample x' lies on the line F x and is where the source sees the query's pixel at the returned depth, within 1e-9."""
    K, source_K, source = lens(skew=0.02), lens(1.1, 0.8, 0.45, 0.55, -0.03), SOURCES[name]
    points = sonde.nn.pixel_centres(H, W, dtype=torch.float64)
    samples, depths, mask = (x[0, 0] for x in lines(source, K=K, source_K=source_K))
    assert samples.shape == (H * W, D, 2)
    assert depths.shape == mask.shape == (H * W, D)
    assert mask.all(-1).equal(mask.any(-1))
    seen = mask[:, 0]
    assert seen.sum() >= H * W // 4, "hardly anything is tested"

    where, z = projected(lifted(points, depths, K, QUERY), source_K, source)
    torch.testing.assert_close(samples[seen], where[seen], rtol=0, atol=1e-9)
    assert (z[seen] > 0).all()
    x = torch.cat([(points + 1) / 2, torch.ones_like(points[:, :1])], -1)
    line = x @ fundamental(K, QUERY, source_K, source).T
    x_ = torch.cat([(samples + 1) / 2, torch.ones_like(samples[..., :1])], -1)
    off = (x_ * line[:, None]).sum(-1) / line[:, None, :2].norm(dim=-1)
    assert off[seen].abs().max() < 1e-9

    assert (samples[seen].abs() <= 1).all()
    assert ((depths[seen] >= NEAR) & (depths[seen] <= FAR)).all()
    assert (depths[seen].diff() > 0).all()
    steps = samples[seen].diff(dim=1)
    torch.testing.assert_close(steps, steps[:, :1].expand_as(steps), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SOURCES)
def test_segments_are_what_dense_samples_show(name):
    """The first and last samples are half a step inside the visible segment, whose ends are found by trying 20,000 depths."""
    source, points = SOURCES[name], sonde.nn.pixel_centres(H, W, dtype=torch.float64)
    tried = 1 / torch.linspace(1 / NEAR, 1 / FAR, 20001, dtype=torch.float64)
    where, z = projected(lifted(points, tried.expand(H * W, -1), lens(), QUERY), lens(1.1, 0.8, 0.45, 0.55), source)
    visible = (where.abs() <= 1).all(-1) & (z > 0)
    samples, _, mask = (x[0, 0] for x in lines(source, num_samples=1000))
    counts = visible.sum(-1)
    assert mask[:, 0][counts > 1].all()
    assert not mask[:, 0][counts == 0].any() or (mask[:, 0] & (counts == 0)).sum() <= 1  # one line may just touch a corner
    for q in (counts > 100).nonzero().flatten().tolist():
        first, last = (where[q][visible[q]][i] for i in (0, -1))
        step = (samples[q, -1] - samples[q, 0]).norm() / 999
        reach = (where[q][visible[q]].diff(dim=0)).norm(dim=-1).max() + step  # two tried depths may be far apart in the image
        assert (samples[q, 0] - first).norm() <= reach
        assert (samples[q, -1] - last).norm() <= reach


def test_depth_range_that_begins_and_ends_inside():
    """Unclipped, the samples are the midpoints of equal pieces between the projections of near and far."""
    source, points = SOURCES["converging"], torch.zeros(1, 2, dtype=torch.float64)
    near, far = 3.0, 6.0
    ends, _ = projected(
        lifted(points, torch.tensor([[near, far]], dtype=torch.float64), lens(), QUERY), lens(1.1, 0.8, 0.45, 0.55), source
    )
    assert (ends.abs() < 1).all()
    along = (torch.arange(D, dtype=torch.float64)[:, None] + 0.5) / D
    found = lines(source, near=near, far=far, points=points)
    torch.testing.assert_close(found.samples[0, 0, 0], torch.lerp(ends[0, 0], ends[0, 1], along), rtol=0, atol=1e-12)
    one = lines(source, near=near, far=near, points=points)
    torch.testing.assert_close(one.samples[0, 0, 0], ends[0, :1].expand(D, 2), rtol=0, atol=1e-12)
    torch.testing.assert_close(one.depths[0, 0, 0], torch.full((D,), near, dtype=torch.float64), rtol=1e-12, atol=0)
    assert one.mask.all()


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (relative(), {}),  # the same camera
        (relative((0, 0, 0), turned(1, 20) @ turned(2, 5)), {}),  # pure rotation
        (relative((0, 0, 100.0)), {}),  # the whole depth range is behind it
        (relative((1.0, 0, 0), turned(1, 180)), {}),  # looks the other way
        (relative((500.0, 0, 0)), {}),  # lines miss the image
        (relative((0, 5.0, 0), turned(0, -89)), dict(far=2.0)),
    ],
    ids=["same", "rotation", "behind", "back_to_back", "far_away", "out_of_view"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_no_source_sees_is_masked(source, options, dtype):
    points = sonde.nn.pixel_centres(H, W, dtype=dtype)
    found = lines(source.to(dtype), query=QUERY.to(dtype), points=points, K=lens().to(dtype), source_K=lens().to(dtype), **options)
    assert found.samples.dtype == dtype
    assert not found.mask.any()
    assert (found.samples == -2).all()
    torch.testing.assert_close(found.depths, torch.full_like(found.depths, NEAR))


def test_centres_equal_within_rounding_are_masked():
    """Two camera centres that differ only by float32 rounding of an inverse, far from the origin, count as equal and are masked."""
    query = QUERY.clone()
    query[:3, 3] += torch.tensor([12.3, -7.1, 30.9])
    source = query @ camera(rotation=turned(1, 10))
    source = torch.linalg.inv(torch.linalg.inv(source).float())
    assert source[:3, 3].sub(query[:3, 3]).abs().max() > 0
    found = lines(source, query=query.float(), K=lens().float(), source_K=lens().float(), points=torch.zeros(1, 2))
    assert not found.mask.any()


def test_ray_through_the_centre_of_a_source():
    """A ray through the source's centre is seen at the epipole from all depths beyond: all samples are there, none NaN."""
    found = lines(SOURCES["ahead_of_centre"], points=torch.zeros(1, 2, dtype=torch.float64), source_K=lens())
    assert found.mask.all()
    torch.testing.assert_close(found.samples, torch.zeros_like(found.samples), rtol=0, atol=1e-7)
    assert (found.depths > 3).all()
    assert (found.depths < FAR).all()


def test_lines_along_the_border_are_inside():
    """Rectified views and a query on the image's upper border: the line along the border counts as inside."""
    points = torch.tensor([[0.0, -1.0], [0.3, 1.0]], dtype=torch.float64)
    found = lines(SOURCES["beside"], K=lens(), source_K=lens(), points=points)
    assert found.mask.all()
    torch.testing.assert_close(found.samples[0, 0, :, :, 1], points[:, 1:].expand(2, D), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*SOURCES, "same", "far_away", "back_to_back"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite(name, dtype):
    """Gradients of points, cameras and depth range, clipped or not, masked or not."""
    others = {"same": relative(), "far_away": relative((500.0, 0, 0)), "back_to_back": relative((1.0, 0, 0), turned(1, 180))}
    points = torch.cat([sonde.nn.pixel_centres(5, 5), torch.tensor([[0.0, 0.0], [1.0, 1.0], [-1.0, 0.0], [3.0, -9.0]])])
    near, far = torch.tensor([NEAR]), torch.tensor([FAR])
    inputs = [points[None], lens()[None], QUERY[None], lens()[None, None], {**SOURCES, **others}[name][None, None], near, far]
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    found = sonde.nn.epipolar_samples(*inputs, D)
    weight = torch.linspace(-1, 1, found.samples.numel(), dtype=dtype).view_as(found.samples)
    grads = torch.autograd.grad((found.samples * weight).sum() + (found.depths * weight[..., 0]).sum(), inputs)
    assert all(x.isfinite().all() for x in (*found[:2], *grads))
    if name in SOURCES:
        assert all(x.abs().max() > 0 for x in grads)


def test_gradients_are_right():
    """gradcheck, away from where clipping sets in."""
    points = torch.tensor([[[-0.31, 0.27], [0.12, -0.44]]], dtype=torch.float64)
    inputs = [points, lens()[None], QUERY[None], lens()[None, None], SOURCES["converging"][None, None]]
    inputs += [torch.tensor([NEAR], dtype=torch.float64), torch.tensor([FAR], dtype=torch.float64)]
    inputs = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *args: tuple(sonde.nn.epipolar_samples(*args, 3)[:2]), inputs)


def test_batches_views_and_dtypes():
    """Rows and views are independent; the dtype is the widest operand's, at least float32, also under autocast."""
    torch.manual_seed(0)
    names = ["beside", "ahead", "converging"]
    sources = torch.stack([SOURCES[name] for name in names])
    points = sonde.nn.pixel_centres(3, 4, dtype=torch.float64)
    twice = [torch.stack([x, x]) for x in (points, lens(), QUERY, lens().expand(3, 3, 3), sources)]
    near, far = torch.tensor([NEAR, 2 * NEAR], dtype=torch.float64), torch.tensor([FAR], dtype=torch.float64)
    found = sonde.nn.epipolar_samples(*twice, near, far, D)
    assert found.samples.shape == (2, 3, 12, D, 2)
    for row in range(2):
        for v, name in enumerate(names):
            want = lines(SOURCES[name], points=points, K=lens(), source_K=lens(), near=float(near[row]))
            for a, b in zip(found, want):
                torch.testing.assert_close(a[row, v], b[0, 0], rtol=1e-12, atol=1e-12)

    single = [x.float() for x in twice]
    want = sonde.nn.epipolar_samples(*single, NEAR, FAR, D)
    assert want.samples.dtype == want.depths.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        got = sonde.nn.epipolar_samples(*single, NEAR, FAR, D)
    assert all(a.equal(b) for a, b in zip(got, want))
    half = sonde.nn.epipolar_samples(*(x.bfloat16() for x in twice), NEAR, FAR, D)
    assert half.samples.dtype == torch.float32
    torch.testing.assert_close(want.samples, lines_of(twice).samples.float(), rtol=0, atol=1e-4)


def lines_of(inputs: list[Tensor]):
    return sonde.nn.epipolar_samples(*inputs, NEAR, FAR, D)


def test_intrinsics_in_pixels():
    """Intrinsics in pixels, divided as documented, give the same line at any resolution."""
    pixels = torch.tensor([[300.0, 0, 160.0], [0, 310.0, 118.0], [0, 0, 1]], dtype=torch.float64)  # for 320 × 240
    normalised = pixels / torch.tensor([[320.0], [240.0], [1.0]], dtype=torch.float64)
    found = lines(SOURCES["converging"], K=normalised, source_K=normalised, points=torch.zeros(1, 2, dtype=torch.float64))
    local = torch.linalg.solve(pixels, torch.tensor([160.0, 120.0, 1.0], dtype=torch.float64)) * found.depths[0, 0, 0, :, None]
    world = torch.cat([local, torch.ones_like(local[:, :1])], -1) @ QUERY.T
    seen = (world @ torch.linalg.inv(SOURCES["converging"]).T)[:, :3] @ pixels.T
    where = 2 * seen[:, :2] / seen[:, 2:] / torch.tensor([320.0, 240.0], dtype=torch.float64) - 1
    torch.testing.assert_close(found.samples[0, 0, 0], where, rtol=0, atol=1e-9)


def test_pixel_centres_are_those_of_grid_sample():
    image = torch.randn(1, 3, 4, 5, dtype=torch.float64)
    grid = sonde.nn.pixel_centres(4, 5, dtype=torch.float64)
    seen = torch.nn.functional.grid_sample(image, grid.view(1, 4, 5, 2), align_corners=False)
    torch.testing.assert_close(seen, image, rtol=0, atol=1e-12)


RIGHT = dict(
    points=torch.zeros(2, 5, 2),
    intrinsics=torch.zeros(2, 3, 3),
    extrinsics=torch.zeros(2, 4, 4),
    source_intrinsics=torch.zeros(2, 3, 3, 3),
    source_extrinsics=torch.zeros(2, 3, 4, 4),
    near=1.0,
    far=10.0,
    num_samples=4,
)
REFUSED = {
    "points_list": (dict(points=[[0.0, 0.0]]), TypeError, "points must be a tensor [B, Q, 2]"),
    "points_last": (dict(points=torch.zeros(2, 5, 3)), ValueError, "points must be [B, Q, 2]"),
    "swapped": (
        dict(intrinsics=torch.zeros(2, 4, 4), extrinsics=torch.zeros(2, 3, 3)),
        ValueError,
        "intrinsics must be [B, 3, 3]",
    ),
    "poses_3x4": (dict(extrinsics=torch.zeros(2, 3, 4)), ValueError, "extrinsics must be [B, 4, 4]"),
    "poses_rank": (dict(source_extrinsics=torch.zeros(2, 4, 4)), ValueError, "source_extrinsics must have 4 dimensions"),
    "sources": (dict(source_extrinsics=torch.zeros(2, 2, 4, 4)), ValueError, "source_extrinsics must be [B, V, 4, 4] with B=2"),
    "integers": (dict(intrinsics=torch.zeros(2, 3, 3).long()), TypeError, "intrinsics must be float16"),
    "device": (dict(extrinsics=torch.zeros(2, 4, 4, device="meta")), ValueError, "extrinsics must be on cpu"),
    "near_zero": (dict(near=0.0), ValueError, "near must be a finite number > 0"),
    "near_text": (dict(near="1"), TypeError, "near must be a finite number > 0"),
    "far_infinite": (dict(far=math.inf), ValueError, "far must be a finite number > 0"),
    "far_nearer": (dict(far=0.5), ValueError, "near must be no more than far"),
    "near_shape": (dict(near=torch.ones(3)), ValueError, "near must be [B] with B=2"),
    "far_integers": (dict(far=torch.ones(2).long()), TypeError, "far must be float16"),
    "samples_zero": (dict(num_samples=0), ValueError, "num_samples must be an integer >= 1"),
    "samples_float": (dict(num_samples=4.0), TypeError, "num_samples must be an integer >= 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    wrong, error, text = REFUSED[name]
    assert_refused(error, f"epipolar_samples: {text}", sonde.nn.epipolar_samples, **{**RIGHT, **wrong})


def test_intrinsics_in_pixels_are_refused():
    """They would see nothing, so they are refused where the host can read them."""
    pixels = torch.tensor([[200.0, 0.0, 128.0], [0.0, 200.0, 96.0], [0.0, 0.0, 1.0]]).repeat(2, 1, 1)  # of 256 × 192
    where = r"take camera coordinates to \[0, 1\] × \[0, 1\] of the image; got a principal point at \(128, 96\)"
    with pytest.raises(ValueError, match=f"epipolar_samples: intrinsics must {where}"):
        sonde.nn.epipolar_samples(**{**RIGHT, "intrinsics": pixels})
    with pytest.raises(ValueError, match=f"epipolar_samples: source_intrinsics must {where}"):
        sonde.nn.epipolar_samples(**{**RIGHT, "source_intrinsics": pixels[:, None].expand(2, 3, 3, 3)})
    layer = sonde.nn.EpipolarAttention(4, heads=2)
    with pytest.raises(ValueError, match=f"EpipolarAttention: intrinsics must {where}"):
        layer(torch.zeros(1, 2, 4, 3, 3), pixels[None], torch.zeros(1, 2, 4, 4), 1.0, 10.0)
    sonde.nn.epipolar_samples(**{**RIGHT, "intrinsics": pixels / torch.tensor([[256.0], [192.0], [1.0]])})


def test_intrinsics_that_are_not_pixels():
    """Images cropped far from their principal points, homogeneous scales and cameras of zeros or NaN are computed as before."""
    K = torch.eye(3).repeat(2, 1, 1)
    for cropped in (K + torch.tensor([[0, 0, 20.0], [0, 0, -20.0], [0, 0, 0]]), 640 * K, 0 * K, torch.nan * K):
        sonde.nn.epipolar_samples(**{**RIGHT, "intrinsics": cropped})


def test_refusals_of_the_small_functions():
    assert_refused(ValueError, "pixel_centres: height must be", sonde.nn.pixel_centres, 0, 4)
    assert_refused(TypeError, "relative_disparity: depths must be", sonde.nn.relative_disparity, [1.0], 1.0, 2.0)
    assert_refused(ValueError, "relative_disparity: near must be", sonde.nn.relative_disparity, torch.ones(2), -1.0, 2.0)


def test_relative_disparity():
    depths = torch.tensor([2.0, 3.0, 6.0], dtype=torch.float64)
    torch.testing.assert_close(sonde.nn.relative_disparity(depths, 2.0, 6.0), torch.tensor([0.0, 0.5, 1.0]).double())
    assert not sonde.nn.relative_disparity(torch.full((2,), 3.0), torch.tensor([3.0]), 3.0).any()
