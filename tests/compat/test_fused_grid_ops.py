"""fused_grid_ops' names and signatures, and the results its README describes."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

import sonde
from sonde.compat import fused_grid_ops

B, C, H, W, Q, D, HEADS = 2, 5, 4, 6, 7, 3, 2


def leaves(octaves: int):
    torch.manual_seed(0)
    images = torch.randn(B, C + 2 * octaves, H, W, dtype=torch.float64)
    samples = 2.5 * torch.rand(B, Q, D, 2, dtype=torch.float64) - 1.25
    queries, depths = torch.randn(B, HEADS, Q, C, dtype=torch.float64), torch.rand(B, Q, D, dtype=torch.float64)
    return [x.requires_grad_() for x in (images, samples, queries, depths)]


def test_signatures():
    """Callable by position and by the original's keywords; importable from the same places, also under the `_fused` names."""
    assert list(inspect.signature(fused_grid_ops.sample_sum).parameters) == ["images", "samples", "weights"]
    names = ["images", "samples", "queries", "depths", "num_octaves"]
    parameters = inspect.signature(fused_grid_ops.sample_dot).parameters
    assert list(parameters) == names
    assert all(p.default is p.empty for p in parameters.values())
    assert fused_grid_ops.sample_sum_fused is fused_grid_ops.sample_sum
    assert fused_grid_ops.sample_dot_fused is fused_grid_ops.sample_dot
    assert sonde.compat.fused_grid_ops is fused_grid_ops


def same(got, want, leaves) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    weight = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view_as(want)
    for a, b in zip(*(torch.autograd.grad(x, leaves, weight) for x in (got, want))):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_sample_sum():
    images, samples, *_ = leaves(0)
    weights = torch.rand(B, HEADS, Q, D, dtype=torch.float64, requires_grad=True)
    want = torch.einsum("bcqd,bhqd->bhqc", F.grid_sample(images, samples, align_corners=False), weights)
    same(fused_grid_ops.sample_sum(images=images, samples=samples, weights=weights), want, [images, samples, weights])


@pytest.mark.parametrize("octaves", [0, 1, 3])
def test_sample_dot(octaves):
    """The encoding of depths, a sine with a phase, is appended to the queries' channels."""
    images, samples, queries, depths = leaves(octaves)
    frequency = (2 * math.pi * 2.0 ** torch.arange(octaves, dtype=torch.float64)).repeat_interleave(2)
    phase = torch.tensor([0, math.pi / 2], dtype=torch.float64).repeat(octaves)
    encoded = (depths[..., None] * frequency + phase).sin()[:, None].expand(-1, HEADS, -1, -1, -1)
    rows = torch.cat([queries[:, :, :, None].expand(-1, -1, -1, D, -1), encoded], -1)
    want = torch.einsum("bcqd,bhqdc->bhqd", F.grid_sample(images, samples, align_corners=False), rows)
    same(
        fused_grid_ops.sample_dot(images, samples, queries, depths, octaves),
        want,
        [images, samples, queries, *([depths] if octaves else [])],
    )
