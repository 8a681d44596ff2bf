"""The search itself, with a simulated compiler, trials and clock."""

from __future__ import annotations

import math
import time

import pytest
import torch
from toy import Config, Problem, Toy

from sonde.jit.search import NoConfig, best, candidates, search
from sonde.jit.timing import Trial, time_us

PROBLEM = Problem(2.0)


class Fake:
    """Compilations and trials with the given `outcomes`, which take time on a simulated clock."""

    def __init__(self, compile_s=1.0, trial_s=1.0, **outcomes):
        self.outcomes, self.compile_s, self.trial_s = outcomes, compile_s, trial_s
        self.now, self.tried, self.closed, self.given = 0.0, [], [], []
        self.kernel = Toy(*map(Config, outcomes))

    def precompile(self, kernel, problem, configs, tensors, num_workers, limit_s):
        try:
            for config in configs:
                self.now += self.compile_s
                outcome = self.outcomes[config.does]
                yield config, self.compile_s, outcome[8:] if str(outcome).startswith("compile:") else None
        finally:
            self.closed.append("compilers")

    def trials(self, kernel, problem, tensors):
        return self

    def trial(self, config, best_us, limit_s):
        self.tried.append(config.does)
        self.given.append(best_us)
        self.now += self.trial_s
        outcome = self.outcomes[config.does]
        if isinstance(outcome, BaseException):
            raise outcome
        if isinstance(outcome, str):
            return Trial(config, cause=outcome)
        return Trial(config, (outcome,) * 20, error=0.0)

    def close(self):
        self.closed.append("trials")

    def search(self, **options):
        made_up = dict(precompile=self.precompile, trials=self.trials, clock=lambda: self.now)
        return search(self.kernel, PROBLEM, [], num_workers=2, **made_up, **options)


def names(trials):
    return [trial.config.does for trial in trials]


def test_fastest_wins_and_losers_keep_their_causes():
    fake = Fake(default=3.0, broken="compile:no such layout", quick=1.0, liar="disagrees", dead="crashed", stuck="did not finish")
    found = fake.search()
    assert names(found) == list(fake.outcomes)
    assert best(found).config.does == "quick"
    assert [t.cause for t in found] == [None, "no such layout", None, "disagrees", "crashed", "did not finish"]
    assert all(t.compile_s == 1.0 for t in found)
    assert "broken" not in fake.tried
    assert fake.given == [None, 3.0, 1.0, 1.0, 1.0]  # the best time so far, which a trial must beat
    assert sorted(fake.closed) == ["compilers", "trials"]


def test_a_cause_never_wins():
    liar = Trial(Config("liar"), (0.1,) * 20, "disagrees with the reference")
    assert best([liar, Trial(Config("slow"), (9.0,) * 20)]).config.does == "slow"


def test_of_equals_the_first():
    assert best([Trial("a", (2.0,)), Trial("b", (1.0, 1.0)), Trial("c", (1.0,))]).config == "b"


def test_results_come_in_the_kernel_order_whatever_compiles_first():
    fake = Fake(default=3.0, second=2.0, third=1.0)
    real = fake.precompile
    fake.precompile = lambda kernel, problem, configs, *rest: real(kernel, problem, configs[::-1], *rest)
    assert names(fake.search()) == ["default", "second", "third"]
    assert fake.tried == ["third", "second", "default"]


def test_each_candidate_is_tried_before_the_next_is_waited_for():
    fake = Fake(a=1.0, b=2.0)
    events = []
    compiled, tried = fake.precompile, fake.trial

    def precompile(*args):
        for item in compiled(*args):
            events.append(f"compiled {item[0].does}")
            yield item

    def trial(config, *args):
        events.append(f"tried {config.does}")
        return tried(config, *args)

    fake.precompile, fake.trial = precompile, trial
    fake.search()
    assert events == ["compiled a", "tried a", "compiled b", "tried b"]


@pytest.mark.parametrize(
    ("budget", "tried", "until"), [(0, "a", 2), (2, "a", 2), (2.5, "a", 3), (4, "ab", 4), (4.5, "ab", 5), (99, "abc", 6)]
)
def test_budget(budget, tried, until):
    fake = Fake(a=3.0, b=2.0, c=1.0)
    assert names(fake.search(budget_s=budget)) == list(tried)
    assert fake.now == until  # once time is up, it does not wait for compilations
    assert sorted(fake.closed) == ["compilers", "trials"]


