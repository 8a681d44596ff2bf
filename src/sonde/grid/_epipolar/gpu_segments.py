"""∂T/∂images with a fixed order of additions, by sorted segments (see ``_scatter.segments``): the sums of one piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...jit.launch import Launch, accumulator, cdiv
from ...jit.steps import Pass
from ...op.plan import Determinism
from .._device.long_sums import zeros
from .._device.taps import fetch, locate, octave, wave
from .._scatter.segments import (
    BLOCK,
    BLOCK_C,
    add_pixel_sums,
    add_segments,
    bytes_at_most,
    first_samples,
    next_samples,
    pieces,
    put_sums,
)
from .gpu_kernels import Problem

TILES = 5  # tiles of channels whose accumulators one program keeps in registers
BLOCK_N = 4  # samples of a piece in flight
WORKSPACE = 1 << 26  # bytes that the workspace may always take; more only if the images are larger than that
OPERANDS = ("samples", "coef", "rows", "depths")


def add_images_gradient(
    p: Pass, n: Problem, slots: Mapping[str, str | None], out: str, writes: Sequence[str], *, views: int = 1,
    more: Mapping[str, str | None] | None = None,
) -> None:  # fmt: skip
    """Steps that write every element of ∂T/∂images into `out` ``[B, C, H, W]``, a chunk of the batch at a time.

    `views` consecutive images share their rows. `more` has the coef and rows of a second form, with as many heads and without an
    encoding, whose gradient is added.
    """
    chunk = -(-batch_chunk(n) // views) * views
    given = {name: slots[name] for name in OPERANDS if slots.get(name)} | {f"{name}_2": slot for name, slot in (more or {}).items()}
    for b in range(0, n.B, chunk):
        parts = {}
        for name, slot in dict(given, out=out).items():
            shared = views if name.startswith("rows") else 1
            assert slot is not None
            parts[name] = p.rows(slot, b // shared, (b + chunk) // shared)
        _add_chunk(p, n._replace(B=min(chunk, n.B - b)), parts, writes if b + chunk >= n.B else (), views)


def batch_chunk(n: Problem) -> int:
    """Images per chunk, so that the workspace stays within its limit."""
    limit = max(WORKSPACE, n.B * n.C * n.H * n.W * n.wide.itemsize)
    N, cells = n.B * n.Q * n.D, _cells(n)
    return max(1, min(n.B, limit * n.B // max(1, bytes_at_most(N, cells, pieces(N, cells) * 4 * _tile(n) * n.wide.itemsize))))


def _cells(n: Problem) -> int:
    return n.B * (n.H + 1) * (n.W + 1)


def _tile(n: Problem) -> int:
    return min(TILES, cdiv(n.C, BLOCK_C)) * BLOCK_C


def _add_chunk(p: Pass, n: Problem, slots: Mapping[str, str], writes: Sequence[str], views: int) -> None:
    B, H, W, Q, D, C = n[:6]
    N, last = B * Q * D, _cells(n)
    if not N or not B * C * H * W:
        p.call("torch.zero_", Tensor.zero_, [slots["out"]], writes=writes)
        return
    acc, same = accumulator(n.wide), Determinism.RUN_TO_RUN
    keys = p.buffer("keys", [N], torch.int32)
    p.start(
        _sample_keys,
        [slots["samples"], keys],
        Launch((cdiv(N, BLOCK), 1, 1), (H, W, Q * D, N, last), (acc, BLOCK), 4),
        promise=same,
    )
    segments = add_segments(p, keys, N, last)
    P, tile = pieces(N, last), _tile(n)
    sums = p.buffer("sums", [P, 4, tile], n.wide)
    shape, strides = (B, H, W, C), (H * W * n.d_stride, W * n.d_stride, n.d_stride, 1)
    pixels = p.view("pixels", slots["out"], lambda t: t.as_strided(shape, strides))
    taken = [slots.get(name) for name in (*OPERANDS, "coef_2", "rows_2")]
    operands = [*taken, segments.order, segments.first, segments.begin, sums]
    for c0 in range(0, C, tile):
        constants = (C, c0, n.heads, n.octaves, views, acc, BLOCK_N, BLOCK_C, tile // BLOCK_C)
        p.start(_sample_sums, operands, Launch((P, 1, 1), (H, W, Q, D, last), constants, 1), promise=same)
        outline = torch.empty_strided(shape, strides, device="meta")
        add_pixel_sums(p, sums, tile, n.wide, segments, pixels, outline, 2, c0, writes if c0 + tile >= C else ())


@triton.jit(do_not_specialize=["H", "W", "QD", "N", "LAST"])
def _sample_keys(
    samples,  # [N, 2]
    keys,  # [N]
    H,
    W,
    QD,
    N,
    LAST,  # the key of samples that see no pixel
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y, x = fetch(samples, i, i < N, ACC)
    live, y0, x0, _, _ = locate(y, x, H, W, tl.int32)
    key = ((i // QD).to(tl.int32) * (H + 1) + y0 + 1) * (W + 1) + x0 + 1
    tl.store(keys + i, tl.where(live, key, LAST), mask=i < N)


@triton.jit(do_not_specialize=["H", "W", "Q", "D", "LAST"])
def _sample_sums(
    samples,  # [B, Q, D, 2]
    coef,  # [B, h, Q, D]
    rows,  # [B / VIEWS, h, Q, C − 2·OCTAVES]
    depths,  # [B, Q, D]
    coef_2,  # of a second form, without an encoding; or None
    rows_2,
    order,  # [N], sample indices
    first,  # [P + 1]
    begin,  # [cells + 1]
    sums,  # [P, 4, TILES·BLOCK_C]
    H,
    W,
    Q,
    D,
    LAST,
    C: tl.constexpr,
    C0: tl.constexpr,  # the first channel
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    VIEWS: tl.constexpr,  # consecutive images that share their rows
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
):
    """Sum one piece for the cell's four corners and TILES tiles of channels, BLOCK_N samples at a time, in sorted order."""
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    p = tl.program_id(0).to(tl.int64)
    if p < tl.load(begin + LAST):  # later pieces have samples that see no pixel
        start, stop = tl.load(first + p), tl.load(first + p + 1)
        totals = zeros(tl.zeros([BLOCK_N, BLOCK_C], ACC), 4 * TILES)  # four corners of each tile
        i, next_in, next_sample = first_samples(order, start, stop, BLOCK_N)
        for _ in range(start, stop, BLOCK_N):
            sample, in_i = next_sample.to(tl.int64), next_in
            i, next_in, next_sample = next_samples(order, i, stop, BLOCK_N)
            y, x = fetch(samples, sample, in_i, ACC)
            _live, _y0, _x0, fy, fx = locate(y, x, H, W, tl.int32)
            query, d = sample // D, sample % D
            hq = query // Q * (HEADS * Q) + query % Q
            row = query // (Q * VIEWS) * (HEADS * Q) + query % Q
            w = ()
            w_all = tl.zeros([BLOCK_N, 1], ACC)
            for h in tl.static_range(HEADS):
                w = w + (tl.load(coef + (hq + h * Q) * D + d, mask=in_i, other=0).to(ACC),)
                w_all += w[h]
            if coef_2 is not None:
                w_2 = ()
                for h in tl.static_range(HEADS):
                    w_2 = w_2 + (tl.load(coef_2 + (hq + h * Q) * D + d, mask=in_i, other=0).to(ACC),)
            if OCTAVES > 0:
                depth = tl.load(depths + sample, mask=in_i, other=0).to(ACC)
            updated = ()
            for t in tl.static_range(TILES):
                c = C0 + t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                a = tl.zeros([BLOCK_N, BLOCK_C], ACC)
                for h in tl.static_range(HEADS):
                    a += w[h] * tl.load(rows + (row + h * Q) * ROW_C + c, mask=in_i & (c < ROW_C), other=0).to(ACC)
                if coef_2 is not None:
                    for h in tl.static_range(HEADS):
                        a += w_2[h] * tl.load(rows_2 + (row + h * Q) * ROW_C + c, mask=in_i & (c < ROW_C), other=0).to(ACC)
                if OCTAVES > 0 and C0 + (t + 1) * BLOCK_C > ROW_C:
                    turns, _power = octave(depth, tl.maximum(c - ROW_C, 0) // 2)
                    a = tl.where(c < ROW_C, a, w_all * wave(turns, (c - ROW_C) % 2 == 1))
                bottom = fy * a
                top = a - bottom
                s = totals[4 * t : 4 * t + 4]
                updated = updated + (s[0] + (top - fx * top), s[1] + fx * top, s[2] + (bottom - fx * bottom), s[3] + fx * bottom)
            totals = updated
        put_sums(sums, p, totals, TILES, BLOCK_C)
