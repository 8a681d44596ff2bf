"""``sample_dot`` compared with independent implementations, plus the cases only this operator can get wrong."""

# ruff: noqa: E731 (short functions read better on one line)

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sonde
from helpers.exactness import assert_agrees, same_bits
from helpers.memory import poisoned
from helpers.operators import Target, deterministic, value_and_grads
from sonde.op.cache import forget_calls
from sonde.operators import OPERATORS

OPERATOR = OPERATORS["sample_dot"]
SIZES = dict(B=2, C=5, H=6, W=7, Q=4, D=3, heads=3, octaves=2)


def call(target: Target):
    return OPERATOR.call(target)


def make(target: Target, dtype=torch.float64, layout="uniform", **sizes):
    return OPERATOR.make(**{**SIZES, **sizes}, dtype=dtype, layout=layout, device=target.device)


def eager(images, samples, queries, depths, num_octaves):
    values = F.grid_sample(images, samples, align_corners=False)
    plain = queries.shape[3]
    out = torch.einsum("bhqc,bcqd->bhqd", queries, values[:, :plain])
    for f in range(num_octaves):
        angle = 2 * math.pi * 2**f * depths
        out = out + (values[:, plain + 2 * f] * angle.sin() + values[:, plain + 2 * f + 1] * angle.cos())[:, None]
    return out


# ---- independent implementations ----------------------------------------------------------------------------------------------


def test_grid_sample_and_einsum(impl):
    """Values and all gradients are those of F.grid_sample, einsum, sine and cosine, in float64, away from pixel edges."""
    args = make(impl)
    got, want = value_and_grads(call(impl), args), value_and_grads(eager, args)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_scipy(impl):
    """Values are those of scipy's linear interpolation with zeros around the image."""
    ndimage = pytest.importorskip("scipy.ndimage")
    made = make(impl)
    images, samples, queries, depths = (t.cpu().numpy() for t in made[:4])
    B, C, H, W = images.shape
    x, y = ((samples[..., 0] + 1) * W - 1) / 2, ((samples[..., 1] + 1) * H - 1) / 2
    values = np.stack(
        [
            [ndimage.map_coordinates(images[b, c], [y[b], x[b]], order=1, mode="grid-constant", cval=0.0) for c in range(C)]
            for b in range(B)
        ]
    )
    want = np.einsum("bhqc,bcqd->bhqd", queries, values[:, : SIZES["C"]])
    for f in range(SIZES["octaves"]):
        angle, c = 2 * np.pi * 2**f * depths, SIZES["C"] + 2 * f
        want += (values[:, c] * np.sin(angle) + values[:, c + 1] * np.cos(angle))[:, None]
    torch.testing.assert_close(call(impl)(*made).cpu(), torch.from_numpy(want), rtol=1e-10, atol=1e-11)


def test_by_hand(impl):
    """One pixel, one query channel, one octave at a quarter turn: the sine is 1 and the cosine 0."""
    new = lambda *x: torch.tensor(x, device=impl.device)
    images = new(1.0, 2.0, 4.0).reshape(1, 3, 1, 1)
    samples = torch.zeros(1, 1, 4, 2, device=impl.device)
    out = call(impl)(images, samples, new(5.0).reshape(1, 1, 1, 1), new(0.25, 0.5, 1.0, 3.25).reshape(1, 1, 4), 1)
    torch.testing.assert_close(out.flatten(), new(7.0, 1.0, 9.0, 7.0), rtol=0, atol=1e-6)


# ---- properties ---------------------------------------------------------------------------------------------------------------


def test_linear_in_images_and_queries(impl):
    """f(αa + βb) = αf(a) + βf(b) in the images, and in the queries where nothing is encoded."""
    a, samples, q, depths, octaves = make(impl)
    b = OPERATOR.make(**SIZES, dtype=torch.float64, device=impl.device, seed=9)[0]
    fn = lambda images: call(impl)(images, samples, q, depths, octaves)
    torch.testing.assert_close(fn(2 * a - 3 * b), 2 * fn(a) - 3 * fn(b))
    a, samples, q, _, _ = make(impl, octaves=0)
    r = OPERATOR.make(**{**SIZES, "octaves": 0}, dtype=torch.float64, device=impl.device, seed=9)[2]
    fn = lambda queries: call(impl)(a, samples, queries)
    torch.testing.assert_close(fn(2 * q - 3 * r), 2 * fn(q) - 3 * fn(r))


