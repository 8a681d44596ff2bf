"""Drop-in replacements under other libraries' names and argument orders: change an import, and nothing else.

Each module is imported when it is first used.
"""

from importlib import import_module
from typing import Any

__all__ = ["fused_grid_ops", "mmcv", "physicsnemo", "retention", "sparsedrive", "torch", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
