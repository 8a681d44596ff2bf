"""The tiled product: the loop that adds products of tiles, along K, to a fragment of sums."""

from __future__ import annotations

import triton
import triton.language as tl


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
