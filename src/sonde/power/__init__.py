"""Dense products and powers: the operators that attention with a state of fixed size is made of."""

from .copy import copy
from .mm import mm

__all__ = ["copy", "mm"]
