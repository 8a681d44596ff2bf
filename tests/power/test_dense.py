"""Matrix products and copies compared with torch's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import sonde
from helpers.refusals import assert_refused
from helpers.versions import at_least
from sonde.power import copy, mm


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("impl", ["reference", "numba", "triton"])
def test_leading_dimensions(impl):
    """No leading dimension, one, several, and some that cannot be flattened as a view."""
    if impl != "reference":
        pytest.importorskip(impl)
    for leading in ((), (2,), (2, 3)):
        a, b = random(*leading, 5, 4), random(*leading, 4, 6, seed=1)
        torch.testing.assert_close(mm(a, b, impl=impl), a @ b)
    a, b = random(3, 5, 2, 4).transpose(1, 2), random(4, 6).expand(3, 2, 4, 6)
    torch.testing.assert_close(mm(a, b, impl=impl), a @ b)
    assert mm(a, b, impl=impl).is_contiguous()


def test_float32_is_float32():
    """On CPUs torch's TF32 switch changes nothing; on GPUs it is an argument of the call (benchmarks/power.py)."""
    a, b = random(40, 50).float(), random(50, 30, seed=1).float()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            out = mm(a, b)
            assert (out - (a.double() @ b.double())).norm() <= 1e-6 * out.norm()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def scaled_by_sizes(x: Tensor) -> Tensor:
    heads, d = x.shape[1:3], x.shape[-1]
    seen = sonde.power.power_attention(x, x, x, scale=d**-0.5) + sonde.power.attention(x, x, x, scale=d / heads[0])
    keys = sonde.compat.retention.power_retention(x, x, x, scale=1 / heads[0])
    factors = dict(scale=1 / heads[1], alpha=heads[0], beta=1 / d)
    added = sonde.power.sympow_mm(x.mT, x, 2, expand="m", accumulate=x.new_ones(2, 3, 4, 2), **factors)
    return (seen + keys).sum() + added.sum()


def test_numbers_computed_from_symbolic_sizes():
    """They are torch.SymFloat or torch.SymInt in a trace with symbolic sizes; the graph holds them as constants."""
    x = random(2, 3, 4, 2)
    graph = make_fx(scaled_by_sizes, tracing_mode="symbolic")(x)
    torch.testing.assert_close(graph(x), scaled_by_sizes(x))


def scaled_by_numpy(x: Tensor) -> Tensor:
    half, small = np.float32(0.5), 1 / np.sqrt(x.shape[-1])
    seen = sonde.power.power_attention(x, x, x, scale=half) + sonde.power.attention(x, x, x, scale=small)
    factors = dict(scale=half, alpha=small, beta=np.array(2.0))
    return seen.sum() + sonde.power.sympow_mm(x.mT, x, 2, expand="m", accumulate=x.new_ones(2, 3, 4, 2), **factors).sum()


