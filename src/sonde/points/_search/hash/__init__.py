from .api import point_hash

__all__ = ["point_hash"]
