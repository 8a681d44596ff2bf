from .api import Ball, radius_search

__all__ = ["Ball", "radius_search"]
