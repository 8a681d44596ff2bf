"""Named inputs of ``power_attention``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._sympow.basis import default_tile, dimension
from .._sympow.reference import power_of
from . import reference

PIECE = 1024  # tokens

SMALL = {
    "odd_sizes": dict(B=2, T=13, d=5, heads=3),
    "hostile": dict(B=1, T=9, d=4, heads=1, layout="hostile"),
    "one_pixel": dict(B=1, T=1, d=1, heads=1),
    "chunks": dict(B=2, T=45, d=8, heads=2, chunk=16),
    "uneven_chunks": dict(B=1, T=37, d=20, heads=1, groups=2, e=7, chunk=15, begun=True, returned=True),
    "ungated": dict(B=1, T=40, d=16, heads=2, chunk=32, gated=False),
    "grouped": dict(B=2, T=33, d=16, heads=2, groups=3, e=9, chunk=16),
    "decoding": dict(B=2, T=1, d=8, heads=2, groups=2, begun=True, returned=True),
    "fourth": dict(B=1, T=11, d=4, heads=2, power=4, chunk=8, begun=True, returned=True),
    "fourth_at_once": dict(B=1, T=19, d=40, heads=1, power=4),
    "small_tiles": dict(B=1, T=21, d=6, heads=1, chunk=8, begun=True, returned=True),
    "no_batch": dict(B=0, T=3, d=8, heads=2, begun=True, returned=True),
    "no_rows": dict(B=1, T=0, d=8, heads=2, begun=True, returned=True),
}
BENCH = {
    "d64_4k": dict(B=8, T=4096, d=64, heads=16),
    "d64_16k": dict(B=2, T=16384, d=64, heads=16),
    "d64_64k": dict(B=1, T=65536, d=64, heads=16),
    "d128_16k": dict(B=2, T=16384, d=128, heads=16),
    "decoding": dict(B=8, T=1, d=64, heads=16, begun=True, returned=True),
    "d64_8k": dict(B=1, T=8192, d=64, heads=4),  # the shortest that is cut into chunks; for CPUs
}
TARGETS: list[dict[str, Any]] = [
    dict(sizes=dict(B=1, T=100, d=32, heads=2, chunk=32, returned=True), dtype="float32", everywhere=True),
    dict(sizes=dict(B=1, T=4096, d=64, heads=2, chunk=1024), dtype="bfloat16"),
    dict(sizes=dict(B=1, T=2048, d=128, heads=2, chunk=1024, begun=True, returned=True), dtype="bfloat16"),
    dict(sizes=dict(B=1, T=200, d=80, heads=1, groups=3, e=33, chunk=128), dtype="float16"),
    dict(sizes=dict(B=1, T=100, d=32, heads=2, chunk=32, begun=True), dtype="float64"),
    dict(sizes=dict(B=1, T=1, d=64, heads=2, begun=True, returned=True), dtype="bfloat16", everywhere=True),
    dict(sizes=dict(B=1, T=70, d=16, heads=1, power=4, chunk=32), dtype="bfloat16"),
    dict(sizes=dict(B=1, T=300, d=256, heads=1), dtype="bfloat16"),
    dict(sizes=dict(B=1, T=100, d=32, heads=2, chunk=32, begun=True, wide=True), dtype="bfloat16"),
]


def make(
    B: int, T: int, d: int, *, heads: int = 2, groups: int = 1, e: int | None = None, power: int = 2, chunk: int | None = None,
    gated: bool = True, begun: bool = False, returned: bool = False, wide: bool = False, layout: str = "",
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of ``power_attention``; sizes that other operators have are ignored."""
    g = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    q, k, v = random(B, T, heads * groups, d), random(B, T, heads, d), random(B, T, heads, e or d)
    own = q.unflatten(2, (heads, groups)).sum(3)  # if a query is at right angles to all its keys, its result is rounding alone
    k = k + own if power > 2 else torch.cat([k[:, :1] + own[:, :1], k[:, 1:]], 1)  # with power 2, only the first has too few keys
    gate = -0.05 - torch.rand(B, T, heads, device=device, generator=g) * (8 / max(8, T)) if gated else None
    if layout == "hostile":  # values far apart in size
        v[..., ::2] *= 30
    state = None
    if begun:  # with the state after 5 tokens
        phi = power_of(random(B, heads, 5, d), power, default_tile(d), True)
        state = phi.mT @ random(B, heads, 5, e or d), phi.sum(2), phi.square().sum(-1).sqrt().sum(-1)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    sums = torch.float64 if wide or dtype == torch.float64 else torch.float32
    begin = None if state is None else tuple(x.to(sums) for x in state)
    return q, k, v, None if gate is None else gate.to(sums), power, None, chunk, begin, returned


