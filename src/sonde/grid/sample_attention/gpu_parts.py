"""Device code that the kernels of ``sample_attention`` share: the positions of a step's samples, and their values tile by tile.

Tensors are ``[samples, channels]`` as in ``_epipolar``; a program holds all channels of its samples, as a tuple of tiles.
"""

import triton
import triton.language as tl

from .._device.taps import channel, fetch, locate, octave, wave


@triton.jit
def look(samples, mask, index, in_range, ACC: tl.constexpr):
    """→ which of these samples are in range and not masked, and their coordinates; the others get NaN."""
    if mask is not None:
        in_range = tl.load(mask + index, mask=in_range, other=0).to(tl.int1)
    y, x = fetch(samples, index, in_range, ACC)
    return in_range, y, x


@triton.jit
def cell_of(y, x, H, W, OFFSET: tl.constexpr):
    """→ which samples see the image, their four pixels and weights, and the position of their cell: y0, x0, fy, fx.

    If one of two pixels along an axis is outside, the other appears twice with half its weight. So nothing outside is read, and
    loads need no mask, which would cost as many instructions as the arithmetic.
    """
    live, y0, x0, fy, fx = locate(y, x, H, W, OFFSET)
    ya, yb, ay, by = along(y0, fy, H)
    xa, xb, ax, bx = along(x0, fx, W)
    pixels = ya * W + xa, ya * W + xb, yb * W + xa, yb * W + xb
    return live, pixels, (ay * ax, ay * bx, by * ax, by * bx), (y0, x0, fy, fx)


@triton.jit
def along(first, f, size):
    """The two pixels along an axis, and their weights."""
    below, above = first < 0, first + 1 >= size
    outside = below | above
    half = 0.5 * tl.where(below, f, 1 - f)
    one, other = tl.where(outside, half, 1 - f), tl.where(outside, half, f)
    return tl.maximum(first, 0), tl.minimum(first + 1, size - 1).to(first.dtype), one, other


@triton.jit
def reach(image, pixels, STRIDE: tl.constexpr, BLOCK_C: tl.constexpr):
    """Pointers to the first tile of four pixels (in planes, to the first channel); other tiles are at constant offsets."""
    lane = tl.arange(0, BLOCK_C)[None, :] if STRIDE > 1 else 0
    found = ()
    for k in tl.static_range(4):
        found = found + (image + (pixels[k] * STRIDE + lane),)
    return found


@triton.jit
def tap(
    at, live, weights, c0: tl.constexpr, C: tl.constexpr, H, W, STRIDE: tl.constexpr, ACC: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_C: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Samples of one tile of channels, from c0 on and below C; exactly 0 where a sample sees nothing.

    Weighted pixels are summed. Interpolating by differences would turn an infinite pixel into NaN.
    """
    c = c0 + tl.arange(0, BLOCK_C)[None, :]
    if EMPTY:
        found = tl.zeros_like(weights[0] * c)
    else:
        offset = c0 if STRIDE > 1 else channel(c, H, W, STRIDE, OFFSET)
        in_c = None if c0 + BLOCK_C <= C else c < C
        other = None if c0 + BLOCK_C <= C else 0.0
        found = weights[0] * tl.load(at[0] + offset, mask=in_c, other=other).to(ACC)
        for k in tl.static_range(1, 4):
            found += weights[k] * tl.load(at[k] + offset, mask=in_c, other=other).to(ACC)
        found = tl.where(live, found, 0)
    return found


@triton.jit
def taps(
    image, live, pixels, weights, H, W, C: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_C: tl.constexpr, TILES: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """All tiles of the first C channels."""
    at = reach(image, pixels, STRIDE, BLOCK_C)
    found = ()
    for t in tl.static_range(TILES):
        found = found + (tap(at, live, weights, t * BLOCK_C, C, H, W, STRIDE, ACC, OFFSET, BLOCK_C, EMPTY),)
    return found


@triton.jit
def encoded(
    image, live, pixels, weights, depth, H, W, C: tl.constexpr, STRIDE: tl.constexpr, OCTAVES: tl.constexpr, ACC: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_C: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """What the encoding, in the channels from C on, adds to every head's score; not yet summed over a tile's channels."""
    at = reach(image, pixels, STRIDE, BLOCK_C)
    found = tl.zeros([depth.shape[0], BLOCK_C], ACC)
    for c0 in tl.static_range(0, 2 * OCTAVES, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)[None, :]
        turns, _power = octave(depth, c // 2)
        seen = tap(at, live, weights, C + c0, C + 2 * OCTAVES, H, W, STRIDE, ACC, OFFSET, BLOCK_C, EMPTY)
        found += seen * wave(turns, c % 2 == 1)
    return found


@triton.jit
def row_of(x, index, in_row, C: tl.constexpr, ACC: tl.constexpr, BLOCK_C: tl.constexpr, TILES: tl.constexpr):
    """All tiles of rows of C channels."""
    found = ()
    for t in tl.static_range(TILES):
        c = t * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        found = found + (tl.load(x + index * C + c, mask=in_row & (c < C), other=0).to(ACC),)
    return found


@triton.jit
def dot(a, b, start):
    """`start` + Σ a·b over the tiles, then summed over channels: ``[samples, 1]``."""
    total = start
    for t in tl.static_range(len(a)):
        total += a[t] * b[t]
    return tl.sum(total, 1, keep_dims=True)


@triton.jit
def of_query(x, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum over the samples in flight of each query."""
    return tl.sum(tl.reshape(x, [BLOCK_Q, BLOCK_D, x.shape[1]]), 1)
