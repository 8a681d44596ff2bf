from .api import PowerState, power_attention

__all__ = ["PowerState", "power_attention"]
