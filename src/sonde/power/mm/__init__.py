from .api import mm

__all__ = ["mm"]
