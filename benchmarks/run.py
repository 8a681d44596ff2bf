"""Run every benchmark case on this machine and keep the results as benchmarks/results/<device>/<case>.json.

A file holds one record per operator, implementation, dtype and layout; a new run replaces the records it measures again and
leaves the others. Wrong results are reported and never kept. The options are those of ``sonde bench``; forward and backward
are always measured. Beside a GPU the host is in one state or another for seconds on end, and short calls are mostly the host's:
with ``--again`` all calls are timed in so many more rounds, and the least of each counts.
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n")[1])
    bench.selection(parser)
    parser.set_defaults(backward=True)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="rounds in which all calls are timed once more")
    options = parser.parse_args()
    try:
        jobs = bench.jobs(options)
    except UsageError as problem:
        parser.error(str(problem))
    records = []
    for record in bench.measured(jobs):
        records.append(record)
        if record["correct"]:
            keep(record, options.out)
        print(record["operator"], record["case"], "kept" if record["correct"] else "WRONG", file=sys.stderr, flush=True)
    for _ in range(options.again):
        for job, record in zip(jobs, records):
            if record["correct"]:
                again(job, record)
                keep(record, options.out)
    bench.show(records)
    return 0 if all(record["correct"] for record in records) else 1


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
