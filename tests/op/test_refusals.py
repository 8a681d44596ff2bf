"""Arguments and tools that an operator cannot handle raise a clear error before anything is launched."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import sonde
from op.calls import CALLS, WAITS, value_and_gradients
from sonde.op import plan

EACH = pytest.mark.parametrize("name", CALLS)


@pytest.fixture
def mesh(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_tensors(mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    for name, call in CALLS.items():
        for i in range(len(call.args)):
            args = list(call.args)
            args[i] = distribute_tensor(args[i], mesh, [Replicate()])
            with pytest.raises(NotImplementedError, match=r"got a DTensor.*full_tensor"):
                call.function(*args)
        assert call.function(*call.args) is not None, name
    with pytest.raises(NotImplementedError, match="got a DTensor"):
        sonde.PointIndex.build(distribute_tensor(torch.rand(90, 3), mesh, [Replicate()]))


@EACH
@pytest.mark.filterwarnings("ignore")
def test_layouts_that_are_not_dense(name):
    call = CALLS[name]
    for make, answer in (
        (lambda x: torch.nested.nested_tensor(list(x)), "nested"),
        (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "nested"),
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: torch.masked.masked_tensor(x, x > 0.5), "MaskedTensor"),
    ):
        for i in range(len(call.args)):
            args = list(call.args)
            args[i] = make(args[i])
            with pytest.raises(TypeError, match=answer):
                call.function(*args)


@EACH
def test_zero_tensors_are_zeros(name):
    """Forward mode replaces a zero tangent by a tensor without memory; operators treat it as zeros."""
    call = CALLS[name]
    call.function(*call.args)
    for i, x in enumerate(call.args):
        args, want = list(call.args), list(call.args)
        args[i], want[i] = torch._efficientzerotensor(x.shape), torch.zeros_like(x)
        assert torch.equal(call.function(*args), call.function(*want))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in sonde.__all__ if name in CALLS])
def test_script_says_what_to_use_instead(name):
    operator = getattr(sonde, name)

    def calls_it(x: torch.Tensor) -> torch.Tensor:
        return operator(x, x, x)

    for function in (operator, calls_it):
        with pytest.raises(NotImplementedError, match=rf"{name}: torch.jit.script cannot compile it; use torch.jit.trace"):
            torch.jit.script(function)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in WAITS])
def test_onnx_gets_plain_operations(name, monkeypatch):
    """ONNX export cannot translate our operators, so `auto` uses the reference there; a kernel requested by name is refused."""
    call = CALLS[name]
    want = value_and_gradients(call, impl="reference")[0]
    call.function(*call.args)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    graph = make_fx(lambda *args: call.function(*args))(*call.args) if name.startswith("sample_sum") else None
    assert graph is None or not any("sonde." in str(node.target) for node in graph.graph.nodes)
    assert plan.choose(name, "auto", call.args[0]) == "reference"
    with pytest.raises(ValueError, match="no translation to ONNX"):
        call.function(*call.args, impl="numba")
    torch.testing.assert_close(call.function(*call.args), want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sample_sum", "sample_dot"])
def test_onnx_export(name, tmp_path):
    pytest.importorskip("onnxscript")
    call = CALLS[name]

    class Model(torch.nn.Module):
        def forward(self, *args):
            return call.function(*args)

    torch.onnx.export(Model(), call.args, tmp_path / "model.onnx", dynamo=True, verbose=False)
    assert (tmp_path / "model.onnx").stat().st_size


@pytest.mark.parametrize("value", [np.int64(2), np.uint8(2), torch.tensor(2)], ids=repr)
def test_other_integers(value):
    """NumPy's integers and tensors are refused by name, with what to write instead; booleans have no such advice."""
    with pytest.raises(TypeError, match=r"knn: k must be an integer >= 1; got .*2.*\. Use int\(k\)"):
        sonde.knn(torch.rand(3, 3), torch.rand(5, 3), value)
    with pytest.raises(TypeError, match=r"got True \(bool\)$"):
        sonde.knn(torch.rand(3, 3), torch.rand(5, 3), True)
