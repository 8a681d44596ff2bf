"""Fragments of φ, the symmetric power: built in registers from a few columns of the slab, and passed to the matrix units.

A column of φ is a tile of indices u₀ ≤ … ≤ u_{P−1} and a digit a_i for each; it is √mult(u) · Π x[u_i·T + a_i]. ``tiles`` lists the
u of every tile, ``roots`` the √mult.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def choose(m, R: tl.constexpr):
    """The binomial coefficient m over R, without large intermediate integers."""
    found = m * 0 + 1
    for i in tl.static_range(R):
        found = found * (m - i) // (i + 1)
    return found


@triton.jit
def power_columns(
    x,  # pointers to rows of the slab, to be broadcast with `column`
    x_step,
    column,  # of φ
    inside,
    tiles,  # [tiles, P]
    roots,  # [tiles]
    P: tl.constexpr,
    T: tl.constexpr,
    SPAN: tl.constexpr,  # T to the power of P
    SCALED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Any columns of φ; each factor is loaded from memory."""
    tile, digits = column // SPAN, column % SPAN
    known = inside & (column >= 0)
    product = tl.load(x + (tl.load(tiles + tile * P + P - 1, mask=known, other=0) * T + digits % T) * x_step, mask=known, other=0)
    product = product.to(ACC)
    for i in tl.static_range(1, P):
        digits = digits // T
        factor = tl.load(tiles + tile * P + P - 1 - i, mask=known, other=0) * T + digits % T
        product = product * tl.load(x + factor * x_step, mask=known, other=0).to(ACC)
    if SCALED:
        product = product * tl.load(roots + tile, mask=known, other=0).to(ACC)
    return product


@triton.jit
def outer_rows(u, v):
    """[BM, T] and [BM, T] → [BM, T·T]: a tile of φ of power 2, without its root."""
    return (u[:, :, None] * v[:, None, :]).reshape(u.shape[0], u.shape[1] * v.shape[1])


@triton.jit
def outer_columns(u, v):
    """[T, BR] and [T, BR] → [T·T, BR]: the same for a transposed slab."""
    return (u[:, None, :] * v[None, :, :]).reshape(u.shape[0] * v.shape[0], u.shape[1])


@triton.jit
def exact(high, low, ACC: tl.constexpr):
    """A number that was passed as two float32 parts."""
    one = tl.full([], 1, ACC)
    return high * one + low * one
