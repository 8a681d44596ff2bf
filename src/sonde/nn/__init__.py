"""Layers built on the operators. State dicts of layers that other libraries have match theirs, so checkpoints load unchanged."""

from .deformable_attention import MSDeformAttn
from .epipolar_attention import EpipolarAttention
from .epipolar_lines import EpipolarSamples, epipolar_samples, pixel_centres, relative_disparity
from .grid_sample import GridSample
from .power_attention import PowerAttention
from .sparse_boxes import DeformableFeatureAggregation, SparseBox3DKeyPointsGenerator

__all__ = [
    "DeformableFeatureAggregation",
    "EpipolarAttention",
    "EpipolarSamples",
    "GridSample",
    "MSDeformAttn",
    "PowerAttention",
    "SparseBox3DKeyPointsGenerator",
    "epipolar_samples",
    "pixel_centres",
    "relative_disparity",
]


def __dir__() -> list[str]:
    return __all__
