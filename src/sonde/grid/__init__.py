"""Operators that read images: sample, weigh, reduce, without storing the samples."""

from .grid_sample import grid_sample
from .sample_dot import sample_dot
from .sample_sum import sample_sum

__all__ = ["grid_sample", "sample_dot", "sample_sum"]
