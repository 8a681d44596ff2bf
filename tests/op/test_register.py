"""``op/register.py`` and ``op/calls.py``: several outputs, outputs without gradient, optional tensors, saved tensors, folding.

The operators here exist for these tests only; their "kernels" are modules made on the spot, which count their calls.
"""

# ruff: noqa: E731 (short functions read better on one line)

import math
import sys
import threading
import types
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from sonde.op import calls
from sonde.op.plan import Determinism, Kernel
from sonde.op.register import operator

CALLS: list[tuple] = []


def package(name: str, forward, backward) -> str:
    """A package whose ``cpu`` module has these launchers."""
    for path in (name, f"{name}.cpu"):
        sys.modules[path] = types.ModuleType(path)
    module = sys.modules[f"{name}.cpu"]
    module.forward, module.backward = forward, backward
    module.plan = lambda *args, needs, deterministic: [Kernel("all", ("out",), torch.float32, Determinism.RUN_TO_RUN)]
    return name


# scaled(x, gain?, power): y = gain · x / |x|^power, the norm |x| (saved, differentiable), where |x| is largest (no gradient)


def scaled_reference(x, gain=None, power=1):
    norm = x.square().sum(-1).sqrt()
    y = x / (norm**power)[..., None]
    return (y if gain is None else y * gain[:, None, None]), norm, x.abs().argmax(-1)


def scaled_forward(x, gain, power):
    CALLS.append(("forward", x.shape[0]))
    return scaled_reference(x, gain, power)


def scaled_backward(grad_y, grad_norm, x, gain, power, norm, *, needs, deterministic):
    CALLS.append(("backward", tuple(needs), deterministic, gain is None))
    assert torch.equal(norm, x.square().sum(-1).sqrt()), "the saved result is the forward pass's own"
    assert needs[1] is False or gain is not None
    g = grad_y if gain is None else grad_y * gain[:, None, None]
    n = norm[..., None]
    if needs[0]:
        yield g / n**power + x / n * (grad_norm[..., None] - power * (g * x).sum(-1, keepdim=True) / n ** (power + 1))
    if needs[1]:
        yield (grad_y * x / n**power).sum((1, 2))


def scaled_fake(x, gain, power):
    if x.ndim != 3:
        raise ValueError(f"zz_scaled: x must be [B, N, C]; got {list(x.shape)}")
    return torch.empty_like(x), x.new_empty(x.shape[:2]), x.new_empty(x.shape[:2], dtype=torch.int64)


_scaled = operator(
    "zz_scaled(Tensor x, Tensor? gain, int power) -> (Tensor, Tensor, Tensor)",
    package=package("zz_scaled", scaled_forward, scaled_backward),
    reference=scaled_reference,
    check=scaled_fake,
    fake=scaled_fake,
    differentiable=("x", "gain"),
    saved=(1,),
    no_grad=(2,),
)


def scaled(x, gain=None, power=2):
    return _scaled(x, gain, power, impl="numba")


# one(x): y = x³, the smallest schema: one input, one output, one gradient

_one = operator(
    "zz_one(Tensor x) -> Tensor",
    package=package("zz_one", lambda x: x**3, lambda grad, x, *, needs, deterministic: [3 * grad * x**2]),
    reference=lambda x: x**3,
    check=torch.empty_like,
    fake=torch.empty_like,
    differentiable=("x",),
)


# shifted(x, offset, scales): y = x · Π scales + offset, with one offset and a list of numbers for the whole batch


def shifted_fake(x, offset, scales):
    if offset.ndim != 1:
        raise ValueError(f"zz_shifted: offset must be [C]; got {list(offset.shape)}")
    return torch.empty_like(x)


_shifted = operator(
    "zz_shifted(Tensor x, Tensor offset, int[] scales) -> Tensor",
    package=package(
        "zz_shifted",
        lambda x, offset, scales: x * math.prod(scales) + offset,
        lambda grad, x, offset, scales, *, needs, deterministic: [grad * math.prod(scales)],
    ),
    reference=lambda x, offset, scales: x * math.prod(scales) + offset,
    check=shifted_fake,
    fake=shifted_fake,
    differentiable=("x",),
    unbatched=("offset",),
)


