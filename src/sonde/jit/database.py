"""The file behind the tuning store: how it is opened, shared by many processes, and replaced when it is damaged.

A connection lives for one transaction. Opening one takes a millisecond, which no hot path pays, and no connection can be inherited
by a forked child, shared by two threads, or left writing to a file that another process has moved aside.
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
PATIENCE_S = 30.0  # how long to retry while others write
HICCUP_S = 0.05  # how long to retry other errors, which a file that another process is moving aside may cause
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

_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a fork while SQLite works would leave SQLite's own locks held in the child forever
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Unusable(Exception):
    """The store cannot be used; the message says why."""


class Damaged(Exception):
    """The file does not hold what was written; it is kept under another name, which contains `mark`."""

    mark = "corrupt"


class OtherVersion(Damaged):
    def __init__(self, found: int) -> None:
        super().__init__(f"has format {found or 'of something else'}, this version of sonde writes format {VERSION}")
        self.mark = f"format-{found}"


def transact(path: Path, work: Callable[[Connection], T], write: bool) -> T:
    """Run ``work(connection)`` in one transaction; after a rollback it may run again. Raises `Unusable`."""
    try:
        with _lock:  # a fork during an import would hang the child, too
            import sqlite3
    except ImportError as problem:
        raise Unusable("this Python is built without sqlite3") from problem
    start, moves = time.monotonic(), 0
    while True:
        before = _identity(path)
        try:
            with _lock, closing(_connect(path, write)) as db, db:
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
                raise  # the call is wrong, not the file
            elif time.monotonic() - start > (PATIENCE_S if "lock" in str(problem) else HICCUP_S):
                raise Unusable(f"{path}: {problem}") from problem
        time.sleep(random.uniform(0.001, 0.02))


def _damage(problem: Exception) -> Damaged | None:
    """What is wrong with the file, or None. SQLite has subclasses for errors of the machine or the call."""
    import sqlite3

    if isinstance(problem, Damaged):
        return problem
    text = str(problem)
    if type(problem) is sqlite3.DatabaseError or text.startswith("no such table"):
        return Damaged(f"is damaged ({text})")
    return None


def _connect(path: Path, write: bool) -> Connection:
    import sqlite3

    if not write and not os.access(path.parent, os.W_OK):  # in WAL mode even a reader writes files beside the database
        db = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(path, timeout=1.0, isolation_level=None)  # short, because forks wait for us; we retry ourselves
    try:
        db.text_factory = _text
        db.execute("PRAGMA trusted_schema=OFF")  # a file from elsewhere must not run functions of its own
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
    return data.decode(errors="surrogateescape")  # text that is not UTF-8 makes one row invalid, not the whole query


def _version(db: Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]


def _create(db: Connection) -> None:
    db.execute("PRAGMA journal_mode=WAL")
    with db:
        db.execute("BEGIN IMMEDIATE")
        if _version(db) == VERSION:
            return  # another process was faster
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
                return  # another process has moved it, and the file there now is new
            kept = f"{path}.{damage.mark}-{time.strftime('%Y%m%d-%H%M%S')}"
            with suppress(FileNotFoundError):  # the log first: a process that starts a new file would otherwise replay it
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
            fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it even if this process is killed
        yield
