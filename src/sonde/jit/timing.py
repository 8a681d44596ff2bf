"""Time one launch: device time only, with a cold L2 cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

FIRST = 5  # runs after which a clear loser is abandoned
LOSER = 1.5  # times the best so far
WARM_UP_S = 0.01
FLUSH_BYTES = 256 << 20  # at least: flushing must take longer than enqueuing the launch, so that host time is not measured


@dataclass(frozen=True)
class Trial:
    """The outcome for one configuration: how long each run took, or why it cannot be used."""

    config: Any  # a dict when it comes from the store
    times_us: tuple[float, ...] = ()
    cause: str | None = None
    error: float | None = None  # relative to the reference, in norm
    compile_s: float | None = None

    @property
    def median_us(self) -> float:
        return median(self.times_us) if self.times_us else math.inf


def time_us(
    run: Callable[[], object],
    device: torch.device,
    best_us: float | None = None,
    repeats: int = 20,
    before: Callable[[], object] | None = None,
) -> tuple[float, ...]:
    """Microseconds of each of `repeats` runs; `before` is called ahead of each run and not timed.

    If each of the first five takes more than 1.5 times `best_us`, only those five are returned.
    """
    measure = _on_gpu(run, device, before) if device.type == "cuda" else _on_cpu(run, before)
    deadline = time.perf_counter() + WARM_UP_S
    measure(2)
    while time.perf_counter() < deadline:
        measure(1)
    first = measure(min(FIRST, repeats))
    if best_us is not None and min(first) > LOSER * best_us:
        return tuple(first)
    return tuple(first + measure(repeats - len(first)))


def _on_cpu(run: Callable, before: Callable | None) -> Callable[[int], list[float]]:
    def measure(times: int) -> list[float]:
        found = []
        for _ in range(times):
            if before:
                before()
            start = time.perf_counter()
            run()
            found.append(1e6 * (time.perf_counter() - start))
        return found

    return measure


def _on_gpu(run: Callable, device: torch.device, before: Callable | None) -> Callable[[int], list[float]]:
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    flush = torch.empty(max(2 * l2, FLUSH_BYTES), dtype=torch.int8, device=device)

    def measure(times: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        with torch.cuda.device(device):  # events belong to the current device
            for start, stop in pairs:
                if before:
                    before()
                flush.zero_()  # last, so that it evicts what `before` wrote, too
                start.record()
                run()
                stop.record()
            torch.cuda.synchronize(device)
        return [1e3 * start.elapsed_time(stop) for start, stop in pairs]

    return measure
