"""Show, clear, export and import what was tuned on this machine.

show lists the winners; clear deletes them with their timings; export writes them to FILE, and import reads them from FILE, where a
stored winner is replaced only by one that is 5 % faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .console import UsageError, did_you_mean, dump, table, writable

if TYPE_CHECKING:
    from ..jit.store import Store, Winner

SHOWN = 5  # how many invalid rows are listed with their reason
ACTIONS = {  # and the arguments that each takes
    "show": ("kernel", "json"),
    "clear": ("kernel", "yes"),
    "export": ("file", "device"),
    "import": ("file",),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", default="show", metavar="ACTION", help=f"{', '.join(ACTIONS)} (default: show)")
    parser.add_argument("file", nargs="?", metavar="FILE", help="where export writes, - for the terminal, and import reads")
    parser.add_argument("--kernel", metavar="NAME", help="show or clear one kernel only")
    parser.add_argument("--device", metavar="NAME", help="export one device only")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="show: write JSON to FILE; print it without one")
    parser.add_argument("--yes", action="store_true", help="clear without asking for confirmation (asked only on a terminal)")


def run(options: argparse.Namespace) -> int:
    from ..jit.store import open_store

    action = options.action
    if action not in ACTIONS:
        raise UsageError(did_you_mean("action", action, ACTIONS))
    for name in ("file", "kernel", "device", "json", "yes"):
        if getattr(options, name) and name not in ACTIONS[action]:
            what = repr(options.file) if name == "file" else f"--{name}"
            raise UsageError(f"cache {action} takes no {what}; see sonde cache --help")
    if "file" in ACTIONS[action] and not options.file:
        raise UsageError(f"cache {action} needs a file: sonde cache {action} FILE")
    writable("--json", options.json)
    store = open_store()
    {"show": _show, "clear": _clear, "export": _export, "import": _import}[action](store, options)
    return 0


def _show(store: Store, options: argparse.Namespace) -> None:
    winners = _winners(store, options.kernel)
    if options.json:
        rows = [row for row in store.export()["winners"] if options.kernel in (None, row["kernel"])]
        dump(dict(store=str(store.path), winners=rows, left_out=store.left_out), options.json)
        return
    if not winners:
        print(f"Nothing is tuned yet in {store.path}")
    else:
        head = ["kernel", "device", "dtypes", "constants", "bucket", "configuration", "median µs", "timings", "when"]
        table(head, [_row(w) for w in winners], title=str(store.path), left=6)
    _say_left_out(store)


def _row(w: Winner) -> list[str]:
    config = " ".join(f"{name}={value}" for name, value in w.config.items())
    constants = w.key.constants if len(w.key.constants) <= 32 else w.key.constants[:31] + "…"
    words = [w.key.kernel, w.key.device, w.key.dtypes, constants, w.key.bucket, config]
    return [*words, f"{w.median_us:.2f}", str(w.timings), _when(w)]


def _when(w: Winner) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(w.at))


def _clear(store: Store, options: argparse.Namespace) -> None:
    count = len(_winners(store, options.kernel))
    what = f"{_count(count)} and all timings" + (f" of {options.kernel}" if options.kernel else "")
    if not options.yes and sys.stdin.isatty():
        try:
            answer = input(f"Forget {what} in {store.path}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            print("Nothing was changed")
            return
    store.clear(options.kernel)
    _usable(store)
    print(f"Forgot {what}")


def _export(store: Store, options: argparse.Namespace) -> None:
    writable("export", options.file)
    winners = _winners(store)
    devices = sorted({w.key.device for w in winners})
    if options.device and options.device not in devices:
        raise UsageError(did_you_mean("device", options.device, devices or ["none, since nothing is tuned"]))
    document = store.export(options.device)
    text = json.dumps(document, indent=1)  # not dump(), which rounds: these numbers are imported again
    if options.file == "-":
        print(text)
        return
    try:
        Path(options.file).write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"export {options.file}: {problem.strerror}") from problem
    print(f"Wrote {_count(len(document['winners']))} to {options.file}")
    _say_left_out(store)


def _import(store: Store, options: argparse.Namespace) -> None:
    from ..jit.rows import parse_json

    try:
        document = parse_json(Path(options.file).read_bytes())
        changed = store.load(document)
    except OSError as problem:
        raise UsageError(f"import {options.file}: {problem.strerror}") from problem
    except (ValueError, MemoryError) as problem:
        raise UsageError(f"import {options.file}: {str(problem) or 'does not fit into memory'}") from problem
    _usable(store)
    print(f"Imported {changed} of {_count(len(document['winners']))}; a stored one that is as fast stays")
    _say_left_out(store)


def _say_left_out(store: Store) -> None:
    """Print how many rows the last read or import left out, and why."""
    if store.left_out:
        print(f"Left out {len(store.left_out)} that are not valid:")
        for cause in store.left_out[:SHOWN]:
            print(f"  {cause}")
        if len(store.left_out) > SHOWN:
            print(f"  and {len(store.left_out) - SHOWN} more")


def _winners(store: Store, kernel: str | None = None) -> list[Winner]:
    winners = store.winners()
    _usable(store)
    known = list(dict.fromkeys([w.key.kernel for w in winners]))
    if kernel is None:
        return winners
    if kernel not in known and kernel not in {r.key.kernel for r in store.trials()}:
        raise UsageError(did_you_mean("kernel", kernel, known or ["none, since nothing is tuned"]))
    return [w for w in winners if w.key.kernel == kernel]


def _count(n: int) -> str:
    return "1 winner" if n == 1 else f"{n} winners"


def _usable(store: Store) -> None:
    if store.problem:
        raise UsageError(f"the tuning store cannot be used: {store.problem}")
