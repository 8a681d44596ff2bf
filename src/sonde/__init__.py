"""Fused sampling-and-aggregation operators for PyTorch."""

from .grid import sample_dot, sample_sum
from .op.plan import explain

__version__ = "0.1.0"
__all__ = ["explain", "sample_dot", "sample_sum"]
