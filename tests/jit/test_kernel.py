"""How a kernel chooses its configuration: policy, store, shipped winners and its own predicate."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import timeit
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

import sonde
from helpers.operators import Target
from sonde import jit
from sonde.jit import PickAny, PickBest, PickFixed, PickStored, Unsupported, settings, store, winners
from sonde.jit import launch as launching
from sonde.jit import search as search_module
from sonde.jit.kernel import _searched, dtypes_of
from sonde.jit.store import open_store
from sonde.jit.timing import Trial
from sonde.op import cache
from sonde.operators import OPERATORS

DEVICE = torch.device(Target("triton").device)
DOCS = Path(__file__).parents[2] / "docs" / "tuning.md"


class Problem(NamedTuple):
    n: int
    factor: int = 2
    wide: torch.dtype = torch.float32


class Config(NamedTuple):
    block: int
    num_warps: int = 4


class Other(NamedTuple):
    size: int


@triton.jit(do_not_specialize=["N"])
def _scale(x, out, told, N, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, FACTOR * tl.load(x + i, mask=i < N), mask=i < N)
    tl.store(told, BLOCK)


@triton.jit(do_not_specialize=["N"])
def _scale_again(x, out, told, N, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < N) * FACTOR, mask=i < N)
    tl.store(told, BLOCK)


def made(function=_scale, **changes) -> jit.Tunable:
    """``out = FACTOR · x``; records the block size it ran with: 16 by default, 128 only for n of at least 13."""
    return jit.kernel(
        function,
        "test.scale",
        **dict(
            default=lambda p: Config(16),
            candidates=lambda p: [Config(16), Config(32), Config(64), Config(128), Config(32)],
            launch=lambda p, c: jit.Launch((-(-p.n // c.block), 1, 1), (p.n,), (p.factor, c.block), c.num_warps),
            sizes=("n",),
            writes=(1, 2),
            fits=lambda p, c: c.block <= 10 * p.n,
            expected=lambda p, x, out, told: {1: p.factor * x},
        )
        | changes,
    )


def tensors(problem: Problem) -> list[torch.Tensor]:
    x = torch.arange(problem.n, dtype=torch.float32, device=DEVICE)
    return [x, torch.full_like(x, -1), torch.zeros(1, dtype=torch.int32, device=DEVICE)]


def ran(kernel: jit.Tunable, problem: Problem) -> int:
    """The block size that a call really ran with."""
    x, out, told = tensors(problem)
    kernel(problem, x, out, told)
    assert torch.equal(out, problem.factor * x)
    return int(told)


def key_of(kernel: jit.Tunable, problem: Problem) -> store.Key:
    return kernel.key(problem, dtypes_of(tensors(problem)), DEVICE)


def remember(kernel: jit.Tunable, problem: Problem, config: dict) -> None:
    open_store().record(key_of(kernel, problem), [Trial(config, (1.0,) * 5)])
    winners.forget()


def ship(folder: Path, kernel: jit.Tunable, problem: Problem, config: dict) -> None:
    key = key_of(kernel, problem)
    row = dict(key._asdict(), config=config, median_us=1.0, timings=20, at=0)
    (folder / f"{winners.slug(key.device)}.json").write_text(json.dumps(dict(format=1, winners=[row])))
    winners.shipped.cache_clear()
    winners.forget()


@pytest.fixture(autouse=True)
def shipped(monkeypatch, tmp_path):
    """An empty store and an empty folder of shipped winners."""
    monkeypatch.setenv("SONDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_stores", {})
    monkeypatch.setattr(cache, "_warned", set())
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(winners, "SHIPPED", folder)
    winners.shipped.cache_clear()
    winners.forget()
    _searched.clear()
    yield folder
    winners.shipped.cache_clear()
    winners.forget()
    _searched.clear()


@pytest.fixture
def searched(monkeypatch) -> list:
    """A search that times nothing and prefers large blocks; returns the list of requests it got."""
    asked = []

    def search(kernel, problem, tensors, *, num_workers, max_configs=None, budget_s=None, progress=None):
        asked.append((kernel.name, problem, settings.current()))
        configs = search_module.candidates(kernel, problem, max_configs)
        trials = [Trial(config, (1000.0 / sum(c for c in config if isinstance(c, int)),) * 5) for config in configs]
        for i, trial in enumerate(trials):
            if progress:
                progress(i + 1, len(trials), trial, trial)
        return trials

    monkeypatch.setattr(search_module, "search", search)
    return asked


@pytest.fixture
def plain(monkeypatch):
    """Kernels run in PyTorch, since Triton's interpreter serves one thread at a time."""

    def bind(function, tensors, launch):
        factor, block = launch.constants
        return lambda x, out, told: (out.copy_(factor * x), told.fill_(block))

    monkeypatch.setattr(launching, "bind", bind)


