"""The tuning store: which configuration won, and every timing behind it. SQLite, one file per host.

**Convention.** Every method may be called from many threads and processes at once, and none fails because of the file: if it
cannot be used, one warning says why and results are kept in this process. A winner is replaced only by one that is 5 % faster, by
the median, so that noise does not change what runs. Leases expire, so that a killed owner blocks nobody. Every row is validated
when it is read (`rows.py`); invalid rows are left out, counted and reported once.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..op.cache import cache_dir, warn_once
from . import rows
from .database import Unusable, transact
from .rows import FORMAT, Invalid, Key, Record, Winner
from .timing import Trial

if TYPE_CHECKING:
    from sqlite3 import Connection

T = TypeVar("T")
MARGIN = 0.05
LONGEST_LEASE_S = 7 * 86400.0  # a row with a longer one is not ours

_KEY = ", ".join(f"keys.{name}" for name in Key._fields)
_IS = " AND ".join(f"keys.{name} = ?" for name in Key._fields)
_WINNERS = f"SELECT {_KEY}, config, median_us, timings, at FROM winners JOIN keys ON keys.id = winners.key"
_TRIALS = f"SELECT {_KEY}, config, times_us, cause, error, compile_s, at FROM trials JOIN keys ON keys.id = trials.key"
# True for a valid lease: SQLite's columns hold any type, and text compares greater than every number
_LEASE = f"typeof(leases.until) IN ('real', 'integer') AND leases.until - leases.since BETWEEN 0 AND {LONGEST_LEASE_S}"
_warned: set[Path | None] = set()
_stores: dict[Path | None, Store] = {}


def open_store() -> Store:
    """This process's store for the current `cache_dir`; nothing is opened or written yet."""
    path: Path | None
    try:
        host = re.sub(r"[^\w.-]+", "-", platform.node()) or "unknown"
        path = cache_dir() / f"tuning-{host}.sqlite"
    except RuntimeError:  # no home folder
        path = None
    return _stores.setdefault(path, Store(path))


