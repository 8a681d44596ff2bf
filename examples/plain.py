"""The examples' layers in plain PyTorch, for comparison, here and in the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def ms_deform_attn(value: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """`value` ``[B, S, h, D]``, `locations` ``[B, Q, h, L, P, 2]``, `weights` ``[B, Q, h, L, P]`` → ``[B, Q, h·D]``."""
    B, _, heads, D = value.shape
    Q = locations.shape[1]
    out = value.new_zeros(B, heads, D, Q)
    for level, rows in enumerate(value.split([h * w for h, w in shapes], 1)):
        image = rows.permute(0, 2, 3, 1).reshape(B * heads, D, *shapes[level])
        grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1  # [B·h, Q, P, 2]
        seen = F.grid_sample(image, grid, align_corners=False).unflatten(0, (B, heads))  # [B, h, D, Q, P]
        out = out + (seen * weights[:, :, :, level].transpose(1, 2)[:, :, None]).sum(-1)
    return out.flatten(1, 2).transpose(1, 2)


def deformable_aggregation(maps: list[Tensor], locations: Tensor, weights: Tensor, drop: bool = True) -> Tensor:
    """`maps` ``[B, cams, C, H, W]``, `locations` ``[B, A, P, cams, 2]``, `weights` ``[B, A, P, cams, L, G]`` → ``[B, A, C]``."""
    B, _, C = maps[0].shape[:3]
    G = weights.shape[-1]
    if drop:
        inside = ((locations > 0) & (locations < 1)).all(-1)
        weights = weights * inside[..., None, None]
    grid = 2 * locations.permute(0, 3, 1, 2, 4).flatten(0, 1) - 1  # [B·cams, A, P, 2]
    out = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for level, images in enumerate(maps):
        seen = F.grid_sample(images.flatten(0, 1), grid, align_corners=False)  # [B·cams, C, A, P]
        seen = seen.unflatten(1, (G, C // G)).unflatten(0, (B, -1))  # [B, cams, G, C/G, A, P]
        out = out + torch.einsum("bapmg,bmgcap->bagc", weights[..., level, :], seen)
    return out.flatten(2)


class MSDeformAttn(nn.Module):
    """Deformable-DETR's layer."""

    def __init__(self, d_model: int = 256, n_levels: int = 4, n_heads: int = 8, n_points: int = 4) -> None:
        super().__init__()
        self.sizes = n_heads, n_levels, n_points
        self.sampling_offsets = nn.Linear(d_model, n_heads * n_levels * n_points * 2)
        self.attention_weights = nn.Linear(d_model, n_heads * n_levels * n_points)
        self.value_proj = nn.Linear(d_model, d_model)
        self.output_proj = nn.Linear(d_model, d_model)

    def forward(self, query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index=None, mask=None):
        heads, levels, points = self.sizes
        shapes = torch.as_tensor(input_spatial_shapes)
        value = self.value_proj(input_flatten)
        if mask is not None:
            value = value.masked_fill(mask[..., None], 0)
        offsets = self.sampling_offsets(query).unflatten(-1, (heads, levels, points, 2))
        weights = self.attention_weights(query).unflatten(-1, (heads, levels * points)).softmax(-1).unflatten(-1, (levels, points))
        reference = reference_points[:, :, None, :, None]
        if reference.shape[-1] == 2:
            locations = reference + offsets / shapes.flip(-1).to(query)[:, None]
        else:
            locations = reference[..., :2] + offsets / points * reference[..., 2:] * 0.5
        seen = ms_deform_attn(value.unflatten(-1, (heads, -1)), [tuple(s) for s in shapes.tolist()], locations, weights)
        return self.output_proj(seen)