# --- the order of choice


def test_order_of_choice(shipped):
    """Stored comes before shipped, shipped before default; the next call sees a change of the store."""
    kernel, problem = made(), Problem(20)
    assert ran(kernel, problem) == 16
    ship(shipped, kernel, problem, dict(block=32, num_warps=4))
    assert ran(kernel, problem) == 32
    remember(kernel, problem, dict(block=64, num_warps=4))
    assert ran(kernel, problem) == 64
    choice = kernel.choose(problem, dtypes_of(tensors(problem)), DEVICE)
    assert (choice.config, choice.origin, choice.candidates, choice.key) == (Config(64), "tuned", 4, key_of(kernel, problem))
    open_store().clear()
    winners.forget()
    assert ran(kernel, problem) == 32
    assert kernel.choose(problem, dtypes_of(tensors(problem)), DEVICE).origin == "shipped"


def test_winners_of_other_packages(shipped, monkeypatch, tmp_path):
    """Other packages' winners are used like our own, and ours take precedence where both have one."""
    monkeypatch.setattr(winners, "_more", [])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    kernel, problem = made(), Problem(20)
    ship(theirs, kernel, problem, dict(block=64, num_warps=4))
    assert ran(kernel, problem) == 16
    jit.ship(theirs)
    jit.ship(theirs)
    assert winners._more == [theirs]
    assert ran(kernel, problem) == 64
    ship(shipped, kernel, problem, dict(block=32, num_warps=4))
    assert ran(kernel, problem) == 32


def test_predicate_is_asked_on_every_hit(shipped):
    """The predicate is checked on every hit: of two problems that share a bucket, the winner fits only one."""
    kernel, large, small = made(), Problem(14), Problem(9)
    assert key_of(kernel, large) == key_of(kernel, small)
    remember(kernel, large, dict(block=128, num_warps=4))
    assert (ran(kernel, large), ran(kernel, small)) == (128, 16)
    ship(shipped, kernel, large, dict(block=64, num_warps=4))
    assert (ran(kernel, large), ran(kernel, small)) == (128, 64)
    ship(shipped, kernel, large, dict(block=128, num_warps=4))
    assert ran(kernel, small) == 16


@pytest.mark.parametrize("config", [dict(block=64), dict(block=64, num_warps=4, tiles=1), dict(size=64)])
def test_configurations_of_another_version_are_passed_over(config):
    kernel, problem = made(), Problem(20)
    remember(kernel, problem, config)
    assert ran(kernel, problem) == 16


@pytest.mark.parametrize("value", [-64, 0, True, 64.0, "64", None, math.nan, 2**31 - 1, 10**30, [64], {"block": 64}])
@pytest.mark.parametrize("field", ["block", "num_warps"])
@pytest.mark.filterwarnings("ignore:sonde")
def test_values_that_no_candidate_could_have_are_passed_over(shipped, field, value):
    """Values that no candidate has are skipped, in the store and among shipped winners; valid winners there still count."""
    kernel, problem = made(), Problem(20)
    config = dict(block=64, num_warps=4) | {field: value}
    remember(kernel, problem, config)
    assert ran(kernel, problem) == 16
    ship(shipped, kernel, problem, dict(block=32, num_warps=4))
    assert ran(kernel, problem) == 32
    open_store().clear()
    ship(shipped, kernel, problem, config)
    assert ran(kernel, problem) == 16


