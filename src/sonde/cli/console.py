"""What the commands print: tables, progress and errors. In a pipe: plain text, and lines on stderr in place of a progress bar."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..operators import Operator


IMPLS = ("auto", "triton", "numba", "reference")  # a copy of op.plan.Impl, because importing that would import torch
LINE_EVERY = 2.0  # seconds between two lines of progress in a pipe


class UsageError(Exception):
    """The request cannot be met as written; the message says what would be."""


def did_you_mean(what: str, given: str, valid: Iterable[str]) -> str:
    valid = list(valid)
    near = get_close_matches(given, valid, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}.{hint} Valid: {', '.join(valid)}"


def pick(what: str, given: Sequence[str], valid: Iterable[str]) -> list[str]:
    """The names in `given`, split at commas; all must be valid."""
    valid = list(valid)
    names = [name for part in given for name in part.split(",") if name]
    for name in names:
        if name not in valid:
            raise UsageError(did_you_mean(what, name, valid))
    return list(dict.fromkeys(names))


def operators(command: str, given: Sequence[str]) -> list[Operator]:
    """The operators named in `given`, or all that support the command; UsageError if a named one does not."""
    from ..operators import OPERATORS

    names = pick("operator", given, OPERATORS)
    for name in names:
        if command in OPERATORS[name].refuses:
            raise UsageError(f"{command} {name}: {OPERATORS[name].refuses[command]}")
    return [OPERATORS[name] for name in names] or [o for o in OPERATORS.values() if command not in o.refuses]


def names(command: str) -> str:
    """The operators that a command takes, for its help."""
    from ..operators import OPERATORS  # which does not import torch

    return ", ".join(name for name, operator in OPERATORS.items() if command not in operator.refuses)


def left_out(command: str) -> None:
    """Print which operators a command that ran on all of them left out, and why."""
    from ..operators import OPERATORS

    for operator in OPERATORS.values():
        if command in operator.refuses:
            print(f"Left out: {operator.name}: {operator.refuses[command]}")


def writable(option: str, file: str | None, suffixes: Sequence[str] = ()) -> None:
    """UsageError if the file could not be written: better now than after an hour of measuring."""
    if file is None or file == "-":
        return
    path = Path(file)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: must be a file in a folder that exists")
    if suffixes and path.suffix not in suffixes:
        raise UsageError(f"{option} {file}: the name must end in one of {', '.join(suffixes)}")


def interactive() -> bool:
    return sys.stdout.isatty() and find_spec("rich") is not None


def table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", left: int = 1) -> None:
    """Print a table whose first `left` columns are words and whose others are numbers."""
    if interactive():
        from rich import box
        from rich.console import Console
        from rich.measure import Measurement
        from rich.table import Table
        from rich.text import Text

        grid = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, name in enumerate(head):
            grid.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=left < len(head))
        for row in rows:
            grid.add_row(*map(Text, row))
        console = Console(highlight=False)
        if left < len(head):  # words may wrap, numbers are never cut
            natural = Measurement.get(console, console.options.update(max_width=1000), grid).maximum
            console = Console(highlight=False, width=max(natural, console.width))
        console.print(grid)
        return
    cells = [[cell.split("\n") for cell in row] for row in (head, *rows)]
    width = [max(len(line) for row in cells for line in row[i]) for i in range(len(head))]
    if title:
        print(title)
    for lines in cells:
        for texts in zip_longest(*lines, fillvalue=""):
            padded = [text.ljust(w) if i < left else text.rjust(w) for i, (text, w) in enumerate(zip(texts, width))]
            print("  " + "  ".join(padded).rstrip())
    print()


def dump(value: Any, file: str = "-") -> None:
    """Write JSON to a file, or to stdout for ``-``."""
    text = json.dumps(_strict(value), indent=1)
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n")


def _strict(value: Any) -> Any:
    """Round floats to five digits; NaN and infinity, which JSON cannot express, become strings."""
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)


@contextmanager
def progress(total: int, show: bool = True) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps. Call the function it yields with the name of the step that begins; this completes the one before."""
    if not (show and interactive()):
        line, steps = _lines(total, show), count()
        yield lambda text: line(next(steps), text)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    done = TextColumn("{task.completed:.0f}/{task.total:.0f}")
    with Progress(BarColumn(), done, TimeElapsedColumn(), TextColumn("{task.description}"), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def begin(text: str) -> None:
            nonlocal begun
            bar.update(task, advance=1 if begun else 0, description=text)
            begun = True

        yield begin


@contextmanager
def meter(total: int, show: bool = True) -> Iterator[Callable[[int, str], None]]:
    """A bar of `total` steps with the time left. Call the function it yields with the number of steps done and a description."""
    if not (show and interactive()):
        yield _lines(total, show)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, TextColumn("{task.description}", markup=False), transient=True, speed_estimate_period=600) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def _lines(total: int, show: bool) -> Callable[[int, str], None]:
    """Progress as lines on stderr: the first at once, then at most one every `LINE_EVERY` seconds."""
    due = 0.0 if show else math.inf

    def line(done: int, text: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)
            due = time.monotonic() + LINE_EVERY

    return line
