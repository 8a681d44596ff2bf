from .api import Neighbors, knn

__all__ = ["Neighbors", "knn"]
