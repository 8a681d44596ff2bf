"""``sonde.explain``: every claim about a kernel is compared with what the kernel does."""

# ruff: noqa: E731 (short functions read better on one line)

import gc
import sys
import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import sonde
from helpers.memory import allocations, restride
from helpers.operators import HAS_GPU, Target, cotangents, deterministic, floats, leaves, value_and_grads
from helpers.spies import in_child, spy
from sonde.op.cache import forget_calls
from sonde.op.plan import HAS_NUMBA, Determinism, Kernel, Plan
from sonde.operators import OPERATORS, Operator

ORDER = list(Determinism)
SIZES = dict(B=2, C=20, H=24, W=24, Q=3, D=2, heads=2, octaves=1, layout="uniform")


def made(operator: Operator, target: Target, **options) -> tuple:
    return operator.make(**{**SIZES, **options}, device=target.device)


@pytest.mark.asks("passes")
def test_names_and_writes(operator, target):
    """The forward pass writes the result; every requested gradient is written exactly once, by a kernel with a name."""
    args = leaves(made(operator, target))
    for mode in (False, True):
        with deterministic(mode):
            plan = sonde.explain(operator.call(target), *args)
        assert plan.operator == operator.name
        assert plan.impl == target.impl
        assert all(kernel.name for kernel in plan.kernels)
        assert [w for k in plan.kernels if k.phase == "forward" for w in k.writes] in (["out"], [*operator.results])
        written = [w for k in plan.kernels if k.phase == "backward" for w in k.writes]
        assert sorted(written) == sorted(operator.arguments[i] for i in floats(args))


def test_gradients_nobody_asks_for_are_not_planned(operator, target):
    """Without gradients the plan is the forward pass alone."""
    args = made(operator, target)
    with torch.no_grad():
        quiet = sonde.explain(operator.call(target), *leaves(args))
    for plan in (sonde.explain(operator.call(target), *args), quiet):
        assert {kernel.phase for kernel in plan.kernels} == {"forward"}
    one = [a.detach().requires_grad_(i == 0) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    kernels = sonde.explain(operator.call(target), *one).kernels
    assert [name for k in kernels if k.phase == "backward" for name in k.writes] == [operator.arguments[0]]


def test_determinism_that_is_claimed(operator, target):
    """GPU plans admit atomics in the default mode and have none in the deterministic mode; CPU plans never have any."""
    args = leaves(made(operator, target))
    default = sonde.explain(operator.call(target), *args)
    with deterministic():
        strict = sonde.explain(operator.call(target), *args)
    assert ORDER.index(strict.determinism) >= ORDER.index(Determinism.RUN_TO_RUN)
    forward = [k for k in default.kernels if k.phase == "forward"]
    assert all(k.determinism is not Determinism.NONE for k in forward)
    by_images = [k for k in default.kernels if k.phase == "backward" and operator.arguments[0] in k.writes]
    if by_images:
        assert all((k.determinism is Determinism.NONE) == (target.impl == "triton" and operator.atomic) for k in by_images)
    assert (default.determinism is Determinism.NONE) == (target.impl == "triton" and operator.atomic)


@pytest.mark.not_for("sizes_from_data", "without values there are no sizes")
def test_launches_nothing(operator, target, monkeypatch):
    """A plan is made without running a kernel, and what it returns has the shape of the result."""
    seen = spy(monkeypatch, operator, target.impl)
    args = made(operator, target)
    shapes = []
    sonde.explain(lambda *a: shapes.append(operator.call(target)(*a).shape), *leaves(args))
    assert not seen
    assert shapes == [operator.call("reference")(*args).shape]
    operator.call(target)(*args)
    assert [phase for phase, _ in seen] == ["forward"], "recording ended with explain()"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_accumulator(operator, target, dtype):
    """The plan names the dtype that kernels accumulate in, found by a sum that is exact in float64 and not in float32."""
    args = leaves(made(operator, target, dtype=dtype))
    plan = sonde.explain(operator.call(target), *args)
    assert {k.accumulator for k in plan.kernels} == {torch.float64 if dtype == torch.float64 else torch.float32}
    if operator.factors is None:
        return  # its accumulation is checked in its own tests
    inside = made(operator, target, dtype=dtype, octaves=0, layout="one_pixel")
    big = [torch.full_like(a, 1.0) if i == 0 else a for i, a in enumerate(inside)]
    name, along = operator.factors
    terms = big[operator.arguments.index(name)].zero_().transpose(-1, along)
    terms[..., :2] = torch.tensor([2.0**40, 1.0])  # every sum has these two terms
    tail = operator.call(target)(*big).double()
    kept = (tail.abs().max() % 2**40) != 0
    assert bool(kept) == (dtype == torch.float64)


@pytest.mark.not_for("sizes_from_data", "what its lists take is not known beforehand")
@pytest.mark.asks("passes")
@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "reversed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_workspace_is_what_is_allocated(operator, target, dtype, layout, mode, monkeypatch):
    """Peak memory beyond inputs and results is what the plan says: no more, and not much less."""
    if target.interpreted and (dtype, layout) in ((torch.bfloat16, "channels_last"), (torch.float32, "reversed")):
        pytest.skip("the interpreter is slow")
    if target.interpreted and dtype == torch.bfloat16 and operator.in_full is not None and layout != "contiguous":
        pytest.skip("the interpreter is slow")
    sizes = {} if target.interpreted else dict(Q=400, D=9)
    args = leaves([restride(a, layout) if isinstance(a, Tensor) else a for a in made(operator, target, dtype=dtype, **sizes)])
    found = allocations(monkeypatch, operator, target.impl)
    with deterministic(mode):
        plan = sonde.explain(operator.call(target), *args)
        out = operator.call(target)(*args)
        cotangent = torch.empty_like(out).copy_(cotangents([out])[0])  # laid out as the result is, as the plan assumes
        torch.autograd.grad(out, [args[i] for i in floats(args)], cotangent)
    for phase, launched in zip(("forward", "backward"), found, strict=True):
        used = launched.peak - launched.returned
        claimed = max(k.workspace for k in plan.kernels if k.phase == phase)
        assert used <= 1.05 * claimed + 8192, f"{phase} takes {used}, the plan says {claimed}"
        sorts = operator.lists and "torch.sort" in [k.name for k in plan.kernels if k.phase == phase]
        # neither Numba's own allocations are seen here, nor those of torch.sort for the many pairs of a GPU test
        if target.impl == "triton" and (target.interpreted or not sorts):
            assert claimed <= 1.5 * used + 8192, f"{phase} takes {used}, the plan says {claimed}"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["sample_sum", "sample_dot"])
