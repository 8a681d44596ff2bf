"""The search for a kernel's best configuration: compile the candidates, check each against the reference, time those that pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import Tensor

from . import workers
from .timing import Trial

Progress = Callable[[int, int, "Trial | None", Trial], object]  # done, total, the best so far, the latest


class NoConfig(RuntimeError):
    """No candidate can be used; the message has the cause for each."""


def search(
    kernel: Any,
    problem: Any,
    tensors: Sequence[Tensor | None],
    *,
    num_workers: int,
    max_configs: int | None = None,
    budget_s: float | None = None,
    compile_limit_s: float = 120,
    trial_limit_s: float = 60,
    progress: Progress | None = None,
    precompile: Callable = workers.precompile,
    trials: Callable = workers.trials,
    clock: Callable[[], float] = time.monotonic,
) -> list[Trial]:
    """One trial per candidate, in the kernel's order; `tensors` are only read.

    Each candidate is tried as soon as it is compiled, while others still compile. After `budget_s` no trial starts except that of
    the first candidate, the kernel's default. Ctrl-C ends the search; it raises only if nothing usable was found.
    """
    configs = candidates(kernel, problem, max_configs)
    ranks = {config: rank for rank, config in enumerate(configs)}
    found: list[Trial] = []
    winner: Trial | None = None
    start = clock()

    def is_late() -> bool:
        return budget_s is not None and clock() - start >= budget_s

    def default_is_done() -> bool:
        return any(trial.config == configs[0] for trial in found)

    try:
        with (
            closing(precompile(kernel, problem, configs, tensors, num_workers, compile_limit_s)) as compiled,
            closing(trials(kernel, problem, tensors)) as bench,
        ):
            for config, seconds, cause in compiled:
                if is_late() and ranks[config]:
                    if default_is_done():
                        break
                    continue
                if cause is None:
                    trial = bench.trial(config, winner and winner.median_us, trial_limit_s)
                else:
                    trial = Trial(config, cause=cause)
                found.append(replace(trial, compile_s=seconds))
                winner = min(filter(is_usable, found), key=lambda t: t.median_us, default=None)
                if progress is not None:
                    progress(len(found), len(configs), winner, found[-1])
                if is_late() and default_is_done():
                    break
    except KeyboardInterrupt:
        if winner is None:
            raise
    return sorted(found, key=lambda t: ranks[t.config])


def candidates(kernel: Any, problem: Any, max_configs: int | None = None) -> list:
    """The kernel's candidates that fit, the most promising first, without duplicates."""
    every = list(dict.fromkeys(kernel.candidates(problem)))
    fitting = [config for config in every if kernel.fits(problem, config)]
    if not fitting:
        listed = "".join(f"\n  {config}" for config in every) or " there are none"
        raise NoConfig(f"{kernel.name}: no candidate fits {problem}:{listed}")
    return fitting if max_configs is None else fitting[: max(1, max_configs)]


def is_usable(trial: Trial) -> bool:
    return trial.cause is None and bool(trial.times_us)


def best(trials: Iterable[Trial], name: str = "the kernel") -> Trial:
    """The fastest usable trial; the first one on ties."""
    trials = list(trials)
    usable = [trial for trial in trials if is_usable(trial)]
    if usable:
        return min(usable, key=lambda t: t.median_us)
    causes = "".join(f"\n  {t.config}: {(t.cause or 'was not timed').replace(chr(10), chr(10) + '    ')}" for t in trials)
    raise NoConfig(f"{name}: none of {len(trials)} candidates can be used:{causes}")
