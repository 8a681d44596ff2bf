"""The kernels of ``grid_sample``, one for the value and one for both gradients.

A program has a tile ``[pixels of the result, channels]``. If channels are contiguous in memory, a thread holds several of them
(one 16-byte access); if pixels are, a thread has one pixel and loops over the channels. Strides are run-time values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from .._device.axes import MODES, PADDINGS, TAPS, any_of, axis, coordinate, neighbours, none, over_channels, shift, tile
from .._device.fixed_point import add, scaled
from .._device.long_sums import MANY, compensated, two_sum, zeros
from .gpu_configs import BATCH, SIZES, Problem, candidate_configs, fits, gradients_config, launch, launch_gradients, sample_config

# ---- expected results, for the search ---------------------------------------------------------------------------------------


def _parts(p: Problem, input: Tensor, grid: Tensor):
    """The input as the reference expects it, and slices of the points with their grids, one for each result."""
    size, taps = (p.Z, p.H, p.W)[-p.dim :], TAPS[p.mode] ** p.dim
    image = input.detach().reshape(p.inputs, p.C, *size).to(p.wide)
    grids = grid.detach().reshape(p.grids, p.points, p.dim).to(p.wide).repeat_interleave(p.B // max(1, p.grids), 0)
    step = max(1, (1 << 26) // max(1, p.B * p.C * taps))
    parts = [slice(i, i + step) for i in range(0, p.points, step)]
    return image, [(part, grids[:, part].reshape(p.B, *[1] * (p.dim - 1), -1, p.dim)) for part in parts]


def expected_sample(p: Problem, input: Tensor, grid: Tensor, out: Tensor) -> dict[int, Tensor]:
    from .reference import grid_sample

    image, parts = _parts(p, input, grid)
    found = torch.empty(p.B, p.C, p.points, dtype=p.wide, device=out.device)
    for part, places in parts:
        found[:, :, part] = grid_sample(image, places, MODES[p.mode], PADDINGS[p.padding], p.align).flatten(2)
    return {2: found.view(out.shape)}


def expected_gradients(p: Problem, grad: Tensor, input, grid: Tensor, d_input, d_grid, *_) -> dict[int, Tensor]:
    from .reference import grid_sample

    size, device = (p.Z, p.H, p.W)[-p.dim :], grad.device
    image, parts = _parts(p, torch.zeros(p.inputs, p.C, *size, device=device) if input is None else input, grid)
    grad = grad.reshape(p.B, p.C, p.points).to(p.wide)
    sums = torch.zeros_like(image, memory_format=torch.contiguous_format)
    slopes = torch.zeros(p.B, p.points, p.dim, dtype=p.wide, device=device)
    for part, places in parts:
        image, places = image.detach().requires_grad_(), places.requires_grad_()
        with torch.enable_grad():
            value = grid_sample(image, places, MODES[p.mode], PADDINGS[p.padding], p.align)
        found = torch.autograd.grad(value, [image, places], grad[:, :, part].reshape(value.shape), allow_unused=True)
        sums += found[0]
        if found[1] is not None:
            slopes[:, part] = found[1].flatten(1, -2)
    wanted = {
        3: sums if d_input is None else sums.reshape(d_input.shape),
        4: slopes if d_grid is None else slopes.view(d_grid.shape),
    }
    return {i: want for i, want in wanted.items() if (d_input, d_grid)[i - 3] is not None}


# ---- kernels ----------------------------------------------------------------------------------------------------------------

RUN_TIME = [
    "C", "P", "Z", "H", "W", "INPUT_GROUP", "GRID_GROUP", "I_B", "I_C", "I_Z", "I_Y", "I_X", "G_B", "G_P", "G_D",
    "O_B", "O_C", "O_P",
]  # fmt: skip


@triton.jit(do_not_specialize=RUN_TIME)
def _sample(
    input,  # [B / INPUT_GROUP, C, Z, H, W]
    grid,  # [B / GRID_GROUP, P, DIM]
    out,  # [B, C, P]
    C,
    P,
    Z,
    H,
    W,
    INPUT_GROUP,  # results that share an input
    GRID_GROUP,
    I_B,
    I_C,
    I_Z,
    I_Y,
    I_X,
    G_B,
    G_P,
    G_D,
    O_B,
    O_C,
    O_P,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    LAST: tl.constexpr,  # channels of the input are contiguous
    VECTOR: tl.constexpr,  # its other strides are multiples of this, and so is C
    OUT_LAST: tl.constexpr,
    OUT_ROW: tl.constexpr,  # pixels of the result are contiguous
    OUT_VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
):
    if LAST:
        C, I_B = C // VECTOR * VECTOR, I_B // VECTOR * VECTOR  # tells the compiler that they are multiples
        I_Z, I_Y, I_X = I_Z // VECTOR * VECTOR, I_Y // VECTOR * VECTOR, I_X // VECTOR * VECTOR
    if OUT_LAST:
        C = C // OUT_VECTOR * OUT_VECTOR
    elif OUT_ROW:
        P = P // OUT_VECTOR * OUT_VECTOR
    O_B = O_B // OUT_VECTOR * OUT_VECTOR
    blocks = tl.cdiv(P, BLOCK_P)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    p = (tl.program_id(0) % blocks).to(OFFSET) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    in_p = p < P
    ux = coordinate(grid, b, p, in_p, 0, GRID_GROUP, G_B, G_P, G_D, ACC)
    uy = coordinate(grid, b, p, in_p, 1, GRID_GROUP, G_B, G_P, G_D, ACC)
    xs, kx, wx, _sx = axis(ux, W, I_X, TAPS, PAD, ALIGN, OFFSET, False)
    ys, ky, wy, _sy = axis(uy, H, I_Y, TAPS, PAD, ALIGN, OFFSET, False)
    if DIM == 3:
        uz = coordinate(grid, b, p, in_p, 2, GRID_GROUP, G_B, G_P, G_D, ACC)
        zs, kz, wz, _sz = axis(uz, Z, I_Z, TAPS, PAD, ALIGN, OFFSET, False)
    else:
        zs, kz, wz, _sz = none(ux)
    image = input + (b // INPUT_GROUP) * I_B
    result = out + b * O_B
    start = tl.program_id(1).to(OFFSET) * CHUNK
    stop = tl.minimum(start + CHUNK, C)
    for c0 in range(start, stop, BLOCK_C * TILES):
        totals = ()  # load all tiles first, so that no load waits for a store
        for k in tl.static_range(TILES):
            c = c0 + k * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            here = image + (c if LAST else c * I_C)
            in_c = c < stop
            total = tl.zeros([BLOCK_P, BLOCK_C], ACC)
            for z in tl.static_range(TAPS if DIM == 3 else 1):
                for y in tl.static_range(TAPS):
                    row = tl.zeros([BLOCK_P, BLOCK_C], ACC)
                    for x in tl.static_range(TAPS):
                        v = tl.load(here + (zs[z] + ys[y] + xs[x]), mask=(kz[z] & ky[y] & kx[x]) & in_c, other=0)
                        row += wx[x] * v.to(ACC)
                    total += (wz[z] * wy[y]) * row
            totals = totals + (total,)
        for k in tl.static_range(TILES):
            c = c0 + k * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            to = tile(result, p, c, O_C, O_P, OUT_LAST, OUT_ROW, OUT_VECTOR)
            tl.store(to, totals[k].to(out.dtype.element_ty), mask=in_p & (c < stop))


@triton.jit(do_not_specialize=[*RUN_TIME, "D_B", "D_C", "D_Z", "D_Y", "D_X", "DIGITS", "INPUTS"])
def _gradients(
    grad,  # [B, C, P]
    input,  # [B / INPUT_GROUP, C, Z, H, W]
    grid,  # [B / GRID_GROUP, P, DIM]
    d_input,  # like the input; None if not needed
    d_grid,  # [B, P, DIM]
    low,  # like d_input; the low half of sums in fixed point, if they have one
    largest,  # [B / INPUT_GROUP + 1], if sums are in fixed point
    C,
    P,
    Z,
    H,
    W,
    INPUT_GROUP,
    GRID_GROUP,
    I_B,
    I_C,
    I_Z,
    I_Y,
    I_X,
    G_B,
    G_P,
    G_D,
    O_B,
    O_C,
    O_P,
    D_B,
    D_C,
    D_Z,
    D_Y,
    D_X,
    DIGITS,
    INPUTS,
    STAGE: tl.constexpr,  # of a sum in fixed point; 0 for floats
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    PAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    LAST: tl.constexpr,
    VECTOR: tl.constexpr,
    OUT_LAST: tl.constexpr,
    OUT_ROW: tl.constexpr,
    OUT_VECTOR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
):
    SLICES: tl.constexpr = TAPS if DIM == 3 else 1
    if LAST:
        C, I_B, D_B = C // VECTOR * VECTOR, I_B // VECTOR * VECTOR, D_B // VECTOR * VECTOR
        I_Z, I_Y, I_X = I_Z // VECTOR * VECTOR, I_Y // VECTOR * VECTOR, I_X // VECTOR * VECTOR
        D_Z, D_Y, D_X = D_Z // VECTOR * VECTOR, D_Y // VECTOR * VECTOR, D_X // VECTOR * VECTOR
    if OUT_LAST:
        C = C // OUT_VECTOR * OUT_VECTOR
    elif OUT_ROW:
        P = P // OUT_VECTOR * OUT_VECTOR
    O_B = O_B // OUT_VECTOR * OUT_VECTOR
    blocks = tl.cdiv(P, BLOCK_P)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    p = (tl.program_id(0) % blocks).to(OFFSET) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    in_p = p < P
    if STAGE > 1:
        odd = tl.load(largest + INPUTS) > 0  # otherwise there is nothing to mark
        in_p = in_p & odd
    WANTS: tl.constexpr = d_grid is not None
    ux = coordinate(grid, b, p, in_p, 0, GRID_GROUP, G_B, G_P, G_D, ACC)
    uy = coordinate(grid, b, p, in_p, 1, GRID_GROUP, G_B, G_P, G_D, ACC)
    xs, kx, wx, sx = axis(ux, W, 1, TAPS, PAD, ALIGN, OFFSET, WANTS)
    ys, ky, wy, sy = axis(uy, H, 1, TAPS, PAD, ALIGN, OFFSET, WANTS)
    if DIM == 3:
        uz = coordinate(grid, b, p, in_p, 2, GRID_GROUP, G_B, G_P, G_D, ACC)
        zs, kz, wz, sz = axis(uz, Z, 1, TAPS, PAD, ALIGN, OFFSET, WANTS)
    else:
        zs, kz, wz, sz = none(ux)
    base = grad + b * O_B
    if d_grid is not None:
        image = input + (b // INPUT_GROUP) * I_B
    if d_input is not None:
        d_image = d_input + (b // INPUT_GROUP) * D_B
        if STAGE > 0:
            most = tl.load(largest + b // INPUT_GROUP)
        if low is not None:
            low_image = low + (b // INPUT_GROUP) * D_B
    # if pixels are contiguous, adjacent samples of a smooth grid mostly share pixels: sum their terms before the atomic add
    MERGE: tl.constexpr = d_input is not None and not LAST and BLOCK_C == 1 and BLOCK_P >= 32 and TAPS == 2 and STAGE < 2
    if MERGE:
        live = any_of(kx) & any_of(ky) & any_of(kz)
        joined, taken = neighbours(live, zs[0], ys[0], xs[0], H, W, BLOCK_P)
    dots = ()  # products of the result's gradient and each tap's pixels, one sum per channel of the tile
    if d_grid is not None:
        for _ in tl.static_range(SLICES * TAPS * TAPS):
            dots = dots + (tl.zeros([BLOCK_P, BLOCK_C], ACC),)
    LONG: tl.constexpr = d_grid is not None and CHUNK > MANY * BLOCK_C
    if LONG:
        lost = zeros(dots[0], SLICES * TAPS * TAPS)
    start = tl.program_id(1).to(OFFSET) * CHUNK
    stop = tl.minimum(start + CHUNK, C)
    if STAGE > 1:
        stop = tl.where(odd, stop, start)
    for c0 in range(start, stop, BLOCK_C * TILES):
        gs = ()
        for k in tl.static_range(TILES):
            c = c0 + k * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            in_c = c < stop
            g = tl.load(tile(base, p, c, O_C, O_P, OUT_LAST, OUT_ROW, OUT_VECTOR), mask=in_p & in_c, other=0).to(ACC)
            gs = gs + (scaled(g, most, DIGITS) if STAGE == 1 else g,)
            if d_grid is not None:
                sums = ()
                losses = ()
                for z in tl.static_range(SLICES):
                    for y in tl.static_range(TAPS):
                        for x in tl.static_range(TAPS):
                            there = (kz[z] & ky[y] & kx[x]) & in_c
                            at = image + (zs[z] * I_Z + ys[y] * I_Y + xs[x] * I_X) + (c if LAST else c * I_C)
                            if not LAST and BLOCK_C > 1:
                                at = tl.max_contiguous(at, [BLOCK_P, 1])  # so that adjacent threads get adjacent pixels
                            v = tl.load(at, mask=there, other=0).to(ACC)
                            if LONG:
                                more, less = two_sum(dots[(z * TAPS + y) * TAPS + x], lost[(z * TAPS + y) * TAPS + x], g * v)
                                sums = sums + (more,)
                                losses = losses + (less,)
                            else:
                                sums = sums + (dots[(z * TAPS + y) * TAPS + x] + g * v,)
                dots = sums
                if LONG:
                    lost = losses
        if d_input is not None:
            for k in tl.static_range(TILES):
                c = c0 + k * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                in_c = c < stop
                for z in tl.static_range(SLICES):
                    for y in tl.static_range(TAPS):
                        for x in tl.static_range(TAPS):
                            there = (kz[z] & ky[y] & kx[x]) & in_c
                            at = (zs[z] * D_Z + ys[y] * D_Y + xs[x] * D_X) + (c if LAST else c * D_C)
                            if not LAST and BLOCK_C > 1:
                                at = tl.max_contiguous(at, [BLOCK_P, 1])
                            term = gs[k] * (wz[z] * wy[y] * wx[x])
                            if MERGE and x == 0:
                                term += tl.where(joined, shift(gs[k] * (wz[z] * wy[y] * wx[1]), -1, BLOCK_P), 0)
                            if MERGE and x == 1:
                                there = there & ~taken
                            if STAGE == 0:
                                tl.atomic_add(d_image + at, term, mask=there, sem="relaxed")
                            else:
                                add(d_image + at, None if low is None else low_image + at, term, there, STAGE, DIGITS)
    if d_grid is not None:
        gx = tl.zeros([BLOCK_P, BLOCK_C], ACC)
        gy = tl.zeros([BLOCK_P, BLOCK_C], ACC)
        gz = tl.zeros([BLOCK_P, BLOCK_C], ACC)
        for z in tl.static_range(SLICES):
            for y in tl.static_range(TAPS):
                for x in tl.static_range(TAPS):
                    dot = dots[(z * TAPS + y) * TAPS + x]
                    if LONG:
                        dot = compensated(dot, lost[(z * TAPS + y) * TAPS + x])
                    gx += (wz[z] * wy[y] * sx[x]) * dot
                    gy += (wz[z] * sy[y] * wx[x]) * dot
                    if DIM == 3:
                        gz += (sz[z] * wy[y] * wx[x]) * dot
        live = any_of(kx) & any_of(ky) & any_of(kz)
        to = d_grid + (b * P + p) * DIM
        tl.store(to, over_channels(gx, live).to(d_grid.dtype.element_ty), mask=in_p)
        tl.store(to + 1, over_channels(gy, live).to(d_grid.dtype.element_ty), mask=in_p)
        if DIM == 3:
            tl.store(to + 2, over_channels(gz, live).to(d_grid.dtype.element_ty), mask=in_p)


sample = jit.kernel(
    _sample,
    "grid.sample",
    default=sample_config,
    candidates=lambda p: candidate_configs(sample_config(p), p),
    launch=launch,
    sizes=SIZES,
    batch=BATCH,
    writes=(2,),
    fits=fits,
    expected=expected_sample,
)
gradients = jit.kernel(
    _gradients,
    "grid.sample_gradients",
    default=gradients_config,
    candidates=lambda p: candidate_configs(gradients_config(p), p),
    launch=launch_gradients,
    sizes=SIZES,
    batch=BATCH,
    writes=(3, 4),
    adds=(3,),
    fits=fits,
    expected=expected_gradients,
)