def test_a_predicate_that_fails_at_such_values():
    kernel, problem = made(fits=lambda p, c: 100 % (c.block - 77) < 1000), Problem(20)
    remember(kernel, problem, dict(block=77, num_warps=4))
    assert ran(kernel, problem) == 16


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', '{"format": true, "winners": []}', "\ud800", "[" * 5000])
def test_shipped_winners_that_are_damaged(shipped, text):
    """A damaged file of shipped winners gives one warning, and the default runs."""
    kernel, problem = made(), Problem(20)
    ship(shipped, kernel, problem, dict(block=32, num_warps=4))
    (file,) = shipped.iterdir()
    file.write_bytes(text.encode(errors="surrogatepass"))
    winners.shipped.cache_clear()
    with pytest.warns(RuntimeWarning, match="is damaged; of its winners, these are ignored"):
        assert ran(kernel, problem) == 16


@pytest.mark.parametrize("policy", [PickAny, PickBest])
def test_a_winner_that_does_not_compile_here(monkeypatch, shipped, policy):
    """A winner that no longer compiles gives one warning; the next in order runs, and the plan shows that one."""
    kernel, problem, bind, asked = made(), Problem(20), launching.bind, []

    def fail(function, tensors, launch):
        asked.append(launch.constants[1])
        if launch.constants[1] > 16:
            raise RuntimeError("PassManager::run failed")
        return bind(function, tensors, launch)

    monkeypatch.setattr(launching, "bind", fail)
    remember(kernel, problem, dict(block=64, num_warps=4))
    ship(shipped, kernel, problem, dict(block=32, num_warps=4))
    with (
        settings.set(policy),
        pytest.warns(RuntimeWarning, match="test.scale: the tuned .* cannot run here, going on with Config.block=16") as caught,
    ):
        assert ran(kernel, problem) == 16
    assert len(caught) == 1
    assert asked == [64, 32, 16]
    assert ran(kernel, Problem(21)) == 16  # and it is not tried again
    assert asked == [64, 32, 16, 16]
    assert kernel.choose(problem, dtypes_of(tensors(problem)), DEVICE).origin == "default"
    with settings.set(PickStored), pytest.raises(Unsupported):
        ran(kernel, problem)
    monkeypatch.setattr(launching, "bind", lambda *args: fail(None, None, jit.Launch((1, 1, 1), (), (0, 99))))
    with pytest.raises(RuntimeError, match="PassManager"):  # nothing comes after the default, so its error reaches the caller
        ran(kernel, Problem(22))


def test_a_default_that_is_too_large_for_the_device(monkeypatch):
    """The first candidate that the device has room for runs instead, with a warning; without one, an error says what to do."""
    kernel, problem, bind, room = made(), Problem(20), launching.bind, [32, 64, 128]

    def fail(function, tensors, launch):
        if launch.constants[1] not in room:
            raise triton.runtime.errors.OutOfResources(133120, 101376, "shared memory")
        return bind(function, tensors, launch)

    monkeypatch.setattr(launching, "bind", fail)
    text = r"test.scale: the default Config\(block=16.* cannot run here, going on with Config\(block=32.*shared memory"
    with pytest.warns(RuntimeWarning, match=text) as caught:
        assert ran(kernel, problem) == 32
    assert len(caught) == 1
    choice = kernel.choose(problem, dtypes_of(tensors(problem)), DEVICE)
    assert (choice.config, choice.origin) == (Config(32), "default")
    room.clear()
    with pytest.raises(Unsupported, match="no configuration fits this device; impl='reference'"):
        ran(kernel, Problem(40))
    with settings.set(PickFixed(Config(16))), pytest.raises(triton.runtime.errors.OutOfResources):
        ran(kernel, Problem(40))