def test_partition_of_unity(impl):
    """A constant image gives the sum of the query wherever all four corners are inside."""
    images, samples, queries, _, _ = make(impl, octaves=0)
    limit = torch.tensor([1 - 1 / SIZES["W"], 1 - 1 / SIZES["H"]], device=impl.device)
    samples = samples / 1.25 * limit * 0.999
    out = call(impl)(torch.ones_like(images), samples, queries)
    torch.testing.assert_close(out, queries.sum(-1, keepdim=True).expand_as(out))


def test_permutations(impl):
    """Permuting queries, heads or samples permutes the result; so do channels, permuted in images and queries alike."""
    images, samples, queries, depths, octaves = make(impl)
    fn = lambda *a: call(impl)(*a, octaves)
    out = fn(images, samples, queries, depths)
    perm = lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(3)).to(impl.device)
    q, h, d, c = perm(SIZES["Q"]), perm(SIZES["heads"]), perm(SIZES["D"]), perm(SIZES["C"])
    torch.testing.assert_close(fn(images, samples[:, q], queries[:, :, q], depths[:, q]), out[:, :, q], rtol=0, atol=0)
    torch.testing.assert_close(fn(images, samples, queries[:, h], depths), out[:, h], rtol=0, atol=0)
    torch.testing.assert_close(fn(images, samples[:, :, d], queries, depths[:, :, d]), out[..., d], rtol=0, atol=0)
    moved = torch.cat([images[:, c], images[:, SIZES["C"] :]], 1)
    torch.testing.assert_close(fn(moved, samples, queries[..., c], depths), out, rtol=1e-12, atol=1e-13)


def test_duality_with_sample_sum(impl):
    """Both operators are derivatives of one form: Σ w·sample_dot(q) = Σ q·sample_sum(w)."""
    images, samples, queries, _, _ = make(impl, octaves=0)
    weights = torch.rand(2, 3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(impl.device)
    dot = (weights * sonde.sample_dot(images, samples, queries, impl=impl.impl)).sum()
    torch.testing.assert_close(dot, (queries * sonde.sample_sum(images, samples, weights, impl=impl.impl)).sum())


# ---- the encoding ---------------------------------------------------------------------------------------------------------------


def test_period_of_the_encoding(impl):
    """Adding whole turns changes no bit, at any octave: the range reduction is exact."""
    images, samples, queries, _, octaves = make(impl, torch.float32, octaves=3)
    depths = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1)).mul(256).round().div(256).to(impl.device)
    fn = lambda d: call(impl)(images, samples, queries, d, octaves)
    assert torch.equal(fn(depths), fn(depths + 16))
    assert torch.equal(fn(depths), fn(depths - 5))


def test_high_octaves_keep_their_precision(target):
    """Without range reduction float32 loses 2e-4 at octave 9; with it, 2e-6 holds at 10 octaves."""
    args = OPERATOR.make(B=1, C=0, H=3, W=3, Q=3, D=4, heads=2, octaves=10, layout="one_pixel", device=target.device)
    assert_agrees(OPERATOR, target, args)


def test_half_turns(target):
    """Depths at multiples of half and quarter turns, where the range reduction switches branches, agree with the reference."""
    images, samples, queries, _, octaves = OPERATOR.make(
        B=1, C=2, H=3, W=3, Q=2, D=8, heads=1, octaves=2, layout="one_pixel", device=target.device
    )
    depths = torch.tensor(
        [[[0.0, 0.25, 0.5, 0.75, 1.0, 1.5, -0.5, -0.25], [0.125, 0.375, 2.5, -1.5, 1e-8, -1e-8, 0.49999997, 0.50000006]]]
    )
    args = (images, samples, queries, depths.to(target.device), octaves)
    assert_agrees(OPERATOR, target, args)


def test_encoding_is_the_same_for_every_head(impl):
    """Heads differ only by their queries."""
    images, samples, queries, depths, octaves = make(impl)
    out = call(impl)(images, samples, torch.zeros_like(queries), depths, octaves)
    assert out.abs().sum() > 0
    assert all(torch.equal(out[:, 0], out[:, h]) for h in range(3))


