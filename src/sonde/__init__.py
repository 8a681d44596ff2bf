"""Fused sampling-and-aggregation operators for PyTorch."""

from . import nn
from .grid import deformable_aggregation, feature_maps_format, grid_sample, ms_deform_attn, sample_dot, sample_sum
from .op.plan import explain

__version__ = "0.1.0"
__all__ = [
    "deformable_aggregation",
    "explain",
    "feature_maps_format",
    "grid_sample",
    "ms_deform_attn",
    "nn",
    "sample_dot",
    "sample_sum",
]
