"""Pictures of benchmark records: speed-up and memory against eager PyTorch.

Every picture has logarithmic axes and the same colours with the same meanings, so that any two can be compared.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from .console import UsageError, writable

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {"forward": "#1b6ca8", "forward + backward": "#8fc1e3", "sonde": "#d1652b", "eager PyTorch": "#a3a3a3"}
PHASES = {"forward": "forward", "forward_backward": "forward + backward"}
TEXT, FAINT = "#333333", "#e2e2e2"
ROW = 0.3  # inches; about 30 rows fit on a screen
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "svg.hashsalt": "sonde",
    "svg.fonttype": "path",  # with another font a viewer would lay out text differently and cut it
}


def check(option: str, file: str | None) -> None:
    """UsageError before the work if the picture could not be drawn after it."""
    writable(option, file, SUFFIXES)
    if file is not None and find_spec("matplotlib") is None:
        raise UsageError(f"{option} {file}: needs matplotlib, which is not installed; it comes with the extra sonde[plot]")


def save(records: Sequence[dict], file: str, title: str = "", like: Sequence[dict] = ()) -> bool:
    """Draw `records` into `file`; if that is not possible, print why and return False.

    The axes span `records` and `like`, so pictures with the same `like` have the same axes.
    """
    drawable = [r for r in records if r["speedup"] and "eager" in r["speedup"]]
    if not drawable:
        print("no picture: no record has a speed-up over eager PyTorch", file=sys.stderr)
        return False
    if not _has_matplotlib():
        return False
    both = all("forward_backward" in r["figures"]["sonde"] for r in drawable)
    where = drawable[0]["environment"]
    names = ", ".join(dict.fromkeys(r["operator"] for r in drawable))
    rows = _rows(drawable)
    figure, (speed, memory) = _figure(title or f"{names}: {_device(where)}", len(rows), 2)
    shown = [*drawable, *(r for r in like if r["speedup"] and "eager" in r["speedup"])]
    phase = "forward_backward" if both else "forward"
    _speed(speed, rows, PHASES if both else ["forward"], _span(v for r in shown for p in PHASES for v in [speedup(r, p)]))
    _headed(speed, "Times faster than eager PyTorch" + (", device time" if where["kind"] == "cuda" else ""))
    _memory(memory, rows, phase, _span(v for r in shown for name in ("sonde", "eager") for v in [_mib(r, name, phase)]))
    _headed(memory, f"Peak MiB beyond the inputs, {PHASES[phase]}")
    _finish(figure, rows, _headers(rows), file, ["forward", *["forward + backward"] * both, "sonde", "eager PyTorch"])
    return True


def save_best(best: Mapping[str, Mapping[str, dict]], file: str, title: str) -> bool:
    """Draw one row per operator and one column per kind of device: `best` maps kind, then operator, to a record."""
    if not _has_matplotlib():
        return False
    operators = list(dict.fromkeys(name for found in best.values() for name in found))
    figure, columns = _figure(title, len(operators), len(best))
    span = _span(speedup(r, p) for found in best.values() for r in found.values() for p in PHASES)
    rows: list[tuple[str, dict | None]] = []
    for axes, (kind, found) in zip(columns, best.items()):
        rows = [(name, found.get(name)) for name in operators]
        _speed(axes, rows, PHASES, span)
        _headed(axes, kind)
    _finish(figure, rows, set(), file, list(PHASES.values()))
    return True


def speedup(record: dict, phase: str) -> float | None:
    """Times faster than eager PyTorch: by device time on GPUs, by the time of a call on CPUs."""
    found = record["speedup"]["eager"].get(phase, {})
    return found.get("graph_ms" if record["environment"]["kind"] == "cuda" else "call_ms")


def _mib(record: dict, name: str, phase: str) -> float | None:
    return record["figures"].get(name, {}).get(phase, {}).get("peak_mib")


def _why_absent(record: dict) -> str:
    failed = record["figures"].get("eager", {}).get("failed", "")
    return "eager ran out of memory" if "out of memory" in failed else "eager did not run"


def _has_matplotlib() -> bool:
    found = find_spec("matplotlib") is not None
    if not found:
        print("no picture: matplotlib is not installed; it comes with the extra sonde[plot]", file=sys.stderr)
    return found


def _device(where: Mapping) -> str:
    return where["device"] if where["kind"] == "cuda" else f"{where['device']}, {where['threads']} threads"


def _rows(records: Sequence[dict]) -> list[tuple[str, dict | None]]:
    """Labels and records. With several operators, each starts with a header row, whose record is None."""
    varying = [k for k in ("dtype", "layout", "impl") if len({r[k] for r in records}) > 1]
    several = len({r["operator"] for r in records}) > 1
    rows: list[tuple[str, dict | None]] = []
    for i, r in enumerate(records):
        if several and (i == 0 or r["operator"] != records[i - 1]["operator"]):
            rows.append((r["operator"], None))
        rows.append((", ".join(r[k] for k in ("case", *varying)), r))
    return rows


def _headers(rows: Sequence[tuple[str, dict | None]]) -> set[int]:
    return {y for y, (_, record) in enumerate(rows) if record is None}


def _headed(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)


def _span(values: Iterable[float | None]) -> tuple[float, float]:
    known = [v for v in values if v]
    return (min(known), max(known)) if known else (1.0, 1.0)


def _figure(title: str, rows: int, columns: int) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    lines = textwrap.wrap(title, 100)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 1.25 + 0.2 * len(lines) + ROW * rows), layout="constrained", facecolor="white")
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontweight="bold", fontsize=11)
        return figure, figure.subplots(1, columns, sharey=True, squeeze=False)[0]


def _speed(axes, rows: Sequence[tuple[str, dict | None]], phases: Iterable[str], span: tuple[float, float]) -> None:
    """Bars start at 1, which is eager's speed; faster is to the right."""
    phases = list(phases)
    axes.set_xscale("log")
    axes.set_xlim(min(0.9, 0.6 * span[0]), 4 * max(span[1], 2))
    height = 0.76 / len(phases)
    for y, (_, record) in enumerate(rows):
        for i, phase in enumerate(phases):
            at = y + (i - (len(phases) - 1) / 2) * height
            value = speedup(record, phase) if record else None
            if value:
                axes.barh(at, value - 1, height * 0.92, left=1, color=COLOURS[PHASES[phase]])
            if record:
                text = _number(value) + "×" if value else _why_absent(record)
                x = max(value or 1, 1)
                axes.annotate(text, (x, at), (3, -0.5), textcoords="offset points", va="center", fontsize=7.5)
    axes.axvline(1, color=TEXT, linewidth=0.8)
    _decades(axes, "×")


