"""Attention compared with torch's own: values, gradients, and their errors against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonde.power import attention

sdpa = torch.nn.functional.scaled_dot_product_attention
IMPLS = pytest.mark.parametrize("impl", ["reference", "numba", "triton"])


def made(B: int, hq: int, h: int, T: int, S: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (B, hq, T, d), (B, h, S, d), (B, h, S, d)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    ct = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, inputs, ct)


@IMPLS
@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        ((2, 2, 2, 1, 1, 8), True),
        ((1, 2, 2, 77, 77, 80), True),
        ((1, 4, 2, 30, 45, 16), False),
        ((1, 6, 2, 45, 30, 8), True),
        ((1, 1, 1, 100, 100, 5), True),
        pytest.param((1, 2, 1, 777, 1000, 80), True, marks=pytest.mark.interpreted(False)),
    ],
)
def test_is_torchs_own(impl, sizes, causal):
    """T = 1, odd lengths, different lengths of queries and keys, grouped heads, d = 80."""
    if impl != "reference":
        pytest.importorskip(impl)
    if impl == "triton" and sizes[3] > 500 and not torch.cuda.is_available():
        pytest.skip("the interpreter would take minutes")
    inputs = made(*sizes)
    want = sdpa(*inputs, is_causal=causal, enable_gqa=sizes[1] != sizes[2])
    out, lse = attention(*inputs, causal=causal, return_lse=True, impl=impl)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(out, inputs), gradients(want, inputs), rtol=1e-10, atol=1e-11)
    q, k = inputs[0], inputs[1].repeat_interleave(sizes[1] // sizes[2], 1)
    logits = (q @ k.mT) * sizes[-1] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1).detach(), rtol=1e-12, atol=1e-12)


@IMPLS
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_rows_far_from_zero(impl, level):
    """With all logits near −1e4, only their differences matter to the softmax."""
    if impl != "reference":
        pytest.importorskip(impl)
    q, k, v = (x.detach().clone() for x in made(1, 1, 1, 9, 20, 8))
    q[..., 0], k[..., 0] = 1.0, level
    want = sdpa(q[..., 1:], k[..., 1:], v, scale=1.0)
    out, lse = attention(q, k, v, scale=1.0, return_lse=True, impl=impl)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    assert (lse - level).abs().max() < 50
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    found = gradients(attention(*inputs, scale=1.0, impl=impl), inputs)
    torch.testing.assert_close(found, gradients(sdpa(*inputs, scale=1.0), inputs), rtol=1e-9, atol=1e-8)  # sums of terms of 1e4
    narrow = attention(*(x.float() for x in (q, k, v)), scale=1.0, impl=impl)
    assert narrow.isfinite().all()
    torch.testing.assert_close(narrow.double(), want, rtol=1e-2, atol=1e-2)  # float32 resolves such logits to 1e-3


@IMPLS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-45, -0.3, 1e-30])
def test_scales(impl, scale, causal):
    """Masked keys have logits of −∞, also where the scale is 0 or negative."""
    if impl != "reference":
        pytest.importorskip(impl)
    inputs = made(1, 2, 1, 5, 7, 8, dtype=torch.float32)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(1) & causal
    logits = (exact[0] @ exact[1].mT * scale).masked_fill(hidden, -torch.inf)
    want, (out, lse) = logits.softmax(-1) @ exact[2], attention(*inputs, causal=causal, scale=scale, return_lse=True, impl=impl)
    torch.testing.assert_close(out, want.float())
    torch.testing.assert_close(lse, logits.logsumexp(-1).float())
    torch.testing.assert_close(gradients(out, inputs), tuple(x.float() for x in gradients(want, exact)))


@pytest.mark.parametrize("impl", ["numba", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_near_to_float64_as_torch(impl, dtype):
    """The error of every implementation is at most an eighth larger than torch's."""
    pytest.importorskip(impl)
    inputs = made(1, 2, 2, 50, 50, 32, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = sdpa(*exact, is_causal=True)
    truths = [truth, *gradients(truth, exact)]

    def errors(out: Tensor) -> list[float]:
        return [((x.double() - y).norm() / y.norm()).item() for x, y in zip([out, *gradients(out, inputs)], truths)]

    theirs, ours = errors(sdpa(*inputs, is_causal=True)), errors(attention(*inputs, causal=True, impl=impl))
    for name, x, y in zip(("out", "q", "k", "v"), ours, theirs):
        assert x <= 1.125 * y + 1e-7, (name, x, y)


@pytest.mark.usefixtures("numba_target")
def test_without_keys_or_rows():
    q, k = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 0, 8)
    for impl in ("reference", "numba"):
        assert torch.equal(attention(q, k, k, impl=impl), torch.zeros(2, 3, 4, 8))
        assert attention(q[:0], k[:0], k[:0], impl=impl).shape == (0, 3, 4, 8)


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (((1, 3, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)), {}, ("q must have a multiple of the heads of k and v, 2", "[1, 3, 4, 8]")),
        (((1, 2, 4, 8), (1, 2, 5, 9), (1, 2, 5, 8)), {}, ("k must be [B, h, S, d]", "d=8 (from q)", "[1, 2, 5, 9]")),
        (((1, 2, 4, 300), (1, 2, 5, 300), (1, 2, 5, 8)), {}, ("q must have rows of 1 to 256 numbers", "300")),
        (((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)), dict(causal=1), ("causal must be True or False",)),
        (((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)), dict(scale="1"), ("scale must be a number",)),
    ],
)
def test_bad_input(shapes, options, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        attention(*(torch.zeros(s) for s in shapes), **options)
    assert all(word in str(caught.value) for word in ("attention", *words)), caught.value


@pytest.mark.parametrize("size", [1e6, 1e7, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_of_huge_logits(numba_target, size, dtype):
    """Weights are at most 1, so |∂v| ≤ Σ |∂out|. Torch's flash kernel takes exp of a difference of such numbers and exceeds it."""
    inputs = made(1, 1, 1, 129, 129, 64, dtype=dtype)
    out = attention(*inputs, scale=size / 20, impl=numba_target)
    found = torch.autograd.grad(out, inputs, torch.ones_like(out))[2]
    assert found.sum().item() == pytest.approx(129 * 64, rel=0.02)
    assert 0 <= found.min().item() <= found.max().item() <= 129
