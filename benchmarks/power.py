"""The dense family on a GPU: up to MOST candidates of each kernel, checked and timed, and torch's own operators to compare with.

    PYTHONPATH=src python benchmarks/power.py copy mm sympow sympow_mm attention power_attention --out FOLDER

Times are medians of CUDA events, with the L2 cache flushed before each run: of kernels, device times; of whole calls, with what the
host takes, and again as a CUDA graph. Values are compared with float64 (or float32, if that does not fit) before anything is timed.
FOLDER/power.json has all records; as benchmarks/results/<device>/power.json it is what ``ship.py`` reads.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from sonde.cli.environment import environment
from sonde.cli.timing import graph_ms
from sonde.jit.bench import relative_error
from sonde.jit.launch import bind
from sonde.operators import OPERATORS

HALF = torch.bfloat16
MOST = 8  # most candidates of a kernel that are tried


def timed(run: Callable[[], Any], repeats: int = 9) -> float:
    """Milliseconds on the device."""
    flush = timed.__dict__.setdefault("flush", torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))
    run()
    found = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm().clamp(min=1e-30))


class Captured:
    """The launches of a call: kernels with their problems and tensors."""

    def __init__(self, operator: Any, args: Sequence[Any], backward: bool) -> None:
        gpu, given = operator.kernels("triton"), operator.registered(*args)
        self.found: list[tuple[Any, list]] = []
        from sonde.jit import steps

        real = steps._Run.__call__
        note = self.found

        def run(this: Any, slots: list) -> None:
            taken = this.take(slots)
            note.append((getattr(this, "start", None), list(taken)))
            real(this, slots)

        steps._Run.__call__ = run  # type: ignore[method-assign]
        try:
            outs = gpu.forward_pass(*given).bind()(*given)
            if backward:
                outs = outs if isinstance(outs, tuple) else (outs,)
                about = operator.op.signature
                self.found.clear()
                grads = [torch.randn_like(outs[i]) for i in about.graded]
                needs = [isinstance(given[i], torch.Tensor) for i in about.differentiable]
                saved = [outs[i] for i in about.saved]
                both = (*grads, *given, *saved)
                gpu.backward_pass(*both, needs=needs, deterministic=False).bind()(*both)
        finally:
            steps._Run.__call__ = real  # type: ignore[method-assign]

    def launches(self) -> list[tuple[Any, Any, list]]:
        """Launches of kernels with more than one configuration."""
        return [(start.func.__self__, start.args[0], taken) for start, taken in self.found if hasattr(start, "func")]


def compiled(kernel: Any, problem: Any, tensors: list, pool: ThreadPoolExecutor) -> list[tuple[Any, Any]]:
    """Configurations, each with a function that launches it, or with the reason why it does not compile."""

    def compile_one(config: Any) -> Any:
        torch.cuda.set_device(0)
        try:
            return bind(kernel.function, tensors, kernel.launch(problem, config))
        except Exception as problem_:
            return f"{type(problem_).__name__}: {str(problem_)[:80]}"

    configs = kernel.fitting(problem)[:MOST]
    return list(zip(configs, pool.map(compile_one, configs)))


def checked(kernel: Any, problem: Any, tensors: list, starts: list[tuple[Any, Any]], note: Callable[[str], None]) -> list[dict]:
    """A record per configuration, with its error and time, the fastest first."""
    truth = None if kernel.expected is None else kernel.expected(problem, *tensors)
    found = []
    for config, start in starts:
        record: dict[str, Any] = dict(config=str(config))
        if isinstance(start, str):
            record["failed"] = start
        else:
            note(f"{kernel.name} {config}")  # in case this one crashes the process
            for i in kernel.writes:
                if tensors[i] is not None:
                    tensors[i].fill_(float("nan"))
            start(*tensors)
            torch.cuda.synchronize()
            record["error"] = max([relative_error(tensors[i], x) for i, x in (truth or {}).items()], default=0.0)
            record["ms"] = timed(lambda start=start: start(*tensors), 7)
        found.append(record)
    return sorted(found, key=lambda r: r.get("ms", 1e9))


def peers(name: str, args: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Torch's own operators on the same tensors."""
    if name == "copy":
        out = torch.empty(args[0].shape, dtype=args[0].dtype, device="cuda")
        return {"copy_": lambda: out.copy_(args[0])}
    if name == "mm":
        return {"torch": lambda: torch.bmm(args[0], args[1])}
    if name == "attention":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def of(backend: Any) -> Callable[[], Any]:
            def run() -> Any:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(*args[:3], is_causal=args[3])

            return run

        return {"cudnn": of(SDPBackend.CUDNN_ATTENTION), "flash": of(SDPBackend.FLASH_ATTENTION)}
    return {}


ODD = {  # products of sizes that fit no tile
    "odd_turned": dict(B=1, M=1500, K=900, N=700, turned=True),
    "odd_square": dict(B=1, M=2047, K=2047, N=2047),
    "one_row": dict(B=1, M=1, K=4096, N=11008),
    "few_rows": dict(B=1, M=17, K=4096, N=5000),
    "few_columns": dict(B=1, M=50_000, K=333, N=20),
    "short_sums": dict(B=1, M=5000, K=37, N=3000),
    "long_sums": dict(B=1, M=72, K=100_000, N=64),
    "odd_batched": dict(B=37, M=129, K=65, N=97),
}
CASES: dict[str, dict[str, dict[str, Any]]] = {  # sizes, or {} for those of BENCH
    "copy": {},
    "mm": {**{k: {} for k in ("square_4096", "square_8192", "odd", "skinny", "batched")}, **ODD},
    "sympow": {"d64_p2": {}},
    "sympow_mm": {"query_d64": {}, "state_d64": {}},
    "attention": {
        **{k: {} for k in ("d64_4k", "d64_16k", "d128_4k", "d64_cross")},
        "d64_64k": dict(B=1, T=65536, S=65536, d=64, heads=16, causal=True),
    },
    "power_attention": {},
}


