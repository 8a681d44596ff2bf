"""``copy`` on CPUs: torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu_steps import CpuPass, by_threads
from ...op.dtypes import accumulator


def _contiguous(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


@by_threads
def forward_pass(x: Tensor) -> Pass:
    p = CpuPass(accumulator(x), dict(x=x))
    return p.returns(*p.call("torch.clone", _contiguous, ["x"], [("out", x.shape, x.dtype)], writes=["out"])).returning_one()


@by_threads
def backward_pass(grad: Tensor, x: Tensor, *, needs: Sequence[bool], deterministic: bool) -> Pass:
    p = CpuPass(accumulator(x), dict(grad=grad, x=x))
    return p.returns(*p.call("torch.clone", _contiguous, ["grad"], [("d_x", x.shape, x.dtype)], writes=["x"]))
