"""``sample_sum`` compared with independent implementations, plus the cases only this operator can get wrong."""

# ruff: noqa: E731 (short functions read better on one line)

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sonde
from helpers.exactness import assert_agrees, same_bits
from helpers.memory import poisoned
from helpers.operators import Target, deterministic, value_and_grads
from sonde.operators import OPERATORS

OPERATOR = OPERATORS["sample_sum"]
SIZES = dict(B=2, C=5, H=6, W=7, Q=4, D=3, heads=3)


def call(target: Target):
    return OPERATOR.call(target)


def make(target: Target, dtype=torch.float64, layout="uniform", **sizes):
    return OPERATOR.make(**{**SIZES, **sizes}, dtype=dtype, layout=layout, device=target.device)


def eager(images, samples, weights):
    return torch.einsum("bhqd,bcqd->bhqc", weights, F.grid_sample(images, samples, align_corners=False))


# ---- independent implementations ----------------------------------------------------------------------------------------------


def test_grid_sample_and_einsum(impl):
    """Values and all gradients are those of F.grid_sample and einsum, in float64, away from the edges between pixels."""
    args = make(impl)
    got, want = value_and_grads(call(impl), args), value_and_grads(eager, args)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_scipy(impl):
    """Values are those of scipy's linear interpolation with zeros around the image."""
    ndimage = pytest.importorskip("scipy.ndimage")
    images, samples, weights = (t.cpu().numpy() for t in make(impl))
    B, C, H, W = images.shape
    x, y = ((samples[..., 0] + 1) * W - 1) / 2, ((samples[..., 1] + 1) * H - 1) / 2
    want = np.zeros((B, weights.shape[1], samples.shape[1], C))
    for b in range(B):
        for c in range(C):
            values = ndimage.map_coordinates(images[b, c], [y[b], x[b]], order=1, mode="grid-constant", cval=0.0)
            want[b, :, :, c] = (weights[b] * values).sum(-1)
    torch.testing.assert_close(call(impl)(*make(impl)).cpu(), torch.from_numpy(want), rtol=1e-10, atol=1e-12)


def test_by_hand(impl):
    """Four pixels; one sample in the middle, one on a pixel, one half outside, one outside."""
    images = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], device=impl.device)
    samples = torch.tensor([[[[0.0, 0.0]], [[-0.5, 0.5]], [[-1.0, 0.5]], [[-1.6, 0.5]]]], device=impl.device)
    out = call(impl)(images, samples, torch.ones(1, 1, 4, 1, device=impl.device))
    assert out.flatten().tolist() == [2.5, 3.0, 1.5, 0.0]


# ---- properties ---------------------------------------------------------------------------------------------------------------


def test_linear_in_images_and_weights(impl):
    """f(αa + βb) = αf(a) + βf(b) in either argument."""
    a, samples, w = make(impl)
    b, _, v = OPERATOR.make(**SIZES, dtype=torch.float64, device=impl.device, seed=9)
    fn = call(impl)
    torch.testing.assert_close(fn(2 * a - 3 * b, samples, w), 2 * fn(a, samples, w) - 3 * fn(b, samples, w))
    torch.testing.assert_close(fn(a, samples, 2 * w - 3 * v), 2 * fn(a, samples, w) - 3 * fn(a, samples, v))


def test_partition_of_unity(impl):
    """A constant image gives the sum of the weights wherever all four corners are inside, to the last bit."""
    images, samples, weights = make(impl, torch.float32)
    limit = torch.tensor([1 - 1 / SIZES["W"], 1 - 1 / SIZES["H"]], device=impl.device)
    samples = (samples / 1.25 * limit * 0.999).contiguous()
    weights = torch.ones_like(weights)
    out = call(impl)(torch.ones_like(images), samples, weights)
    torch.testing.assert_close(out, torch.full_like(out, SIZES["D"]), rtol=1e-6, atol=0)


def test_adjoint(impl):
    """Σ out·g is the same sum over the images and their gradient: nothing is lost or counted twice in the scatter."""
    args = make(impl, layout="hostile")
    (out,), (grad_images, _, grad_weights) = value_and_grads(call(impl), args, [torch.ones(2, 3, 4, 5, device=impl.device)])
    torch.testing.assert_close((grad_images * args[0]).sum(), out.sum())
    torch.testing.assert_close((grad_weights * args[2]).sum(), out.sum())