def test_workspace_of_few_samples_of_large_images(name, threads, monkeypatch):
    """The images' summed gradient is live together with the other gradients; with one thread it is the largest buffer."""
    pytest.importorskip("numba")
    operator, target = OPERATORS[name], Target("numba")
    torch.set_num_threads(threads)
    args = leaves(made(operator, target, B=16, C=32, H=32, W=32, Q=8, dtype=torch.bfloat16))
    found = allocations(monkeypatch, operator, "numba")
    plan = sonde.explain(operator.call(target), *args)
    out = operator.call(target)(*args)
    torch.autograd.grad(out, [args[i] for i in floats(args)], cotangents([out])[0])
    claimed = max(k.workspace for k in plan.kernels if k.phase == "backward")
    used = found[1].peak - found[1].returned
    assert used <= 1.05 * claimed + 8192, f"backward takes {used}, the plan says {claimed}"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
def test_workspace_on_the_device(operator, mode):
    """The peak of CUDA's caching allocator agrees with the plan."""
    if len(operator.results) > 1:
        pytest.skip("its lists are made one tensor of here, which takes more")
    args = leaves(operator.cases.make(**{**operator.cases.BENCH[operator.typical], "B": 4}, device="cuda"))
    measured = []

    def peak(function):
        function()
        gc.collect()  # collect what earlier tests left behind
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function()
        measured.append(torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in out))
        return out

    with deterministic(mode):
        plan = sonde.explain(operator.call("triton"), *args)
        (out,) = peak(lambda: [operator.call("triton")(*args)])
        ct = cotangents([out])
        measured[0] -= kept_for_backward(out, args)  # includes the results
        peak(lambda: torch.autograd.grad(out, [args[i] for i in floats(args)], ct, retain_graph=True))
    for phase, used in zip(("forward", "backward"), measured):
        claimed = max(k.workspace for k in plan.kernels if k.phase == phase)
        slack = 2**21  # the allocator may hand out a block that is up to 1 MiB too large instead of splitting it
        assert used <= 1.05 * claimed + slack, f"{phase} takes {used}, the plan says {claimed}"
        if not operator.lists:  # an index is not yet complete when building it needs the most memory
            assert claimed <= 1.5 * used + slack, f"{phase} takes {used}, the plan says {claimed}"


