"""One form, of which every pass of ``sample_sum`` and ``sample_dot`` is a derivative, forward passes included:

    T(images, samples, coef, rows) = Σ_{b,h,q,d} coef[b,h,q,d] · Σ_c tap(images[b,c], samples[b,q,d]) · rows[b,h,q,c]

``sample_sum(weights)`` is ∂T/∂rows with coef = weights, and its gradient is that of T with rows = ∂L/∂out;
``sample_dot(queries)`` is ∂T/∂coef with rows = queries, and its gradient is that of T with coef = ∂L/∂out.
The last 2·octaves channels of the images meet an encoding of the depth in place of rows, the same for every head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..op.gpu import accumulator, cdiv, launch, power_of_2
from ..op.library import memory_format
from ..op.plan import Determinism, Kernel
from ._gpu_layout import as_images, channels_last, empty_pixels, pixel_stride
from ._gpu_segments import images_gradient, workspace
from ._gpu_taps import TURN, corners, edges, fetch, interpolate, locate, octave, scatter, together, wave
from ._reference import accumulator as accumulator_of

BLOCK_C = 32  # channels of a tile: eight threads with one access each
FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do


class Config(NamedTuple):
    block_q: int  # queries of a program, next to each other
    block_d: int  # samples of a query that are in flight together
    tiles: int  # tiles of channels that are in flight together
    num_warps: int


def default_config(kernel: str, D: int, C: int, block_c: int, gradients: bool) -> Config:
    """Best on an H200 at pixelSplat's sizes and good elsewhere: a warp holds four samples of one query, whatever the sizes.

    The tiles of a value are in flight together; those of gradients, which need more registers, one after the other.
    """
    tiles = cdiv(max(1, C), block_c)
    block_d = min(4, power_of_2(D))
    warps = 2 if kernel == "rows" else 1
    together = 1 if kernel == "form" and gradients else tiles if tiles <= 5 else 4
    return Config(block_q=warps * (4 // block_d), block_d=block_d, tiles=together, num_warps=warps)


class Operands(NamedTuple):
    """What T is made of; images channels-last, everything contiguous."""

    images: Tensor  # [B, H, W, C]
    samples: Tensor  # [B, Q, D, 2]
    coef: Tensor | None  # [B, h, Q, D]
    rows: Tensor | None  # [B, h, Q, C − 2·octaves]
    depths: Tensor | None  # [B, Q, D]
    octaves: int
    heads: int
    wide: torch.dtype


def operands(
    images: Tensor, samples: Tensor, wide: torch.dtype, coef: Tensor | None = None, rows: Tensor | None = None,
    depths: Tensor | None = None, octaves: int = 0,
) -> Operands:  # fmt: skip
    """Lay the operands out as the kernels read them, copying what is not laid out so."""
    heads = (rows if coef is None else coef).shape[1]  # type: ignore[union-attr]
    coef, rows, depths = (t if t is None else t.contiguous() for t in (coef, rows, depths))
    return Operands(channels_last(images), samples.contiguous(), coef, rows, depths, octaves, heads, wide)


def steps(wants: Sequence[str], deterministic: bool) -> list[tuple[str, list[str]]]:
    """Which kernels run, and which derivatives each one writes: asked by the launch and by the plan."""
    alone = {"rows": "rows"}
    if deterministic:
        alone["images"] = "segments"
    rest = [want for want in wants if want not in alone]
    found = [(alone[want], [want]) for want in wants if want in alone]
    return [("form", rest), *found] if rest else found


def derivatives(T: Operands, results: dict[str, Tensor], deterministic: bool = False) -> None:
    """Write the derivatives of T that `results` names; what is added atomically must be zero before."""
    for kernel, wants in steps(list(results), deterministic):
        if kernel == "segments":
            T = T._replace(images=T.samples.new_empty(()).expand(T.images.shape))  # only its shape matters now: make room
            images_gradient(T, results["images"])
        else:
            _launch(kernel, T, {want: results[want] for want in wants})


def gradients(inputs: Mapping[str, Tensor | None], needs: Sequence[bool], deterministic: bool, **operand) -> list[Tensor]:
    """The gradients that are needed, of `inputs` in order, each laid out and rounded as its input; T has these operands."""
    needed = {name: x for (name, x), need in zip(inputs.items(), needs) if need and x is not None}
    results = {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in needed.items() if name != "images"}
    if "images" in needed:
        images = needed["images"]
        B, C, H, W = images.shape
        layout = memory_format(images, True)
        pixels = empty_pixels(B, H, W, C, operand["wide"], images.device, padded=layout != torch.channels_last)
        results["images"] = pixels if deterministic else pixels.zero_()  # segments write every element, atomics add
    wanted = dict(results)
    if "depths" in wanted and not operand.get("octaves"):
        wanted.pop("depths").zero_()  # nothing reads them
    derivatives(operands(**operand), wanted, deterministic)
    if "images" in needed:
        results["images"] = as_images(pixels, images, layout)
    return [results[name] for name in needed]


def plan(
    phase: Literal["forward", "backward"], writes: dict[str, str], deterministic: bool, images: Tensor, *others: Tensor | None
) -> list[Kernel]:
    """What :func:`derivatives` launches for these operands to write what `writes` names, under the names it gives them."""
    wide = accumulator_of(images, *others)
    samples = others[0]
    assert samples is not None
    pixels = images.permute(0, 2, 3, 1)
    B, H, W, C = pixels.shape
    copies = sum(x.numel() * x.element_size() for x in others if x is not None and not x.is_contiguous())
    copy = 0 if pixels.is_contiguous() else B * H * W * pixel_stride(C, images.element_size()) * images.element_size()
    gradient, padded = 0, memory_format(images, True) != torch.channels_last
    if "images" in writes and (padded or images.dtype != wide):
        gradient = B * H * W * (pixel_stride(C, wide.itemsize) if padded else C) * wide.itemsize
    found = []
    for kernel, wants in steps(list(writes), deterministic):
        promise, room = Determinism.BATCH_INVARIANT, copies + copy
        if kernel == "segments":  # which comes last, and needs the images no more
            promise, room = Determinism.RUN_TO_RUN, copies + workspace(pixels, samples, wide)
        elif "images" in wants:
            promise = Determinism.NONE
        if gradient:  # it becomes the result when all else is gone
            room = max(gradient, room + gradient - images.numel() * images.element_size())
        found.append(Kernel(kernel, tuple(writes[want] for want in wants), wide, promise, room, phase))
    return found


def _launch(kernel: str, T: Operands, results: dict[str, Tensor]) -> None:
    if kernel == "rows":
        function, tensors, d_stride = _rows, (T.images, T.samples, T.coef, results["rows"]), 0
    else:
        found = [results.get(want) for want in ("images", "samples", "coef", "depths")]
        function, tensors = _form, (T.images, T.samples, T.coef, T.rows, T.depths, *found)
        d_stride = 0 if found[0] is None else found[0].stride(2)
    sizes = (*T.images.shape, *T.samples.shape[1:3], T.images.stride(2), d_stride, T.heads, T.octaves)
    launch(function, tensors, *_recipe(kernel, *sizes, T.wide, T.coef is not None, FORCE_INT64))


@lru_cache(4096)
def _recipe(
    kernel: str, B: int, H: int, W: int, C: int, Q: int, D: int, stride: int, d_stride: int, heads: int, octaves: int,
    wide: torch.dtype, gradients: bool, force_int64: bool,
) -> tuple[tuple[int, int, int], tuple, tuple, int]:  # fmt: skip
    """Grid, sizes, constants and warps of a launch."""
    block_c = min(BLOCK_C, power_of_2(C))
    config = default_config(kernel, D, C - 2 * octaves, block_c, gradients)
    offset = tl.int64 if force_int64 or H * W * max(stride, d_stride) >= 2**31 else tl.int32
    constants = (C, stride, heads, octaves, accumulator(wide), offset, config.block_q, config.block_d, block_c, config.tiles)
    tiles = 1
    if kernel == "rows":
        tiles = cdiv(max(1, C - 2 * octaves), config.tiles * block_c)
    else:
        constants += (d_stride,)
    return (B * cdiv(Q, config.block_q), tiles, 1), (H, W, Q, D), constants, config.num_warps


@triton.jit(do_not_specialize=["H", "W", "Q", "D"])
def _form(
    images,  # [B, H, W, C]
    samples,  # [B, Q, D, 2]
    coef,  # [B, h, Q, D]
    rows,  # [B, h, Q, C − 2·OCTAVES]
    depths,  # [B, Q, D]
    d_images,  # derivatives of T, shaped as their operands; None where nobody asked
    d_samples,
    d_coef,
    d_depths,
    H,
    W,
    Q,
    D,
    C: tl.constexpr,
    STRIDE: tl.constexpr,  # from pixel to pixel
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    UNROLL: tl.constexpr,  # tiles of channels that are in flight together
    D_STRIDE: tl.constexpr,
):
    """All derivatives but that by the rows: block after block of samples, for each all channels."""
    # tensors are [samples, channels]; what there is one of per head is a tuple
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_D
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.arange(0, ROWS)[:, None]
    q = tl.program_id(0) % blocks * BLOCK_Q + i // BLOCK_D
    in_q = q < Q
    hq = b * HEADS * Q + q  # which row of the first head
    image = images + b * H * W * STRIDE
    if d_images is not None:
        d_image = d_images + b * H * W * D_STRIDE

    AHEAD: tl.constexpr = d_images is None  # coordinates are fetched a turn ahead, unless additions need the registers
    if AHEAD:
        y, x = fetch(samples, (b * Q + q) * D + i % BLOCK_D, in_q & (i % BLOCK_D < D), ACC)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + i % BLOCK_D
        in_qd = in_q & (d < D)
        qd = (b * Q + q) * D + d  # which sample
        if not AHEAD:
            y, x = fetch(samples, qd, in_qd, ACC)
        live, y0, x0, fy, fx = locate(y, x, H, W, OFFSET)
        if AHEAD:
            y, x = fetch(samples, qd + BLOCK_D, in_q & (d + BLOCK_D < D), ACC)
        k00, k01, k10, k11 = edges(live, y0, x0, H, W)
        pixel = y0 * W + x0
        if d_images is not None:
            one_cell, cell = together(live, pixel)
        w = ()
        g_coef = ()  # sums over channels stay apart by channel of the tile until the end
        for h in tl.static_range(HEADS):
            if coef is not None:
                w = w + (tl.load(coef + (hq + h * Q) * D + d, mask=live, other=0).to(ACC),)
            if d_coef is not None:
                g_coef = g_coef + (tl.zeros([ROWS, BLOCK_C], ACC),)
        g_y = tl.zeros([ROWS, BLOCK_C], ACC)
        g_x = tl.zeros([ROWS, BLOCK_C], ACC)

        for c0 in tl.range(0, ROW_C, BLOCK_C, loop_unroll_factor=UNROLL):
            c = c0 + tl.arange(0, BLOCK_C)[None, :]
            in_c = c < ROW_C
            if d_samples is not None or d_coef is not None:
                v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, c, in_c, W, STRIDE, ACC)
                s, dy, dx = interpolate(v00, v01, v10, v11, fy, fx)
            a = tl.zeros([ROWS, BLOCK_C], ACC)
            sums = ()
            for h in tl.static_range(HEADS):
                r = tl.load(rows + (hq + h * Q) * ROW_C + c, mask=in_q & in_c, other=0).to(ACC)
                if d_coef is not None:
                    sums = sums + (g_coef[h] + r * s,)
                if d_samples is not None or d_images is not None:
                    a += w[h] * r
            if d_coef is not None:
                g_coef = sums
            if d_samples is not None:
                g_y += a * dy
                g_x += a * dx
            if d_images is not None:
                scatter(d_image, a, fy, fx, pixel, k00, k01, k10, k11, one_cell, cell, c, in_c, W, D_STRIDE)

        if OCTAVES > 0:
            depth = tl.load(depths + qd, mask=live, other=0).to(ACC)
            g_depth = tl.zeros([ROWS, BLOCK_C], ACC)
            w_all = tl.zeros([ROWS, 1], ACC)
            if coef is not None:
                for h in tl.static_range(HEADS):
                    w_all += w[h]
            for c0 in range(0, 2 * OCTAVES, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)[None, :]
                in_c = c < 2 * OCTAVES
                cosine = c % 2 == 1
                turns, power = octave(depth, c // 2)
                r = wave(turns, cosine)
                if d_samples is not None or d_coef is not None or d_depths is not None:
                    v00, v01, v10, v11 = corners(image + ROW_C, pixel, k00, k01, k10, k11, c, in_c, W, STRIDE, ACC)
                    s, dy, dx = interpolate(v00, v01, v10, v11, fy, fx)
                if d_coef is not None:
                    sums = ()
                    for h in tl.static_range(HEADS):
                        sums = sums + (g_coef[h] + r * s,)
                    g_coef = sums
                if d_depths is not None:
                    slope = wave(turns, c % 2 == 0) * tl.where(cosine, -power, power)
                    g_depth += w_all * s * slope
                a = w_all * r
                if d_samples is not None:
                    g_y += a * dy
                    g_x += a * dx
                if d_images is not None:
                    scatter(d_image + ROW_C, a, fy, fx, pixel, k00, k01, k10, k11, one_cell, cell, c, in_c, W, D_STRIDE)
            if d_depths is not None:
                total = over_channels(g_depth, live) * TURN
                tl.store(d_depths + qd, total.to(d_depths.dtype.element_ty), mask=in_qd)

        if d_coef is not None:
            for h in tl.static_range(HEADS):
                total = over_channels(g_coef[h], live)
                tl.store(d_coef + (hq + h * Q) * D + d, total.to(d_coef.dtype.element_ty), mask=in_qd)
        if d_samples is not None:
            total = over_channels(g_x, live) * (0.5 * W)
            tl.store(d_samples + 2 * qd, total.to(d_samples.dtype.element_ty), mask=in_qd)
            total = over_channels(g_y, live) * (0.5 * H)
            tl.store(d_samples + 2 * qd + 1, total.to(d_samples.dtype.element_ty), mask=in_qd)


@triton.jit
def over_channels(x, live):
    """The sum of each sample's row; exactly zero for one that sees nothing, whatever it was multiplied with."""
    return tl.where(live, tl.sum(x, 1, keep_dims=True), 0)


