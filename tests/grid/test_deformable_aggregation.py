"""``deformable_aggregation`` compared with independent implementations, plus the cases only this operator can get wrong."""

# ruff: noqa: E731 (short functions read better on one line)

import math

import pytest
import torch
import torch.nn.functional as F

import sonde
from helpers.exactness import assert_agrees
from helpers.memory import poisoned, redzone
from helpers.operators import Target, cotangents, floats, leaves, replaced, value_and_grads
from sonde.grid.deformable_aggregation.api import _deformable_aggregation
from sonde.operators import OPERATORS

try:
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:  # the GPU machine has none
    given = None

OPERATOR = OPERATORS["deformable_aggregation"]
SIZES = dict(B=2, C=3, H=5, W=6, Q=3, D=2, heads=2, cams=2, L=2)


def make(target: Target, dtype=torch.float64, **sizes):
    return list(OPERATOR.make(**{**SIZES, **sizes}, dtype=dtype, device=target.device))


def close(got, want):
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def with_grid_sample(features, shapes, starts, locations, weights, outside):
    """The definition by F.grid_sample, camera by camera and level by level; zeros around every map."""
    out, row = torch.zeros((), dtype=features.dtype, device=features.device), 0
    C, G = features.shape[2], weights.shape[-1]
    for camera, levels in enumerate(shapes):
        for level, (h, w) in enumerate(levels):
            pixels = features[:, row : row + h * w].transpose(1, 2).unflatten(2, (h, w))
            row += h * w
            values = F.grid_sample(pixels, 2 * locations[:, :, :, camera] - 1, align_corners=False)  # [B, C, A, P]
            weight = weights[:, :, :, camera, level].repeat_interleave(C // G, -1)  # [B, A, P, C]
            out = out + torch.einsum("bcap,bapc->bac", values, weight)
    return out


def corners(x, size):
    """The existing pixels on either side of position x along one axis, and their weights."""
    x0 = x.detach().floor()
    return [(int(i), weight) for i, weight in ((x0, 1 - (x - x0)), (x0 + 1, x - x0)) if 0 <= i < size]


def by_loops(features, shapes, starts, locations, weights, outside):
    """The formula as plain loops over samples and corners; autograd differentiates what is used."""
    B, A, P, cams, L, G = weights.shape
    C, first, total = features.shape[2], {}, 0
    for m in range(cams):
        for j in range(L):
            first[m, j], total = total, total + math.prod(shapes[m][j])
    rows = []
    for b in range(B):
        for a in range(A):
            out = torch.zeros(C, dtype=features.dtype, device=features.device)
            for p in range(P):
                for m in range(cams):
                    u, v = locations[b, a, p, m]
                    if outside == "drop" and not (0 < u < 1 and 0 < v < 1):
                        continue
                    for j in range(L):
                        h, w = shapes[m][j]
                        for column, wx in corners(u * w - 0.5, w):
                            for row, wy in corners(v * h - 0.5, h):
                                weight = weights[b, a, p, m, j].repeat_interleave(C // G)
                                out = out + wy * wx * weight * features[b, first[m, j] + row * w + column]
            rows.append(out)
    return torch.stack(rows).view(B, A, C)


# ---- independent implementations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [None, (((5, 3), (2, 2)), ((4, 7), (3, 1)))], ids=["halves", "cameras_differ"])
def test_zeros_is_grid_sample(impl, levels):
    """Values and all gradients are those of F.grid_sample and einsum, in float64."""
    args = make(impl, outside="zeros", levels=levels)
    close(value_and_grads(OPERATOR.call(impl), args), value_and_grads(with_grid_sample, args))


@pytest.mark.parametrize("outside", ["drop", "zeros"])
@pytest.mark.parametrize("layout", ["uniform", "hostile"])
def test_loops(impl, outside, layout):
    """Matches the formula as plain loops, where dropped samples and missing corners are never read."""
    args = make(impl, B=1, outside=outside, layout=layout, levels=(((5, 3), (2, 2)), ((1, 4), (3, 1))))
    close(value_and_grads(OPERATOR.call(impl), args), value_and_grads(by_loops, args))


def test_by_hand(impl):
    """Two groups on a map of two pixels: in the middle, on the left pixel, half outside, at the edge."""
    features = torch.tensor([[[1.0, 10.0], [2.0, 20.0]]], device=impl.device)
    locations = torch.tensor([[0.5, 0.5], [0.25, 0.5], [0.125, 0.5], [0.0, 0.5]], device=impl.device).view(1, 4, 1, 1, 2)
    weights = torch.tensor([1.0, 2.0], device=impl.device).expand(1, 4, 1, 1, 1, 2)
    call = lambda outside: OPERATOR.call(impl)(features, [[(1, 2)]], None, locations, weights, outside)[0].tolist()
    assert call("zeros") == [[1.5, 30.0], [1.0, 20.0], [0.75, 15.0], [0.5, 10.0]]
    assert call("drop") == [[1.5, 30.0], [1.0, 20.0], [0.75, 15.0], [0.0, 0.0]]


# ---- properties ---------------------------------------------------------------------------------------------------------------


def test_linear_in_features_and_weights(impl):
    """f(αa + βb) = αf(a) + βf(b) in either argument."""
    a, shapes, starts, locations, w, outside = make(impl)
    b, _, _, _, v, _ = make(impl, seed=9)
    fn = lambda x, y: OPERATOR.call(impl)(x, shapes, starts, locations, y, outside)
    torch.testing.assert_close(fn(2 * a - 3 * b, w), 2 * fn(a, w) - 3 * fn(b, w))
    torch.testing.assert_close(fn(a, 2 * w - 3 * v), 2 * fn(a, w) - 3 * fn(a, v))


def test_partition_of_unity(impl):
    """Constant features give the sum of the weights wherever all corners are inside."""
    features, shapes, starts, locations, weights, outside = make(impl, torch.float32, H=8, W=8, layout="inside")
    out = OPERATOR.call(impl)(torch.ones_like(features), shapes, starts, 0.25 + 0.5 * locations, weights, outside)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-6, atol=0)


def test_permutations(impl):
    """Permuting anchors, points or cameras permutes the result; cameras move with their features, wherever these are stored."""
    features, shapes, starts, locations, weights, outside = args = make(impl, levels=(((5, 3), (2, 2)), ((4, 7), (3, 1))))
    fn = OPERATOR.call(impl)
    out = fn(*args)
    a, p = torch.tensor([2, 0, 1], device=impl.device), torch.tensor([1, 0], device=impl.device)
    torch.testing.assert_close(fn(features, shapes, starts, locations[:, a], weights[:, a], outside), out[:, a], rtol=0, atol=0)
    torch.testing.assert_close(fn(features, shapes, starts, locations[:, :, p], weights[:, :, p], outside), out)
    near, far = features.split([19, 31], 1)
    swapped = fn(torch.cat([far, near], 1), shapes[::-1], None, locations[:, :, :, p], weights[:, :, :, p], outside)
    torch.testing.assert_close(swapped, out)
    elsewhere = fn(torch.cat([far, near], 1), shapes, [(31, 46), (0, 28)], locations, weights, outside)
    torch.testing.assert_close(elsewhere, out)


def test_adjoint(impl):
    """Σ out·g equals the same sum over features and over weights, each with its gradient: nothing is lost or counted twice."""
    args = make(impl, layout="hostile")
    (out,), (g_features, _, g_weights) = value_and_grads(OPERATOR.call(impl), args, [torch.ones(2, 3, 6, device=impl.device)])
    torch.testing.assert_close((g_features * args[0]).sum(), out.sum())
    torch.testing.assert_close((g_weights * args[4]).sum(), out.sum())


@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
def test_every_sample_counts_once(impl, mode):
    """With all samples on one pixel, the pixel's gradient is exactly the number of samples."""
    A = 40 if impl.interpreted else 3000
    features = torch.zeros(1, 9, 1, device=impl.device, requires_grad=True)
    locations, weights = (torch.full((1, A, *shape), 0.5, device=impl.device) for shape in ((2, 1, 2), (2, 1, 1, 1)))
    torch.use_deterministic_algorithms(mode)
    out = OPERATOR.call(impl)(features, [[(3, 3)]], None, locations, 2 * weights, "drop")
    (grad,) = torch.autograd.grad(out.sum(), features)
    assert grad[0, 4].item() == 2 * A
    assert grad.sum().item() == 2 * A


@pytest.mark.parametrize("outside", ["drop", "zeros"])
@pytest.mark.parametrize("few", [0, 1 << 30], ids=["many", "few"])
@pytest.mark.parametrize(("P", "C", "heads", "points"), [(3, 4, 4, 4), (9, 5, 3, 4), (21, 64, 2, 16)])
def test_points_that_meet(triton_target, monkeypatch, P, C, heads, points, few, outside):
    """Points in the same cell are summed together. Here most share one, at pixel centres, at pixel edges and outside, and they are
    split between programs in either order."""
    from sonde.grid.deformable_aggregation import gpu_configs

    monkeypatch.setattr(gpu_configs, "MANY", few)
    config = gpu_configs.Cells(points, heads if C == 64 else 1, 1)
    g, device = torch.Generator().manual_seed(P), triton_target.device
    shapes = (((2, 3), (1, 1)), ((1, 2), (3, 2)))
    eighths = torch.randint(-2, 11, (2, 3, P, 2, 2), generator=g, dtype=torch.float64) / 8
    features, weights = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((2, 15, C * heads), (2, 3, P, 2, 2, heads))
    )
    args = [features.to(device), shapes, None, eighths.to(device), weights.to(device), outside]
    with sonde.jit.settings.set(sonde.jit.PickFixed(config)):
        got = value_and_grads(OPERATOR.call(triton_target), args)
    close(got, value_and_grads(OPERATOR.call(Target("reference")), args))


