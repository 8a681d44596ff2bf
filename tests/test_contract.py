"""What every operator must satisfy in every implementation. A new operator is included by its entry in ``sonde.operators``."""

# ruff: noqa: E731 (short functions read better on one line)

import inspect
import itertools
import os
import shutil
import threading
import tracemalloc
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import sonde
from helpers.exactness import assert_agrees, same_bits
from helpers.memory import LAYOUTS, allocations, poisoned, redzone, restride
from helpers.operators import (
    DTYPES,
    HAS_GPU,
    Target,
    backward_arguments,
    cases,
    cotangents,
    deterministic,
    distinct_sizes,
    floats,
    leaves,
    replaced,
    tensors,
    tuple_of,
    value_and_grads,
)
from helpers.spies import in_child, spy
from helpers.versions import EXPORTS_TRAINING, sizes_from_data
from sonde.jit import Unsupported
from sonde.op.cache import forget_calls
from sonde.op.plan import Determinism
from sonde.operators import OPERATORS, Operator

try:
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:  # not installed on the GPU machine
    given = None
needs_hypothesis = pytest.mark.skipif(given is None, reason="needs hypothesis")

HAS_COMPILER = bool(shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"))
BACKEND = "inductor" if HAS_GPU or HAS_COMPILER else "aot_eager"
TINY = dict(B=2, C=3, H=4, W=5, Q=3, D=2, heads=2, octaves=1, layout="uniform")  # no sample lies on an edge between pixels
MIXED = [  # features, everything else
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16),
]


def short(x) -> str:
    return str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else str(x)


def tiny(operator: Operator, target: Target | str = "cpu", dtype: torch.dtype = torch.float64, **options) -> tuple:
    """Arguments small enough for many interpreted calls."""
    device = target.device if isinstance(target, Target) else target
    return operator.make(**{**TINY, **options}, dtype=dtype, device=device)


# ---- values and gradients -------------------------------------------------------------------------------------------------


@pytest.mark.asks("values")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("operator", "case"), cases())
def test_values_and_gradients(operator, case, dtype, target):
    """Every small case agrees with the reference; out-of-bounds reads and writes and unwritten results are detected."""
    if target.interpreted and dtype not in (torch.float32, torch.bfloat16) and case not in ("odd_sizes", "hostile"):
        pytest.skip("the interpreter is slow; float32 and bfloat16 stand for the rest here")
    brief = target.interpreted and operator.in_full is not None and case not in operator.in_full
    if brief and dtype != torch.float32:
        pytest.skip("the interpreter is slow; float32 stands for the rest here")
    args = [redzone(a) for a in operator.make(case, dtype=dtype, device=target.device)]
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    some = [False, True] if dtype == torch.float32 or not target.interpreted else [case == "odd_sizes"]
    for mode in some[:1] if brief else some:
        with deterministic(mode), poisoned():
            assert_agrees(operator, target, args, "deterministic" if mode else "default", slack=case in operator.vanishing)
    assert same_bits([args[i] for i in tensors(args)], [before[i] for i in tensors(args)]), "an input was changed"


@pytest.mark.parametrize(("features", "others"), MIXED, ids=short)
def test_mixed_dtypes(operator, target, features, others):
    """bf16 features with fp32 coordinates, the normal case under autocast, are neither rounded twice nor promoted."""
    args = tiny(operator, target, features)
    first = floats(args)[0]
    args = [redzone(a.to(others)) if i in floats(args) and i != first else redzone(a) for i, a in enumerate(args)]
    with poisoned():
        outs, grads = assert_agrees(operator, target, args, slack=torch.bfloat16 in (features, others))
    assert [g.dtype for g in grads] == [args[i].dtype for i in floats(args)]
    assert [o.dtype for o in outs] == [o.dtype for o in tuple_of(operator.reference(*args))]


def test_single_wide_operand_widens_the_sum(operator, target):
    """One float64 operand, whichever it is, makes the accumulation float64."""
    args = tiny(operator, target, torch.float32)
    for wide in floats(args):
        assert_agrees(operator, target, replaced(args, [wide], [args[wide].double()]), operator.arguments[wide])


