"""``torch.nn.functional.grid_sample`` as a layer."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from ..grid.grid_sample.api import check_options, grid_sample


class GridSample(nn.Module):
    """:func:`sonde.grid_sample` as a layer: ``forward(input, grid)``.

    Args:
        mode: ``"bilinear"``, ``"nearest"``, ``"bicubic"`` (images only).
        padding_mode: ``"zeros"``, ``"border"``, ``"reflection"``.
        align_corners: Whether −1 and 1 are the centres of the outer pixels.

    Example:
        >>> import torch, sonde.nn
        >>> sample = sonde.nn.GridSample(padding_mode="border")
        >>> sample(torch.arange(4.0).reshape(1, 1, 2, 2), torch.tensor([[[[0.0, 0.0], [-2.0, 0.5]]]]))
        tensor([[[[1.5000, 2.0000]]]])
    """

    def __init__(
        self,
        mode: Literal["bilinear", "nearest", "bicubic"] = "bilinear",
        padding_mode: Literal["zeros", "border", "reflection"] = "zeros",
        align_corners: bool = False,
    ) -> None:
        check_options(mode, padding_mode, align_corners)
        super().__init__()
        self.mode, self.padding_mode, self.align_corners = mode, padding_mode, align_corners

    def forward(self, input: Tensor, grid: Tensor) -> Tensor:
        return grid_sample(input, grid, self.mode, self.padding_mode, self.align_corners)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, padding_mode={self.padding_mode!r}, align_corners={self.align_corners}"
