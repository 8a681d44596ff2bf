"""Time operators on real workloads against PyTorch, with values and gradients checked in the same run.

On GPUs a call is timed with the host ("call") and as a CUDA graph ("graph"). On CPUs Sonde and PyTorch are timed in turns; only
the ratios mean anything. A wrong result is reported without a speed-up, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .console import IMPLS, UsageError, did_you_mean, dump, left_out, names, operators, pick, progress, table, writable

DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = ("contiguous", "channels_last")
AGAINST = {"eager": "eager", "compile": "torch.compile"}
KINDS = {"call_ms": "call", "graph_ms": "graph", "cold_ms": "cold L2"}


def arguments(parser: argparse.ArgumentParser) -> None:
    from .plot import SUFFIXES

    selection(parser)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the records to FILE; print them without one")
    parser.add_argument("--plot", metavar="FILE", help=f"draw speed-ups and memory ({', '.join(SUFFIXES)})")


def selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select what is measured."""
    several = "; separate several by commas"
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"which operators (default: all of {names('bench')})")
    parser.add_argument("--case", action="append", metavar="NAME", help=f"which workloads (default: all){several}")
    parser.add_argument("--impl", default="auto", help=f"{', '.join(IMPLS)} (default: auto){several}")
    parser.add_argument("--against", default="eager", help=f"{', '.join(AGAINST)} (default: eager){several}")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together as well")
    parser.add_argument("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default: float32){several}")
    parser.add_argument("--layout", default="contiguous", help=f"{', '.join(LAYOUTS)} (default: contiguous){several}")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")


def run(options: argparse.Namespace) -> int:
    from ..operators import OPERATORS
    from . import plot

    if options.json in OPERATORS:
        raise UsageError(f"--json takes a file; write --json - before {options.json!r} to print the records")
    writable("--json", options.json)
    plot.check("--plot", options.plot)
    todo = jobs(options)
    for operator in operators("bench", options.operators) if options.operators else ():
        if all(job.operator is not operator for job in todo):
            print(f"sonde: {operator.name} is left out; its cases are {', '.join(operator.cases.BENCH)}", file=sys.stderr)
    quiet = options.json == "-"
    records = list(measured(todo, show=not quiet))
    if not quiet:
        show(records)
        if not options.operators:
            left_out("bench")
    if options.json:
        dump(records, options.json)
    if options.plot:
        plot.save(records, options.plot)
    return 0 if all(record["correct"] for record in records) else 1


def jobs(options: argparse.Namespace) -> list:
    """The jobs that the options select; UsageError, with the valid choices, if an option is wrong."""
    from ..op.plan import refusal
    from .protocol import Job

    chosen = operators("bench", options.operators)
    known = list(dict.fromkeys(case for operator in chosen for case in operator.cases.BENCH))
    cases = pick("case", options.case or [], known) or known
    where = device(options.device)
    impls = pick("implementation", [options.impl], IMPLS)
    for impl in impls:
        reason = None if impl == "auto" else refusal(impl, where.type)
        if reason:
            raise UsageError(f"--impl {impl} {reason}")
    return [
        Job(operator, case, operator.cases.BENCH[case], where, impl, dtype, layout, against, options.backward)
        for against in [pick("contender", [options.against], AGAINST)]
        for operator in chosen
        for case in cases
        if case in operator.cases.BENCH
        for impl in impls
        for dtype in pick("dtype", [options.dtype], DTYPES)
        for layout in pick("layout", [options.layout], LAYOUTS)
    ]