@pytest.fixture
def x():
    return torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gain():
    return torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def no_calls():
    pytest.importorskip("numba")  # the launchers are not Numba's, but go by its name
    CALLS.clear()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_several_outputs(x, gain):
    """Every output has its own dtype, and the one without gradient is outside the graph."""
    y, norm, index = scaled(x.requires_grad_(), gain.requires_grad_())
    close((y, norm, index), scaled_reference(x, gain, 2))
    assert y.requires_grad
    assert norm.requires_grad
    assert not index.requires_grad
    assert index.dtype == torch.int64


def test_gradients_reach_only_what_asks(x, gain):
    """`needs` says which gradients to compute; an absent optional tensor needs none."""
    ask = lambda a, g: torch.autograd.grad(scaled(a, g)[0].sum(), [t for t in (a, g) if t is not None and t.requires_grad])
    ask(x.clone().requires_grad_(), gain)
    ask(x, gain.clone().requires_grad_())
    ask(x.clone().requires_grad_(), None)
    assert [call[1] for call in CALLS if call[0] == "backward"] == [(True, False), (False, True), (True, False)]
    assert [call[3] for call in CALLS if call[0] == "backward"] == [False, False, True]


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("present", [True, False])
def test_derivatives_of_each_output(x, gain, outputs, present):
    """First and second derivatives are right whichever outputs the loss uses (the others get zero gradients)."""
    inputs = (x.requires_grad_(), gain.requires_grad_()) if present else (x.requires_grad_(),)
    fn = lambda *a: tuple(scaled(*a)[i] for i in outputs)
    assert torch.autograd.gradcheck(fn, inputs)
    assert torch.autograd.gradgradcheck(fn, inputs)


def test_determinism_travels_to_the_backward(x):
    """The backward pass uses the deterministic flag of its forward call, whenever it runs."""
    torch.use_deterministic_algorithms(True)
    y = scaled(x.requires_grad_())[0].sum()
    torch.use_deterministic_algorithms(False)
    z = scaled(x)[0].sum()
    y.backward()
    z.backward()
    assert [call[2] for call in CALLS if call[0] == "backward"] == [True, False]


