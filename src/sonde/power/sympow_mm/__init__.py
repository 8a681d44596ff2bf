from .api import sympow_mm

__all__ = ["sympow_mm"]