def test_nothing_to_choose():
    """With no candidates, one that fits, or no reference to check them, the default runs under every policy, without a key."""
    for kernel in (made(expected=None), made(candidates=None), made(candidates=lambda p: [Config(16), Config(1 << 20)])):
        assert not kernel.tunable(Problem(20))
        for policy in (PickAny, PickBest, PickStored):
            with settings.set(policy):
                assert ran(kernel, Problem(20)) == 16
        assert kernel.choose(Problem(20), "float32", DEVICE).key is None


def test_nothing_to_run(searched):
    """Empty problems neither start a search nor raise because nothing is stored."""
    for policy in (PickAny, PickBest, PickStored):
        with settings.set(policy):
            made(fits=lambda p, c: True)(Problem(0), *tensors(Problem(0)))
    assert not searched


def test_key():
    """The key holds sizes rounded to powers of two, and exact constants, dtypes and source."""
    kernel = made()
    key = key_of(kernel, Problem(16))
    assert json.loads(key.bucket) == dict(n=5)
    assert json.loads(key.constants) == dict(factor=2, wide="torch.float32")
    assert key.dtypes == "float32 float32 int32"
    assert key_of(kernel, Problem(31)) == key
    others = [key_of(kernel, p) for p in (Problem(15), Problem(32), Problem(16, 3), Problem(16, 2, torch.float64))]
    others += [key_of(made(_scale_again), Problem(16)), kernel.key(Problem(16), "float64 float64 int32", DEVICE)]
    assert len({key, *others}) == 7


def test_winners_do_not_depend_on_the_batch():
    kernel = made(batch=("factor",))
    assert key_of(kernel, Problem(16, 2)) == key_of(kernel, Problem(16, 3))


def test_changed_source_forgets_what_was_tuned():
    before, after, same = made(), made(_scale_again), made()
    assert before.source == same.source != after.source
    remember(before, Problem(20), dict(block=64, num_warps=4))
    assert (ran(before, Problem(20)), ran(same, Problem(20)), ran(after, Problem(20))) == (64, 64, 16)


# --- policies


@pytest.mark.parametrize("config", [Config(64), dict(block=64, num_warps=4)])
def test_fixed(config):
    kernel = made()
    remember(kernel, Problem(20), dict(block=32, num_warps=4))
    with settings.set(PickFixed(config)):
        assert ran(kernel, Problem(20)) == 64
        assert kernel.choose(Problem(20), "float32", DEVICE).origin == "fixed"
    assert ran(kernel, Problem(20)) == 32


@pytest.mark.parametrize("config", [Other(64), dict(size=64)])
def test_fixed_for_another_kernel(config):
    """A fixed configuration applies only to those kernels of a pass that have its fields."""
    with settings.set(PickFixed(config)):
        assert ran(made(), Problem(20)) == 16


def test_fixed_that_does_not_fit():
    with settings.set(PickFixed(Config(128))), pytest.raises(Unsupported, match=r"test.scale: Config\(block=128.* does not fit"):
        ran(made(), Problem(9))


def test_stored(shipped):
    kernel, problem = made(), Problem(20)
    ship(shipped, kernel, problem, dict(block=32, num_warps=4))
    with settings.set(PickStored):
        with pytest.raises(Unsupported, match=r"test.scale: nothing is stored for Problem\(n=20.*sonde tune"):
            ran(kernel, problem)
        remember(kernel, problem, dict(block=64, num_warps=4))
        assert ran(kernel, problem) == 64


def test_threads_have_their_own(plain):
    """Two threads that alternate on one kernel each keep their own policy."""
    kernel, together, found = made(), threading.Barrier(2), {32: [], 64: []}

    def work(block: int) -> None:
        with settings.set(PickFixed(Config(block))):
            for _ in range(10):
                together.wait(30)
                found[block].append(ran(kernel, Problem(20)))

    threads = [threading.Thread(target=work, args=(block,)) for block in found]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == {32: [32] * 10, 64: [64] * 10}
    assert ran(kernel, Problem(20)) == 16