def test_no_graph_no_apply(x, monkeypatch):
    """Without a gradient to compute, autograd is not entered and nothing is saved."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        scaled(x)
        with torch.no_grad():
            scaled(x.requires_grad_())
    assert not kept


def test_vmap_folds(x, gain):
    """Mapped, shared, absent and plain arguments: one call with the mapped dimension in its batch, equal to a loop."""
    many, gains = torch.stack([x, x + 1, x - 2], 1), torch.stack([gain, gain + 1, gain * 2])
    loop = lambda pick, g=gain: tuple(map(torch.stack, zip(*[scaled_reference(*pick(k), 2) for k in range(3)])))
    for in_dims, args, pick in (
        ((1, 0), (many, gains), lambda k: (many[:, k], gains[k])),
        ((1, None), (many, gain), lambda k: (many[:, k], gain)),
        ((None, 0), (x, gains), lambda k: (x, gains[k])),
        ((1, None), (many, None), lambda k: (many[:, k], None)),
    ):
        CALLS.clear()
        close(torch.vmap(scaled, in_dims)(*args), loop(pick))
        assert CALLS == [("forward", 9)]


def test_vmap_leaves_alone_what_has_no_batch(x):
    """A tensor shared by all rows reaches the kernels unchanged, forward and backward: it is not expanded."""
    offset, many = torch.arange(5.0, dtype=torch.float64), torch.stack([x, x + 1])
    shifted = lambda a, o: _shifted(a, o, (2, 3), impl="numba")
    close(torch.vmap(shifted, (0, None))(many, offset), 6 * many + offset)
    slope = torch.func.grad(lambda a, o: (shifted(a, o) ** 2).sum())
    close(torch.vmap(slope, (0, None))(many, offset), 12 * (6 * many + offset))
    compiled = torch.compile(torch.vmap(shifted, (0, None)), fullgraph=True, backend="aot_eager")
    close(compiled(many, offset), 6 * many + offset)
    with pytest.raises(ValueError, match="zz_shifted: offset must be the same for all rows"):
        torch.vmap(shifted, (0, 0))(many, torch.stack([offset, offset]))


def test_lists_of_numbers(x):
    """Lists of numbers are checked once with the rest, and reach the backward pass and traced graphs."""
    offset = torch.zeros(5, dtype=torch.float64)
    for scales in ((2, 3), (2, 4), [2, 5]):
        (grad,) = torch.autograd.grad(_shifted(x.requires_grad_(), offset, scales, impl="numba").sum(), x)
        close(grad, torch.full_like(x, math.prod(scales)))
    with pytest.raises(ValueError, match="offset"):
        _shifted(x, offset[None], (2, 3), impl="numba")
    torch.library.opcheck(_shifted.forward_op, (x, offset, [2, 3], "numba", False))


def test_vmap_of_grad_and_grad_of_vmap(x, gain):
    """Gradients under vmap fold as well: one forward, one backward."""
    many = torch.stack([x, x + 1])
    loss = lambda a, g: sum(o.sin().sum() for o in scaled(a, g)[:2])
    loss_reference = lambda a, g: sum(o.sin().sum() for o in scaled_reference(a, g, 2)[:2])
    want = torch.stack([torch.func.grad(loss_reference)(a, gain) for a in many])
    close(torch.vmap(torch.func.grad(loss), (0, None))(many, gain), want)
    assert [call[0] for call in CALLS] == ["forward", "backward"]
    CALLS.clear()
    close(torch.func.grad(lambda a: torch.vmap(loss, (0, None))(a, gain).sum())(many), want)
    assert [call[0] for call in CALLS] == ["forward", "backward"]
    both = torch.vmap(torch.func.grad(loss, (0, 1)), (0, None))(many, gain)
    close(both, tuple(map(torch.stack, zip(*[torch.func.grad(loss_reference, (0, 1))(a, gain) for a in many]))))


def test_jvp_and_hessian(x, gain):
    """Forward mode and forward-over-reverse use the reference."""
    tangent = torch.randn_like(x)
    close(
        torch.func.jvp(lambda a: scaled(a, gain)[:2], (x,), (tangent,)),
        torch.func.jvp(lambda a: scaled_reference(a, gain, 2)[:2], (x,), (tangent,)),
    )
    small = x[:1, :1]
    loss = lambda f: lambda a: f(a, None, 2)[0].sin().sum()
    close(torch.func.hessian(loss(scaled))(small), torch.func.hessian(loss(scaled_reference))(small))
    close(torch.func.jacrev(torch.func.jacrev(loss(scaled)))(small), torch.func.hessian(loss(scaled_reference))(small))


@pytest.mark.parametrize("present", [True, False])
def test_opcheck(x, gain, present):
    """Both registered operators pass opcheck, with and without the optional tensor and where inputs require gradients."""
    g = gain if present else None
    y, norm, _ = scaled(x, g)
    leaf = x.clone().requires_grad_()
    for first in (x, leaf):
        torch.library.opcheck(_scaled.forward_op, (first, g, 2, "numba", False))
        torch.library.opcheck(_scaled.backward_op, (y, norm, first, g, 2, norm, [True, present], "numba", False))
    torch.library.opcheck(_one.forward_op, (leaf, "numba", False))
    torch.library.opcheck(_one.backward_op, (x, leaf, [True], "numba", False))


@pytest.mark.parametrize("present", [True, False])
def test_compile_and_export(x, gain, present):
    """One graph with several outputs, gradients included, with and without the optional tensor."""
    torch._dynamo.reset()
    args = (x, gain) if present else (x,)
    fn = lambda *a: tuple(o * 2 for o in scaled(*a))
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
    close(compiled(*args), fn(*args))
    found = []
    for f in (compiled, fn):
        leaves = [a.clone().requires_grad_() for a in args]
        y, norm, _ = f(*leaves)
        found.append(torch.autograd.grad(y.sin().sum() + norm.sum(), leaves))
    close(*found)

    class Model(torch.nn.Module):
        def forward(self, *a):
            return fn(*a)

    program = torch.export.export(Model(), args)
    assert any(node.target is _scaled.forward_op for node in program.graph.nodes)
    close(program.module()(*args), fn(*args))


def test_smallest_operator(x):
    """One input and one output work, although a schema has no tuple of one result."""
    one = lambda a: _one(a, impl="numba")
    assert torch.autograd.gradcheck(one, x.requires_grad_())
    assert torch.autograd.gradgradcheck(one, x)
    x = x.detach()
    close(torch.vmap(torch.func.grad(lambda a: one(a).sum()))(x[:, None]), 3 * x[:, None] ** 2)
    close(torch.compile(torch.func.grad(lambda a: one(a).sum()), fullgraph=True, backend="aot_eager")(x), 3 * x**2)


def test_errors_of_kernels_surface(x, monkeypatch):
    """A kernel that fails is not replaced by the reference."""

    def broken(*_):
        raise RuntimeError("kernel bug")

    monkeypatch.setattr(sys.modules["zz_one.cpu"], "forward", broken)
    with pytest.raises(RuntimeError, match="kernel bug"):
        _one(x, impl="numba")


def test_backward_that_yields_too_little_is_an_error(x, monkeypatch):
    """A launcher that forgets a gradient raises an error instead of returning uninitialized memory."""
    monkeypatch.setattr(sys.modules["zz_one.cpu"], "backward", lambda grad, x, *, needs, deterministic: [])
    y = _one(x.requires_grad_(), impl="numba")
    with pytest.raises(Exception):  # noqa: B017, PT011 (whichever the dispatcher makes of it)
        y.sum().backward()


def test_fake_checks_inside_graphs():
    """Bad shapes are refused during tracing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(ValueError, match="zz_scaled: x must be"):
        _scaled.forward_op(torch.empty(2), None, 1, "numba", False)


