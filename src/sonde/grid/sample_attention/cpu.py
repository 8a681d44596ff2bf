"""CPU passes of ``sample_attention``; its kernels are in ``cpu_kernels``, the gradient of pixels is in the epipolar engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu import NUMPY
from ...op.cpu_steps import Array, CpuPass, by_threads
from ...op.dtypes import accumulator
from .._epipolar.cpu import add_images_gradient, gradient_buffer
from .cpu_kernels import attend, slopes
from .reference import scale_of

Opt = Tensor | None
WEIGHTS = 1 << 24  # bytes of weights kept for the gradient of pixels at a time; one row of the batch may exceed it


class Rows(NamedTuple):
    """Some rows of the batch, with their operands in the form that kernels take."""

    p: CpuPass
    slots: dict[str, tuple[str, tuple[int, ...]]]  # slot and shape of each whole operand, contiguous
    B: int
    first: int
    size: int  # how many

    def take(self, name: str, dims: int) -> Any:
        """The operand, or an empty array with this many dimensions if it is None."""
        if name not in self.slots:
            return np.empty((0,) * dims, NUMPY[self.p.accumulator])
        slot, shape = self.slots[name]
        views = shape[0] // max(1, self.B)  # its rows per row of the batch
        return Array(self.p.rows(slot, self.first * views, (self.first + self.size) * views), (self.size * views, *shape[1:]))

    def pixels(self, name: str) -> Any:
        """``[B, H, W, C]`` as rows of channels."""
        found = self.take(name, 2)
        return Array(found.slot, (prod(found.shape[:-1]), found.shape[-1])) if name in self.slots else found

    def buffer(self, name: str, shape: Sequence[int]) -> Array:
        return Array(self.p.buffer(name, shape, self.p.accumulator), tuple(shape))


@by_threads
def forward_pass(
    images: Tensor, samples: Tensor, queries: Tensor, depths: Opt, values: Opt, mask: Opt, views: int, octaves: int,
    scale: float | None,
) -> Pass:  # fmt: skip
    given = dict(images=images, samples=samples, queries=queries, depths=depths, values=values, mask=mask)
    p = CpuPass(accumulator(images, samples, queries, depths, values), given)
    dtype, (B, h, Q, C) = (images if values is None else values).dtype, queries.shape
    rows = Rows(p, _slots(p, octaves), B, 0, B)
    shape = B, h, Q, C if values is None else values.shape[1]
    total = rows.buffer("total", shape)
    lse = rows.buffer("lse", (B, h, Q))
    seen: Any = np.empty((0, 0, 0), NUMPY[torch.int32])
    if mask is not None:
        seen = Array(p.derive("mask as integers", "mask", _integers, mask.shape, torch.int32), tuple(mask.shape))
    args = [*_places(rows, images, views), seen, rows.take("queries", 4), _powers(p, octaves), scale_of(scale, queries), total, lse]
    p.run(attend, B * Q, args, grain=_grain(images, samples, views), writes=["out"])
    out = p.rounded(total.slot, shape, dtype)
    return p.returns(out, lse.slot, total.slot if out != total.slot else rows.buffer("nothing", (B, h, Q, 0)).slot)


@by_threads
def backward_pass(
    grad: Tensor, images: Tensor, samples: Tensor, queries: Tensor, depths: Opt, values: Opt, mask: Opt, views: int, octaves: int,
    scale: float | None, out: Tensor, lse: Tensor, total: Tensor, *, needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    given = dict(grad=grad, images=images, samples=samples, queries=queries, depths=depths, values=values, mask=mask)
    given |= dict(views=None, octaves=None, scale=None, out=out, lse=lse, total=total)  # numbers have no slot
    p = CpuPass(accumulator(images, samples, queries, depths, values), given)
    wide, (B, h, Q, _), D = p.accumulator, queries.shape, samples.shape[2]
    slots = _slots(p, octaves)
    for name, slot, like in (("grad", "grad", grad), ("lse", "lse", lse), ("result", "out" if out.dtype == wide else "total", out)):
        slots[name] = p.dense(slot, wide), tuple(like.shape)
    wants: dict[str, Tensor] = {name: given[name] for name in compress(("images", "samples", "queries", "depths", "values"), needs)}  # type: ignore[misc]
    pixels = [name for name in wants if name in ("images", "values")]
    found = {
        name: gradient_buffer(p, name, x) if name in pixels else p.buffer(f"d_{name}", x.shape, wide, fill=0)
        for name, x in wants.items()
    }
    for name in wants:
        if name not in pixels and (name != "depths" or octaves):
            slots[f"d_{name}"] = found[name], tuple(wants[name].shape)
    weight = 2 * views * h * Q * D * wide.itemsize
    step = max(1, min(B, WEIGHTS // max(1, weight))) if pixels else max(1, B)
    for first in range(0, B, step):
        rows = Rows(p, slots, B, first, min(step, B - first))
        finished = list(wants) if first + step >= B else []
        shared, n = values is None, rows.size * views
        scores: Any = np.empty((0, 0, 0, 0), NUMPY[wide])
        weights = scores
        if pixels and shared:  # the weights come after the gradients of the scores, as additional heads
            scores = weights = rows.buffer("weights", (n, 2 * h, Q, D))
        elif pixels:
            scores, weights = rows.buffer("d_scores", (n, h, Q, D)), rows.buffer("weights", (n, h, Q, D))
        args = [
            *_places(rows, images, views), rows.take("queries", 4), _powers(p, octaves), scale_of(scale, queries),
            rows.take("grad", 4), rows.take("result", 4), rows.take("lse", 3),
            rows.take("d_samples", 4), rows.take("d_depths", 3), rows.take("d_queries", 4), scores, weights,
        ]  # fmt: skip
        p.run(slopes, rows.size * Q, args, grain=_grain(images, samples, views), writes=[x for x in finished if x not in pixels])
        places = rows.take("samples", 4), rows.take("depths", 3)
        for name in pixels:
            x, part = wants[name], p.rows(found[name], first * views, first * views + n)
            if name == "images":
                coef, row, powers = scores, _stacked(rows) if shared else rows.take("queries", 4), _powers(p, octaves)
            else:
                coef, row, powers = weights, rows.take("grad", 4), _powers(p, 0)
            writes = [name] if finished else []
            add_images_gradient(p, (n, *x.shape[1:]), [*places, coef, row], powers, x, part, writes, views, h)
    return p.returns(*(p.rounded(found[name], x.shape, x.dtype) for name, x in wants.items()))


def _slots(p: CpuPass, octaves: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Operands as kernels read them: contiguous, channels last, and with NaN coordinates for masked samples."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    wide = p.accumulator
    for name in ("images", "values"):
        x = p.given[name]
        if x is not None:
            B, C, H, W = x.shape
            found[name] = p.dense(name, wide, lambda t: t.permute(0, 2, 3, 1)), (B, H, W, C)
    for name in ("samples", "queries", *(["depths"] if octaves else [])):
        x = p.given[name]
        assert x is not None
        found[name] = p.dense(name, wide) if name != "samples" or p.given["mask"] is None else _unmasked(p, x), tuple(x.shape)
    return found


def _unmasked(p: CpuPass, samples: Tensor) -> str:
    wide = p.accumulator

    def seen(samples: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask[..., None], samples, torch.nan).to(wide).contiguous()

    (found,) = p.call("torch.where", seen, ["samples", "mask"], [("samples seen", samples.shape, wide)])
    return found


def _integers(mask: Tensor) -> Tensor:
    return mask.to(torch.int32).contiguous()


def _places(rows: Rows, images: Tensor, views: int) -> list[Any]:
    """The first arguments of both kernels."""
    H, W = images.shape[2:]
    return [H, W, views, rows.pixels("images"), rows.pixels("values"), rows.take("samples", 4), rows.take("depths", 3)]


def _powers(p: CpuPass, octaves: int) -> np.ndarray:
    return 2.0 ** np.arange(octaves, dtype=NUMPY[p.accumulator])


def _grain(images: Tensor, samples: Tensor, views: int) -> int:
    """Fewest queries for which starting a thread pays."""
    return max(1, 2**15 // max(1, images.shape[1] * samples.shape[2] * views))


def _stacked(rows: Rows) -> Array:
    """Queries, and the gradient of the result as additional heads."""
    queries, grad = rows.take("queries", 4), rows.take("grad", 4)
    B, h, Q, C = queries.shape
    shape = B, 2 * h, Q, C
    both = [queries.slot, grad.slot]
    (slot,) = rows.p.call("torch.cat", lambda x, y: torch.cat([x, y], 1), both, [("rows", shape, rows.p.accumulator)])
    return Array(slot, shape)
