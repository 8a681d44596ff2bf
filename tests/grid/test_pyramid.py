"""Feature-pyramid kernels: every candidate configuration, levels that only the device knows, slices."""

import pytest
import torch

pytest.importorskip("triton")

import sonde
from helpers.exactness import same_bits
from helpers.memory import poisoned, redzone
from helpers.operators import HAS_GPU, Target, cotangents, deterministic, floats, leaves
from sonde.jit import bench
from sonde.jit.kernel import Tunable
from sonde.op.register import decide
from sonde.operators import OPERATORS, Operator

pytestmark = pytest.mark.asks("passes")
PYRAMIDS = [operator for operator in OPERATORS.values() if operator.engine == "_pyramid"]
WRONG = [0, 1, -1, 7, -9, 40]
ABSURD = [*WRONG, 2**15, 2**31 - 1, -(2**31), 2**40, -(2**62), 2**63 - 1]


def told_by_tensors(operator: Operator, target: Target, **options) -> list:
    """The registered operator's arguments, with levels as device tensors that the host has not read."""
    *others, levels, flag = operator.registered(*operator.make("odd_sizes", device=target.device, **options))
    table = torch.tensor(levels, device=target.device).view(*others[4].shape[3:-1], 3)
    return [redzone(others[0]), table[..., :2], table[..., 2], *map(redzone, others[3:]), (), flag]


def value_and_gradients(gpu, args, mode: bool = False) -> list:
    with poisoned():
        out = decide(gpu, args)(*args)
        given = (redzone(cotangents([out])[0]), *args)
        return [out, *decide(gpu, given, [True] * 3, mode)(*given)]


def expected(operator: Operator, args) -> list:
    dtype = args[0].dtype
    args = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    given = leaves(args)
    out = operator.definition(*given)
    return [out.detach(), *torch.autograd.grad(out, [given[i] for i in floats(given)], cotangents([out.to(dtype)])[0].double())]


@pytest.mark.parametrize("operator", PYRAMIDS, ids=str)
def test_graphs_are_decided_once(operator, triton_target, monkeypatch):
    """Calls from a graph, where the dispatcher passes the levels as a list, hit the call cache like any other."""
    gpu, decided = operator.kernels("triton"), []
    for phase in ("forward_pass", "backward_pass"):
        real = getattr(gpu, phase)
        monkeypatch.setattr(gpu, phase, lambda *args, real=real, **how: decided.append(real.__name__) or real(*args, **how))
    args = operator.registered(*operator.make("odd_sizes", device=triton_target.device))
    for _ in range(3):
        out = operator.op.forward_op(*args, "triton", False)
        operator.op.backward_op(torch.ones_like(out), *args, [True] * 3, "triton", False)
    assert decided == ["forward_pass", "backward_pass"]


@pytest.mark.interpreted(True)
@pytest.mark.parametrize("operator", PYRAMIDS, ids=str)
def test_levels_on_the_host_are_read_by_each_call(operator, triton_target, monkeypatch):
    """Traced graphs may pass the levels as CPU tensors beside GPU tensors; each call reads them again, since they may have
    changed."""
    from sonde.grid._pyramid import gpu as passes

    gpu, args = operator.kernels("triton"), told_by_tensors(operator, triton_target)
    levels = tuple(torch.cat([args[1], args[2][..., None]], -1).flatten().tolist())
    want = value_and_gradients(gpu, [args[0], None, None, *args[3:5], levels, args[6]])
    monkeypatch.setattr(passes, "_levels_on_host", lambda given: given["shapes"] is not None)
    assert same_bits(value_and_gradients(gpu, args), want)
    run = decide(gpu, args)
    first = run(*args)
    args[2] = args[2] + 10**6  # every level starts past the last row: nothing is read
    assert not run(*args).any()
    args[2] = args[2] - 10**6
    assert same_bits([run(*args)], [first])
    assert [k.phase for k in gpu.forward_pass(*args).plan("forward")]


