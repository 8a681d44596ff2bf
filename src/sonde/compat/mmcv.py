"""Drop-ins for ``mmcv.ops.multi_scale_deform_attn``; :func:`sonde.ms_deform_attn` documents what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..grid import ms_deform_attn as _ms_deform_attn
from ..op import checks

__all__ = ["MultiScaleDeformableAttnFunction", "multi_scale_deformable_attn_pytorch"]


def __dir__() -> list[str]:
    return __all__


class MultiScaleDeformableAttnFunction:
    """``MultiScaleDeformableAttnFunction.apply``, and Deformable-DETR's ``MSDeformAttnFunction.apply``, with their arguments."""

    @staticmethod
    def apply(
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int = 64,
    ) -> Tensor:
        """Sample the value for each query, and sum with the attention weights.

        Args:
            value: ``[B, S, heads, channels]``.
            value_spatial_shapes: ``[L, 2]``.
            value_level_start_index: ``[L]``.
            sampling_locations: ``[B, Q, heads, L, P, 2]``, in float32 even if the value is in half precision.
            attention_weights: ``[B, Q, heads, L, P]``.
            im2col_step: Ignored; batches may have any size.

        Returns:
            ``[B, Q, heads * channels]``.
        """
        return _ms_deform_attn(value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)


def multi_scale_deformable_attn_pytorch(
    value: Tensor, value_spatial_shapes: Tensor | Sequence[Any], sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """The same without `value_level_start_index`: levels are contiguous. Shapes on a GPU are not copied to the host."""
    starts = None
    if isinstance(value_spatial_shapes, Tensor):
        checks.dense("multi_scale_deformable_attn_pytorch", "value_spatial_shapes", value_spatial_shapes)
        rows = value_spatial_shapes.prod(-1)
        starts = rows.cumsum(0) - rows
    return _ms_deform_attn(value, value_spatial_shapes, starts, sampling_locations, attention_weights)