def test_results_are_tensors_of_their_own(x):
    """No operator returns its input, so in-place changes of a result leave inputs alone."""
    for out in (*scaled(x), _one(x, impl="numba")):
        assert isinstance(out, Tensor)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("own", [False, True], ids=["openmp", "own threads"])
def test_errors_of_threads_are_raised(own, monkeypatch):
    cpu = pytest.importorskip("sonde.op.cpu")
    torch.set_num_threads(2)
    if own:
        monkeypatch.setattr(cpu, "_openmp", None)
    done = []

    def fails(start, stop):
        done.append(start)
        if start == 2:
            raise ArithmeticError("here")

    with pytest.raises(ArithmeticError, match="here"):
        cpu.run(fails, 4, slices_per_thread=2)
    cpu.run(lambda start, stop: done.append(start), 8)
    assert sorted(done[-8:]) == list(range(8))


def test_threads_keep_nothing_of_a_call(monkeypatch):
    """A pool thread that has not started yet does not keep the operands alive."""
    cpu = pytest.importorskip("sonde.op.cpu")
    monkeypatch.setattr(cpu, "_openmp", None)
    torch.set_num_threads(2)
    late, x = threading.Event(), np.zeros(4)
    memory = weakref.ref(x)
    cpu._pool(1).submit(late.wait)
    try:
        cpu.run(lambda start, stop, x: None, 4, x)
        del x
        assert memory() is None
    finally:
        late.set()


