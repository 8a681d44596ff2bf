"""Write the tables and pictures of measured results into README and docs, from the JSON in benchmarks/results.

Text between ``<!-- results:begin -->`` and ``<!-- results:end -->`` is replaced: by one table with the best case of each operator,
or by every record after ``<!-- results:begin full -->``. Operators, cases and devices are those that the records name, so new ones
appear without a change here. With --check nothing is written, and the exit code is 1 if a file does not match the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from sonde.cli import plot
from sonde.cli.bench import number, ratio, times, worst
from sonde.operators import OPERATORS

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- results:begin ?(\w*) -->\n).*?(<!-- results:end -->)", re.DOTALL)
KINDS = {"cuda": "GPU", "cpu": "CPU"}
BEST = "best.svg"
ROWS = 26  # most rows of a picture that fits a screen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n")[1])
    parser.add_argument("files", nargs="*", type=Path, help="Markdown files (default: README.md and docs)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    options = parser.parse_args(argv)
    devices = load(options.results)
    if not options.check:
        draw(devices, options.results)
    stale = []
    for file in options.files or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = file.read_text(encoding="utf-8")
        new = MARKED.sub(lambda m, file=file: f"{m[1]}{section(devices, m[2], options.results, file.parent)}{m[3]}", text)
        if new != text:
            stale.append(file)
            if not options.check:
                file.write_text(new, encoding="utf-8")
    for file in stale:
        print(f"{file}: {'does not match the results; run benchmarks/report.py' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def load(results: Path) -> dict[Path, list[dict]]:
    """Records by device folder, GPUs first; operators in the order of their table, cases from large to small."""
    order = list(OPERATORS)
    found = {}
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        files = (json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json")))
        records = [record for content in files if isinstance(content, list) for record in content]
        if records:
            found[folder] = sorted(records, key=lambda r: (_place(r, order), -r["counted"]["taps"], r["case"], *variant(r)))
    return dict(sorted(found.items(), key=lambda item: item[1][0]["environment"]["kind"] != "cuda"))


def _place(record: dict, order: list[str]) -> tuple[int, str]:
    name = record["operator"]
    return (order.index(name) if name in order else len(order), name)


def variant(record: dict) -> tuple[str, str, str]:
    return record["dtype"], record["layout"], record["impl"]


def brief(records: list[dict]) -> list[dict]:
    return [r for r in records if variant(r) == ("float32", "contiguous", "auto")] or records


def by_operator(records: Iterable[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for record in records:
        found.setdefault(record["operator"], []).append(record)
    return found


def best(devices: dict[Path, list[dict]]) -> dict[str, dict[str, dict]]:
    """For each kind of device and operator, the record with the largest speed-up of forward and backward, else of forward."""
    found: dict[str, dict[str, dict]] = {}
    for records in devices.values():
        kind = found.setdefault(KINDS[records[0]["environment"]["kind"]], {})
        for name, group in by_operator(brief(records)).items():
            for record in [r for r in group if r["speedup"] and plot.speedup(r, "forward")]:
                if name not in kind or _gain(record) > _gain(kind[name]):
                    kind[name] = record
    return found


def _gain(record: dict) -> tuple[float, float]:
    return plot.speedup(record, "forward_backward") or 0, plot.speedup(record, "forward") or 0


# ---- pictures -----------------------------------------------------------------------------------------------------------------


def pictures(records: list[dict]) -> dict[str, list[dict]]:
    """Records by the name of their picture: operators of one engine together, unless they do not fit a screen."""
    found: dict[str, list[dict]] = {}
    for record in brief(records):
        operator = OPERATORS.get(record["operator"])
        engine = operator.engine.strip("_") if operator else ""
        found.setdefault(engine or record["operator"], []).append(record)
    parted = {}
    for name, group in found.items():
        parted |= {name: group} if len(group) <= ROWS else by_operator(group)
    return {f"speedup-{name}.svg": group for name, group in parted.items()}


def draw(devices: dict[Path, list[dict]], results: Path) -> None:
    for folder, records in devices.items():
        for old in folder.glob("speedup*.svg"):
            old.unlink()
        for name, group in pictures(records).items():
            plot.save(group, str(folder / name), like=[r for others in devices.values() for r in brief(others)])
    chosen = {f"{kind}: {', '.join(_devices(devices, kind))}": found for kind, found in best(devices).items()}
    plot.save_best(chosen, str(results / BEST), "Times faster than eager PyTorch: the best case of each operator, float32")


def _devices(devices: dict[Path, list[dict]], kind: str) -> list[str]:
    where = [records[0]["environment"] for records in devices.values()]
    return [short(e) for e in where if KINDS[e["kind"]] == kind]


def short(environment: dict) -> str:
    return re.sub(r"\(R\)| Processor|  +| @ .*", "", environment["device"]).strip()


# ---- tables -------------------------------------------------------------------------------------------------------------------


def section(devices: dict[Path, list[dict]], view: str, results: Path, base: Path) -> str:
    if view not in ("", "full"):
        raise SystemExit(f"results:begin {view}: must be 'results:begin' or 'results:begin full'")
    if not devices:
        return ""
    if view:
        parts = [PAGE, *(part for folder, records in devices.items() for part in device(folder, records, base))]
    else:
        parts = overview(devices, results, base)
    return "\n" + "\n\n".join(parts) + "\n\n"


def overview(devices: dict[Path, list[dict]], results: Path, base: Path) -> list[str]:
    """A picture and a table of the best cases."""
    found = best(devices)
    head, rule = ["operator"], ["---"]
    for kind in found:
        head += [f"{kind}: best case", "forward", "with backward", "memory"][: 4 if kind == "GPU" else 3]
        rule += ["---", "---:", "---:", "---:"][: 4 if kind == "GPU" else 3]
    rows = []
    for name in dict.fromkeys(name for chosen in found.values() for name in chosen):
        row = [f"`{name}`"]
        for kind, chosen in found.items():
            record = chosen.get(name)
            cells = ["–"] * 4
            if record:
                less = record["speedup"]["eager"].get("forward_backward", record["speedup"]["eager"]["forward"]).get("peak_mib")
                cells = [record["case"], *(times(plot.speedup(record, p)) for p in plot.PHASES), less_memory(less)]
            row += cells[: 4 if kind == "GPU" else 3]
        rows.append(row)
    where = "; ".join(f"{kind}: {' and '.join(_devices(devices, kind))}" for kind in found)
    note = f"How many times faster than eager PyTorch, in float32, in the best case of each operator ({where})."
    picture = results / BEST
    what = "Times faster than eager PyTorch, the best case of each operator"
    return [note, table(head, rule, rows), *[f"![{what}]({link(picture, base)})"] * picture.exists()]


def less_memory(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    if 0.95 < ratio < 1.05:
        return "the same"
    return f"{number(ratio)}× less" if ratio > 1 else f"{number(1 / ratio)}× more"


PAGE = """# Results