def test_autocast_changes_nothing(operator, target):
    """Autocast lowers the precision of neither coordinates nor results."""
    args = tiny(operator, target, torch.float32)
    outs, grads = value_and_grads(operator.call(target), args)
    with deterministic(), torch.autocast(target.device, torch.bfloat16):
        cast_outs, cast_grads = value_and_grads(operator.call(target), args)
    assert same_bits(outs, cast_outs)
    assert [g.dtype for g in cast_grads] == [g.dtype for g in grads]
    for a, b in zip(cast_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.asks("passes")
def test_modes_without_gradients(operator, target):
    """no_grad, inference mode and inputs without requires_grad give the same bits and no graph."""
    args = tiny(operator, target, torch.float32)
    want = tuple_of(operator.call(target)(*leaves(args)))
    assert all(o.requires_grad for o in want)
    plain = tuple_of(operator.call(target)(*args))
    with torch.no_grad():
        quiet = tuple_of(operator.call(target)(*leaves(args)))
    with torch.inference_mode():
        inference = tuple_of(operator.call(target)(*[a.clone() if isinstance(a, Tensor) else a for a in args]))
    for outs in (plain, quiet, inference):
        assert not any(o.requires_grad for o in outs)
        assert same_bits([o.detach() for o in want], outs)


@pytest.mark.asks("operator")
@pytest.mark.parametrize("impl", [Target("reference"), Target("triton"), Target("numba")])
def test_gradcheck(operator, impl):
    """First and second derivatives agree with finite differences: those of the kernels and those derived from them."""
    target = Target(impl)
    if impl != "reference":
        pytest.importorskip(impl)
    args = leaves(tiny(operator, target, **(dict(B=1, heads=1) if target.interpreted else {})))
    fn = operator.call(impl)
    with deterministic():  # atomics would add noise to finite differences
        assert torch.autograd.gradcheck(fn, args, fast_mode=target.interpreted)
        assert torch.autograd.gradgradcheck(fn, args, fast_mode=True)


@pytest.mark.asks("passes")
def test_only_the_needed_gradients(operator, target, monkeypatch):
    """Only the gradients that are needed are computed."""
    args = tiny(operator, target)
    wanted = floats(args)
    _, want = value_and_grads(operator.reference, args)
    calls = spy(monkeypatch, operator, target.impl)
    operator.call(target)(*args)
    assert [phase for phase, _ in calls] == ["forward"]
    subsets = [c for n in range(1, len(wanted) + 1) for c in itertools.combinations(range(len(wanted)), n)]
    for chosen in [*subsets[: len(wanted)], *subsets[-2:-1]] if target.interpreted else subsets:
        calls.clear()
        given = [a.detach().requires_grad_(i in [wanted[k] for k in chosen]) if i in wanted else a for i, a in enumerate(args)]
        out = tuple_of(operator.call(target)(*given))
        found = torch.autograd.grad(out, [given[wanted[k]] for k in chosen], cotangents(out))
        assert [phase for phase, _ in calls] == ["forward", "backward"]
        needs = list(calls[-1][1]["needs"])
        assert needs == [k in chosen for k in range(len(needs))]
        for k, g in zip(chosen, found):
            torch.testing.assert_close(g, want[k], rtol=1e-9, atol=1e-11)
        plan = sonde.explain(operator.call(target), *given)
        assert len(plan.kernels) > 1
        for k in set(range(len(wanted))) - set(chosen):
            name = operator.arguments[wanted[k]]
            assert not any(name in written for kernel in plan.kernels for written in kernel.writes if kernel.phase == "backward"), (
                name
            )


@pytest.mark.not_for("sizes_from_data", "what it saves are its lists, of any length")
@pytest.mark.asks("torch")
def test_saves_nothing_but_its_inputs(operator, target):
    """The graph saves inputs and results only: no converted copy of the images is kept for the backward pass."""
    args = leaves(tiny(operator, target, torch.float32))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = tuple_of(operator.call(target)(*args))
    allowed = {t.untyped_storage().data_ptr() for t in [*out, *args] if isinstance(t, Tensor)}
    extra = {t.untyped_storage().data_ptr(): t for t in kept if t.untyped_storage().data_ptr() not in allowed}
    results = [a.name for a in operator.op.backward_op._schema.arguments if a.name.startswith("result")]
    assert kept
    assert len(extra) <= len(results) + operator.lists  # results that the operator declares as saved, and its lists of neighbours
    assert all(t.shape[:2] == out[0].shape[:2] for t in extra.values())


@pytest.mark.not_for("linear", "the derivative of its gradient is zero")
@pytest.mark.asks("torch")
def test_derivative_of_a_graph_comes_from_kernels(operator, target, monkeypatch):
    """create_graph=True uses the kernels; the reference runs only if the gradient is differentiated again."""
    args = leaves(tiny(operator, target))
    calls = spy(monkeypatch, operator, target.impl)
    out = tuple_of(operator.call(target)(*args))
    grads = torch.autograd.grad(out, [args[i] for i in floats(args)], cotangents(out), create_graph=True)
    assert [phase for phase, _ in calls] == ["forward", "backward"]
    second = torch.autograd.grad(sum((g**2).sum() for g in grads), [args[i] for i in floats(args)])
    twin = leaves(args)
    out = tuple_of(operator.reference(*twin))
    grads = torch.autograd.grad(out, [twin[i] for i in floats(args)], cotangents(out), create_graph=True)
    for a, b in zip(second, torch.autograd.grad(sum((g**2).sum() for g in grads), [twin[i] for i in floats(args)])):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# ---- what is not finite ---------------------------------------------------------------------------------------------------


def values(operator: Operator, args) -> list[int]:
    return [i for i in floats(args) if operator.arguments[i] not in (*operator.places, *operator.exponents)]


@pytest.mark.asks("passes")
@pytest.mark.parametrize("layout", ["uniform", "hostile"])
def test_values_that_are_not_finite(operator, target, layout):
    """Entries that are not finite are the same ones as in the reference, and the finite ones keep its values."""
    narrow = dict(sigma=0.005) if operator.lists and layout == "uniform" else {}  # so small that some neighbours have weight zero
    args = tiny(operator, target, torch.float32, B=1, Q=5, D=4, layout=layout, **narrow)
    grads = cotangents(tuple_of(operator.reference(*args)))
    names, some = ["value", *(f"gradient of {operator.arguments[i]}" for i in floats(args))], 0
    for place in [*values(operator, args), None]:
        for bad, first in ((torch.inf, 0.3), (-torch.inf, 0.55), (torch.nan, 0.9)):
            given, incoming = [a.clone() if isinstance(a, Tensor) else a for a in args], [g.clone() for g in grads]
            planted = (incoming[0] if place is None else given[place]).view(-1)
            planted[int(first * len(planted))] = bad
            with deterministic(first < 0.5):
                (want, want_grads), (got, got_grads) = (
                    value_and_grads(f, given, incoming) for f in (operator.reference, operator.call(target))
                )
            for name, a, b in zip(names, [*got, *got_grads], [*want, *want_grads], strict=True):
                what = f"{bad} in {'the gradient' if place is None else operator.arguments[place]}: {name}"
                assert torch.equal(a.isfinite(), b.isfinite()), f"{what}: not finite in other places than the reference"
                finite = b.isfinite()
                torch.testing.assert_close(a[finite], b[finite], rtol=1e-4, atol=1e-4, msg=lambda m, w=what: f"{w}: {m}")
                some += int(not finite.all())
    assert some


@pytest.mark.asks("passes")
@pytest.mark.not_for("sees_nowhere", "nothing of it can be absent")
@pytest.mark.parametrize("why", ["outside", "not finite", "nothing to see"])
def test_what_is_absent_is_never_read(operator, impl, why):
    """Samples outside and absent neighbours give zeros everywhere, even if values, weights and gradients are infinite."""
    empty = {"N" if operator.lists else "H": 0} if why == "nothing to see" else {}
    args = list(tiny(operator, impl, torch.float32, B=1, **empty))
    for i in values(operator, args):
        args[i] = torch.full_like(args[i], torch.inf)
    if why != "nothing to see":
        i = operator.arguments.index(operator.places[-1])
        far = 50.0 if operator.lists else 1.7
        args[i] = torch.full_like(args[i], torch.nan if why == "not finite" or operator.sees_everything else far)
    incoming = [torch.full_like(o, torch.inf) for o in tuple_of(operator.reference(*args))]
    outs, grads = value_and_grads(operator.call(impl), args, incoming)
    for name, x in zip(["value", *(operator.arguments[i] for i in floats(args))], [*outs, *grads], strict=True):
        assert torch.equal(x, torch.zeros_like(x)), name


# ---- layouts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_layouts(operator, target, layout, dtype):
    """Inputs of any strides, one at a time or all at once, give what contiguous copies give, without a read out of bounds."""
    args = tiny(operator, target, dtype) if target.interpreted else operator.make("odd_sizes", dtype=dtype, device=target.device)
    for which in [floats(args)] if target.interpreted else [*([i] for i in floats(args)), floats(args)]:
        moved = replaced(args, which, [redzone(restride(args[i], layout)) for i in which])
        plain = replaced(args, which, [moved[i].contiguous() for i in which])
        with poisoned():
            assert_agrees(operator, target, plain, f"{layout} {[operator.arguments[i] for i in which]}", given=moved)


def test_layout_of_the_cotangent(operator, target):
    """Gradients of any strides are accepted: ``sum().backward()`` sends one with zero strides, a transpose a strided one."""
    args = tiny(operator, target)
    outs = tuple_of(operator.reference(*args))
    ones = [torch.ones((), dtype=o.dtype, device=o.device).expand(o.shape) for o in outs]
    flipped = [restride(g, "reversed") for g in cotangents(outs)]
    sliced = [redzone(restride(g, "sliced")) for g in cotangents(outs)]
    for grads in (ones, flipped, sliced):
        _, want = value_and_grads(operator.reference, args, [g.contiguous() for g in grads])
        _, got = value_and_grads(operator.call(target), args, grads)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_what_was_saved_may_come_back_otherwise(operator, target):
    """Hooks such as ``save_on_cpu`` keep values but not strides; a backward pass prepared for other strides is not used then."""
    args = tiny(operator, target)
    moved = [restride(a, "reversed") if i in floats(args) else a for i, a in enumerate(args)]
    for given in (moved, args):
        _, want = value_and_grads(operator.call(target), given)
        for unpack in (lambda t: t.contiguous(), lambda t: restride(t, "reversed") if t.is_floating_point() else t):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
                _, got = value_and_grads(operator.call(target), given)
            for a, b in zip(got, want):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_memory_may_be_replaced_before_the_backward_pass(operator, target):
    """``x.data = …`` changes the strides of a saved leaf without a change of its version counter; gradients are still right."""
    args = tiny(operator, target)
    _, want = value_and_grads(operator.call(target), args)
    given = leaves(args)
    out = [o for o in tuple_of(operator.call(target)(*given)) if o.requires_grad]
    for i in floats(args):
        given[i].data = restride(given[i].data, "reversed")
    for a, b in zip(torch.autograd.grad(out, [given[i] for i in floats(args)], cotangents(out)), want):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_negated_views(operator, target):
    """``z.conj().imag`` stores values with the opposite sign, marked by torch's negative bit; kernels must get the true values."""
    args = tiny(operator, target)
    want = value_and_grads(operator.call(target), args)
    given = leaves(args)
    negated = [torch._neg_view(-a) if i in floats(args) else a for i, a in enumerate(given)]
    assert all(negated[i].is_neg() for i in floats(args))
    with torch.no_grad():
        assert same_bits(tuple_of(operator.call(target)(*negated)), want[0])
    out = [o for o in tuple_of(operator.call(target)(*negated)) if o.requires_grad]
    got = torch.autograd.grad(out, [given[i] for i in floats(args)], cotangents(out))
    for a, b in zip(got, want[1]):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_layout_of_results(operator, target):
    """Gradients of channels-last images are channels-last, all other results are contiguous, as the fake function says."""
    args = tiny(operator, target, torch.float32)
    for layout in LAYOUTS:
        moved = [restride(a, layout) if i in floats(args) else a for i, a in enumerate(args)]
        outs, grads = value_and_grads(operator.call(target), moved)
        kept = torch.channels_last if operator.keeps_layout and layout == "channels_last" else torch.contiguous_format
        assert all(o.is_contiguous(memory_format=kept) for o in outs)
        for i, grad in zip(floats(args), grads):
            name = operator.arguments[i]
            if i == 0 and layout == "channels_last" and operator.has_images:
                assert grad.is_contiguous(memory_format=torch.channels_last), f"{layout} {name}"
            else:
                assert grad.is_contiguous(), f"{layout} {name}"


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_channels_last_images_are_never_copied(operator, target, phase, monkeypatch):
    """The launchers allocate nothing as large as the images, which are by far the largest argument."""
    if not operator.has_images:
        pytest.skip("rows of channels are what they are")
    args = list(operator.make(B=1, C=8, H=256, W=256, Q=2, D=2, heads=1, octaves=1, device=target.device))
    args[0] = args[0].contiguous(memory_format=torch.channels_last)
    given = [a.detach().requires_grad_(i > 0) if i in floats(args) else a for i, a in enumerate(args)]
    operator.call(target)(*given)  # compile first
    found = allocations(monkeypatch, operator, target.impl)
    if target.impl == "numba":  # memory of NumPy is traced, that of torch is not
        tracemalloc.start()
    try:
        if phase == "forward":
            operator.call(target)(*args)
        else:
            tuple_of(operator.call(target)(*given))[0].sum().backward()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sizes = [size for mode in found for size in mode.sizes]
    assert sizes
    assert max(size for _, size in sizes) < args[0].nbytes // 2, sizes
    assert peak < args[0].nbytes // 2


def test_forced_64_bit_offsets(operator, triton_target, monkeypatch):
    """With 64-bit offsets every kernel gives the same bits as with 32-bit offsets."""
    modules = [m for m in (operator.shared(".gpu"), operator.kernels("triton")) if hasattr(m, "FORCE_INT64")]
    for case, dtype in (("odd_sizes", torch.float32), ("hostile", torch.bfloat16)):
        args = operator.make(case, dtype=dtype, device=triton_target.device)
        with deterministic():
            narrow = value_and_grads(operator.call("triton"), args)
            with monkeypatch.context() as patch:
                for module in modules:
                    patch.setattr(module, "FORCE_INT64", True)
                forget_calls()
                wide = value_and_grads(operator.call("triton"), args)
        assert same_bits([*narrow[0], *narrow[1]], [*wide[0], *wide[1]]), (case, dtype)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_storage_beyond_32_bits(operator, target, layout):
    """A batch whose rows lie more than 2³¹ elements apart is read and differentiated correctly (memory is only reserved)."""
    args = list(tiny(operator, target, torch.float16))
    rows = restride(args[0], layout)
    far = 2**31 + 64

    def compare():
        if target.interpreted or operator.by_torch:
            torch.set_num_threads(1)  # a forked child lacks its parent's threads, and torch.sort would wait for them
        huge = torch.empty(rows.shape[0] * far, dtype=rows.dtype, device=rows.device)
        images = huge.as_strided(rows.shape, (far, *rows.stride()[1:]))
        images.copy_(rows)
        got = value_and_grads(operator.call(target), [images, *args[1:]])
        return [t.cpu() for t in [*got[0], *got[1]]]

    with deterministic():
        torch.utils.deterministic.fill_uninitialized_memory, before = False, torch.utils.deterministic.fill_uninitialized_memory
        try:
            got = compare() if HAS_GPU else in_child(compare)  # an invalid pointer must not crash this process
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = before
        want = value_and_grads(operator.call(target), [rows, *args[1:]])
    for a, b in zip(got, [*want[0], *want[1]]):
        torch.testing.assert_close(a, b.cpu())


# ---- registration: opcheck, compile, export -------------------------------------------------------------------------------


@pytest.mark.not_for("sizes_from_data", "opcheck adds all results up in the dtype of the first, here that of offsets")
@pytest.mark.asks("torch")
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "requires_grad"])
def test_registration(operator, target, grad):
    """Schema, fake function, autograd and dynamic tracing of both registered operators agree."""
    args = [a.clone() if isinstance(a, Tensor) else a for a in tiny(operator, target, torch.float32)]
    given = leaves(args) if grad else args
    torch.library.opcheck(operator.op.forward_op, (*operator.registered(*given), target.impl, True))
    needed = [[True] * len(floats(args)), [i == 0 for i in range(len(floats(args)))]]
    for needs in needed[:1] if target.interpreted and grad else needed[-1:] if target.interpreted else needed:
        torch.library.opcheck(operator.op.backward_op, backward_arguments(operator, given, target.impl, needs, grad))


