"""Gradients over (query, point) pairs, from the k nearest or from lists of any length.

The gradient of a query is summed by its own program. The gradient of a point is summed in a fixed order without atomics: pairs are
sorted by point, which gives each point a run of pairs. Every aligned chunk of CHUNK pairs within a single run is summed by its own
program; then each point adds its chunks and the pairs before and after them. So a point with many pairs is not one long loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch, accumulator, cdiv, power_of_2
from ...jit.steps import Pass
from ...op.plan import Determinism
from .gpu_walk import Config, add_term, block_of, rate_of, with_lost
from .index.gpu_kernels import coordinates, sort_scratch

CHUNK = 64  # pairs per chunk; fewer than this are left at each end of a run
BLOCK = 1024  # pairs per program of ``_runs``


class Problem(NamedTuple):
    """What ``pairs`` computes; ``Config`` says how."""

    B: int
    M: int
    N: int
    D: int
    k: int
    F: int  # 0 without features
    width: tuple[int, int]  # σ, if it is not a tensor
    wide: torch.dtype
    int64: bool


def default_config(p: Problem) -> Config:
    return Config(max(1, min(8, 1024 // max(power_of_2(p.k), block_of(p.F)) * 4 // p.wide.itemsize)), 1)


def candidate_configs(p: Problem) -> list[Config]:
    return list(dict.fromkeys([default_config(p), *(Config(q, w) for q in (8, 4, 16) for w in (1, 2, 4))]))


def fits(p: Problem, config: Config) -> bool:
    return config.block_q * max(power_of_2(p.k), block_of(p.F)) <= 2048 * config.num_warps


def launch(p: Problem, config: Config) -> jit.Launch:
    tiles, block_f = cdiv(p.M, config.block_q), block_of(p.F)
    constants = (
        *(p.D, p.k, power_of_2(p.k), block_f, block_f >= p.F, accumulator(p.wide)),
        *(tl.int64 if p.int64 else tl.int32, config.block_q),
    )
    return jit.Launch((p.B * tiles, 1, 1), (p.M, p.N, p.F, p.B, tiles, *p.width), constants, config.num_warps)


@triton.jit(do_not_specialize=["M", "N", "F", "B", "TILES", "W_HIGH", "W_LOW"])
def _pairs(
    queries,  # [B, M, D]
    points,  # [B, N, D]
    distances,  # [B, M, K]
    indices,  # [B, M, K]
    grad,  # [B, M, F], of the sums; without features, [B, M, K], of the distances
    features,  # [B, N, F]
    sigma,  # [B]
    weights,  # [B, M, K]: softmax weights
    slopes,  # [B, M, K]: ∂L/∂d / d
    keys,  # [B, M, K]: b · N + point, or B · N if there is none
    d_queries,  # [B, M, D]
    d_sigma,  # [B, M]
    M,
    N,
    F,
    B,
    TILES,
    W_HIGH,
    W_LOW,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WHOLE: tl.constexpr,  # one block has all features
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    b, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_q = row < M
    slot = tl.arange(0, BLOCK_K)[:, None]
    at = (b * M + row)[None, :] * K + slot
    in_k = in_q[None, :] & (slot < K)
    i = tl.load(indices + at, mask=in_k, other=-1)
    there = i >= 0
    d = tl.load(distances + at, mask=there, other=0).to(ACC)
    if features is not None:
        rate = rate_of(sigma, b, W_HIGH, W_LOW, ACC)
        least = tl.min(tl.where(there, d, float("inf")), 0)
        least = tl.where(least < float("inf"), least, 0.0)
        e = tl.where(there, tl.exp((least[None, :] - d) * rate), 0.0)
        total = tl.sum(e, 0)
        w = e / tl.where(total > 0, total, 1.0)[None, :]
        if weights is not None:
            tl.store(weights + at, w, mask=in_k)
        if slopes is not None or d_queries is not None or d_sigma is not None:
            f = tl.arange(0, BLOCK_F)[:, None]
            mine = grad + (b * M + row)[None, :] * F
            theirs = features + b * N * F
            if WHOLE:
                g = tl.load(mine + f, mask=in_q[None, :] & (f < F), other=0).to(ACC)
            a = tl.zeros([BLOCK_K, BLOCK_Q], ACC)
            for n in range(K):
                one = tl.sum(tl.where(slot == n, i, 0), 0)
                real = in_q & (one >= 0)
                value, lost = tl.zeros([BLOCK_Q], ACC), tl.zeros([BLOCK_Q], ACC)
                for f0 in range(0, F, BLOCK_F):
                    if not WHOLE:
                        g = tl.load(mine + f0 + f, mask=in_q[None, :] & (f0 + f < F), other=0).to(ACC)
                    row_f = theirs + one.to(OFFSET)[None, :] * F + f0 + f
                    part = tl.sum(g * tl.load(row_f, mask=real[None, :] & (f0 + f < F), other=0).to(ACC), 0)
                    if WHOLE:
                        value += part
                    else:
                        value, lost = add_term(value, lost, part)
                if not WHOLE:
                    value = with_lost(value, lost)
                a = tl.where((slot == n) & real[None, :], value[None, :], a)
            change = w * (a - tl.sum(w * a, 0)[None, :])  # exactly 0 for a single neighbour
            if d_sigma is not None:  # changes sum to 0, so distances may be taken relative to the smallest
                spread = tl.sum(tl.where(there, (d - least[None, :]) * change, 0.0), 0)
                tl.store(d_sigma + b * M + row, spread * rate * rate, mask=in_q)
            slope = -rate * change
    else:
        slope = tl.load(grad + at, mask=there, other=0).to(ACC)
    if slopes is not None or d_queries is not None:
        slope = tl.where(there & (d > 0), slope / tl.where(d > 0, d, 1.0), 0.0)
    if slopes is not None:
        tl.store(slopes + at, slope, mask=in_k)
    if keys is not None:
        tl.store(keys + at, tl.where(there, b * N + i, B * N.to(tl.int64)).to(keys.dtype.element_ty), mask=in_k)
    if d_queries is not None:
        x, y, z = coordinates(queries + b * M * D, row.to(tl.int64), in_q, D)
        px, py, pz = coordinates(points + b * N * D, i, there, D)
        to = d_queries + (b * M + row) * D
        tl.store(to, tl.sum(tl.where(there, slope * (x[None, :] - px), 0.0), 0).to(d_queries.dtype.element_ty), mask=in_q)
        if D > 1:
            tl.store(to + 1, tl.sum(tl.where(there, slope * (y[None, :] - py), 0.0), 0).to(d_queries.dtype.element_ty), mask=in_q)
        if D > 2:
            tl.store(to + 2, tl.sum(tl.where(there, slope * (z[None, :] - pz), 0.0), 0).to(d_queries.dtype.element_ty), mask=in_q)


pairs = jit.kernel(
    _pairs, "points.pairs", default=default_config, candidates=candidate_configs, launch=launch, sizes=("M", "N"),
    batch=("B", "width"), writes=(7, 8, 9, 10, 11), fits=fits,
)  # fmt: skip


class Runs(NamedTuple):
    """Slots of pairs sorted by target: a target's pairs are a run, 0 to 0 if it has none."""

    keys: str  # [P], sorted
    place: str | None  # [P], indices of the sorted pairs; None if they were in order
    bounds: str  # [2, T], begin and end of each run
    pairs: int  # P
    targets: int  # T