def device(name: str | None):
    """The device of this name; without a name, the first GPU or else the CPU."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UsageError(did_you_mean("device", name, ["cpu", "cuda"]))
    if kind == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here; sonde doctor says more")
    return torch.device("cuda", int(index or 0))


def measured(todo: Iterable, show: bool = True, extras: bool = True) -> Iterator[dict]:
    """Measure the jobs; yields each record as soon as it is complete."""
    import torch

    from .protocol import STAGES, measure

    todo = list(todo)
    stages = len(STAGES) - (not extras)  # the last one
    with progress(len(todo) * stages, show) as begin:
        for job in todo:
            try:
                yield measure(job, begin, extras)
            except torch.OutOfMemoryError as problem:
                yield dict(operator=job.operator.name, case=job.case, correct=False, wrong=str(problem).splitlines()[0], figures={})


def show(records: list[dict]) -> None:
    """Print tables of times, memory and errors, then what went wrong."""
    good = [record for record in records if record["figures"]]
    phases = [phase for phase in ("forward", "forward_backward") if any(phase in r["figures"]["sonde"] for r in good)]
    for phase in phases:
        _phase(good, phase)
    for record in good:
        if record.get("apart"):
            parts = record["apart"].items()
            figures = ", ".join(f"{name} {' / '.join(number(ms) for ms in ms_of.values())} ms" for name, ms_of in parts)
            print(f"{record['operator']} {record['case']}, index built separately: {figures}")
    hosts = {r["operator"]: r["host_us"] for r in good if "host_us" in r}
    for name, cost in hosts.items():
        forward, both = (cost[phase]["above"] for phase in ("forward", "forward_backward"))
        print(f"{name}: host cost {forward:.0f} µs above torch.relu, with backward {both:.0f} µs above a bare autograd.Function")
    for record in records:
        if not record["correct"]:
            print(f"WRONG: {record['operator']} {record['case']}: {record['wrong']}; no speed-up is reported")
        for name, figures in record["figures"].items():
            if "failed" in figures:
                what = f"{AGAINST[name]} did not run{' with backward' if 'errors' in figures else ''}"
                print(f"{record['operator']} {record['case']}: {what}: {figures['failed']}")


def _phase(records: list[dict], phase: str) -> None:
    varying = [k for k in ("impl", "dtype", "layout") if len({r[k] for r in records}) > 1]
    shared = [records[0][k] for k in ("dtype", "layout", "impl") if k not in varying]  # the title names what all share
    words = ["operator", "case", *varying]
    kinds = {k: title for k, title in KINDS.items() if any(k in r["figures"]["sonde"][phase] for r in records)}
    against = list(dict.fromkeys(name for r in records for name in r["figures"] if name != "sonde"))
    cells = [_cells(r, phase, kinds, against) for r in records]
    rows = [[*(r[k] for k in words), *(text for _, text in row)] for r, row in zip(records, cells)]
    where = records[0]["environment"]
    on = where["device"] if where["kind"] == "cuda" else f"{where['device']}, {where['threads']} threads"
    title = ", ".join([phase.replace("_", " + "), *shared, on])
    table([*words, *(head for head, _ in cells[0])], rows, title, left=len(words))


def _cells(record: dict, phase: str, kinds: Mapping[str, str], against: Sequence[str]) -> list[tuple[str, str]]:
    """The numbers of one row, each with its column's heading."""

    def figure(name: str, kind: str) -> str:
        return number(record["figures"][name].get(phase, {}).get(kind))

    row = []
    for kind, title in kinds.items():
        row.append((f"sonde\n{title} ms", figure("sonde", kind)))
        for name in against:
            row.append((f"{AGAINST[name]}\n{title} ms", figure(name, kind)))
            row.append(("faster\n×", times(ratio(record, name, phase, kind))))
    row += [(f"{AGAINST.get(name, name)}\nMiB", figure(name, "peak_mib")) for name in ("sonde", *against)]
    if "floor" in record:
        floor = record["floor"][phase]
        row += [("floor\nms", f"{number(floor['ms'])} {floor['kind']}"), ("share of\nfloor", f"{100 * floor['share']:.0f} %")]
    return [*row, ("worst\nerror", f"{worst(record):.1e}")]


def ratio(record: dict, against: str, phase: str, kind: str) -> float | None:
    """The speed-up, unless the result is wrong."""
    return (record["speedup"] or {}).get(against, {}).get(phase, {}).get(kind)


def worst(record: dict) -> float:
    """The largest error among the value and the gradients."""
    return max(record["figures"]["sonde"]["errors"].values(), key=lambda e: (e != e, e))


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}×" if value < 100 else f"{value:.0f}×"
