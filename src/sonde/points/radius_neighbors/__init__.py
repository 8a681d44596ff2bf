from .api import NeighborsWithin, radius_neighbors

__all__ = ["NeighborsWithin", "radius_neighbors"]