@pytest.mark.not_for("sizes_from_data", "opcheck adds all results up in the dtype of the first, here that of offsets")
@pytest.mark.asks("torch")
def test_registration_with_channels_last(operator, target):
    """Fake and real strides agree for channels-last inputs too."""
    args = [restride(a, "channels_last") if isinstance(a, Tensor) else a for a in tiny(operator, target, torch.float32)]
    torch.library.opcheck(operator.op.forward_op, (*operator.registered(*leaves(args)), target.impl, True))
    torch.library.opcheck(operator.op.backward_op, backward_arguments(operator, args, target.impl))


def compare_compiled(compiled, fn, args):
    got, want = value_and_grads(compiled, args), value_and_grads(fn, args)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.asks("operator")
def test_compiles_once_for_all_sizes(operator, target):
    """One graph serves forward and backward, and new sizes do not compile another."""
    torch._dynamo.reset()
    impl = target.impl
    fn = lambda *a: operator.function(*a, impl=impl) * 2
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend=BACKEND)
    with sizes_from_data():
        compare_compiled(compiled, fn, operator.make(**distinct_sizes(operator), device=target.device))
    with sizes_from_data(), torch._dynamo.config.patch(error_on_recompile=True):
        compare_compiled(compiled, fn, operator.make(**distinct_sizes(operator, 1), device=target.device))
    torch._dynamo.reset()