This page is written by `benchmarks/report.py` from the JSON in `benchmarks/results`; no figure is typed.
[How to read it](measuring.md) says what is measured and how. Cases are named after the model whose sizes they have;
`B`, `C`, `Q`, … are the letters of the operator's docstring."""


def device(folder: Path, records: list[dict], base: Path) -> list[str]:
    where = records[0]["environment"]
    gpu = where["kind"] == "cuda"
    commits = ", ".join(sorted({(r["environment"]["commit"] or "unknown")[:12] for r in records}))
    name = short(where) if gpu else f"{short(where)}, {where['threads']} threads"
    if gpu:
        software = f"driver {where['driver']}, torch {where['torch']}, triton {where['triton']}"
        note = "Device time is the replay of a CUDA graph."
    else:
        software = f"torch {where['torch']}, numba {where['numba']}"
        note = "Only ratios mean anything: the contenders took turns in one run."
    parts = [f"## {name}", f"{where['device']}; {software}; commits {commits}. {note}"]
    for file, group in pictures(records).items():
        if (folder / file).exists():
            shown = ", ".join(by_operator(group))
            parts.append(f"![{shown}: speed-up and memory against eager PyTorch]({link(folder / file, base)})")
    for operator, group in by_operator(records).items():
        parts += [f"### `{operator}` on {name}", *operator_tables(group, gpu)]
    return [*parts, f"### Host time on {name}", *host(records)]


