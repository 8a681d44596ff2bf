from .api import ms_deform_attn

__all__ = ["ms_deform_attn"]
