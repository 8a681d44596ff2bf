"""Which configuration of a kernel runs: policies, settings, the tuning store."""

from . import settings
from .kernel import Launch, Tunable, Unsupported, kernel
from .policies import PickAny, PickBest, PickFixed, PickStored
from .steps import Pass
from .winners import ship, token

__all__ = [
    "Launch",
    "Pass",
    "PickAny",
    "PickBest",
    "PickFixed",
    "PickStored",
    "Tunable",
    "Unsupported",
    "kernel",
    "settings",
    "ship",
    "token",
]


def __dir__() -> list[str]:
    return __all__