def _memory(axes, rows: Sequence[tuple[str, dict | None]], phase: str, span: tuple[float, float]) -> None:
    """One dot per contender, joined by a line: bars would need a zero, which a logarithmic axis does not have."""
    axes.set_xscale("log")
    axes.set_xlim(span[0] / 3, span[1] * 4)
    for y, (_, record) in enumerate(rows):
        if record is None:
            continue
        pair = [(name, _mib(record, at, phase)) for name, at in (("sonde", "sonde"), ("eager PyTorch", "eager"))]
        known = sorted(((value, name) for name, value in pair if value), key=lambda p: p[0])
        if len(known) == 2:
            axes.plot([known[0][0], known[1][0]], [y, y], color=FAINT, linewidth=3, solid_capstyle="round", zorder=1)
        for i, (value, name) in enumerate(known):
            axes.plot([value], [y], "o", color=COLOURS[name], markersize=6, zorder=3 - i)
            left = i == 0 and len(known) == 2
            where = dict(ha="right" if left else "left", va="center", fontsize=7.5)
            axes.annotate(_number(value), (value, y), (-6 if left else 6, -0.5), textcoords="offset points", **where)
    _decades(axes, "")


def _decades(axes, unit: str) -> None:
    low, high = axes.get_xlim()
    ticks = [10.0**i for i in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    axes.set_xticks([], minor=True)
    axes.set_xticks(ticks, [f"{_number(t)}{unit}" for t in ticks])
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def _finish(figure, rows: Sequence[tuple[str, dict | None]], headers: set[int], file: str, legend: Sequence[str]) -> None:
    import matplotlib
    from matplotlib.patches import Patch

    first = figure.axes[0]
    with matplotlib.rc_context(STYLE):
        first.set_yticks(range(len(rows)), [label for label, _ in rows])
        for y, text in enumerate(first.get_yticklabels()):
            text.set_fontweight("bold" if y in headers else "normal")
        first.set_ylim(len(rows) - 0.45, -0.55)
        for axes in figure.axes:
            axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
            axes.tick_params(length=0)
        figure.legend(
            handles=[Patch(color=COLOURS[name], label=name) for name in legend],
            loc="outside lower left",
            frameon=False,
            ncols=len(legend),
        )
        figure.savefig(file, dpi=160, metadata={"Date": None} if str(file).endswith(".svg") else None)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 or value == int(value) else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
