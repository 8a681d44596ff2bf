"""Where compiled kernels and tuning results are kept between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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
