"""The attention layer of Deformable-DETR and its successors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..grid._pyramid import levels as pyramid
from ..grid.ms_deform_attn.api import ms_deform_attn
from ..op import checks


class MSDeformAttn(nn.Module):
    r"""Multi-scale deformable attention with its projections, as in Deformable-DETR: same names, shapes and initial values.

    $$\mathrm{out}_q = W_o \sum_{l,p} \mathrm{softmax}_{lp}(W_a x_q)\;
      \mathrm{tap}(W_v\,\mathrm{input}_l,\; r_{ql} + W_s x_q / (w_l, h_l))$$

    for each of the heads. The softmax, the samples and their sum are one operator, :func:`sonde.ms_deform_attn`.

    Args:
        d_model: Channels of queries and input.
        n_levels: Levels of the feature pyramid.
        n_heads: Attention heads; must divide `d_model`.
        n_points: Samples for each head and level.

    Example:
        >>> import torch, sonde.nn
        >>> layer = sonde.nn.MSDeformAttn(d_model=32, n_levels=2, n_heads=4, n_points=3)
        >>> shapes = [(4, 6), (2, 3)]
        >>> layer(torch.randn(1, 5, 32), torch.rand(1, 5, 2, 2), torch.randn(1, 30, 32), shapes).shape
        torch.Size([1, 5, 32])
    """

    def __init__(self, d_model: int = 256, n_levels: int = 4, n_heads: int = 8, n_points: int = 4) -> None:
        checks.counts("MSDeformAttn", d_model=d_model, n_levels=n_levels, n_heads=n_heads, n_points=n_points)
        checks.divides("MSDeformAttn", "n_heads", "d_model", d_model=d_model, n_heads=n_heads)
        super().__init__()
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points
        self.sampling_offsets = nn.Linear(d_model, n_heads * n_levels * n_points * 2)
        self.attention_weights = nn.Linear(d_model, n_heads * n_levels * n_points)
        self.value_proj = nn.Linear(d_model, d_model)
        self.output_proj = nn.Linear(d_model, d_model)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each head samples in its own direction from the reference point, each point one pixel further; weights are equal."""
        angle = torch.arange(self.n_heads, dtype=torch.float32) * (2 * math.pi / self.n_heads)
        direction = torch.stack([angle.cos(), angle.sin()], -1)
        direction = direction / direction.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.n_points + 1, dtype=torch.float32)[:, None]
        offsets = (direction[:, None, None] * steps).expand(-1, self.n_levels, -1, -1)  # [h, L, P, 2]
        self.sampling_offsets.bias.copy_(offsets.flatten())
        for layer in (self.sampling_offsets, self.attention_weights):
            nn.init.zeros_(layer.weight)
        for layer in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(layer.weight)
        for layer in (self.attention_weights, self.value_proj, self.output_proj):
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Tensor | Sequence[Any],
        input_level_start_index: Tensor | Sequence[Any] | None = None,
        input_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to a pyramid.

        Args:
            query: ``[B, Q, d_model]``.
            reference_points: Points (x, y) in [0, 1], or boxes (x, y, w, h): ``[B, Q, L, 2 or 4]``; any of B, Q and L may
                be 1, as in PyTorch.
            input_flatten: The pyramid's pixels, level by level, ``[B, S, d_model]``.
            input_spatial_shapes: Height and width of every level, ``[L, 2]``; Python integers or a tensor; no synchronisation.
            input_level_start_index: The first row of every level, ``[L]``; may be None where the shapes are Python integers.
            input_padding_mask: True where a pixel is padding and counts as zero, ``[B, S]``.

        Returns:
            ``[B, Q, d_model]``.
        """
        self._check(query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index, input_padding_mask)
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0)
        logits = self.attention_weights(query).unflatten(-1, (self.n_heads, self.n_levels, self.n_points))
        offsets = self.sampling_offsets(query).unflatten(-1, (self.n_heads, self.n_levels, self.n_points, 2))
        locations = self._locations(reference_points, offsets, input_spatial_shapes)
        value = value.unflatten(-1, (self.n_heads, -1))
        seen = ms_deform_attn(value, input_spatial_shapes, input_level_start_index, locations, logits, logits=True)
        out: Tensor = self.output_proj(seen)
        return out

    def _check(self, query: Any, reference_points: Any, pixels: Any, shapes: Any, starts: Any, mask: Any) -> None:
        """Check arguments, not parameters: hooks may still move or cast parameters, or their inputs, before they are used."""
        name = "MSDeformAttn"
        n = checks.shapes(name, query=(query, f"B Q {self.d_model}"), input_flatten=(pixels, f"B S {self.d_model}"))
        last = 2
        if isinstance(reference_points, Tensor):
            checks.dense(name, "reference_points", reference_points)
            last = reference_points.shape[-1] if reference_points.ndim == 4 else 0
        if last not in (2, 4):
            wanted = "points [B, Q, L, 2] or boxes [B, Q, L, 4]"
            raise ValueError(f"{name}: reference_points must be {wanted}; got {list(reference_points.shape)}")
        checks.broadcast(
            name, "reference_points", reference_points, f"B Q L {last}", {**n, "L": self.n_levels}, query.device, checks.FLOATS
        )
        levels = pyramid.described(name, shapes, starts, "L", (self.n_levels,), _OF_ATTENTION)
        pyramid.check(name, "input_flatten", pixels, levels, "L", (self.n_levels,), _OF_ATTENTION)
        if mask is None:
            return
        expected = f"{name}: input_padding_mask must be bool {[n['B'], n['S']]}, one for each pixel of input_flatten"
        if not isinstance(mask, Tensor):
            raise TypeError(f"{expected}, or None; got {checks.kind(mask)}")
        checks.dense(name, "input_padding_mask", mask)
        if mask.dtype != torch.bool or mask.shape != pixels.shape[:2] or mask.device != pixels.device:
            raise ValueError(f"{expected}, on {pixels.device}; got {mask.dtype} {list(mask.shape)} on {mask.device}")

    def _locations(self, reference_points: Tensor, offsets: Tensor, shapes: Tensor | Sequence[Any]) -> Tensor:
        offsets = offsets.to(
            torch.promote_types(offsets.dtype, torch.float32)
        )  # half-precision coordinates are off by whole pixels
        where = reference_points[:, :, None, :, None]  # [B, Q, 1, L, 1, 2 or 4]
        if where.shape[-1] == 2:
            return where + offsets / _widths_and_heights(shapes, offsets)[:, None]
        return where[..., :2] + offsets / self.n_points * where[..., 2:] * 0.5

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, n_levels={self.n_levels}, n_heads={self.n_heads}, n_points={self.n_points}"


_OF_ATTENTION = pyramid.Names("input_spatial_shapes", "input_level_start_index", "n_levels")


def _widths_and_heights(shapes: Tensor | Sequence[Any], like: Tensor) -> Tensor:
    """The width and height of each level, ``[L, 2]``, as floats on the device of `like`."""
    if isinstance(shapes, Tensor):
        if shapes.device == like.device or torch.compiler.is_compiling():
            return shapes.to(like).flip(-1)
        shapes = shapes.tolist()
    # filled on the device: a copy from the host would wait for it
    return torch.stack([like.new_full((), size) for h, w in shapes for size in (w, h)]).view(-1, 2)
