"""Fused sampling-and-aggregation operators for PyTorch."""

from . import compat, nn
from .grid import deformable_aggregation, feature_maps_format, grid_sample, ms_deform_attn, sample_dot, sample_sum
from .op.checks import refuse_scripting
from .op.plan import explain
from .operators import OPERATORS as _OPERATORS
from .points import PointIndex, knn, knn_aggregate, radius_aggregate, radius_neighbors, radius_search

refuse_scripting(*(operator.public for operator in _OPERATORS.values()))

__version__ = "0.1.0"
__all__ = [
    "PointIndex",
    "compat",
    "deformable_aggregation",
    "explain",
    "feature_maps_format",
    "grid_sample",
    "knn",
    "knn_aggregate",
    "ms_deform_attn",
    "nn",
    "radius_aggregate",
    "radius_neighbors",
    "radius_search",
    "sample_dot",
    "sample_sum",
]
