"""What is special about ``sample_attention``: one softmax over views, masks, large logits, separate values."""

import math

import pytest
import torch
import torch.nn.functional as F

import sonde
from helpers.memory import redzone, restride
from helpers.operators import Target, deterministic, value_and_grads
from sonde.operators import OPERATORS

pytestmark = pytest.mark.asks("passes")
OPERATOR = OPERATORS["sample_attention"]
SEVERAL = [
    "views",
    "masked",
    "masked_views",
    "values",
    "many_values",
]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


def compare(target, args, bound, want=None, **how):
    """Values and gradients against the reference in float64, relative in norm."""
    exact = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    values, grads = value_and_grads(OPERATOR.call(target), args)
    want = value_and_grads(OPERATOR.reference, exact) if want is None else want
    for i, (a, b) in enumerate(zip([*values, *grads], [*want[0], *want[1]], strict=True)):
        assert a.isfinite().all(), i
        assert relative(a, b) <= bound, f"result {i}: {relative(a, b):.2e}"


# ---- the definition, against torch's own attention -------------------------------------------------------------------------------


def plain(images, samples, queries, values, scale, mask):
    """The definition by ``F.grid_sample`` and ``F.scaled_dot_product_attention``, without this library."""
    B, V = images.shape[:2]

    def taken(x):
        found = F.grid_sample(x.flatten(0, 1), samples.flatten(0, 1), align_corners=False)  # [B·V, C, Q, D]
        return found.unflatten(0, (B, V)).permute(0, 3, 1, 4, 2).flatten(2, 3)  # [B, Q, V·D, C]

    keys, seen = taken(images), taken(values)
    rows = queries.transpose(1, 2)[:, :, :, None]  # [B, Q, h, 1, C]
    h = rows.shape[2]
    k, v = (x[:, :, None].expand(-1, -1, h, -1, -1) for x in (keys, seen))
    allowed = mask.transpose(1, 2).flatten(2)[:, :, None, None].expand(-1, -1, h, -1, -1)  # [B, Q, h, 1, V·D]
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=allowed, scale=scale)[:, :, :, 0].transpose(1, 2)


@pytest.mark.parametrize("impl", [Target("reference"), Target("triton"), Target("numba")])
def test_is_attention_over_all_views(impl):
    """Equals torch's attention over the sampled features: three views in one softmax, separate values, a mask and a scale."""
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    images, values, queries = normal(2, 3, 6, 5, 7), normal(2, 3, 4, 5, 7), normal(2, 2, 3, 6)
    samples = torch.rand(2, 3, 3, 4, 2, generator=g, dtype=torch.float64) * 2.4 - 1.2
    mask = torch.rand(2, 3, 3, 4, generator=g) > 0.3
    mask[:, 0, :, 0] = True
    want = plain(images, samples, queries, values, 0.7, mask)
    to = [x.to(impl.device) for x in (images, samples, queries, values, mask)]
    got = sonde.sample_attention(*to[:3], values=to[3], scale=0.7, mask=to[4], impl=str(impl))
    torch.testing.assert_close(got.cpu(), want, rtol=1e-11, atol=1e-12)


def test_is_what_the_two_operators_make_of_it(target):
    """Equals ``sample_dot``, a softmax and ``sample_sum``, with the positional encoding."""
    images, samples, queries, depths, octaves, *_ = OPERATOR.make("odd_sizes", dtype=torch.float64, device=target.device)
    C = queries.shape[3]
    weights = (sonde.sample_dot(images, samples, queries, depths, octaves) * C**-0.5).softmax(-1)
    want = sonde.sample_sum(images[:, :C].contiguous(), samples, weights)
    got = sonde.sample_attention(images, samples, queries, depths, octaves, impl=str(target))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


# ---- several views, masks, values ------------------------------------------------------------------------------------------------


