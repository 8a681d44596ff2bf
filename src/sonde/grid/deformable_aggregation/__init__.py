from .api import deformable_aggregation, feature_maps_format

__all__ = ["deformable_aggregation", "feature_maps_format"]
