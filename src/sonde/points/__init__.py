"""Operators on point clouds: find neighbours, weight them and reduce, without a distance matrix."""

from ._search.index import PointIndex
from .knn import Neighbors, knn
from .knn_aggregate import knn_aggregate
from .radius_aggregate import radius_aggregate
from .radius_neighbors import NeighborsWithin, radius_neighbors
from .radius_search import Ball, radius_search

__all__ = [
    "Ball",
    "Neighbors",
    "NeighborsWithin",
    "PointIndex",
    "knn",
    "knn_aggregate",
    "radius_aggregate",
    "radius_neighbors",
    "radius_search",
]
