"""CPU passes for derivatives of the form T, which ``gpu.py`` defines; the two kernels in ``cpu_kernels.py`` serve all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu import NUMPY
from ...op.cpu_steps import Array, CpuPass
from ...op.dtypes import accumulator
from ...op.layout import memory_format, outline
from ...op.simd import LANES
from .._scatter.cpu_sums import BLOCK, spill_bytes
from .cpu_kernels import per_channel, per_query

Opt = Tensor | None
Shapes = Mapping[str, tuple[int, ...]]
OPERANDS = ("samples", "depths", "coef", "rows")  # in the order in which kernels take them and their derivatives
PER_HEAD = ("coef", "rows")  # have a dimension of heads; the other derivatives are sums over heads


def derivatives(wants: Mapping[str, str], given: Mapping[str, Opt], octaves: int = 0, *, dtype: torch.dtype | None = None) -> Pass:
    """The pass that takes the operands `given` and returns the derivatives of T in those of `wants`: operand → name in a plan.

    A derivative has the dtype of its operand, or `dtype` if that operand is not given. Operands may be meta tensors.
    """
    images, samples, depths, coef, rows = (given.get(name) for name in ("images", *OPERANDS))
    assert images is not None
    assert samples is not None
    wide = accumulator(images, samples, depths, coef, rows)
    p, heads, shapes = CpuPass(wide, given), _heads(coef, rows), _shapes(images, samples, octaves, coef, rows)
    if heads <= BLOCK:
        found = _add_block(p, wants, list(wants), shapes, octaves)
    else:
        found = _add_blocks(p, wants, heads, shapes, octaves)
    for want in wants:
        operand = given.get(want)
        rounded = dtype if operand is None else operand.dtype
        assert rounded is not None
        found[want] = p.rounded(found[want], shapes[want], rounded)
    return p.returns(*(found[want] for want in wants))


def _add_blocks(p: CpuPass, wants: Mapping[str, str], heads: int, shapes: Shapes, octaves: int) -> dict[str, str]:
    """Sums over more than BLOCK heads: kernels sum one block of heads, and the blocks are summed here in float64."""
    found = {x: p.buffer(f"d_{x}", shapes[x], p.accumulator) for x in wants if x in PER_HEAD}
    for first in range(0, heads, BLOCK):
        last = min(first + BLOCK, heads)
        block_shapes = {x: (n[0], last - first, *n[2:]) if x in PER_HEAD else n for x, n in shapes.items()}
        finished = list(wants) if last == heads else []
        for x, grad in _add_block(p, wants, finished, block_shapes, octaves, slice(first, last)).items():
            if x in PER_HEAD:
                p.call("torch.copy_", lambda whole, part, a=first, b=last: whole[:, a:b].copy_(part), [found[x], grad])
            elif first:
                p.call("torch.add_", lambda whole, part: whole.add_(part), [found[x], grad])
            else:
                (found[x],) = p.call("torch.to", Tensor.double, [grad], [(f"d_{x} of all heads", shapes[x], torch.float64)])
    return found


def _add_block(
    p: CpuPass, wants: Mapping[str, str], finished: Sequence[str], shapes: Shapes, octaves: int, heads: slice | None = None
) -> dict[str, str]:
    """Steps for the derivatives of a block of heads, or of all; in the plan they write only the results in `finished`."""
    images, wide, found = p.given["images"], p.accumulator, {}
    assert images is not None
    B, C, H, W = images.shape
    none = {x: np.empty((0,) * len(shapes[x]), NUMPY[wide]) for x in OPERANDS}
    read = [x for x in OPERANDS if p.given.get(x) is not None and (x != "depths" or octaves)]
    slots = {x: p.dense(x, wide, (lambda t: t[:, heads]) if heads and x in PER_HEAD else None) for x in read}
    operands = [Array(slots[x], shapes[x]) if x in slots else none[x] for x in OPERANDS]
    powers = 2.0 ** np.arange(octaves, dtype=NUMPY[wide])
    if "images" in wants:
        found["images"] = gradient_buffer(p, "images", images)
        writes = [wants["images"]] if "images" in finished else []
        add_images_gradient(p, images.shape, operands, powers, images, found["images"], writes)
    if per_sample := [x for x in wants if x != "images"]:
        Q, D = shapes["samples"][1:3]
        for x in per_sample:  # rows are always written, the others only where a sample sees the image
            found[x] = p.buffer(f"d_{x}", shapes[x], wide, fill=None if x == "rows" else 0)
        results = [Array(found[x], shapes[x]) if x in per_sample and (x != "depths" or octaves) else none[x] for x in OPERANDS]
        pixels = Array(p.dense("images", wide, lambda t: t.permute(0, 2, 3, 1)), (B * H * W, C))
        grain = max(1, 2**15 // max(1, C * D))  # queries that are worth a thread
        writes = [wants[x] for x in per_sample if x in finished]
        p.run(per_query, B * Q, [H, W, pixels, *operands, powers, *results], grain=grain, writes=writes)
    return found


def gradient_buffer(p: CpuPass, name: str, images: Tensor) -> str:
    """A buffer in which the gradient of these images is summed, in their layout."""
    return p.buffer(f"d_{name}", outline(images.shape, memory_format=memory_format(images, True)), p.accumulator)


def add_images_gradient(
    p: CpuPass, shape: Sequence[int], operands: Sequence[Any], powers: Any, images: Tensor, out: str, writes: Sequence[str],
    views: int = 1, encoded: int | None = None,
) -> None:  # fmt: skip
    """A step that writes ∂T/∂images of this shape, which are all of `images` or some, into `out`.

    `views` consecutive images share their rows; the encoding applies to the first `encoded` heads, or to all.
    """
    B, C, H, W = shape
    strides = (1, C) if memory_format(images, True) == torch.channels_last else (H * W, 1)
    blocks, width = _blocks(B, C, p.threads)
    heads = operands[2].shape[1] if encoded is None else encoded
    args = width, H, W, C, *operands, powers, views, heads, Array(out, (B * C * H * W,)), *strides
    scratch = H * W * (width + LANES) * p.accumulator.itemsize + spill_bytes(H * W)  # the image that each thread adds to
    p.run(per_channel, B * blocks, args, slices_per_thread=1, writes=writes, scratch=scratch)


def _shapes(images: Tensor, samples: Tensor, octaves: int, coef: Opt, rows: Opt) -> dict[str, tuple[int, ...]]:
    B, C, Q, D = *images.shape[:2], *samples.shape[1:3]
    h = _heads(coef, rows)
    return dict(
        images=tuple(images.shape), samples=(B, Q, D, 2), depths=(B, Q, D), coef=(B, h, Q, D), rows=(B, h, Q, C - 2 * octaves)
    )  # fmt: skip


def _heads(coef: Opt, rows: Opt) -> int:
    return next(x.shape[1] for x in (coef, rows) if x is not None)


def _blocks(B: int, C: int, threads: int) -> tuple[int, int]:
    """→ number and width of the blocks of channels, chosen so that all threads are busy; results do not depend on them."""
    blocks = min(-(-threads // max(1, B)), -(-C // LANES))
    width = -(-C // (max(1, blocks) * LANES)) * LANES
    return -(-C // max(1, width)), width