class SparseBox3DKeyPointsGenerator(nn.Module):
    """Sparse4D's key points of boxes."""

    def __init__(self, embed_dims: int = 256, num_learnable_pts: int = 0, fix_scale=((0.0, 0.0, 0.0),)) -> None:
        super().__init__()
        self.fix_scale = nn.Parameter(torch.tensor(fix_scale), requires_grad=False)
        self.num_pts = len(fix_scale) + num_learnable_pts
        self.learnable_fc = nn.Linear(embed_dims, num_learnable_pts * 3) if num_learnable_pts else None

    def forward(self, anchor: Tensor, instance_feature: Tensor) -> Tensor:
        size = anchor[:, :, None, 3:6].exp()
        points = self.fix_scale * size
        if self.learnable_fc is not None:
            learnt = self.learnable_fc(instance_feature).unflatten(-1, (-1, 3)).sigmoid() - 0.5
            points = torch.cat([points, learnt * size], 2)
        sin, cos = anchor[..., 6], anchor[..., 7]
        zero, one = torch.zeros_like(sin), torch.ones_like(sin)
        rotation = torch.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], -1).unflatten(-1, (3, 3))
        return points @ rotation.mT + anchor[:, :, None, :3]


class DeformableFeatureAggregation(nn.Module):
    """Sparse4D's and SparseDrive's layer."""

    def __init__(
        self,
        embed_dims: int = 256,
        num_groups: int = 8,
        num_levels: int = 4,
        num_cams: int = 6,
        attn_drop: float = 0.0,
        kps_generator: dict | None = None,
        use_deformable_func: bool = True,
        use_camera_embed: bool = False,
        residual_mode: str = "add",
    ) -> None:
        super().__init__()
        self.attn_drop, self.drop, self.residual_mode = attn_drop, use_deformable_func, residual_mode
        self.kps_generator = SparseBox3DKeyPointsGenerator(embed_dims, **(kps_generator or {}))
        self.output_proj = nn.Linear(embed_dims, embed_dims)
        self.sizes = num_cams, num_levels, self.kps_generator.num_pts, num_groups
        rows = num_levels * self.kps_generator.num_pts * num_groups
        self.camera_encoder = None
        if use_camera_embed:
            first = [nn.Linear(12, embed_dims), nn.ReLU(), nn.LayerNorm(embed_dims)]
            self.camera_encoder = nn.Sequential(*first, nn.Linear(embed_dims, embed_dims), nn.ReLU(), nn.LayerNorm(embed_dims))
        self.weights_fc = nn.Linear(embed_dims, rows if use_camera_embed else rows * num_cams)

    def forward(self, instance_feature, anchor, anchor_embed, feature_maps, metas):
        points = self.kps_generator(anchor, instance_feature)  # [B, A, P, 3]
        B, A, P, _ = points.shape
        homogeneous = torch.cat([points, torch.ones_like(points[..., :1])], -1).flatten(1, 2)
        seen = (metas["projection_mat"] @ homogeneous[:, None].mT).mT.unflatten(2, (A, P))  # [B, cams, A, P, 4]
        locations = seen[..., :2] / seen[..., 2:3].clamp(min=1e-5)
        if "image_wh" in metas:
            locations = locations / metas["image_wh"][:, :, None, None]
        feature = instance_feature + anchor_embed
        if self.camera_encoder is not None:
            feature = feature[:, :, None] + self.camera_encoder(metas["projection_mat"][:, :, :3].flatten(2))[:, None]
        cams, groups = self.sizes[0], self.sizes[-1]
        weights = self.weights_fc(feature).reshape(B, A, -1, groups).softmax(2).reshape(B, A, *self.sizes)
        if self.training and self.attn_drop > 0:
            weights = weights * (torch.rand(B, A, cams, 1, P, 1) > self.attn_drop).to(weights) / (1 - self.attn_drop)
        weights = weights.permute(0, 1, 4, 2, 3, 5)
        seen = deformable_aggregation(feature_maps, locations.permute(0, 2, 3, 1, 4), weights, self.drop)
        out = self.output_proj(seen)
        return out + instance_feature if self.residual_mode == "add" else torch.cat([out, instance_feature], -1)
