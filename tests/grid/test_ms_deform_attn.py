"""``ms_deform_attn`` compared with independent implementations, plus the cases only this operator can get wrong."""

# ruff: noqa: E731 (short functions read better on one line)

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import sonde
from helpers.exactness import assert_agrees, same_bits
from helpers.memory import poisoned, redzone
from helpers.operators import Target, leaves, replaced, value_and_grads
from sonde.grid._pyramid import levels as _pyramid
from sonde.grid.ms_deform_attn.api import _ms_deform_attn
from sonde.operators import OPERATORS

try:
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:  # the GPU machine has none
    given = None

OPERATOR = OPERATORS["ms_deform_attn"]
SIZES = dict(B=2, C=3, H=5, W=6, Q=3, D=2, heads=2, L=2)


def make(target: Target, dtype=torch.float64, **sizes):
    return list(OPERATOR.make(**{**SIZES, **sizes}, dtype=dtype, device=target.device))


def close(got, want):
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def with_grid_sample(value, shapes, starts, locations, weights, logits):
    """The definition by F.grid_sample, head by head and level by level."""
    if logits:
        weights = weights.flatten(3).softmax(-1).view(weights.shape)
    heads = []
    for head in range(value.shape[2]):
        out, row = torch.zeros((), dtype=value.dtype, device=value.device), 0
        for level, (h, w) in enumerate(shapes):
            pixels = value[:, row : row + h * w, head].transpose(1, 2).unflatten(2, (h, w))
            row += h * w
            values = F.grid_sample(pixels, 2 * locations[:, :, head, level] - 1, align_corners=False)  # [B, D, Q, P]
            out = out + torch.einsum("bdqp,bqp->bqd", values, weights[:, :, head, level])
        heads.append(out)
    return torch.cat(heads, -1)


def corners(x, size):
    """The existing pixels on either side of position x along one axis, and their weights."""
    x0 = x.detach().floor()
    return [(int(i), weight) for i, weight in ((x0, 1 - (x - x0)), (x0 + 1, x - x0)) if 0 <= i < size]  # NaN has none


def by_loops(value, shapes, starts, locations, weights, logits):
    """The formula as plain loops over samples and pixels; autograd differentiates what is used."""
    B, Q, heads, _, P = weights.shape
    D, rows = value.shape[3], []
    for b, q, head in torch.cartesian_prod(*map(torch.arange, (B, Q, heads))).tolist():
        out, first = torch.zeros(D, dtype=value.dtype, device=value.device), 0
        share = weights[b, q, head].exp() / weights[b, q, head].exp().sum() if logits else weights[b, q, head]
        for j, (h, w) in enumerate(shapes):
            for p in range(P):
                u, v = locations[b, q, head, j, p]
                for column, wx in corners(u * w - 0.5, w):
                    for row, wy in corners(v * h - 0.5, h):
                        out = out + share[j, p] * wy * wx * value[b, first + row * w + column, head]
            first += h * w
        rows.append(out)
    return torch.stack(rows).view(B, Q, heads * D)


# ---- independent implementations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [False, True])
def test_grid_sample(impl, logits):
    """Values and all gradients are those of F.grid_sample and einsum, in float64."""
    args = make(impl, logits=logits)
    close(value_and_grads(OPERATOR.call(impl), args), value_and_grads(with_grid_sample, args))


@pytest.mark.parametrize("logits", [False, True])
def test_loops(impl, logits):
    """Matches the formula as plain loops, where samples with a non-finite location and missing corners are never read."""
    args = make(impl, B=1, logits=logits, layout="hostile", levels=((5, 3), (1, 4), (2, 2)))
    close(value_and_grads(OPERATOR.call(impl), args), value_and_grads(by_loops, args))


def test_by_hand(impl):
    """Two heads on a level of two pixels: in the middle, on the left pixel, half outside, outside."""
    value = torch.tensor([1.0, 10.0, 2.0, 20.0], device=impl.device).view(1, 2, 2, 1)
    places = torch.tensor([[0.5, 0.5], [0.25, 0.5], [0.0, 0.5], [-0.25, 0.5]], device=impl.device)
    locations = places.view(1, 4, 1, 1, 1, 2).expand(1, 4, 2, 1, 1, 2)
    out = OPERATOR.call(impl)(value, [(1, 2)], None, locations, torch.ones(1, 4, 2, 1, 1, device=impl.device), False)
    assert out[0].tolist() == [[1.5, 15.0], [1.0, 10.0], [0.5, 5.0], [0.0, 0.0]]