@triton.jit(do_not_specialize=["H", "W", "Q", "D"])
def _rows(
    images,  # [B, H, W, C]
    samples,  # [B, Q, D, 2]
    coef,  # [B, h, Q, D]
    d_rows,  # [B, h, Q, C − 2·OCTAVES]
    H,
    W,
    Q,
    D,
    C: tl.constexpr,
    STRIDE: tl.constexpr,  # from pixel to pixel
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
):
    """∂T/∂rows: some tiles of channels, all samples in turn; a thread's sums stay in it until the end."""
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_D
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.arange(0, ROWS)[:, None]
    q = tl.program_id(0) % blocks * BLOCK_Q + i // BLOCK_D
    c = tl.program_id(1) * (TILES * BLOCK_C) + tl.arange(0, BLOCK_C)[None, :]
    image = images + b * H * W * STRIDE
    totals = ()
    for _ in tl.static_range(TILES * HEADS):
        totals = totals + (tl.zeros([ROWS, BLOCK_C], ACC),)
    y, x = fetch(samples, (b * Q + q) * D + i % BLOCK_D, (q < Q) & (i % BLOCK_D < D), ACC)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + i % BLOCK_D
        live, y0, x0, fy, fx = locate(y, x, H, W, OFFSET)
        y, x = fetch(samples, (b * Q + q) * D + d + BLOCK_D, (q < Q) & (d + BLOCK_D < D), ACC)  # hides the latency of the next turn
        k00, k01, k10, k11 = edges(live, y0, x0, H, W)
        w = ()
        for h in tl.static_range(HEADS):
            w = w + (tl.load(coef + (b * HEADS * Q + h * Q + q) * D + d, mask=live, other=0).to(ACC),)
        sums = ()
        for t in tl.static_range(TILES):
            at = c + t * BLOCK_C
            v00, v01, v10, v11 = corners(image, y0 * W + x0, k00, k01, k10, k11, at, at < ROW_C, W, STRIDE, ACC)
            s, _dy, _dx = interpolate(v00, v01, v10, v11, fy, fx)
            for h in tl.static_range(HEADS):
                sums = sums + (totals[t * HEADS + h] + w[h] * s,)
        totals = sums
    q = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    for t in tl.static_range(TILES):
        at = c + t * BLOCK_C
        for h in tl.static_range(HEADS):
            total = tl.sum(tl.reshape(totals[t * HEADS + h], [BLOCK_Q, BLOCK_D, BLOCK_C]), 1)
            to = d_rows + (b * HEADS * Q + h * Q + q) * ROW_C + at
            tl.store(to, total.to(d_rows.dtype.element_ty), mask=(q < Q) & (at < ROW_C))