def test_one_view_has_the_bits_of_none(target):
    """``[B, 1, …]`` and ``[B, …]`` give the same bits, also channels-last."""
    for layout in ("contiguous", "channels_last"):
        images, samples, queries, depths, octaves, *_ = OPERATOR.make("odd_sizes", device=target.device)
        images = restride(images, layout)
        mask = torch.rand(depths.shape, device=images.device) > 0.4
        args = images, samples, queries, depths, octaves, images * 2, 0.3, mask
        one = [x[:, None] if i in (0, 1, 3, 5, 7) else x for i, x in enumerate(args)]
        with deterministic():
            (out, grads), (out_1, grads_1) = (value_and_grads(OPERATOR.call(target), x) for x in (args, one))
        assert torch.equal(out[0], out_1[0])
        assert all(torch.equal(a, b.view(a.shape)) for a, b in zip(grads, grads_1))


def test_several_views_are_one_graph(target):
    """Forward and backward, with sizes that change; a plan of the same call is made before and after."""
    torch._dynamo.reset()
    args = OPERATOR.make(B=2, C=4, H=4, W=5, Q=3, D=2, heads=2, octaves=1, views=3, device=target.device)
    sonde.explain(OPERATOR.call(target), *args)
    compiled = torch.compile(OPERATOR.call(target), fullgraph=True, dynamic=True, backend="aot_eager")
    for seed, Q in ((0, 3), (1, 4)):
        args = OPERATOR.make(B=2, C=4, H=4, W=5, Q=Q, D=2, heads=2, octaves=1, views=3, device=target.device, seed=seed)
        with deterministic():
            got, want = (value_and_grads(f, args) for f in (compiled, OPERATOR.call(target)))
        for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
            torch.testing.assert_close(a, b)
    assert len(sonde.explain(OPERATOR.call(target), *args).kernels) > 0
    torch._dynamo.reset()


@pytest.mark.parametrize("case", SEVERAL)
def test_gradcheck(case, target):
    """All five gradients, with masks, several views and separate values."""
    sizes = dict(B=1, C=2, H=3, W=4, Q=2, D=2, heads=2, octaves=1, layout="uniform")
    sizes |= {k: v for k, v in OPERATOR.cases.SMALL[case].items() if k in ("views", "masked", "C_v")} | dict(views=2)
    args = list(OPERATOR.make(**sizes, dtype=torch.float64, device=target.device, seed=2))
    args[0] = args[0].clone()
    given = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    with deterministic():
        assert torch.autograd.gradcheck(OPERATOR.call(target), given, fast_mode=target.interpreted)
        if not target.interpreted:
            assert torch.autograd.gradgradcheck(OPERATOR.call(target), given, fast_mode=True)


def test_masked_is_as_if_it_were_not_there(target):
    """A masked sample changes nothing, whatever its position, depth and pixel; a query without samples gives zeros."""
    args = list(OPERATOR.make("masked", device=target.device))
    mask = args[7]
    mask[0, 1] = False
    with deterministic():
        want = value_and_grads(OPERATOR.call(target), args)
        args[1] = torch.where(mask[..., None], args[1], torch.nan)
        args[3] = torch.where(mask, args[3], torch.inf)
        got = value_and_grads(OPERATOR.call(target), args)
    assert all(torch.equal(a, b) for a, b in zip([*want[0], *want[1]], [*got[0], *got[1]]))
    assert not want[0][0][0, :, 1].any()
    assert not want[1][1][0, 1].any()
    assert not want[1][2][0, :, 1].any()


def test_samples_outside_take_part(target):
    """Samples outside the image have logit 0 and value 0: beside one inside with logit 0 they halve the result."""
    images = torch.ones(1, 1, 1, 1, device=target.device)
    samples = torch.tensor([[[[0.0, 0.0], [9.0, 9.0]]]], device=target.device)
    queries = torch.zeros(1, 1, 1, 1, device=target.device)
    assert sonde.sample_attention(images, samples, queries, impl=str(target)).item() == 0.5
    mask = torch.tensor([[[True, False]]], device=target.device)
    assert sonde.sample_attention(images, samples, queries, mask=mask, impl=str(target)).item() == 1.0


