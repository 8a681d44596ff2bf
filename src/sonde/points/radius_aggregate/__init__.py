from .api import radius_aggregate

__all__ = ["radius_aggregate"]