@pytest.mark.asks("torch")
def test_compiles_every_path(operator, target):
    """Static shapes, no gradients, deterministic mode, `auto` and channels-last inputs compile without a graph break."""
    torch._dynamo.reset()
    args = tiny(operator, target, torch.float32)
    for impl, mode, layout in (
        ("auto", False, "contiguous"),
        (target.impl, True, "channels_last"),
        ("reference", False, "contiguous"),
    ):
        fn = lambda *a, impl=impl: operator.function(*a, impl=impl).sin()
        moved = [restride(a, layout) if isinstance(a, Tensor) else a for a in args]
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        with deterministic(mode):
            torch.testing.assert_close(compiled(*moved), fn(*moved))
            compare_compiled(compiled, fn, moved)
    torch._dynamo.reset()


@pytest.mark.asks("torch")
def test_determinism_flag_is_in_the_graph(operator, target):
    """A graph traced in one mode is not used in the other."""
    torch._dynamo.reset()
    flags = []

    def backend(graph, _):
        flags.extend(node.args[-1] for node in graph.graph.nodes if node.target is operator.op.forward_op)
        return graph.forward

    args = tiny(operator, target, torch.float32)
    compiled = torch.compile(operator.call(target), fullgraph=True, backend=backend)
    compiled(*args)
    with deterministic():
        compiled(*args)
    assert flags == [False, True]
    torch._dynamo.reset()


@EXPORTS_TRAINING
@pytest.mark.asks("torch")
def test_exports_runs_and_trains(operator, target):
    """An exported program contains the operator, runs at other sizes, and has the operator's gradients."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.tensor(1.5, device=target.device))

        def forward(self, first, *rest):
            return operator.function(first * self.gain, *rest, impl=target.impl)

    model = Model()
    args = operator.make(**distinct_sizes(operator, keep=operator.integers), device=target.device)
    every = lambda a: {d: torch.export.Dim.AUTO for d in range(a.ndim)} if isinstance(a, Tensor) else None
    auto = torch.utils._pytree.tree_map(every, list(args))
    program = torch.export.export(model, tuple(args), dynamic_shapes=(auto[0], *([tuple(auto[1:])] if auto[1:] else [])))
    assert any(node.target is operator.op.forward_op for node in program.graph.nodes)
    exported = program.module()
    other = operator.make(**distinct_sizes(operator, 1, keep=operator.integers), device=target.device)
    torch.testing.assert_close(exported(*other), model(*other))
    compare_compiled(exported, model, other)
    for module in (exported, model):
        module(*args).square().sum().backward()
    (trained,), (expected,) = exported.parameters(), model.parameters()
    assert expected.grad.abs() > 0
    torch.testing.assert_close(trained.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.not_for("alone", "any shape is right")
@pytest.mark.not_for("sizes_from_data", "without values there are no sizes")
def test_traced_calls_check_shapes_too(operator):
    """An operator called from a graph rejects bad shapes during tracing, not at run time."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        args = [torch.empty(a.shape) if isinstance(a, Tensor) else a for a in tiny(operator)]
        shape = operator.reference(*args).shape
        args = operator.registered(*args)
        assert tuple_of(operator.op.forward_op(*args, "triton", False))[0].shape == shape
        for i in tensors(args):
            with pytest.raises((ValueError, TypeError), match=operator.name):
                operator.op.forward_op(*replaced(args, [i], [torch.empty(1)]), "triton", False)


# ---- torch.func -----------------------------------------------------------------------------------------------------------