@pytest.mark.parametrize(
    ("dtype", "how", "outside"),
    [
        (torch.float16, "numbers", "drop"),
        (torch.bfloat16, "tensors", "zeros"),
        (torch.float16, "int64", "drop"),
        (torch.bfloat16, "float64", "zeros"),
    ],
    ids=str,
)
def test_every_row_that_is_added_to_is_rounded(triton_target, monkeypatch, dtype, how, outside):
    """In half precision only rows that received a sum are rounded, and all of those are. Each camera sees one point, which shares
    no corner with another."""
    from sonde.grid.deformable_aggregation import gpu

    monkeypatch.setattr(gpu, "FORCE_INT64", how == "int64")
    shapes, S, C, P, device = (((4, 5), (2, 3)), ((3, 2), (1, 4))), 36, 10, 9, triton_target.device
    wide, middle = (torch.float64, 0.3 - 1e-12) if how == "float64" else (torch.float32, 0.4)  # another cell in float32
    places = torch.cartesian_prod(*[torch.tensor([0.05, middle, 0.97], dtype=wide)] * 2)
    B = len(places)
    locations = torch.full((B, 1, P, 2, 2), -5, dtype=wide)
    locations[:, 0, -1] = torch.stack([places, places.flip(0)], 1)
    features, weights = torch.randn(B, S, C).to(dtype), torch.ones(B, 1, P, 2, 2, 2, dtype=dtype)
    told = [shapes, None]
    if how == "tensors":
        told = [torch.tensor(shapes, device=device), torch.tensor([[0, 20], [26, 32]], device=device)]
    grad, found = 2.0 ** torch.arange(C), []  # powers of two avoid ties: torch rounds float64 twice, a GPU once
    for kind in (wide, dtype):
        leaf = features.to(device, kind).requires_grad_()
        with poisoned():
            out = OPERATOR.call(triton_target)(leaf, *told, locations.to(device), weights.to(device, kind), outside)
            found += torch.autograd.grad(out, leaf, grad.to(out).expand_as(out))
    assert (found[0] != 0).all(-1).sum(-1).unique().tolist() == [4, 7, 8, 14]
    assert torch.equal(found[1], found[0].to(dtype))


