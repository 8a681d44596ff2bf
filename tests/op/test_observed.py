"""Modes, transforms, tracers and profilers must see the operator, not the function that launches its kernels.

Every test calls the operator first, so that its call cache is warm: the usual order, and the one in which a stale cache shows.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from op.calls import CALLS, WAITS, Call, operator_of, value_and_gradients
from sonde.operators import OPERATORS

pytest.importorskip(
    "numba", reason="without Numba, a call on CPU tensors is the reference in plain PyTorch: there is no operator to see"
)

EACH = pytest.mark.parametrize("name", CALLS)
OF_ONE_SIZE = pytest.mark.parametrize("name", [name for name in CALLS if name not in WAITS])
KINDS = pytest.mark.parametrize("gradients", [False, True], ids=["value", "gradients"])
READ_THEIR_RESULT = {"knn", "radius_neighbors", "radius_search", "sample_attention", "attention", "power_attention"}


def warm(name: str) -> Call:
    call = CALLS[name]
    for grad in (False, True, True):
        function_of(call, grad)(*call.args)
    return call


def function_of(call: Call, gradients: bool):
    """A function with one positional parameter per tensor: tracers count the parameters of what they trace."""

    def value(*args: Tensor) -> tuple[Tensor, ...]:
        return (call.function(*args),)

    def all_of_it(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in args]
        out = call.function(*leaves)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    return all_of_it if gradients else value


def others(call: Call) -> list[Tensor]:
    """The call's arguments with different values."""
    return [x.flip(0).contiguous() for x in call.args]


def assert_same(got, want) -> None:
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def seen(graph: torch.fx.GraphModule, name: str) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if f"sonde.{operator_of(name)}" in str(node.target)]


def test_every_operator_has_a_call():
    assert {operator_of(name) for name in CALLS} == set(OPERATORS) - {"point_index"}  # which is no function of tensors


@EACH
@KINDS
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("early", [False, True], ids=["", "pre_dispatch"])
def test_make_fx_holds_the_operator(name, gradients, mode, early):
    call = warm(name)
    function = function_of(call, gradients)
    if early and gradients and operator_of(name) in READ_THEIR_RESULT:
        with pytest.raises(RuntimeError, match=r"pre_dispatch=False|not tracked with proxy"):  # the latter by torch 2.9
            make_fx(function, tracing_mode=mode, pre_dispatch=True)(*call.args)
        return
    if name in WAITS and mode != "real":
        pytest.skip("its size depends on numbers that a fake tensor does not have")
    graph = make_fx(function, tracing_mode=mode, pre_dispatch=early)(*call.args)
    assert seen(graph, name)
    assert not any("empty" in str(node.target) for node in graph.graph.nodes)  # an `empty` would mean that the launcher was traced
    if name not in WAITS:
        assert_same(graph(*others(call)), function(*others(call)))


