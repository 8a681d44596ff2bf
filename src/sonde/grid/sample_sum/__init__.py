from .api import sample_sum

__all__ = ["sample_sum"]
