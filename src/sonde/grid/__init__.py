"""Operators that read images: sample, weigh, reduce, without storing the samples."""

from .deformable_aggregation import deformable_aggregation, feature_maps_format
from .grid_sample import grid_sample
from .ms_deform_attn import ms_deform_attn
from .sample_attention import sample_attention
from .sample_dot import sample_dot
from .sample_sum import sample_sum

__all__ = [
    "deformable_aggregation",
    "feature_maps_format",
    "grid_sample",
    "ms_deform_attn",
    "sample_attention",
    "sample_dot",
    "sample_sum",
]
