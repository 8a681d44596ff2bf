"""Where compiled kernels and tuning results are kept between runs, and decisions between calls."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
REMEMBERED = 4096  # entries; sizes that change with every call must not fill the memory


def cache_dir() -> Path:
    """``SONDE_CACHE_DIR``, else ``sonde`` in the user's cache folder; it may not exist. RuntimeError where there is no home."""
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


def remember(known: dict[Any, T], key: Any, value: T) -> T:
    """Keep `value` for the next call of this kind; a dictionary that is full starts anew."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[key] = value
    return value