@EACH
@KINDS
def test_fake_tensor_mode_computes_nothing(name, gradients):
    call = warm(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if name in WAITS:
            with pytest.raises(DynamicOutputShapeException):
                function_of(call, gradients)(*call.args)
            return
        found = function_of(call, gradients)(*call.args)
    want = function_of(call, gradients)(*call.args)
    assert all(isinstance(x, FakeTensor) for x in found)
    assert [x.shape for x in found] == [x.shape for x in want]


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@EACH
@pytest.mark.parametrize("mode", [Dispatched, Called, FlopCounterMode])
def test_modes_see_the_operator(name, mode):
    call = warm(name)
    want = value_and_gradients(call)
    with mode(display=False) if mode is FlopCounterMode else mode() as observer:
        found = value_and_gradients(call)
    assert_same(found, want)
    if mode is not FlopCounterMode:
        assert any(operator_of(name) in n for n in observer.names)
    if mode is Dispatched:
        assert any(f"{operator_of(name)}_backward" in n for n in observer.names)


@EACH
def test_a_mode_can_answer_in_place_of_the_operator(name):
    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            ours = str(func).startswith("sonde.") and "point_index" not in str(func)
            return torch.utils._pytree.tree_map(torch.zeros_like, out) if ours else out

    call = warm(name)
    if name in WAITS:
        pytest.skip("lists of zeros are no lists")
    with Zeros():
        assert not call.function(*call.args).any()


@OF_ONE_SIZE
def test_jit_trace_holds_the_operator(name):
    call = warm(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(function_of(call, False), call.args, check_trace=False)
    assert "sonde::" in str(traced.graph)
    assert_same(traced(*others(call)), function_of(call, False)(*others(call)))


@OF_ONE_SIZE
@pytest.mark.parametrize("transform", ["vmap", "vmap of nothing", "grad", "jvp", "functionalize", "vjp"])
def test_transforms(name, transform):
    call = warm(name)
    args, leaves = others(call), [x.requires_grad_() for x in others(call)]
    want = call.function(*args)
    if transform == "vmap of nothing":
        got = torch.func.vmap(call.function)(*[x.new_empty(0, *x.shape) for x in args])
        assert got.shape == (0, *want.shape)
        return None
    if transform == "vmap":
        got = torch.func.vmap(call.function)(*[x[None].expand(2, *x.shape) for x in args])
        return assert_same(got, (want, want))
    if transform == "functionalize":
        assert_same([torch.func.functionalize(call.function)(*args)], [want])
        graph = make_fx(torch.func.functionalize(function_of(call, False)))(*args)
        return assert_same(graph(*call.args), [call.function(*call.args)])
    first = torch.autograd.grad(call.function(*leaves).square().sum(), leaves)
    every = tuple(range(len(args)))
    if transform == "grad":
        return assert_same(torch.func.grad(lambda *xs: call.function(*xs).square().sum(), every)(*args), first)
    if transform == "vjp":
        out, pull = torch.func.vjp(call.function, *args)
        return assert_same(pull(2 * out), first)
    along = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) for x in args]
    _, moved = torch.func.jvp(lambda *xs: call.function(*xs).square().sum(), tuple(args), tuple(along))
    torch.testing.assert_close(moved, sum((g * t).sum() for g, t in zip(first, along)), rtol=1e-4, atol=1e-4)


@EACH
def test_profiler_sees_the_operator(name):
    call = warm(name)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        value_and_gradients(call)
    names = {event.name for event in found.events()}
    assert f"sonde::{operator_of(name)}" in names
    assert f"sonde::{operator_of(name)}_backward" in names


@EACH
def test_forward_mode(name):
    """Forward-mode AD after a warm call gives the right tangent; launching the kernel directly would drop it."""
    from torch.autograd import forward_ad

    call = warm(name)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in others(call)]
        assert forward_ad.unpack_dual(call.function(*duals)).tangent is not None


@EACH
@pytest.mark.parametrize("how", ["checkpoint", "selective", "hooks", "anomaly", "inference", "autocast", "subclass"])
def test_other_tools_change_no_bit(name, how):
    call = warm(name)
    want = value_and_gradients(call)
    if how == "inference":
        with torch.inference_mode():
            got = call.function(*call.args)
        assert_same([got], want[:1])
        return assert_same(value_and_gradients(call), want)
    kept: list[Tensor] = []
    if how in ("checkpoint", "selective"):
        contexts = {"context_fn": lambda: create_selective_checkpoint_contexts([])} if how == "selective" else {}

        def run(*args):
            return checkpoint(call.function, *args, use_reentrant=False, **contexts)

        return assert_same(value_and_gradients(call, run), want)
    if how == "subclass":

        class Mine(Tensor):
            pass

        def run(*args):
            return call.function(*[x.as_subclass(Mine) for x in args]).as_subclass(Tensor)

        return assert_same(value_and_gradients(call, run), want)
    tool = {
        "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x.clone(), lambda x: x),
        "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }[how]
    with tool(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(value_and_gradients(call), want)
    assert kept or how != "hooks"


@OF_ONE_SIZE
@KINDS
def test_compile_after_a_warm_call(name, gradients):
    call = warm(name)
    torch._dynamo.reset()
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    args = [x.requires_grad_(gradients) for x in others(call)]
    want, got = call.function(*args), compiled(*args)
    assert_same([got], [want])
    if gradients:
        assert_same(torch.autograd.grad(got.square().sum(), args), torch.autograd.grad(want.square().sum(), args))


@OF_ONE_SIZE
@pytest.mark.parametrize("grad", [False, True])
def test_export_after_a_warm_call(name, grad):
    call = warm(name)

    class Module(torch.nn.Module):
        def forward(self, *args):
            return call.function(*args)

    with nullcontext() if grad else torch.no_grad():
        program = torch.export.export(Module(), tuple(call.args))
    assert any("sonde." in str(node.target) for node in program.graph.nodes)
    assert_same([program.module()(*others(call))], [call.function(*others(call))])
