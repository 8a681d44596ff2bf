"""Public ``grid_sample``: documentation, checks, choice of implementation."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...op import checks
from ...op.layout import memory_format
from ...op.plan import Impl
from ...op.register import operator
from . import reference
from .reference import joint_batch

Mode = Literal["bilinear", "nearest", "bicubic"]
Padding = Literal["zeros", "border", "reflection"]
IMAGE, VOLUME = ("B C H W", "B Ho Wo 2"), ("B C D H W", "B Do Ho Wo 3")


def check_options(mode: Any, padding_mode: Any, align_corners: Any) -> None:
    for name, value, known in (("mode", mode, Mode), ("padding_mode", padding_mode, Padding)):
        if not isinstance(value, str) or value not in get_args(known):
            choice = ", ".join(map(repr, get_args(known)))
            raise ValueError(f"grid_sample: {name} must be one of {choice}; got {value!r}")
    if not isinstance(align_corners, bool):
        raise TypeError(f"grid_sample: align_corners must be True or False; got {align_corners!r}")


def _check_folded(input: Any, grid: Any, mode: Any, padding_mode: Any, align_corners: Any) -> None:
    """Checks of every call, including one whose batch torch.func has folded."""
    for argument, x in (("input", input), ("grid", grid)):
        if isinstance(x, Tensor):
            checks.dense("grid_sample", argument, x)
    volume = getattr(input, "ndim", 4) == 5
    if isinstance(input, Tensor) and isinstance(grid, Tensor) and (input.ndim != grid.ndim or input.ndim not in (4, 5)):
        raise ValueError(
            "grid_sample: input and grid must both have 4 dimensions, [B, C, H, W] and [B, Ho, Wo, 2], "
            "or both 5, [B, C, D, H, W] and [B, Do, Ho, Wo, 3]; "
            f"got {input.ndim}: {list(input.shape)} and {grid.ndim}: {list(grid.shape)}"
        )
    of_input, of_grid = VOLUME if volume else IMAGE
    checks.shapes("grid_sample", input=(input, of_input), grid=(grid, of_grid.replace("B", "N")))
    check_options(mode, padding_mode, align_corners)
    if mode == "bicubic" and volume:
        raise ValueError(
            "grid_sample: mode='bicubic' must have a 4-dimensional input; "
            f"got {input.ndim}: {list(input.shape)}. Use mode='bilinear', which is trilinear there"
        )


def _check(input: Any, grid: Any, mode: Any, padding_mode: Any, align_corners: Any) -> None:
    _check_folded(input, grid, mode, padding_mode, align_corners)
    b, n = input.shape[0], grid.shape[0]
    if b != n and b != 1 and n != 1:
        letters = (VOLUME if grid.ndim == 5 else IMAGE)[1].split()
        raise ValueError(
            f"grid_sample: grid must be [{', '.join(letters)}] with B={b} (from input), or 1; got {list(grid.shape)}. "
            "An input of batch 1 serves any number of grids"
        )


def _fake(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    _check_folded(input, grid, mode, padding_mode, align_corners)
    shape = joint_batch(input, grid), input.shape[1], *grid.shape[1:-1]
    return torch.empty_like(input.new_empty(shape), memory_format=memory_format(input, True))


_grid_sample = operator(
    "grid_sample(Tensor input, Tensor grid, str mode, str padding_mode, bool align_corners) -> Tensor",
    package=__package__,
    reference=reference.grid_sample,
    check=_check,
    fake=_fake,
    differentiable=("input", "grid"),
    channels_last=("input",),
)


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: Mode = "bilinear",
    padding_mode: Padding = "zeros",
    align_corners: bool = False,
    *,
    impl: Impl = "auto",
) -> Tensor:
    r"""Images or volumes sampled at the coordinates of a grid, as in ``torch.nn.functional.grid_sample``.

    $$\mathrm{out}_{bcp} = \sum_{k} w_k(\mathrm{grid}_{bp})\;\mathrm{input}_{bc,\,i_k(\mathrm{grid}_{bp})}$$

    Convention:
        Coordinates are (x, y) or (x, y, z). With ``align_corners=False`` −1 and 1 are the edges of the outer pixels,
        x = ((u + 1)·W − 1)/2; with True their centres, x = (u + 1)/2·(W − 1). ``"bilinear"`` is trilinear in a volume;
        ``"nearest"`` rounds halves to the even pixel; ``"bicubic"`` has a = −¾ and pads each of its 16 taps. Outside are zeros,
        the border, or the image reflected at its edges. A sample with a non-finite coordinate gives zero and has a zero
        gradient, whatever the padding; so does one that is reflected from 2³⁰ pixels away. At the border the gradient of the
        grid is zero.

        Input and grid may differ in dtype and have any strides; a channels-last input is not copied and gives a
        channels-last result. Sums run in float32, or in float64 if an operand is float64. The first derivatives are fused,
        higher ones and forward mode go through the reference. The forward pass is deterministic; the gradient of the input
        is under ``torch.use_deterministic_algorithms(True)`` and always on CPUs.

    Args:
        input: ``[B, C, H, W]`` or ``[B, C, D, H, W]``.
        grid: ``[B, Ho, Wo, 2]`` or ``[B, Do, Ho, Wo, 3]``. One input may serve many grids, and one grid many inputs.
        mode: ``"bilinear"``, ``"nearest"``, ``"bicubic"`` (images only).
        padding_mode: ``"zeros"``, ``"border"``, ``"reflection"``.
        align_corners: Whether −1 and 1 are the centres of the outer pixels.
        impl: ``"auto"`` is Triton on GPUs and Numba on CPUs; ``"reference"`` is plain PyTorch.

    Returns:
        ``[B, C, Ho, Wo]`` or ``[B, C, Do, Ho, Wo]`` in the dtype of `input`.

    Example:
        >>> import torch, sonde
        >>> input = torch.arange(4.0).reshape(1, 1, 2, 2)
        >>> grid = torch.tensor([[[[0.0, 0.0], [-0.5, -0.5], [-2.0, 0.5]]]])
        >>> sonde.grid_sample(input, grid, padding_mode="border")
        tensor([[[[1.5000, 0.0000, 2.0000]]]])
    """
    return _grid_sample(input, grid, mode, padding_mode, align_corners, impl=impl)
