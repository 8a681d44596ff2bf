"""Attention along epipolar lines, as in pixelSplat and its successors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..grid.sample_attention.api import sample_attention
from ..op import checks
from .epipolar_lines import check_depth_range, check_intrinsics, epipolar_samples, pixel_centres, relative_disparity

NAME = "EpipolarAttention"


class EpipolarAttention(nn.Module):
    r"""Each pixel of a view attends to what the other views see along its ray.

    $$\mathrm{out}_q = W_o \operatorname*{concat}_h \sum_{v,d} p_{hvd}\, W_v^h\, f_{vd}, \qquad
      p_h = \mathrm{softmax}_{vd}\, d_\mathrm{head}^{-1/2} \bigl(W_q^h x_q \cdot W_k^h f_{vd} + W_e f_{vd} \cdot \gamma_{vd}\bigr)$$

    with f_{vd} the features of view v at sample d of the epipolar line of pixel q, one softmax over the samples of all other
    views, and γ the sines and cosines of the sample's depth (as relative disparity, 0 at `near` and 1 at `far`) in
    `num_octaves` octaves.

    Sampling and projecting commute, so keys and values are never computed: W_k is applied to the queries and W_v to the sums, and
    the views' features are sampled in one pass of :func:`sonde.sample_attention`. Neither samples nor scores are stored.

    Args:
        dim: Channels of the features.
        heads: Attention heads.
        d_head: Channels of queries, keys and values in each head; dim / heads unless given.
        num_samples: Samples along each epipolar line.
        num_octaves: Octaves of the positional encoding of depths; 0 leaves it out.

    Example:
        >>> import torch, sonde.nn
        >>> layer = sonde.nn.EpipolarAttention(dim=16, heads=2, num_samples=8, num_octaves=4)
        >>> extrinsics = torch.eye(4).repeat(1, 3, 1, 1)
        >>> extrinsics[0, :, 0, 3] = torch.arange(3)  # three cameras in a row
        >>> intrinsics = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]]).repeat(1, 3, 1, 1)
        >>> layer(torch.randn(1, 3, 16, 6, 8), intrinsics, extrinsics, near=1.0, far=100.0).shape
        torch.Size([1, 3, 16, 6, 8])
    """

    def __init__(self, dim: int, heads: int = 4, d_head: int | None = None, num_samples: int = 32, num_octaves: int = 10) -> None:
        checks.counts(NAME, dim=dim, heads=heads, num_samples=num_samples)
        checks.count(NAME, "num_octaves", num_octaves)
        if d_head is None:
            checks.divides(NAME, "heads", "dim", dim=dim, heads=heads)
            d_head = dim // heads
        checks.counts(NAME, d_head=d_head)
        super().__init__()
        self.dim, self.heads, self.d_head, self.num_samples, self.num_octaves = dim, heads, d_head, num_samples, num_octaves
        self.to_q = nn.Linear(dim, heads * d_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * d_head, bias=False)
        self.to_out = nn.Linear(heads * d_head, dim)
        if num_octaves:
            self.depth_encoding = nn.Conv2d(dim, 2 * num_octaves, 1)

    def forward(
        self,
        features: Tensor,
        intrinsics: Tensor,
        extrinsics: Tensor,
        near: Tensor | float,
        far: Tensor | float,
        sources: Tensor | None = None,
    ) -> Tensor:
        """Attend from every pixel of each view to all other views.

        Args:
            features: The queries are computed from these, ``[B, V, dim, H, W]``, at least two views.
            intrinsics: Camera coordinates (z forward, y down) to [0, 1] × [0, 1] of the image, ``[B, V, 3, 3]``.
            extrinsics: Camera coordinates to the world, ``[B, V, 4, 4]``; :func:`epipolar_samples` says more.
            near: The nearest depth, a number or ``[B, V]``; > 0.
            far: The farthest, finite and no less than `near`.
            sources: The features that are sampled, ``[B, V, dim, H', W']``; `features` unless given. In pixelSplat, queries are
                normalised and go through several layers, while sources are used as they are.

        Returns:
            ``[B, V, dim, H, W]``, without the features themselves: add them if you want a residual. If no other view sees any
            part of a pixel's ray, the pixel has the bias of the last projection.
        """
        sources = features if sources is None else sources
        n = self._check(features, intrinsics, extrinsics, near, far, sources)
        B, V, H, W = (n[letter] for letter in "BVHW")
        dtype = torch.promote_types(torch.float32, torch.promote_types(intrinsics.dtype, extrinsics.dtype))
        near, far = (
            x.to(dtype).expand(B, V).flatten() if isinstance(x, Tensor) else features.new_full((B * V,), x, dtype=dtype)
            for x in (near, far)
        )
        points = pixel_centres(H, W, dtype=dtype, device=features.device).expand(B * V, -1, -1)
        K, camera = intrinsics.flatten(0, 1), extrinsics.flatten(0, 1)
        source_K, source = _others(intrinsics).flatten(0, 1), _others(extrinsics).flatten(0, 1)
        samples, depths, mask = epipolar_samples(points, K, camera, source_K, source, near, far, self.num_samples)
        if self.num_octaves:
            depths = relative_disparity(depths, near[:, None, None, None], far[:, None, None, None])
            sources = torch.cat([sources, self._encoded(sources).to(sources.dtype)], 2)
        seen = sample_attention(
            _others(sources).flatten(0, 1),
            samples,
            self._queries(features.flatten(3).transpose(2, 3).flatten(0, 1)),
            depths if self.num_octaves else None,
            self.num_octaves,
            scale=self.d_head**-0.5,
            mask=mask,
        )
        return self._results(seen).transpose(1, 2).reshape(B, V, self.dim, H, W)

    def _queries(self, tokens: Tensor) -> Tensor:
        """``[B·V, Q, dim]`` → ``[B·V, h, Q, dim]``: each head's queries, in the channels of the features."""
        keys, _ = self.to_kv.weight.view(2, self.heads, self.d_head, self.dim)
        rows = self.to_q(tokens).unflatten(-1, (self.heads, self.d_head)).transpose(1, 2)
        return torch.matmul(rows, keys)

    def _encoded(self, sources: Tensor) -> Tensor:
        """The channels that the encoding multiplies: ``[B, V, dim, H', W']`` → ``[B, V, 2·num_octaves, H', W']``.

        This is `depth_encoding` as a product of matrices, since Inductor cannot compile its convolution once sizes are symbolic.
        """
        B, V, C, H, W = sources.shape
        weight, bias = self.depth_encoding.weight.flatten(1), self.depth_encoding.bias
        assert bias is not None
        found = torch.baddbmm(bias[:, None], weight.expand(B * V, -1, -1), sources.reshape(B * V, C, H * W))
        return found.view(B, V, 2 * self.num_octaves, H, W)

    def _results(self, seen: Tensor) -> Tensor:
        """Project and combine the heads' weighted sums: ``[B·V, h, Q, dim]`` → ``[B·V, Q, dim]``."""
        _, values = self.to_kv.weight.view(2, self.heads, self.d_head, self.dim)
        heads = torch.matmul(seen, values.transpose(1, 2))
        out: Tensor = self.to_out(heads.transpose(1, 2).flatten(2))
        return out

    def _check(self, features: Any, intrinsics: Any, extrinsics: Any, near: Any, far: Any, sources: Any) -> dict[str, int]:
        """Check arguments, not parameters: hooks may still move or cast parameters before they are used."""
        operands = dict(features=(features, f"B V {self.dim} H W"), intrinsics=(intrinsics, "B V 3 3"))
        operands |= dict(extrinsics=(extrinsics, "B V 4 4"), sources=(sources, f"B V {self.dim} H' W'"))
        n = checks.shapes(NAME, **operands)
        if n["V"] < 2:
            raise ValueError(f"{NAME}: features must have at least 2 views, since each attends to the others; got {n['V']}")
        check_depth_range(NAME, near, far, "B V", n, features.device)
        check_intrinsics(NAME, intrinsics=intrinsics)
        return n

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, d_head={self.d_head}, num_samples={self.num_samples}, "
            f"num_octaves={self.num_octaves}"
        )


def _others(x: Tensor) -> Tensor:
    """For each view the others, starting with the next: ``[B, V, …]`` → ``[B, V, V−1, …]``."""
    return torch.stack([x.roll(-k, 1) for k in range(1, x.shape[1])], 2)
