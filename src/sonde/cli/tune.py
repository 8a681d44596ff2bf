"""Search for the best configuration of every kernel on this machine, and store it for later runs.

Each case runs forward and backward, in the default and in the deterministic mode, so that every kernel with candidates is reached.
Kernels with a stored winner are not searched again without --again. Ctrl-C ends the search and keeps what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from .bench import DTYPES, LAYOUTS, number
from .console import UsageError, did_you_mean, dump, meter, names, operators, pick, table, writable
from .explain import deterministic_algorithms, planned, short
from .without_triton import planning

if TYPE_CHECKING:
    from ..jit.kernel import Tunable
    from ..jit.policies import Policy
    from ..jit.store import Key
    from ..jit.timing import Trial
    from ..op.plan import Kernel
    from .protocol import Job

POLICIES = ("best", "any", "stored")
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


def arguments(parser: argparse.ArgumentParser) -> None:
    several = "; separate several by commas"
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"which operators (default: all of {names('tune')})")
    parser.add_argument("--case", action="append", metavar="NAME", help=f"which workloads (default: all of bench){several}")
    parser.add_argument("--dtype", default="float32,bfloat16", help=f"{', '.join(DTYPES)} (default: float32,bfloat16){several}")
    parser.add_argument("--layout", default=",".join(LAYOUTS), help=f"{', '.join(LAYOUTS)} (default: both){several}")
    parser.add_argument(
        "--policy", default="best", help="best: search; any: run what is known; stored: list what is not stored, with exit code 1"
    )
    parser.add_argument("--workers", metavar="N", help="compiler processes (default: SONDE_WORKERS, else one per core, at most 8)")
    parser.add_argument("--max-configs", metavar="N", help="try only the first N candidates of a kernel")
    parser.add_argument("--budget", metavar="SECONDS", help="start no trial of a kernel after this time")
    parser.add_argument("--again", action="store_true", help="search even where a winner is stored")
    parser.add_argument("--dry-run", action="store_true", help="list kernels, candidates and what runs now; launch nothing")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the results to FILE; print them without one")


def run(options: argparse.Namespace) -> int:
    from ..operators import OPERATORS

    if options.json in OPERATORS:
        raise UsageError(f"--json takes a file; write --json - before {options.json!r} to print the results")
    writable("--json", options.json)
    limits = _limits(options)
    policy = _policy(options)
    todo = _jobs(options)
    with nullcontext() if find_spec("triton") else planning():
        found = [Planned(job, _kernels(job)) for job in todo]
    if not _choices(found) and not options.json:
        print("No kernel of these cases has more than one configuration; there is nothing to tune")
        return 0
    if options.dry_run:
        return _dry_run(found, options)
    if options.policy == "stored":
        return _stored(found, options)
    return _tune(found, policy, limits, options)


class Planned(NamedTuple):
    job: Job
    kernels: dict[tuple, Kernel]  # those of both modes, without duplicates


@dataclass
class Search:
    """The progress and the outcome of one search."""

    kernel: Tunable
    problem: Any
    planned: int
    start: float
    seconds: float = 0.0
    trials: list[Trial] = field(default_factory=list)

    @property
    def default_us(self) -> float | None:
        default = self.kernel.default(self.problem)
        return next((t.median_us for t in self.trials if t.config == default and not t.cause), None)

    @property
    def best(self) -> Trial | None:
        return min((t for t in self.trials if not t.cause), key=lambda t: t.median_us, default=None)

    @property
    def failures(self) -> list[Trial]:
        return [t for t in self.trials if t.cause]


# --- options


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for option, name, kind in (("workers", "num_workers", int), ("max_configs", "max_configs", int), ("budget", "budget_s", float)):
        text = getattr(options, option)
        if text is None:
            continue
        try:
            limits[name] = kind(text)
        except ValueError:
            limits[name] = 0
        if not limits[name] > 0:
            what = "a whole number of at least 1" if kind is int else "a number of seconds above 0"
            raise UsageError(f"--{option.replace('_', '-')} must be {what}, got {text!r}")
    return limits


def _policy(options: argparse.Namespace) -> Policy:
    from ..jit import PickAny, PickBest, PickStored

    if options.policy not in POLICIES:
        raise UsageError(did_you_mean("policy", options.policy, POLICIES))
    if options.again and options.policy != "best":
        raise UsageError(f"--again is for --policy best, got --policy {options.policy}")
    if options.policy == "best":
        return PickBest(options.again)
    return PickAny() if options.policy == "any" else PickStored()


def _jobs(options: argparse.Namespace) -> list[Job]:
    import torch

    from .protocol import Job

    if not (options.dry_run or find_spec("triton")):
        raise UsageError("tune: only Triton kernels have configurations, and triton is not installed; --dry-run works without")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (interpreted or options.dry_run or torch.cuda.is_available()):
        raise UsageError(
            "tune: timing kernels needs a GPU, and torch sees none here; --dry-run works without, sonde doctor says more"
        )
    device = torch.device("cpu" if interpreted else "cuda")
    chosen = operators("tune", options.operators)
    known = {o.name: {**o.cases.BENCH, **o.cases.SMALL} for o in chosen}
    asked = pick("case", options.case or [], dict.fromkeys(case for cases in known.values() for case in cases))
    jobs = []
    for operator in chosen:
        default = list(operator.cases.BENCH) if not interpreted else list(operator.cases.SMALL)[:1]  # a BENCH case would take hours
        jobs += [
            Job(operator, case, known[operator.name][case], device, "triton", dtype, layout)
            for case in asked or default
            if case in known[operator.name]
            for dtype in pick("dtype", [options.dtype], DTYPES)
            for layout in pick("layout", [options.layout], LAYOUTS)
        ]
    return jobs


def _kernels(job: Job) -> dict[tuple, Kernel]:
    """The kernels that run without a search, whatever the policy; by key where there is a choice."""
    from ..jit import PickAny, settings

    with settings.set(PickAny):
        plans = [planned(job, True, mode) for mode in (False, True)]
    return {(k.name, k.key): k for plan in plans for k in plan.kernels}


def _choices(found: Sequence[Planned]) -> dict[Key, Kernel]:
    return {k.key: k for _, kernels in found for k in kernels.values() if k.key is not None}


# --- reports without a search


def _dry_run(found: Sequence[Planned], options: argparse.Namespace) -> int:
    if options.json:
        dump([dict(_named(p.job), kernels=[_kernel(k) for k in p.kernels.values()]) for p in found], options.json)
        return 0
    rows: dict[tuple[Any, ...], list[Job]] = {}  # the jobs in which a kernel runs in the same configuration
    for job, kernels in found:
        for k in kernels.values():
            if k.key:  # sonde explain lists the others, which have only one configuration
                row = (job.operator.name, k.key.kernel, short(k.config), k.origin, k.candidates)
                rows.setdefault(row, []).append(job)
    choices = _choices(found)
    head = ["operator", "kernel", "in cases", "dtypes", "runs now", "from", "candidates"]
    cells = []
    for (operator, kernel, config, origin, candidates), jobs in rows.items():
        cases = list(dict.fromkeys(job.case for job in jobs))
        named = ", ".join(cases) if len(cases) <= 2 else f"{len(cases)} of them"
        dtypes = " ".join(dict.fromkeys(SHORT[job.dtype] for job in jobs))
        cells.append([operator, kernel, named, dtypes, config, origin, f"{candidates}"])
    table(head, cells, f"On {next(iter(choices)).device}; nothing is launched", left=len(head) - 1)
    missing = [k for k in choices.values() if k.origin != "tuned"]
    todo = list(choices.values()) if options.again else missing
    count = sum(map(_count(options), todo))
    print(f"{len(choices)} kernels with several configurations, {len(missing)} of them not tuned; {count} candidates to try")
    print("A kernel counts once for each set of sizes, dtypes and strides; --json lists them one by one.")
    return 0


def _stored(found: Sequence[Planned], options: argparse.Namespace) -> int:
    choices = _choices(found)
    missing = [k for k in choices.values() if k.origin != "tuned"]
    if options.json:
        dump(dict(kernels=len(choices), missing=[_kernel(k) for k in missing]), options.json)
    elif missing:
        head = ["kernel", "dtypes", "constants", "bucket", "runs instead", "from"]
        rows = [[*_identity(k.key), short(k.config), k.origin] for k in missing]
        table(head, rows, f"Not stored for {missing[0].key.device}: {len(missing)} of {len(choices)}; sonde tune searches", left=6)
    else:
        print(f"All {len(choices)} kernels with several configurations have a stored winner")
    return 1 if missing else 0


# --- the search


def _tune(found: Sequence[Planned], policy: Policy, limits: dict[str, Any], options: argparse.Namespace) -> int:
    from ..jit import settings, workers
    from ..jit.policies import PickBest

    choices = _choices(found)
    count = _count(options)
    searched = type(policy) is PickBest
    total = sum(count(k) for k in choices.values() if searched and (options.again or k.origin != "tuned"))
    searches: dict[Key, Search] = {}
    errors: list[str] = []
    interrupted = False
    try:
        with (
            workers.keep(),
            settings.set(policy, **limits),
            _remembered_interrupts() as check,
            meter(total, options.json != "-") as say,
            _listening(searches, lambda key: count(choices[key]) if key in choices else 0, say, check),
        ):
            for job, _ in found:
                try:
                    _run(job, check)
                except RuntimeError as problem:  # out of memory, or no usable candidate; go on with the others
                    errors.append(f"{job}: {str(problem).strip()}")
    except KeyboardInterrupt:
        interrupted = True
    _report(found, searches, errors, interrupted, options)
    if interrupted:
        print("sonde: interrupted; what was found is kept", file=sys.stderr)
        return 130
    return 1 if errors else 0


def _run(job: Job, check: Callable[[], None]) -> None:
    """Run every kernel of a job once, in this thread, because only the main thread receives Ctrl-C."""
    import torch

    from .check import forward_backward, leaves

    args = leaves(job.inputs())
    call = job.operator.call(job.impl)
    cotangent = None
    if job.operator.graded:
        with torch.no_grad():
            cotangent = torch.randn_like(call(*args))
    for mode in (False, True):
        with deterministic_algorithms(mode), torch.autograd.set_multithreading_enabled(False):
            check()
            if cotangent is None:
                call(*args)
            else:
                forward_backward(call, args, cotangent)
    check()


@contextmanager
def _remembered_interrupts() -> Iterator[Callable[[], None]]:
    """A search that has found something swallows Ctrl-C; the function yielded here raises it again."""
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not in the main thread, which alone receives signals
        yield check
        return
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _listening(
    searches: dict[Key, Search], planned: Callable[[Key], int], say: Callable[[int, str], None], check: Callable[[], None]
) -> Iterator[None]:
    """Record every search and show its progress."""
    from ..jit.kernel import _listeners

    def begin(kernel: Tunable, problem: Any, key: Key) -> Callable:
        check()
        before = sum(search.planned for search in searches.values())
        this = searches[key] = Search(kernel, problem, planned(key), time.monotonic())
        say(before, f"{kernel.name}: compiling")

        def progress(done: int, total: int, best: Trial | None, latest: Trial) -> None:
            this.trials.append(latest)
            this.seconds = time.monotonic() - this.start
            so_far = f", best {number(best.median_us)} µs" if best else ""
            say(before + done, f"{kernel.name} {done}/{total}{so_far}")

        return progress

    _listeners.append(begin)
    try:
        yield
    finally:
        _listeners.remove(begin)


def _count(options: argparse.Namespace) -> Callable[[Kernel], int]:
    most = int(options.max_configs) if options.max_configs else None
    return lambda k: k.candidates if most is None else min(most, k.candidates)


# --- results


def _report(
    found: Sequence[Planned], searches: dict[Key, Search], errors: list[str], interrupted: bool, options: argparse.Namespace
) -> None:
    from ..jit.store import open_store
    from .environment import environment

    store = open_store()
    stored = {w.key: w for w in store.winners()}
    keys = list(dict.fromkeys([*_choices(found), *searches]))  # including searches of kernels that no plan listed
    if options.json:
        document = dict(
            environment=environment(found[0].job.device),
            policy=options.policy,
            interrupted=interrupted,
            store=str(store.path),
            kernels=[_result(key, searches.get(key), stored.get(key)) for key in keys],
            errors=errors,
        )
        dump(document, options.json)
        if options.json == "-":
            return
    head = [
        "kernel",
        "dtypes",
        "constants",
        "bucket",
        "configuration",
        "default\nµs",
        "best\nµs",
        "gain",
        "candi-\ndates",
        "failed",
        "s",
    ]
    rows = [_row(key, searches.get(key), stored.get(key)) for key in keys]
    table(head, rows, f"{keys[0].device if keys else 'Nothing'}: {len(searches)} of {len(keys)} kernels searched", left=5)
    for search in searches.values():
        for trial in search.failures:
            print(f"{search.kernel.name} {short(str(trial.config))}: {_indented(trial.cause)}")
    for error in errors:
        print(f"FAILED: {_indented(error)}")
    if store.problem:
        print(f"Not kept: the tuning store cannot be used: {store.problem}")


def _row(key: Key, search: Search | None, winner: Any) -> list[str]:
    r = _result(key, search, winner)
    config = " ".join(f"{k}={v}" for k, v in (r["config"] or {}).items()) or "(default)"
    gain = "–" if r["gain"] is None else f"{r['gain']:.2f}×"
    counts = [f"{r['candidates']}", f"{len(r['failures'])}", f"{r['seconds']:.1f}"] if search else ["–"] * 3
    return [*_identity(key), config, number(r["default_us"]), number(r["best_us"]), gain, *counts]


def _result(key: Key, search: Search | None, winner: Any) -> dict[str, Any]:
    """The result of a search or, without one, what is stored; `config` is what runs from now on."""
    default = search.default_us if search else None
    best = search.best.median_us if search and search.best else winner.median_us if winner else None
    return dict(
        key._asdict(),
        searched=search is not None,
        config=winner.config if winner else None,
        default_us=default,
        best_us=best,
        gain=default / best if default and best else None,
        candidates=len(search.trials) if search else None,
        failures=[dict(config=str(t.config), cause=t.cause) for t in search.failures] if search else [],
        seconds=search.seconds if search else None,
    )


def _named(job: Job) -> dict[str, Any]:
    return dict(operator=job.operator.name, case=job.case, dtype=job.dtype, layout=job.layout)


def _kernel(k: Kernel) -> dict[str, Any]:
    known = k.key._asdict() if k.key else dict(kernel=k.name)
    return dict(known, config=k.config or None, origin=k.origin or None, candidates=k.candidates)


def _identity(key: Key) -> list[str]:
    """Kernel, dtypes, constants and bucket, abbreviated."""
    dtypes = " ".join(SHORT.get(name, name) for name in key.dtypes.split())
    constants = " ".join(f"{k}={SHORT.get(str(v).removeprefix('torch.'), v)}" for k, v in json.loads(key.constants).items())
    bucket = " ".join(f"{k}≥{1 << bits >> 1}" for k, bits in json.loads(key.bucket).items())
    return [key.kernel, dtypes, constants if len(constants) <= 32 else constants[:31] + "…", bucket]


def _indented(text: str | None) -> str:
    return (text or "").replace("\n", "\n  ")
