"""Compile kernels ahead of time; the GPU need not be in this machine.

Compiles everything that operators launch for their real cases, in default and shipped configurations, into a folder. With
SONDE_RELEASE set to that folder, the first call of such a case compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.util import find_spec
from pathlib import Path

from . import console
from .console import UsageError

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "channels_last")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "operator", nargs="*", metavar="OPERATOR", help=f"which operators (default: all of {console.names('build')})"
    )
    parser.add_argument("--arch", required=True, help="architectures, such as sm_80,sm_90,sm_100")
    parser.add_argument("-o", "--out", metavar="DIR", default="sonde-release", help="folder (default: %(default)s)")
    parser.add_argument(
        "--call", action="append", default=[], metavar="MODULE:FUNCTION",
        help="build what this function of yours launches, in place of Sonde's operators: it gets no arguments, and calls operators "
        "or kernels of sonde.jit with CPU tensors",
    )  # fmt: skip
    parser.add_argument("--case", default="", help="names of cases, separated by commas (default: all)")
    parser.add_argument("--dtype", default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--layout", default=",".join(LAYOUTS), help="default: %(default)s")
    parser.add_argument(
        "--workers", type=int, default=None, help="compiler processes (default: SONDE_WORKERS, else one per core, at most 8)"
    )
    parser.add_argument("--json", metavar="FILE", help="write what was built as JSON; - for stdout")


def run(options: argparse.Namespace) -> int:
    if find_spec("triton") is None:
        raise UsageError("build needs triton, which is not installed")
    from ..jit import release, settings

    if options.workers is not None and options.workers < 1:
        raise UsageError(f"--workers {options.workers}: must be at least 1")
    console.writable("--json", options.json)
    tasks = plan(options)
    folder = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: must be a folder")
    built = []
    with console.progress(len(tasks)) as advance:
        for done in release.build(tasks, folder, options.workers or settings.current().num_workers):
            built.append(done)
            advance(f"{done.task.operator} {done.task.case} {done.task.dtype} {done.task.arch}")
    rows = [
        (name, arch, str(sum(len(b.entries) for b in group)), str(sum(b.cause is not None for b in group)))
        for name, arch, group in _groups(built)
    ]
    console.table(("operator", "architecture", "kernels", "failures"), rows, f"{folder}", left=2)
    for b in built:
        if b.cause is not None:
            print(f"{' '.join(b.task)}: {b.cause}")
    if options.json:
        console.dump(
            [dict(b.task._asdict(), kernels=len(b.entries), seconds=b.seconds, cause=b.cause) for b in built], options.json
        )
    return 1 if any(b.cause is not None for b in built) else 0


def plan(options: argparse.Namespace) -> list:
    """One task per operator, case, dtype, layout, architecture and set of configurations."""
    from ..jit import winners
    from ..jit.release import Task

    archs = [arch for arch in options.arch.split(",") if arch]
    for arch in archs:
        if not re.fullmatch(r"sm_\d{2,3}", arch):
            raise UsageError(f"--arch {arch}: must be an architecture of NVIDIA, such as sm_90")
    if not archs:
        raise UsageError("--arch: name at least one, such as sm_90")
    shipped = [json.loads(file.read_text(encoding="utf-8"))["device"] for file in sorted(winners.SHIPPED.glob("*.json"))]
    if options.call:
        return [Task(call, "", "", "", *where) for call in _functions(options) for where in _places(archs, shipped)]
    dtypes = console.pick("dtype", [options.dtype], (*DTYPES, "float64"))
    layouts = console.pick("layout", [options.layout], LAYOUTS)
    chosen = console.operators("build", options.operator)
    known = {case for operator in chosen for case in operator.cases.BENCH}
    cases = console.pick("case", [options.case], sorted(known)) or sorted(known)
    return [
        Task(operator.name, case, dtype, layout, arch, device)
        for arch, device in _places(archs, shipped)
        for operator in chosen
        for case in cases
        if case in operator.cases.BENCH
        for dtype in dtypes
        for layout in layouts
    ]


def _places(archs: list[str], shipped: list[str]) -> list[tuple[str, str]]:
    """Each architecture with default configurations, and with those of each of its devices that have winners."""
    return [(arch, device) for arch in archs for device in ("", *(d for d in shipped if d.endswith(f" {arch}")))]


def _functions(options: argparse.Namespace) -> list[str]:
    if options.operator:
        raise UsageError("--call: name operators of Sonde, or functions of your own")
    for call in options.call:
        if not re.fullmatch(r"[\w.]+:\w+", call):
            raise UsageError(f"--call {call}: must be MODULE:FUNCTION")
    return list(options.call)


def _groups(built: list) -> list[tuple[str, str, list]]:
    keys = sorted({(b.task.operator, b.task.arch) for b in built})
    return [(n, a, [b for b in built if (b.task.operator, b.task.arch) == (n, a)]) for n, a in keys]
