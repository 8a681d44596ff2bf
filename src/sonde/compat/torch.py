"""Drop-ins for ``torch.nn.functional``: ``F.grid_sample = sonde.compat.torch.grid_sample`` is enough."""

from __future__ import annotations

import warnings

from torch import Tensor, compiler

from ..grid import grid_sample as _grid_sample

__all__ = ["grid_sample"]


def __dir__() -> list[str]:
    return __all__


def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """``torch.nn.functional.grid_sample`` with its signature; see :func:`sonde.grid_sample`."""
    if align_corners is None:
        if not compiler.is_compiling():  # a warning would break the graph
            warnings.warn(
                "grid_sample: align_corners=None means False since torch 1.3; say align_corners=True for what was before, or False",
                stacklevel=2,
            )
        align_corners = False
    return _grid_sample(input, grid, mode, padding_mode, align_corners)  # type: ignore[arg-type]