def kept_for_backward(out: Tensor, args) -> int:
    """Bytes that the graph of `out` saves besides `out` and the arguments."""
    given, kept = {t.untyped_storage().data_ptr() for t in (out, *args) if isinstance(t, Tensor)}, {}
    nodes = [out.grad_fn]
    for node in nodes:
        nodes += [next for next, _ in node.next_functions if next is not None and next not in nodes]
        saved = [t.untyped_storage() for t in getattr(node, "saved_tensors", ()) if isinstance(t, Tensor)]
        kept |= {s.data_ptr(): s.nbytes() for s in saved if s.data_ptr() not in given}
    return sum(kept.values())


def test_fake_tensors(operator):
    """A GPU call can be planned from fake tensors without a GPU, and the plan equals that of real tensors."""
    pytest.importorskip("triton")

    def plan():
        with FakeTensorMode():
            new = lambda a: torch.empty(a.shape, dtype=a.dtype, device="cuda", requires_grad=True)
            return sonde.explain(operator.function, *[new(a) if isinstance(a, Tensor) else a for a in operator.make(**SIZES)])

    found = plan() if HAS_GPU else in_child(plan)  # torch without CUDA aborts when autograd asks for a stream
    assert found.impl == "triton"
    assert (found.determinism is Determinism.NONE) == operator.atomic
    assert found == sonde.explain(operator.call("triton"), *leaves(made(operator, Target("triton"))))


def test_meta_tensors(operator):
    """Kernels cannot run on meta tensors: the plan is that of the reference, and says so."""
    meta = [a.to("meta").requires_grad_() if isinstance(a, Tensor) else a for a in operator.make(**SIZES)]
    plan = sonde.explain(operator.function, *meta)
    assert plan.impl == "reference"
    assert plan.determinism is Determinism.NONE
    with pytest.raises(ValueError, match="needs CPU tensors, got meta" if HAS_NUMBA else "needs numba, which is not installed"):
        sonde.explain(operator.call("numba"), *meta)


def test_auto_is_explained_as_it_runs(operator, monkeypatch):
    """explain() and the call choose the implementation by the same code."""
    pytest.importorskip("numba")
    args = operator.make(**SIZES)
    assert sonde.explain(operator.function, *args).impl == "numba"
    seen = spy(monkeypatch, operator, "numba")
    operator.function(*args)
    assert len(seen) == 1
    monkeypatch.setattr("sonde.op.plan.HAS_NUMBA", False)
    forget_calls()
    assert sonde.explain(operator.function, *args).impl == "reference"
    operator.function(*args)
    assert len(seen) == 1


def test_table(operator, target):
    """str() of a plan is a table with a line per kernel."""
    plan = sonde.explain(operator.call(target), *leaves(made(operator, target)))
    head, columns, *lines = str(plan).splitlines()
    assert head == f"{operator.name}, {target.impl}"
    assert columns.split()[:2] == ["phase", "kernel"]
    assert len(lines) == len(plan.kernels)
    for kernel, line in zip(plan.kernels, lines):
        for word in (kernel.phase, kernel.name, kernel.determinism.value, "float32", f"{kernel.workspace:,} B", *kernel.writes):
            assert word in line


def test_several_operators_in_one_function():
    """The plan of a layer lists the kernels of all its operators in order; a function that calls no operator is an error."""
    images, samples = torch.randn(1, 8, 4, 4), torch.zeros(1, 5, 3, 2)

    def attention(queries):
        return sonde.sample_sum(images, samples, sonde.sample_dot(images, samples, queries).softmax(-1))

    plan = sonde.explain(attention, torch.randn(1, 2, 5, 8))
    assert plan.operator == "sample_dot, sample_sum"
    assert [k.name.split(":")[0] for k in plan.kernels] == ["sample_dot", "sample_sum"]
    with pytest.raises(ValueError, match="calls no operator"):
        sonde.explain(torch.relu, images)


