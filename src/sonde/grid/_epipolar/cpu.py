"""The form behind the epipolar operators, and its derivatives.

T(images, samples, depths, coef, rows) = Σ_{bhqd} coef_{bhqd} · Σ_c tap_c(b,q,d) · row_c(b,h,q,d), where row_c is rows_{bhqc} for
the first C' channels and the encoding of the depth, one for all heads, for the last 2·octaves.

``sample_sum`` is ∂T/∂rows, ``sample_dot`` is ∂T/∂coef, and their gradients are the other derivatives: two kernels serve
both operators in both directions. They are in ``cpu_kernels``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...op.cpu import NUMPY, array, run
from ...op.dtypes import accumulator
from ...op.lanes import LANES
from ...op.layout import memory_format
from ...op.memory import dense, empty, is_dense, zeros
from ...op.plan import Determinism, Kernel
from .._scatter.cpu_sums import BLOCK
from .cpu_kernels import per_channel, per_query

Opt = Tensor | None
PER_HEAD = ("coef", "rows")  # the other derivatives are sums over heads


def derivatives(
    of: Sequence[str], images: Tensor, samples: Tensor, depths: Opt = None, octaves: int = 0, *, coef: Opt = None, rows: Opt = None
) -> list[Tensor]:
    """∂T/∂x for each x in `of`: in the dtype of x, or in the accumulator's where x is not given."""
    wide = accumulator(images, samples, depths, coef, rows)
    given = dict(images=images, samples=samples, depths=depths, coef=coef, rows=rows)
    heads = _heads(coef, rows)
    if heads <= BLOCK:
        found = _derivatives(of, wide, images, samples, depths, octaves, coef, rows)
    else:  # kernels add up the heads of a block one by one, and blocks are added up here
        found = {}
        for first in range(0, heads, BLOCK):
            some = [None if x is None else x[:, first : first + BLOCK] for x in (coef, rows)]
            for x, grad in _derivatives(of, wide, images, samples, depths, octaves, *some).items():
                shape = (grad.shape[0], heads, *grad.shape[2:])
                if x in PER_HEAD:
                    found.setdefault(x, empty(shape, wide))[:, first : first + BLOCK] = grad
                else:
                    found[x] = found[x].add_(grad) if x in found else grad.double()
    dtypes = {x: wide if value is None else value.dtype for x, value in given.items()}
    return [found[x].to(dtypes[x]) for x in of]


def _derivatives(
    of: Sequence[str], wide: torch.dtype, images: Tensor, samples: Tensor, depths: Opt, octaves: int, coef: Opt, rows: Opt
) -> dict[str, Tensor]:
    B, C, H, W = images.shape
    shapes = _shapes(images, samples, octaves, coef, rows)
    values = dict(samples=samples, depths=depths if octaves else None, coef=coef, rows=rows)
    none = {x: np.empty((0,) * len(shape), NUMPY[wide]) for x, shape in shapes.items()}
    given = [none[x] if value is None else array(dense(value, wide)) for x, value in values.items()]
    powers = 2.0 ** np.arange(octaves, dtype=NUMPY[wide])
    found: dict[str, Tensor] = {}
    if "images" in of:
        layout = memory_format(images, True)
        found["images"] = grad = empty(images.shape, wide, layout)
        strides = (1, C) if layout == torch.channels_last else (H * W, 1)
        flat = grad.permute(0, 2, 3, 1) if layout == torch.channels_last else grad
        blocks, width = _blocks(B, C)
        run(per_channel, B * blocks, width, H, W, C, *given, powers, array(flat.reshape(-1)), *strides, slices_per_thread=1)
    if asked := [x for x in of if x != "images"]:
        # rows are written whole, the others only where a sample sees the image
        grads = {x: (empty if x == "rows" else zeros)(shapes[x], wide) for x in asked}
        kept = [x for x in asked if x != "depths" or octaves]
        wanted = [array(grads[x]) if x in kept else none[x] for x in shapes]
        pixels = array(dense(images.permute(0, 2, 3, 1), wide).reshape(B * H * W, C))
        enough = max(1, 2**15 // max(1, C * samples.shape[2]))  # queries that are worth a thread
        run(per_query, B * samples.shape[1], H, W, pixels, *given, powers, *wanted, grain=enough)
        found |= grads
    return found


def kernels(
    of: Mapping[str, tuple[str, torch.dtype]],
    phase: Literal["forward", "backward"],
    images: Tensor,
    samples: Tensor,
    depths: Opt = None,
    octaves: int = 0,
    *,
    coef: Opt = None,
    rows: Opt = None,
) -> list[Kernel]:
    """What `derivatives` launches and allocates; `of` gives each derivative the operator's name for it and its final dtype."""
    wide = accumulator(images, samples, depths, coef, rows)
    B, C, H, W = images.shape
    sizes = {x: math.prod(shape) for x, shape in _shapes(images, samples, octaves, coef, rows).items()} | {"images": images.numel()}
    operands = [samples, depths if octaves else None, coef, rows]
    copies = sum(x.numel() for x in operands if x is not None and not is_dense(x, wide))

    def kernel(function: Callable, xs: list[str], elements: int) -> Kernel:
        elements += copies + sum(sizes[x] for x in xs if of[x][1] != wide)
        writes = tuple(of[x][0] for x in xs)
        return Kernel(function.__name__, writes, wide, Determinism.BATCH_INVARIANT, elements * wide.itemsize, phase)

    found = []
    if "images" in of:
        blocks, width = _blocks(B, C)
        found.append(kernel(per_channel, ["images"], min(torch.get_num_threads(), B * blocks) * H * W * (width + LANES)))
    if asked := [x for x in of if x != "images"]:
        copied = 0 if is_dense(images.permute(0, 2, 3, 1), wide) else images.numel()
        before = images.numel() if "images" in of and of["images"][1] != wide else 0  # their gradient is rounded at the end
        found.append(kernel(per_query, asked, copied + before))
    return found


def _shapes(images: Tensor, samples: Tensor, octaves: int, coef: Opt, rows: Opt) -> dict[str, tuple[int, ...]]:
    B, C, Q, D = *images.shape[:2], *samples.shape[1:3]
    h = _heads(coef, rows)
    return dict(samples=(B, Q, D, 2), depths=(B, Q, D), coef=(B, h, Q, D), rows=(B, h, Q, C - 2 * octaves))


def _heads(coef: Opt, rows: Opt) -> int:
    return next(x.shape[1] for x in (coef, rows) if x is not None)


def _blocks(B: int, C: int) -> tuple[int, int]:
    """Into how many blocks channels are cut to occupy all threads, and how wide they are; no bit depends on it."""
    blocks = min(-(-torch.get_num_threads() // max(1, B)), -(-C // LANES))
    width = -(-C // (max(1, blocks) * LANES)) * LANES
    return -(-C // max(1, width)), width