# --- the search


def test_best_searches_once(searched):
    """The first call searches; the winner runs at once, is stored, and serves every policy."""
    kernel = made()
    with settings.set(PickBest, num_workers=3, max_configs=3, budget_s=7):
        assert [ran(kernel, Problem(n)) for n in (20, 20, 21)] == [64, 64, 64]
    ((name, problem, now),) = searched
    assert (name, problem, now.num_workers, now.max_configs, now.budget_s) == ("test.scale", Problem(20), 3, 3, 7.0)
    assert ran(kernel, Problem(20)) == 64
    with settings.set(PickStored):
        assert ran(kernel, Problem(20)) == 64
    (winner,) = open_store().winners()
    assert (winner.key, winner.config) == (key_of(kernel, Problem(20)), dict(block=64, num_warps=4))
    assert [r.trial.config["block"] for r in open_store().trials(winner.key)] == [16, 32, 64]


def test_shipped_winners_are_no_reason_not_to_search(searched, shipped):
    kernel = made()
    ship(shipped, kernel, Problem(20), dict(block=32, num_warps=4))
    with settings.set(PickBest):
        assert ran(kernel, Problem(20)) == 128
    assert len(searched) == 1


def test_again_searches_once_more(searched):
    kernel = made()
    remember(kernel, Problem(20), dict(block=32, num_warps=4))
    with settings.set(PickBest):
        assert ran(kernel, Problem(20)) == 32
    assert not searched
    with settings.set(PickBest(again=True)):
        assert [ran(kernel, Problem(n)) for n in (20, 20, 21)] == [128, 128, 128]  # 32 was timed again, too
        assert len(searched) == 1


def test_failed_search_lists_its_causes_and_lets_others_try(monkeypatch):
    kernel = made()
    monkeypatch.setattr(search_module, "search", lambda k, p, t, **o: [Trial(c, cause=f"no {c.block}") for c in k.fitting(p)])
    with settings.set(PickBest), pytest.raises(search_module.NoConfig) as caught:
        ran(kernel, Problem(20))
    assert all(f"no {block}" in str(caught.value) for block in (16, 32, 64, 128))
    key = key_of(kernel, Problem(20))
    assert len(open_store().trials(key)) == 4
    assert open_store().claim(key, "another", 60)
    assert ran(kernel, Problem(20)) == 16


def test_a_call_survives_candidates_that_fail_and_says_so(monkeypatch, caplog):
    """Some candidates crash the compiler: the best of the others runs, and one line of the log lists the failures with causes."""

    def search(kernel, problem, tensors, **options):
        causes = {16: "compiler crashed (signal 6)\nassertion", 32: "RuntimeError: PassManager::run failed"}
        return [Trial(c, () if c.block in causes else (9.0,) * 5, causes.get(c.block)) for c in kernel.fitting(problem)]

    monkeypatch.setattr(search_module, "search", search)
    with settings.set(PickBest):
        assert ran(made(), Problem(20)) == 64
    (record,) = caplog.records
    text = "test.scale: 2 of 4 candidates cannot be used: Config(block=16, num_warps=4): compiler crashed (signal 6); "
    assert record.getMessage() == f"{text}Config(block=32, num_warps=4): RuntimeError: PassManager::run failed"


def test_a_call_survives_a_machine_that_cannot_search(monkeypatch, caplog):
    """The disk is full where a search writes its tensors: the default runs, untuned, and the next process tries again."""
    monkeypatch.setattr(
        search_module.workers, "precompile", lambda kernel, problem, configs, *rest: ((c, 0.0, None) for c in configs)
    )

    def full(*args, **options):
        raise RuntimeError("PytorchStreamWriter failed writing file: no space left on device")

    monkeypatch.setattr(torch, "save", full)
    kernel = made()
    object.__setattr__(kernel, "module", "test_kernel")
    kernel.__dict__["attribute"] = "kernel"
    with settings.set(PickBest):
        assert ran(kernel, Problem(20)) == 16
    assert "test.scale: the search could not be made: its tensors cannot be written to " in caplog.text
    assert "no space left" in caplog.text
    assert not open_store().trials()
    assert open_store().claim(key_of(kernel, Problem(20)), "another", 60)