def test_the_default_is_tried_even_if_it_compiles_last():
    fake = Fake(default=3.0, second=2.0)
    real = fake.precompile
    fake.precompile = lambda kernel, problem, configs, *rest: real(kernel, problem, configs[::-1], *rest)
    assert names(fake.search(budget_s=0)) == ["default"]


def test_interrupt_keeps_what_was_found():
    fake = Fake(a=1.0, b=KeyboardInterrupt(), c=0.1)
    assert names(fake.search()) == ["a"]
    assert sorted(fake.closed) == ["compilers", "trials"]


def test_interrupt_before_anything_usable():
    fake = Fake(a="crashed", b=KeyboardInterrupt(), c=0.1)
    with pytest.raises(KeyboardInterrupt):
        fake.search()
    assert sorted(fake.closed) == ["compilers", "trials"]


def test_processes_end_when_progress_fails():
    def progress(*args):
        raise ZeroDivisionError

    fake = Fake(a=1.0)
    with pytest.raises(ZeroDivisionError):
        fake.search(progress=progress)
    assert sorted(fake.closed) == ["compilers", "trials"]


def test_progress():
    seen = []
    fake = Fake(a="crashed", b=2.0, c=3.0)
    fake.search(
        progress=lambda done, total, best, latest: seen.append((done, total, best and best.config.does, latest.config.does))
    )
    assert seen == [(1, 3, None, "a"), (2, 3, "b", "b"), (3, 3, "b", "c")]


def test_candidates():
    a, b, misfit = Config("a"), Config("b"), Config("misfit")
    assert candidates(Toy(misfit, a, b, a), PROBLEM) == [a, b]
    assert candidates(Toy(misfit, a, b), PROBLEM, max_configs=1) == [a]
    assert candidates(Toy(a, b), PROBLEM, max_configs=0) == [a]
    with pytest.raises(NoConfig, match=r"toy: no candidate fits Problem\(factor=2.0.*\n  Config\(does='misfit'"):
        candidates(Toy(misfit), PROBLEM)
    with pytest.raises(NoConfig, match="there are none"):
        candidates(Toy(), PROBLEM)


def test_no_config_lists_every_cause():
    found = Fake(a="crashed (signal 6)\na last word", b="compile:CompilationError: at 3:4").search()
    with pytest.raises(NoConfig) as error:
        best(found, "toy")
    first, *rest = str(error.value).splitlines()
    assert first == "toy: none of 2 candidates can be used:"
    assert rest[0].startswith("  Config(does='a'")
    assert rest[0].endswith("crashed (signal 6)")
    assert rest[1] == "    a last word"
    assert rest[2].endswith("CompilationError: at 3:4")


def test_trial():
    assert Trial("a", (3.0, 1.0, 9.0)).median_us == 3.0
    assert Trial("a").median_us == math.inf


class TestTiming:
    CPU = torch.device("cpu")

    def test_before_is_not_measured(self):
        calls = []

        def before():
            calls.append("before")
            time.sleep(0.003)

        times = time_us(lambda: calls.append("run"), self.CPU, before=before)
        assert len(times) == 20
        assert sorted(times)[10] < 1000
        assert calls[::2] == ["before"] * (len(calls) // 2)
        assert set(calls[1::2]) == {"run"}
        assert len(calls) // 2 > 20  # some of them are warm-up calls

    def test_unit(self):
        assert sorted(time_us(lambda: time.sleep(0.002), self.CPU))[0] >= 2000

    def test_clear_losers_stop_early(self):
        def run():
            time.sleep(0.002)

        assert len(time_us(run, self.CPU, best_us=1000)) == 5
        assert len(time_us(run, self.CPU, best_us=1900)) == 20
        assert len(time_us(run, self.CPU, best_us=1e6, repeats=30)) == 30

    @pytest.mark.gpu
    def test_gpu(self):
        x = torch.zeros(1 << 28, dtype=torch.int8, device="cuda")
        device = x.device
        times = time_us(x.zero_, device, before=lambda: torch.zeros(1 << 28, dtype=torch.int8, device="cuda"))
        assert len(times) == 20
        assert 20 < sorted(times)[10] < 5000
        assert len(time_us(x.zero_, device, best_us=1)) == 5
