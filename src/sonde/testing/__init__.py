"""Tests for your own operators: find what can go wrong with a kernel, and say it in words."""

from .contract import CHECKS, Report, check_operator

__all__ = ["CHECKS", "Report", "check_operator"]


def __dir__() -> list[str]:
    return __all__
