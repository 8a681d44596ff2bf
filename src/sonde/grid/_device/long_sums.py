"""Compensated sums on the device: the rounding errors of a long sum are accumulated beside it and added at the end.

A float32 sum of n equal terms, added one by one, has a relative error of up to n · 1.5e-8, so MANY additions are what the promised
2e-6 allows. Kernels decide at compile time whether a sum is longer, so short sums cost nothing.
"""

import triton
import triton.language as tl

MANY = tl.constexpr(128)


@triton.jit
def two_sum(total, lost, term):
    """→ total + term, and `lost` plus the exact rounding error of this addition (Knuth's two-sum)."""
    more = total + term
    part = more - total
    return more, lost + ((total - (more - part)) + (term - part))


@triton.jit
def compensated(total, lost):
    """The corrected sum; one that is not finite stays as it is, since its `lost` is meaningless."""
    return tl.where(tl.abs(total) < float("inf"), total + lost, total)


@triton.jit
def zeros(x, count: tl.constexpr):
    """A tuple of `count` zero tensors like `x`."""
    found = ()
    for _ in tl.static_range(count):
        found = found + (tl.zeros_like(x),)
    return found
