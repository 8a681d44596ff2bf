"""The names that users see as ``sonde.<name>``."""

from . import compat, grid, jit, memory, nn, points, power, testing
from .grid import *  # noqa: F403
from .jit import Unsupported
from .op.checks import refuse_scripting
from .op.custom import operator
from .op.plan import Determinism, Plan, explain
from .operators import OPERATORS
from .points import *  # noqa: F403

refuse_scripting(*(operator.public for operator in OPERATORS.values()))

__all__ = ["Determinism", "Plan", "Unsupported", "explain", "operator"]
__all__ += ["compat", "grid", "jit", "memory", "nn", "points", "power", "testing"]
__all__ += grid.__all__
__all__ += points.__all__