class Store:
    """The store in the file `path`; with ``None`` everything is kept in this process.

    `problem` says why the file could not be used, if so; `left_out` has the reason for each invalid row of the last read or import.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.problem: str | None = None
        self.left_out: list[str] = []
        self._winners: dict[Key, Winner | None] = {}  # winners that could not be written; None if the old one was dropped
        self._records: list[Record] = []

    def winner(self, key: Key) -> dict[str, Any] | None:
        """The configuration to run, or None."""
        found = self._winner(key)
        return found and dict(found.config)

    def winners(self, kernel: str | None = None, device: str | None = None) -> list[Winner]:
        """All winners, or those of a kernel or device, ordered by key."""
        wanted = {name: value for name, value in (("kernel", kernel), ("device", device)) if value is not None}
        where = " AND ".join(f"keys.{name} = ?" for name in wanted) or "1"
        query = f"{_WINNERS} WHERE {where}"
        read = self._read_rows(lambda db: rows.valid(db.execute(query, [*wanted.values()]), _winner))
        found = {w.key: w for w in read} | self._winners
        found = {key: w for key, w in found.items() if all(getattr(key, name) == value for name, value in wanted.items())}
        return [w for key in sorted(found) if (w := found[key])]

    def snapshot(self, device: str) -> dict[Key, dict[str, Any]]:
        """The winning configurations of a device, in one query."""
        return {w.key: w.config for w in self.winners(device=device)}

    def trials(self, key: Key | None = None) -> list[Record]:
        """Every trial, or those of a key, oldest first, each with all of its times."""
        where, values = ("1", ()) if key is None else (_IS, key)
        query = f"{_TRIALS} WHERE {where} ORDER BY trials.id"
        read = self._read_rows(lambda db: rows.valid(db.execute(query, values), _record))
        return read + [r for r in self._records if key in (None, r.key)]

    def record(self, key: Key, trials: Iterable[Trial]) -> dict[str, Any] | None:
        """Store these trials and update the winner in one transaction; returns the winner's configuration, if there is one."""
        trials, now = list(trials), time.time()
        new_rows = [(_json(t.config), _json(t.times_us), _clean(t.cause), t.error, t.compile_s, now) for t in trials]

        def work(db: Connection) -> tuple[Winner | None]:
            id = _id(db, key)
            db.executemany(
                "INSERT INTO trials (key, config, times_us, cause, error, compile_s, at) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(id, *row) for row in new_rows],
            )
            old = _find(db, key)
            new = settle(key, old, trials, now)
            if new != old:
                _put(db, id, new)
            return (new,)

        written = self._try(work, None, write=True)
        if written:
            (new,) = written
            self._winners.pop(key, None)
        else:
            new = settle(key, self._winner(key), trials, now)
            self._records += [Record(key, t, now) for t in trials]
            self._winners[key] = new
        return new and dict(new.config)

    def claim(self, key: Key, owner: str, seconds: float) -> bool:
        """True if `owner` may tune `key` for the next `seconds`; an owner may extend its lease. Always True without a file."""

        def work(db: Connection) -> bool:
            now = time.time()  # inside the transaction, hence not earlier than what a previous owner wrote
            done = db.execute(
                "INSERT INTO leases (key, owner, since, until) VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE"
                " SET owner = excluded.owner, since = excluded.since, until = excluded.until"
                f" WHERE leases.owner = excluded.owner OR NOT (excluded.since BETWEEN leases.since AND leases.until AND {_LEASE})",
                (_id(db, key), owner, now, now + min(seconds, LONGEST_LEASE_S)),
            )
            return done.rowcount == 1

        return self._try(work, True, write=True)

    def release(self, key: Key, owner: str) -> None:
        """Give up the lease that `claim` gave; does nothing if another owner has taken it since."""
        self._try(lambda db: db.execute("DELETE FROM leases WHERE key = ? AND owner = ?", (_id(db, key), owner)), None, write=True)

    def wait(self, key: Key, seconds: float, poll: float = 0.05) -> dict[str, Any] | None:
        """Wait for a winner; None once no process holds the lease of `key`, or after `seconds`."""

        def work(db: Connection) -> tuple[Winner | None, bool]:
            leases = f"SELECT count(*) FROM leases JOIN keys ON keys.id = leases.key WHERE {_IS} AND {_LEASE}"
            taken = f"{leases} AND ? BETWEEN since AND until"
            return _find(db, key), bool(db.execute(taken, (*key, time.time())).fetchone()[0])

        end = time.monotonic() + seconds
        nothing: tuple[Winner | None, bool] = (None, False)
        while True:
            winner, taken = self._read(work, nothing)
            winner = self._winners.get(key, winner)
            if winner or not taken or time.monotonic() >= end:
                return winner and dict(winner.config)
            time.sleep(max(0.0, min(poll, end - time.monotonic())))

    def clear(self, kernel: str | None = None) -> int:
        """Delete winners and trials, of one kernel or all; returns how many keys had any. Leases stay: tuning is under way."""

        def work(db: Connection) -> int:
            which = "SELECT id FROM keys WHERE ? IN (kernel, '')"  # '' is all
            used = "id IN (SELECT key FROM winners UNION SELECT key FROM trials)"
            name = (kernel or "",)
            count = db.execute(f"SELECT count(*) FROM ({which} AND {used})", name).fetchone()[0]
            for table in ("winners", "trials"):
                db.execute(f"DELETE FROM {table} WHERE key IN ({which})", name)
            db.execute("DELETE FROM keys WHERE ? IN (kernel, '') AND id NOT IN (SELECT key FROM leases)", name)
            return count

        there = self.path is not None and os.path.exists(self.path)
        count = self._try(work, 0, write=True) if there else 0
        own = {r.key for r in self._records} | self._winners.keys()
        gone = {key for key in own if kernel in (None, key.kernel)}
        self._records = [r for r in self._records if r.key not in gone]
        self._winners = {key: w for key, w in self._winners.items() if key not in gone}
        return count + len(gone)

    def export(self, device: str | None = None) -> dict[str, Any]:
        """All winners, or those of a device, as a document that `load` reads and that can be shipped."""
        found = [{**w.key._asdict(), **w._asdict(), "at": round(w.at)} for w in self.winners(device=device)]
        for row in found:
            del row["key"]
        devices = {row["device"] for row in found}
        return dict(format=FORMAT, device=device or (devices.pop() if len(devices) == 1 else None), winners=found)

    def load(self, document: Any) -> int:
        """Import the winners of a document; one that is here already is replaced only if 5 % slower. Returns how many changed.

        Invalid rows are left out; ValueError if this is not a document of winners at all.
        """
        new, left_out = rows.parse(document)

        def work(db: Connection) -> int:
            changed = 0
            for w in new:
                if _beats(w.median_us, _find(db, w.key)):
                    _put(db, _id(db, w.key), w)
                    changed += 1
            return changed

        written = self._try(work, None, write=True)
        self.left_out = left_out
        if written is not None:
            return written
        better = [w for w in new if _beats(w.median_us, self._winner(w.key))]
        self._winners |= {w.key: w for w in better}
        return len(better)

    def _winner(self, key: Key) -> Winner | None:
        if key in self._winners:
            return self._winners[key]
        found = self._read_rows(lambda db: rows.valid(db.execute(f"{_WINNERS} WHERE {_IS}", key), _winner))
        return found[0] if found else None

    def _read_rows(self, work: Callable[[Connection], tuple[list, list[str]]]) -> list:
        nothing: tuple[list, list[str]] = [], []
        found, self.left_out = self._read(work, nothing)
        if self.left_out:
            text = f"rows of the tuning store {self.path} that are not valid are ignored: {len(self.left_out)}, such as"
            warn_once(f"tuning store {self.path}", f"{text} {self.left_out[0]}")
        return found

    def _read(self, work: Callable[[Connection], T], otherwise: T) -> T:
        if self.path is None or not os.path.exists(self.path):
            return otherwise  # nothing was tuned yet: no need to create the file or to warn
        return self._try(work, otherwise)

    def _try(self, work: Callable[[Connection], T], otherwise: T, write: bool = False) -> T:
        try:
            if self.path is None:
                raise Unusable("there is no home folder")
            return transact(self.path, work, write)
        except Unusable as problem:
            self.problem = str(problem)
            if self.path not in _warned:
                _warned.add(self.path)
                hint = "what is tuned stays in this process; set SONDE_CACHE_DIR to a folder that is writable"
                warnings.warn(f"sonde: no tuning store ({problem}): {hint}", RuntimeWarning, stacklevel=4)
            return otherwise


