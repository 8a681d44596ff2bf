"""Triton implementation of ``point_index``; its kernels are in ``gpu_kernels``."""

from .gpu_kernels import build as forward_pass

__all__ = ["forward_pass"]
