from .api import knn_aggregate

__all__ = ["knn_aggregate"]
