"""Named inputs of ``attention``, used by tests, benchmarks, the tuner and the tables of the documentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SMALL = {
    "odd_sizes": dict(B=2, T=13, S=9, d=5, heads=3),
    "hostile": dict(B=1, T=7, S=33, d=4, heads=1, layout="hostile"),
    "one_pixel": dict(B=1, T=1, S=1, d=1, heads=1),
    "causal": dict(B=1, T=45, S=45, d=6, heads=2, causal=True),
    "causal_longer": dict(B=1, T=20, S=37, d=8, heads=1, causal=True),
    "causal_shorter": dict(B=1, T=37, S=20, d=8, heads=1, causal=True),
    "grouped": dict(B=2, T=11, S=18, d=16, heads=2, groups=3, e=7),
    "tokens_first": dict(B=2, T=19, S=19, d=16, heads=2, causal=True, layout="tokens first"),
    "no_batch": dict(B=0, T=3, S=4, d=8, heads=2),
    "no_rows": dict(B=1, T=0, S=4, d=8, heads=2),
    "no_keys": dict(B=1, T=3, S=0, d=8, heads=2),
}
BENCH = {
    "d64_4k": dict(B=8, T=4096, S=4096, d=64, heads=16, causal=True),
    "d64_16k": dict(B=2, T=16384, S=16384, d=64, heads=16, causal=True),
    "d128_4k": dict(B=8, T=4096, S=4096, d=128, heads=16, causal=True),
    "d64_cross": dict(B=8, T=4096, S=4096, d=64, heads=16),
    "d64_1k": dict(B=1, T=1024, S=1024, d=64, heads=16, causal=True),  # for CPUs
}
TARGETS: list[dict[str, Any]] = [
    dict(sizes=dict(B=1, T=100, S=100, d=64, heads=2, causal=True), dtype="float32", everywhere=True),
    dict(sizes=dict(B=1, T=128, S=128, d=64, heads=2, causal=True), dtype="bfloat16"),
    dict(sizes=dict(B=1, T=128, S=128, d=128, heads=2), dtype="bfloat16"),
    dict(sizes=dict(B=1, T=100, S=90, d=256, heads=2, causal=True), dtype="float16"),
    dict(sizes=dict(B=1, T=100, S=90, d=80, heads=1, groups=3, e=33), dtype="bfloat16"),
    dict(sizes=dict(B=1, T=30, S=20, d=64, heads=1), dtype="float64"),
    dict(sizes=dict(B=1, T=30, S=20, d=64, heads=1, wide=True), dtype="bfloat16"),
]


def make(
    B: int, T: int, S: int, d: int, *, heads: int = 2, groups: int = 1, e: int | None = None, causal: bool = False,
    wide: bool = False, layout: str = "", dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of ``attention``; sizes that other operators have are ignored."""
    g = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    q, k, v = random(B, heads * groups, T, d), random(B, heads, S, d), random(B, heads, S, e or d)
    if layout == "hostile":  # values far apart in size
        v[..., ::2] *= 30
    if layout == "negative":  # all logits about -1e4
        q[..., 0], k[..., 0] = 100, -100 * d**0.5
    made = [x.to(dtype) for x in (q, k)] + [v.to(torch.float64 if wide else dtype)]
    if layout == "tokens first":
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    return (*made, causal, None, False)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, return_lse: bool) -> Tensor:
    """What a user of plain PyTorch writes."""
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def count(B: int, T: int, S: int, d: int, heads: int = 2, groups: int = 1, causal: bool = False, **_: Any) -> dict[str, int]:
    """Elements that must move at least once, and terms that are added."""
    pairs = T * S // 2 if causal else T * S
    return dict(
        read=B * heads * d * (groups * T + 2 * S), written=B * heads * groups * T * d, taps=2 * B * heads * groups * pairs * d
    )
