"""The cache folder for compiled kernels and tuning results, and the in-process cache of prepared calls."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Hashable, Iterator
from functools import lru_cache
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_ENTRIES = 4096  # over all call caches: calls whose sizes never repeat must not fill the memory


def cache_dir() -> Path:
    """``SONDE_CACHE_DIR``, else ``sonde`` in the user's cache folder. It need not exist. RuntimeError without a home folder."""
    given = os.environ.get("SONDE_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    if sys.platform == "win32":
        above = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local"
    elif sys.platform == "darwin":
        above = Path.home() / "Library/Caches"
    else:
        above = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(above) / "sonde"


@lru_cache(1)
def sources_digest() -> str:
    """SHA-256 over the names and contents of this package's files. Code compiled from other sources must not be loaded."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


_warned: set[str] = set()


def warn_once(topic: str, text: str) -> None:
    """Warn once per process and topic. Where warnings are errors, log instead: a warning must never cost a result."""
    if topic in _warned:
        return
    _warned.add(topic)
    try:
        warnings.warn(f"sonde: {text}", RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        logging.getLogger("sonde").warning(text)


class CallCache(Generic[T]):
    """A cache of prepared calls. All caches together hold at most ``MAX_ENTRIES``; beyond that the oldest quarter is dropped.

    A hit costs one dictionary lookup and records the time of use in ticks, without a lock. Threads that race here can only
    confuse the order of their own entries.
    """

    __slots__ = ("__weakref__", "_entries")

    def __init__(self) -> None:
        self._entries: dict[Hashable, list] = {}  # key: [last use, value]
        with _lock:
            _caches.add(self)

    def get(self, key: Hashable) -> T | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[0] = _tick()
        return entry[1]

    def put(self, key: Hashable, value: T) -> T:
        global _count
        with _lock:
            if key not in self._entries:
                _count += 1
            self._entries[key] = [_tick(), value]
            if _count > MAX_ENTRIES:
                _drop_oldest()
        return value

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._entries))


_caches: weakref.WeakSet[CallCache] = weakref.WeakSet()
_lock = threading.RLock()  # reentrant: garbage collection may run a finaliser that makes a call
_tick = count().__next__
_count = 0  # an upper bound on all entries: cleared and deleted caches are counted until the limit is exceeded


def forget_calls() -> None:
    """Empty every call cache. For tests that change what prepared calls depend on."""
    global _count
    with _lock:
        for cache in _caches:
            cache.clear()
        _count = 0


def _drop_oldest() -> None:
    """Drop the least recently used quarter if the caches that still exist hold too many entries."""
    global _count
    found = [(entry[0], cache, key) for cache in _caches for key, entry in cache._entries.items()]
    if len(found) > MAX_ENTRIES:
        found.sort(key=itemgetter(0))
        for _, cache, key in found[: max(1, len(found) // 4)]:
            cache._entries.pop(key, None)
    _count = sum(map(len, _caches))
