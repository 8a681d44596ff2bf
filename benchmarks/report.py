"""Write the tables and pictures of measured results into README and docs, from the JSON in benchmarks/results.

Text between ``<!-- results:begin -->`` and ``<!-- results:end -->`` is replaced: by the float32 figures and a picture for each
device, or by everything after ``<!-- results:begin full -->``. With --check nothing is written, and the exit code is 1 if a
file does not say what the JSON says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from sonde.cli import plot
from sonde.cli.bench import number, ratio, times, worst

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- results:begin ?(\w*) -->\n).*?(<!-- results:end -->)", re.DOTALL)
PHASES = {"forward": "forward", "forward_backward": "forward + backward"}
PICTURE = "speedup.svg"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n")[1])
    parser.add_argument("files", nargs="*", type=Path, help="Markdown files (default: README.md and docs)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    options = parser.parse_args(argv)
    devices = load(options.results)
    if not options.check:
        for folder, records in devices.items():
            plot.save(brief(records), str(folder / PICTURE))
    stale = []
    for file in options.files or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = file.read_text()
        new = MARKED.sub(lambda m, file=file: f"{m[1]}{section(devices, m[2], file.parent)}{m[3]}", text)
        if new != text:
            stale.append(file)
            if not options.check:
                file.write_text(new)
    for file in stale:
        print(f"{file}: {'does not match the results; run benchmarks/report.py' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def load(results: Path) -> dict[Path, list[dict]]:
    """Records by device folder, GPUs first; operators in the order of the alphabet, cases from large to small."""
    found = {}
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        records = [record for file in sorted(folder.glob("*.json")) for record in json.loads(file.read_text())]
        if records:
            found[folder] = sorted(records, key=lambda r: (r["operator"], -r["counted"]["taps"], r["dtype"], r["layout"]))
    return dict(sorted(found.items(), key=lambda item: item[1][0]["environment"]["kind"] != "cuda"))


def brief(records: list[dict]) -> list[dict]:
    return [r for r in records if (r["dtype"], r["layout"], r["impl"]) == ("float32", "contiguous", "auto")] or records


def section(devices: dict[Path, list[dict]], view: str, base: Path) -> str:
    """Markdown for every device: what it is, a table, and in the short view a picture."""
    if view not in ("", "full"):
        raise SystemExit(f"results:begin {view}: must be 'results:begin' or 'results:begin full'")
    parts = []
    for folder, records in devices.items():
        shown = records if view else brief(records)
        parts.append(heading(shown))
        picture = folder / PICTURE
        if not view and picture.exists():
            parts.append(f"![Speed-up and memory against eager PyTorch]({Path(os.path.relpath(picture, base)).as_posix()})")
        parts.append(markdown(shown, bool(view)))
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else ""


def heading(records: list[dict]) -> str:
    where = records[0]["environment"]
    commits = ", ".join(sorted({(r["environment"]["commit"] or "unknown")[:12] for r in records}))
    gpu = where["kind"] == "cuda"
    on = f"**{where['device']}**, driver {where['driver']}" if gpu else f"**CPU, {where['threads']} threads** ({where['device']})"
    software = f"torch {where['torch']}, " + (f"triton {where['triton']}" if gpu else f"numba {where['numba']}")
    note = "device time by CUDA-graph replay" if gpu else "only the ratios mean anything: contenders took turns in one run"
    return f"{on}, {software}, commit {commits}; {note}."


def markdown(records: list[dict], full: bool) -> str:
    gpu = records[0]["environment"]["kind"] == "cuda"
    kinds = {"graph_ms": "device", "call_ms": "with host", "cold_ms": "cold L2"} if gpu else {"call_ms": "call"}
    kinds = {k: title for k, title in kinds.items() if any(k in r["figures"]["sonde"]["forward"] for r in records)}
    if not full:
        kinds = dict([next(iter(kinds.items()))])
    words = ["operator", "case"] + (["dtype", "layout", "impl"] if full else [])
    head = [*words]
    cells = [[f"`{r['operator']}`", *(r[k] for k in words[1:])] for r in records]
    for phase, name in PHASES.items():
        for kind, title in kinds.items():
            head.append(f"{name} ms, {title}: sonde / eager" if full else f"{name} ms: sonde / eager")
            head.append("faster")
            for row, r in zip(cells, records):
                row += [pair(r, phase, kind), f"**{times(ratio(r, 'eager', phase, kind))}**"]
    if full and gpu:
        head.append("forward + backward ms, device, deterministic")
        for row, r in zip(cells, records):
            row.append(number(r.get("deterministic_ms")))
    head.append("peak MiB: sonde / eager")
    head.append("worst error")
    for row, r in zip(cells, records):
        row += [pair(r, "forward_backward", "peak_mib"), f"{worst(r):.1e}"]
    if full:
        head += ["taps", "MB", "floor ms (forward)", "share of floor", "host µs above relu / Function"]
        for row, r in zip(cells, records):
            floor, host = r["floor"]["forward"], r["host_us"]
            row += [f"{r['counted']['taps']:,}", number(r["counted"]["bytes"]["forward"] / 1e6)]
            row += [f"{number(floor['ms'])} ({floor['kind']})", f"{100 * floor['share']:.0f} %"]
            row += [f"{host['forward']['above']:.0f} / {host['forward_backward']['above']:.0f}"]
    rule = ["---"] * len(words) + ["---:"] * (len(head) - len(words))
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *cells))


def pair(record: dict, phase: str, kind: str) -> str:
    figures = record["figures"]
    return " / ".join(number(figures.get(name, {}).get(phase, {}).get(kind)) for name in ("sonde", "eager"))


if __name__ == "__main__":
    sys.exit(main())