# ---- properties ---------------------------------------------------------------------------------------------------------------


def test_linear_in_value_and_weights(impl):
    """f(αa + βb) = αf(a) + βf(b) in either argument."""
    a, shapes, starts, locations, w, logits = make(impl)
    b, _, _, _, v, _ = make(impl, seed=9)
    fn = lambda x, y: OPERATOR.call(impl)(x, shapes, starts, locations, y, logits)
    torch.testing.assert_close(fn(2 * a - 3 * b, w), 2 * fn(a, w) - 3 * fn(b, w))
    torch.testing.assert_close(fn(a, 2 * w - 3 * v), 2 * fn(a, w) - 3 * fn(a, v))


@pytest.mark.parametrize("logits", [False, True])
def test_partition_of_unity(impl, logits):
    """A constant value comes back unchanged wherever all corners are inside, since the weights of a head sum to one."""
    value, shapes, starts, locations, weights, _ = make(impl, torch.float32, H=8, W=8, layout="inside", logits=logits)
    out = OPERATOR.call(impl)(torch.ones_like(value), shapes, starts, 0.25 + 0.5 * locations, weights, logits)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-6, atol=0)


def test_permutations(impl):
    """Permuting queries or heads permutes the result; reordering points of a level, or levels with their rows, changes nothing."""
    value, shapes, starts, locations, weights, logits = args = make(impl, levels=((5, 3), (4, 7)))
    fn = OPERATOR.call(impl)
    out = fn(*args)
    q, two = torch.tensor([2, 0, 1], device=impl.device), torch.tensor([1, 0], device=impl.device)
    torch.testing.assert_close(fn(value, shapes, starts, locations[:, q], weights[:, q], logits), out[:, q], rtol=0, atol=0)
    heads = fn(value[:, :, two], shapes, starts, locations[:, :, two], weights[:, :, two], logits)
    torch.testing.assert_close(heads, out.unflatten(2, (2, 3))[:, :, two].flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(fn(value, shapes, starts, locations[..., two, :], weights[..., two], logits), out)
    near, far = value.split([15, 28], 1)
    moved = torch.cat([far, near], 1)
    torch.testing.assert_close(fn(moved, shapes[::-1], None, locations[:, :, :, two], weights[:, :, :, two], logits), out)
    torch.testing.assert_close(fn(moved, shapes, [28, 0], locations, weights, logits), out)


@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
def test_every_sample_counts_once(impl, mode):
    """With all samples on one pixel, the pixel's gradient is exactly the number of samples."""
    Q = 40 if impl.interpreted else 3000
    value = torch.zeros(1, 9, 1, 1, device=impl.device, requires_grad=True)
    locations, weights = (torch.full((1, Q, 1, 1, *shape), 0.5, device=impl.device) for shape in ((2, 2), (2,)))
    torch.use_deterministic_algorithms(mode)
    out = OPERATOR.call(impl)(value, [(3, 3)], None, locations, 2 * weights, False)
    (grad,) = torch.autograd.grad(out.sum(), value)
    assert grad[0, 4].item() == 2 * Q
    assert grad.sum().item() == 2 * Q


# ---- logits -------------------------------------------------------------------------------------------------------------------


def test_logits_are_softmax_before(impl):
    """The fused softmax equals a softmax before the call, also for samples outside the image, in both derivatives."""
    args = make(impl, layout="hostile", logits=True)
    before = lambda v, s, t, x, w, _: OPERATOR.call(impl)(v, s, t, x, w.flatten(3).softmax(-1).view(w.shape), False)
    close(value_and_grads(OPERATOR.call(impl), args), value_and_grads(before, args))


def test_logits_of_any_size(impl):
    """Huge logits neither overflow nor vanish; a logit of −inf has weight zero and a zero gradient."""
    value, shapes, starts, locations, weights, _ = make(impl, torch.float32, logits=True, layout="inside")
    for offset in (-3e4, 3e4):
        moved = weights.mul(2**-3).round().add(offset)  # so that the sum is exact
        want = OPERATOR.call(impl)(value, shapes, starts, locations, moved - offset, True)
        torch.testing.assert_close(OPERATOR.call(impl)(value, shapes, starts, locations, moved, True), want)
    weights[:, :, :, 1] = -torch.inf
    (out,), grads = value_and_grads(OPERATOR.call(impl), [value, shapes, starts, locations, weights, True])
    want = OPERATOR.call(impl)(value[:, :30], shapes[:1], None, locations[:, :, :, :1], weights[:, :, :, :1], True)
    torch.testing.assert_close(out, want)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[2][:, :, :, 1].any()


# ---- edges and levels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("B", "heads"), [(1, 5), (3, 3), (1, 1)])
def test_tasks_of_any_number_of_heads(numba_target, B, heads):
    """A task may own several heads of the gradient or part of one, and the gradient may be computed with the others or alone: the
    bits are the same."""
    args, found = make(numba_target, torch.float32, B=B, heads=heads, C=37, Q=40), []
    for threads in (1, 2, 4, 16):
        torch.set_num_threads(threads)
        found.append(value_and_grads(OPERATOR.call(numba_target), args))
    want = value_and_grads(OPERATOR.call(Target("reference")), args)
    for got in found:
        assert same_bits([*got[0], *got[1]], [*found[0][0], *found[0][1]])
        for x, y in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    value, *rest = leaves(args)
    all_three, alone = (torch.autograd.grad(OPERATOR.call(numba_target)(value, *x).sum(), value) for x in (rest, args[1:]))
    assert same_bits(all_three, alone)


def test_number_of_threads_changes_meanwhile(numba_target, monkeypatch):
    """If the number of threads changes during a call, the split of the work does not: no sample counts twice."""
    args = make(numba_target, torch.float32, B=1, heads=1, C=37, Q=40)
    want = value_and_grads(OPERATOR.call(numba_target), args)
    for numbers in ((1, 16), (16, 1)):
        changing = itertools.cycle(numbers)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: next(changing))  # noqa: B023 (called within)
            got = value_and_grads(OPERATOR.call(numba_target), args)
        assert same_bits([*got[0], *got[1]], [*want[0], *want[1]])


