"""Fused sampling-and-aggregation operators for PyTorch."""

import gc as _gc
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

__version__ = "0.1.0"


def _is_command() -> bool:
    """True in the process of ``sonde …`` or ``python -m sonde …``, where importing torch can wait until it is needed."""
    program = _sys.argv[0] if getattr(_sys, "argv", None) else ""
    if program == "-m":  # the module is still being looked for
        return "sonde" in _sys.orig_argv[_sys.orig_argv.index("-m") + 1 :][:1]
    return program.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".exe") == "sonde"


if _TYPE_CHECKING or not _is_command():
    # at once, because importing sonde must register its operators: a saved graph that contains them needs them before any call
    _collected = _gc.isenabled()
    _gc.disable()  # a full collection, which goes through all of torch, would take longer than all that is imported here
    try:
        from ._public import *  # noqa: F403
        from ._public import __all__ as __all__
    finally:
        if _collected:
            _gc.enable()
else:

    def __getattr__(name: str) -> object:
        if name.startswith("_") and name != "__all__":  # such as _public itself, while it is being imported
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import _public

        return getattr(_public, name)


def __dir__() -> list[str]:
    from ._public import __all__ as public

    return [*public, "__version__"]
