"""Device code for samples that see something, and for the cells that contain them."""

import triton
import triton.language as tl

from .._pyramid.gpu_levels import along, below, fetch_location, inside, level, sees, within


@triton.jit
def slice_of(i, N, SLICES):
    """Begin and end of slice `i` of N items; all slices but the last have the same size."""
    size = tl.cdiv(N, SLICES)
    return i * size, tl.minimum((i + 1) * size, N)


@triton.jit
def visible(
    v, u, shapes, starts, camera, L: tl.constexpr, DROP: tl.constexpr, TABLE: tl.constexpr, MASK: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """Which samples see anything."""
    found = inside(v, u)
    if not DROP:
        found = u < u
        for lev in range(L):
            H, W, _start = level(shapes, starts, camera * L + lev, TABLE, MASK, OFFSET)
            found = found | sees(v, u, H, W, OFFSET)
    return found


@triton.jit
def pick(rank, j, count, ROWS: tl.constexpr):
    """Indices of ROWS visible samples, from number `j` on. `rank` counts visible samples inclusively, so the index of number i is
    the number of ranks ≤ i."""
    slot = j + tl.arange(0, ROWS)[:, None]
    here = slot < count
    return here, tl.where(here, tl.sum((rank[None, :] <= slot).to(tl.int32), 1, keep_dims=True), 0)


@triton.jit
def take(todo, point, y, x, locations, n0, H, W, CAMS: tl.constexpr, POINTS: tl.constexpr, ACC: tl.constexpr, OFFSET: tl.constexpr):
    """Remove the points in the cell of the first point → the other points, and the cell's first corner; (−2, −2) if there was no
    point, in any level that has pixels. The first point is loaded again: ``along`` returns the same bits for one point as for many.
    """
    first = tl.min(tl.where(todo, point, POINTS))
    v, u = fetch_location(locations, n0 + first * CAMS, first < POINTS, ACC)
    y0, _fy, _top, _bottom = along(v, H, OFFSET)
    x0, _fx, _left, _right = along(u, W, OFFSET)
    return todo & ((y != y0) | (x != x0)), y0, x0


@triton.jit
def read(image, y, x, at, in_c, H, W, start, S, ROW: tl.constexpr, MASK: tl.constexpr, OFFSET: tl.constexpr):
    """The pixels of a cell as they are stored, zero where masked."""
    pixel, k00, k01, k10, k11 = corners_of(y, x, H, W, start, S, ROW, MASK, OFFSET)
    p = image + pixel * ROW + at
    v00, v01 = tl.load(p, mask=k00 & in_c, other=0), tl.load(p + ROW, mask=k01 & in_c, other=0)
    p += W * ROW
    return v00, v01, tl.load(p, mask=k10 & in_c, other=0), tl.load(p + ROW, mask=k11 & in_c, other=0)


@triton.jit
def corners_of(y, x, H, W, start, S, ROW: tl.constexpr, MASK: tl.constexpr, OFFSET: tl.constexpr):
    """→ the row of a cell's first corner, and masks of the corners that exist."""
    row = start + y * W + x
    top, bottom, left, right = below(y, H), below(y + 1, H), below(x, W), below(x + 1, W)
    k00, k01, k10, k11 = top & left, top & right, bottom & left, bottom & right
    if MASK:
        k00, k01, k10, k11 = within(k00, k01, k10, k11, row, W, S.to(OFFSET), ROW)
    return row, k00, k01, k10, k11


@triton.jit
def products(go, pixels, PIECES: tl.constexpr, POINTS: tl.constexpr, SPAN: tl.constexpr, ACC: tl.constexpr):
    """Dot products of the gradient with a cell's pixels, by group, for all points: with the first corner, with the differences
    along x and y, and with the mixed difference. Differences are taken first, so that they are exactly zero in a constant image."""
    v00, v01, v10, v11 = pixels[0].to(ACC), pixels[1].to(ACC), pixels[2].to(ACC), pixels[3].to(ACC)
    dx, dy = v01 - v00, v10 - v00
    value, dyx = tl.sum(go * v00, 1), tl.sum(go * (v11 - v10 - dx), 1)
    dx, dy = tl.sum(go * dx, 1), tl.sum(go * dy, 1)
    value, dx = spread(value, PIECES, POINTS, SPAN), spread(dx, PIECES, POINTS, SPAN)
    return value, dx, spread(dy, PIECES, POINTS, SPAN), spread(dyx, PIECES, POINTS, SPAN)


@triton.jit
def turns(i, N: tl.constexpr, SPAN: tl.constexpr):
    """→ which of N items of which of SPAN groups is element `i` of a tile: eight items of a group, then eight of the next, and so
    on. Eight pieces of four float32 fill a 128-byte line, so adjacent threads add to whole lines."""
    EIGHT: tl.constexpr = 8 if N > 8 else N
    return i % EIGHT + i // (EIGHT * SPAN) * EIGHT, i // EIGHT % SPAN


@triton.jit
def unrolled(x, N: tl.constexpr, SPAN: tl.constexpr):
    """A tile in this order as ``[eights, groups, items of eight]``."""
    EIGHT: tl.constexpr = 8 if N > 8 else N
    return x.reshape(N // EIGHT, SPAN, EIGHT)


@triton.jit
def spread(x, N: tl.constexpr, M: tl.constexpr, SPAN: tl.constexpr):
    """Sum over the N items of each group, and repeat the sum for each of M other items."""
    EIGHT: tl.constexpr = 8 if M > 8 else M
    total = tl.sum(tl.sum(unrolled(x, N, SPAN), 0), 1)
    return tl.broadcast_to(total[None, :, None], [M // EIGHT, SPAN, EIGHT]).reshape(M * SPAN)


@triton.jit
def over_groups(x, N: tl.constexpr, SPAN: tl.constexpr):
    """Sum over groups, for each of N items."""
    return tl.sum(unrolled(x, N, SPAN), 1).reshape(N)
