"""Run every benchmark case on this machine and keep the results as benchmarks/results/<device>/<case>.json.

A file holds one record per operator, implementation, dtype and layout; a new run replaces the records that it measures again and
leaves the others. Wrong results are reported and never kept. The options are those of ``sonde bench``; forward and backward
are always measured. Host time dominates short calls on a GPU, and the host can be slow for seconds at a time: ``--again N`` times
all calls in N more rounds and keeps the smallest time of each. ``--check`` keeps nothing: it names what is more than 5 % slower
than its record for this device, and exits with 1 if anything is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sonde.cli import bench
from sonde.cli.console import UsageError, dump
from sonde.cli.environment import slug
from sonde.cli.protocol import again

RESULTS = Path(__file__).parent / "results"
SLOWER = 1.05  # times the record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n")[1])
    bench.selection(parser)
    parser.set_defaults(backward=True)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="rounds in which all calls are timed once more")
    parser.add_argument("--check", action="store_true", help="keep nothing; name what is more than 5 %% slower than its record")
    options = parser.parse_args()
    try:
        jobs = bench.jobs(options)
    except UsageError as problem:
        parser.error(str(problem))
    records = []
    for record in bench.measured(jobs):
        records.append(record)
        if record["correct"] and not options.check:
            keep(record, options.out)
        done = "measured" if options.check else "kept"
        print(record["operator"], record["case"], done if record["correct"] else "WRONG", file=sys.stderr, flush=True)
    for _ in range(options.again):
        for job, record in zip(jobs, records):
            if record["correct"]:
                again(job, record)
                if not options.check:
                    keep(record, options.out)
    bench.show(records)
    slow = [line for record in records if record["correct"] for line in slower(record, options.out)] if options.check else []
    for line in slow:
        print(line)
    return 0 if all(record["correct"] for record in records) and not slow else 1


def slower(record: dict, results: Path) -> list[str]:
    """One line per phase that got slower than the record: by device time on GPUs, by the speed-up over eager on CPUs."""
    name = " ".join([record["operator"], record["case"], *kind(record)[1:]])
    file = results / slug(record["environment"]) / f"{record['case']}.json"
    known = [r for r in json.loads(file.read_text()) if kind(r) == kind(record)] if file.exists() else []
    if not known:
        print(f"{name}: no record of this device to compare with", file=sys.stderr)
        return []
    found = []
    for phase in ("forward", "forward_backward"):
        if record["environment"]["kind"] == "cuda":
            before, now = (r["figures"]["sonde"].get(phase, {}).get("graph_ms") for r in (known[0], record))
            ratio, unit = (now / before if before and now else None), " ms"
        else:
            before, now = (bench.ratio(r, "eager", phase, "call_ms") for r in (known[0], record))
            ratio, unit = (before / now if before and now else None), "× eager's speed"
        if ratio and ratio > SLOWER:
            found.append(f"SLOWER: {name}, {phase}: {before:.3g} -> {now:.3g}{unit}, {100 * (ratio - 1):.0f} % slower")
    return found


def keep(record: dict, results: Path) -> None:
    """Put a record into its file, in place of an older one of the same kind."""
    file = results / slug(record["environment"]) / f"{record['case']}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    others = [r for r in json.loads(file.read_text()) if kind(r) != kind(record)] if file.exists() else []
    dump(sorted([*others, record], key=kind), str(file))


def kind(record: dict) -> tuple[str, ...]:
    return tuple(record[k] for k in ("operator", "impl", "dtype", "layout"))


if __name__ == "__main__":
    sys.exit(main())
