"""``sonde.operator``: schemas from annotations, implementations by name and device, derivatives, torch.compile, errors."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import types
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Optional

import numpy as np
import pytest
import torch
from torch import Tensor

import sonde
from helpers.versions import sizes_from_data
from sonde.jit.steps import Pass

number = count()


def name() -> str:
    return f"test_operator::op{next(number)}"


def plain(x: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> Tensor:
    out = (x * scale).sin()
    return out if shift is None else out + shift


def fast(x: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> Tensor:
    out = np.sin(x.numpy() * np.array(scale, x.numpy().dtype))
    return torch.from_numpy(out if shift is None else out + shift.numpy())


def slope(grad, x, scale, shift, *, needs):
    return grad * scale * (x * scale).cos() if needs.x else None, grad if needs.shift else None


@pytest.fixture(params=["reference", "backward"])
def op(request):
    """One operator that uses the reference's gradient, and one with a gradient of its own."""
    backward = slope if request.param == "backward" else None
    return sonde.operator(name(), fast, reference=plain, backward=backward, devices="cpu", deterministic=True)


@pytest.fixture
def x():
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def shift():
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# derivatives


def test_first_second_and_forward_derivatives(op, x, shift):
    leaves = x.clone().requires_grad_(), shift.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: op(x, 3.0, y), leaves)
    assert torch.autograd.gradgradcheck(lambda x, y: op(x, 3.0, y), leaves)
    _, tangent = torch.func.jvp(lambda x: op(x, 3.0), (x,), (shift,))
    torch.testing.assert_close(tangent, 3 * (3 * x).cos() * shift)


def test_transforms(op, x, shift):
    """Per-sample gradients, gradients of a mapped loss, Hessians."""
    torch.testing.assert_close(torch.vmap(lambda x, y: op(x, 3.0, y))(x, shift), plain(x, 3.0, shift))
    torch.testing.assert_close(torch.vmap(torch.func.grad(lambda x: op(x, 3.0).sum()))(x), 3 * (3 * x).cos())
    torch.testing.assert_close(torch.func.grad(lambda x: torch.vmap(lambda r: op(r, 3.0))(x).sum())(x), 3 * (3 * x).cos())
    torch.testing.assert_close(torch.func.hessian(lambda x: op(x, 3.0).sum())(x[0]), torch.diag(-9 * (3 * x[0]).sin()))


def test_only_what_is_needed_is_asked_for(x, shift):
    asked = []

    def backward(grad, x, scale, shift, *, needs):
        asked.append(tuple(needs))
        return slope(grad, x, scale, shift, needs=needs)

    op = sonde.operator(name(), fast, reference=plain, backward=backward)
    op(x.clone().requires_grad_()).sum().backward()
    op(x, shift=shift.clone().requires_grad_()).sum().backward()
    assert asked == [(True, False), (False, True)]


def test_saved_results_reach_the_backward_pass(x):
    def backward(grad, x, out):
        return grad * out

    def exp(x: Tensor) -> Tensor:
        return torch.from_numpy(np.exp(x.numpy()))

    op = sonde.operator(name(), exp, reference=torch.exp, backward=backward, saved=[0])
    assert torch.autograd.gradcheck(op, x.requires_grad_())
    assert torch.autograd.gradgradcheck(op, x)


def test_a_result_without_gradient(x):
    def sort(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x)
        return values, indices

    op = sonde.operator(name(), sort, reference=lambda x: tuple(torch.sort(x)), no_grad=[1])
    values, indices = op(x.requires_grad_())
    assert values.requires_grad
    assert not indices.requires_grad
    (gradient,) = torch.autograd.grad(values[:, 0].sum(), x)
    assert (gradient.sum(-1) == 1).all()
    assert sonde.operator(name(), sort, reference=lambda x: tuple(torch.sort(x)), no_grad=[0, 1])(x)[0].requires_grad is False


def test_integer_results_need_not_be_named(x):
    """Autograd knows that integer results have no gradient; listing them in no_grad saves the backward pass an argument."""

    def sort(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x)
        return values, indices

    op = sonde.operator(name(), sort, reference=lambda x: tuple(torch.sort(x)))
    assert torch.autograd.gradcheck(lambda x: op(x)[0], x.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x: op(x)[0].square(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: op(x)[0].square().sum())(x), 2 * x)


def test_a_reference_without_derivative_is_an_error(x):
    op = sonde.operator(name(), fast, reference=lambda x, scale, shift: plain(x, scale, shift).detach())
    with pytest.raises(RuntimeError, match="its reference is not differentiable in x"):
        op(x.requires_grad_()).sum().backward()


