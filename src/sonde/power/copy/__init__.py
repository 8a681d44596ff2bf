from .api import copy

__all__ = ["copy"]