@pytest.mark.parametrize("C", [1, 12, 2050])
def test_rows_without_a_mark(triton_target, C):
    """Unmarked rows are left alone when sums are cleared and written as zeros when sums are rounded, whatever they contain."""
    from sonde.grid._scatter.marked_rows import clear_marked, round_marked, rows_of

    device = triton_target.device
    sums, marks = torch.randn(3, 7, C), torch.rand(3, 7) < 0.4
    sums[~marks] = float("nan")
    given, out = redzone(sums.to(device)), torch.full_like(sums, 7, dtype=torch.float16, device=device)
    told = redzone(marks.to(device, torch.uint8))
    with poisoned():
        round_marked(rows_of(sums), given, out, told)
        clear_marked(rows_of(sums), given, told)
    assert torch.equal(out.cpu(), torch.where(marks[..., None], sums, 0).half())
    torch.testing.assert_close(given.cpu(), torch.where(marks[..., None], 0, sums), rtol=0, atol=0, equal_nan=True)


def test_the_batch_decides_nothing_that_rounds(triton_target):
    """The batch size may change the points per program, and with it the rounding, only where the features' gradient is computed,
    whose order of additions is not fixed anyway."""
    from sonde.grid.deformable_aggregation import gpu_configs

    cars = dict(S=89760, A=900, N=78, cams=6, L=4, C=256, G=8, row=256, batch=89760 * 256, vector=16, itemsize=4, slices=1)
    how = dict(drop=True, table=True, mask=False, wide=torch.float32, int64=False, gradients=True)
    for adds, alike in ((False, True), (True, False)):
        one, many = (gpu_configs.Problem(B, **cars, **how, adds=adds) for B in (1, 64))
        config = gpu_configs.default_cells(one)
        assert config == gpu_configs.default_cells(many)
        one, many = gpu_configs.launch_cells(one, config), gpu_configs.launch_cells(many, config)
        assert ((one.sizes, one.constants, one.num_warps) == (many.sizes, many.constants, many.num_warps)) is alike


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_weight_that_is_no_number_stays_where_it_is(impl, wrong):
    """A non-finite weight spoils the pixels around its own point and the points in the same cell, but not the neighbouring
    pixels."""
    features, weights = torch.ones(1, 12, 4), torch.ones(1, 1, 5, 1, 1, 1)
    weights[:, :, 1] = wrong
    x = torch.tensor([1.25, 4.25, 6.25, 9.25, 4.5]) / 12  # the second reads pixels 3 and 4, the third 5 and 6, the last only 4
    locations = torch.stack([x, torch.full((5,), 0.5)], -1).view(1, 1, 5, 1, 2)
    args = [t.to(impl.device) for t in (features, locations, weights)]
    call = lambda target: lambda f, x, w: OPERATOR.call(target)(f, [[(1, 12)]], None, x, w, "drop")
    d_features, d_locations, _ = value_and_grads(call(impl), args)[1]
    torch.testing.assert_close(d_features, value_and_grads(call(Target("reference")), args)[1][0], equal_nan=True)
    assert d_features[0, :, 0].isfinite().tolist() == [i not in (3, 4) for i in range(12)]
    assert d_locations[0, 0, [0, 2, 3, 4]].isfinite().all()


