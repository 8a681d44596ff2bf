"""What ``mmcv.ops.multi_scale_deform_attn`` calls by these names; what they mean is said at :func:`sonde.ms_deform_attn`."""

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
        """Sum what each query sees.

        Args:
            value: ``[B, S, heads, channels]``.
            value_spatial_shapes: ``[L, 2]``.
            value_level_start_index: ``[L]``.
            sampling_locations: ``[B, Q, heads, L, P, 2]``, in float32 also where the value is in half precision.
            attention_weights: ``[B, Q, heads, L, P]``.
            im2col_step: Ignored: no batch is too large or has to be a multiple of it.

        Returns:
            ``[B, Q, heads * channels]``.
        """
        return _ms_deform_attn(value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)


def multi_scale_deformable_attn_pytorch(
    value: Tensor, value_spatial_shapes: Tensor | Sequence[Any], sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """The same without `value_level_start_index`: levels follow one another. Shapes on a device stay there."""
    starts = None
    if isinstance(value_spatial_shapes, Tensor):
        checks.dense("multi_scale_deformable_attn_pytorch", "value_spatial_shapes", value_spatial_shapes)
        rows = value_spatial_shapes.prod(-1)
        starts = rows.cumsum(0) - rows
    return _ms_deform_attn(value, value_spatial_shapes, starts, sampling_locations, attention_weights)
