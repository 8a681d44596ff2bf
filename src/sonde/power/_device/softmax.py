"""Online softmax over blocks of keys: a running maximum and a running sum, in powers of two."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shift(most):
    """What to subtract from the logits: their maximum, or 0 if it is −∞."""
    return tl.where(most == -float("inf"), 0, most)


@triton.jit
def add_block(total, norm, most, logits, factor, values, COMMON: tl.constexpr, PRECISION: tl.constexpr):
    """Add a block of keys to [BM, E] sums, [BM] norms and [BM] maxima; `factor` ≥ 0 converts logits to base-2 exponents."""
    higher = tl.maximum(most, tl.max(logits, 1) * factor)
    weights = tl.exp2(logits * factor - shift(higher)[:, None])
    rescale = tl.exp2(most - shift(higher))
    norm = norm * rescale + tl.sum(weights, 1)
    total = total * rescale[:, None]
    total = tl.dot(weights.to(COMMON), values, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total, norm, higher