def mapped_args(operator, target, n=3):
    """Arguments of `n` calls, stacked along different dimensions, some shared: ``(args, in_dims, calls)``."""
    each = [operator.make(**TINY, dtype=torch.float64, device=target.device, seed=s) for s in range(n)]
    args, dims = [], []
    for position, column in enumerate(zip(*each)):
        if not isinstance(column[0], Tensor) or position == 1:
            args.append(column[0])
            dims.append(None)
        else:
            dims.append((0, 2, -1)[position % 3])
            args.append(torch.stack(column, dims[-1]))
    calls = [[a if d is None else a.select(d, k) for a, d in zip(args, dims)] for k in range(n)]
    return args, tuple(dims), calls


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def loss(fn):
    return lambda *a: sum(
        (o * torch.arange(1, 1 + o.numel(), device=o.device, dtype=o.dtype).view(o.shape).sin()).sum() for o in tuple_of(fn(*a))
    )


@pytest.mark.not_for("sizes_from_data", "rows of a mapped result must have one size")
@pytest.mark.asks("torch")
def test_vmap_is_one_call(operator, target, monkeypatch):
    """vmap folds the mapped dimension into the batch: results equal a loop's, and the kernel runs once."""
    args, dims, calls = mapped_args(operator, target)
    fn = operator.call(target)
    want = torch.stack([operator.reference(*c) for c in calls])
    seen = spy(monkeypatch, operator, target.impl)
    close(torch.vmap(fn, dims)(*args), want)
    close(torch.vmap(fn, dims, out_dims=-1)(*args), want.movedim(0, -1))
    assert len(seen) == 2
    first = floats(args)[0]
    twice = torch.stack([args[first], args[first] * 2])
    nested = torch.vmap(torch.vmap(fn, dims), tuple(0 if i == first else None for i in range(len(args))))
    want = torch.stack([torch.stack([operator.reference(*replaced(c, [first], [c[first] * k])) for c in calls]) for k in (1, 2)])
    close(nested(*replaced(args, [first], [twice])), want)
    assert len(seen) == 3


@pytest.mark.asks("torch")
def test_torch_func_grad(operator, target, monkeypatch):
    """torch.func.grad and vjp use the kernels."""
    args = tiny(operator, target)
    which = tuple(floats(args))
    seen = spy(monkeypatch, operator, target.impl)
    got = torch.func.grad(loss(operator.call(target)), which)(*args)
    assert [phase for phase, _ in seen] == ["forward", "backward"]
    close(got, torch.func.grad(loss(operator.reference), which)(*args))
    rest = lambda f: lambda *xs: f(*replaced(args, which, xs))
    out, pull = torch.func.vjp(rest(operator.call(target)), *[args[i] for i in which])
    _, pull_reference = torch.func.vjp(rest(operator.reference), *[args[i] for i in which])
    close(pull(cotangents([out])[0]), pull_reference(cotangents([out])[0]))


@pytest.mark.not_for("sizes_from_data", "rows of a mapped result must have one size")
@pytest.mark.asks("torch")
def test_vmap_and_grad_compose(operator, target, monkeypatch):
    """Per-sample gradients and gradients of a mapped loss: one forward and one backward launch each."""
    args, dims, calls = mapped_args(operator, target)
    which = tuple(floats(args))
    one = torch.func.grad(loss(operator.call(target)), which)
    want = [torch.func.grad(loss(operator.reference), which)(*c) for c in calls]
    seen = spy(monkeypatch, operator, target.impl)
    close(torch.vmap(one, dims)(*args), tuple(map(torch.stack, zip(*want))))
    assert [phase for phase, _ in seen] == ["forward", "backward"]
    seen.clear()
    whole = lambda f: lambda *a: torch.vmap(loss(f), dims)(*a).sum()
    close(torch.func.grad(whole(operator.call(target)), which)(*args), torch.func.grad(whole(operator.reference), which)(*args))
    assert [phase for phase, _ in seen] == ["forward", "backward"]


@pytest.mark.asks("torch")
def test_jacobians_and_forward_mode(operator, target):
    """jacrev, jvp, jacfwd, dual numbers and forward-over-reverse agree with the reference, and jvp with the kernels' own vjp."""
    args = tiny(operator, target, **(dict(B=1, C=2, Q=1, heads=1) if target.interpreted else {}))
    which = tuple(floats(args))
    fn = lambda *xs: operator.function(*replaced(args, which, xs), impl=target.impl)
    ref = lambda *xs: operator.reference(*replaced(args, which, xs))
    xs = tuple(args[i] for i in which)
    every = tuple(range(len(xs)))
    close(torch.func.jacrev(fn, every)(*xs), torch.func.jacrev(ref, every)(*xs))
    tangents = tuple(cotangents(xs, seed=5))
    out, along = torch.func.jvp(fn, xs, tangents)
    close((out, along), torch.func.jvp(ref, xs, tangents))
    assert along.abs().sum() > 0
    (ct,) = cotangents([out])
    leaf = [x.detach().requires_grad_() for x in xs]
    back = torch.autograd.grad(fn(*leaf), leaf, ct)
    close((along * ct).sum(), sum((b * t).sum() for b, t in zip(back, tangents)))
    close(torch.func.jacfwd(fn, 0)(*xs), torch.func.jacfwd(ref, 0)(*xs))
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(xs, tangents)]
        close(torch.autograd.forward_ad.unpack_dual(fn(*duals)).tangent, along)
    second = lambda f: torch.func.jvp(torch.func.grad(loss(f), every), xs, tangents)[1]
    close(second(fn), second(ref))


@pytest.mark.asks("torch")
def test_forward_mode_is_never_silently_zero(operator, target):
    """A registered operator called with dual numbers, as exported and compiled graphs do, gives the right tangent or raises."""
    args = tiny(operator, target)
    which, graded = floats(args)[0], operator.results.index(operator.graded)
    tangent = cotangents([args[which]], seed=5)[0]
    want = torch.func.jvp(lambda x: operator.reference(*replaced(args, [which], [x])), (args[which],), (tangent,))[1]
    raw = lambda x: tuple_of(operator.op.forward_op(*operator.registered(*replaced(args, [which], [x])), target.impl, False))[
        graded
    ]

    def dual():
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(raw(torch.autograd.forward_ad.make_dual(args[which], tangent))).tangent

    def compiled():
        torch._dynamo.reset()
        fn = lambda x: operator.function(*replaced(args, [which], [x]), impl=target.impl)
        return torch.compile(lambda x, t: torch.func.jvp(fn, (x,), (t,))[1], backend="aot_eager")(args[which], tangent)

    for route in (dual, lambda: torch.func.jvp(raw, (args[which],), (tangent,))[1], compiled):
        try:
            got = route()
        except (NotImplementedError, RuntimeError):
            continue
        assert got is not None, "the tangent was dropped"
        close(got, want)


