"""Fused sampling-and-aggregation operators for PyTorch."""

from .grid import grid_sample, sample_dot, sample_sum
from .op.plan import explain

__version__ = "0.1.0"
__all__ = ["explain", "grid_sample", "sample_dot", "sample_sum"]
