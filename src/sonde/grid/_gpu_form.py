"""One form, of which every pass of ``sample_sum`` and ``sample_dot`` is a derivative, forward passes included:

    T(images, samples, coef, rows) = Σ_{b,h,q,d} coef[b,h,q,d] · Σ_c tap(images[b,c], samples[b,q,d]) · rows[b,h,q,c]

``sample_sum(weights)`` is ∂T/∂rows with coef = weights, and its gradient is that of T with rows = ∂L/∂out;
``sample_dot(queries)`` is ∂T/∂coef with rows = queries, and its gradient is that of T with coef = ∂L/∂out.
The last 2·octaves channels of the images meet an encoding of the depth in place of rows, the same for every head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..op.gpu import accumulator, launch
from ..op.library import memory_format
from ..op.plan import Determinism, Kernel
from ._gpu_layout import as_images, channels_last
from ._gpu_segments import images_gradient, workspace
from ._gpu_taps import TURN, corners, edges, interpolate, locate, octave, scatter, wave

FORCE_INT64 = False  # tests use 64-bit offsets where 32 bits would do
MAX_DEPTH = 128  # samples per query that one program can hold


@dataclass(frozen=True)
class Config:
    block_q: int
    block_d: int
    lanes: int  # threads that share the channels of a sample
    num_warps: int


def default_config(D: int, C: int, vec: int, whole: bool) -> Config:
    """Good on every device; `whole` if one program must see all samples of its queries."""
    lanes = min(32, _power_of_2(C)) // vec
    block_d = max(_power_of_2(D) if whole else min(8, _power_of_2(D)), 32 // lanes)
    num_warps = max(1, min(8, block_d // 16))
    return Config(block_q=1, block_d=block_d, lanes=lanes, num_warps=num_warps)


@dataclass(frozen=True)
class Operands:
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
    contiguous = [t if t is None else t.contiguous() for t in (samples, coef, rows, depths)]
    return Operands(channels_last(images), *contiguous, octaves, heads, wide)  # type: ignore[arg-type]


def steps(wants: Sequence[str], D: int, deterministic: bool) -> list[tuple[str, list[str]]]:
    """Which kernels run, and which derivatives each one writes: asked by the launch and by the plan."""
    alone = []
    if "rows" in wants and D > MAX_DEPTH:
        alone.append(("rows", ["rows"]))
    if "images" in wants and deterministic:
        alone.append(("segments", ["images"]))
    rest = [want for want in wants if not any(want in writes for _, writes in alone)]
    return [*alone, ("form", rest)] if rest else alone


def derivatives(T: Operands, results: dict[str, Tensor], deterministic: bool = False) -> None:
    """Write the derivatives of T that `results` names; that of the images, ``[B, H, W, C]`` zeros, is added."""
    for kernel, wants in steps(list(results), T.samples.shape[2], deterministic):
        if kernel == "segments":
            images_gradient(T, results["images"])
        else:
            _launch(_rows if kernel == "rows" else _form, T, {want: results[want] for want in wants})


def gradients(T: Operands, inputs: dict[str, Tensor | None], needs: Sequence[bool], deterministic: bool) -> list[Tensor]:
    """The gradients that are needed, of `inputs` in order, each laid out and rounded as its input."""
    needed = {name: x for (name, x), need in zip(inputs.items(), needs) if need and x is not None}
    results = {}
    for name, x in needed.items():
        if name == "images":
            results[name] = torch.zeros(T.images.shape, dtype=T.wide, device=x.device)
        else:
            results[name] = torch.empty_like(x, memory_format=torch.contiguous_format)
    if T.octaves == 0 and "depths" in results:
        derivatives(T, {k: v for k, v in results.items() if k != "depths"}, deterministic)
        results["depths"].zero_()
    else:
        derivatives(T, results, deterministic)
    del T  # the channels-last copy makes room for the gradient
    if "images" in results:
        results["images"] = as_images(results["images"], needed["images"], memory_format(needed["images"], True))
    return list(results.values())


def plan(
    phase: Literal["forward", "backward"], images: Tensor, samples: Tensor, wide: torch.dtype, writes: dict[str, str], deterministic: bool
) -> list[Kernel]:
    """What :func:`derivatives` launches to write the derivatives that `writes` names, under the names it gives them."""
    laid_out = images.permute(0, 2, 3, 1).is_contiguous()
    copy = 0 if laid_out else images.numel() * images.element_size()
    apart = "images" in writes and not (laid_out and images.dtype == wide)
    pixels = images.numel() * wide.itemsize if apart else 0
    found = []
    for kernel, wants in steps(list(writes), samples.shape[2], deterministic):
        atomic = kernel == "form" and "images" in wants
        found.append(
            Kernel(
                name=kernel,
                writes=tuple(writes[want] for want in wants),
                accumulator=wide,
                determinism=Determinism.NONE if atomic else Determinism.BATCH_INVARIANT,
                workspace=copy + pixels + (workspace(images.permute(0, 2, 3, 1), samples, wide) if kernel == "segments" else 0),
                phase=phase,
            )
        )
    return found


def _launch(kernel, T: Operands, results: dict[str, Tensor]) -> None:
    (B, H, W, C), (_, Q, D, _) = T.images.shape, T.samples.shape
    vec = _vector(C, T.octaves, T.images.element_size())
    config = default_config(D, C, vec, whole="rows" in results and kernel is _form)
    wide_offsets = FORCE_INT64 or H * W * C >= 2**31
    order = ("images", "samples", "coef", "rows", "depths")
    tensors = (T.images, T.samples, T.coef, T.rows, T.depths, *map(results.get, order))
    constants = (
        C, T.heads, T.octaves, accumulator(T.wide), tl.int64 if wide_offsets else tl.int32,
        config.block_q, config.block_d, 32 // config.lanes, config.lanes, vec,
    )  # fmt: skip
    blocks = B * triton.cdiv(Q, config.block_q)
    tiles = triton.cdiv(C, config.lanes * vec) if kernel is _rows else triton.cdiv(max(1, D), config.block_d)
    launch(kernel, (blocks, tiles, 1), tensors, (H, W, Q, D), constants, config.num_warps)


def _vector(C: int, octaves: int, itemsize: int) -> int:
    """Channels that one access of at most 16 bytes can take from any row, whose start it must not straddle."""
    return min(16 // itemsize, (C | 2 * octaves | 16) & -(C | 2 * octaves | 16))


def _power_of_2(n: int) -> int:
    return triton.next_power_of_2(max(1, n))


@triton.jit
def in_order(BLOCK_D: tl.constexpr, GROUP: tl.constexpr):
    """0, 1, … BLOCK_D − 1, GROUP of them in one warp."""
    outer = tl.arange(0, BLOCK_D // GROUP)[:, None, None, None, None]
    return outer * GROUP + tl.arange(0, GROUP)[None, None, :, None, None]


@triton.jit
def each_group(GROUP: tl.constexpr):
    """Zeros that make every group load for itself what all need, and whether a group is the one that stores for all."""
    g = tl.arange(0, GROUP)[None, None, :, None, None]
    return g * 0, g == 0


@triton.jit
def over_samples(x):
    return tl.sum(tl.sum(x, 0, keep_dims=True), 2, keep_dims=True)


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
    d_rows,  # needs BLOCK_D >= D
    d_depths,
    H,
    W,
    Q,
    D,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    # Tensors are [samples / GROUP, query, GROUP, LANES, VEC]: a warp covers the last three dimensions, so that what is loaded
    # once per query lies in the same threads as what is loaded once per sample. What there is one of per head is a tuple.
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    BLOCK_C: tl.constexpr = LANES * VEC
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    q = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :, None, None, None]
    d = tl.program_id(1) * BLOCK_D + in_order(BLOCK_D, GROUP)
    lane = tl.arange(0, LANES)[None, None, None, :, None] * VEC + tl.arange(0, VEC)[None, None, None, None, :]
    group, first = each_group(GROUP)
    in_q = q < Q
    in_qd = in_q & (d < D)
    qd = (b * Q + q) * D + d  # which sample
    hq = b * HEADS * Q + q  # which row of the first head

    live, y0, x0, fy, fx = locate(samples, qd, in_qd, H, W, ACC, OFFSET)
    k00, k01, k10, k11 = edges(live, y0, x0, H, W)
    pixel = y0 * W + x0
    image = images + b * H * W * C
    if d_images is not None:
        d_image = d_images + b * H * W * C
    w = ()
    g_coef = ()
    for i in tl.static_range(HEADS):
        if coef is not None:
            w = w + (tl.load(coef + (hq + i * Q) * D + d, mask=live, other=0).to(ACC),)
        if d_coef is not None:
            g_coef = g_coef + (tl.zeros([BLOCK_D // GROUP, BLOCK_Q, GROUP, LANES, 1], ACC),)
    g_y = tl.zeros([BLOCK_D // GROUP, BLOCK_Q, GROUP, LANES, 1], ACC)
    g_x = tl.zeros([BLOCK_D // GROUP, BLOCK_Q, GROUP, LANES, 1], ACC)

    for c0 in range(0, ROW_C, BLOCK_C):
        c = c0 + lane
        in_c = c < ROW_C
        if d_samples is not None or d_coef is not None or d_rows is not None:
            v00, v01, v10, v11 = corners(image, pixel, k00, k01, k10, k11, c, in_c, W, C, ACC)
            s, dy, dx = interpolate(v00, v01, v10, v11, fy, fx)
        a = tl.zeros([BLOCK_D // GROUP, BLOCK_Q, GROUP, LANES, VEC], ACC)
        sums = ()
        for i in tl.static_range(HEADS):
            at = (hq + i * Q) * ROW_C + c
            if rows is not None:
                r = tl.load(rows + at + group, mask=in_q & in_c, other=0).to(ACC)
            if d_rows is not None:
                total = over_samples(w[i] * s)
                tl.store(d_rows + at + group, total.to(d_rows.dtype.element_ty), mask=in_q & in_c & first)
            if d_coef is not None:
                sums = sums + (g_coef[i] + tl.sum(r * s, 4, keep_dims=True),)
            if d_samples is not None or d_images is not None:
                a += w[i] * r
        if d_coef is not None:
            g_coef = sums
        if d_samples is not None:
            g_y += tl.sum(a * dy, 4, keep_dims=True)
            g_x += tl.sum(a * dx, 4, keep_dims=True)
        if d_images is not None:
            scatter(d_image, a, fy, fx, pixel, k00, k01, k10, k11, c, in_c, W, C)

    g_waves = tl.zeros([BLOCK_D // GROUP, BLOCK_Q, GROUP, LANES, 1], ACC)  # of every head's coefficient
    if OCTAVES > 0:
        depth = tl.load(depths + qd, mask=live, other=0).to(ACC)
        g_depth = tl.zeros([BLOCK_D // GROUP, BLOCK_Q, GROUP, LANES, 1], ACC)
        w_all = tl.zeros([BLOCK_D // GROUP, BLOCK_Q, GROUP, 1, 1], ACC)
        if coef is not None:
            for i in tl.static_range(HEADS):
                w_all += w[i]
        for c0 in range(0, 2 * OCTAVES, BLOCK_C):
            c = c0 + lane
            in_c = c < 2 * OCTAVES
            cosine = c % 2 == 1
            turns, power = octave(depth, c // 2)
            r = wave(turns, cosine)
            if d_samples is not None or d_coef is not None or d_depths is not None:
                v00, v01, v10, v11 = corners(image + ROW_C, pixel, k00, k01, k10, k11, c, in_c, W, C, ACC)
                s, dy, dx = interpolate(v00, v01, v10, v11, fy, fx)
            if d_coef is not None:
                g_waves += tl.sum(r * s, 4, keep_dims=True)
            if d_depths is not None:
                slope = wave(turns, c % 2 == 0) * tl.where(cosine, -power, power)
                g_depth += tl.sum(w_all * s * slope, 4, keep_dims=True)
            a = w_all * r
            if d_samples is not None:
                g_y += tl.sum(a * dy, 4, keep_dims=True)
                g_x += tl.sum(a * dx, 4, keep_dims=True)
            if d_images is not None:
                scatter(d_image + ROW_C, a, fy, fx, pixel, k00, k01, k10, k11, c, in_c, W, C)
        if d_depths is not None:
            total = tl.where(live, tl.sum(g_depth, 3, keep_dims=True) * TURN, 0)
            tl.store(d_depths + qd, total.to(d_depths.dtype.element_ty), mask=in_qd)

    if d_coef is not None:
        for i in tl.static_range(HEADS):
            total = tl.where(live, tl.sum(g_coef[i] + g_waves, 3, keep_dims=True), 0)
            tl.store(d_coef + (hq + i * Q) * D + d, total.to(d_coef.dtype.element_ty), mask=in_qd)
    if d_samples is not None:
        total = tl.where(live, tl.sum(g_x, 3, keep_dims=True) * (0.5 * W), 0)
        tl.store(d_samples + 2 * qd, total.to(d_samples.dtype.element_ty), mask=in_qd)
        total = tl.where(live, tl.sum(g_y, 3, keep_dims=True) * (0.5 * H), 0)
        tl.store(d_samples + 2 * qd + 1, total.to(d_samples.dtype.element_ty), mask=in_qd)


@triton.jit(do_not_specialize=["H", "W", "Q", "D"])
def _rows(
    images,
    samples,
    coef,
    rows,
    depths,
    d_images,
    d_samples,
    d_coef,
    d_rows,
    d_depths,
    H,
    W,
    Q,
    D,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    OCTAVES: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    """∂T/∂rows for any number of samples: one tile of channels, all samples in turn. Arguments as in ``_form``."""
    ROW_C: tl.constexpr = C - 2 * OCTAVES
    blocks = tl.cdiv(Q, BLOCK_Q)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    q = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :, None, None, None]
    c = tl.arange(0, LANES)[None, None, None, :, None] * VEC + tl.arange(0, VEC)[None, None, None, None, :]
    c += tl.program_id(1) * LANES * VEC
    group, first = each_group(GROUP)
    in_q, in_c = q < Q, c < ROW_C
    hq = b * HEADS * Q + q
    image = images + b * H * W * C
    totals = ()
    for _ in tl.static_range(HEADS):
        totals = totals + (tl.zeros([BLOCK_D // GROUP, BLOCK_Q, GROUP, LANES, VEC], ACC),)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + in_order(BLOCK_D, GROUP)
        live, y0, x0, fy, fx = locate(samples, (b * Q + q) * D + d, in_q & (d < D), H, W, ACC, OFFSET)
        k00, k01, k10, k11 = edges(live, y0, x0, H, W)
        v00, v01, v10, v11 = corners(image, y0 * W + x0, k00, k01, k10, k11, c, in_c, W, C, ACC)
        s, _dy, _dx = interpolate(v00, v01, v10, v11, fy, fx)
        sums = ()
        for i in tl.static_range(HEADS):
            sums = sums + (totals[i] + tl.load(coef + (hq + i * Q) * D + d, mask=live, other=0).to(ACC) * s,)
        totals = sums
    for i in tl.static_range(HEADS):
        total = over_samples(totals[i])
        tl.store(d_rows + (hq + i * Q) * ROW_C + c + group, total.to(d_rows.dtype.element_ty), mask=in_q & in_c & first)
