"""The file behind the tuning store: how it is opened, shared by many processes, and replaced when it is damaged.

A connection lives for one transaction. That costs a millisecond where nothing is hot, and leaves no connection to be carried into
a forked child, used by two threads, or still writing to a file that another process has moved aside.
"""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

try:
    import fcntl
except ImportError:  # Windows, which refuses to move a file that is open
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from sqlite3 import Connection

T = TypeVar("T")
PATIENCE_S = 30.0  # with other writers
HICCUP_S = 0.05  # what a file that is being moved aside by somebody else can look like
VERSION = 1
SCHEMA = """
CREATE TABLE keys (
    id INTEGER PRIMARY KEY,
    kernel TEXT NOT NULL, source TEXT NOT NULL, device TEXT NOT NULL, torch TEXT NOT NULL,
    triton TEXT NOT NULL, dtypes TEXT NOT NULL, constants TEXT NOT NULL, bucket TEXT NOT NULL,
    UNIQUE (kernel, source, device, torch, triton, dtypes, constants, bucket));
CREATE TABLE trials (
    id INTEGER PRIMARY KEY, key INTEGER NOT NULL, config TEXT NOT NULL, times_us TEXT NOT NULL,
    cause TEXT, error REAL, compile_s REAL, at REAL NOT NULL);
CREATE INDEX trials_of_key ON trials (key);
CREATE TABLE winners (
    key INTEGER PRIMARY KEY, config TEXT NOT NULL, median_us REAL NOT NULL, timings INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE leases (key INTEGER PRIMARY KEY, owner TEXT NOT NULL, since REAL NOT NULL, until REAL NOT NULL)
"""

_turn = threading.Lock()
if hasattr(os, "register_at_fork"):  # a fork amid SQLite's work would leave its own locks taken in the child for ever
    os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release)


class Unusable(Exception):
    """Why there is no store."""


class Damaged(Exception):
    """What the file holds is not what was written; `mark` becomes part of the name under which it is kept."""

    mark = "corrupt"


class OtherVersion(Damaged):
    def __init__(self, found: int) -> None:
        super().__init__(f"has format {found or 'of something else'}, this version of sonde writes format {VERSION}")
        self.mark = f"format-{found}"


def transact(path: Path, work: Callable[[Connection], T], write: bool) -> T:
    """``work(connection)`` in one transaction; it may run again, after a rollback. Raises `Unusable`."""
    try:
        with _turn:  # a fork amid an import would hang the child as well
            import sqlite3
    except ImportError as problem:
        raise Unusable("this Python is built without sqlite3") from problem
    start, moves = time.monotonic(), 0
    while True:
        before = _identity(path)
        try:
            with _turn, closing(_connect(path, write)) as db, db:
                db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                return work(db)
        except OSError as problem:
            raise Unusable(str(problem)) from problem
        except (Damaged, sqlite3.DatabaseError) as problem:
            damage = _damage(problem)
            if damage:
                moves += 1
                if moves > 3:
                    raise Unusable(f"{path} {damage}") from problem
                _set_aside(path, before, damage)
            elif isinstance(problem, sqlite3.ProgrammingError):
                raise  # a mistake in the call, not in the file
            elif time.monotonic() - start > (PATIENCE_S if "lock" in str(problem) else HICCUP_S):
                raise Unusable(f"{path}: {problem}") from problem
        time.sleep(random.uniform(0.001, 0.02))


def _damage(problem: Exception) -> Damaged | None:
    """What is wrong with the file itself. SQLite's other errors, about the machine or the call, have classes of their own."""
    import sqlite3

    if isinstance(problem, Damaged):
        return problem
    text = str(problem)
    if type(problem) is sqlite3.DatabaseError or text.startswith("no such table"):
        return Damaged(f"is damaged ({text})")
    return None


def _connect(path: Path, write: bool) -> Connection:
    import sqlite3

    if not write and not os.access(path.parent, os.W_OK):  # WAL writes beside the file, also to read it
        db = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(path, timeout=1.0, isolation_level=None)  # short, since a fork waits meanwhile; we try again
    try:
        db.text_factory = _text
        db.execute("PRAGMA trusted_schema=OFF")  # a file made by others runs none of its own functions
        db.execute("PRAGMA synchronous=NORMAL")  # safe against kills; a power cut may cost the last timings
        found = _version(db)
        if found not in (0, VERSION):
            raise OtherVersion(found)
        if not found:
            _create(db)
    except BaseException:
        db.close()
        raise
    return db


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")  # what is no UTF-8 is one row's problem, which validation leaves out


def _version(db: Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]


def _create(db: Connection) -> None:
    db.execute("PRAGMA journal_mode=WAL")
    with db:
        db.execute("BEGIN IMMEDIATE")
        if _version(db) == VERSION:
            return  # somebody else was faster
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise OtherVersion(0)
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version={VERSION}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _set_aside(path: Path, seen: tuple[int, int] | None, damage: Damaged) -> None:
    try:
        with _alone(path):
            if _identity(path) != seen:
                return  # another process has done it, and what is there now is new
            kept = f"{path}.{damage.mark}-{time.strftime('%Y%m%d-%H%M%S')}"
            with suppress(FileNotFoundError):  # the log first: whoever finds no file begins a new one, and would read it
                os.replace(f"{path}-wal", f"{kept}-wal")
            with suppress(FileNotFoundError):
                os.unlink(f"{path}-shm")
            os.replace(path, kept)
    except OSError as problem:
        raise Unusable(f"{path} {damage} and cannot be moved: {problem}") from problem
    warnings.warn(f"sonde: the tuning store {path} {damage}; kept as {kept}, a new one begins", RuntimeWarning, stacklevel=2)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with open(f"{path}.lock", "w") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back by the system also when this process is killed
        yield