def settle(key: Key, old: Winner | None, trials: Iterable[Trial], now: float) -> Winner | None:
    """The winner after these trials. The old winner counts with its newest median, and is dropped if it failed this time."""
    best: Winner | None = None
    for trial in trials:
        able = trial.cause is None and rows.is_time(trial.median_us)
        this = Winner(key, trial.config, trial.median_us, len(trial.times_us), now)
        if old and _json(trial.config) == _json(old.config):
            old = this if able else None
        elif able and (best is None or this.median_us < best.median_us):
            best = this
    return best if best and _beats(best.median_us, old) else old


def _beats(median_us: float, old: Winner | None) -> bool:
    return old is None or median_us <= (1 - MARGIN) * old.median_us


def _clean(text: str | None) -> str | None:
    """The text without what cannot be encoded, such as parts of a path that is not UTF-8."""
    return text and text.encode(errors="replace").decode()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _id(db: Connection, key: Key) -> int:
    marks = ", ".join("?" * len(key))
    db.execute(f"INSERT OR IGNORE INTO keys ({', '.join(Key._fields)}) VALUES ({marks})", key)
    return db.execute(f"SELECT id FROM keys WHERE {_IS}", key).fetchone()[0]


def _find(db: Connection, key: Key) -> Winner | None:
    row = db.execute(f"{_WINNERS} WHERE {_IS}", key).fetchone()
    try:
        return row and _winner(row)
    except Invalid:  # treated as missing; the next winner replaces it
        return None


def _put(db: Connection, id: int, winner: Winner | None) -> None:
    db.execute("DELETE FROM winners WHERE key = ?", (id,))
    if winner:
        row = (id, _json(winner.config), winner.median_us, winner.timings, winner.at)
        db.execute("INSERT INTO winners (key, config, median_us, timings, at) VALUES (?, ?, ?, ?, ?)", row)


def _winner(row: Sequence[Any]) -> Winner:
    *key, config, median_us, timings, at = row
    return rows.winner(key, _loads(config), median_us, timings, at)


def _record(row: Sequence[Any]) -> Record:
    *key, config, times_us, cause, error, compile_s, at = row
    return rows.record(key, _loads(config), _loads(times_us), cause, error, compile_s, at)


def _loads(text: Any) -> Any:
    try:
        return rows.parse_json(text)
    except ValueError as problem:
        raise Invalid(f"holds {rows.shown(text)} where JSON should be ({problem})") from None