def operator_tables(records: list[dict], gpu: bool) -> list[str]:
    kind = "graph_ms" if gpu else "call_ms"
    what = "device time" if gpu else "time of a call"
    first = ["case", *varied(records)]
    rule = ["---"] * len(first)
    head = [*first]
    for phase in ("forward", "with backward"):
        head += [f"{phase} ms: sonde / eager", "faster"]
    head += ["MiB: sonde / eager", "worst error"]
    rows = []
    for r in records:
        row = keys(r, records)
        for phase in plot.PHASES:
            row += [pair(r, phase, kind), f"**{times(ratio(r, 'eager', phase, kind))}**"]
        rows.append([*row, pair(r, "forward_backward", "peak_mib"), f"{worst(r):.1e}"])
    parts = [f"In {what}; memory is the peak beyond the inputs, with backward:", table(head, [*rule, *["---:"] * 6], rows)]
    if gpu:
        kinds = {"call_ms": "host included", "cold_ms": "cold L2"}
        columns = [(p, k) for p in plot.PHASES for k in kinds if any(measured(r, p, k) for r in records)]
        head = [*first, *(f"{plot.PHASES[p]}, {kinds[k]}" for p, k in columns)]
        rows = [[*keys(r, records), *(compared(r, p, k) for p, k in columns)] for r in records]
        title = "With the host, and with a cold L2 cache: ms, sonde / eager (times faster)"
        parts.append(folded(title, table(head, [*rule, *["---:"] * len(columns)], rows)))
    head = [*first, "terms added", "MB moved", "floor ms", "share of floor"] + ["deterministic, with backward, ms"] * gpu
    rows = []
    for r in records:
        floor = r["floor"]["forward"]
        cells = [f"{r['counted']['taps']:,}", number(r["counted"]["bytes"]["forward"] / 1e6)]
        cells += [f"{number(floor['ms'])} ({floor['kind']})", f"{100 * floor['share']:.0f} %"]
        rows.append([*keys(r, records), *cells, *[number(r.get("deterministic_ms"))] * gpu])
    parts.append(folded("Work and floor of the forward pass", table(head, [*rule, *["---:"] * (len(head) - len(rule))], rows)))
    sizes = {r["case"]: ", ".join(f"{k}={spelt(v)}" for k, v in r["sizes"].items()) for r in records}
    parts.append(folded("Sizes of the cases", table(["case", "sizes"], ["---", "---"], [[c, s] for c, s in sizes.items()])))
    return parts


def host(records: list[dict]) -> list[str]:
    """Host time does not depend on the case: one row for each operator, dtype and layout."""
    found: dict[tuple, dict] = {}
    for r in records:
        found.setdefault((r["operator"], *variant(r)), r["host_us"])
    head = ["operator", "dtype", "layout", "implementation"]
    head += ["forward µs above `torch.relu`", "with backward µs above a bare `autograd.Function`"]
    rows = [[f"`{key[0]}`", *key[1:], *(f"{cost[p]['above']:.0f}" for p in plot.PHASES)] for key, cost in found.items()]
    return ["A call on a tiny input, in µs:", table(head, ["---"] * 4 + ["---:"] * 2, rows)]


def varied(records: list[dict]) -> list[str]:
    """The column for what varies besides the case, if anything does."""
    return ["dtype, layout"] if len({variant(r) for r in records}) > 1 else []


def keys(record: dict, records: list[dict]) -> list[str]:
    impl = [record["impl"]] * (len({r["impl"] for r in records}) > 1)
    return [record["case"], *[", ".join([record["dtype"], record["layout"].replace("_", "-"), *impl])] * len(varied(records))]


def measured(record: dict, phase: str, kind: str) -> bool:
    return kind in record["figures"]["sonde"].get(phase, {})


def pair(record: dict, phase: str, kind: str) -> str:
    figures = record["figures"]
    return " / ".join(number(figures.get(name, {}).get(phase, {}).get(kind)) for name in ("sonde", "eager"))


def compared(record: dict, phase: str, kind: str) -> str:
    return f"{pair(record, phase, kind)} ({times(ratio(record, 'eager', phase, kind))})" if measured(record, phase, kind) else "–"


def spelt(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join("×".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v) for v in value)
    return str(value)


def table(head: list[str], rule: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def link(file: Path, base: Path) -> str:
    return Path(os.path.relpath(file, base)).as_posix()


if __name__ == "__main__":
    sys.exit(main())
