"""Layers built on the operators. Their state dicts match the original models', so checkpoints load unchanged."""

from .deformable_attention import MSDeformAttn
from .grid_sample import GridSample
from .sparse_boxes import DeformableFeatureAggregation, SparseBox3DKeyPointsGenerator

__all__ = ["DeformableFeatureAggregation", "GridSample", "MSDeformAttn", "SparseBox3DKeyPointsGenerator"]


def __dir__() -> list[str]:
    return __all__