# ---- edges --------------------------------------------------------------------------------------------------------------------


def test_behind_the_camera(impl):
    """Points far outside, at the edges or NaN read nothing and get zero gradients, whatever their weights."""
    features, shapes, starts, locations, weights, _ = make(impl, D=8, L=1, layout="inside")
    want = OPERATOR.call(impl)(features, shapes, starts, locations[:, :, :1], weights[:, :, :1], "drop")
    away = [(1e7, 0.5), (-1e7, 0.5), (0.5, 3.4e38), (torch.nan, 0.5), (0.5, -torch.inf), (0.0, 0.5), (0.5, 1.0)]
    locations[:, :, 1:] = torch.tensor(away, dtype=torch.float64, device=impl.device)[:, None]
    weights[:, :, 1:] = torch.nan
    (out,), grads = value_and_grads(OPERATOR.call(impl), [features, shapes, starts, locations, weights, "drop"])
    torch.testing.assert_close(out, want)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[1][:, :, 1:].any()
    assert not grads[2][:, :, 1:].any()


def test_nothing_else_is_read(impl):
    """Pixels that no sample touches may hold anything; so may the levels of a camera that sees nothing."""
    features, shapes, starts, locations, weights, _ = make(impl, B=1, levels=((4, 4),), layout="inside")
    locations[:, :, :, 0] = 0.25 + 0.25 * locations[:, :, :, 0]  # pixels 0 to 2 along either axis
    locations[:, :, :, 1] = 2
    want = value_and_grads(OPERATOR.call(impl), [features, shapes, starts, locations, weights, "drop"])
    features = features.clone()
    features[:, [3, 7, 11, 12, 13, 14, 15]] = torch.nan
    features[:, 16:] = torch.inf
    with poisoned():
        got = value_and_grads(OPERATOR.call(impl), [redzone(features), shapes, starts, locations, weights, "drop"])
    close(got, want)