OF_A_KIND = (torch.zeros(2, 3, 4), None, torch.zeros(3, 2), 5, (1, 2), "x", False)
OTHERS = {
    "size": (0, torch.zeros(2, 3, 5)),
    "size where nothing is": (2, torch.zeros(3, 0)),
    "rank": (0, torch.zeros(1, 2, 3, 4)),
    "strides": (0, torch.zeros(2, 4, 3).mT),
    "expanded": (0, torch.zeros(2, 1, 4).expand(2, 3, 4)),
    "dtype": (0, torch.zeros(2, 3, 4).half()),
    "alignment": (0, torch.zeros(25)[1:].view(2, 3, 4)),
    "asking": (0, torch.zeros(2, 3, 4, requires_grad=True)),
    "negative": (0, torch.zeros(2, 3, 4, dtype=torch.cfloat).conj().imag),
    "zeros without memory": (0, torch._efficientzerotensor(2, 3, 4)),
    "sparse": (0, torch.zeros(2, 3, 4).to_sparse()),
    "device": (0, torch.zeros(2, 3, 4, device="meta")),
    "nested": (0, torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)])),
    "type": (0, torch.nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False)),
    "of NumPy": (0, np.zeros((2, 3, 4), np.float32)),
    "something for nothing": (1, torch.zeros(1)),
    "nothing for something": (2, None),
    "value": (3, 6),
    "value's type": (3, 5.0),
    "a number for a flag": (6, 0),
    "list": (4, [1, 2]),
    "text": (5, "y"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_guard_tells_kinds_apart(what):
    """A guard checks everything that a prepared call may depend on, and accepts equal values that are other objects."""
    like, (i, other) = calls.guard_of(OF_A_KIND), OTHERS[what]
    assert like(OF_A_KIND)
    assert like([torch.ones_like(x) if isinstance(x, Tensor) else (1, 2) if x == (1, 2) else x for x in OF_A_KIND])
    assert not like([other if j == i else x for j, x in enumerate(OF_A_KIND)])
    if i == 0:  # guards of tensors only are a separate case
        like = calls.guard_of(OF_A_KIND[:1])
        assert like(OF_A_KIND[:1])
        assert not like([other])


def test_a_guard_takes_what_comes_twice():
    """A guard prepared for one tensor passed twice, as in self-neighbour searches, requires the same tensor twice."""
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)
    like = calls.guard_of([x, 1, x])
    assert like([y, 1, y])
    assert not like([x, 1, y])
    assert not calls.guard_of([x, 1, y])([x, 1, x])


def test_a_guard_sees_who_watches():
    """A guard fails under dispatch modes, transforms and traces, which all leave a mark in the thread's state."""
    like, seen = calls.guard_of(OF_A_KIND), []

    def look(x):
        seen.append(like(OF_A_KIND))
        return x * 1

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    look(torch.ones(1))
    with Mode():
        look(torch.ones(1))
    torch.func.vmap(look)(torch.ones(1))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(1))
    torch.jit.trace(look, torch.ones(1), check_trace=False)
    assert seen == [True, False, False, False, False]


@pytest.mark.parametrize("current", [0, 1])
def test_a_pass_runs_on_its_tensors_device(current, monkeypatch):
    """With several devices the tensors' device is made current during a pass, unless it is current already."""
    entered = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    for strict in (False, True):
        act = calls.placed(lambda x: x + 1, torch.device("cuda:1"), strict)
        assert act(2) == 3
    assert entered == [torch.device("cuda:1")] * (2 if current == 0 else 0)


def test_nothing_is_filled_that_kernels_will_write():
    """A pass turns off torch's filling of uninitialized memory (deterministic mode) and restores the setting afterwards."""
    filled = torch.utils.deterministic

    def run(fails):
        assert not filled.fill_uninitialized_memory
        return 1 // (not fails)

    act = calls.placed(run, torch.device("cpu"), True)
    assert filled.fill_uninitialized_memory
    assert act(False) == 1
    with pytest.raises(ZeroDivisionError):
        act(True)
    assert filled.fill_uninitialized_memory
    assert calls.placed(run, torch.device("cpu"), False) is run


def test_the_last_thread_puts_the_setting_back():
    """With overlapping passes in two threads, the one that ends last restores the setting."""
    filled, both = torch.utils.deterministic, threading.Barrier(2, timeout=60)
    seen = []

    def early():
        with calls.unfilled():
            both.wait()
            both.wait()
        seen.append(filled.fill_uninitialized_memory)
        both.wait()

    thread = threading.Thread(target=early)
    thread.start()
    both.wait()
    with calls.unfilled():
        both.wait()
        both.wait()
    thread.join()
    assert (seen, filled.fill_uninitialized_memory) == ([False], True)
