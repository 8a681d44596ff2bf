"""The check that every interpreted test makes (``helpers.bounds``) finds kernels that leave their tensors."""

import pytest
import torch

from helpers.operators import HAS_GPU

pytest.importorskip("triton")

import triton
import triton.language as tl
from toy_triton import _scale

pytestmark = pytest.mark.skipif(HAS_GPU, reason="kernels are not interpreted here; benchmarks/sanitize.py checks them")


@triton.jit
def count(out, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i, 1.0, mask=i < N)


@pytest.mark.parametrize(("given", "made", "says"), [(64, 100, "reads"), (100, 64, "writes")])
def test_what_lies_outside_is_found(given, made, says):
    x, out = torch.ones(given), torch.zeros(made)
    _scale[(1,)](x, None, out, 64, 2, tl.float32, 128)  # masked lanes may lie outside
    assert out[:64].eq(2).all()
    with pytest.raises(Exception, match=rf"_scale {says} outside its tensors: 36 of 100 addresses"):
        _scale[(1,)](x, None, out, 100, 2, tl.float32, 128)


def test_views_and_atomics_are_checked():
    out = torch.zeros(40)
    count[(1,)](out[8:], 32, 32)
    assert out.sum() == 32
    with pytest.raises(Exception, match="count updates outside its tensors: 1 of 33 addresses"):
        count[(1,)](out[8:], 33, 64)