def test_edges_of_the_image(impl):
    """The two conventions for points outside differ only in the half pixel along the edges."""
    inside = make(impl, layout="inside")
    fn = OPERATOR.call(impl)
    torch.testing.assert_close(fn(*inside), fn(*inside[:-1], "zeros"), rtol=0, atol=0)
    edge = replaced(inside, [3], [inside[3].round()])
    assert not fn(*edge).any()
    assert fn(*edge[:-1], "zeros").any()
    assert not any(g.any() for g in value_and_grads(fn, edge)[1])


# ---- levels -------------------------------------------------------------------------------------------------------------------


def test_levels_in_any_words(impl):
    """Levels given as tuples, lists or int32 or int64 CPU tensors, with or without starts, give the same result."""
    features, shapes, _, locations, weights, outside = make(impl, levels=(((5, 3), (2, 2)), ((4, 7), (3, 1))))
    fn = lambda shapes, starts: OPERATOR.call(impl)(features, shapes, starts, locations, weights, outside)
    want, starts = fn(shapes, None), ((0, 15), (19, 47))
    lists = [[list(size) for size in levels] for levels in shapes]
    for given_shapes, given_starts in (
        (lists, starts),
        (torch.tensor(shapes), None),
        (torch.tensor(shapes), torch.tensor(starts)),
        (torch.tensor(shapes, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)),
        (shapes, torch.tensor(starts)),
    ):
        assert torch.equal(fn(given_shapes, given_starts), want)


def test_maps_of_each_level(impl):
    """A list of maps gives the same as the rows that feature_maps_format makes of it, and each map gets its gradient."""
    g = torch.Generator(impl.device).manual_seed(0)
    maps = [torch.randn(2, 2, 6, h, w, dtype=torch.float64, device=impl.device, generator=g) for h, w in ((4, 5), (2, 3))]
    _, _, _, locations, weights, _ = make(impl)
    features, shapes, starts = sonde.feature_maps_format(maps)
    assert (shapes, starts) == ((((4, 5), (2, 3)),) * 2, ((0, 20), (26, 46)))
    for camera in range(2):
        for level in range(2):
            rows = features[:, starts[camera][level] :][:, : math.prod(shapes[camera][level])]
            assert torch.equal(rows, maps[level][:, camera].flatten(2).transpose(1, 2))
    leaf = leaves(maps)
    out = sonde.deformable_aggregation(leaf, locations=locations, weights=weights, impl=impl.impl)
    assert torch.equal(out, sonde.deformable_aggregation(features, shapes, starts, locations, weights, impl=impl.impl))
    grads = torch.autograd.grad(out, leaf, cotangents([out]))
    _, (want, _, _) = value_and_grads(OPERATOR.call(impl), [features, shapes, starts, locations, weights, "drop"])
    torch.testing.assert_close(sonde.feature_maps_format(grads)[0], want)