class Features(NamedTuple):
    """Σ weights·rows over the run of each target, into `out`."""

    weights: str  # [P]
    rows: str | None  # [R, F], of the other side of a pair
    out: str  # [T, F]
    F: int


class Offsets(NamedTuple):
    """Σ slopes·(here − there) over the run of each target, into `out`."""

    slopes: str  # [P]
    here: str | None  # [T, D], the targets' own coordinates
    there: str | None  # [R, D], of the other side of a pair
    out: str  # [T, D]
    D: int


def add_runs(p: Pass, keys: str, n: int, targets: int) -> Runs:
    """Steps that sort `n` pairs by target; `keys` below `targets` are targets, others are ignored."""
    dtype, same = p.slots[keys].dtype, Determinism.RUN_TO_RUN
    gives = [("keys", [n], dtype), ("place", [n], torch.int64)]
    ordered, place = p.call("torch.sort", _sorted, [keys], gives, promise=same, scratch=n * sort_scratch(dtype.itemsize))
    bounds = p.buffer("bounds", [2, targets], torch.int32, fill=0)
    p.start(_runs, [ordered, bounds], Launch((cdiv(n, BLOCK), 1, 1), (n, targets), (BLOCK,), 4), promise=same)
    return Runs(ordered, place, bounds, n, targets)