# schemas


class Two(NamedTuple):
    total: Tensor
    count: Tensor


def test_lists_several_results_and_every_kind_of_value(x, shift):
    def reference(xs, power, mean, mode, weights=None):
        total = torch.stack(list(xs)).pow(power).sum(0)
        total = total / len(xs) if mean else total
        sums = torch.stack([y.sum() for y in xs])
        return Two(-total if mode == "minus" else total, sums if weights is None else sums * sum(weights))

    def function(xs: list[Tensor], power: int, mean: bool, mode: str, weights: list[float] | None = None) -> Two:
        return reference(xs, power, mean, mode, weights)

    op = sonde.operator(name(), function, reference=reference)
    for xs in ([x], [x, shift], (x, shift, x)):
        for values in ((2, True, "minus"), (3, False, "plus", [0.5, 1])):
            got, want = op(xs, *values), reference(xs, *values)
            assert type(got) is Two
            torch.testing.assert_close(tuple(got), tuple(want))
    leaves = [t.clone().requires_grad_() for t in (x, shift)]
    assert torch.autograd.gradcheck(lambda *xs: op(list(xs), 2, True, "plus"), leaves)
    mapped = torch.vmap(lambda a, b: op([a, b], 2, True, "plus").total)(x, shift)
    torch.testing.assert_close(mapped, (x**2 + shift**2) / 2)
    graph = torch.compile(lambda a, b: op([a, b], 2, True, "plus").total, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(graph(x, shift), (x**2 + shift**2) / 2)


def test_gradients_of_lists(x, shift):
    def function(y: Tensor, xs: list[Tensor]) -> Tensor:
        return y * sum(xs)

    def gradients(grad, y, xs, *, needs):
        return grad * sum(xs) if needs.y else None, [grad * y] * len(xs) if needs.xs else None

    op = sonde.operator(name(), function, reference=lambda y, xs: y * sum(xs), backward=gradients)
    leaves = [t.clone().requires_grad_() for t in (x, shift, x + shift)]
    assert torch.autograd.gradcheck(lambda y, *xs: op(y, list(xs)), leaves)
    some = torch.autograd.grad(op(leaves[0], [shift, leaves[1]]).sum(), leaves[1])
    torch.testing.assert_close(some[0], x)


def test_tensors_may_come_in_any_order(x, shift):
    def function(scale: float, bias: Optional[Tensor], x: Tensor) -> Tensor:  # noqa: UP045 (the older spelling)
        return x * scale + (0 if bias is None else bias)

    op = sonde.operator(name(), function, reference=lambda scale, bias, x: x * scale + (0 if bias is None else bias))
    assert torch.equal(op(2, None, x), 2 * x)
    assert torch.equal(op(2, x=x, bias=shift), 2 * x + shift)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        op(2, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        op(2, None, x, y=1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, "x has no annotation; annotate it as Tensor, Tensor"),
        ("def f(x: Tensor): ...", "its result has no annotation"),
        ("def f(x: Tensor) -> int: ...", "it must be Tensor, tuple"),
        ("def f(x: Tensor, y: dict) -> Tensor: ...", "y is annotated as <class 'dict'>; it must be Tensor"),
        ("def f(x: Tensor, y: Nothing) -> Tensor: ...", "name 'Nothing' is not defined"),
        ("def f(n: int) -> Tensor: ...", "at least one argument annotated as a Tensor"),
        ("def f(x: Tensor, *rest: Tensor) -> Tensor: ...", "neither *rest nor keyword-only"),
        ("def f(x: Tensor, impl: str) -> Tensor: ...", "an argument cannot be called impl"),
    ],
)
def test_annotations_that_are_missing_or_unknown(function, words):
    if isinstance(function, str):
        space = dict(Tensor=Tensor)
        exec(function, space)
        function = space["f"]
    with pytest.raises(TypeError) as problem:
        sonde.operator(name(), function, reference=lambda *args: args[0])
    assert words in str(problem.value)


def test_names():
    for bad in ("blur", "a::b::c", "1a::b", "a.b::c", "a::", 3):
        with pytest.raises(ValueError, match="the name must be like 'mylib::blur'"):
            sonde.operator(bad, fast, reference=plain)
    for taken in ("sonde::mine", "aten::mine"):
        with pytest.raises(ValueError, match="is taken; use one of your own"):
            sonde.operator(taken, fast, reference=plain)