WILD = [  # one level each for two cameras of 30 rows together: sizes, starts
    ([[3, 5], [3, 5]], [0, 15]),
    ([[3, 5], [3, 5]], [-7, 22]),
    ([[3, 5], [3, 5]], [2**40, -(2**40)]),
    ([[2**31, 2**31], [1, 40]], [0, 0]),
    ([[2**62, 2**62], [2**20, 2**20]], [2**62, -3]),
    ([[-3, 5], [0, 9]], [0, 0]),
]


@pytest.mark.parametrize("outside", ["drop", "zeros"])
@pytest.mark.parametrize(("sizes", "starts"), WILD)
def test_tensors_that_point_outside_read_nothing(impl, sizes, starts, outside):
    """Level tensors that the host never checked are masked by the number of rows, in both passes."""
    features, _, _, locations, weights, _ = make(impl, torch.float32, levels=((3, 5),), L=1, layout="hostile")
    sizes, starts = (torch.tensor(x, device=impl.device).unsqueeze(1) for x in (sizes, starts))
    args = [redzone(features), sizes, starts, locations, weights, (), outside == "drop"]
    with poisoned():
        got = value_and_grads(lambda *a: _deformable_aggregation(*a, impl=impl.impl), args)
    want = value_and_grads(OPERATOR.definition, args)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_tensors_stay_tensors_in_a_graph(impl):
    """One graph serves any contents of the level tensors: tracing does not read them."""
    torch._dynamo.reset()
    features, shapes, _, locations, weights, outside = make(impl, torch.float32, levels=(((5, 3), (2, 2)), ((4, 7), (3, 1))))
    compiled = torch.compile(OPERATOR.call(impl), fullgraph=True, backend="aot_eager")
    starts = torch.tensor([(0, 15), (19, 47)], device=impl.device)
    want = OPERATOR.call(impl)(features, shapes, None, locations, weights, outside)
    torch.testing.assert_close(compiled(features, torch.tensor(shapes).to(starts), starts, locations, weights, outside), want)
    other = torch.tensor([(31, 46), (0, 28)], device=impl.device)
    near, far = features.split([19, 31], 1)
    moved = torch.cat([far, near], 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(moved, torch.tensor(shapes).to(starts), other, locations, weights, outside), want)
    torch._dynamo.reset()


def test_levels_are_not_mapped(impl):
    """vmap passes levels through unmapped, as numbers and as tensors, and refuses to map them."""
    args = make(impl)
    features, shapes, starts = args[0], torch.tensor(args[1]), torch.tensor([(0, 30), (39, 69)])
    several = torch.stack([features, 2 * features])
    fn = lambda f, s, t: _deformable_aggregation(f, s, t, *args[3:5], () if isinstance(s, torch.Tensor) else levels, True, impl=i)
    levels, i = OPERATOR.registered(*args)[5], impl.impl
    want = OPERATOR.call(impl)(*args)
    for given_shapes, given_starts in ((None, None), (shapes.to(features.device), starts.to(features.device))):
        got = torch.vmap(fn, (0, None, None))(several, given_shapes, given_starts)
        torch.testing.assert_close(got, torch.stack([want, 2 * want]))
    if impl.impl != "reference":
        mapped = torch.stack([shapes, shapes]).to(features.device)
        with pytest.raises(ValueError, match="spatial_shapes must be the same for all rows"):
            torch.vmap(fn, (0, 0, None))(several, mapped, starts.to(features.device))


# ---- hypothesis ---------------------------------------------------------------------------------------------------------------