@pytest.mark.parametrize("W", [25, 50, 100])
def test_centres_of_pixels(impl, W):
    """A location that rounds to a pixel centre belongs to the cell that begins there; the next cell would give other gradients."""
    g = torch.Generator().manual_seed(0)
    value, weights = torch.randn(1, W, 1, 20, generator=g), torch.rand(1, W, 1, 1, 1, generator=g)
    locations = torch.stack([(torch.arange(W) + 0.5) / W, torch.full((W,), 0.5)], -1).view(1, W, 1, 1, 1, 2)
    args = [value.to(impl.device), ((1, W),), None, locations.to(impl.device), weights.to(impl.device), False]
    got = value_and_grads(OPERATOR.call(impl), args)
    want = value_and_grads(OPERATOR.call(Target("reference")), args)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("P", "D", "logits"), [(1, 32, 0), (2, 20, 1), (3, 7, 0), (4, 32, 1), (8, 66, 0), (9, 16, 0)])
def test_many_queries(triton_target, monkeypatch, P, D, logits, dtype):
    """With many queries one thread computes each sample's position for the others, in slices of the samples, and bfloat16 is read
    in pairs."""
    from sonde.grid.ms_deform_attn import gpu_configs

    monkeypatch.setattr(gpu_configs, "FEW", 0)
    args = make(triton_target, dtype, Q=21, D=P, C=D)[:-1]
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
    expected = sonde.ms_deform_attn(*wide, logits=bool(logits), impl="reference").to(dtype)
    torch.testing.assert_close(sonde.ms_deform_attn(*args, logits=bool(logits), impl="triton"), expected)


