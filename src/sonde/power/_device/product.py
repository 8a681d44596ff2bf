"""The tiled product: the loop that adds products of tiles, along K, to a fragment of sums."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def add_products(
    total,  # [BM, BN], the fragment of sums
    a,  # [BM, BK] pointers to the first tile of `a`
    b,  # [BK, BN] pointers to the first tile of `b`
    a_step,  # from one column of `a` to the next
    b_step,  # from one row of `b` to the next
    in_rows,  # [BM, 1]
    in_columns,  # [1, BN]
    K,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,  # BK divides K
    BK: tl.constexpr,
):
    """By plain pointers; the compiler prefetches the next tiles during the product of the current ones."""
    k = tl.arange(0, BK)
    for k0 in range(0, K, BK):
        if EVEN:
            x, y = tl.load(a, mask=in_rows, other=0), tl.load(b, mask=in_columns, other=0)
        else:
            x = tl.load(a, mask=in_rows & (k0 + k < K)[None, :], other=0)
            y = tl.load(b, mask=(k0 + k < K)[:, None] & in_columns, other=0)
        total = tl.dot(x.to(COMMON), y.to(COMMON), total, input_precision=PRECISION, out_dtype=total.dtype)
        a += BK * a_step
        b += BK * b_step
    return total


@triton.jit
def add_described_products(
    total,  # [BM, BN], the fragment of sums
    a,  # descriptor of [M, K], or of [K, M] if A_TURNED
    b,  # descriptor of [K, N], or of [N, K] if B_TURNED
    row,
    column,
    K,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
):
    """Through tensor descriptors: hardware copies whole tiles, with zeros beyond the slab's end."""
    for k in range(0, K, BK):
        x = a.load([k, row]).T if A_TURNED else a.load([row, k])
        y = b.load([column, k]).T if B_TURNED else b.load([k, column])
        total = tl.dot(x, y, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total


@triton.jit
def landed(total, step):
    """Returns `total` unchanged, but reads it, so that the matrix unit must finish first; `step` is never negative.

    Hopper's matrix units are asynchronous and read the left factor from registers while the program goes on. A loop that only adds
    to its sums and computes a new left factor in every step overwrites those registers too early (seen with Triton 3.6: wrong
    sums, in some runs). Other devices do not need this, and Triton 3.7 does not compile it for Blackwell.
    """
    if cuda_capability_geq(9) and not cuda_capability_geq(10):
        total = tl.where(step >= 0, total, 0)
    return total


@triton.jit
def nearest(x, COMMON: tl.constexpr, PRECISION: tl.constexpr):
    """A fragment of sums, rounded for a product: to COMMON, or to tf32, because matrix units would truncate instead."""
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(COMMON)


@triton.jit
def thirds(x, COMMON: tl.constexpr):
    """Split a float32 fragment into three bfloat16 ones that add up to it, so that matrix units multiply it exactly."""
    high = x.to(COMMON)
    rest = x - high.to(x.dtype)
    middle = rest.to(COMMON)
    return high, middle, (rest - middle.to(x.dtype)).to(COMMON)


@triton.jit
def add_exactly(total, a, b, COMMON: tl.constexpr, PRECISION: tl.constexpr):
    """Add a @ b, where one factor has the dtype of the sums and the other COMMON; neither is rounded before the product."""
    if total.dtype == COMMON:
        return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
    elif a.dtype == COMMON:
        high, middle, low = thirds(b, COMMON)
        total = tl.dot(a, low, total, out_dtype=total.dtype)
        total = tl.dot(a, middle, total, out_dtype=total.dtype)
        return tl.dot(a, high, total, out_dtype=total.dtype)
    else:
        high, middle, low = thirds(a, COMMON)
        total = tl.dot(low, b, total, out_dtype=total.dtype)
        total = tl.dot(middle, b, total, out_dtype=total.dtype)
        return tl.dot(high, b, total, out_dtype=total.dtype)
