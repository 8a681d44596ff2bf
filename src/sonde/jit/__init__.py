"""Which configuration of a kernel runs: policies, settings, the tuning store."""

from . import settings
from .kernel import Launch, Step, Tunable, Unsupported, kernel
from .policies import PickAny, PickBest, PickFixed, PickStored
from .winners import token

__all__ = [
    "Launch",
    "PickAny",
    "PickBest",
    "PickFixed",
    "PickStored",
    "Step",
    "Tunable",
    "Unsupported",
    "kernel",
    "settings",
    "token",
]