def test_permutations(impl):
    """Permuting queries, heads or channels permutes the result; reordering the samples of a query changes nothing."""
    images, samples, weights = make(impl)
    fn = call(impl)
    out = fn(images, samples, weights)
    perm = lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(3)).to(impl.device)
    q, h, d, c = perm(SIZES["Q"]), perm(SIZES["heads"]), perm(SIZES["D"]), perm(SIZES["C"])
    torch.testing.assert_close(fn(images, samples[:, q], weights[:, :, q]), out[:, :, q], rtol=0, atol=0)
    torch.testing.assert_close(fn(images, samples, weights[:, h]), out[:, h], rtol=0, atol=0)
    torch.testing.assert_close(fn(images[:, c], samples, weights), out[..., c], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(fn(images, samples[:, :, d], weights[..., d]), out, rtol=1e-12, atol=1e-14)


def test_translation(impl):
    """Shifting the image and the samples by one pixel changes nothing inside."""
    images, samples, weights = make(impl)
    padded = F.pad(images, (1, 2, 3, 4))
    H, W = images.shape[2:]
    size, new, offset = torch.tensor([W, H]), torch.tensor([W + 3, H + 7]), torch.tensor([1, 3])
    size, new, offset = size.to(samples), new.to(samples), offset.to(samples)
    moved = (2 * (((samples + 1) * size - 1) / 2 + offset) + 1) / new - 1
    torch.testing.assert_close(call(impl)(padded, moved, weights), call(impl)(images, samples, weights), rtol=1e-9, atol=1e-11)


# ---- edges --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 11, 13, 64, 176])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_pixel_edges_are_on_the_same_side_for_everyone(target, size, dtype):
    """Coordinates that hit pixel centres up to rounding fall into the same cell as in the reference, gradients show it.

    A fused multiply-add in the position would round once instead of twice and move some of them.
    """
    k = torch.arange(-1, size + 1, dtype=torch.float64)
    u = ((2 * k + 1) / size - 1).to(dtype)
    u = torch.cat([u, u.nextafter(u.new_tensor(4.0)), u.nextafter(u.new_tensor(-4.0))])
    if target.interpreted and len(u) > 24:
        u = u[:: len(u) // 24]
    n = len(u)
    samples = torch.stack([u, torch.zeros_like(u)], -1).reshape(1, 1, n, 2)
    g = torch.Generator().manual_seed(0)
    images = torch.randn(1, 2, 1, size, generator=g, dtype=torch.float64).to(dtype)
    weights = torch.rand(1, 1, 1, n, generator=g, dtype=torch.float64).to(dtype)
    assert_agrees(OPERATOR, target, [t.to(target.device) for t in (images, samples, weights)])


def test_absent_samples_poison_nothing(impl):
    """Non-finite and huge coordinates contribute nothing whatever their weight, and get zero gradients; others keep theirs."""
    images, samples, weights = make(impl, torch.float32)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 3e38, 2.0**31, 2.0**63, 1e10], device=impl.device)
    samples = samples.repeat(1, 1, 4, 1)[:, :, :11].contiguous()
    weights = torch.ones(2, 3, 4, 11, device=impl.device)
    keep = value_and_grads(call(impl), (images, samples[:, :, :2].contiguous(), weights[..., :2].contiguous()))
    for axis in (0, 1):
        hostile = samples.clone()
        hostile[:, :, 2:, axis] = bad
        heavy = weights.clone()
        heavy[..., 2:] = torch.tensor([torch.nan, torch.inf, 1e38] * 3, device=impl.device)
        out, grads = value_and_grads(call(impl), (images, hostile, heavy))
        torch.testing.assert_close(out, keep[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grads[0], keep[1][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grads[1][:, :, :2], keep[1][1], rtol=1e-5, atol=1e-5)
        assert grads[1][:, :, 2:].eq(0).all()
        assert grads[2][..., 2:].eq(0).all()


def test_non_finite_pixels_stay_where_they_are(impl):
    """A NaN in the image reaches the samples that read it and no others."""
    images = torch.zeros(1, 1, 4, 4, device=impl.device)
    images[0, 0, 0, 0] = torch.nan
    samples = torch.tensor([[[[-0.75, -0.75]], [[0.75, 0.75]], [[-2.0, -2.0]]]], device=impl.device)
    out = call(impl)(images, samples, torch.ones(1, 1, 3, 1, device=impl.device)).flatten()
    assert out.isnan().tolist() == [True, False, False]


def test_outside_pixel_is_absent_not_zero_times(impl):
    """Of a sample partly outside, only the pixels inside count, by their own weights: those beyond the border add nothing."""
    images = torch.full((1, 1, 1, 1), 2.0, device=impl.device)
    samples = torch.tensor([[[[-0.5, 0.0]]]], device=impl.device)  # x = −¼: a quarter of the sample lies outside
    out = call(impl)(images, samples, torch.ones(1, 1, 1, 1, device=impl.device))
    assert out.item() == 1.5


@pytest.mark.parametrize("D", [1, 127, 128, 129, 200])
def test_many_samples(target, D):
    """No number of samples per query is too large for one program."""
    if target.interpreted and D == 127:
        pytest.skip("the interpreter is slow")
    args = OPERATOR.make(B=1, C=3, H=5, W=4, Q=2, D=D, heads=2, layout="uniform", device=target.device)
    with poisoned():
        assert_agrees(OPERATOR, target, args)


@pytest.mark.parametrize(("C", "heads"), [(1, 1), (20, 1), (31, 5), (33, 17), (148, 4), (257, 1)])
def test_many_channels_and_heads(target, C, heads):
    """Channel counts around every tile size, head counts that are not powers of two, in both modes and layouts."""
    args = list(OPERATOR.make(B=1, C=C, H=4, W=3, Q=2, D=2, heads=heads, layout="uniform", device=target.device))
    with poisoned():
        assert_agrees(OPERATOR, target, args)
        args[0] = args[0].contiguous(memory_format=torch.channels_last)
        with deterministic():
            assert_agrees(OPERATOR, target, args)


def test_gradient_of_one_pixel_is_exact_under_contention(target):
    """Thousands of equal contributions to one pixel add up exactly: none is lost to a race."""
    Q, D = (16, 4) if target.interpreted else (2048, 16)
    images = torch.zeros(1, 4, 3, 3, device=target.device, requires_grad=True)
    samples = torch.zeros(1, Q, D, 2, device=target.device)
    for mode in (False, True):
        with deterministic(mode):
            out = call(target)(images, samples, torch.ones(1, 2, Q, D, device=target.device))
            (grad,) = torch.autograd.grad(out, images, torch.ones_like(out))
        want = torch.zeros_like(images)
        want[:, :, 1, 1] = 2 * Q * D
        assert torch.equal(grad, want)


def images_gradient(function, images, samples, weights):
    images = images.detach().requires_grad_()
    (grad,) = torch.autograd.grad(function(images, samples, weights).sum(), images)
    return grad


@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
def test_crowded_cells(target, mode):
    """A cell with more samples than a piece of a segment holds, next to cells with one or none: every sum is complete."""
    images, samples, weights = OPERATOR.make(B=1, C=5, H=4, W=5, Q=2, D=90, heads=1, layout="uniform", device=target.device)
    samples[:, :, 10:] = samples.new_tensor([0.1, 0.2])
    want = images_gradient(OPERATOR.reference, images.double(), samples.double(), weights.double())
    with deterministic(mode), poisoned():
        torch.testing.assert_close(images_gradient(call(target), images, samples, weights).double(), want, rtol=1e-5, atol=1e-5)


def test_deterministic_backward_in_several_rounds(triton_target, monkeypatch):
    """Where the workspace cannot hold the whole batch or all channels, the work is split and nothing is lost."""
    segments = pytest.importorskip("sonde.grid._epipolar.gpu_segments")
    C = segments.TILES * segments.BLOCK_C + 3
    images, samples, weights = OPERATOR.make(B=3, C=C, H=2, W=3, Q=20, D=2, heads=1, layout="uniform", device=triton_target.device)
    want = images_gradient(OPERATOR.reference, images.double(), samples.double(), weights.double())
    monkeypatch.setattr(segments, "WORKSPACE", 0)
    assert segments.batch_chunk(segments.Problem(3, 2, 3, 20, 2, C, C, C, 1, 0, torch.float32, False, True)) < 3
    with deterministic(), poisoned():
        got = images_gradient(call(triton_target), images, samples, weights)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_same_bits_for_both_layouts(target):
    """Channels-last and contiguous images give the same bits."""
    images, samples, weights = make(target, torch.float32)
    with deterministic():
        plain = value_and_grads(call(target), (images, samples, weights))
        moved = value_and_grads(call(target), (images.contiguous(memory_format=torch.channels_last), samples, weights))
    assert same_bits([*plain[0], *plain[1]], [*moved[0], *moved[1]])


# ---- errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "shape", "words"),
    [
        (1, (2, 4, 3, 3), ["samples must be [B, Q, D, 2]", "got [2, 4, 3, 3]"]),
        (1, (3, 4, 3, 2), ["samples must be [B, Q, D, 2]", "B=2 (from images)", "got [3, 4, 3, 2]"]),
        (2, (2, 3, 5, 3), ["weights must be [B, h, Q, D]", "Q=4 (from samples)", "got [2, 3, 5, 3]"]),
        (2, (2, 3, 4, 9), ["weights must be [B, h, Q, D]", "D=3 (from samples)", "got [2, 3, 4, 9]"]),
        (2, (1, 3, 4, 3), ["weights must be [B, h, Q, D]", "B=2 (from images)", "got [1, 3, 4, 3]"]),
        (0, (5, 6, 7), ["images must have 4 dimensions [B, C, H, W]", "got 3: [5, 6, 7]"]),
    ],
)
def test_messages(which, shape, words):
    """Each message names the argument, what was expected and what was given."""
    args = list(make(Target("reference")))
    args[which] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match="sample_sum: ") as caught:
        sonde.sample_sum(*args)
    for word in words:
        assert word in str(caught.value)