def _sorted(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered, place = torch.sort(keys.flatten(), stable=True)
    return ordered, place


def add_sums(
    p: Pass, of: Runs, k: int, source: str | None, features: Features | None, offsets: Offsets | None, writes: Sequence[str]
) -> None:
    """Steps that sum over runs. `source` ``[P]`` is the other side of each pair; None means pair // k."""
    T, n, same = of.targets, of.pairs, Determinism.RUN_TO_RUN
    F, D = 0 if features is None else features.F, 0 if offsets is None else offsets.D
    weights, rows, d_rows = (None, None, None) if features is None else features[:3]
    slopes, here, there, d_here = (None, None, None, None) if offsets is None else offsets[:4]
    chunks, block_f = n // CHUNK, block_of(F)
    tiles_f = max(1, cdiv(F, block_f))
    partial = p.buffer("partial", [chunks, F + D], p.accumulator)
    block_t = max(1, min(8, 512 // block_f))
    takes = [source, weights, rows, slopes, here, there, partial]
    constants = (D, k, block_f, accumulator(p.accumulator), CHUNK)
    launch = Launch((chunks, tiles_f, 1), (T, F), (*constants, max(2, 512 // block_f)), 1)
    p.start(_chunk_sums, [of.keys, of.place, *takes], launch, promise=same)
    grid = (cdiv(T, block_t), tiles_f, 1)
    launch = Launch(grid, (T, F), (*constants, block_t), 1)
    p.start(_run_sums, [of.bounds, of.place, *takes, d_rows, d_here], launch, writes=writes, promise=same)


@triton.jit(do_not_specialize=["P", "T"])
def _runs(
    keys,  # [P], sorted
    bounds,  # [2, T], zeros
    P,
    T,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < P
    key = tl.load(keys + i, mask=here, other=0)
    mine = here & (key < T)
    tl.store(bounds + key, i, mask=mine & (key != tl.load(keys + i - 1, mask=here & (i > 0), other=-1)))
    tl.store(bounds + T.to(tl.int64) + key, i + 1, mask=mine & (key != tl.load(keys + i + 1, mask=i + 1 < P, other=-1)))


@triton.jit
def pair_of(place, source, i, in_i, K: tl.constexpr):
    """The i-th pair in sorted order → its index, and its other side."""
    n = i.to(tl.int64)
    if place is not None:
        n = tl.load(place + i, mask=in_i, other=0)
    if source is not None:
        other = tl.load(source + n, mask=in_i, other=0)
    else:
        other = n // K
    return n, other


@triton.jit(do_not_specialize=["T", "F"])
def _chunk_sums(
    keys,  # [P], sorted
    place,  # [P]
    source,  # [P]
    weights,  # [P]
    rows,  # [R, F]
    slopes,  # [P]
    here,  # [T, D]
    there,  # [R, D]
    partial,  # [chunks, F + D]
    T,
    F,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    chunk = tl.program_id(0)
    key = tl.load(keys + chunk * CHUNK)
    if (key < T) & (key == tl.load(keys + chunk * CHUNK + CHUNK - 1)):
        f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)[:, None]
        acc = tl.zeros([BLOCK_F, BLOCK_P], ACC)
        none = tl.zeros([BLOCK_P], ACC)
        gx, gy, gz = none, none, none
        for t in range(0, CHUNK, BLOCK_P):
            i = chunk * CHUNK + t + tl.arange(0, BLOCK_P)
            in_i = t + tl.arange(0, BLOCK_P) < CHUNK
            n, other = pair_of(place, source, i, in_i, K)
            if weights is not None:
                w = tl.load(weights + n, mask=in_i, other=0)
                value = tl.load(rows + other[None, :] * F + f, mask=in_i[None, :] & (f < F), other=0).to(ACC)
                acc += w[None, :] * value
            if slopes is not None:
                ux, uy, uz = pull(here, key.to(tl.int64) + tl.zeros_like(other), there, other, slopes, n, in_i, D, ACC)
                gx, gy, gz = gx + ux, gy + uy, gz + uz
        to = partial + chunk.to(tl.int64) * (F + D)
        if weights is not None:
            tl.store(to + f, tl.sum(acc, 1, keep_dims=True), mask=f < F)
        if slopes is not None:
            tl.store(to + F, tl.sum(gx, 0))
            if D > 1:
                tl.store(to + F + 1, tl.sum(gy, 0))
            if D > 2:
                tl.store(to + F + 2, tl.sum(gz, 0))


@triton.jit
def pull(here, target, there, other, slopes, n, in_i, D: tl.constexpr, ACC: tl.constexpr):
    """slope·(here − there) of pairs n."""
    slope = tl.load(slopes + n, mask=in_i, other=0)
    live = in_i & (slope != 0)  # also masks non-finite coordinates, whose slope is 0
    x, y, z = coordinates(here, target, live, D)
    px, py, pz = coordinates(there, other, live, D)
    ux = tl.where(live, slope * (x - px).to(ACC), 0.0)
    uy = tl.where(live, slope * (y - py).to(ACC), 0.0)
    return ux, uy, tl.where(live, slope * (z - pz).to(ACC), 0.0)


@triton.jit(do_not_specialize=["T", "F"])
def _run_sums(
    bounds,  # [2, T]
    place,  # [P]
    source,  # [P]
    weights,  # [P]
    rows,  # [R, F]
    slopes,  # [P]
    here,  # [T, D]
    there,  # [R, D]
    partial,  # [chunks, F + D]
    d_rows,  # [T, F]
    d_here,  # [T, D]
    T,
    F,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACC: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    target = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = target < T
    begin = tl.load(bounds + target, mask=in_t, other=0)
    end = tl.load(bounds + T.to(tl.int64) + target, mask=in_t, other=0)
    first, last = tl.cdiv(begin, CHUNK), end // CHUNK  # whole chunks
    some = first < last
    head = tl.where(some, first * CHUNK - begin, end - begin)
    alone = head + tl.where(some, end - last * CHUNK, 0)  # pairs outside of whole chunks
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)[:, None]
    acc = tl.zeros([BLOCK_F, BLOCK_T], ACC)
    none = tl.zeros([BLOCK_T], ACC)
    gx, gy, gz = none, none, none
    lost, lost_x, lost_y, lost_z = acc, none, none, none  # compensated: a point may have any number of pairs
    for t in range(tl.max(alone, 0)):
        in_i = t < alone
        i = tl.where(t < head, begin + t, last * CHUNK + t - head)
        n, other = pair_of(place, source, i, in_i, K)
        if weights is not None:
            w = tl.load(weights + n, mask=in_i, other=0)
            value = tl.load(rows + other[None, :] * F + f, mask=in_i[None, :] & (f < F), other=0).to(ACC)
            acc, lost = add_term(acc, lost, w[None, :] * value)
        if slopes is not None:
            ux, uy, uz = pull(here, target, there, other, slopes, n, in_i, D, ACC)
            gx, lost_x = add_term(gx, lost_x, ux)
            gy, lost_y = add_term(gy, lost_y, uy)
            gz, lost_z = add_term(gz, lost_z, uz)
    for t in range(tl.max(tl.where(some, last - first, 0), 0)):
        in_i = t < last - first
        from_ = partial + (first + t).to(tl.int64) * (F + D)
        if weights is not None:
            acc, lost = add_term(acc, lost, tl.load(from_[None, :] + f, mask=in_i[None, :] & (f < F), other=0))
        if slopes is not None:
            gx, lost_x = add_term(gx, lost_x, tl.load(from_ + F, mask=in_i, other=0))
            if D > 1:
                gy, lost_y = add_term(gy, lost_y, tl.load(from_ + F + 1, mask=in_i, other=0))
            if D > 2:
                gz, lost_z = add_term(gz, lost_z, tl.load(from_ + F + 2, mask=in_i, other=0))
    acc, gx, gy, gz = with_lost(acc, lost), with_lost(gx, lost_x), with_lost(gy, lost_y), with_lost(gz, lost_z)
    if weights is not None:
        tl.store(d_rows + target[None, :] * F + f, acc.to(d_rows.dtype.element_ty), mask=in_t[None, :] & (f < F))
    if slopes is not None:
        in_t = in_t & (tl.program_id(1) == 0)
        to = d_here + target * D
        tl.store(to, gx.to(d_here.dtype.element_ty), mask=in_t)
        if D > 1:
            tl.store(to + 1, gy.to(d_here.dtype.element_ty), mask=in_t)
        if D > 2:
            tl.store(to + 2, gz.to(d_here.dtype.element_ty), mask=in_t)
