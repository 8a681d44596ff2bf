from .api import PointIndex

__all__ = ["PointIndex"]