def eager(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, power: int, scale: float | None, chunk_size: int | None, state: Any,
    return_state: bool,
) -> Any:  # fmt: skip
    """What a user of plain PyTorch writes: the quadratic form, and φ only for a state."""
    groups, tile = q.shape[2] // k.shape[2], default_tile(q.shape[3])
    scale, wide = q.shape[-1] ** -0.5 if scale is None else scale, torch.promote_types(q.dtype, torch.float32)
    x, y, values = (t.transpose(1, 2) for t in (q, k, v))
    keys, values_of = y.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    weights = ((x @ keys.mT) * scale) ** power
    G = None if log_gate is None else log_gate.to(wide).cumsum(1).transpose(1, 2)
    if G is not None:
        each = G.repeat_interleave(groups, 1)
        weights = weights * (each[..., :, None] - each[..., None, :]).exp()
    weights = weights.tril()
    total, norm = weights @ values_of.to(weights.dtype), weights.sum(-1, keepdim=True)
    if state is not None:
        phi = power_of(x.to(wide), power, tile, True) * scale**power
        if G is not None:
            phi = phi * each[..., None].exp()
        total = total + phi @ state[0].repeat_interleave(groups, 1)
        norm = norm + phi @ state[1][..., None].repeat_interleave(groups, 1)
    out = (total / norm).transpose(1, 2).to(q.dtype)
    if not return_state:
        return out
    phi = power_of(y.to(wide), power, tile, True)
    if G is not None:
        phi = phi * (G[..., -1:] - G)[..., None].exp()
    made = [phi.mT @ values.to(wide), phi.sum(-2)]
    if state is not None:
        kept = torch.ones(1, 1, device=q.device) if G is None else G[..., -1].exp()
        made = [made[0] + state[0] * kept[..., None, None], made[1] + state[1] * kept[..., None]]
    return out, *made


def definition(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, power: int, scale: float | None, chunk_size: int | None, state: Any,
    return_state: bool,
) -> Tensor:  # fmt: skip
    """The reference, PIECE tokens at a time, passing the state from piece to piece: a long sequence has too many weights.

    Without states (power 4 above d = 32) the sequence is not cut.
    """
    T, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    if power > 2 and q.shape[3] > reference.WIDEST_STATE:
        return reference.power_attention(q, k, v, log_gate, None, None, None, power, scale, chunk_size, False, False)[0]
    B, h, d, e = q.shape[0], *k.shape[2:], v.shape[3]
    D = dimension(d, power, default_tile(d))
    empty = (q.new_zeros(B, h, D, e, dtype=wide), q.new_zeros(B, h, D, dtype=wide), q.new_zeros(B, h, dtype=wide))
    S, z, norms = state or empty
    found = []
    for start in range(0, T, PIECE):
        pieces = [None if x is None else x[:, start : start + PIECE] for x in (q, k, v, log_gate)]
        rest = (S, z, norms, power, scale, chunk_size, True, False)
        out, S, z, norms, *_ = checkpoint(reference.power_attention, *pieces, *rest, use_reentrant=False)
        found.append(out)
    return torch.cat(found, 1)


def count(
    B: int,
    T: int,
    d: int,
    heads: int = 2,
    groups: int = 1,
    e: int | None = None,
    power: int = 2,
    chunk: int | None = None,
    **_: Any,
) -> dict[str, int]:
    """Elements that must move at least once, and terms that are added: two products with φ for each token."""
    e, D = e or d, dimension(d, power, default_tile(d))
    return dict(
        read=B * T * heads * (groups * d + d + e), written=B * T * heads * groups * e, taps=B * T * heads * (groups + 1) * D * e
    )
