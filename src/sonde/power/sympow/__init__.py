from .api import sympow, sympow_dim

__all__ = ["sympow", "sympow_dim"]
