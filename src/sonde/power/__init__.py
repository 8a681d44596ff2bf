"""Dense products and powers: the operators that attention with a state of fixed size is made of."""

from .attention import attention
from .copy import copy
from .mm import mm
from .sympow import sympow, sympow_dim
from .sympow_mm import sympow_mm

__all__ = ["attention", "copy", "mm", "sympow", "sympow_dim", "sympow_mm"]