def test_registered_twice():
    title = name()
    sonde.operator(title, fast, reference=plain)
    with pytest.raises(ValueError, match=f"'{title}' is registered already, at .*test_operator.py:"):
        sonde.operator(title, fast, reference=plain)
    with pytest.raises(ValueError, match=f"is registered already, .* as part of '{title}'"):
        sonde.operator(f"{title}_backward", fast, reference=plain)
    torch.library.define("test_operator::theirs", "(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match="another library has the name"):
        sonde.operator("test_operator::theirs", fast, reference=plain)


def test_a_reference_with_other_arguments():
    with pytest.raises(TypeError, match=r"the reference must take \(x, scale, shift\); it takes \(x\)"):
        sonde.operator(name(), fast, reference=lambda x: x)


def test_what_is_wrong_with_arguments(op, x):
    with pytest.raises(TypeError, match="x must be a Tensor; got list"):
        op([1.0])
    with pytest.raises(TypeError, match=r"scale must be a number; got Tensor. Use scale.item\(\)"):
        op(x, torch.tensor(2.0))
    with pytest.raises(TypeError, match="scale must be a number; got str '2'"):
        op(x, "2")
    with pytest.raises(TypeError, match="shift must be a Tensor or None; got float"):
        op(x, 2.0, 1.0)
    with pytest.raises(TypeError, match="x must be a dense tensor"):
        op(x.to_sparse())


def test_equal_values_are_not_the_same_call(x):
    """0.0 == -0.0, and True == 1 in a list; a call must not take the values of an earlier one for its own."""

    def signs(x: Tensor, one: float, many: list[float]) -> Tensor:
        return x + torch.tensor([math.copysign(1, s) for s in (one, *many)], dtype=x.dtype)

    def total(x: Tensor, counts: list[int]) -> Tensor:
        return x * sum(counts)

    op = sonde.operator(name(), signs, reference=signs, devices="cpu")
    for given in (x[0, :3], x[0, :3].clone().requires_grad_()):
        for one, many in ((0.0, [0.0, 0.0]), (-0.0, [0.0, 0.0]), (0.0, [0.0, -0.0]), (0.0, [0.0, 0.0])):
            assert torch.equal(op(given, one, many), signs(given, one, many))

    op = sonde.operator(name(), total, reference=total, devices="cpu")
    op(x, [1, 2])
    with pytest.raises(TypeError, match="counts must be a list of integers; got tuple with bool True"):
        op(x, [True, 2])


# implementations


def test_an_empty_body_is_no_implementation(x):
    @sonde.operator(name(), reference=plain)
    def documented(x: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> Tensor:
        """What it is."""

    @sonde.operator(name(), reference=plain)
    def empty(x: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> Tensor: ...

    for op in (documented, empty):
        assert op.implementations == ("reference",)
        assert torch.equal(op(x), plain(x))
    assert documented.__doc__ == "What it is."
    with pytest.raises(ValueError, match="are about the function, whose body is empty"):
        sonde.operator(name(), empty.__wrapped__, reference=plain, deterministic=True)


@pytest.mark.usefixtures("numba_target")
def test_auto_takes_the_first_for_the_device(x):
    called = []

    def note(which):
        def run(x, scale, shift):
            called.append(which)
            return plain(x, scale, shift)

        return run

    op = sonde.operator(name(), fast, reference=plain)
    op.register("mine", note("mine"), devices="cuda")
    op.register("absent", note("absent"))
    op.register("numba", note("numba"))
    assert op.implementations == ("mine", "absent", "numba", "kernel", "reference")
    op(x)
    op(x, impl="numba")
    op(x, impl="kernel")
    assert called == ["absent", "numba"]
    with pytest.raises(ValueError, match="impl='mine' needs cuda tensors, got cpu; move them or use impl='auto'"):
        op(x, impl="mine")
    with pytest.raises(ValueError, match="must be one of 'auto', 'mine', 'absent', 'numba', 'kernel', 'reference'"):
        op(x, impl="other")
    assert op(x.to("meta")).is_meta


def test_a_missing_package_is_passed_over(x):
    op = sonde.operator(name(), fast, reference=plain)
    op.register("cuml", "nowhere:function", devices="cpu")
    assert torch.equal(op(x), fast(x))
    with pytest.raises(ValueError, match="impl='cuml' needs cuml, which is not installed"):
        op(x, impl="cuml")


def test_implementations_are_imported_by_the_first_call(x, monkeypatch):
    module = types.ModuleType("late_kernels")
    module.run, module.slope = fast, slope
    op = sonde.operator(name(), fast, reference=plain)
    op.register("late", "late_kernels:run")
    op.register_backward("late", "late_kernels:slope")
    op.register("wrong", "late_kernels:nothing")
    with pytest.raises(ModuleNotFoundError, match="late_kernels"):
        op(x)
    monkeypatch.setitem(sys.modules, "late_kernels", module)
    assert torch.equal(op(x), fast(x))
    assert torch.autograd.gradcheck(op, x.requires_grad_())
    with pytest.raises(TypeError, match="'late_kernels:nothing' is no function of that module"):
        op(x, impl="wrong")


def test_a_module_of_passes_as_our_own(x, monkeypatch):
    """A user's module with ``forward_pass`` and ``backward_pass`` works like our own, and its plans are complete."""

    def forward_pass(x: Tensor, y: Tensor) -> Pass:
        p = Pass(x.device, x.dtype, dict(x=x, y=y))
        out = p.buffer("out", x.shape, x.dtype)
        p.call("torch.mul", lambda x, y, out: torch.mul(x, y, out=out), ["x", "y", out], writes=["out"])
        return p.returns(out).returning_one()

    def backward_pass(grad, x, y, *, needs: Sequence[bool], deterministic: bool) -> Pass:
        p = Pass(x.device, x.dtype, dict(grad=grad, x=x, y=y))
        names = []
        for need, title, other in zip(needs, ("d_x", "d_y"), ("y", "x")):
            if need:
                slot = p.buffer(title, x.shape, x.dtype)
                p.call("torch.mul", lambda g, o, out: torch.mul(g, o, out=out), ["grad", other, slot], writes=[title])
                names.append(slot)
        return p.returns(*names)

    module = types.ModuleType("pass_kernels")
    module.forward_pass, module.backward_pass = forward_pass, backward_pass
    monkeypatch.setitem(sys.modules, "pass_kernels", module)

    @sonde.operator(name(), reference=lambda x, y: x * y)
    def product(x: Tensor, y: Tensor) -> Tensor: ...

    product.register("mine", "pass_kernels", deterministic=True)
    x, y = x.requires_grad_(), (x.detach() + 1).requires_grad_()
    assert torch.autograd.gradcheck(product, (x, y))
    plan = sonde.explain(product, x, y)
    assert [k.writes for k in plan.kernels] == [("out",), ("d_x",), ("d_y",)]


def test_what_is_registered_later_is_used(op, x):
    assert torch.equal(op(x), fast(x))
    op.register("other", lambda x, scale, shift: plain(x, scale, shift) + 1, deterministic=True)
    assert torch.equal(op(x), plain(x) + 1)
    for impl in ("other", "auto", "reference"):
        with pytest.raises(ValueError, match="choose another name"):
            op.register(impl, fast)
    with pytest.raises(ValueError, match="there is no implementation 'nobody'"):
        op.register_backward("nobody", slope)
    op.register_backward("other", slope)
    with pytest.raises(ValueError, match="the gradient of impl='other' is registered already"):
        op.register_backward("other", slope)
    with pytest.raises(TypeError, match=r"the implementation 'short' must take \(x, scale, shift\)"):
        op.register("short", lambda x: x)


def test_what_functions_must_return(x):
    cases = {
        "array": (lambda x, scale, shift: np.sin(x.numpy()), "must return a Tensor; got ndarray. Use torch.from_numpy"),
        "nothing": (lambda x, scale, shift: None, "must return a Tensor; got NoneType"),
    }
    op = sonde.operator(name(), fast, reference=plain)
    for impl, (function, words) in cases.items():
        op.register(impl, function)
        with pytest.raises(TypeError, match=words):
            op(x, impl=impl)
    op.register("one", plain)
    op.register_backward("one", lambda grad, x, scale, shift: grad)
    with pytest.raises(TypeError, match="must return a gradient, or None, for each of x, shift; got Tensor"):
        op(x.requires_grad_(), impl="one").sum().backward()
    op.register("none", plain)
    op.register_backward("none", lambda grad, x, scale, shift: (None, None))
    with pytest.raises(TypeError, match="returned NoneType for x, whose gradient is needed"):
        op(x, impl="none").sum().backward()


def test_deterministic_mode(x):
    told = []

    def function(x, scale, shift, *, deterministic):
        told.append(deterministic)
        return plain(x, scale, shift)

    op = sonde.operator(name(), fast, reference=plain)
    op.register("promises", function, deterministic=True)
    op.register("fast", plain)
    assert sonde.explain(op, x).determinism is sonde.Determinism.RUN_TO_RUN
    assert sonde.explain(op, x, impl="fast").determinism is sonde.Determinism.NONE
    op(x)
    torch.use_deterministic_algorithms(True)
    op(x)
    assert told == [False, True]
    with pytest.raises(RuntimeError, match="impl='fast' does not promise the same bits in every run"):
        op(x, impl="fast")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="does not promise"):
        op(x, impl="fast")
    torch.use_deterministic_algorithms(True)
    assert sonde.explain(sonde.operator(name(), fast, reference=plain), x).impl == "reference"


def test_under_autocast_it_means_the_same():
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    op = sonde.operator(name(), product, reference=lambda x, y: x @ y)
    x = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for impl in ("kernel", "reference"):
            out = op(x, x, impl=impl)
            assert out.dtype is torch.float32
        graph = torch.compile(lambda x: op(x, x), backend="aot_eager", fullgraph=True)
        assert graph(x).dtype is torch.float32
    out.sum().backward()
    assert x.grad.dtype is torch.float32


# torch.compile and other tools of torch


def test_one_graph_with_gradients(op, x, shift):
    eager, traced = ([t.clone().requires_grad_() for t in (x, shift)] for _ in range(2))
    graph = torch.compile(lambda x, y: op(x, 3.0, y).square(), backend="aot_eager", fullgraph=True)
    graph(*traced).sum().backward()
    op(eager[0], 3.0, eager[1]).square().sum().backward()
    for a, b in zip(traced, eager):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_first_call_may_be_in_a_graph(x, monkeypatch):
    """No implementation is looked up while torch.compile traces, since that would break the graph."""
    from sonde.op import functions

    op = sonde.operator(name(), fast, reference=plain)
    for impl in ("scipy", "numba", "triton", "cupy"):
        op.register(impl, fast)

    def find(*args):
        raise AssertionError("looked up")

    monkeypatch.setattr(functions, "find_spec", find)
    graph = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(graph(x), plain(x))


def test_other_sizes_need_no_other_graph(op):
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    graph = torch.compile(op, backend=backend, fullgraph=True, dynamic=True)
    for n in (3, 5, 8):
        y = torch.randn(n, n + 1)
        torch.testing.assert_close(graph(y), plain(y))
    assert count == 1


def test_export_holds_the_operator(op, x):
    class Model(torch.nn.Module):
        def forward(self, x):
            return op(x, 3.0)

    program = torch.export.export(Model(), (x,))
    assert any(str(node.target).startswith(op.name.replace("::", ".")) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), plain(x, 3.0))


def test_opcheck(op, x, shift):
    library = op._library
    torch.library.opcheck(library.forward, (x.requires_grad_(), shift, 2.0, "kernel", True))


def test_explain_launches_nothing(op, x):
    plan = sonde.explain(op, x.requires_grad_())
    assert plan.impl == "kernel"
    assert [k.phase for k in plan.kernels] == ["forward", "backward"]
    assert plan.kernels[0].determinism is sonde.Determinism.RUN_TO_RUN
    assert "not known" in str(plan)
    assert len(sonde.explain(lambda x: op(op(x.detach())), x).kernels) == 2


def test_fake_serves_where_sizes_depend_on_values(x):
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    def fake(x):
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    op = sonde.operator(name(), positive, reference=positive, fake=fake)
    graph = torch.compile(lambda x: op(x) * 2, backend="aot_eager", fullgraph=True)
    with sizes_from_data():
        torch.testing.assert_close(graph(x), x[x > 0] * 2)


def test_it_is_a_function_of_its_module(op):
    assert op.__name__ == "fast"
    assert repr(op).startswith(f"<operator {op.name}(x: ")
    assert module_level.__module__ == __name__
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.deepcopy(module_level) is module_level
    with pytest.raises(NotImplementedError, match=r"torch.jit.script cannot compile it"):
        torch.jit.script(op)


@sonde.operator("test_operator::module_level", reference=plain)
def module_level(x: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> Tensor: ...


def test_many_sizes_and_dtypes_share_one_registration(op):
    for n in range(5):
        for dtype in (torch.float32, torch.float64):
            y = torch.randn(n, 3, dtype=dtype)
            torch.testing.assert_close(op(y), plain(y))
            torch.testing.assert_close(op(y.T), plain(y.T))