def test_the_table_of_levels_is_found_once(triton_target):
    """The first call writes the table of levels; once that is done, later calls return the same tensor without a lookup."""
    from sonde.grid._pyramid import gpu_levels

    find = gpu_levels.LevelTable((3, 5, 0, 2, 2, 15), torch.device(triton_target.device, 0 if HAS_GPU else None))
    first = find()
    if HAS_GPU:
        torch.cuda.synchronize()
    assert find().tolist() == first.tolist() == [[3, 5, 0], [2, 2, 15]]
    assert find() is find.tensor


@pytest.mark.slow
@pytest.mark.parametrize("operator", PYRAMIDS, ids=str)
@pytest.mark.parametrize("case", ["odd_sizes", "logits", "zeros"])
def test_candidates_agree_with_the_reference(operator, case, triton_target, monkeypatch):
    """Any configuration a search may pick is right: candidates from both ends of the list, on the tensors a call passes to the
    kernels."""
    if case not in operator.cases.SMALL:
        pytest.skip("an option of the other operator")
    monkeypatch.setattr(bench, "time_us", lambda run, *args, **keywords: (1.0,))
    met, bind = {}, Tunable.bind

    def noted(self, problem, tensors):
        if self.tunable(problem):
            met.setdefault((self.name, problem), (self, [t if t is None else t.clone() for t in tensors]))
        return bind(self, problem, tensors)

    monkeypatch.setattr(Tunable, "bind", noted)
    with sonde.jit.settings.set(sonde.jit.PickAny):
        sonde.jit.winners.forget()  # so that this call prepares its launch again
        args = leaves(operator.make(case, device=triton_target.device))
        out = operator.call("triton")(*args)
        torch.autograd.grad(out, [args[i] for i in floats(args)], cotangents([out]))
    assert {name for name, _ in met} == {operator.path, f"{operator.path}_gradients"}
    for (name, problem), (kernel, tensors) in met.items():
        configs = kernel.fitting(problem)
        assert configs[0] == kernel.default(problem)
        assert len(configs) > 10
        trials = bench.Bench(kernel, problem, tensors)
        for config in (*configs[:3], configs[len(configs) // 2], configs[-1]):
            _, cause, error, _ = trials.trial(config, None)
            assert cause is None, f"{name} {config}: {cause}"
            assert error < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("operator", PYRAMIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_levels_that_only_the_device_knows(operator, dtype, triton_target):
    """Device-side levels, strided or not, give the same bits as levels the host knows. On a GPU two results are only close: the
    features' gradient, whose order of additions is not fixed, and the aggregation's value, where the compiler fuses different
    products and sums."""
    gpu, args = operator.kernels("triton"), told_by_tensors(operator, triton_target)
    shapes, starts = args[1].to(dtype), args[2].to(dtype)
    levels = tuple(torch.cat([shapes, starts[..., None]], -1).flatten().tolist())
    known = [args[0], None, None, *args[3:5], levels, args[6]]
    strided = torch.stack([shapes, shapes], -1)[..., 0], torch.stack([starts, starts], -1)[..., 0]
    for mode in (False, True):
        want = value_and_gradients(gpu, known, mode)
        for told in ((shapes, starts), strided):
            got = value_and_gradients(gpu, [args[0], *told, *args[3:]], mode)
            exact = [True] * 4
            if not triton_target.interpreted:
                exact = [operator.name != "deformable_aggregation", mode, True, True]
            for a, b, bits in zip(got, want, exact, strict=True):
                assert same_bits([a], [b]) if bits else torch.allclose(a, b, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("operator", PYRAMIDS, ids=str)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("values", [pytest.param(WRONG, marks=pytest.mark.slow, id="wrong"), pytest.param(ABSURD, id="absurd")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_outside_is_read_whatever_tensors_say(operator, values, seed, dtype, triton_target):
    """Levels that overlap, run past the rows or are absurd: what lies within the rows counts, and nothing else is touched."""
    gpu, args = operator.kernels("triton"), told_by_tensors(operator, triton_target, dtype=dtype)
    g = torch.Generator().manual_seed(seed)
    for i in (1, 2):
        bad = torch.tensor(values)[torch.randint(len(values), args[i].shape, generator=g)].to(args[i].device)
        args[i] = torch.where(torch.rand(args[i].shape, generator=g).to(args[i].device) < 0.4, bad, args[i])
    got, want = value_and_gradients(gpu, args), expected(operator, args)
    if values is WRONG:  # the reference itself overflows on absurd numbers
        bound = 1e-5 if dtype == torch.float32 else 1e-2
        for a, b in zip(got, want):
            torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)
    for a in [*got, *value_and_gradients(gpu, args, True)]:
        assert a.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_level_wider_than_all_rows(triton_target, dtype):
    """A level of two rows of pixels whose ends lie within the features, but whose internal offsets do not fit into 32 bits."""
    C, S, W = 64, 100, 2**25
    device, level, features = triton_target.device, torch.tensor([[2, W]]), torch.ones(1, S, C, dtype=dtype)
    place, start = torch.tensor([10 / W, 0.5]), torch.tensor([2 - W])
    aggregation = features, level[None], start[None], place.view(1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 1, 1)
    attention = features.view(1, S, 1, C), level, start, place.view(1, 1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 1)
    for name, tensors in (("deformable_aggregation", aggregation), ("ms_deform_attn", attention)):
        args = [*(redzone(t.to(device)) if t.is_floating_point() else t.to(device) for t in tensors), (), False]
        for mode in (False, True):
            assert all(a.isfinite().all() for a in value_and_gradients(OPERATORS[name].kernels("triton"), args, mode))


@pytest.mark.slow
def test_numbers_that_came_past_the_checks(triton_target):
    """The registered operator may be called with any numbers, unchecked; the kernels mask them as they mask tensors."""
    for operator in PYRAMIDS:
        *others, levels, flag = operator.registered(*operator.make("odd_sizes", device=triton_target.device))
        levels = (levels[0] + 3, *levels[1:5], levels[5] + 50, *levels[6:])
        args = [redzone(others[0]), *others[1:3], *map(redzone, others[3:]), levels, flag]
        for mode in (False, True):
            for a, b in zip(value_and_gradients(operator.kernels("triton"), args, mode), expected(operator, args)):
                torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_slices_of_an_anchor(triton_target):
    """With few anchors of many points, the partial sums are added in a fixed order, whatever the batch."""
    operator = OPERATORS["deformable_aggregation"]
    sizes = dict(C=3, H=4, W=5, Q=1, D=150, heads=2, cams=2, L=1)
    args = operator.make(B=2, **sizes, device=triton_target.device)
    plan = sonde.explain(operator.call("triton"), *args)
    assert [(k.name, k.writes) for k in plan.kernels] == [("_aggregate", ()), ("_total", ("out",))]
    with poisoned():
        out = operator.call("triton")(*args)
    torch.testing.assert_close(out, operator.reference(*args), rtol=1e-5, atol=1e-6)
    again, first = (
        operator.call("triton")(*args),
        operator.call("triton")(*[a[:1] if isinstance(a, torch.Tensor) else a for a in args]),
    )
    assert same_bits([out, out[:1]], [again, first])


def test_deterministic_gradient_of_levels_that_overlap(triton_target):
    """A row shared by two levels gets the gradients of both."""
    operator = OPERATORS["ms_deform_attn"]
    args = told_by_tensors(operator, triton_target)
    args[2] = torch.zeros_like(args[2])
    with deterministic():
        got = value_and_gradients(operator.kernels("triton"), args, True)
    for a, b in zip(got, expected(operator, args)):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