def test_waits_for_whoever_is_tuning(searched):
    kernel, key = made(), key_of(made(), Problem(20))
    assert open_store().claim(key, "another", 60)
    timer = threading.Timer(0.3, lambda: open_store().record(key, [Trial(dict(block=32, num_warps=4), (1.0,))]))
    timer.start()
    with settings.set(PickBest):
        assert ran(kernel, Problem(20)) == 32
    timer.join()
    assert not searched


def test_two_threads_do_not_search_at_once(searched, plain, monkeypatch):
    """The second thread waits for the first, as another process would."""
    kernel, slow, entered = made(), search_module.search, threading.Event()

    def search(*args, **options):
        entered.set()
        threading.Event().wait(0.5)
        return slow(*args, **options)

    monkeypatch.setattr(search_module, "search", search)
    found = []

    def work() -> None:
        with settings.set(PickBest):
            found.append(ran(kernel, Problem(20)))

    first, second = threading.Thread(target=work), threading.Thread(target=work)
    first.start()
    assert entered.wait(30)
    second.start()
    first.join()
    second.join()
    assert found == [128, 128]
    assert len(searched) == 1


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_one_rank_tunes_and_the_others_wait(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("rank.py"))]
    options = dict(stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    ranks = [subprocess.Popen([*command, str(i), "3", str(tmp_path / "meet")], **options) for i in range(3)]
    told = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]  # torch 2.9's gloo also prints
    assert told[0] == told[1] == told[2]
    assert [block for block, _ in told[0]] == [64] * 3
    assert sum(len(searches) for _, searches in told[0]) == 1


def test_nothing_is_searched_during_capture(searched, monkeypatch):
    monkeypatch.setattr(winners, "_capturing", lambda: True)
    for policy in (PickBest, PickStored, PickFixed(Config(64))):
        with settings.set(policy):
            assert ran(made(), Problem(20)) == 16
    assert not searched


def test_policy_reaches_the_backward_pass(searched):
    """The backward pass uses the policy of its forward call, wherever backward() is called."""
    sizes = dict(B=1, C=4, H=3, W=3, Q=2, D=2, heads=1)  # two candidates with few warps: Triton 3.6 fails at one with many
    args = [a.requires_grad_() for a in OPERATORS["sample_sum"].cases.make(**sizes, device=DEVICE.type)]
    sonde.sample_sum(*args, impl="triton").sum().backward()  # a call prepared earlier under another policy is not reused
    assert not searched
    with settings.set(PickBest, max_configs=2):
        out = sonde.sample_sum(*args, impl="triton")
    assert [name for name, *_ in searched] == ["grid.rows"]
    out.sum().backward()
    assert [name for name, *_ in searched] == ["grid.rows", "grid.form"]
    assert type(searched[-1][2].policy) is PickBest
    open_store().clear()
    winners.forget()
    out = sonde.sample_sum(*args, impl="triton")
    with settings.set(PickBest):
        out.sum().backward()
    assert len(searched) == 2


# --- cost


@pytest.mark.parametrize("policy", [PickAny, PickBest, PickFixed(Config(32))])
def test_known_choice_costs_next_to_nothing(monkeypatch, policy):
    """A choice that is known costs the host about two microseconds; the bound leaves room for busy machines."""
    monkeypatch.setattr(jit.Tunable, "bind", lambda self, problem, tensors: lambda *tensors: None)
    kernel, problem = made(), Problem(20)
    given = tensors(problem)
    with settings.set(policy):
        best = min(timeit.repeat(lambda: kernel(problem, *given), number=200, repeat=50)) / 200
    assert best < 10e-6


