"""A pass is recorded once; its launches, its allocations and its plan all come from that record."""

import gc
import weakref

import torch
from torch import Tensor

from sonde.jit import Pass
from sonde.op.plan import Determinism

CPU = torch.device("cpu")


def doubled(n: int = 1000, x: Tensor | None = None) -> Pass:
    """Two steps over a buffer: out = 2x + 1."""
    p = Pass(CPU, torch.float32, dict(x=torch.empty(n, device="meta") if x is None else x))
    (twice,) = p.call("torch.mul", lambda x: 2 * x, ["x"], [("twice", [n], torch.float32)])
    out = p.buffer("out", [n], torch.float32)
    p.call("torch.add", lambda twice, out: out.copy_(twice).add_(1), [twice, out], writes=["out"])
    return p.returns(out).returning_one()


def test_runs_in_order_and_takes_further_arguments():
    """Steps run in order; the pass's arguments come first, and further values of the schema are ignored."""
    run = doubled(3).bind()
    assert run(torch.tensor([1.0, 2, 3]), "an option", 7).tolist() == [3, 5, 7]
    assert run(torch.zeros(3)).tolist() == [1, 1, 1]


def test_plan_lists_what_runs():
    p = doubled()
    assert [(k.name, k.writes, k.phase) for k in p.plan("backward")] == [
        ("torch.mul", (), "backward"),
        ("torch.add", ("out",), "backward"),
    ]
    assert [k.workspace for k in p.plan("forward")] == [0, 4000]  # the result is not allocated yet in the first step


def test_buffers_live_as_long_as_steps_take_them():
    """A buffer is freed after its last use, before a later step allocates; the plan counts it only while it is live."""
    seen: list[weakref.ref] = []
    p = Pass(CPU, torch.float32, dict(x=torch.empty(256, device="meta")))

    def noted(x: Tensor, buffer: Tensor) -> None:
        seen.append(weakref.ref(buffer))

    def free_by_now(x: Tensor, buffer: Tensor) -> None:
        gc.collect()
        assert seen[0]() is None
        seen.append(weakref.ref(buffer))

    first, second = p.buffer("first", [256], torch.float32), p.buffer("second", [128], torch.float64)
    p.call("first", noted, ["x", first])
    p.call("second", free_by_now, ["x", second], scratch=100)
    assert [k.workspace for k in p.plan("forward")] == [1024, 1124]
    p.returns().bind()(torch.zeros(256))
    assert len(seen) == 2


def test_views_keep_their_memory_and_cost_nothing():
    p = Pass(CPU, torch.float32, dict(x=torch.empty(4, 2, device="meta")))
    out = p.buffer("out", [4, 2], torch.float32, fill=7)
    for start in (0, 2):
        rows, source = p.rows(out, start, start + 1), p.rows("x", start, start + 1)
        p.call("copy", lambda rows, source: rows.copy_(source), [rows, source])
    p.returns(out)
    assert {k.workspace for k in p.plan("forward")} == {0}
    got = p.bind()(torch.ones(4, 2))
    assert got[0].tolist() == [[1, 1], [7, 7], [1, 1], [7, 7]]


def test_only_what_is_not_contiguous_is_copied():
    """Contiguous arguments are not copied; others are copied once, however many steps use them."""
    x, y = torch.zeros(3, 5).t(), torch.zeros(5, 3)
    p = Pass(CPU, torch.float32, dict(x=x, y=y, absent=None))
    assert p.contiguous("absent") is None
    assert p.contiguous("y") == "y"
    assert p.contiguous("x") == p.contiguous("x") != "x"
    seen: list[Tensor] = []
    p.call("see", seen.append, [p.contiguous("x")])
    assert [k.workspace for k in p.plan("forward")] == [60]
    p.returns().bind()(x, y, None)
    assert seen[0].is_contiguous()


def test_what_is_absent_is_none():
    """A kernel gets None for a pointer that it does not read and for an absent argument."""
    p = Pass(CPU, torch.float32, dict(x=torch.empty(2), depths=None))
    seen: list[tuple] = []
    p.call("see", lambda *taken: seen.append(taken), ["x", None, "depths"])
    p.returns().bind()(torch.zeros(2), None)
    assert seen[0][1:] == (None, None)


def test_results_that_no_step_touches_are_there():
    """Results that no step writes, such as empty ones, are allocated all the same, even in a pass without steps."""
    for steps in (0, 1):
        p = Pass(CPU, torch.float32, dict(x=torch.empty(2)))
        out = p.buffer("out", [0, 3], torch.float16)
        for _ in range(steps):
            p.call("nothing", lambda x: None, ["x"])
        (got,) = p.returns(out).bind()(torch.zeros(2))
        assert got.shape == (0, 3)
        assert got.dtype == torch.float16


def test_slots_of_one_name_are_two():
    p = Pass(CPU, torch.float32, dict(x=torch.empty(1)))
    names = [p.buffer("keys", [1], torch.int32) for _ in range(3)]
    assert len({*names, "x"}) == 4
    assert p.buffer("x", [1], torch.int32) != "x"


def test_every_run_has_buffers_of_its_own():
    """A bound pass keeps nothing of a call: no results, no arguments, nor those that it was recorded with."""
    x = torch.zeros(8)
    run = doubled(8, x).bind()
    first, second = run(x), run(x)
    assert first.data_ptr() != second.data_ptr()
    kept = [weakref.ref(t) for t in (x, first)]
    del x, first
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_a_pass_that_was_read_is_gone_without_the_collector():
    """A recorded pass holds its arguments: a reference cycle would keep their memory until the garbage collector runs."""
    gc.collect()
    gc.disable()
    try:
        x = torch.zeros(8)
        p = doubled(8, x)
        run, plan = p.bind(), p.plan("forward")
        seen = [weakref.ref(x), weakref.ref(p)]
        del x, p
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
    assert len(plan) == 2
    assert run(torch.zeros(8)).sum() == 8


def test_promises_and_accumulators_are_those_of_the_step():
    p = Pass(CPU, torch.float32, dict(x=torch.empty(1)))
    p.call("a", lambda x: None, ["x"], promise=Determinism.RUN_TO_RUN)
    p.call("b", lambda x: None, ["x"])
    assert [k.determinism for k in p.plan("forward")] == [Determinism.RUN_TO_RUN, Determinism.BATCH_INVARIANT]
    assert {k.accumulator for k in p.plan("forward")} == {torch.float32}
