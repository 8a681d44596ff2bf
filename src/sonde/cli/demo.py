"""Run every operator on a real workload here: how exact, how fast and how lean it is next to eager PyTorch.

Takes less than a minute on two CPU cores, where each workload is scaled down: epipolar attention as pixelSplat does it, images at
random places for grid_sample, SparseDrive's detection head, the decoder of Deformable-DETR, a cloud of points on a grid.
"""

from __future__ import annotations

import argparse

from .console import dump, left_out, operators, table, writable


def arguments(parser: argparse.ArgumentParser) -> None:
    from .plot import SUFFIXES

    parser.add_argument("--json", action="store_true", help="print the records instead of the table")
    parser.add_argument("--plot", metavar="FILE", help=f"draw speed-ups and memory ({', '.join(SUFFIXES)})")


def run(options: argparse.Namespace) -> int:
    from . import plot
    from .bench import device, measured
    from .protocol import Job

    writable("--plot", options.plot, plot.SUFFIXES)
    where = device(None)
    todo = []
    for operator in operators("demo", []):
        sizes = {**operator.cases.BENCH[operator.typical], **(operator.on_cpu if where.type == "cpu" else {})}
        todo.append(Job(operator, operator.typical, sizes, where))
    records = list(measured(todo, show=not options.json, extras=False))
    if options.json:
        dump(records)
    else:
        show(records)
    if options.plot and plot.save(records, options.plot) and not options.json:
        print(f"Picture: {options.plot}")
    return 0 if all(record["correct"] for record in records) else 1


def show(records: list[dict]) -> None:
    from .bench import number, ratio, times, worst

    head = ["\n\noperator", "\n\ncase", "\n\nerror", "forward\nms\nsonde", "\n\neager", "\n\nfaster"]
    head += ["+ backward\nms\nsonde", "\n\neager", "\n\nfaster", "memory\nMiB\nsonde", "\n\neager", "\n\nleaner"]
    rows = []
    for record in (r for r in records if r["figures"]):
        ours, eager = record["figures"]["sonde"], record["figures"]["eager"]
        row = [record["operator"], record["case"], f"{worst(record):.1e}"]
        for phase in ("forward", "forward_backward"):
            row += [number(f.get(phase, {}).get("call_ms")) for f in (ours, eager)]
            row.append(times(ratio(record, "eager", phase, "call_ms")))
        row += [number(f.get(phase, {}).get("peak_mib")) for f in (ours, eager)]
        rows.append([*row, times(ratio(record, "eager", phase, "peak_mib"))])
    if rows:
        where = next(r for r in records if r["figures"])["environment"]
        on = where["device"] if where["kind"] == "cuda" else f"{where['device']}, {where['threads']} threads, a part of each case"
        table(head, rows, f"float32, {on}", left=2)
    for record in records:
        if not record["correct"]:
            print(f"WRONG: {record['operator']}: {record['wrong']}; no speed-up is reported")
    left_out("demo")
    print("Error: the worst of the value and all gradients against the float64 reference, relative in norm.")
    print("Memory: the peak of forward + backward beyond the inputs.")
    print("Next: sonde bench --backward (real sizes), sonde doctor (what can run here).")