def test_sizes_that_always_change_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(jit.Tunable, "bind", lambda self, problem, tensors: lambda *tensors: None)
    monkeypatch.setattr("sonde.op.cache.MAX_ENTRIES", 10)
    kernel = made()
    for n in range(1, 100):
        kernel(Problem(n), *tensors(Problem(1)))
    assert len(kernel._bound) <= 10


# --- the documentation


def test_example_of_the_documentation(monkeypatch, tmp_path):
    """The example runs as printed, and its real search tries candidates in other processes."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "jit.kernel(" in block]
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    mine = importlib.import_module("mine")
    x = torch.randn(3000, device=DEVICE)
    assert torch.equal(mine.twice(x), 2 * x)
    with settings.set(PickBest, num_workers=1, max_configs=2):
        assert torch.equal(mine.twice(x), 2 * x)
    (winner,) = open_store().winners()
    assert winner.key.kernel == "mine.double"
    assert [r.trial.cause for r in open_store().trials()] == [None, None]
    monkeypatch.delitem(sys.modules, "mine")


def test_documentation_names_every_variable():
    text = DOCS.read_text()
    source = "".join(path.read_text() for path in Path(sonde.__file__).parent.rglob("*.py"))
    found = set(re.findall(r'environ(?:\.get\(|\[)"(SONDE_[A-Z_]+)"', source)) - {"SONDE_COMMIT"}  # used for benchmark records
    assert found >= {"SONDE_POLICY", "SONDE_CACHE_DIR"}
    assert all(f"| `{name}` |" in text for name in found)


class Launcher:
    """A stand-in for Triton's launcher, which passes arguments to a C function in a given order."""

    def __init__(self, order, scratch=0):
        self.order, self.global_scratch_size, self.calls, self.got = order, scratch, 0, []
        self.launch = lambda *args: self.got.append(args)

    def __call__(self, x, y, z, stream, function, metadata, hook, *args):
        self.calls += 1
        self.launch(*self.order(x, y, z, stream, function, metadata, args))


def test_a_launch_is_what_tritons_would_be():
    """Our launch passes what Triton's would, in any release's order; where more than order differs, Triton's launcher runs."""
    orders = {
        "flat": lambda x, y, z, stream, function, metadata, args: (x, y, z, stream, function, 0, None, metadata, *args),
        "packed": lambda x, y, z, stream, function, metadata, args: (x, y, z, stream, function, metadata, "iO", args),
        "other": lambda x, y, z, stream, function, metadata, args: (stream, x, y, z, function, *args),
        "changed": lambda x, y, z, stream, function, metadata, args: (x, y, z, stream, *args, 0),
        "counted": lambda x, y, z, stream, function, metadata, args: (x, y, z, stream, len(args)),
        "read": lambda x, y, z, stream, function, metadata, args: (x, y, z, stream, function, args[0] + ""),
    }
    streams = iter(range(100))
    for name, order in orders.items():
        for scratch in (0, 16):
            run = Launcher(order, scratch)
            start = launching.starter(run, (3, 2, 1), lambda: next(streams), ("f", "m", None), 2, (7, True))
            assert run.got == []
            for tensors in (("a", "b"), ("c", None)):
                start(*tensors)
                (got,) = run.got
                stream = next(i for i in got if i not in (3, 2, 1)) if name == "other" else got[3]
                assert got == order(3, 2, 1, stream, "f", "m", (*tensors, 7, True))
                run.got.clear()
            assert run.calls == (0 if name in ("flat", "packed") and not scratch else 2)


def test_registers_are_a_word_to_one_compiler():
    """Only NVIDIA's compiler gets the register limit; others do not know the option."""
    launch = jit.Launch((1, 1, 1), (), (), 2, registers=255)
    assert launch.options("cuda") == {"num_warps": 2, "num_stages": 3, "maxnreg": 255}
    assert launch.options("hip") == launch._replace(registers=None).options("cuda") == {"num_warps": 2, "num_stages": 3}
