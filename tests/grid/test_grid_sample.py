"""``grid_sample``: equal to torch's in every mode, and the features torch does not have."""

# ruff: noqa: E731 (short functions read better on one line)

import inspect
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import sonde
import sonde.compat.torch
from helpers.exactness import assert_agrees, same_bits
from helpers.memory import allocations, poisoned, redzone
from helpers.operators import Target, cotangents, deterministic, leaves, value_and_grads
from helpers.spies import in_child, spy
from sonde.jit import bench
from sonde.jit.kernel import Tunable
from sonde.op.register import decide
from sonde.operators import OPERATORS

try:
    from hypothesis import given, settings
    from hypothesis import strategies as st
except ImportError:  # the GPU machine has none
    given = None

OPERATOR = OPERATORS["grid_sample"]
PADDINGS = ("zeros", "border", "reflection")
COMBINATIONS = [
    (dim, mode, padding, align)
    for dim, mode, padding, align in product((2, 3), ("bilinear", "nearest", "bicubic"), PADDINGS, (False, True))
    if (dim, mode) != (3, "bicubic")
]
every_combination = pytest.mark.parametrize(("dim", "mode", "padding", "align"), COMBINATIONS)
CORNERS = [-1.0, 1.0, 0.0, -0.5, 0.5, -0.75, 0.25, 1.25, -1.5, 1.5, -2.0, 3.0]  # borders, pixel centres and ties of small sizes


def call(target: Target):
    return OPERATOR.call(target)


def make(target: Target, dim=2, dtype=torch.float64, **options):
    sizes = dict(B=2, C=3, H=4, W=5, Q=3, D=4, **(dict(Z=3, K=2) if dim == 3 else {}))
    return OPERATOR.make(**{**sizes, **options}, dtype=dtype, device=target.device)


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def compare(function, args, tolerance=1e-11, note=""):
    """Compares values and both gradients with torch's, run outside the deterministic mode, where torch has no GPU backward."""
    got = value_and_grads(function, args)
    with deterministic(False):
        want = value_and_grads(F.grid_sample, args)
    for what, a, b in zip(("value", "input", "grid"), [*got[0], *got[1]], [*want[0], *want[1]]):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        worst = (a - b).abs().max().item() if b.numel() else 0.0
        assert worst <= tolerance * scale, f"{note} {what}: off by {worst:.3g}"


# ---- equal to torch -----------------------------------------------------------------------------------------------------------


@every_combination
def test_equals_torch(impl, dim, mode, padding, align):
    """Values and both gradients, also far outside, for an image wider than a vector and one with few channels."""
    if impl.interpreted and not (align and padding == "border"):
        pytest.skip("the interpreter is slow; test_deterministic_mode has every mode, the contract has them in float32")
    for C, scale in [((2, 1.0), (17, 7.0))[mode != "bicubic" and align]] if impl.interpreted else ((3, 1.0), (18, 7.0)):
        args = list(make(impl, dim, C=C, mode=mode, padding=padding, corners=align))
        args[1] = args[1] * scale
        compare(call(impl), args)
        if C == 18 and not impl.interpreted:
            args[0] = channels_last(args[0])
            compare(call(impl), args)