def test_numbers_of_numpy():
    """torch takes them too. To torch.compile they are arrays."""
    x = random(2, 3, 4, 2)
    expected = sonde.power.power_attention(x, x, x) + sonde.power.attention(x, x, x)
    factors = dict(scale=0.5, alpha=2**-0.5, beta=2.0)
    expected = expected.sum() + sonde.power.sympow_mm(x.mT, x, 2, expand="m", accumulate=x.new_ones(2, 3, 4, 2), **factors).sum()
    torch.testing.assert_close(scaled_by_numpy(x), expected)
    for dynamic in (False, True):
        compiled = torch.compile(scaled_by_numpy, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        torch.testing.assert_close(compiled(x), expected)
        torch._dynamo.reset()


@pytest.mark.parametrize("wrong", [np.True_, np.str_("1"), np.ones(1), np.complex64(1)], ids=str)
def test_not_numbers(wrong):
    x = random(2, 3, 4, 2)
    assert_refused(TypeError, "attention: scale must be a number; got", sonde.power.attention, x, x, x, scale=wrong)


NEW_SWITCH = """
import torch, sonde
torch.backends.cuda.matmul.fp32_precision = "tf32"
a, b = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 8, 40)
out = sonde.power.mm(a, b)
assert (out - (a.double() @ b.double())).norm() <= 1e-6 * out.norm()
sonde.power.power_attention(a, a, a)
print(torch.compile(lambda a, b: sonde.power.mm(a, b) + 1, backend="aot_eager", fullgraph=True)(a, b).shape)
"""


def test_torchs_newer_switch():
    """Its older name raises an error in a process that has set the newer one."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", NEW_SWITCH], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "torch.Size([1, 2, 40, 40])\n", done.stderr


@pytest.mark.gpu
def test_tf32_is_taken_when_it_is_allowed():
    a, b = random(256, 256).float().cuda(), random(256, 256, seed=1).float().cuda()
    truth, before = a.double() @ b.double(), torch.backends.cuda.matmul.allow_tf32
    try:
        errors = []
        for allowed in (False, True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            errors.append(((mm(a, b) - truth).norm() / truth.norm()).item())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert errors[0] < 1e-6 < 1e-5 < errors[1]
    assert errors[2] == errors[0]


def test_descriptors_are_hidden_where_there_are_none(monkeypatch):
    """Descriptors are used where the device has them and the operands qualify; elsewhere only the plain candidates fit."""
    pytest.importorskip("triton")
    from sonde.power._dense import gpu
    from sonde.power.mm.gpu import forward_pass

    a = torch.empty(1, 2048, 1024, dtype=torch.float16)
    monkeypatch.setattr(gpu, "has_descriptors", lambda device: True)
    (step,) = forward_pass(a, a.mT, False).steps
    assert step.problem.described
    assert step.problem.turned == (False, True)
    assert any(config.described for config in step.kernel.fitting(step.problem))
    odd = a[:, :, 1:]
    assert not forward_pass(odd, odd.mT, False).steps[0].problem.described  # 2 bytes off alignment
    monkeypatch.setattr(gpu, "has_descriptors", lambda device: False)
    (step,) = forward_pass(a, a.mT, False).steps
    assert not any(config.described for config in step.kernel.fitting(step.problem))


@pytest.mark.skipif(not at_least("triton", 3, 6), reason="Triton 3.5's interpreter counts strides of descriptors in elements")
def test_descriptors_compute_the_same():
    """The interpreter supports descriptors, too: transposed operands, edges inside a tile."""
    pytest.importorskip("triton")
    from sonde.power._dense import gpu_kernels
    from sonde.power._dense.gpu_configs import Config, Problem

    if isinstance(gpu_kernels._product, torch.nn.Module) or type(gpu_kernels._product).__name__ == "JITFunction":
        pytest.skip("this one is about the interpreter")
    M, N, K = 40, 48, 24
    for turned in ((False, False), (True, False), (False, True), (True, True)):
        a, b = random(M, K).to(torch.float16), random(K, N, seed=1).to(torch.float16)
        a, b = (a.mT.contiguous() if turned[0] else a), (b.mT.contiguous() if turned[1] else b)
        x, y = (a.mT if turned[0] else a), (b.mT if turned[1] else b)
        out = torch.full((M, N), torch.nan, dtype=torch.float16)
        strides = (0, *x.stride()), (0, *y.stride())
        p = Problem(1, M, N, K, *strides, (1,) * 7, torch.float16, torch.float32, "ieee", False, turned, True, True)
        gpu_kernels.product.run(p, Config(32, 32, 16, 8, 4, 2, True), [a, b, out])
        torch.testing.assert_close(out, x @ y, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("impl", ["numba", "triton"])
def test_copies_of_any_strides(impl):
    """All permutations of four dimensions, steps, expanded and overlapping views, scalars, and more dimensions than a kernel
    takes."""
    pytest.importorskip(impl)
    from itertools import permutations

    x = random(3, 4, 5, 6)
    given = [x.permute(order) for order in permutations(range(4))]
    given += [x[:, ::2, :, 1::3], x[:, :1].expand(3, 7, 5, 6), x.flatten().as_strided((4, 5), (1, 2))]
    given += [x[0, 0, 0, 0], x.unfold(3, 3, 1)]
    given += [random(2, 2, 2, 2, 2, 2, 2, 2, 2).permute(8, 6, 4, 2, 0, 7, 5, 3, 1)]
    for t in given:
        out = copy(t, impl=impl)
        assert out.is_contiguous()
        assert torch.equal(out, t)
        assert out.data_ptr() != t.data_ptr()


@pytest.mark.usefixtures("numba_target")
def test_plans_say_which_kernels_run():
    a = random(3, 4).requires_grad_()
    plan = sonde.explain(mm, a, random(4, 5))
    assert [k.name for k in plan.kernels] == ["torch.bmm", "torch.bmm"]
    assert plan.kernels[1].writes == ("a",)
