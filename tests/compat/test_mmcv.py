"""mmcv's names: the same arguments in the same order and the same results as plain PyTorch."""

import inspect

import pytest
import torch

import plain
from helpers.operators import cotangents
from sonde.compat import mmcv

LEVELS = [(5, 7), (3, 3), (1, 2)]
STARTS = [0, 35, 44]


def made(dtype=torch.float64):
    """Random value, locations and weights; some samples are outside."""
    torch.manual_seed(0)
    value, locations = torch.randn(2, 46, 4, 6), 1.4 * torch.rand(2, 8, 4, 3, 2, 2) - 0.2
    weights = torch.randn(2, 8, 4, 6).softmax(-1).unflatten(-1, (3, 2))
    return [x.to(dtype).requires_grad_() for x in (value, locations, weights)]


def results(function, inputs):
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, cotangents([out]))]


def assert_same(function):
    """Results and the gradients of value, locations and weights equal plain PyTorch's."""
    inputs = made()
    for got, want in zip(results(function, inputs), results(lambda v, x, w: plain.ms_deform_attn(v, LEVELS, x, w), inputs)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("im2col_step", [64, 3])
def test_function(dtype, im2col_step):
    """Any im2col_step works, also one that does not divide the batch of two."""
    shapes, starts = torch.tensor(LEVELS, dtype=dtype), torch.tensor(STARTS, dtype=dtype)
    assert_same(lambda v, x, w: mmcv.MultiScaleDeformableAttnFunction.apply(v, shapes, starts, x, w, im2col_step))


@pytest.mark.parametrize(
    "shapes", [LEVELS, torch.tensor(LEVELS), torch.tensor(LEVELS, dtype=torch.int32)], ids=["list", "64", "32"]
)
def test_pytorch(shapes):
    assert_same(lambda v, x, w: mmcv.multi_scale_deformable_attn_pytorch(v, shapes, x, w))


def test_arguments():
    apply = inspect.signature(mmcv.MultiScaleDeformableAttnFunction.apply)
    assert list(apply.parameters) == [
        "value",
        "value_spatial_shapes",
        "value_level_start_index",
        "sampling_locations",
        "attention_weights",
        "im2col_step",
    ]
    function = inspect.signature(mmcv.multi_scale_deformable_attn_pytorch)
    assert list(function.parameters) == ["value", "value_spatial_shapes", "sampling_locations", "attention_weights"]


def test_half_values_with_float32_locations():
    """Half-precision values with float32 locations, as under autocast; mmcv rounds the locations."""
    value, locations, weights = made(torch.float32)
    out = mmcv.MultiScaleDeformableAttnFunction.apply(
        value.bfloat16(), torch.tensor(LEVELS), torch.tensor(STARTS), locations, weights, 64
    )
    assert out.dtype == torch.bfloat16
    want = plain.ms_deform_attn(value.bfloat16().double(), LEVELS, locations.double(), weights.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["function", "pytorch"])
def test_one_graph(name):
    """One graph that takes the level shapes as inputs."""

    def function(shapes, starts, value, locations, weights):
        if name == "pytorch":
            return mmcv.multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)
        return mmcv.MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, 64)

    inputs = torch.tensor(LEVELS), torch.tensor(STARTS), *made()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), function(*inputs))
