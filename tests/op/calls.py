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


def _heads(count: int) -> tuple[Tensor, ...]:
    return tuple(_uniform(2, 2, 4, 4, low=0.2) for _ in range(count))


def _with_state(found: tuple) -> Tensor:
    out, state = found
    return out.sum() + state.S.sum() + state.z.sum()


_generator = torch.Generator().manual_seed(0)
_images = _uniform(2, 6, 5, 4)
_samples = _uniform(2, 7, 3, 2, low=-0.9, high=0.9)
_cloud = _uniform(9, 3), _uniform(90, 3)  # more points than the smallest tree holds
_level = ((5, 4),)

CALLS = {
    "sample_sum": Call(sonde.sample_sum, (_images, _samples, _uniform(2, 2, 7, 3))),
    "sample_dot": Call(sonde.sample_dot, (_images, _samples, _uniform(2, 2, 7, 6))),
    "sample_dot-octaves": Call(
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
    "sample_attention": Call(sonde.sample_attention, (_images, _samples, _uniform(2, 2, 7, 6))),
    "copy": Call(lambda x, **how: sonde.power.copy(x.mT, **how), (_uniform(2, 3, 4),)),
    "mm": Call(sonde.power.mm, (_uniform(2, 3, 4), _uniform(2, 4, 5))),
    "sympow": Call(lambda x, **how: sonde.power.sympow(x, 2, **how), (_uniform(3, 4),)),
    "sympow_mm": Call(
        lambda *args, **how: sonde.power.sympow_mm(*args, 2, expand="k", **how), (_uniform(2, 3, 4), _uniform(2, 16, 5))
    ),
    "attention": Call(lambda *args, **how: sonde.power.attention(*args, causal=True, **how), _heads(3)),
    "attention-wide": Call(sonde.power.attention, (*_heads(2), _uniform(2, 2, 4, 3))),
    "power_attention": Call(sonde.power.power_attention, (*_heads(3), _uniform(2, 2, 4, low=-1.0, high=0.0))),
    "power_attention-state": Call(
        lambda *args, **how: _with_state(sonde.power.power_attention(*args, chunk_size=1, return_state=True, **how)), _heads(3)
    ),
}
WAITS = {"radius_search"}  # the size of its result depends on the data, so it waits for the device: no CUDA graph can hold it


def _finite(distances: Tensor) -> Tensor:
    return torch.where(distances < torch.inf, distances, 0)


def operator_of(name: str) -> str:
    """The operator's name; what follows it tells calls of one operator apart."""
    return name.partition("-")[0]


def value_and_gradients(call: Call, function: Callable | None = None, **how) -> list[Tensor]:
    """The result, and the gradient of its weighted sum for every argument."""
    args = call.leaves()
    out = (function or call.function)(*args, **how)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), args)]
