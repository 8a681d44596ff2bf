"""Disk cache of compiled CPU kernels: one file per kernel and signature, with a checksum and Numba's pickled result.

Numba's own cache trusts what it reads: a truncated file raises in every later process, a flipped byte is executed, and two
processes that save different signatures at once can swap each other's code. Here a damaged file, or one that cannot be written,
costs a compilation and one warning, never a result.

A pickle is code. So the folder is private to its user, and nothing is read from a folder or a file that others can write.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from pickle import loads
from typing import Any

import llvmlite
import numba

from .cache import cache_dir, sources_digest, warn_once

try:
    from numba.core.compiler import CompileResult
    from numba.core.serialize import dumps
except ImportError:  # private names of Numba, which may move; without them every process compiles for itself
    dumps = None  # type: ignore[assignment]

_VERSIONS = f"{sys.implementation.cache_tag} {platform.machine()} numba {numba.__version__} llvmlite {llvmlite.__version__}"
_AGAIN = "compiled CPU kernels are not kept, every process compiles them again"


class KernelCache:
    """The cache of one kernel, with the interface that a Numba dispatcher expects."""

    def __init__(self, function: Callable, folder: Path) -> None:
        code = function.__code__
        self.folder = folder
        self._name = f"{function.__module__}.{function.__qualname__}".replace("<", "").replace(">", "")
        self._source = f"{self._name} {code.co_firstlineno} {hashlib.sha256(Path(code.co_filename).read_bytes()).hexdigest()}"

    @property
    def cache_path(self) -> str:
        return str(self.folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel for these argument types; None if it must be compiled."""
        try:
            target_context.refresh()
            key = self._key(sig, target_context.codegen())
            path = self._path(key)
            try:
                data = _read(path)
            except FileNotFoundError:
                return None
            return CompileResult._rebuild(target_context, *loads(_verified(key, data)))
        except Exception as problem:  # unpickling can raise anything
            with suppress(OSError, UnboundLocalError):
                os.unlink(path)
            warn_once(
                "cpu cache: read",
                f"a compiled CPU kernel in {self.folder} cannot be used and is compiled again ({_shown(problem)})",
            )
            return None

    def save_overload(self, sig: Any, result: Any) -> None:
        """Write the compiled kernel for later processes; failures only warn."""
        try:
            if result.lifted or result.library.has_dynamic_globals:  # it contains addresses of this process
                return
            key = self._key(sig, result.codegen)
            payload = dumps(result._reduce())
            _make_private(self.folder)  # it may have been removed meanwhile
            _write(self._path(key), _checksum(key, payload) + payload)
        except Exception as problem:
            warn_once("cpu cache: write", f"{_AGAIN}: {self.folder} cannot be written ({_shown(problem)})")

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        pass

    def flush(self) -> None:
        """Nothing to do: a recompiled kernel replaces its file."""

    def _key(self, sig: Any, codegen: Any) -> str:
        return f"{self._source} {_VERSIONS} {codegen.magic_tuple()} {sig}"

    def _path(self, key: str) -> Path:
        return self.folder / f"{self._name[:100]}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def cache_of(function: Callable) -> KernelCache | None:
    """The cache for a kernel; None if there is no cache folder, or if the function's source is in no file."""
    folder = cache_folder()
    try:
        return None if folder is None else KernelCache(function, folder)
    except OSError:
        return None


@lru_cache(1)
def cache_folder() -> Path | None:
    """The folder for compiled kernels of this user and this version of our sources; None if it cannot be made."""
    if dumps is None:
        return None
    try:
        user = f"-{os.geteuid()}" if hasattr(os, "geteuid") else ""  # a shared cache folder serves every user
        folder = cache_dir().absolute() / f"numba{user}" / sources_digest()[:16]
        _make_private(folder)
    except (OSError, RuntimeError) as problem:
        warn_once("cpu cache: folder", f"{_AGAIN} ({problem}); set SONDE_CACHE_DIR to a folder that is writable")
        return None
    return folder


def _make_private(folder: Path) -> None:
    """Create the last two folders of this path. PermissionError if one exists that others own or can write."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
        found = each.lstat()  # a link could lead to a folder that somebody else has filled
        if not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{each} is not a folder")
        _must_be_ours(each, found)


def _must_be_ours(path: Path, found: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):  # Windows has no such modes
        return
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}, and what it holds would be executed")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} can be written by others, and what it holds would be executed; chmod go-w it")


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        _must_be_ours(path, os.fstat(file.fileno()))  # of the open file, in case the folder was swapped since it was checked
        return file.read()


def _write(path: Path, data: bytes) -> None:
    """Write atomically, so that no process ever reads half a file."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _checksum(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + payload).digest()  # with the key: a file that was renamed does not match


def _verified(key: str, data: bytes) -> bytes:
    if data[:32] != _checksum(key, data[32:]):
        raise ValueError("it is not what was written")
    return data[32:]


def _shown(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"[:300]
