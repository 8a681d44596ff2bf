"""Pictures of benchmark records: speed-up and memory against eager PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from .console import UsageError, writable

SUFFIXES = (".png", ".svg", ".pdf")
OURS, OURS_BACKWARD, THEIRS = "#1b6ca8", "#7fb2d9", "#c9c9c9"
LOG = 100  # times the shortest bar that the longest may be before lengths become logarithms
ABSENT = dict.fromkeys(("graph_ms", "call_ms", "peak_mib"), float("nan"))  # of a contender that did not run


def check(option: str, file: str | None) -> None:
    """Complain before the work if the picture could not be drawn after it."""
    writable(option, file, SUFFIXES)
    if file is not None and find_spec("matplotlib") is None:
        raise UsageError(f"{option} {file}: needs matplotlib, which is not installed; it comes with the extra sonde[plot]")


def save(records: Sequence[dict], file: str, title: str = "") -> bool:
    """Draw `records` into `file`; False, with one line that says why, where that is not possible."""
    drawable = [r for r in records if r["speedup"] and "eager" in r["speedup"]]
    if not drawable:
        print("no picture: no record has a speed-up over eager PyTorch", file=sys.stderr)
        return False
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed; it comes with the extra sonde[plot]", file=sys.stderr)
        return False
    _draw(drawable, file, title)
    return True


def _draw(records: Sequence[dict], file: str, title: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    both = all("forward_backward" in r["figures"]["sonde"] for r in records)
    phase = "forward_backward" if both else "forward"
    varying = [k for k in ("case", "dtype", "layout", "impl") if len({r[k] for r in records}) > 1]
    names = ["\n".join([r["operator"], ", ".join(r[k] for k in varying)]).strip() for r in records]
    where = records[0]["environment"]
    gpu = where["kind"] == "cuda"
    on = where["device"] if gpu else f"CPU, {where['threads']} threads"
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "sonde", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.5, 1.5 + 0.62 * len(records)), layout="constrained")
        speed, memory = figure.subplots(1, 2, sharey=True)
        figure.suptitle(title or f"Sonde against eager PyTorch, {on}", x=0.01, ha="left", fontweight="bold")

        rows = range(len(records))
        kind = "graph_ms" if gpu else "call_ms"
        bars = [("forward", OURS)] + [("forward_backward", OURS_BACKWARD)] * both
        height = 0.72 / len(bars)
        for i, (name, colour) in enumerate(bars):
            values = [(ABSENT | r["speedup"]["eager"].get(name, {}))[kind] for r in records]
            at = [row + (i - (len(bars) - 1) / 2) * height for row in rows]
            drawn = speed.barh(at, values, height * 0.92, color=colour, label=name.replace("_", " + "))
            speed.bar_label(drawn, ["–" if v != v else f"{v:.1f}×" for v in values], padding=3)
        speed.axvline(1, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
        speed.set_title("Times faster than eager" + (" (device time)" if gpu else ""), loc="left")
        speed.set_yticks(list(rows), names)
        speed.invert_yaxis()
        _legend(speed, len(bars))

        height = 0.36
        for i, (name, label, colour) in enumerate((("sonde", "sonde", bars[-1][1]), ("eager", "eager PyTorch", THEIRS))):
            values = [(ABSENT | r["figures"][name].get(phase, {}))["peak_mib"] for r in records]
            drawn = memory.barh([row + (i - 0.5) * height for row in rows], values, height * 0.92, color=colour, label=label)
            memory.bar_label(drawn, ["–" if v != v else f"{v:,.0f}" if v >= 10 else f"{v:.1f}" for v in values], padding=3)
        memory.set_title(f"Peak extra memory, {phase.replace('_', ' + ')} (MiB)", loc="left")
        _legend(memory, 2)

        for axes in (speed, memory):
            axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
            axes.tick_params(length=0)
            spread = [bar.get_width() for bar in axes.patches if bar.get_width() > 0]
            if spread and max(spread) > LOG * min(spread):
                axes.set_xscale("log")
                axes.set_title(f"{axes.get_title('left')}, logarithmic", loc="left")
            axes.set_xticks([], minor=True)
            axes.set_xticks([])
            axes.margins(x=0.18, y=0.01)
        figure.savefig(file, dpi=160, metadata={"Date": None} if str(file).endswith(".svg") else None)


def _legend(axes, columns: int) -> None:
    if columns > 1:
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=columns)
