"""Plan Triton kernels where Triton is not installed: a stand-in with its decorators and names, and no compiler.

A plan needs only the list of kernels, their problems and their candidates; it never looks inside a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Name:
    """Stands in for any name of Triton's: it has attributes, can be called and can decorate."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args else self

    def __repr__(self) -> str:
        return self._name


class constexpr:
    """A constant of a kernel, with Triton's repr."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"


def _jit(function: Callable | None = None, **options: Any) -> Any:
    if function is None:
        return _jit
    named = wraps(function)(lambda *args, **options: None)
    named.fn = function  # type: ignore[attr-defined]  # the store's keys hash its source
    return named


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "triton" else None

    def exec_module(self, module: ModuleType) -> None:
        anything = _Name(module.__name__).__getattr__
        module.__dict__.update(__getattr__=anything, jit=_jit, constexpr=constexpr, __version__="not installed")


@contextmanager
def planning() -> Iterator[None]:
    """Inside this context, kernels can be planned as if Triton were installed."""
    from ..op import plan

    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        plan.HAS_TRITON = True
        yield
    finally:
        plan.HAS_TRITON = False
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]
