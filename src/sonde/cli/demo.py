"""Run every operator on a real workload here, and show its error, speed and memory next to eager PyTorch.

Takes a minute on two idle CPU cores the first time, when kernels are compiled, then half a minute; workloads are scaled down there.
The workloads are pixelSplat's epipolar attention, images at random positions for grid_sample, SparseDrive's detection head, the
decoder of Deformable-DETR, a point cloud on a grid, and small products and attention.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .console import dump, left_out, operators, table

if TYPE_CHECKING:
    from .protocol import Job


def arguments(parser: argparse.ArgumentParser) -> None:
    from .plot import SUFFIXES

    parser.add_argument("--json", action="store_true", help="print the records instead of the table")
    parser.add_argument("--plot", metavar="FILE", help=f"draw speed-ups and memory ({', '.join(SUFFIXES)})")


def run(options: argparse.Namespace) -> int:
    busy = busy_cores()
    if busy:  # threads that spin while they wait for each other make a call many times slower if others want their cores
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from . import plot
    from .bench import measured

    plot.check("--plot", options.plot)
    todo = jobs()
    announce_compilation(todo)
    records = list(measured(todo, show=not options.json, extras=False))
    if options.json:
        dump(records)
    else:
        show(records)
        if busy and todo[0].device.type == "cpu":
            print(f"Other work kept {busy:.1f} of {os.cpu_count()} cores busy, so times are off; run it again when they are idle.")
    if options.plot and plot.save(records, options.plot) and not options.json:
        print(f"Picture: {options.plot}")
    return 0 if all(record["correct"] for record in records) else 1


def jobs() -> list[Job]:
    from .bench import device
    from .protocol import Job

    where = device(None)
    return [
        Job(o, o.typical, {**o.cases.BENCH[o.typical], **(o.on_cpu if where.type == "cpu" else {})}, where)
        for o in operators("demo", [])
    ]


def busy_cores() -> float:
    """How many cores other processes kept busy during the last minute; 0 if some core was idle, or unknown."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load if load >= (os.cpu_count() or 1) else 0.0


def announce_compilation(todo: Sequence[Job]) -> None:
    """Print one line if the cache of CPU kernels is empty, to explain why a first run takes longer."""
    from ..op.plan import HAS_NUMBA

    if todo[0].device.type != "cpu" or not HAS_NUMBA:
        return
    from ..op.cpu_cache import cache_folder

    folder = cache_folder()
    if folder is not None and not any(folder.iterdir()):
        print(f"Compiling the CPU kernels into {folder}: about a minute, once for this installation", file=sys.stderr, flush=True)


def show(records: list[dict]) -> None:
    from ..operators import OPERATORS
    from .bench import number, ratio, times, worst

    good = [record for record in records if record["figures"]]  # the others ran out of memory
    where = good[0]["environment"] if good else {}
    cpu = where.get("kind") == "cpu"
    case = "\nscaled down\nfrom case" if cpu else "\n\ncase"
    head = ["\n\noperator", case, "\n\nerror", "forward\nms\nsonde", "\n\neager", "\n\nfaster"]
    head += ["+ backward\nms\nsonde", "\n\neager", "\n\nfaster", "memory\nMiB\nsonde", "\n\neager", "\n\nleaner"]
    rows = []
    for record in good:
        ours, eager = record["figures"]["sonde"], record["figures"]["eager"]
        row = [record["operator"], record["case"], f"{worst(record):.1e}"]
        for phase in ("forward", "forward_backward"):
            row += [number(f.get(phase, {}).get("call_ms")) for f in (ours, eager)]
            row.append(times(ratio(record, "eager", phase, "call_ms")))
        row += [number(f.get(phase, {}).get("peak_mib")) for f in (ours, eager)]
        rows.append([*row, times(ratio(record, "eager", phase, "peak_mib"))])
    if rows:
        on = f"{where['device']}, {where['threads']} threads, workloads scaled down" if cpu else where["device"]
        table(head, rows, f"float32, {on}", left=2)
    for record in records:
        if not record["correct"]:
            print(f"WRONG: {record['operator']}: {record['wrong']}; no speed-up is reported")
    left_out("demo")
    power = [name for name, operator in OPERATORS.items() if operator.family == "power"]
    if cpu and any(record["operator"] in power for record in good):
        print(f"{', '.join(power)} are made for GPUs; on CPUs copy, mm and attention mostly run torch's own routines.")
    print("Error: the largest of the value's and all gradients', relative to the float64 reference, in norm.")
    print("Memory: the peak during forward + backward, inputs not counted.")
    print("Next: sonde bench --backward (real sizes), sonde doctor (what can run here).")
