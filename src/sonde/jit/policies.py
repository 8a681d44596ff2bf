"""How the configuration of a kernel is chosen. Only the names of the ways; the choosing is in ``kernel.py``.

During graph capture and tracing, where nothing may be timed, every policy acts as `PickAny`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PickAny:
    """The stored winner, else the shipped winner, else the kernel's ranked default. Never times anything. The default policy."""


@dataclass(frozen=True)
class PickBest:
    """The stored winner; where there is none, search.

    A search compiles all candidates in ``num_workers`` processes, checks each against the reference, times the survivors, stores
    every timing and runs the best. A candidate that disagrees with the reference can never win; when none is left, the error
    lists the cause of each. With `again`, each process searches once also where a winner is stored.
    """

    again: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class PickStored:
    """Only a stored winner, else a clear error: for production and CI, where a kernel that nobody tuned must not pass unseen."""


@dataclass(frozen=True)
class PickFixed:
    """This configuration and no other. A kernel whose configurations do not include it says so."""

    config: Any = field(hash=False)  # may be a dict, as the store gives it; a policy is hashable all the same

    def __post_init__(self) -> None:
        if self.config is None:
            raise TypeError("PickFixed: config must be a configuration of the kernel that will run, got None")
        if isinstance(self.config, Mapping):
            object.__setattr__(self, "config", dict(self.config))  # later changes of the caller's are not ours


Policy = PickAny | PickBest | PickStored | PickFixed
