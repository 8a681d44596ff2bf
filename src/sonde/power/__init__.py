"""Dense products and powers: the building blocks of attention with a state of fixed size."""

from .attention import attention
from .copy import copy
from .mm import mm
from .power_attention import PowerState, power_attention
from .sympow import sympow, sympow_dim
from .sympow_mm import sympow_mm

__all__ = ["PowerState", "attention", "copy", "mm", "power_attention", "sympow", "sympow_dim", "sympow_mm"]
