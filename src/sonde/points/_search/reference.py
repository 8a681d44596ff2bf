"""Neighbours in plain PyTorch: the family's definition of distances, ties and missing neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ...op.checks import readable
from ...op.dtypes import accumulator

CHUNK = 2**24  # most distances in memory at a time; the search needs no gradient
WEIGHTLESS = {torch.float32: 103.0, torch.float64: 744.0}  # exp(−x) is 0 for x beyond these


def squared(parts: tuple[Tensor, ...]) -> Tensor:
    """(dx·dx + dy·dy) + dz·dz, with every operation rounded."""
    total = parts[0] * parts[0]
    for d in parts[1:]:
        total = total + d * d
    return total


def root(x: Tensor) -> Tensor:
    """The correctly rounded square root. torch's is not on every CPU: with MKL, one root in six differs in the last bit.

    For float32, rounding a float64 root is exact. For float64, torch's root s is at most one step off; the sign of
    (s ± half a step)² − x, with s² held exactly as a sum of two numbers, says which way to correct it.
    """
    if x.dtype == torch.float32:
        return x.double().sqrt().float()
    found = x.sqrt()
    if x.device.type != "cpu":
        return found
    small, large = x.detach() < 2.0**-600, x.detach() > 2.0**600  # rescale these: products below would under- or overflow
    square = torch.where(small, x.detach() * 2.0**400, torch.where(large, x.detach() * 2.0**-400, x.detach()))
    s = torch.where(small, found.detach() * 2.0**200, torch.where(large, found.detach() * 2.0**-200, found.detach()))
    above, below = torch.nextafter(s, 2 * s) - s, s - torch.nextafter(s, 0 * s)
    split = s * (2.0**27 + 1)
    head = split - (split - s)
    tail, product = s - head, s * s
    lost = ((head * head - product) + 2 * head * tail) + tail * tail  # s² is product + lost
    left = square - product
    step = torch.where(left - s * above > lost, above, torch.where(left + s * below <= lost, -below, 0))
    step = torch.where(small, step * 2.0**-200, torch.where(large, step * 2.0**200, step))
    return found + torch.where(s > 0, step, 0)


def segment(offsets: Tensor, count: int) -> Tensor:
    """The segment of each of `count` rows, from 1; 0 and ``len(offsets)`` are outside of all segments."""
    return torch.searchsorted(offsets, torch.arange(count, dtype=offsets.dtype, device=offsets.device), right=True)


_searching: ContextVar[torch.dtype | None] = ContextVar("sonde_searching", default=None)


@contextmanager
def searching_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Search in `dtype`, while distances and sums use the dtype of the arguments.

    Tests widen arguments to get an exact result; with this, its neighbours are still those of the narrow arguments.
    """
    token = _searching.set(dtype)
    try:
        yield
    finally:
        _searching.reset(token)


