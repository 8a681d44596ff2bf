from .api import sample_attention

__all__ = ["sample_attention"]
