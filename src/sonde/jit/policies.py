"""Policies for choosing a kernel's configuration. These classes only name the policy; ``kernel.py`` implements the choice.

During graph capture and tracing nothing may be timed, so every policy acts as `PickAny`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PickAny:
    """The stored winner, else the shipped winner, else the kernel's default. Never times anything. This is the default policy."""


@dataclass(frozen=True)
class PickBest:
    """The stored winner; if there is none, search for one.

    A search compiles all candidates in ``num_workers`` processes, checks each against the reference, times those that pass, stores
    every timing and runs the fastest. A candidate that disagrees with the reference can never win; if none passes, the error
    lists the cause for each. With `again`, each process searches once even where a winner is stored.
    """

    again: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class PickStored:
    """Only a stored winner, else an error: for production and CI, where an untuned kernel must not go unnoticed."""


@dataclass(frozen=True)
class PickFixed:
    """This configuration and no other; an error if it does not fit the problem."""

    config: Any = field(hash=False)  # may be a dict, as read from the store; excluded so that the policy stays hashable

    def __post_init__(self) -> None:
        if self.config is None:
            raise TypeError("PickFixed: config must be a configuration of the kernel that will run, got None")
        if isinstance(self.config, Mapping):
            object.__setattr__(self, "config", dict(self.config))  # a copy: the caller may change theirs later


Policy = PickAny | PickBest | PickStored | PickFixed
