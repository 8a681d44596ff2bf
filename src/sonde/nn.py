"""Layers on the operators; their state dicts are those of the models that users come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .grid import deformable_aggregation, feature_maps_format, grid_sample, ms_deform_attn
from .grid._pyramid import levels as pyramid
from .grid.grid_sample.api import check_options
from .op import checks

__all__ = ["DeformableFeatureAggregation", "GridSample", "MSDeformAttn", "SparseBox3DKeyPointsGenerator"]


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


class MSDeformAttn(nn.Module):
    r"""Multi-scale deformable attention with its projections, as Deformable-DETR has it: same names, shapes and initial values.

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
        """Heads look around the reference in all directions, a pixel further with each point; weights are equal."""
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
        input_spatial_shapes: Tensor | Sequence,
        input_level_start_index: Tensor | Sequence | None = None,
        input_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to a pyramid.

        Args:
            query: ``[B, Q, d_model]``.
            reference_points: Points (x, y) in [0, 1], or boxes (x, y, w, h): ``[B, Q, L, 2 or 4]``; any of B, Q and L may
                be 1, as in PyTorch.
            input_flatten: The pyramid's pixels, level by level, ``[B, S, d_model]``.
            input_spatial_shapes: Height and width of every level, ``[L, 2]``; Python integers or a tensor, which nothing waits for.
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
        out = ms_deform_attn(value, input_spatial_shapes, input_level_start_index, locations, logits, logits=True)
        return self.output_proj(out)

    def _check(self, query: Any, reference_points: Any, pixels: Any, shapes: Any, starts: Any, mask: Any) -> None:
        """Parameters are left out: hooks may move or cast them, or what goes into them, between here and their use."""
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

    def _locations(self, reference_points: Tensor, offsets: Tensor, shapes: Tensor | Sequence) -> Tensor:
        offsets = offsets.to(torch.promote_types(offsets.dtype, torch.float32))  # half a coordinate is pixels off
        where = reference_points[:, :, None, :, None]  # [B, Q, 1, L, 1, 2 or 4]
        if where.shape[-1] == 2:
            return where + offsets / _widths_and_heights(shapes, offsets)[:, None]
        return where[..., :2] + offsets / self.n_points * where[..., 2:] * 0.5

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, n_levels={self.n_levels}, n_heads={self.n_heads}, n_points={self.n_points}"


_OF_ATTENTION = pyramid.Names("input_spatial_shapes", "input_level_start_index", "n_levels")


def _widths_and_heights(shapes: Tensor | Sequence, like: Tensor) -> Tensor:
    """Of each level, ``[L, 2]``, as floats beside `like`."""
    if isinstance(shapes, Tensor):
        if shapes.device == like.device or torch.compiler.is_compiling():
            return shapes.to(like).flip(-1)
        shapes = shapes.tolist()
    # filled where they are needed: a copy from the host would wait for the device
    return torch.stack([like.new_full((), size) for h, w in shapes for size in (w, h)]).unflatten(0, (-1, 2))