def sizes_of(name: str, case: str) -> dict[str, Any]:
    return CASES[name].get(case) or OPERATORS[name].cases.BENCH[case]


def measure(name: str, out: Path, turn: Path, chosen: Sequence[str]) -> None:
    """Measure one operator, in its own process: compile everything first, then time while no other process does."""
    operator, lines, records = OPERATORS[name], [], []
    progress = out / f"{name}.progress"
    names = [c for c in CASES[name] or operator.cases.BENCH if not chosen or c in chosen]
    cases = {c: operator.make(**sizes_of(name, c), dtype=HALF, device="cuda") for c in names}
    phases = ("forward",) if name == "copy" else ("forward", "backward")
    with ThreadPoolExecutor(8) as pool:
        todo = []
        for case, args in cases.items():
            for phase in phases:
                for kernel, problem, taken in Captured(operator, args, phase == "backward").launches():
                    tensors = [t.detach() if isinstance(t, torch.Tensor) else t for t in taken]
                    todo.append((case, phase, kernel, problem, tensors, compiled(kernel, problem, tensors, pool)))
    torch.cuda.synchronize()
    with turn.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for case, phase, kernel, problem, tensors, starts in todo:
            found = checked(kernel, problem, tensors, starts, progress.write_text)
            records.append(dict(operator=name, case=case, phase=phase, kernel=kernel.name, candidates=found))
            best, default = found[0], str(kernel.default(problem))
            ours = next((r for r in found if r["config"] == default), {})
            wrong = [r["config"] for r in found if not r.get("error", 0) < 0.02]
            print(
                f"{name} {case} {phase} {kernel.name}: {best.get('ms', 0):.4f} {best['config']} error {best.get('error', 0):.1e}; "
                f"default {ours.get('ms', 0):.4f} error {ours.get('error', 0):.1e}; wrong {wrong[:2]}; "
                f"failed {[r['failed'] for r in found if 'failed' in r][:1]}",
                flush=True,
            )
        for case, args in cases.items():
            lines += against(name, case, args, records)
        print("\n".join(lines), flush=True)
    (out / f"{name}.json").write_text(json.dumps(records, indent=1))


def against(name: str, case: str, args: Sequence[Any], records: list[dict]) -> list[str]:
    """Times of torch's own operators, and of ours, each with backward too."""
    lines = []

    def note(who: dict, phase: str, ms: float) -> None:
        records.append(dict(operator=name, case=case, phase=phase, **who, ms=ms))
        lines.append(f"  {name} {case} {who.get('peer', 'ours')} {phase} {ms:.4f}")

    for peer, run in peers(name, args).items():
        try:
            ms = timed(run)
        except Exception as problem_:
            lines.append(f"  {name} {case} {peer}: {str(problem_)[:60]}")
            continue
        note(dict(peer=peer), "forward", ms)
        if name == "attention":
            leaves = [a.detach().requires_grad_() for a in args[:3]]
            back, grad = peers(name, [*leaves, *args[3:]])[peer], torch.randn_like(args[0])
            ms = timed(lambda back=back, leaves=leaves, grad=grad: torch.autograd.grad(back(), leaves, grad), 5)
            note(dict(peer=peer), "forward and backward", ms)
    if name in ("attention", "sympow_mm", "power_attention"):
        given = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
        call, of = OPERATORS[name].call("triton"), [a for a in given if isinstance(a, torch.Tensor)]
        grad, plain = torch.randn_like(call(*given)), [a.detach() if isinstance(a, torch.Tensor) else a for a in given]
        note(dict(whole=True), "forward", timed(lambda: call(*plain), 5))
        note(dict(whole=True), "forward as a graph", graph_ms(lambda: call(*plain), 0.1, timed.__dict__["flush"])["cold_ms"])
        note(dict(whole=True), "forward and backward", timed(lambda: torch.autograd.grad(call(*given), of, grad), 5))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operators", nargs="+", choices=CASES, help="each is measured in a process of its own")
    parser.add_argument("--out", required=True, help="folder of the records")
    parser.add_argument("--seconds", type=float, default=170, help="after which processes that still run are killed (default: 170)")
    parser.add_argument("--cases", nargs="*", default=[], help="all of them, unless given")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a GPU, and torch sees none here")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    turn = out / "turn"
    if options.inside:
        measure(options.operators[0], out, turn, options.cases)
        return 0
    deadline = time.monotonic() + options.seconds
    logs = {name: (out / f"{name}.log").open("w") for name in options.operators}
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, name, "--out", str(out), "--inside", "--cases", *options.cases],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, log in logs.items()
    }
    died, records = False, []
    for name, process in running.items():
        try:
            process.wait(max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        text = (out / f"{name}.log").read_text().splitlines()
        progress = out / f"{name}.progress"
        last = progress.read_text() if progress.exists() else "nothing was started"
        print("\n".join(text if process.returncode == 0 else [*text[:60], f"{name} DIED, last: {last}"]))
        died |= process.returncode != 0
        if process.returncode == 0:
            records += json.loads((out / f"{name}.json").read_text())
    about = environment(torch.device("cuda"))
    document = {key: about[key] for key in ("device", "torch", "triton", "commit")} | dict(
        dtype="bfloat16", script="benchmarks/power.py"
    )
    (out / "power.json").write_text(json.dumps(document | dict(records=records), indent=1))
    return int(died)


if __name__ == "__main__":
    sys.exit(main())