@torch.no_grad()
def nearest(
    queries: Tensor, points: Tensor, query_offsets: Tensor | None, point_offsets: Tensor | None, k: int | None, bound: float
) -> tuple[Tensor, Tensor]:
    """Indices of the k nearest points with d² ≤ `bound` (k=None: of all), ``[B, M, k]``, and the number of all, ``[B, M]``.

    Ascending by (d², index), padded with −1. Points at a non-finite distance are not neighbours.
    """
    if not torch.compiler.is_compiling() and _searching.get() is not None:
        queries, points = queries.to(_searching.get()), points.to(_searching.get())
    M, N = queries.shape[1], points.shape[1]
    mine = None if query_offsets is None else segment(query_offsets, M)
    rows = max(1, CHUNK // max(1, N))
    if rows >= M:
        return _nearest(queries, points, mine, point_offsets, k, bound)
    cut = (None,) * -(-M // rows) if mine is None else mine.split(rows)
    pieces = [_nearest(q, points, of, point_offsets, k, bound) for q, of in zip(queries.split(rows, 1), cut)]
    longest = max(indices.shape[-1] for indices, _ in pieces)
    return torch.cat([_padded(i, longest) for i, _ in pieces], 1), torch.cat([count for _, count in pieces], 1)


def _nearest(queries, points, mine, point_offsets, k: int | None, bound: float) -> tuple[Tensor, Tensor]:
    N, known = points.shape[1], readable(queries, points)
    d2 = squared(tuple(q[:, :, None] - p[:, None] for q, p in zip(queries.unbind(-1), points.unbind(-1))))
    seen = (d2 <= bound) & (d2 < torch.inf)  # false for NaN
    if mine is not None:
        theirs = segment(point_offsets, N)
        inside = (mine > 0) & (mine < point_offsets.shape[0])
        seen = seen & (mine[:, None] == theirs) & inside[:, None]
    d2, count = torch.where(seen, d2, torch.inf), seen.sum(-1)
    if k is None:  # the longest list, if it can be read
        k = (int(count.max()) if count.numel() else 0) if known else N
    if known and d2.dtype == torch.float32 and k < N:  # same result as the sort below, but faster
        keys = (d2.view(torch.int32).long() << 32) | torch.arange(N, device=d2.device)
        order = keys.topk(k, largest=False).indices
        d2 = d2.gather(-1, order)
    else:
        d2, order = d2.sort(dim=-1, stable=True)
    return _padded(torch.where(d2 < torch.inf, order, -1)[..., :k], k), count


def _padded(indices: Tensor, k: int) -> Tensor:
    missing = k - indices.shape[-1]
    return torch.nn.functional.pad(indices, (0, missing), value=-1) if missing else indices


def rows_at(x: Tensor, indices: Tensor) -> Tensor:
    """``x[b, indices[b]]`` of ``[B, N, C]`` → ``[B, M, k, C]``; index −1 reads an appended row of zeros.

    No masking by multiplication, which would turn inf into NaN, and gradients of missing neighbours go to that row.
    """
    B, N, C = x.shape
    padded = torch.cat([x, x.new_zeros(B, 1, C)], 1)
    at = torch.where(indices < 0, N, indices).flatten(1)[..., None].expand(-1, -1, C)
    return padded.gather(1, at).unflatten(1, indices.shape[1:])


def distances(queries: Tensor, points: Tensor, indices: Tensor) -> Tensor:
    """Distances from every query to its listed points, +inf for index −1; at d = 0 the subgradient is 0."""
    found = indices >= 0
    parts = (queries[:, :, None] - rows_at(points, indices)).unbind(-1)
    d2 = squared(tuple(torch.where(found, d, 1) for d in parts))
    d = torch.where(d2 > 0, root(torch.where(d2 > 0, d2, 1)), 0)
    return torch.where(found, d, torch.inf)


def aggregate(
    queries: Tensor, points: Tensor, features: Tensor, indices: Tensor, sigma: Tensor | None, width: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j w_ij f_j with w = softmax(−d/σ) over the listed points; their distances; and softmax statistics ``[B, M, 2]``.

    These are the smallest distance n and s = 1/Σ exp((n − d)/σ), so that w = exp((n − d)/σ)·s; both are 0 for an empty list.
    """
    wide = accumulator(queries, features, sigma)
    found = indices >= 0
    d = distances(queries, points, indices)
    s = width if sigma is None else sigma.double()[:, None, None]  # may be out of float32's range
    near = torch.where(found, d.to(wide), 0)
    least = torch.where(found, d.detach().to(wide), torch.inf)
    least = least.amin(-1, keepdim=True) if indices.shape[-1] else least.new_full((*least.shape[:-1], 1), torch.inf)
    least = torch.where(least < torch.inf, least, 0)
    gap = (least - near).double()
    seen = found & (gap >= -WEIGHTLESS[wide] * s)  # elsewhere exp is 0, and gap/σ may overflow
    none = 0 * (gap - gap.detach()).to(wide)  # a zero weight still multiplies its gradient, as in torch's softmax
    e = torch.where(seen, (torch.where(seen, gap, 0) / s).to(wide).exp(), torch.where(found, none, 0))
    total = e.sum(-1, keepdim=True)
    some = total > 0
    w = e / torch.where(some, total, 1)
    out = torch.where(found[..., None], w[..., None] * rows_at(features.to(wide), indices), 0).sum(2)
    share = torch.where(some, 1 / torch.where(some, total, 1), 0)
    return out.to(features.dtype), d, torch.cat([least, share], -1)
