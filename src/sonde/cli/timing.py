"""How time and memory are measured. The figures of one call are

- ``call_ms``: one Python call, including host time, until the device is done;
- ``graph_ms``: one replay of the call as a CUDA graph, device time only;
- ``cold_ms``: the same after the L2 cache was overwritten;
- ``peak_mib``: the peak of torch's allocator during the call, beyond what was allocated before. On CPUs the profiler observes
  that allocator, so the figure means the same; scratch that a CPU kernel allocates by itself is not counted.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from ..op import allocator

REPEATS = 7  # at least, unless one run takes half a second on a GPU
TURNS = 5  # rounds over the contenders on a GPU
HOST_TURNS = {"cpu": 30, "cuda": 400}  # a GPU's host may be slow for seconds at a time, so these rounds take seconds
MIB = 1 << 20


def call_ms(calls: Mapping[str, Callable], device: torch.device, seconds: float) -> dict[str, float]:
    """Median time of one call of each contender, over about `seconds` each. They take turns, so a busy moment hits all of them.

    On a GPU: the smallest of several turns' medians, because host time dominates a short call, and other work on the host can
    slow it down for seconds. Long calls get two turns.
    """
    if device.type == "cuda":
        least: dict[str, float] = {}
        deadline = time.perf_counter() + 2 * seconds * len(calls)
        for turn in range(TURNS):
            if turn >= 2 and time.perf_counter() >= deadline:
                break
            for name, call in calls.items():
                ms = _events(call, seconds / TURNS)
                least[name] = min(ms, least.get(name, ms))
        return least
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    deadline = time.perf_counter() + seconds * len(calls)
    while len(next(iter(found.values()))) < REPEATS or time.perf_counter() < deadline:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(times) for name, times in found.items()}


def graph_ms(call: Callable, seconds: float, flush: torch.Tensor | None = None) -> dict[str, float]:
    """Median time of a CUDA-graph replay; with `flush`, also of one with a cold L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    found = {"graph_ms": _events(graph.replay, seconds, batch=True)}
    if flush is not None:
        found["cold_ms"] = _events(graph.replay, seconds, before=lambda: flush.zero_())
    return found


def _events(call: Callable, seconds: float, batch: bool = False, before: Callable | None = None) -> float:
    """Median milliseconds between two CUDA events, after a warm-up. With `batch`, short calls are timed several at a time."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(times: int = 1) -> float:
        if before:
            before()
        start.record()
        for _ in range(times):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / times

    torch.cuda.synchronize()
    deadline = time.perf_counter() + seconds / 4
    first = once()
    while time.perf_counter() < deadline:
        first = once()
    times = max(1, min(50, int(2 / max(first, 1e-3)))) if batch else 1
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    least = REPEATS if first < 500 else 3
    while len(found) < least or (time.perf_counter() < deadline and len(found) < 1000):
        found.append(once(times))
    return median(found)


def peak_mib(call: Callable, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        held = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        allocator.forget()  # otherwise the call would reuse memory of earlier results
        gc.collect()  # otherwise garbage that is collected during the call would be subtracted from what it allocates
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keep the profiler from logging to stderr
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            held = call()
        events = profiler.profiler.kineto_results.events()
        peak = now = 0
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
    del held  # only now: results count towards the peak
    return peak / MIB


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large copy on this device, measured now."""
    gpu = device.type == "cuda"
    source = torch.ones((1024 if gpu else 64) * MIB // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    ms = graph_ms(copy, 0.05)["graph_ms"] if gpu else call_ms({"copy": copy}, device, 0.05)["copy"]
    return 2e3 * source.nbytes / ms


def host_us(calls: Mapping[str, Callable], device: torch.device) -> dict[str, float]:
    """Microseconds of host time per call, on inputs so small that the host never waits for the device.

    Contenders take turns, and the smallest time of each counts: other work on the machine can only add to it.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(HOST_TURNS[device.type]):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(50):
                call()
            found[name].append(2e4 * (time.perf_counter() - start))
            if device.type == "cuda":
                torch.cuda.synchronize()
    return {name: min(times) for name, times in found.items()}