def test_failure_ends_the_recording():
    """After an error inside explain(), which reaches the caller unchanged, later calls run normally."""
    images, samples = torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 1, 2)
    with pytest.raises(ValueError, match="weights"):
        sonde.explain(sonde.sample_sum, images, samples, torch.ones(2, 1, 1, 1))
    assert sonde.sample_sum(images, samples, torch.ones(1, 1, 1, 1)).item() == 1


def test_other_threads_are_not_explained():
    """explain() in one thread does not affect calls in others."""
    args = torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 1)
    found = []

    def with_a_thread():
        thread = threading.Thread(target=lambda: found.append(sonde.sample_sum(*args).item()))
        thread.start()
        thread.join()
        return sonde.sample_sum(*args)

    assert len(sonde.explain(with_a_thread).kernels) == 1
    assert found == [1.0]


def test_weakest_kernel_decides():
    """A plan's determinism is that of its weakest kernel, its workspace that of the kernel that needs the most."""
    kernel = lambda d, w: Kernel("k", ("out",), torch.float32, d, w)
    plan = Plan("x", "triton", (kernel(Determinism.BATCH_INVARIANT, 3), kernel(Determinism.RUN_TO_RUN, 7)))
    assert plan.determinism is Determinism.RUN_TO_RUN
    assert plan.workspace == 7
    assert Plan("x", "triton", ()).determinism is Determinism.BATCH_INVARIANT


@pytest.mark.not_for("sizes_from_data", "the lists of all rows follow each other; tests of points compare them")
def test_every_determinism_claim(operator, target):
    """Kernels that claim run-to-run or batch-invariant results have them, bit for bit; no claim is tested the other way."""
    args = operator.make(**{**SIZES, "D": 7, "layout": "one_pixel"}, device=target.device)
    names = ["out", *(operator.arguments[i] for i in floats(args))]
    cts = cotangents([operator.call(target)(*args)])

    def bits(rows):
        given = [a[:rows] if isinstance(a, Tensor) else a for a in args]
        outs, grads = value_and_grads(operator.call(target), given, [ct[:rows] for ct in cts])
        return dict(zip(names, [*outs, *grads]))

    for mode in (False, True):
        with deterministic(mode):
            plan = sonde.explain(operator.call(target), *leaves(args))
            whole, again, first = bits(2), bits(2), bits(1)
        for kernel in plan.kernels:
            for name in kernel.writes:
                if kernel.determinism is not Determinism.NONE:
                    assert torch.equal(whole[name], again[name]), kernel
                if kernel.determinism is Determinism.BATCH_INVARIANT:
                    assert torch.equal(whole[name][:1], first[name]), kernel


@pytest.mark.not_for("sizes_from_data", "it waits for the device, which no captured graph can")
@pytest.mark.gpu
@pytest.mark.parametrize("mode", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("size", ["few", "many"])
@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
def test_what_ran_is_what_was_planned(operator, how, size, mode):
    """The kernels that a profiler sees, by name and in order, are those of the plan; torch's own are left out."""
    sizes = SIZES if size == "few" else {**operator.cases.BENCH[operator.typical], "B": 1}
    args = leaves(operator.make(**sizes, device="cuda"))
    call, wanted = operator.call("triton"), [args[i] for i in floats(args)]

    def both(function):
        out = function(*args)
        torch.autograd.grad(out, wanted, torch.ones_like(out))

    with deterministic(mode):
        plan = sonde.explain(call, *args)
        torch.compiler.reset()  # this test compiles one function many times
        function = torch.compile(call, fullgraph=True) if how == "compiled" else call
        for _ in range(3):
            both(function)
        run = lambda: both(function)
        if how == "captured":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                both(function)
            run = graph.replay
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
    seen = sorted(
        (e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start
    )
    names = [k.name.rpartition(": ")[2] for k in plan.kernels]  # plans of several operators prefix each name with its operator
    planned = [name for name in names if not name.startswith("torch.")]
    assert [e.name for e in seen if e.name in our_kernels()] == planned


def our_kernels() -> set[str]:
    """Names of all Triton kernels of the package that are loaded."""
    import triton

    modules = [module for name, module in sys.modules.items() if name.startswith("sonde.")]
    return {x.__name__ for module in modules for x in vars(module).values() if isinstance(x, triton.JITFunction)}