@pytest.mark.not_for("sizes_from_data", "rows of a mapped result must have one size")
@pytest.mark.asks("torch")
def test_transforms_compile(operator, target, monkeypatch):
    """vmap and grad inside torch.compile make one graph with right results."""
    torch._dynamo.reset()
    args, dims, _ = mapped_args(operator, target)
    fn = operator.call(target)
    mapped = torch.compile(lambda *a: torch.vmap(fn, dims)(*a), fullgraph=True, backend="aot_eager")
    seen = spy(monkeypatch, operator, target.impl)
    close(mapped(*args), torch.vmap(operator.reference, dims)(*args))
    assert len(seen) == 1
    plain = tiny(operator, target)
    which = tuple(floats(plain))
    grad = torch.compile(lambda *a: torch.func.grad(loss(fn), which)(*a), fullgraph=True, backend="aot_eager")
    close(grad(*plain), torch.func.grad(loss(operator.reference), which)(*plain))
    torch._dynamo.reset()


# ---- determinism, threads, processes ----------------------------------------------------------------------------------------


def contended(operator, target, dtype=torch.float32):
    """Arguments with every sample on one pixel, as large as the implementation can run in a test."""
    sizes = dict(operator.cases.SMALL["one_pixel"])
    if not target.interpreted:
        sizes |= dict(B=2, C=37, H=16, W=16, Q=500, D=9, heads=3)
    return operator.make(**sizes, dtype=dtype, device=target.device)


