"""Operators leave their arguments usable, ignore process-wide defaults, and return ordinary tensors."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import sonde
from helpers.operators import Target
from op.calls import CALLS, value_and_gradients

EACH = pytest.mark.parametrize("name", CALLS)


@EACH
def test_arguments_can_still_be_resized(name):
    """FSDP frees a parameter's memory by resizing its storage right after the call that read it, so no call may keep it."""
    call = CALLS[name]
    args = call.leaves()
    out = call.function(*args)
    out.sum().backward()
    for x in (*args, *[x.grad for x in args]):
        assert x.untyped_storage().resizable()
    for x in args:
        size = x.untyped_storage().nbytes()
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(size)


def test_training_step_of_a_sharded_model(tmp_path):
    """fully_shard frees gathered parameters after forward and after backward; operators must not keep references to them."""
    script, root = Path(__file__).with_name("fsdp_step.py"), Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "rendezvous"], env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)


@EACH
@pytest.mark.parametrize("how", ["with meta", "default meta", "default dtype"])
@pytest.mark.parametrize("impl", ["numba", "reference", "triton"])
def test_defaults_of_the_process_change_nothing(name, how, impl):
    """Tensors that an operator creates are on its arguments' device, whatever torch's defaults are."""
    if impl != "reference":
        pytest.importorskip(impl)
    device = Target(impl).device
    call = CALLS[name].on(device)
    want = value_and_gradients(call, impl=impl)
    args = call.leaves()
    weights = torch.linspace(-1, 1, want[0].numel(), device=device).view(want[0].shape)
    before = torch.get_default_dtype()
    try:
        if how == "default dtype":
            torch.set_default_dtype(torch.float64)
        elif how == "default meta":
            torch.set_default_device("meta")
        with torch.device("meta") if how == "with meta" else nullcontext():
            out = call.function(*args, impl=impl)
            got = [out.detach(), *torch.autograd.grad((out * weights).sum(), args)]
    finally:
        torch.set_default_device(None)
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # a None in it breaks torch 2.9's get_default_device()
        torch.set_default_dtype(before)
    for x, y in zip(got, want):
        assert x.device.type == device
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6 * (device == "cuda"))  # atomics on GPUs add in any order


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_an_index_is_built_and_used_where_the_points_are(device):
    queries, points = CALLS["knn"].args
    want = sonde.knn(queries, points, 3)
    with torch.device(device):
        index = sonde.PointIndex.build(points)
        found = sonde.knn(queries, points, 3, index=index)
        ragged = sonde.knn(queries, points, 3, batch=([0, 4, 9], [0, 40, 90]))
    assert torch.equal(found.indices, want.indices)
    assert ragged.indices.device.type == "cpu"


LIMITED = """
import resource, sys, torch, sonde
torch.set_num_threads(1)
queries, points, features = torch.rand(60_000, 3), torch.rand(200, 3), torch.rand(200, 4)
want = sonde.knn_aggregate(queries[:100], points, features)
sonde.grid_sample(torch.rand(1, 64, 8, 8), torch.zeros(1, 9, 9, 2))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
calls = (
    lambda: sonde.knn_aggregate(queries, points, features.repeat(1, 600)),
    lambda: sonde.grid_sample(torch.rand(1, 64, 8, 8), torch.zeros(1, 900, 900, 2)),
)
for call in calls * 3:
    try:
        call()
        print("taken")
    except (RuntimeError, MemoryError):
        print("refused")
    assert torch.equal(sonde.knn_aggregate(queries[:100], points, features), want)
"""


def test_memory_that_runs_out():
    """If memory runs out, the call raises and keeps nothing, and the next call is right."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("asks Linux how much memory a process has")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LIMITED], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["refused"] * 6, done.stderr
