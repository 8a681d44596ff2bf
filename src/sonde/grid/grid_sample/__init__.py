from .api import grid_sample

__all__ = ["grid_sample"]
