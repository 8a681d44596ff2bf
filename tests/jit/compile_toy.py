"""A script of ``test_workers.py``: compile in worker processes for a GPU that is absent, and print a report."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import torch
import toy_triton
from toy_triton import MOVE, SCALE, Config, Problem
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sonde.jit import workers
from sonde.jit.launch import described
from sonde.jit.search import best, search
from sonde.jit.timing import Trial
from sonde.jit.workers import CompileOnly, precompile


def main(backend: str, arch: str, cache: str) -> None:
    driver.set_active(CompileOnly(GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64)))
    os.environ["TRITON_INTERPRET"] = "1"  # this process has imported triton already; worker processes must not inherit it
    note = Path(cache) / "note"
    problem = Problem(1000, 3, str(note))
    buffer = torch.zeros(1001)
    # aligned, absent, not aligned
    tensors = (buffer[:1000], None, buffer[1:])
    good = [Config(64), Config(128, 8), Config(128, 8, 2)]
    bad = [Config(48), Config(32, does="crash"), Config(16, does="hang")] if backend == "cuda" else []
    report: dict = {"causes": {}}
    # the candidate that takes its whole limit comes second, so that the others overlap with it
    for config, seconds, cause in precompile(SCALE, problem, good[:1] + bad[::-1] + good[1:], tensors, 2, 4):
        report["causes"][f"{config.block} {config.num_warps} {config.num_stages}"] = cause
        report["seconds"] = max(seconds, report.get("seconds", 0))

    before = listing(cache)
    hits = []
    knobs.compilation.listener = lambda **found: hits.append(found["cache_hit"])
    for config in good:
        launch = SCALE.launch(problem, config)
        toy_triton._scale.warmup(*tensors, *launch.sizes, *launch.constants, grid=launch.grid, num_warps=launch.num_warps,
                                 num_stages=launch.num_stages)  # fmt: skip
    report |= {"hits": list(hits), "unchanged": listing(cache) == before, "kernels": len(list(Path(cache).glob("*/_scale.json")))}
    hits.clear()
    launch = SCALE.launch(problem, good[0])
    toy_triton._scale.warmup(buffer, None, buffer, *launch.sizes, *launch.constants, grid=launch.grid, num_warps=4, num_stages=3)
    report["other alignment hits"] = list(hits)

    if backend == "cuda":
        report["descriptors"] = described_to_workers(problem, hits)
        report["search"] = searched(problem, good, bad[:2], tensors)
        SCALE.module = None
        report["here"] = [cause for _, _, cause in precompile(SCALE, problem, [Config(64), Config(48)], tensors, 2, 60)]
        SCALE.module = "toy_triton"
        with workers.keep():
            used = []
            for factor in (5, 7):
                list(precompile(SCALE, problem._replace(factor=factor), good[:1], tensors, 2, 60))
                used.append([worker._process.pid for worker in workers._kept[workers._start_compiler]])
        report["kept"] = used
        report["kept on"] = [
            pid for pid in used[0] if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text()
        ]
        note.unlink()
        hanging = precompile(SCALE, problem, [Config(64), Config(16, does="hang")], tensors, 1, 600)
        with closing(hanging):
            next(hanging)
            while not (note.exists() and note.read_text()):
                time.sleep(0.02)
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                next(hanging)
            except KeyboardInterrupt:
                report["interrupted"] = True
        report["left"] = Path(f"/proc/{note.read_text()}").exists()
    print(json.dumps(report))


def described_to_workers(problem: Problem, hits: list) -> list:
    """Why tensors that are passed as descriptors do not compile, and whether a launch finds what workers compiled."""
    tensors = torch.zeros(64, 64), torch.zeros(64, 64)
    ((_, _, cause),) = precompile(MOVE, problem, [Config(64)], tensors, 1, 60)
    hits.clear()
    launch = MOVE.launch(problem, Config(64))
    toy_triton._move.warmup(
        *described(tensors, dict(launch.descriptors)), *launch.sizes, *launch.constants, grid=launch.grid, num_warps=4, num_stages=3
    )
    return [cause, *hits]


def searched(problem: Problem, good: list, bad: list, tensors: tuple) -> dict:
    """A whole search whose default raises in the compiler and another candidate kills its process; trials are made up."""

    class Trials:
        def trial(self, config, best_us, limit_s):
            return Trial(config, (float(config.block),) * 5, error=0.0)

        def close(self):
            pass

    SCALE.candidates = lambda problem: [*bad, *good]
    found = search(SCALE, problem, tensors, num_workers=2, trials=lambda *args: Trials())
    return {"causes": [trial.cause and trial.cause.splitlines()[0] for trial in found], "best": best(found).config.block}


def listing(folder: str) -> list:
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path(folder).rglob("*"))


if __name__ == "__main__":
    main(*sys.argv[1:])