@pytest.mark.parametrize("few", [0, 8192])
@pytest.mark.parametrize(("H", "W"), [(1, 1), (1, 2), (2, 1), (3, 2), (5, 4)])
@pytest.mark.parametrize("P", [2, 3, 4, 8, 13])
def test_points_that_meet(triton_target, monkeypatch, P, H, W, few):
    """Points of a query on the same pixel are added once, together. Here all share pixels, at centres, at edges and outside."""
    from sonde.grid.ms_deform_attn import gpu_configs

    monkeypatch.setattr(gpu_configs, "FEW", few)
    g, device = torch.Generator().manual_seed(P), triton_target.device
    x, y = (torch.randint(-4, 4 * size + 5, (1, 21, 1, 1, P), generator=g) / (4 * size) for size in (W, H))
    value, weights = torch.randn(1, H * W, 1, 3, generator=g), torch.rand(1, 21, 1, 1, P, generator=g)
    args = [value.to(device), ((H, W),), None, torch.stack([x, y], -1).to(device), weights.to(device), False]
    got = value_and_grads(OPERATOR.call(triton_target), args)
    want = value_and_grads(OPERATOR.call(Target("reference")), args)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_channels_of_many_queries(triton_target, monkeypatch, dtype):
    from sonde.grid.ms_deform_attn import gpu_configs

    monkeypatch.setattr(gpu_configs, "FEW", 0)
    out = sonde.ms_deform_attn(*make(triton_target, dtype, C=0)[:-1], impl="triton")
    assert out.shape == (SIZES["B"], SIZES["Q"], 0)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_weight_that_is_no_number_stays_where_it_is(impl, wrong):
    """A non-finite weight spoils the pixels around its own point and no others."""
    value, weights = torch.ones(1, 12, 1, 4), torch.ones(1, 1, 1, 1, 4)
    weights[..., 1] = wrong
    x = torch.tensor([1.25, 4.25, 6.25, 9.25]) / 12  # the second reads pixels 3 and 4, the third 5 and 6
    args = [value, ((1, 12),), None, torch.stack([x, torch.full((4,), 0.5)], -1).view(1, 1, 1, 1, 4, 2), weights, False]
    args = [t.to(impl.device) if isinstance(t, torch.Tensor) else t for t in args]
    _, grads = value_and_grads(OPERATOR.call(impl), args)
    assert grads[0].isfinite().all(-1).flatten().tolist() == [i not in (3, 4) for i in range(12)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_values_at_any_address(triton_target, offset, dtype):
    """Values are read two at a time only where their address is aligned for it."""
    from sonde.grid._pyramid.gpu_levels import layout_of

    value, *others = make(triton_target, dtype, C=8)[:-1]
    room = torch.full((value.numel() + 8,), float("nan"), dtype=dtype, device=value.device)
    moved = room[offset : offset + value.numel()].view(value.shape).copy_(value)
    assert layout_of(moved, False).vector == (1 if offset % 2 else 16)
    found = sonde.ms_deform_attn(moved, *others, impl="triton")
    torch.testing.assert_close(found, sonde.ms_deform_attn(value, *others, impl="triton"), rtol=0, atol=0)


def test_absent_samples(impl):
    """Samples far outside or NaN read nothing and get zero gradients, whatever their weights."""
    value, shapes, starts, locations, weights, _ = make(impl, D=7, L=1, layout="inside")
    want = OPERATOR.call(impl)(value, shapes, starts, locations[..., :1, :], weights[..., :1], False)
    away = [(1e7, 0.5), (-1e7, 0.5), (0.5, 3.4e38), (torch.nan, 0.5), (0.5, -torch.inf), (0.5, 1.5)]
    locations[..., 1:, :] = torch.tensor(away, dtype=torch.float64, device=impl.device)
    weights[..., 1:] = torch.nan
    (out,), grads = value_and_grads(OPERATOR.call(impl), [value, shapes, starts, locations, weights, False])
    torch.testing.assert_close(out, want)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[1][..., 1:, :].any()
    assert not grads[2][..., 1:].any()


def test_nothing_else_is_read(impl):
    """Pixels that no sample of their head touches may hold anything."""
    value, shapes, starts, locations, weights, _ = make(impl, B=1, levels=((4, 4),), layout="inside")
    locations = 0.25 + 0.25 * locations  # pixels 0 to 2 along either axis
    locations[:, :, 1] += 0.25  # and 1 to 3
    want = value_and_grads(OPERATOR.call(impl), [value, shapes, starts, locations, weights, False])
    value = value.clone()
    value[:, [3, 7, 11, 12, 13, 14, 15], 0] = torch.nan
    value[:, [0, 1, 2, 3, 4, 8, 12], 1] = torch.inf
    with poisoned():
        close(value_and_grads(OPERATOR.call(impl), [redzone(value), shapes, starts, locations, weights, False]), want)


def test_levels_in_any_words(impl):
    """Levels given as tuples, lists or int32 or int64 CPU tensors, with or without starts, give the same result."""
    value, shapes, _, locations, weights, logits = make(impl, levels=((5, 3), (4, 7)))
    fn = lambda shapes, starts: OPERATOR.call(impl)(value, shapes, starts, locations, weights, logits)
    want, starts = fn(shapes, None), (0, 15)
    for given_shapes, given_starts in (
        ([list(size) for size in shapes], starts),
        (torch.tensor(shapes), None),
        (torch.tensor(shapes), torch.tensor(starts)),
        (torch.tensor(shapes, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)),
        (shapes, torch.tensor(starts)),
    ):
        assert torch.equal(fn(given_shapes, given_starts), want)


WILD = [  # two levels of 30 rows together: sizes, starts
    ([[3, 5], [3, 5]], [0, 15]),
    ([[3, 5], [3, 5]], [-7, 22]),
    ([[3, 5], [3, 5]], [2**40, -(2**40)]),
    ([[2**31, 2**31], [1, 40]], [0, 0]),
    ([[2**62, 2**62], [2**20, 2**20]], [2**62, -3]),
    ([[-3, 5], [0, 9]], [0, 0]),
]


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize(("sizes", "starts"), WILD)
def test_tensors_that_point_outside_read_nothing(impl, sizes, starts, logits):
    """Level tensors that the host never checked are masked by the number of rows, in both passes."""
    value, _, _, locations, weights, _ = make(impl, torch.float32, levels=((3, 5), (3, 5)), layout="hostile", logits=logits)
    sizes, starts = (torch.tensor(x, device=impl.device) for x in (sizes, starts))
    args = [redzone(value), sizes, starts, locations, weights, (), logits]
    with poisoned():
        got = value_and_grads(lambda *a: _ms_deform_attn(*a, impl=impl.impl), args)
    want = value_and_grads(OPERATOR.definition, args)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_tensors_stay_tensors_in_a_graph(impl):
    """One graph serves any contents of the level tensors: tracing does not read them."""
    torch._dynamo.reset()
    value, shapes, _, locations, weights, logits = make(impl, torch.float32, levels=((5, 3), (4, 7)))
    compiled = torch.compile(OPERATOR.call(impl), fullgraph=True, backend="aot_eager")
    sizes, starts = (torch.tensor(x, device=impl.device) for x in (shapes, (0, 15)))
    want = OPERATOR.call(impl)(value, shapes, None, locations, weights, logits)
    torch.testing.assert_close(compiled(value, sizes, starts, locations, weights, logits), want)
    moved = torch.cat([value[:, 15:], value[:, :15]], 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(
            compiled(moved, sizes, starts.flip(0) + starts.new_tensor([13, 0]), locations, weights, logits), want
        )
    torch._dynamo.reset()


def test_traces_leave_nothing_behind():
    """Sizes seen while tracing, symbols or tensors, do not enter the cache of checked levels."""
    args = make(Target("numba"), torch.float32)
    function = lambda value, locations, weights: sonde.ms_deform_attn(value, args[1], None, locations, weights, impl="reference")
    given = [args[0], *args[3:5]]
    want = function(*given)
    torch.testing.assert_close(make_fx(function, tracing_mode="symbolic")(*given)(*given), want)
    before = list(_pyramid._known)
    torch.testing.assert_close(torch.jit.trace(function, given)(*given), want)
    assert list(_pyramid._known) == before


# ---- hypothesis ---------------------------------------------------------------------------------------------------------------

if given is not None:

    @given(st.data())
    def test_any_sizes(target, data):
        """Random numbers of levels, points, heads and channels."""
        few = 2 if target.interpreted else 4
        sizes = {k: data.draw(st.integers(0, few), label=k) for k in ("B", "Q", "D", "heads")}
        sizes["C"] = data.draw(st.integers(0, 35), label="C")
        side = st.integers(0, 5)
        levels = data.draw(st.lists(st.tuples(side, side), max_size=few), label="levels")
        options = dict(logits=data.draw(st.booleans()), layout=data.draw(st.sampled_from(["uniform", "hostile"])))
        given_levels = dict(levels=tuple(levels)) if levels else dict(L=0)
        args = [redzone(a) for a in OPERATOR.make(**sizes, **given_levels, **options, device=target.device)]
        with poisoned():
            assert_agrees(OPERATOR, target, args, f"{sizes} {levels} {options}", slack=True)


def test_levels_in_any_order(impl):
    """Levels may lie in any order, and empty ones anywhere: each has rows of its own."""
    value, _, _, locations, weights, logits = make(impl)
    fn = OPERATOR.call(impl)
    want = fn(value, ((5, 6), (3, 3)), None, locations, weights, logits)
    turned = torch.cat([value[:, 30:], value[:, :30]], 1)
    assert torch.equal(fn(turned, ((5, 6), (3, 3)), (9, 0), locations, weights, logits), want)
    for start in (0, 17, 39):
        fn(value, ((39, 1), (0, 3)), (0, start), locations, weights, logits)


# ---- errors -------------------------------------------------------------------------------------------------------------------

BAD = {
    "sum": (
        dict(spatial_shapes=((5, 6), (3, 4))),
        ValueError,
        ["spatial_shapes must sum to the 39 rows of value", "got [(5, 6), (3, 4)]"],
    ),
    "negative": (dict(spatial_shapes=((-5, -6), (3, 3))), ValueError, ["spatial_shapes", "got (-5, -6)"]),
    "levels": (dict(spatial_shapes=((5, 6),)), ValueError, ["[L, 2] with L=2 (from weights)", "got [1, 2]"]),
    "nested": (dict(spatial_shapes=(((5, 6), (3, 3)),)), TypeError, ["spatial_shapes must be integers [L, 2]"]),
    "flat": (dict(spatial_shapes=(5, 6)), TypeError, ["spatial_shapes must be integers [L, 2]", "got (5, 6)"]),
    "floats": (dict(spatial_shapes=((5.0, 6), (3, 3))), TypeError, ["spatial_shapes must be integers", "5.0"]),
    "float_tensor": (dict(spatial_shapes=torch.ones(2, 2)), TypeError, ["spatial_shapes", "float32", ".long()"]),
    "starts_outside": (dict(level_starts=(0, 31)), ValueError, ["level_starts", "39 rows of value", "starts at 31"]),
    "starts_overlap": (dict(level_starts=(0, 21)), ValueError, ["level_starts must give every level", "got [0, 21]"]),
    "starts_of_tensors": (dict(level_starts=torch.tensor([9, 1])), ValueError, ["rows of its own", "got [9, 1] for"]),
    "starts_count": (dict(level_starts=(0, 30, 39)), ValueError, ["level_starts must be [L] = [2]", "got [3]"]),
    "starts_needed": (
        dict(spatial_shapes=torch.zeros(2, 2, device="meta").long()),
        ValueError,
        ["spatial_shapes and level_starts must both be tensors", "a tensor on meta and NoneType"],
    ),
    "heads": (dict(weights=torch.ones(2, 3, 3, 2, 2)), ValueError, ["weights must be [B, Q, h, L, P]", "h=2 (from value)"]),
    "rank": (dict(value=torch.ones(2, 39, 6)), ValueError, ["value must have 4 dimensions [B, S, h, D]", "got 3: [2, 39, 6]"]),
    "logits": (dict(logits=1), TypeError, ["logits must be True or False", "got 1"]),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("numba_target")
def test_messages(case, monkeypatch):
    """Each message names the argument, what was expected and what was given; nothing is launched."""
    wrong, kind, words = BAD[case]
    args = dict(zip(OPERATOR.arguments, make(Target("reference"), torch.float32))) | wrong
    monkeypatch.setattr(OPERATOR.kernels("numba"), "forward_pass", None)
    with pytest.raises(kind) as caught:
        sonde.ms_deform_attn(**args)
    for word in ("ms_deform_attn: ", *words):
        assert word in str(caught.value), caught.value


def test_what_was_accepted_is_not_accepted_for_ever():
    """Cached checks distinguish rows, levels and dtypes: an accepted call does not let a wrong one through."""
    args = make(Target("reference"), torch.float32)
    fn = OPERATOR.call("auto")
    fn(*args)
    for i, x in ((0, args[0][:, 1:]), (1, ((5, 6), (3, 2))), (1, ((5, 6), (3.0, 3)))):
        with pytest.raises((ValueError, TypeError), match="spatial_shapes"):
            fn(*replaced(args, [i], [x]))
