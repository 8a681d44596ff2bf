"""Which policy is in force, and how much a search may cost.

    with settings.set(PickBest, num_workers=8):
        out = sonde.sample_sum(images, samples, weights)

**Convention.** Settings live in a `contextvars` context: they nest, are restored on exit (also after an exception), and are not
shared between threads. A setting that is not given keeps its value. The defaults come from the environment, which is read once:
``SONDE_POLICY`` (any, best, stored), ``SONDE_WORKERS`` (a number of processes) and ``SONDE_LOG`` (a level of `logging`; 1 is INFO).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from ..op.cache import cache_dir
from .policies import PickAny, PickBest, PickFixed, PickStored, Policy

__all__ = ["DEFAULT", "Settings", "cache_dir", "current", "set", "use"]

_NAMES: dict[str, type[PickAny | PickBest | PickStored]] = {"any": PickAny, "best": PickBest, "stored": PickStored}
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_KEEP: Any = ...
_logger = logging.getLogger("sonde")


@dataclass(frozen=True)
class Settings:
    policy: Policy
    num_workers: int  # compiler processes
    max_configs: int | None  # how many candidates a search tries, most promising first; None: all
    budget_s: float | None  # seconds that a search may take; None: no limit
    verbose: bool  # log the progress of a search


def current() -> Settings:
    """The settings in force here."""
    return _current.get()


def set(
    policy: Policy | type[Policy] | str | None = None,
    *,
    num_workers: int = _KEEP,
    max_configs: int | None = _KEEP,
    budget_s: float | None = _KEEP,
    verbose: bool = _KEEP,
) -> AbstractContextManager[Settings]:
    """Change settings for a ``with`` block, or for every call of the function that this decorates.

    Args:
        policy: A policy, its class or its name (``"best"`` or ``"PickBest"``).
        num_workers: Compiler processes.
        max_configs: How many candidates a search tries, the most promising first; ``None`` tries all.
        budget_s: Seconds after which a search starts no further trial; ``None`` is no limit.
        verbose: Whether to log every candidate.

    Whatever is not given keeps its value.

    >>> from sonde.jit import settings, PickBest
    >>> with settings.set(PickBest, max_configs=20) as now:
    ...     print(now.policy, settings.current().max_configs)
    PickBest() 20
    """
    changes: dict[str, Any] = {}
    if policy is not None:
        changes["policy"] = _policy(policy)
    if num_workers is not _KEEP:
        changes["num_workers"] = _count("num_workers", num_workers, "an int")
    if max_configs is not _KEEP:
        changes["max_configs"] = None if max_configs is None else _count("max_configs", max_configs, "an int or None")
    if budget_s is not _KEEP:
        changes["budget_s"] = None if budget_s is None else _seconds(budget_s)
    if verbose is not _KEEP:
        if not isinstance(verbose, bool):
            raise TypeError(f"verbose must be True or False, got {_shown(verbose)}")
        changes["verbose"] = verbose
    return _changed(changes)


@contextmanager
def _changed(changes: dict[str, Any]) -> Iterator[Settings]:
    with use(replace(current(), **changes)) as now:
        yield now


@contextmanager
def use(settings: Settings) -> Iterator[Settings]:
    """Install exactly these settings; this is how a backward pass, which runs in another thread, gets those of its forward."""
    if not isinstance(settings, Settings):
        raise TypeError(f"settings must be a Settings, as current() returns, got {_shown(settings)}")
    token = _current.set(settings)
    try:
        yield settings
    finally:
        _current.reset(token)


def _policy(given: Any) -> Policy:
    if isinstance(given, (PickAny, PickBest, PickStored, PickFixed)):
        return given
    if given is PickFixed:
        raise TypeError("policy: PickFixed needs a configuration; write PickFixed(config)")
    if isinstance(given, type) and given in _NAMES.values():
        given = given.__name__
    if not isinstance(given, str):
        raise TypeError(f"policy must be PickAny, PickBest, PickStored, PickFixed(config) or a name, got {_shown(given)}")
    named = _NAMES.get(given.strip().lower().removeprefix("pick"))
    if named is None:
        raise ValueError(f"policy must be one of {', '.join(_NAMES)} where it is a name, got {given!r}")
    return named()


def _count(name: str, given: Any, expected: str) -> int:
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"{name} must be {expected}, got {_shown(given)}")
    if given < 1:
        raise ValueError(f"{name} must be at least 1, got {given}")
    return given


def _seconds(given: Any) -> float:
    if not isinstance(given, (int, float)) or isinstance(given, bool):
        raise TypeError(f"budget_s must be a number of seconds or None, got {_shown(given)}")
    if not given > 0:
        raise ValueError(f"budget_s must be more than 0 seconds, got {given}")
    return float(given)


def _shown(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"


def _from_environment() -> Settings:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = Settings(PickAny(), min(8, usable), None, None, False)  # at most 8, since each worker loads its own copy of torch
    name = os.environ.get("SONDE_POLICY")
    if name:
        try:
            found = replace(found, policy=_policy(name))
        except ValueError:
            _warn("SONDE_POLICY", f"one of {', '.join(_NAMES)}", name, "any")
    workers = os.environ.get("SONDE_WORKERS")
    if workers:
        try:
            found = replace(found, num_workers=_count("SONDE_WORKERS", int(workers), "an int"))
        except ValueError:
            _warn("SONDE_WORKERS", "a whole number of at least 1", workers, str(found.num_workers))
    level = os.environ.get("SONDE_LOG")
    if level and level.upper() not in (*_LEVELS, "1"):
        _warn("SONDE_LOG", f"1 or one of {', '.join(_LEVELS)}", level, "the level that logging has")
    elif level:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # no duplicates where the program has its own handlers
        _logger.addHandler(handler)
        _logger.setLevel("INFO" if level == "1" else level.upper())
    return found


def _warn(variable: str, expected: str, given: str, instead: str) -> None:
    text = f"the environment variable {variable} must be {expected}, got {given!r}; using {instead}"
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # even if warnings are errors, `import sonde` must succeed
        _logger.warning(text)


DEFAULT = _from_environment()
_current: ContextVar[Settings] = ContextVar("sonde.jit.settings", default=DEFAULT)
