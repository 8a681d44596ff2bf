"""The names that users see as ``sonde.<name>``."""

from . import compat, grid, jit, nn, points, power
from .grid import *  # noqa: F403
from .jit import Unsupported
from .op.checks import refuse_scripting
from .op.plan import Determinism, Plan, explain
from .operators import OPERATORS
from .points import *  # noqa: F403

refuse_scripting(*(operator.public for operator in OPERATORS.values()))

__all__ = ["Determinism", "Plan", "Unsupported", "compat", "explain", "grid", "jit", "nn", "points", "power"]
__all__ += grid.__all__
__all__ += points.__all__