@pytest.mark.parametrize(
    ("keys", "seen"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.float64)]
)
def test_values_have_a_dtype_of_their_own(keys, seen, target):
    """The result has the dtype of the values; sums use the widest operand's."""
    args = list(OPERATOR.make("values", device=target.device))
    args[0], args[5] = redzone(args[0].to(keys)), redzone(args[5].to(seen))
    out, grads = value_and_grads(OPERATOR.call(target), args)
    assert out[0].dtype == seen
    assert [g.dtype for g in grads] == [x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    bound = {torch.float32: 2e-6, torch.float64: 2e-6, torch.float16: 1e-3}[seen]
    assert relative(out[0], OPERATOR.reference(*[x.double() if isinstance(x, torch.Tensor) else x for x in args])) < bound


# ---- exactness -------------------------------------------------------------------------------------------------------------------


def loud(target, size, dtype=torch.float32):
    """Arguments whose largest |logit| is `size`."""
    args = list(OPERATOR.make("odd_sizes", dtype=torch.float64, layout="uniform", device=target.device))
    logits = sonde.sample_dot(args[0], args[1], args[2], args[3], args[4], impl="reference") * args[2].shape[3] ** -0.5
    factor = size / logits.abs().max()
    args[2] = args[2] * factor
    args[0] = torch.cat([args[0][:, : args[2].shape[3]], args[0][:, args[2].shape[3] :] * factor], 1)  # the encoding's, too
    return [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]


def test_float32_where_logits_are_below_20(target):
    """Values and gradients within 5e-6 of float64."""
    args = loud(target, 20)
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
    compare(target, args, 5e-6, value_and_grads(OPERATOR.reference, exact))


@pytest.mark.parametrize("size", [200, 1e4])
def test_large_logits_stay_finite(size, target):
    """The error of the weights is that of the logits, eps · |logit|."""
    args = loud(target, size)
    out, grads = value_and_grads(OPERATOR.call(target), args)
    want = OPERATOR.reference(*[x.double() if isinstance(x, torch.Tensor) else x for x in args])
    assert all(x.isfinite().all() for x in [*out, *grads])
    assert relative(out[0], want) < 16 * torch.finfo(torch.float32).eps * size


def test_all_logits_very_negative(target):
    """Only differences between logits count: the softmax of −1e4 and −1e4 − 1 is that of 0 and −1."""
    images = torch.tensor([[[[1.0, 1.0]], [[2.0, 3.0]]]], device=target.device)  # two pixels: a key and a value
    samples = torch.tensor([[[[-0.5, 0.0], [0.5, 0.0]]]], device=target.device)
    images[0, 0, 0, 1] += 2.0**-13
    queries = torch.tensor([[[[-(2.0**13), 0.0]]]], device=target.device)
    out = sonde.sample_attention(images, samples, queries, scale=1.0, impl=str(target))
    share = math.e / (1 + math.e)
    torch.testing.assert_close(out[0, 0, 0, 1].item(), 2 * share + 3 * (1 - share), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dims", [(1, 1), (1024, 1), (257, 3)], ids=str)
def test_any_number_of_samples(dims, target):
    """One sample, 1024, and 257 in each of three views."""
    D, views = dims
    if target.interpreted:
        D = min(D, 67)
    args = OPERATOR.make(B=1, C=5, H=6, W=7, Q=2, D=D, heads=2, octaves=1, views=views, layout="uniform", device=target.device)
    values, grads = value_and_grads(OPERATOR.call(target), args)
    want = value_and_grads(OPERATOR.reference, [x.double() if isinstance(x, torch.Tensor) else x for x in args])
    for i, (a, b) in enumerate(zip([*values, *grads], [*want[0], *want[1]])):
        assert relative(a, b) <= 2e-6 or (a.double() - b).abs().max() < 1e-6, i  # a single sample has gradients of 0


def test_long_sums_are_compensated(target, monkeypatch):
    """Sums of equal terms, where rounding errors all go one way, over the samples of all queries and of one."""
    from sonde.op.cache import forget_calls

    D = 3000 if target == "numba" else 400
    if target == "triton":
        configs = pytest.importorskip("sonde.grid.sample_attention.gpu_configs")
        monkeypatch.setattr(configs, "MANY", type(configs.MANY)(8))
        forget_calls()
        D = 60 if target.interpreted else D
    g = torch.Generator().manual_seed(0)
    samples = torch.full((1, 2, D, 2), 0.125)
    rows = torch.rand(1, 2, 2, 3, generator=g)
    equal = [0.7713 + 0.31 * torch.rand(1, 3, 4, 4, generator=g), samples, rows, None, 0, None, None, None]
    samples = torch.rand(1, 2, D, 2, generator=g) * 2 - 1
    varied = [torch.randn(1, 3, 4, 4, generator=g), samples, rows, None, 0, None, None, None]
    for given, same in ((equal, True), (varied, False)):
        args = [x.to(target.device) if isinstance(x, torch.Tensor) else x for x in given]
        out, grads = value_and_grads(OPERATOR.call(target), args)
        wide, wide_grads = value_and_grads(OPERATOR.reference, [x.double() if isinstance(x, torch.Tensor) else x for x in args])
        assert relative(out[0], wide[0]) <= 2e-6
        assert relative(grads[0], wide_grads[0]) <= 2e-6
        for a, b in zip(grads[1:], wide_grads[1:]):  # with equal terms these are differences that cancel
            assert same or relative(a, b) <= 4e-6


# ---- errors ----------------------------------------------------------------------------------------------------------------------


def refused(words, *args, kind=ValueError, **options):
    with pytest.raises(kind) as caught:
        sonde.sample_attention(*args, **options)
    for word in ("sample_attention", *words):
        assert word in str(caught.value), str(caught.value)


def test_errors():
    """Each names the argument, what was expected and what was given."""
    images, samples, queries, depths = torch.randn(2, 6, 4, 5), torch.rand(2, 3, 4, 2), torch.randn(2, 2, 3, 4), torch.rand(2, 3, 4)
    args = images, samples, queries, depths, 1
    several = images[:, None], samples[:, None], queries, depths[:, None], 1
    sonde.sample_attention(*args)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    refused(["mask", "boolean", "float32"], *args, mask=mask.float(), kind=TypeError)
    refused(["mask", "tensor", "list"], *args, mask=mask.tolist(), kind=TypeError)
    refused(["mask", "[2, 3, 3]", "D=4"], *args, mask=mask[..., :3])
    refused(["mask", "[2, 3, 4]", "V=1"], *several, mask=mask)
    refused(["values", "H=4", "[2, 3, 4, 6]"], *args, values=torch.randn(2, 3, 4, 6))
    refused(["values", "V=1"], *several, values=torch.randn(2, 2, 3, 4, 5))
    for scale in (0, -1.0, math.inf, math.nan):
        refused(["scale", "> 0"], *args, scale=scale)
    refused(["scale", "str"], *args, scale="1", kind=TypeError)
    refused(["depths", "num_octaves", "None"], images, samples, queries, None, 1)
    refused(["queries", "num_octaves", "6 - 4 = 2"], images, samples, queries, depths, 2)
    refused(["num_octaves", "-1"], images, samples, queries, depths, -1)
    refused(["depths", "V=1"], several[0], several[1], queries, torch.rand(2, 2, 3, 4), 1)
    refused(["images", "4 dimensions", "5"], several[0], samples, queries, depths, 1)
    refused(["samples", "4 dimensions", "5"], images, several[1], queries, depths, 1)
    refused(["views"], images[:, None][:, :0], samples[:, None][:, :0], queries, depths[:, None][:, :0], 1)


def test_nothing_is_stored(target):
    """Neither sampled features nor logits are stored: the largest buffer in the plan is a result."""
    sizes = dict(B=2, C=64, H=8, W=8, Q=512, D=64, heads=2)
    args = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in OPERATOR.make(**sizes, device=target.device)]
    plan = sonde.explain(OPERATOR.call(target), *args)
    of_samples = sizes["B"] * sizes["Q"] * sizes["D"] * sizes["C"] * 4
    assert max(kernel.workspace for kernel in plan.kernels if kernel.phase == "forward") < of_samples / 16
    assert max(kernel.workspace for kernel in plan.kernels) < of_samples / 4