if given is not None:

    @given(st.data())
    def test_any_sizes(target, data):
        """Random numbers of cameras, levels, points, groups and channels, with a resolution for each camera."""
        few = 2 if target.interpreted else 4
        sizes = {k: data.draw(st.integers(0, few), label=k) for k in ("B", "Q", "D", "cams", "L", "heads")}
        sizes["C"] = data.draw(st.integers(0, 35), label="C")
        side = st.integers(0, 5)
        of_camera = st.tuples(*[st.tuples(side, side)] * sizes["L"])
        levels = data.draw(st.tuples(*[of_camera] * sizes["cams"]), label="levels")
        options = dict(
            outside=data.draw(st.sampled_from(["drop", "zeros"])), layout=data.draw(st.sampled_from(["uniform", "hostile"]))
        )
        given_levels = dict(levels=levels) if sizes["cams"] * sizes["L"] else {}
        args = [redzone(a) for a in OPERATOR.make(**sizes, **given_levels, **options, device=target.device)]
        with poisoned():
            assert_agrees(OPERATOR, target, args, f"{sizes} {levels} {options}", slack=True)


# ---- errors -------------------------------------------------------------------------------------------------------------------

SHAPES = (((5, 6), (3, 3)),) * 2
BAD = {
    "sum": (
        dict(spatial_shapes=(((5, 6), (3, 3)), ((5, 6), (3, 4)))),
        ValueError,
        ["spatial_shapes must sum to the 78 rows", "81"],
    ),
    "starts_overlap": (  # as the originals count the starts of groups of cameras
        dict(level_starts=((0, 30), (0, 30))),
        ValueError,
        ["level_starts must give every level rows of its own", "got [0, 30, 0, 30]", "level_starts=None is the running sum"],
    ),
    "sum_of_tensor": (dict(spatial_shapes=torch.ones(2, 2, 2).long()), ValueError, ["must sum to the 78 rows", "with 4 pixels"]),
    "negative": (dict(spatial_shapes=(((-5, -6), (3, 3)), ((5, 6), (3, 3)))), ValueError, ["spatial_shapes", "got (-5, -6)"]),
    "huge": (dict(spatial_shapes=(((2**40, 0), (3, 3)), ((5, 6), (3, 3)))), ValueError, ["spatial_shapes", "2**31 - 1"]),
    "cameras": (dict(spatial_shapes=SHAPES[:1]), ValueError, ["[cams, L, 2] with cams=2, L=2", "got [1, 2, 2]"]),
    "levels": (dict(spatial_shapes=(((5, 6),),) * 2), ValueError, ["with cams=2, L=2 (from weights)", "got [2, 1, 2]"]),
    "ragged": (dict(spatial_shapes=(((5, 6), (3, 3)), ((5, 6),))), ValueError, ["spatial_shapes must be integers [cams, L, 2]"]),
    "triples": (dict(spatial_shapes=(((5, 6, 1), (3, 3, 1)),) * 2), ValueError, ["spatial_shapes must be integers [cams, L, 2]"]),
    "flat": (dict(spatial_shapes=(5, 6)), TypeError, ["spatial_shapes must be integers [cams, L, 2]", "got (5, 6)"]),
    "floats": (dict(spatial_shapes=(((5.0, 6.0), (3, 3)),) * 2), TypeError, ["spatial_shapes must be integers", "5.0"]),
    "booleans": (dict(spatial_shapes=(((True, 6), (3, 3)),) * 2), TypeError, ["spatial_shapes must be integers", "True"]),
    "none": (dict(spatial_shapes=None), TypeError, ["spatial_shapes must be integers", "got None"]),
    "float_tensor": (dict(spatial_shapes=torch.ones(2, 2, 2)), TypeError, ["spatial_shapes", "float32", ".long()"]),
    "starts_outside": (dict(level_starts=((0, 30), (39, 70))), ValueError, ["level_starts", "78 rows of features", "starts at 70"]),
    "starts_negative": (dict(level_starts=((0, -1), (39, 69))), ValueError, ["level_starts", "starts at -1"]),
    "starts_count": (dict(level_starts=((0,), (39,))), ValueError, ["level_starts must be [cams, L] = [2, 2]", "got [2, 1]"]),
    "starts_words": (dict(level_starts="none"), TypeError, ["level_starts must be integers [cams, L]", "'none'"]),
    "starts_device": (
        dict(level_starts=torch.zeros(2, 2, device="meta").long()),
        ValueError,
        ["spatial_shapes and level_starts must both be tensors", "tuple and a tensor on meta"],
    ),
    "both_elsewhere": (
        dict(spatial_shapes=torch.zeros(2, 2, 2, device="meta").long(), level_starts=torch.zeros(2, 2, device="meta").long()),
        ValueError,
        ["spatial_shapes must be on", "got meta"],
    ),
    "groups": (dict(weights=torch.ones(2, 3, 2, 2, 2, 4)), ValueError, ["G groups that divide C=6", "got [2, 3, 2, 2, 2, 4]"]),
    "points": (dict(weights=torch.ones(2, 3, 3, 2, 2, 2)), ValueError, ["weights must be", "P=2 (from locations)"]),
    "triple_locations": (dict(locations=torch.ones(2, 3, 2, 2, 3)), ValueError, ["locations must be [B, A, P, cams, 2]"]),
    "no_locations": (dict(locations=None), TypeError, ["locations must be a tensor", "NoneType"]),
    "outside": (dict(outside="border"), ValueError, ["outside must be one of 'drop', 'zeros'", "'border'"]),
    "outside_kind": (dict(outside=["drop"]), ValueError, ["outside must be one of", "['drop']"]),
    "maps_and_shapes": (dict(features=[torch.ones(2, 2, 6, 5, 6)]), ValueError, ["must be None where features is a list of maps"]),
    "maps_of_numbers": (dict(features=[1.0]), TypeError, ["features must be a tensor", "list of float"]),
    "no_maps": (dict(features=[], spatial_shapes=None), TypeError, ["features must be a list of tensors", "got []"]),
    "maps_differ": (
        dict(features=[torch.ones(2, 2, 6, 5, 6), torch.ones(2, 2, 7, 3, 3)], spatial_shapes=None),
        ValueError,
        ["features[1] must be [B, cams, C, H1, W1]", "C=6 (from features[0])"],
    ),
    "maps_of_dtypes": (
        dict(features=[torch.ones(2, 2, 6, 5, 6), torch.ones(2, 2, 6, 3, 3).half()], spatial_shapes=None),
        TypeError,
        ["features[1] must be torch.float32", "float16"],
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("numba_target")
def test_messages(case, monkeypatch):
    """Each message names the argument, what was expected and what was given; nothing is launched."""
    wrong, kind, words = BAD[case]
    args = dict(zip(OPERATOR.arguments, make(Target("reference"), torch.float32))) | wrong
    monkeypatch.setattr(OPERATOR.kernels("numba"), "forward_pass", None)
    with pytest.raises(kind) as caught:
        sonde.deformable_aggregation(**args)
    for word in ("deformable_aggregation: ", *words):
        assert word in str(caught.value), caught.value


def test_what_was_accepted_is_not_accepted_for_ever():
    """Cached checks distinguish rows, levels and dtypes: an accepted call does not let a wrong one through."""
    args = make(Target("reference"), torch.float32)
    fn = lambda *a: sonde.deformable_aggregation(*a[:5], outside=a[5])
    fn(*args)
    for i, x in ((0, args[0][:, 1:]), (1, (((5, 6), (3, 3)), ((5, 6), (3, 2)))), (1, (((5, 6), (3, 3)), ((5, 6.0), (3, 3))))):
        with pytest.raises((ValueError, TypeError), match="spatial_shapes"):
            fn(*replaced(args, [i], [x]))
    assert floats(args) == [0, 3, 4]
