"""What a plan says about a search: which kernels run, what depends on the batch, how much memory an index takes."""

from functools import partial
from importlib import import_module

import pytest
import torch

import sonde
from helpers.memory import Allocations
from sonde.op.plan import Determinism
from sonde.points._search import arguments

pytestmark = pytest.mark.interpreted(False)  # seconds each in the interpreter; a few tests stand for all

CALLS = {
    "knn": lambda q, p, f, s, **options: sonde.knn(q, p, 3, **options).distances,
    "radius_neighbors": lambda q, p, f, s, **options: sonde.radius_neighbors(q, p, 0.5, 3, **options).distances,
    "radius_search": lambda q, p, f, s, **options: sonde.radius_search(q, p, 0.5, **options).distances,
    "knn_aggregate": lambda q, p, f, s, **options: sonde.knn_aggregate(q, p, f, 3, s, **options),
    "radius_aggregate": lambda q, p, f, s, **options: sonde.radius_aggregate(q, p, f, 0.5, s, **options),
}
HELP = {"add"}  # adds up another kernel's output


def made(B: int = 1, M: int = 20, N: int = 30) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (B, M, 3), (B, N, 3), (B, N, 2)
    return [*(torch.rand(*shape, generator=g).requires_grad_() for shape in shapes), torch.full((B,), 0.1, requires_grad=True)]


@pytest.mark.parametrize("name", CALLS)
def test_what_runs_on_a_cpu_is_what_was_planned(name, numba_target, monkeypatch):
    """The kernels that run are those of the plan, by name and in order, apart from torch's own."""
    args = made()
    given = args if "aggregate" in name else args[:2]
    plan = sonde.explain(CALLS[name], *args)
    written = [w for k in plan.kernels for w in k.writes if k.phase == "backward"]
    assert sorted(written) == sorted(["queries", "points", "features", "sigma"][: len(given)])
    ran = []
    for module in ("op.cpu", "points._search.cpu_segments"):
        found = import_module(f"sonde.{module}")
        real = found.run
        monkeypatch.setattr(found, "run", lambda k, *a, real=real, **o: (ran.append(k.__name__), real(k, *a, **o)))
    torch.autograd.grad(CALLS[name](*args).sum(), given)
    assert [k for k in ran if k not in HELP] == [k.name for k in plan.kernels if not k.name.startswith("torch.")]


@pytest.mark.parametrize("name", ["knn_aggregate", "radius_aggregate"])
def test_the_batch_splits_the_sum_of_a_width(name, numba_target):
    """torch sums σ's gradient over all queries and splits long sums by the full shape, so the plan promises only run-to-run
    bits."""
    args = made(2, 40_000, 20)
    (kernel,) = [k for k in sonde.explain(CALLS[name], *args).kernels if "sigma" in k.writes]
    assert (kernel.name, kernel.determinism, kernel.phase) == ("torch.sum", Determinism.RUN_TO_RUN, "backward")

    def bits(rows: int) -> list[torch.Tensor]:
        given = [a[:rows] for a in args]
        return [g[:1] for g in torch.autograd.grad(CALLS[name](*given).square().sum(), given)]

    assert all(map(torch.equal, bits(2), bits(2)))
    assert all(map(torch.equal, bits(1)[:3], bits(2)[:3]))


def size(tensors) -> int:
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", CALLS)
def test_an_index_takes_memory(name, target, monkeypatch):
    """An index that the call builds counts as workspace while it is needed; one passed in does not."""
    monkeypatch.setattr(arguments, "PAIRS", 0)
    args = [a.detach().to(target.device).requires_grad_() for a in made(2, 30, 200)]
    call = partial(CALLS[name], impl=target.impl)
    queries, points, *_ = args
    index = sonde.PointIndex.build(points, impl=target.impl)
    of_points = size(index[:3])  # a call that builds its own needs no hash
    of_queries = size(sonde.PointIndex.build(queries, impl=target.impl)[:3]) if target.impl == "triton" else 0
    given, own = sonde.explain(call, *args, index=index), sonde.explain(call, *args)
    built = sonde.explain(lambda: sonde.PointIndex.build(points, impl=target.impl))
    assert own.operator.endswith(given.operator)
    assert own.kernels[0].workspace == built.kernels[0].workspace + of_points
    keeps = name == "radius_aggregate"
    for mine, theirs in zip(own.kernels[len(built.kernels) :], given.kernels, strict=True):
        needed = keeps or theirs.phase == "forward"
        assert mine.workspace == theirs.workspace + needed * of_points
        assert theirs.workspace >= needed * of_queries


@pytest.mark.parametrize("name", CALLS)
def test_workspace_of_a_whole_call(name, numba_target):
    """The memory a call allocates on its way, its index included, is what the plan says."""
    args = [a.detach() for a in made(1, 10, 20_000)]
    args[0] += 10  # no point is within the radius
    CALLS[name](*args)
    plan = sonde.explain(CALLS[name], *args)
    with Allocations() as seen:
        CALLS[name](*args)
    assert 0.9 * seen.peak <= plan.workspace + 8192
    assert plan.workspace <= 1.1 * seen.peak + 8192