def test_depths_of_absent_samples_poison_nothing(impl):
    """A sample outside gives exactly zero whatever its depth, and zero gradients."""
    images, samples, queries, depths, octaves = make(impl, torch.float32)
    samples[:, :, 1] = torch.tensor([3.0, 0.0])
    samples[:, :, 2, 0] = torch.nan
    clean = value_and_grads(call(impl), (images, samples, queries, depths, octaves))
    depths = depths.clone()
    depths[:, :, 1], depths[:, :, 2] = torch.nan, torch.inf
    out, grads = value_and_grads(call(impl), (images, samples, queries, depths, octaves))
    assert out[0][..., 1:].eq(0).all()
    assert grads[1][:, :, 1:].eq(0).all()
    assert grads[3][:, :, 1:].eq(0).all()
    for a, b in zip([*out, *grads], [*clean[0], *clean[1]]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_absent_queries_of_dead_samples(impl):
    """Non-finite queries reach the samples inside the image; samples outside stay zero."""
    images, samples, queries, _, _ = make(impl, torch.float32, octaves=0)
    samples[:, :, 0] = 0.0
    samples[:, :, 1:] = 5.0
    queries[:, 0] = torch.inf
    out = call(impl)(images, samples, queries)
    assert out[..., 1:].eq(0).all()
    assert not out[:, 0, :, 0].isfinite().any()
    assert out[:, 1:, :, 0].isfinite().all()


def test_without_octaves_depths_are_not_needed(target):
    """With num_octaves = 0 depths may be missing or NaN: the values stay the same, and the gradient of depths is zero."""
    images, samples, queries, depths, _ = make(target, octaves=0)
    without = call(target)(images, samples, queries)
    (out,), grads = value_and_grads(call(target), (images, samples, queries, depths, 0))
    assert torch.equal(out, without)
    assert grads[3].eq(0).all()
    (out,), grads = value_and_grads(call(target), (images, samples, queries, None, 0))
    assert torch.equal(out, without)
    assert len(grads) == 3
    wild = torch.full_like(depths, torch.nan)
    assert torch.equal(call(target)(images, samples, queries, wild, 0), without)


def test_without_octaves_in_graphs(target):
    """A missing optional tensor works under vmap, compile, export and opcheck."""
    images, samples, queries, _, _ = make(target, octaves=0)
    impl = target.impl
    fn = lambda *a: sonde.sample_dot(*a, impl=impl)
    want = OPERATOR.reference(images, samples, queries)
    torch.testing.assert_close(
        torch.vmap(fn, (None, None, 0))(images, samples, torch.stack([queries, -queries])), torch.stack([want, -want])
    )
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, fullgraph=True, backend="aot_eager")(images, samples, queries), want)

    class Model(torch.nn.Module):
        def forward(self, *a):
            return fn(*a)

    torch.testing.assert_close(torch.export.export(Model(), (images, samples, queries)).module()(images, samples, queries), want)
    leaf = [t.clone().requires_grad_() for t in (images, samples, queries)]
    torch.library.opcheck(OPERATOR.op.forward_op, (*leaf, None, 0, target.impl, True))
    needs = [True, True, True, False]
    torch.library.opcheck(OPERATOR.op.backward_op, (want, images, samples, queries, None, 0, needs, target.impl, True))


def test_encoded_channels_only(target):
    """Queries with no channels besides the encoding's give the encoding alone."""
    args = OPERATOR.make(B=2, C=0, H=4, W=5, Q=3, D=2, heads=2, octaves=2, layout="uniform", device=target.device)
    for mode in (False, True):
        with deterministic(mode), poisoned():
            assert_agrees(OPERATOR, target, args)


@pytest.mark.parametrize(("C", "heads", "octaves"), [(1, 1, 0), (20, 1, 3), (31, 5, 1), (33, 17, 0), (128, 4, 10), (16, 2, 24)])
def test_many_channels_heads_and_octaves(target, C, heads, octaves):
    """Channel counts around every tile size, with and without encoding; head counts that are not powers of two; both modes and
    layouts."""
    args = list(OPERATOR.make(B=1, C=C, H=4, W=3, Q=2, D=2, heads=heads, octaves=octaves, layout="uniform", device=target.device))
    with poisoned():
        assert_agrees(OPERATOR, target, args)
        args[0] = args[0].contiguous(memory_format=torch.channels_last)
        with deterministic():
            assert_agrees(OPERATOR, target, args)


@pytest.mark.parametrize("D", [1, 129])
def test_many_samples(target, D):
    """No number of samples per query is too large for one program."""
    args = OPERATOR.make(B=1, C=3, H=5, W=4, Q=2, D=D, heads=2, octaves=1, layout="uniform", device=target.device)
    with poisoned():
        assert_agrees(OPERATOR, target, args)


