from .api import sample_dot

__all__ = ["sample_dot"]
