"""Operators in the CUDA graphs of ``torch.compile(mode="reduce-overhead")``: no graph is skipped, no step reuses stale data."""

import pytest
import torch

from op.calls import CALLS, WAITS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("gradients", [False, True], ids=["value", "gradients"])
@pytest.mark.parametrize("name", [name for name in CALLS if name not in WAITS])
def test_reduce_overhead(name, gradients, deterministic):
    """Several steps with different data: a graph that kept an old address or value would repeat an earlier result."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.use_deterministic_algorithms(deterministic)
    call = CALLS[name].on("cuda")
    compiled = torch.compile(call.function, mode="reduce-overhead", fullgraph=True)
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        args = [x.roll(step, 0).contiguous().requires_grad_(gradients) for x in call.args]
        want, got = call.function(*args), compiled(*args)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        if gradients:
            wanted = torch.autograd.grad(want.square().sum(), args)
            for x, y in zip(torch.autograd.grad(got.square().sum(), args), wanted):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