def test_few_queries_need_not_clear_large_images(triton_target, monkeypatch):
    """The images' gradient is cleared by the queries' kernel, or by torch where it is large: the values are the same."""
    form = pytest.importorskip("sonde.grid._epipolar.gpu")
    args = make(triton_target, Q=1)
    for cleared in (0, 1 << 15):
        monkeypatch.setattr(form, "CLEARED", cleared)
        forget_calls()
        images, samples, queries, depths, octaves = args
        grad = torch.empty(*queries.shape[:3], samples.shape[2], device=images.device)
        given = dict(coef=grad, images=images, samples=samples, rows=queries, depths=depths)
        step = form.derivatives(dict(images="images", rows="queries"), given, octaves).find("_rows")
        assert ("d_images" in step.takes) == (cleared > 0)
        with poisoned():
            assert_agrees(OPERATOR, triton_target, args)


def test_same_bits_for_both_layouts(target):
    """Channels-last and contiguous images give the same bits."""
    images, *rest = make(target, torch.float32)
    with deterministic():
        plain = value_and_grads(call(target), (images, *rest))
        moved = value_and_grads(call(target), (images.contiguous(memory_format=torch.channels_last), *rest))
    assert same_bits([*plain[0], *plain[1]], [*moved[0], *moved[1]])


@pytest.mark.parametrize(("images", "queries", "result"), [
    (torch.bfloat16, torch.float32, torch.float32), (torch.float32, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16, torch.float32), (torch.float16, torch.float16, torch.float16),
    (torch.float64, torch.bfloat16, torch.float64),
])  # fmt: skip
def test_result_is_promoted(impl, images, queries, result):
    """The result has the promoted dtype of images and queries; the other operands do not affect it."""
    made = list(make(impl, torch.float32))
    made[0], made[2] = made[0].to(images), made[2].to(queries)
    assert call(impl)(*made).dtype == result
    made[1], made[3] = made[1].double(), made[3].double()
    assert call(impl)(*made).dtype == result


# ---- errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (-1, ValueError, ["num_octaves must be an integer >= 0", "got -1"]),
        (True, TypeError, ["num_octaves must be an integer >= 0", "True", "bool"]),
        (False, TypeError, ["num_octaves must be an integer >= 0", "False", "bool"]),
        (1.0, TypeError, ["num_octaves must be an integer >= 0", "1.0", "float"]),
        ("2", TypeError, ["num_octaves must be an integer >= 0", "'2'", "str"]),
        (None, TypeError, ["num_octaves must be an integer >= 0", "None"]),
        (torch.tensor(2), TypeError, ["num_octaves must be an integer >= 0", "Tensor"]),
        (3, ValueError, ["queries must have C - 2*num_octaves = 9 - 6 = 3", "got [2, 3, 4, 5]"]),
        (0, ValueError, ["queries must have C - 2*num_octaves = 9 - 0 = 9", "got [2, 3, 4, 5]"]),
        (10**9, ValueError, ["queries must have C - 2*num_octaves", "got [2, 3, 4, 5]"]),
    ],
)
def test_messages_of_num_octaves(value, kind, words):
    """Negative, boolean, fractional, string, missing or inconsistent values: the message says which."""
    args = make(Target("reference"))
    with pytest.raises(kind, match="sample_dot: ") as caught:
        sonde.sample_dot(*args[:4], value)
    for word in words:
        assert word in str(caught.value)


def test_octaves_need_depths():
    """num_octaves > 0 without depths names what is missing."""
    images, samples, queries, _, _ = make(Target("reference"))
    with pytest.raises(ValueError, match=r"sample_dot: depths must be \[B, Q, D\] where num_octaves > 0 \(got 2\); got None"):
        sonde.sample_dot(images, samples, queries, num_octaves=2)


@pytest.mark.parametrize(
    ("which", "shape", "words"),
    [
        (1, (2, 4, 3, 3), ["samples must be [B, Q, D, 2]", "got [2, 4, 3, 3]"]),
        (2, (2, 3, 5, 5), ["queries must be [B, h, Q, C']", "Q=4 (from samples)", "got [2, 3, 5, 5]"]),
        (2, (1, 3, 4, 5), ["queries must be [B, h, Q, C']", "B=2 (from images)", "got [1, 3, 4, 5]"]),
        (2, (2, 3, 4, 6), ["queries must have C - 2*num_octaves", "got [2, 3, 4, 6]"]),
        (3, (2, 4, 4), ["depths must be [B, Q, D]", "D=3 (from samples)", "got [2, 4, 4]"]),
        (3, (2, 4), ["depths must have 3 dimensions [B, Q, D]", "got 2: [2, 4]"]),
    ],
)
def test_messages(which, shape, words):
    """Each message names the argument, what was expected and what was given."""
    args = list(make(Target("reference")))
    args[which] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match="sample_dot: ") as caught:
        sonde.sample_dot(*args)
    for word in words:
        assert word in str(caught.value)
