"""The layers of Sparse4D and SparseDrive: key points of 3-D boxes, and the image features that cameras see at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..grid import deformable_aggregation, feature_maps_format
from ..grid._pyramid import levels as pyramid
from ..op import checks


class SparseBox3DKeyPointsGenerator(nn.Module):
    """Key points of 3-D boxes: some at fixed fractions of the box, some predicted from the instance's feature.

    Args:
        embed_dims: Channels of the instance features.
        num_learnable_pts: How many points are predicted, anywhere within the box.
        fix_scale: The fixed points relative to the centre, in units of the box's size, ``[fixed, 3]``; the centre if None.

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
        """Compute the points.

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
    r"""What the cameras see of each anchor, weighted and summed, as in SparseDrive and Sparse4D: same names and shapes.

    $$\mathrm{out}_a = W_o \sum_{p,m,l} w_{apml}\;\mathrm{tap}(\mathrm{features}_{ml},\;\pi_m(\mathrm{point}_{ap})),
      \qquad w_a = \mathrm{softmax}_{pml}(W_w(\mathrm{instance}_a + \mathrm{anchor}_a + \mathrm{camera}_m))$$

    with π_m the projection of camera m. The samples and their sum are one operator, :func:`sonde.deformable_aggregation`.

    Args:
        embed_dims: Channels of instances and feature maps.
        num_groups: Groups of channels, each with weights of its own; must divide `embed_dims`.
        num_levels: Levels of the feature pyramids.
        num_cams: Cameras.
        proj_drop: Dropout of the result.
        attn_drop: The probability, in training, that one camera's view of one point is dropped.
        kps_generator: A module that maps anchors and instance features to ``[B, A, num_pts, 3]`` and has an attribute `num_pts`;
            or the options of a `SparseBox3DKeyPointsGenerator`.
        use_deformable_func: True samples like the models' CUDA extension, which drops samples outside the image; False like
            their ``grid_sample`` fallback, which pads with zeros.
        use_camera_embed: Whether the weights depend on the camera, through an encoding of its projection.
        residual_mode: Add the instance feature to the result (``"add"``), concatenate it (``"cat"``), or leave it out (None).
        temporal_fusion_module: Must be None; accepted because the originals' configurations name it.

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
        cams = 1 if use_camera_embed else num_cams  # cameras that one output row of weights_fc covers
        self.weights_fc = nn.Linear(embed_dims, num_groups * cams * num_levels * self.num_pts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initially all weights are equal."""
        nn.init.zeros_(self.weights_fc.weight)
        nn.init.zeros_(self.weights_fc.bias)
        nn.init.xavier_uniform_(self.output_proj.weight)
        nn.init.zeros_(self.output_proj.bias)

    def forward(
        self, instance_feature: Tensor, anchor: Tensor, anchor_embed: Tensor, feature_maps: Sequence[Any], metas: Mapping[str, Any]
    ) -> Tensor:
        """Sample the feature maps at the anchors' key points, and aggregate.

        Args:
            instance_feature: ``[B, A, embed_dims]``.
            anchor: The input of `kps_generator`, ``[B, A, 11]`` for boxes.
            anchor_embed: ``[B, A, embed_dims]``.
            feature_maps: ``[B, cams, embed_dims, H, W]`` for each level; or the result of :func:`sonde.feature_maps_format`,
                computed once for many layers.
            metas: ``projection_mat`` ``[B, cams, 4, 4]`` to pixels, whose last row is not read and may be missing, and the images'
                width and height ``image_wh`` ``[B, cams, 2]``; without it the projection is to [0, 1]. B may be 1, and so may
                the cams of ``image_wh``.

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
        out: Tensor = self.proj_drop(self.output_proj(seen))
        if self.residual_mode == "add":
            return out + instance_feature
        return torch.cat([out, instance_feature], -1) if self.residual_mode == "cat" else out

    def _check(self, instance_feature: Any, anchor_embed: Any, feature_maps: Any, metas: Any) -> None:
        """Check everything but the anchor, which `kps_generator` checks."""
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
        of_projection = f"B {self.num_cams} {rows} 4"  # one per camera
        checks.broadcast(_AGGREGATION, "metas['projection_mat']", projection, of_projection, sizes, device, checks.FLOATS)
        if image_wh is not None:
            checks.broadcast(_AGGREGATION, "metas['image_wh']", image_wh, "B cams 2", sizes, device)

    def _weights(self, feature: Tensor, projection: Tensor) -> Tensor:
        """``[B, A, num_pts, num_cams, num_levels, num_groups]``"""
        B, A, _ = feature.shape
        if self.camera_encoder is not None:
            cameras = projection[:, :, :3].flatten(2).to(feature.dtype)  # a layer in half precision may project in float32
            feature = feature[:, :, None] + self.camera_encoder(cameras)[:, None]
        weights: Tensor = self.weights_fc(feature).reshape(B, A, -1, self.num_groups).softmax(-2)
        weights = weights.view(B, A, self.num_cams, self.num_levels, self.num_pts, self.num_groups)
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