class SparseBox3DKeyPointsGenerator(nn.Module):
    """Key points of 3-D boxes: some at fixed fractions of the box, some where its feature says.

    Args:
        embed_dims: Channels of the instance features.
        num_learnable_pts: How many points the feature places, anywhere within the box.
        fix_scale: Places of the fixed points, in units of the box around its centre, ``[fixed, 3]``; the centre if None.

    Example:
        >>> import torch, sonde.nn
        >>> points = sonde.nn.SparseBox3DKeyPointsGenerator(fix_scale=[[0, 0, 0], [0.5, 0, 0]])
        >>> box = torch.tensor([10.0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0])  # a cube of 1 m, turned to the left
        >>> points(box.reshape(1, 1, 11))
        tensor([[[[10.0000,  0.0000,  0.0000],
                  [10.0000,  0.5000,  0.0000]]]])
    """

    def __init__(
        self, embed_dims: int = 256, num_learnable_pts: int = 0, fix_scale: Sequence[Sequence[float]] | None = None
    ) -> None:
        name = type(self).__name__
        checks.counts(name, embed_dims=embed_dims)
        checks.count(name, "num_learnable_pts", num_learnable_pts)
        fixed = _fixed_points(name, [[0.0, 0.0, 0.0]] if fix_scale is None else fix_scale, num_learnable_pts)
        super().__init__()
        self.embed_dims, self.num_learnable_pts = embed_dims, num_learnable_pts
        self.fix_scale = nn.Parameter(fixed, requires_grad=False)
        self.num_pts = len(fixed) + num_learnable_pts
        if num_learnable_pts > 0:
            self.learnable_fc = nn.Linear(embed_dims, num_learnable_pts * 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.num_learnable_pts > 0:
            nn.init.xavier_uniform_(self.learnable_fc.weight)
            nn.init.zeros_(self.learnable_fc.bias)

    def forward(self, anchor: Tensor, instance_feature: Tensor | None = None) -> Tensor:
        """Place the points.

        Args:
            anchor: Boxes (x, y, z, ln w, ln l, ln h, sin yaw, cos yaw, …), ``[B, A, 8 or more]``.
            instance_feature: ``[B, A, embed_dims]``; without it there are only the fixed points.

        Returns:
            ``[B, A, num_pts, 3]``.
        """
        learns = self.num_learnable_pts > 0 and instance_feature is not None
        operands = dict(anchor=(anchor, "B A n"), instance_feature=(instance_feature, f"B A {self.embed_dims}"))
        checks.shapes(type(self).__name__, **(operands if learns else {"anchor": operands["anchor"]}))
        if anchor.shape[2] < 8:
            raise ValueError(
                f"{type(self).__name__}: anchor must be boxes (x, y, z, ln w, ln l, ln h, sin yaw, cos yaw, …), [B, A, 8 or more]; "
                f"got {list(anchor.shape)}"
            )
        centre, size = anchor[..., None, :3], anchor[..., None, 3:6].exp()
        scale = self.fix_scale.expand(*anchor.shape[:2], -1, -1)
        if learns:
            placed = self.learnable_fc(instance_feature).unflatten(-1, (-1, 3)).sigmoid() - 0.5
            scale = torch.cat([scale, placed.to(scale)], -2)
        x, y, z = (scale * size).unbind(-1)
        sin, cos = anchor[..., 6:7], anchor[..., 7:8]
        return torch.stack([cos * x - sin * y, sin * x + cos * y, z], -1) + centre


def _fixed_points(name: str, given: Any, learnable: int) -> Tensor:
    try:
        fixed = torch.as_tensor(given, dtype=torch.get_default_dtype()).detach().clone()
    except (TypeError, ValueError, RuntimeError) as problem:
        raise TypeError(f"{name}: fix_scale must be numbers [fixed, 3], or None; got {checks.kind(given)}: {problem}") from problem
    if fixed.ndim != 2 or fixed.shape[1] != 3:
        raise ValueError(f"{name}: fix_scale must be [fixed, 3], three numbers for each point; got {list(fixed.shape)}")
    if len(fixed) + learnable == 0:
        raise ValueError(f"{name}: fix_scale must have a point where num_learnable_pts is 0; got none. None is the centre")
    return fixed


class DeformableFeatureAggregation(nn.Module):
    r"""What the cameras see of each anchor, weighted and summed, as SparseDrive and Sparse4D have it: same names and shapes.

    $$\mathrm{out}_a = W_o \sum_{p,m,l} w_{apml}\;\mathrm{tap}(\mathrm{features}_{ml},\;\pi_m(\mathrm{point}_{ap})),
      \qquad w_a = \mathrm{softmax}_{pml}(W_w(\mathrm{instance}_a + \mathrm{anchor}_a + \mathrm{camera}_m))$$

    with π_m the projection of camera m. The samples and their sum are one operator, :func:`sonde.deformable_aggregation`.

    Args:
        embed_dims: Channels of instances and feature maps.
        num_groups: Groups of channels, each with weights of its own; must divide `embed_dims`.
        num_levels: Levels of the feature pyramids.
        num_cams: Cameras.
        proj_drop: Dropout of the result.
        attn_drop: How often, in training, what one camera sees of one point is left out.
        kps_generator: A module that makes ``[B, A, num_pts, 3]`` of anchors and instance features and has `num_pts`;
            or the options of a `SparseBox3DKeyPointsGenerator`.
        use_deformable_func: True samples as the models' CUDA extension, which drops what is seen outside the image; False as
            their ``grid_sample`` fallback, which pads with zeros.
        use_camera_embed: Whether weights depend on the camera through an encoding of its projection.
        residual_mode: The instance feature is added to the result (``"add"``), put beside it (``"cat"``), or left out (None).
        temporal_fusion_module: None. The originals' configurations may name it.

    Example:
        >>> import torch, sonde.nn
        >>> layer = sonde.nn.DeformableFeatureAggregation(32, num_groups=4, num_levels=2, num_cams=3, use_camera_embed=True)
        >>> maps = [torch.randn(1, 3, 32, 8, 16), torch.randn(1, 3, 32, 4, 8)]
        >>> metas = {"projection_mat": torch.eye(4).expand(1, 3, 4, 4)}
        >>> layer(torch.randn(1, 5, 32), torch.randn(1, 5, 11), torch.randn(1, 5, 32), maps, metas).shape
        torch.Size([1, 5, 32])
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_groups: int = 8,
        num_levels: int = 4,
        num_cams: int = 6,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        kps_generator: nn.Module | Mapping[str, Any] | None = None,
        *,
        use_deformable_func: bool = True,
        use_camera_embed: bool = False,
        residual_mode: Literal["add", "cat"] | None = "add",
        temporal_fusion_module: None = None,
    ) -> None:
        if temporal_fusion_module is not None:
            raise ValueError(
                f"{_AGGREGATION}: temporal_fusion_module must be None, as in the configurations of both models; "
                f"got {temporal_fusion_module!r}"
            )
        checks.counts(_AGGREGATION, embed_dims=embed_dims, num_groups=num_groups, num_levels=num_levels, num_cams=num_cams)
        checks.divides(_AGGREGATION, "num_groups", "embed_dims", embed_dims=embed_dims, num_groups=num_groups)
        checks.probability(_AGGREGATION, "proj_drop", proj_drop)
        checks.probability(_AGGREGATION, "attn_drop", attn_drop, below_one=True)
        checks.flags(_AGGREGATION, use_deformable_func=use_deformable_func, use_camera_embed=use_camera_embed)
        checks.choice(_AGGREGATION, "residual_mode", residual_mode, ("add", "cat", None))
        super().__init__()
        self.embed_dims, self.num_groups, self.num_levels, self.num_cams = embed_dims, num_groups, num_levels, num_cams
        self.attn_drop, self.use_deformable_func, self.residual_mode = attn_drop, use_deformable_func, residual_mode
        self.proj_drop = nn.Dropout(proj_drop)
        self.kps_generator = _key_points(kps_generator, embed_dims)
        self.num_pts: int = self.kps_generator.num_pts  # type: ignore[assignment]
        self.output_proj = nn.Linear(embed_dims, embed_dims)
        self.camera_encoder = _camera_encoder(embed_dims) if use_camera_embed else None
        cams = 1 if use_camera_embed else num_cams  # that one row of weights is for
        self.weights_fc = nn.Linear(embed_dims, num_groups * cams * num_levels * self.num_pts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All weights are equal at first."""
        nn.init.zeros_(self.weights_fc.weight)
        nn.init.zeros_(self.weights_fc.bias)
        nn.init.xavier_uniform_(self.output_proj.weight)
        nn.init.zeros_(self.output_proj.bias)

    def forward(
        self, instance_feature: Tensor, anchor: Tensor, anchor_embed: Tensor, feature_maps: Sequence, metas: Mapping[str, Any]
    ) -> Tensor:
        """Look at the anchors.

        Args:
            instance_feature: ``[B, A, embed_dims]``.
            anchor: What the generator of key points takes, ``[B, A, 11]`` for boxes.
            anchor_embed: ``[B, A, embed_dims]``.
            feature_maps: ``[B, cams, embed_dims, H, W]`` for each level; or what :func:`sonde.feature_maps_format` makes of them,
                once for many layers.
            metas: ``projection_mat`` ``[B, cams, 4, 4]`` to pixels, of which the last row is not read and may be missing, and their
                number ``image_wh`` ``[B, cams, 2]``; without it the projection is to [0, 1]. B may be 1, and cams of ``image_wh``.

        Returns:
            ``[B, A, embed_dims]``, twice as many channels with ``residual_mode="cat"``.
        """
        self._check(instance_feature, anchor_embed, feature_maps, metas)
        projection, image_wh = metas["projection_mat"], metas.get("image_wh")
        points = self.kps_generator(anchor, instance_feature)
        if not isinstance(points, Tensor) or points.shape != (*instance_feature.shape[:2], self.num_pts, 3):
            raise ValueError(
                f"{_AGGREGATION}: kps_generator must make [B, A, num_pts, 3] = {[*instance_feature.shape[:2], self.num_pts, 3]} "
                f"of anchor and instance_feature; got {checks.kind(points)}"
            )
        locations = _project(points, projection, image_wh)
        weights = self._weights(instance_feature + anchor_embed, projection)
        features, shapes, starts = feature_maps if feature_maps[0].ndim == 3 else feature_maps_format(feature_maps)
        outside: Literal["drop", "zeros"] = "drop" if self.use_deformable_func else "zeros"
        seen = deformable_aggregation(features, shapes, starts, locations, weights, outside=outside)
        out = self.proj_drop(self.output_proj(seen))
        if self.residual_mode == "add":
            return out + instance_feature
        return torch.cat([out, instance_feature], -1) if self.residual_mode == "cat" else out

    def _check(self, instance_feature: Any, anchor_embed: Any, feature_maps: Any, metas: Any) -> None:
        """All but the anchor, which the generator of key points knows."""
        row = f"B A {self.embed_dims}"
        operands = {"instance_feature": (instance_feature, row), "anchor_embed": (anchor_embed, row)}
        kinds = "maps [B, cams, C, H, W] in a list, or what sonde.feature_maps_format returned"
        if not isinstance(feature_maps, (list, tuple)) or not feature_maps or not isinstance(feature_maps[0], Tensor):
            raise TypeError(
                f"{_AGGREGATION}: feature_maps must be {kinds}; got {checks.kind(feature_maps)}. "
                "sonde.compat.sparsedrive.feature_maps_format takes groups of cameras"
            )
        counts = self.num_cams, self.num_levels
        if feature_maps[0].is_nested or feature_maps[0].ndim != 3:
            pyramid.check_maps(_AGGREGATION, feature_maps=feature_maps)
            operands["feature_maps[0]"] = (feature_maps[0], f"B {self.num_cams} {self.embed_dims} H W")
            n = checks.shapes(_AGGREGATION, **operands)
            if len(feature_maps) != self.num_levels:
                wanted = f"num_levels={self.num_levels}"
                raise ValueError(f"{_AGGREGATION}: feature_maps must have {wanted} levels; got {len(feature_maps)}")
        elif len(feature_maps) != 3:
            raise ValueError(
                f"{_AGGREGATION}: feature_maps must be {kinds}, (features, spatial_shapes, level_starts); "
                f"got {len(feature_maps)} with {checks.kind(feature_maps[0])}"
            )
        else:
            features, shapes, starts = feature_maps
            operands["feature_maps[0]"] = (features, f"B S {self.embed_dims}")
            n = checks.shapes(_AGGREGATION, **operands)
            levels = pyramid.described(_AGGREGATION, shapes, starts, "cams L", counts, _OF_AGGREGATION)
            pyramid.check(_AGGREGATION, "feature_maps[0]", features, levels, "cams L", counts, _OF_AGGREGATION)
        self._check_cameras(metas, {"B": n["B"], "cams": self.num_cams}, instance_feature.device)

    def _check_cameras(self, metas: Any, sizes: Mapping[str, int], device: torch.device) -> None:
        if not isinstance(metas, Mapping):
            expected = "a dictionary with 'projection_mat' [B, cams, 4, 4]"
            raise TypeError(f"{_AGGREGATION}: metas must be {expected}; got {checks.kind(metas)}")
        if "projection_mat" not in metas:
            raise ValueError(
                f"{_AGGREGATION}: metas must have 'projection_mat' [B, cams, 4, 4], and may have 'image_wh' [B, cams, 2]; "
                f"got {sorted(map(str, metas))}"
            )
        projection, image_wh = metas["projection_mat"], metas.get("image_wh")
        rows = 3 if isinstance(projection, Tensor) and not projection.is_nested and projection.shape[2:3] == (3,) else 4
        of_projection = f"B {self.num_cams} {rows} 4"  # each camera has one of its own
        checks.broadcast(_AGGREGATION, "metas['projection_mat']", projection, of_projection, sizes, device, checks.FLOATS)
        if image_wh is not None:
            checks.broadcast(_AGGREGATION, "metas['image_wh']", image_wh, "B cams 2", sizes, device)

    def _weights(self, feature: Tensor, projection: Tensor) -> Tensor:
        """``[B, A, num_pts, num_cams, num_levels, num_groups]``"""
        B, A, _ = feature.shape
        if self.camera_encoder is not None:
            feature = feature[:, :, None] + self.camera_encoder(projection[:, :, :3].flatten(2))[:, None]
        weights = self.weights_fc(feature).reshape(B, A, -1, self.num_groups).softmax(-2)
        weights = weights.unflatten(2, (self.num_cams, self.num_levels, self.num_pts))
        if self.training and self.attn_drop > 0:
            kept = torch.rand(B, A, self.num_cams, 1, self.num_pts, 1, device=weights.device) > self.attn_drop
            weights = torch.where(kept, weights / (1 - self.attn_drop), 0)
        return weights.permute(0, 1, 4, 2, 3, 5)

    def extra_repr(self) -> str:
        return (
            f"embed_dims={self.embed_dims}, num_groups={self.num_groups}, num_levels={self.num_levels}, num_cams={self.num_cams}, "
            f"num_pts={self.num_pts}, use_deformable_func={self.use_deformable_func}, residual_mode={self.residual_mode!r}"
        )


_AGGREGATION = DeformableFeatureAggregation.__name__
_OF_AGGREGATION = pyramid.Names("feature_maps[1]", "feature_maps[2]", "num_cams and num_levels")
_KEY_POINTS = SparseBox3DKeyPointsGenerator.__name__


def _key_points(given: Any, embed_dims: int) -> nn.Module:
    if isinstance(given, nn.Module):
        if not hasattr(given, "num_pts"):
            raise TypeError(
                f"{_AGGREGATION}: kps_generator must have num_pts, the number of its points; got {type(given).__name__}"
            )
        checks.counts(_AGGREGATION, **{"kps_generator.num_pts": given.num_pts})
        return given
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"{_AGGREGATION}: kps_generator must be a module, the options of a {_KEY_POINTS}, or None; got {checks.kind(given)}"
        )
    options = {**(given or {}), "embed_dims": embed_dims}
    kind = options.pop("type", _KEY_POINTS)
    if kind != _KEY_POINTS:
        raise ValueError(f"{_AGGREGATION}: kps_generator of type {kind!r} is not known here; pass the module itself")
    unknown = set(options) - {"embed_dims", "num_learnable_pts", "fix_scale"}
    if unknown:
        raise ValueError(
            f"{_AGGREGATION}: kps_generator must be options of a {_KEY_POINTS}: type, num_learnable_pts, fix_scale; "
            f"got {sorted(map(str, unknown))}, too"
        )
    return SparseBox3DKeyPointsGenerator(**options)


def _camera_encoder(embed_dims: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (12, embed_dims):
        layers += [nn.Linear(channels, embed_dims), nn.ReLU(inplace=True), nn.LayerNorm(embed_dims)]
    return nn.Sequential(*layers)


def _project(points: Tensor, projection: Tensor, image_wh: Tensor | None) -> Tensor:
    """Where each camera sees `points` ``[B, A, P, 3]``: ``[B, A, P, cams, 2]``."""
    x, y, z = points[:, :, :, None, :, None].unbind(-2)
    m = projection[:, None, None, :, :3]  # [B, 1, 1, cams, 3, 4]
    # no matrix product: autocast would do it in half precision, pixels off
    seen = m[..., 0] * x + m[..., 1] * y + m[..., 2] * z + m[..., 3]
    where = seen[..., :2] / seen[..., 2:].clamp(min=1e-5)
    return where if image_wh is None else where / image_wh[:, None, None]