@pytest.mark.without_gradients
@pytest.mark.asks("passes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_deterministic_mode_repeats_its_bits(operator, target, dtype):
    """Runs with every sample on one pixel, values and all gradients, give the same bits 20 times."""
    if target.interpreted and dtype != torch.float32:
        pytest.skip("the interpreter is slow and runs in order")
    args = contended(operator, target, dtype)
    with deterministic():
        first = value_and_grads(operator.call(target), args)
        for _ in range(1 if target.interpreted else 19):
            again = value_and_grads(operator.call(target), args)
            assert same_bits([*first[0], *first[1]], [*again[0], *again[1]])


@pytest.mark.without_gradients
def test_forward_repeats_its_bits(operator, target):
    """The forward pass repeats its bits in the default mode too; on CPUs everything does."""
    args = contended(operator, target)
    first = value_and_grads(operator.call(target), args)
    for _ in range(1 if target.interpreted else 19):
        again = value_and_grads(operator.call(target), args)
        assert same_bits(first[0], again[0])
        assert target.impl == "triton" or same_bits(first[1], again[1])


@pytest.mark.without_gradients
@pytest.mark.not_for("by_torch", "torch's own products sum in an order that depends on the threads")
def test_numba_bits_do_not_depend_on_threads(operator, numba_target):
    """torch.set_num_threads changes the speed, not the bits."""
    for args in (contended(operator, numba_target), operator.make(B=3, C=20, H=9, W=8, Q=300, D=5, heads=2, octaves=1)):
        found = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            out, grads = value_and_grads(operator.call(numba_target), args)
            found.append([*out, *grads])
        assert all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.without_gradients
def test_numba_in_many_threads_at_once(operator, numba_target):
    """Concurrent callers neither crash nor change each other's results."""
    args = contended(operator, numba_target)
    want = value_and_grads(operator.call(numba_target), args)
    failures = []

    def work():
        try:
            for _ in range(5):
                got = value_and_grads(operator.call(numba_target), args)
                assert same_bits([*got[0], *got[1]], [*want[0], *want[1]])
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not any(worker.is_alive() for worker in workers), "deadlock"
    assert not failures, failures


@pytest.mark.not_for("by_torch", "torch itself waits there for threads that it had before the fork")
def test_numba_after_fork(operator, numba_target):
    """Operators work in a forked child of a process that has used threads, and in DataLoader workers."""
    args = contended(operator, numba_target)
    torch.set_num_threads(2)
    want = operator.call(numba_target)(*args)
    assert torch.equal(torch.tensor(in_child(lambda: operator.call(numba_target)(*args).tolist())), want)
    loader = torch.utils.data.DataLoader(Calls(operator.name, args), num_workers=2, multiprocessing_context="fork", timeout=60)
    for out in loader:
        assert torch.equal(out[0], want)


class Calls(torch.utils.data.Dataset):
    def __init__(self, name, args):
        self.name, self.args = name, args

    def __len__(self):
        return 2

    def __getitem__(self, _):
        return OPERATORS[self.name].call("numba")(*self.args)


@pytest.mark.not_for("sizes_from_data", "the lists of all rows follow each other; tests of points compare them")
def test_rows_of_a_batch_are_independent(operator, target):
    """Row b of a batch equals the call on row b alone: bit for bit where the plan says so, up to rounding otherwise."""
    sizes = dict(B=3, C=5, H=4, W=5, Q=3, D=2, heads=1) if target.interpreted else dict(B=3, C=21, H=6, W=7, Q=9, D=5, heads=3)
    args = operator.make(**sizes, octaves=2, device=target.device, layout="uniform")
    with deterministic():
        plan = sonde.explain(operator.call(target), *leaves(args))
        out, grads = value_and_grads(operator.call(target), args)
        (ct,) = cotangents(out)
        for b in range(3):
            row = [a[b : b + 1] if isinstance(a, Tensor) else a for a in args]
            one, one_grads = value_and_grads(operator.call(target), row, [ct[b : b + 1]])
            for phase, pairs in (("forward", zip(out, one)), ("backward", zip(grads, one_grads))):
                weakest = min((k.determinism for k in plan.kernels if k.phase == phase), key=list(Determinism).index)
                for all_rows, single in pairs:
                    if weakest is Determinism.BATCH_INVARIANT:
                        assert same_bits([all_rows[b : b + 1]], [single]), phase
                    torch.testing.assert_close(all_rows[b : b + 1], single, rtol=1e-5, atol=1e-5)


# ---- hypothesis ---------------------------------------------------------------------------------------------------------------

if given is not None:

    @st.composite
    def drawn_case(draw, operator, target):
        """Sizes around those of the first SMALL case, some of them zero, with any dtypes and layouts."""
        sizes = next(iter(operator.cases.SMALL.values()))
        most = {k: 2 * v + 1 if k == "C" else min(v, 2) if k in "BQD" and target.interpreted else v for k, v in sizes.items()}
        made = {k: draw(st.integers(operator.least.get(k, 0), v), label=k) for k, v in most.items() if isinstance(v, int)}
        dtype = draw(st.sampled_from(DTYPES))
        layout = draw(st.sampled_from(["uniform", "hostile", "lines"]))
        args = list(operator.make(**made, dtype=dtype, layout=layout, seed=draw(st.integers(0, 9))))
        strides, other = [], draw(st.sampled_from([None, *DTYPES]))
        for i in floats(args):
            if other and i != floats(args)[0]:
                args[i] = args[i].to(other)
            strides.append(draw(st.sampled_from(LAYOUTS)))
            args[i] = restride(args[i], strides[-1])
        return args, f"{made} {layout} {[args[i].dtype for i in floats(args)]} {strides}"

    @given(st.data())
    def test_any_sizes_strides_and_dtypes(operator, target, data):
        """Any combination of sizes, layouts and dtypes agrees with the reference."""
        args, note = data.draw(drawn_case(operator, target))
        args = [redzone(a.to(target.device)) if isinstance(a, Tensor) else a for a in args]
        plain = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
        with poisoned():
            assert_agrees(operator, target, plain, note, given=args, slack=True)

    WRONG = [
        None, True, 3, -1, 2.5, "images", [1.0], {}, object(), torch.float32, float("nan"), 2**70,
        lambda t: t.int(), lambda t: t.bool(), lambda t: t.to(torch.complex64), lambda t: t.to("meta"), lambda t: t.tolist(),
        lambda t: t.numpy(), lambda t: t[0], lambda t: t[None], lambda t: t[..., :-1], lambda t: t[:, 1:], lambda t: t[:0],
        lambda t: torch.cat([t, t]), lambda t: torch.cat([t, t], -1), lambda t: t.to_sparse(), lambda t: t.flatten(),
        lambda t: t.transpose(0, -1), lambda t: t.requires_grad_(), lambda t: t.to(torch.float8_e5m2), lambda t: t.transpose(1, 2),
    ]  # fmt: skip

    @pytest.mark.without_gradients
    @given(st.data())
    def test_bad_arguments_are_value_or_type_errors(operator, data):
        """Bad arguments raise ValueError or TypeError (or give a result, if they happen to fit), and inputs are not changed."""
        impl = data.draw(st.sampled_from(["auto", "numba", "triton", "reference", "cuda", "", None, 3, [], ("auto",)]))
        args = [a.float() if isinstance(a, Tensor) else a for a in tiny(operator)]
        for i in data.draw(st.lists(st.integers(0, len(args) - 1), max_size=3)):
            wrong = data.draw(st.sampled_from(WRONG))
            args[i] = (wrong(args[i]) if isinstance(args[i], Tensor) else args[i]) if inspect.isfunction(wrong) else wrong
        before = [a.detach().clone() if isinstance(a, Tensor) and a.device.type != "meta" else a for a in args]
        out = attempt(operator, args, impl)
        if isinstance(out, Exception):
            assert type(out) in (ValueError, TypeError, Unsupported)
            assert operator.title in str(out)
        else:
            assert all(isinstance(o, Tensor) for o in tuple_of(out))
        for a, b in zip(args, before):
            if isinstance(a, Tensor) and a.device.type != "meta" and a.layout is torch.strided and a.dtype in DTYPES:
                assert same_bits([a.detach()], [b])


# ---- errors -----------------------------------------------------------------------------------------------------------------


def attempt(operator, args, impl="auto"):
    """The result, or the ValueError or TypeError that was raised."""
    try:
        return operator.function(*args, impl=impl)
    except (ValueError, TypeError) as refusal:
        return refusal


def refused(operator, args, *words, kind=(ValueError, TypeError), impl="auto"):
    """The call raises an error that names the operator and contains these words, and leaves its inputs unchanged."""
    copies = [a.clone() if isinstance(a, Tensor) and a.device.type != "meta" else a for a in args]
    with pytest.raises(kind) as caught:
        operator.function(*args, impl=impl)
    message = str(caught.value)
    for word in (operator.title, *words):
        assert word in message, message
    assert type(caught.value) in (ValueError, TypeError), "not a plain error"
    for a, b in zip(args, copies):
        assert not isinstance(a, Tensor) or a.device.type == "meta" or torch.equal(a, b)


def test_errors_name_what_is_wrong(operator, target, monkeypatch):
    """Not a tensor, integers, complex, sparse, another device, too many or too few dimensions: an error, and no launch."""
    args = tiny(operator, target)
    operator.function(*args)  # a valid call first, so that the cache is warm
    seen = spy(monkeypatch, operator, target.impl)
    for i in tensors(args):
        name = operator.arguments[i]
        wrong = lambda x, i=i: replaced(args, [i], [x])
        refused(operator, wrong([1.0, 2.0]), name, "tensor", "list", kind=TypeError)
        refused(operator, wrong(args[i].cpu().numpy()), name, "tensor", "ndarray", kind=TypeError)
        refused(operator, wrong(args[i].int()), name, "float", "int32", kind=TypeError)
        refused(operator, wrong(args[i].bool()), name, "float", "bool", kind=TypeError)
        refused(operator, wrong(args[i].to(torch.complex64)), name, "float", "complex64", kind=TypeError)
        for other in () if operator.any_rank else (args[i][None], args[i][0]):
            refused(operator, wrong(other), name, "dimensions", str(args[i].ndim), str(list(other.shape)), kind=ValueError)
        if not operator.alone:  # a single tensor may be on any device
            refused(operator, wrong(args[i].to("meta")), "meta", target.device, kind=ValueError)
        with pytest.raises(TypeError, match=name):
            operator.function(*wrong(args[i].to_sparse()))
        with pytest.raises(TypeError, match=f"{name}.*nested"):
            operator.function(*wrong(torch.nested.nested_tensor(list(args[i]))))
    assert not seen


def test_errors_of_sizes(operator, target):
    """One size too many in any dimension of any tensor is an error with the shapes in its message (free sizes excepted)."""
    args = tiny(operator, target)
    free = 0
    for i in tensors(args):
        for d in range(args[i].ndim):
            longer = torch.cat([args[i], args[i].narrow(d, 0, 1)], d)
            out = attempt(operator, replaced(args, [i], [longer]), target.impl)
            if isinstance(out, Tensor):
                free += 1
            else:
                assert isinstance(out, ValueError)
                assert operator.name in str(out)
                assert any(f"{n} must" in str(out) for n in operator.arguments), out
                assert "got [" in str(out), out
    assert free <= 5, "sizes that no other argument fixes: those of an image, its channels or the heads"


@pytest.mark.not_for("alone", "there is no other batch")
def test_mismatched_batch(operator, target):
    """Batches are never broadcast, not even from 1, unless the operator declares it."""
    args = tiny(operator, target)
    for i in tensors(args):
        if not operator.broadcasts:
            refused(operator, replaced(args, [i], [args[i][:1]]), "must be", "B=", "got [", kind=ValueError)
        refused(operator, replaced(args, [i], [torch.cat([args[i], args[i]])]), "must be", "B=", "got [", kind=ValueError)


@pytest.mark.without_gradients
def test_errors_of_impl(operator):
    """An implementation that is requested by name runs or raises, and is never replaced."""
    args = tiny(operator)
    for impl in ("cuda", "Triton", "", None, 3, ["auto"]):
        refused(operator, args, "impl", "'auto'", "'triton'", "'numba'", "'reference'", repr(impl), impl=impl)
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
    for impl, kind in (("numba", "CPU"), ("triton", "GPU")):
        words = (f"{kind} tensors", "meta") if find_spec(impl) else ("not installed",)
        refused(operator, meta, f"impl={impl!r}", *words, impl=impl)
    with pytest.raises(TypeError):
        operator.function(*args, "numba")  # impl is keyword-only


@pytest.mark.without_gradients
def test_triton_needs_a_gpu_or_the_interpreter(operator, monkeypatch):
    """Without the interpreter Triton refuses CPU tensors; no other implementation runs instead."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused(operator, tiny(operator), "impl='triton'", "GPU tensors", "cpu", impl="triton")


@pytest.mark.without_gradients
@pytest.mark.gpu
def test_numba_needs_cpu_tensors(operator):
    """Numba refuses GPU tensors and mixed devices instead of copying."""
    args = tiny(operator, "cuda")
    refused(operator, args, "impl='numba'", "CPU tensors", "cuda", impl="numba")
    for i in tensors(args):
        refused(operator, replaced(args, [i], [args[i].cpu()]), "cuda", "cpu", kind=ValueError)


@pytest.mark.not_for("sizes_from_data", "without values there are no sizes")
def test_meta_tensors_give_shapes(operator):
    """`auto` on meta tensors returns the right shapes and dtypes and computes nothing."""
    args = operator.make("odd_sizes", dtype=torch.bfloat16)
    want = operator.reference(*args)
    got = operator.function(*[a.to("meta") if isinstance(a, Tensor) else a for a in args])
    assert (got.shape, got.dtype, got.device.type) == (want.shape, want.dtype, "meta")


# ---- on a GPU only ------------------------------------------------------------------------------------------------------------


@pytest.mark.not_for("sizes_from_data", "it waits for the device, to learn the lengths of its lists")
@pytest.mark.gpu
@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
def test_cuda_graph_capture(operator, mode):
    """Forward and backward are captured on the current stream and replay with new inputs."""
    make = lambda seed: operator.make(
        B=2, C=20, H=13, W=17, Q=50, D=7, heads=3, octaves=2, device="cuda", layout="uniform", seed=seed
    )
    args, other = leaves(make(0)), make(1)
    run = lambda *a: value_and_grads(operator.call("triton"), a)
    with deterministic(mode):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            (ct,) = cotangents(run(*args)[0])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = operator.call("triton")(*args)
            grads = torch.autograd.grad(out, [args[i] for i in floats(args)], ct)
        for i in floats(args):
            args[i].data.copy_(other[i])
        graph.replay()
        torch.cuda.synchronize()
        want, want_grads = value_and_grads(operator.call("triton"), other, [ct])
    for a, b in zip([out, *grads], [*want, *want_grads]):
        torch.testing.assert_close(a.detach(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.not_for("sizes_from_data", "it waits for the device, to learn the lengths of its lists")
@pytest.mark.gpu
@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
def test_never_waits_for_the_device(operator, mode):
    """Neither forward nor backward synchronizes with the device, in either mode."""
    args = operator.make("odd_sizes", device="cuda")
    with deterministic(mode):
        leaf = leaves(args)
        (ct,) = cotangents([operator.call("triton")(*args)])
        run = lambda: torch.autograd.grad(operator.call("triton")(*leaf), [leaf[i] for i in floats(leaf)], ct)
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_current_stream_is_used(operator):
    """The kernels run on the current stream, after work queued there before the call."""
    args = operator.make("odd_sizes", device="cuda")
    want = operator.call("triton")(*args)
    stale = torch.zeros_like(args[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        stale.copy_(args[0])
        got = operator.call("triton")(stale, *args[1:])
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_peak_memory(operator):
    """Peak memory ≤ 1.2 × (outputs + gradients) + one channels-last copy of the images: samples are never stored."""
    args = leaves(operator.cases.make(**operator.cases.BENCH[operator.typical], device="cuda"))
    ct = torch.randn_like(operator.call("triton")(*args))
    run = lambda: (out := operator.call("triton")(*args), torch.autograd.grad(out, [args[i] for i in floats(args)], ct))
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, grads = run()
    peak = torch.cuda.max_memory_allocated() - before
    if operator.lists:  # sorted copies and neighbour lists, but nothing per pair of query and point
        assert peak <= args[0].shape[-2] * args[1].shape[-2] / 8
    else:
        assert peak <= 1.2 * (out.nbytes + sum(g.nbytes for g in grads)) + args[0].nbytes


@pytest.mark.gpu
def test_atomics_differ_from_run_to_run(operator):
    """A negative control: where the plan promises nothing, runs differ, so the determinism tests are able to fail."""
    if not operator.atomic:
        pytest.skip("it has none")
    args = operator.make(B=2, C=64, H=16, W=16, Q=4096, D=16, heads=4, octaves=0, layout="one_pixel", device="cuda")
    plan = sonde.explain(operator.call("triton"), *leaves(args))
    assert plan.determinism is Determinism.NONE
    first = value_and_grads(operator.call("triton"), args)
    runs = [value_and_grads(operator.call("triton"), args) for _ in range(20)]
    assert not all(same_bits(first[1], run[1]) for run in runs)
    assert all(same_bits(first[0], run[0]) for run in runs)
