"""Sums in fixed point: values become integer multiples of a power of two, so the order of atomic additions cannot change a bit.

Values are scaled by a power of two above the largest value of their image, which leaves at least 59 − log₂(terms) binary digits
behind the point; for float64 a second integer, the low half, has as many again. Infinities and NaN have no integer: once the
finite values are summed, they overwrite the sums they belong to with a mark, which :func:`to_float` reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch, cdiv
from ...jit.steps import Pass

# stages of a sum: not in fixed point; add finite values; mark where there are infinities or NaN; record which of them
FLOAT, ADD, MARK, CLASSIFY = range(4)
BLOCK = 4096
MARKED = tl.constexpr(1 << 62)  # larger than any sum
BITS = (torch.int32, torch.int64)  # for the bits of float32 and float64


def digits(terms: int) -> int:
    """Binary digits behind the point such that `terms` values below eight have a sum below 2**62."""
    return 59 - terms.bit_length()


def add_largest(p: Pass, x: str, outline: Tensor, images: int, wide: torch.dtype) -> str:
    """A step that finds the largest finite value of each image in ``[B, C, P]`` and, in the last element, if any is not finite.

    B / images consecutive entries of the batch form one image. Returns the slot ``[images + 1]`` of the values' bits.
    """
    B, C, P = outline.shape
    double, strides = wide == torch.float64, outline.stride()
    out = p.buffer("largest", [images + 1], BITS[double], fill=0)
    group, last = B // max(1, images), strides[1] == 1 and C > 1
    dense = strides[1:] in ((P, 1), (1, C))
    constants = (last, dense, tl.float64 if double else tl.float32, tl.int64 if double else tl.int32, BLOCK)
    sizes = (C, P, images, group, *strides)
    p.start(_largest, [x, out], Launch((B * cdiv(C * P, BLOCK), 1, 1), sizes, constants, 8))
    return out


class Finish(NamedTuple):
    """Sums of images with `N` values in `C` channels."""

    images: int
    C: int
    N: int
    digits: int
    planes: bool  # the sums are planes, the result is channels-last


class Config(NamedTuple):
    block: int
    num_warps: int


def add_finish(
    p: Pass, sums: str, sums_like: Tensor, out: str, out_like: Tensor, low: str | None = None, largest: str | None = None,
    digits: int = 0,
) -> None:  # fmt: skip
    """A step that rounds sums ``[images, C, …]`` into `out`, which may be channels-last where the sums are planes.

    `sums_like` and `out_like` are meta tensors laid out as the slots. `low` (if any), `largest` and `digits` are given for sums
    in fixed point.
    """
    images, C, N = *sums_like.shape[:2], sums_like.numel() // max(1, sums_like.shape[0])
    planes = sums_like.stride(1) != 1 and out_like.stride(1) == 1 and C > 1
    p.launch(finish, Finish(images, C, N, digits, planes), [sums, out, low, largest])


def launch_finish(p: Finish, config: Config) -> Launch:
    vector = 8 if p.N % 8 == 0 else 1
    grid = (p.images * cdiv(p.N, config.block), 1, 1)
    return Launch(grid, (p.C, p.N, p.digits), (p.planes, vector, config.block), config.num_warps)


@triton.jit
def power(n, like):
    """2ⁿ in the dtype of `like`; n must be the exponent of a normal number."""
    if like.dtype == tl.float64:
        x = ((n + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    else:
        x = ((n + 127) << 23).to(tl.float32, bitcast=True)
    return x


@triton.jit
def exponent(largest):
    """Exponent of the power of two that scales values up to `largest` (bits) below one (below four near the largest float)."""
    if largest.dtype == tl.int64:
        e = tl.maximum(1022 - (largest >> 52), -1022)
    else:
        e = tl.maximum(126 - (largest >> 23), -126)
    return e


@triton.jit
def scaled(x, largest, DIGITS):
    """x in units of its image, still as a float; zero if it is not finite."""
    units = x * power(exponent(largest), x) * power(DIGITS, x)
    return tl.where(tl.abs(x) < float("inf"), units, 0)


@triton.jit
def add(at, low, x, mask, STAGE: tl.constexpr, DIGITS):
    """Stage 1: atomically add x, in units. Stages 2 and 3: mark the sum of an x that is not finite, then record its kind."""
    if STAGE == 1:
        whole = x.to(tl.int64)
        tl.atomic_add(at, whole, mask=mask, sem="relaxed")
        if low is not None:
            rest = (x - whole.to(x.dtype)) * power(DIGITS, x)
            tl.atomic_add(low, rest.to(tl.int64), mask=mask, sem="relaxed")
    else:
        odd = mask & ~(tl.abs(x) < float("inf"))
        if STAGE == 2:
            tl.store(at, tl.zeros_like(x).to(tl.int64) + MARKED, mask=odd)
        else:
            sign = tl.where(x > 0, 1, tl.where(x < 0, 2, 3))
            tl.atomic_or(at, sign.to(tl.int64), mask=odd, sem="relaxed")


@triton.jit
def to_float(sum, low, largest, DIGITS):
    """A sum in fixed point as a float; what was marked becomes ±inf or NaN."""
    like = largest.to(tl.float64 if largest.dtype == tl.int64 else tl.float32, bitcast=True)
    unit = power(-DIGITS, like)
    x = sum.to(like.dtype)
    if low is not None:
        x += low.to(like.dtype) * unit
    x = x * unit * power(-exponent(largest), like)
    infinite = tl.where(sum == MARKED + 1, float("inf"), tl.where(sum == MARKED + 2, -float("inf"), float("nan")))
    return tl.where(sum < MARKED, x, infinite.to(like.dtype))


@triton.jit(do_not_specialize=["C", "P", "IMAGES", "GROUP", "X_B", "X_C", "X_P"])
def _largest(
    x,  # [B, C, P]
    largest,  # [IMAGES + 1]
    C,
    P,
    IMAGES,
    GROUP,
    X_B,
    X_C,
    X_P,
    LAST: tl.constexpr,  # channels-last
    DENSE: tl.constexpr,  # without gaps
    ACC: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce BLOCK values of one b, then one atomic maximum on the bits, which order like the (positive) floats."""
    N = C.to(tl.int64) * P
    blocks = tl.cdiv(N, BLOCK)
    b = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = i
    if not DENSE:
        at = i % C * X_C + i // C * X_P if LAST else i // P * X_C + i % P * X_P
    size = tl.abs(tl.load(x + b.to(tl.int64) * X_B + at, mask=i < N, other=0).to(ACC))
    finite = size < float("inf")
    most = tl.max(tl.where(finite, size, 0).to(BITS, bitcast=True), 0)
    tl.atomic_max(largest + b // GROUP, most, sem="relaxed")
    odd = tl.max(tl.where(finite, 0, 1), 0)
    tl.atomic_max(largest + IMAGES, odd.to(BITS), mask=odd > 0, sem="relaxed")


@triton.jit(do_not_specialize=["C", "N", "DIGITS"])
def _finish(
    sums,  # [images, N]
    out,  # [images, N]
    low,  # [images, N]
    largest,  # [images + 1]; None if the sums are floats already
    C,
    N,
    DIGITS,
    PLANES: tl.constexpr,  # sums are [images, C, N / C], and the result is [images, N / C, C]
    VECTOR: tl.constexpr,  # N is a multiple of it
    BLOCK: tl.constexpr,
):
    """Convert and round BLOCK sums of one image."""
    N = N // VECTOR * VECTOR  # tells the compiler that it is a multiple
    blocks = tl.cdiv(N, BLOCK)
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards: the sums added to last may still be in the cache
    b = (program // blocks).to(tl.int64)
    i = program % blocks * BLOCK + tl.arange(0, BLOCK)
    at = b * N + (i % C * (N // C) + i // C if PLANES else i)
    x = tl.load(sums + at, mask=i < N, other=0)
    if largest is not None:
        rest = None if low is None else tl.load(low + at, mask=i < N, other=0)
        x = to_float(x, rest, tl.load(largest + b), DIGITS)
    tl.store(out + b * N + i, x.to(out.dtype.element_ty), mask=i < N)


finish = jit.kernel(_finish, "grid.finish", default=lambda p: Config(BLOCK, 8), launch=launch_finish)
