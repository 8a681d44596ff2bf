"""Device code of long sums: what an addition loses to rounding is kept beside the sum and added at the end.

A float32 sum of n equal terms, added one by one, loses up to n · 1.5e-8 of itself: MANY additions are what the promised 2e-6
allows. Kernels ask at compile time whether there are more, so that short sums cost nothing.
"""

import triton
import triton.language as tl

MANY = tl.constexpr(128)


@triton.jit
def plus(total, lost, term):
    """The sum, and what it and those before have lost, exactly (Knuth's two-sum)."""
    more = total + term
    part = more - total
    return more, lost + ((total - (more - part)) + (term - part))


@triton.jit
def settled(total, lost):
    """Nothing is known to be lost of a sum that is not finite."""
    return tl.where(tl.abs(total) < float("inf"), total + lost, total)


@triton.jit
def nothing(x, count: tl.constexpr):
    """So many zeros like `x`."""
    zeros = ()
    for _ in tl.static_range(count):
        zeros = zeros + (tl.zeros_like(x),)
    return zeros
