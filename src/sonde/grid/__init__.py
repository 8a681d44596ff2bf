"""Operators that read images: sample, weigh, reduce, without storing the samples."""

from .sample_dot import sample_dot
from .sample_sum import sample_sum

__all__ = ["sample_dot", "sample_sum"]
