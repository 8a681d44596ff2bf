"""Tests for operators of your own: what can go wrong with a kernel, found and said in words."""

from .contract import CHECKS, Report, check_operator

__all__ = ["CHECKS", "Report", "check_operator"]


def __dir__() -> list[str]:
    return __all__
