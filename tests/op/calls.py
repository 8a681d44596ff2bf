"""One small call of every public operator, for tests that all must pass: ``CALLS[name]`` is a function and its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import sonde


class Call(NamedTuple):
    function: Callable[..., Tensor]
    args: tuple[Tensor, ...]  # all of them have a gradient

    def on(self, device: str) -> Call:
        return self._replace(args=tuple(x.to(device) for x in self.args))

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in self.args]


def _uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.rand(shape, generator=_generator, device="cpu") * (high - low) + low


_generator = torch.Generator().manual_seed(0)
_images = _uniform(2, 6, 5, 4)
_samples = _uniform(2, 7, 3, 2, low=-0.9, high=0.9)
_cloud = _uniform(9, 3), _uniform(90, 3)  # more points than the smallest tree holds
_level = ((5, 4),)

CALLS = {
    "sample_sum": Call(sonde.sample_sum, (_images, _samples, _uniform(2, 2, 7, 3))),
    "sample_dot": Call(sonde.sample_dot, (_images, _samples, _uniform(2, 2, 7, 6))),
    "sample_dot_octaves": Call(
        lambda *args, **how: sonde.sample_dot(*args, num_octaves=1, **how),
        (_images, _samples, _uniform(2, 2, 7, 4), _uniform(2, 7, 3)),
    ),
    "grid_sample": Call(sonde.grid_sample, (_images, _samples)),
    "deformable_aggregation": Call(
        lambda features, *rest, **how: sonde.deformable_aggregation(features, (_level,), ((0,),), *rest, **how),
        (_uniform(2, 20, 6), _uniform(2, 7, 3, 1, 2), _uniform(2, 7, 3, 1, 1, 2)),
    ),
    "ms_deform_attn": Call(
        lambda value, *rest, **how: sonde.ms_deform_attn(value, _level, (0,), *rest, **how),
        (_uniform(2, 20, 2, 4), _uniform(2, 7, 2, 1, 3, 2), _uniform(2, 7, 2, 1, 3)),
    ),
    "knn": Call(lambda *args, **how: sonde.knn(*args, 3, **how).distances, _cloud),
    "radius_neighbors": Call(lambda *args, **how: _finite(sonde.radius_neighbors(*args, 0.4, 3, **how).distances), _cloud),
    "radius_search": Call(lambda *args, **how: sonde.radius_search(*args, 0.4, **how).distances, _cloud),
    "knn_aggregate": Call(lambda *args, **how: sonde.knn_aggregate(*args, k=3, **how), (*_cloud, _uniform(90, 5))),
    "radius_aggregate": Call(lambda *args, **how: sonde.radius_aggregate(*args, 0.4, **how), (*_cloud, _uniform(90, 5))),
}
WAITS = {"radius_search"}  # the size of its result depends on the data, so it waits for the device: no CUDA graph can hold it


def _finite(distances: Tensor) -> Tensor:
    return torch.where(distances < torch.inf, distances, 0)


def value_and_gradients(call: Call, function: Callable | None = None, **how) -> list[Tensor]:
    """The result, and the gradient of its weighted sum for every argument."""
    args = call.leaves()
    out = (function or call.function)(*args, **how)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), args)]
