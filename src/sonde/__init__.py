"""Fused sampling-and-aggregation operators for PyTorch."""

from . import compat, grid, nn, points
from .grid import *  # noqa: F403
from .op.checks import refuse_scripting
from .op.plan import explain
from .operators import OPERATORS as _OPERATORS
from .points import *  # noqa: F403

refuse_scripting(*(operator.public for operator in _OPERATORS.values()))

__version__ = "0.1.0"
__all__ = ["compat", "explain", "nn"]
__all__ += grid.__all__
__all__ += points.__all__