@every_combination
def test_equals_torch_on_edges(impl, dim, mode, padding, align):
    """At ±1, ties, pixel centres and reflected borders, for sizes one to four: the same pixel and the same zero derivative."""
    if impl.interpreted and (dim == 3 or mode == "bicubic"):
        pytest.skip("the interpreter is slow")
    grid = torch.tensor(list(product(CORNERS, repeat=2)), dtype=torch.float64)
    if dim == 3:
        grid = torch.cat([grid, grid.roll(5, 0)[:, :1]], 1)
    for size in ((2, 1, 4),) if impl.interpreted else ((1, 1, 1), (2, 1, 4), (1, 3, 2)):
        input = torch.randn(1, 2, *size[-dim:], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        args = (input.to(impl.device), grid.reshape(1, *[1] * (dim - 1), -1, dim).to(impl.device), mode, padding, align)
        compare(call(impl), args, note=str(size))


def test_documentation_examples(impl):
    """Examples from torch's documentation of grid_sample and affine_grid: the identity grid returns the image, a flow warps it."""
    image = torch.arange(25, dtype=torch.float64, device=impl.device).view(1, 1, 5, 5)
    theta = torch.eye(2, 3, dtype=torch.float64, device=impl.device)[None]
    for align in (False, True):
        grid = F.affine_grid(theta, [1, 1, 5, 5], align_corners=align)
        torch.testing.assert_close(call(impl)(image, grid, "bilinear", "zeros", align), image)
        # "x = -1, y = -1 is the left-top pixel, x = 1, y = 1 the right-bottom"
        corner = torch.tensor([[[[-1.0, -1.0], [1.0, 1.0]]]], dtype=torch.float64, device=impl.device)
        out = call(impl)(image, corner, "nearest", "border", True).flatten()
        assert out.tolist() == [0.0, 24.0]
    # "x = -3.5 reflects by border -1 and becomes x' = 1.5, then reflects by border 1": to 0.5 (the page says −0.5, torch does not)
    far = lambda x: torch.tensor([[[[x, 0.0]]]], dtype=torch.float64, device=impl.device)
    for x in (-3.5, 1.5, 0.5):
        got = call(impl)(image, far(x), "bilinear", "reflection", False)
        torch.testing.assert_close(got, F.grid_sample(image, far(0.5), align_corners=False))
    torch.testing.assert_close(call(impl)(image, far(-9.0), "bilinear", "border", False), image[..., 2:3, :1])


def test_nearest_takes_halves_to_the_even_pixel(impl):
    """Halves round to the even pixel: x = ½, 1½, 2½ give pixels 0, 2, 2, and −½ gives 0, not −1."""
    image = torch.arange(4.0, device=impl.device).view(1, 1, 1, 4)
    x = torch.tensor([-0.5, 0.5, 1.5, 2.5, 3.5], device=impl.device)
    grid = torch.stack([(2 * x + 1) / 4 - 1, torch.zeros_like(x)], -1)[None, None]
    assert call(impl)(image, grid, "nearest", "zeros", False).flatten().tolist() == [0.0, 0.0, 2.0, 2.0, 0.0]


def test_reflections_from_far_away(target):
    """After a thousand reflections float32 still finds the pixel that exact arithmetic finds."""
    input = torch.randn(1, 2, 5, 7, generator=torch.Generator().manual_seed(0)).to(target.device)
    u = torch.linspace(-999, 1003, 41, device=target.device)
    grid = torch.stack([u, u.flip(0) * 0.37], -1)[None, None]
    for mode, align in (("nearest", False), ("bilinear", False), ("bilinear", True), ("bicubic", False)):
        assert_agrees(OPERATOR, target, (input, grid, mode, "reflection", align), f"{mode} {align}")


def kinds(x):
    """0 where an entry is finite, otherwise a code for +∞, −∞ or NaN."""
    return x.isposinf() + 2 * x.isneginf() + 3 * x.isnan()


@every_combination
def test_pixels_and_gradients_that_are_not_finite(impl, dim, mode, padding, align):
    """Values and the input's gradient are infinite or NaN where torch's are, and the grid's gradient is finite where torch's is.

    Except that a sample which sees nothing has a gradient of zero, and so has every sample of the nearest pixel.
    """
    if impl.interpreted and align and (dim, mode) != (2, "bicubic"):
        pytest.skip("the interpreter is slow")
    generator = torch.Generator().manual_seed(dim)
    for C, layout in ((2, torch.Tensor.contiguous), *(((2, channels_last), (9, channels_last)) if impl.impl == "numba" else ())):
        input, grid, *options = make(impl, dim, torch.float32, C=C, B=1, Q=6, D=8, mode=mode, padding=padding, corners=align)
        some = torch.tensor(CORNERS)[torch.randint(len(CORNERS), grid.shape, generator=generator)].to(impl.device)
        grid = torch.where(torch.rand(grid.shape, generator=generator).to(impl.device) < 0.5, some, grid)
        grad = cotangents([F.grid_sample(input, grid, *options)])[0]
        seen = F.grid_sample(torch.full_like(input, torch.nan), grid, *options).isnan()[:, 0]
        for planted in ("input", "grad"):
            args, given = (input.clone(), grid, *options), grad.clone()
            x = (args[0] if planted == "input" else given).flatten(2)[:, 1]  # one channel
            x[:, 1::9], x[:, 2::18], x[:, -1] = torch.inf, torch.nan, -torch.inf
            args = (layout(args[0]), *args[1:])
            with deterministic(planted == "grad"):
                (out,), (d_input, d_grid) = value_and_grads(call(impl), args, [given])
            (want,), (want_input, want_grid) = value_and_grads(F.grid_sample, args, [given])
            assert not (want.isfinite().all() and want_input.isfinite().all())
            assert torch.equal(kinds(out), kinds(want))
            assert torch.equal(kinds(d_input), kinds(want_input))
            if mode == "nearest":
                assert d_grid.eq(0).all()
            else:
                assert torch.equal(d_grid[seen].isfinite(), want_grid[seen].isfinite())
                assert d_grid[~seen].eq(0).all()


# ---- beyond torch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_absent_samples_poison_nothing(impl, mode, padding):
    """A sample with a non-finite coordinate gives zero and zero gradients, whatever the input holds; other samples keep their
    values."""
    if impl.interpreted and (mode == "nearest" or (mode, padding) in (("bicubic", "zeros"), ("bicubic", "reflection"))):
        pytest.skip("the interpreter is slow")
    input, grid, *options = make(impl, C=2, dtype=torch.float32, mode=mode, padding=padding)
    bad = grid.clone()
    bad[:, 0, 0, 0], bad[:, 1, 1, 1], bad[:, 2, 2] = torch.nan, torch.inf, -torch.inf
    absent = ~bad.isfinite().all(-1)
    out, (d_input, d_grid) = value_and_grads(call(impl), (input, bad, *options))
    assert out[0].movedim(1, -1)[absent].eq(0).all()
    assert d_grid[absent].eq(0).all()
    kept = value_and_grads(call(impl), (input, grid, *options))
    torch.testing.assert_close(out[0].movedim(1, -1)[~absent], kept[0][0].movedim(1, -1)[~absent])
    torch.testing.assert_close(d_grid[~absent], kept[1][1][~absent])
    assert d_input.isfinite().all()
    weird = torch.full_like(out[0], torch.nan)
    weird.movedim(1, -1)[~absent] = 1
    _, (d_input, d_grid) = value_and_grads(call(impl), (input, bad, *options), [weird])
    assert d_input.isfinite().all()
    assert d_grid[absent].eq(0).all()


def test_pixels_outside_are_absent(impl):
    """A NaN in a border pixel reaches the samples that read it, and not those that read only the padding beside it."""
    image = torch.ones(1, 1, 4, 4, device=impl.device)
    image[..., 0] = torch.nan
    grid = torch.tensor([[[[-0.75, 0.0], [0.75, 0.0], [1.2, 0.0], [-2.0, 0.0]]]], device=impl.device)
    out = call(impl)(image, grid, "bilinear", "zeros", False).flatten()
    assert out.isnan().tolist() == [True, False, False, False]


def test_half_precision_input_with_float32_grid(target):
    """Half-precision input with a float32 grid, as under autocast, which torch refuses; gradients of thousands of samples are
    summed in float32."""
    n = 8 if target.interpreted else 64
    input = torch.ones(1, 4, 3, 3, device=target.device, dtype=torch.bfloat16)
    grid = torch.zeros(1, n, n, 2, device=target.device)
    for mode in (False, True):
        with deterministic(mode):
            _, (d_input, d_grid) = value_and_grads(
                call(target), (input, grid, "bilinear", "zeros", False), [torch.ones(1, 4, n, n, device=target.device)]
            )
        assert d_input.dtype == torch.bfloat16
        assert d_grid.dtype == torch.float32
        assert d_input[0, :, 1, 1].eq(n * n).all()  # bfloat16 would stop at 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_accumulator(target, dtype):
    """The plan states the real accumulator: adding 1 to 2⁴⁰ is kept in float64 and may be lost in float32."""
    input = torch.tensor([2.0**40, 1.0, -(2.0**40), 1.0], device=target.device, dtype=dtype).view(1, 1, 2, 2)
    grid = torch.zeros(1, 1, 1, 2, device=target.device)
    kept = call(target)(input, grid, "bilinear", "zeros", False).item() == 0.5
    plan = sonde.explain(call(target), input, grid, "bilinear", "zeros", False)
    assert {k.accumulator for k in plan.kernels} == {dtype}
    _, (d_input, _) = value_and_grads(call(target), (torch.zeros_like(input), grid.expand(1, 2, 1, 2), "nearest", "border", False))
    assert d_input.dtype == dtype
    assert kept or dtype == torch.float32


@pytest.mark.parametrize("shared", ["inputs", "grids"])
def test_one_serves_many(target, shared, monkeypatch):
    """One input for many grids, or one grid for many inputs, equals the expanded call without expanding anything in memory."""
    args = make(target, B=2, C=2, **{shared: 1})
    full = [a.expand(2, *a.shape[1:]) if isinstance(a, torch.Tensor) else a for a in args]
    for mode in (False,) if target.interpreted else (False, True):
        with deterministic(mode):
            got = value_and_grads(call(target), args)
            want = value_and_grads(OPERATOR.reference, full)
        torch.testing.assert_close(got[0], want[0])
        for a, b, x in zip(got[1], want[1], args):
            torch.testing.assert_close(a, b.sum(0, keepdim=True) if x.shape[0] == 1 else b)
    large = leaves(OPERATOR.make(B=4, inputs=1, C=32, H=64, W=64, Q=2, D=2, device=target.device))
    seen = allocations(monkeypatch, OPERATOR, target.impl)
    call(target)(*large).sum().backward()
    assert max(size for mode in seen for _, size in mode.sizes) <= 1.2 * large[0].nbytes


@pytest.mark.parametrize("dim", [2, 3])
def test_channels_last_in_channels_last_out(target, dim):
    """The result has the layout of the input; so has its gradient, in both modes."""
    args = list(make(target, dim, C=6))
    args[0] = channels_last(args[0])
    form = torch.channels_last if dim == 2 else torch.channels_last_3d
    want = value_and_grads(F.grid_sample, args)
    for mode in (False, True):
        with deterministic(mode):
            out, (d_input, _) = value_and_grads(call(target), args)
        assert out[0].is_contiguous(memory_format=form)
        assert d_input.is_contiguous(memory_format=form)
        torch.testing.assert_close([*out, d_input], [*want[0], want[1][0]])


@pytest.mark.parametrize("C", [1, 3, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lanes_at_edges(numba_target, dtype, C):
    """Vectors of sixteen samples, where some have all their pixels, some a few, some none; any number of samples, both layouts."""
    options = "bilinear", "zeros", False
    for (H, W), P in product(((1, 1), (1, 2), (2, 1), (2, 2), (3, 5), (4, 40)), (1, 15, 16, 33, 130)):
        g = torch.Generator().manual_seed(P)
        input = torch.randn(2, C, H, W, generator=g, dtype=dtype)
        grid = (torch.rand(2, 1, P, 2, generator=g, dtype=dtype) - 0.5) * 2.2
        grid[:, :, ::7] = torch.tensor([-1.0, 1.0])[torch.randint(2, grid[:, :, ::7].shape, generator=g)].to(dtype)
        grid[:, :, 3::11] = 1.5 if P < 100 else grid[:, :, 3::11] * 0.5
        for image in (input, channels_last(input)):
            with poisoned():
                args = redzone(image), redzone(grid), *options
                compare(call(numba_target), args, 2e-5 if dtype == torch.float32 else 1e-11, f"{H} {W} {P}")


@pytest.mark.parametrize("C", [3, 9])
def test_gradient_of_the_other_layout(numba_target, C):
    """The incoming gradient may have another layout than the result."""
    input, grid, *options = make(numba_target, C=C, D=70)
    grad = torch.randn(2, C, 3, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for image, given in product((input, channels_last(input)), (grad, channels_last(grad))):
        args = image, grid, *options
        got, want = (value_and_grads(f, args, [given])[1] for f in (call(numba_target), F.grid_sample))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("C", [2, 9])
def test_pixels_of_other_rows_poison_nothing(numba_target, C):
    """The pixels stored before a row's first and after its last belong to other rows and never leak in."""
    for row, column, x in ((0, 3, -1.0), (2, 0, 1.0)):
        input, grid = torch.ones(1, C, 3, 4), torch.tensor([x, 0.0]).expand(1, 1, 18, 2)
        input[..., row, column] = torch.nan
        for image in (input, channels_last(input)):
            args = image, grid, "bilinear", "zeros", False
            got, want = value_and_grads(call(numba_target), args), value_and_grads(F.grid_sample, args)
            assert got[0][0].isfinite().all()
            torch.testing.assert_close(got, want)


def test_flow_fields_are_not_copied(triton_target, monkeypatch):
    """A permuted flow, as networks predict it, is read in place, without a copy."""
    input, grid, *options = make(triton_target)
    flow = grid.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert not flow.is_contiguous()
    assert sonde.explain(call(triton_target), input, flow, *options).workspace == 0
    compare(call(triton_target), (input, redzone(flow), *options))


@every_combination
def test_deterministic_mode(triton_target, dim, mode, padding, align):
    """The deterministic mode is right in every mode and gives the same bits twice."""
    if triton_target.interpreted and (align or (dim == 3 and padding == "border")):
        pytest.skip("the interpreter is slow")
    few = dict(B=1, Q=2, D=3) if triton_target.interpreted else dict(Q=40, D=30)
    args = make(triton_target, dim, C=2, mode=mode, padding=padding, corners=align, **few)
    with deterministic(), poisoned():
        compare(call(triton_target), args)
        plan = sonde.explain(call(triton_target), *leaves(args))
        if not triton_target.interpreted:  # the interpreter runs programs in order anyway
            assert same_bits(*(value_and_grads(call(triton_target), args)[1] for _ in range(2)))
    assert "_largest" in {k.name for k in plan.kernels}


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_crowded_cells(triton_target, mode):
    """A cell with many samples, next to cells with one or none: every sum is complete."""
    args = list(make(triton_target, B=1, C=2, Q=2, D=40, mode=mode, padding="border"))
    args[1][:, :, 5:] = args[1].new_tensor([0.1, 0.2])
    with deterministic(), poisoned():
        compare(call(triton_target), args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("C", [3, 16])
def test_gradients_that_are_not_finite(triton_target, dtype, C):
    """Infinite and NaN gradients reach exactly the pixels they touch, in fixed point as in floating point."""
    input = torch.zeros(2, C, 4, 4, dtype=dtype, device=triton_target.device)
    places = torch.tensor([[-0.75, -0.75], [0.25, -0.7], [0.25, -0.7], [0.25, 0.75], [0.75, 0.75]], device=triton_target.device)
    grad = torch.ones(2, C, 1, 5, dtype=dtype, device=triton_target.device)
    grad[0, 1, 0] = torch.tensor([torch.inf, torch.inf, -torch.inf, -torch.inf, 2])
    grad[1, 2, 0, 4] = torch.nan
    args = input, places.expand(2, 1, 5, 2), "bilinear", "zeros", False
    with deterministic():
        _, (got, _) = value_and_grads(call(triton_target), args, [grad])
    _, (want, _) = value_and_grads(call("reference"), args, [grad])
    assert (want.isinf().any(), want.isnan().any()) == (True, True)
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", ["largest", "smallest", "apart"])
def test_gradients_of_any_size(triton_target, dtype, size):
    """Fixed point scales each image separately: the largest numbers do not overflow, the smallest do not vanish."""
    args = make(triton_target, B=2, C=3, Q=4, D=5, dtype=dtype)
    info = torch.finfo(dtype)
    scale = dict(largest=(info.max / 64, info.max / 64), smallest=(64 * info.tiny, 64 * info.tiny), apart=(info.max / 64, 1.0))[
        size
    ]
    grad = torch.linspace(-1, 1, 120, dtype=dtype, device=triton_target.device).view(2, 3, 4, 5)
    grad *= grad.new_tensor(scale).view(2, 1, 1, 1)
    with deterministic():
        _, (got, _) = value_and_grads(call(triton_target), args, [grad])
    _, (want, _) = value_and_grads(call("reference"), args, [grad])
    for a, b, unit in zip(got, want, scale):
        torch.testing.assert_close(a / unit, b / unit, rtol=0, atol=8 * info.eps)


def test_fixed_point_is_finer_than_float32(triton_target):
    """Integer accumulation, as the plan states it, keeps a 1 that float32 would lose beside a larger sum."""
    input = torch.zeros(1, 1, 2, 2, device=triton_target.device)
    grid = torch.full((1, 1, 3, 2), -0.5, device=triton_target.device)
    grad = torch.tensor([2.0**30, 1.0, -(2.0**30)], device=triton_target.device).view(1, 1, 1, 3)
    args = input, grid, "bilinear", "zeros", False
    with deterministic():
        plan = sonde.explain(call(triton_target), *leaves(args))
        _, (got, _) = value_and_grads(call(triton_target), args, [grad])
    assert [k.accumulator for k in plan.kernels if "input" in k.writes] == [torch.int64]
    assert got.flatten().tolist() == [1, 0, 0, 0]


def test_plan_of_every_mode(target):
    """A gradient known to be zero is not computed; each of the others is written exactly once."""
    for dim, mode, padding, align in COMBINATIONS:
        args = leaves(make(target, dim, mode=mode, padding=padding, corners=align))
        for strict in (False, True):
            with deterministic(strict):
                plan = sonde.explain(call(target), *args)
            assert sorted(w for k in plan.kernels for w in k.writes) == ["grid", "input", "out"], plan
            if target.impl == "triton" and mode == "nearest":
                assert [k.name for k in plan.kernels if "grid" in k.writes] == ["torch.zero_"]


def kernels_met(args, needs=(True, True), strict=False):
    """The kernel launches of both passes: kernel, problem and tensors, filled with what the kernel reads."""
    gpu = pytest.importorskip("sonde.grid.grid_sample.gpu")
    met, bind = [], Tunable.bind

    def noted(self, problem, tensors):
        if self.tunable(problem):
            layouts = [t if t is None else bench.Layout.of(t) for t in tensors]
            met.append((self, problem, bench.copies(layouts, bench.spans(tensors, self.writes), tensors[0].device)))
        return bind(self, problem, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tunable, "bind", noted)
        out = decide(gpu, args)(*args)
        given = (*cotangents([out]), *args)
        decide(gpu, given, needs, strict)(*given)
    return met


KINDS = [
    dict(C=20),
    dict(C=6, last=True, mode="bicubic", padding="border"),
    dict(C=5, mode="nearest", inputs=1),
    dict(C=3, dim=3, padding="reflection", grids=1),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_candidates_agree_with_the_reference(triton_target, kind, monkeypatch):
    """Any configuration a search may pick is right: candidates from both ends of the list, on the tensors a call passes to the
    kernels."""
    monkeypatch.setattr(bench, "time_us", lambda run, *args, **keywords: (1.0,))
    if triton_target.interpreted and kind["C"] in (5, 20):
        pytest.skip("the interpreter is slow")
    last, options = kind.get("last"), {k: v for k, v in kind.items() if k != "last"}
    args = list(make(triton_target, dtype=torch.float32, **options))
    args[0] = channels_last(args[0]) if last else args[0]
    met = kernels_met(args)
    assert [kernel.name for kernel, *_ in met] == ["grid.sample", "grid.sample_gradients"]
    for kernel, problem, tensors in met:
        configs = kernel.fitting(problem)
        assert configs[0] == kernel.default(problem)
        assert len(configs) > 5
        trials = bench.Bench(kernel, problem, tensors)
        for config in (configs[0], configs[-1]) if triton_target.interpreted else configs:
            _, cause, error, _ = trials.trial(config, None)
            assert cause is None, f"{kernel.name} {config}: {cause}"
            assert error < 1e-6


def test_the_choice_does_not_depend_on_the_batch():
    """Neither batch size nor strides change the winner's key or the order in which channels are summed."""
    gpu = pytest.importorskip("sonde.grid.grid_sample.gpu")
    keys, orders = set(), set()
    for B, W in ((1, 36), (7, 40), (64, 60)):
        args = torch.empty(B, 12, 32, W, device="meta"), torch.empty(B, 20, 20, 2, device="meta")
        grad = torch.empty(B, 12, 20, 20, device="meta")
        for needs in ((True, True), (False, True)):
            step = gpu.backward_pass(grad, *args, "bilinear", "zeros", False, needs=needs, deterministic=False).find("_gradients")
            keys.add((needs, step.kernel.key(step.problem, "", torch.device("cpu"))))
            config = step.kernel.default(step.problem)
            orders.add((needs, config.block_c, config.tiles, config.chunk))
    assert len(keys) == len(orders) == 2


def in_rows(target, C: int = 20, last: bool = True, **options) -> list:
    """Arguments for which the deterministic mode gathers the gradient pixel by pixel."""
    args = list(make(target, C=C, **options))
    args[0] = channels_last(args[0]) if last else args[0]
    return args


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("batches", [{}, dict(inputs=1), dict(grids=1)], ids=["each its own", "one input", "one grid"])
def test_pixels_gather_what_atomics_would_add(triton_target, mode, dim, last, batches, monkeypatch):
    """With many channels the gathered gradient equals the reference for every padding, with the same bits each time."""
    monkeypatch.setattr("sonde.grid._device.layout.FEW", 0)
    paddings = ("zeros", "border", "reflection")
    for padding, align in product(paddings, (False, True)) if dim == 2 else zip(paddings, (last, mode == "nearest", not last)):
        args = in_rows(triton_target, last=last, dim=dim, mode=mode, padding=padding, align=align, **batches)
        with deterministic():
            plan = sonde.explain(call(triton_target), *leaves(args))
            assert "_gather_cells" in [kernel.name for kernel in plan.kernels]
            first, again = (value_and_grads(call(triton_target), args)[1] for _ in range(2))
        assert same_bits(first, again)
        for a, b in zip(first, value_and_grads(OPERATOR.reference, args)[1]):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("samples", [1, 63, 64, 65, 128, 129, 700])
def test_cells_with_many_samples_are_gathered_in_pieces(triton_target, samples):
    """A cell with most of the samples is gathered in pieces, next to a cell with a few and samples outside: the sum is complete."""
    g = torch.Generator().manual_seed(samples)
    input = channels_last(torch.randn(2, 16, 4, 5, generator=g, dtype=torch.float64)).to(triton_target.device)
    crowd = 0.1 + 0.1 * torch.rand(2, samples, 1, 2, generator=g, dtype=torch.float64)
    others = torch.tensor([0.5, 0.0, 9.0, 0.0, -0.1, 0.05], dtype=torch.float64).view(1, 3, 1, 2).expand(2, 3, 1, 2)
    grid = torch.cat([others[:, :2], crowd, others[:, 2:]], 1).to(triton_target.device)
    args = (input, grid, "bilinear", "zeros", False)
    with deterministic():
        got = value_and_grads(call(triton_target), args)[1]
    for a, b in zip(got, value_and_grads(OPERATOR.reference, args)[1]):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_samples_of_a_cell_are_in_their_order(triton_target, monkeypatch):
    """Each cell lists its samples in ascending order, also in crowded cells that several programs fill, among stray samples and
    samples outside."""
    gathers, gpu = (pytest.importorskip(f"sonde.{name}") for name in ("grid.grid_sample.gpu_gather", "jit.launch"))
    launched = {}
    bind = gpu.bind
    monkeypatch.setattr(gpu, "bind", lambda kernel, tensors, how: launched.update({kernel: tensors}) or bind(kernel, tensors, how))
    g = torch.Generator().manual_seed(0)
    grid = 2.6 * torch.rand(2, 600, 1, 2, generator=g, dtype=torch.float64) - 1.3
    for step, at in ((3, 0.1), (5, -0.7), (7, 9.0)):
        grid[:, ::step] = at + 0.01 * torch.rand(1, generator=g, dtype=torch.float64)
    grid[1, 200:500] = grid[1, 0]
    input = channels_last(torch.randn(2, 16, 4, 5, generator=g, dtype=torch.float64))
    args = (input.to(triton_target.device), grid.to(triton_target.device), "bilinear", "zeros", False)
    with deterministic():
        got = value_and_grads(call(triton_target), args)[1]
    for a, b in zip(got, value_and_grads(OPERATOR.reference, args)[1]):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    _grad, table, first, ids, *_others = (t.cpu() for t in launched[gathers._gather_cells])
    x, y = (((grid + 1) * torch.tensor([5, 4]) - 1) / 2).floor().long().flatten(0, 2).T + 1
    cells = torch.where((x >= 0) & (x < 6) & (y >= 0) & (y < 5), (torch.arange(1200) // 600 * 5 + y) * 6 + x, 60)
    assert (ids[: (cells < 60).sum()].sort()[0] == (cells < 60).nonzero()[:, 0]).all()
    for cell in range(60):
        assert ids[first[cell] :][: table[60 + cell]].tolist() == (cells == cell).nonzero()[:, 0].tolist()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced(target):
    """torch.jit.trace records the operator, also when the call cache already holds this kind of call."""
    args = make(target, C=2, dtype=torch.float32)[:2]
    known = call(target)(*args, "bilinear", "zeros", False)
    traced = torch.jit.trace(lambda *args: call(target)(*args, "bilinear", "zeros", False), args)
    assert "sonde::grid_sample" in str(traced.graph)
    assert same_bits([traced(*args)], [known])


def test_a_pass_is_decided_once(triton_target, monkeypatch):
    """A second call with the same shapes and layout prepares nothing; a call with another layout does."""
    gpu = pytest.importorskip("sonde.grid.grid_sample.gpu")
    decided = []
    for phase in ("forward_pass", "backward_pass"):
        real = getattr(gpu, phase)
        monkeypatch.setattr(gpu, phase, lambda *args, real=real, **how: decided.append(real.__name__) or real(*args, **how))
    args = list(make(triton_target, C=2))
    for _ in range(2):
        value_and_grads(call(triton_target), args)
    assert decided == ["forward_pass", "backward_pass"]
    args[0] = channels_last(args[0])
    value_and_grads(call(triton_target), args)
    assert decided == ["forward_pass", "backward_pass"] * 2


def test_result_beyond_32_bits(target):
    """Results whose channels are more than 2³¹ elements apart are addressed with 64 bits (nothing is computed in that range)."""
    gpu = pytest.importorskip("sonde.grid.grid_sample.gpu")
    for C, side, wide in ((1, 1 << 14, False), (3, 1 << 14, False), (3, 1 << 15, True), (9, 1 << 14, True)):
        input, grid = torch.empty(1, C, 8, 8, device="meta"), torch.empty(1, side, side, 2, device="meta")
        step = gpu.forward_pass(input, grid, "bilinear", "zeros", False).find("_sample")
        assert step.problem.int64 == wide
        assert (gpu.sample.launch(step.problem, gpu.sample.default(step.problem)).constants[5].name == "int64") == wide


# ---- drop-in ------------------------------------------------------------------------------------------------------------------


def test_signature_is_torchs():
    """Names, order and defaults of the arguments."""
    ours, theirs = (inspect.signature(f).parameters for f in (sonde.compat.torch.grid_sample, F.grid_sample))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_align_corners_none_warns_as_torch_does():
    input, grid, *_ = make(Target("reference"))
    with pytest.warns(UserWarning, match="align_corners"):
        out = sonde.compat.torch.grid_sample(input, grid)
    torch.testing.assert_close(out, F.grid_sample(input, grid, align_corners=False))
    graph = torch.compile(sonde.compat.torch.grid_sample, fullgraph=True, backend="eager")  # a warning would break the graph
    torch.testing.assert_close(graph(input, grid), out)


class Warp(torch.nn.Module):
    """A spatial transformer: a small network predicts a flow that samples another network's features."""

    def __init__(self):
        super().__init__()
        self.flow, self.features = torch.nn.Conv2d(3, 2, 3, padding=1), torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        identity = F.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)
        grid = identity.to(x) + 0.3 * self.flow(x).tanh().permute(0, 2, 3, 1)
        return F.grid_sample(self.features(x), grid, mode="bilinear", padding_mode="border", align_corners=False)


def train(steps=2):
    torch.manual_seed(0)
    model, x = Warp().double(), torch.randn(1, 3, 5, 4, dtype=torch.float64)
    optimiser, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("impl", ["triton", "numba"])
def test_drop_in_trains_to_the_same_loss(impl, monkeypatch):
    """Replacing F.grid_sample in an unmodified model gives the same losses, and in deterministic mode the same bits twice."""
    pytest.importorskip(impl)
    if Target(impl).device != "cpu":
        pytest.skip("the model is on the CPU")
    want = train()
    monkeypatch.setattr(F, "grid_sample", sonde.compat.torch.grid_sample)
    if impl == "triton":
        honest = sonde.compat.torch._grid_sample
        monkeypatch.setattr(sonde.compat.torch, "_grid_sample", lambda *a: honest(*a, impl="triton"))
    seen = spy(monkeypatch, OPERATOR, impl)
    got = train()
    assert [phase for phase, _ in seen] == ["forward", "backward"] * 2
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    with deterministic():
        first, again = train(), train()
    assert same_bits([first[0], *first[1]], [again[0], *again[1]])
    torch.testing.assert_close(first, want, rtol=1e-10, atol=1e-12)


# ---- any parameters -----------------------------------------------------------------------------------------------------------

if given is not None:

    @st.composite
    def parameters(draw):
        """Any combination at small sizes, away from kinks."""
        dim, mode, padding, align = draw(st.sampled_from(COMBINATIONS))
        sizes = [draw(st.integers(1, 4)) for _ in range(dim)]
        points = [draw(st.integers(1, 3)) for _ in range(dim)]
        g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        input = torch.randn(draw(st.integers(1, 2)), draw(st.integers(1, 3)), *sizes, generator=g, dtype=torch.float64)
        scale = draw(st.sampled_from([0.5, 1.0, 1.5, 5.0, 40.0]))
        grid = (torch.rand(input.shape[0], *points, dim, generator=g, dtype=torch.float64) * 2 - 1) * scale
        if draw(st.booleans()):
            input = channels_last(input)
        return input, grid, mode, padding, align

    def away_from_kinks(input, grid, mode, padding, align):
        """No sample is so close to a jump of value or derivative that rounding could pick the side."""
        n = torch.tensor(input.shape[:1:-1])
        x = (grid + 1) / 2 * (n - 1) if align else ((grid + 1) * n - 1) / 2
        return bool((((2 * x) - (2 * x).round()).abs() > 1e-9)[..., n > align].all())

    any_parameters = given(parameters().filter(lambda args: away_from_kinks(*args)))

    def check_any(impl, args):
        compare(lambda *a: sonde.grid_sample(*a, impl=impl), args, tolerance=1e-10, note=str(args[2:]))

    @settings(max_examples=300)
    @any_parameters
    def test_any_parameters(args):
        """None of 300 random combinations differs from torch by more than 1e-10."""
        check_any("reference", args)
        pytest.importorskip("numba")
        check_any("numba", args)

    @settings(max_examples=300)
    @any_parameters
    def test_any_parameters_interpreted(args):
        """The same for the kernels, in the interpreter."""
        pytest.importorskip("triton")
        if not Target("triton").interpreted:
            pytest.skip("the tensors are on the CPU")
        check_any("triton", args)

    @pytest.mark.slow
    @settings(max_examples=10_000)
    @any_parameters
    def test_many_parameters(args):
        check_any("reference", args)
        check_any("numba", args)

    @pytest.mark.slow
    @settings(max_examples=10_000)
    @any_parameters
    def test_many_parameters_interpreted(args):
        check_any("triton", args)


# ---- errors -------------------------------------------------------------------------------------------------------------------

IMAGE, GRID = torch.zeros(2, 3, 4, 5), torch.zeros(2, 6, 7, 2)
BAD = [
    (dict(input=IMAGE.int()), TypeError, ["input must be float16", "int32", "input.float()"]),
    (dict(input=IMAGE[0]), ValueError, ["both have 4 dimensions", "got 3: [3, 4, 5] and 4: [2, 6, 7, 2]"]),
    (dict(input=IMAGE[None]), ValueError, ["or both 5", "got 5: [1, 2, 3, 4, 5] and 4"]),
    (dict(grid=GRID[0, 0]), ValueError, ["[B, Ho, Wo, 2]", "and 2: [7, 2]"]),
    (dict(grid=torch.zeros(2, 6, 7, 3)), ValueError, ["grid must be [N, Ho, Wo, 2]", "got [2, 6, 7, 3]"]),
    (dict(grid=torch.zeros(3, 6, 7, 2)), ValueError, ["grid must be [B, Ho, Wo, 2]", "B=2 (from input), or 1", "got [3, 6, 7, 2]"]),
    (dict(mode="linear"), ValueError, ["mode must be one of 'bilinear', 'nearest', 'bicubic'", "got 'linear'"]),
    (dict(mode=3), ValueError, ["mode must be one of", "got 3"]),
    (dict(padding_mode="zero"), ValueError, ["padding_mode must be one of 'zeros', 'border', 'reflection'", "got 'zero'"]),
    (dict(align_corners=None), TypeError, ["align_corners must be True or False", "got None"]),
    (dict(align_corners=1), TypeError, ["align_corners must be True or False", "got 1"]),
    (
        dict(input=IMAGE[None], grid=torch.zeros(1, 2, 3, 4, 3), mode="bicubic"),
        ValueError,
        ["bicubic", "4-dimensional", "Use mode='bilinear'"],
    ),
]


@pytest.mark.parametrize(("wrong", "kind", "words"), BAD)
def test_messages(wrong, kind, words, monkeypatch):
    """Each message names the argument, what was expected and what was given; nothing is launched."""
    pytest.importorskip("numba")
    seen = spy(monkeypatch, OPERATOR, "numba")
    with pytest.raises(kind, match="grid_sample: ") as caught:
        sonde.grid_sample(**{**dict(input=IMAGE, grid=GRID), **wrong})
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not seen


def test_no_thread_is_harmed(numba_target):
    """A forked child can sample, like its parent."""
    args = make(numba_target)
    want = call(numba_target)(*args)
    assert torch.equal(torch.tensor(in_child(lambda: call(numba_target)(*args).tolist()), dtype=torch.float64), want)
