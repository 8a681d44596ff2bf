"""``attention`` on CPUs: a block of queries at a time, torch's BLAS, weights recomputed for the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu_steps import CpuPass, by_threads
from ...op.dtypes import accumulator
from ...op.plan import Determinism
from .._dense.reference import residual_dtype
from .reference import scale_of

BLOCK = 1 << 20  # logits at a time


def _wide(wide: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [x.detach().to(wide) for x in tensors]


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    """Batched ``a @ b``; autocast does not touch calls with `out`."""
    return torch.bmm(a, b, out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, int, Tensor | None]]:
    """Blocks of query rows, how many keys a block may see, and the mask of those that each row does not."""
    T, S = q.shape[2], k.shape[2]
    step = max(1, min(256, BLOCK // max(1, S * q.shape[1])))
    for start in range(0, T, step):
        rows = slice(start, min(T, start + step))
        seen = min(S, rows.stop) if causal else S
        hidden = torch.arange(seen) > torch.arange(rows.start, rows.stop)[:, None] if causal else None
        yield rows, seen, hidden


def _grouped(x: Tensor, h: int) -> Tensor:
    """[hq, rows, d] → [h, groups · rows, d]: heads that share keys are put together."""
    return x.reshape(h, len(x) // max(1, h) * x.shape[1], x.shape[2])


def _logits(q: Tensor, k: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """Logits [hq, rows, S] of queries [hq, rows, d] and keys [h, S, d]."""
    out = _multiplied(_grouped(q, len(k)), k.mT).mul_(scale).view(len(q), q.shape[1], k.shape[1])
    return out if hidden is None else out.masked_fill_(hidden, -torch.inf)


@by_threads
def forward_pass(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool) -> Pass:
    p = CpuPass(accumulator(q, k, v), dict(q=q, k=k, v=v))
    factor = scale_of(q, scale)
    rows, dtype, wide, h, e = tuple(q.shape[:3]), q.dtype, p.accumulator, k.shape[1], v.shape[3]
    lost = residual_dtype(accumulator(q, k, v), q, k, v)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = torch.empty(*rows, e, dtype=wide), torch.empty(rows, dtype=wide)
        x, y, z = _wide(wide, q, k, v)
        for b in range(rows[0]):
            for block, seen, hidden in _blocks(q, k, causal):
                logits = _logits(x[b, :, block], y[b, :, :seen], hidden, factor)
                lse[b, :, block] = logits.logsumexp(-1)
                weights = _grouped(logits.softmax(-1), h)
                out[b, :, block] = _multiplied(weights, z[b, :, :seen]).view(rows[1], logits.shape[1], e)
        rounded = out.to(dtype)
        return rounded, lse, (out - rounded.to(wide)).to(lost) if lost else out.new_empty(*rows, 0, dtype=dtype)

    made = [("out", (*rows, e), dtype), ("lse", rows, wide), ("lost", (*rows, e if lost else 0), lost or dtype)]
    scratch = 3 * BLOCK * wide.itemsize
    found = p.call("attention", run, ["q", "k", "v"], made, writes=["out"], scratch=scratch, promise=Determinism.RUN_TO_RUN)
    return p.returns(*found)


@by_threads
def backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool, out: Tensor, lse: Tensor,
    lost: Tensor, *, needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    p = CpuPass(
        accumulator(q, k, v), dict(grad=grad, q=q, k=k, v=v, causal=None, scale=None, tf32=None, out=out, lse=lse, lost=lost)
    )
    factor = scale_of(q, scale)
    wide, B, hq, h = p.accumulator, q.shape[0], q.shape[1], k.shape[1]
    wanted = [(n, x.shape, x.dtype) for n, x, need in zip("qkv", (q, k, v), needs) if need]

    def run(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lost: Tensor) -> tuple[Tensor, ...]:
        g, x, y, z, o, level = _wide(wide, grad, q, k, v, out, lse)
        o = o + lost.detach().to(wide) if lost.shape[3] else o
        level = level + (level - level)  # NaN if the row's lse is infinite or NaN
        found = {name: torch.zeros(shape, dtype=wide) for name, shape, _ in wanted}
        for b in range(B):
            for block, seen, hidden in _blocks(q, k, causal):
                keys, values, queries, incoming = y[b, :, :seen], z[b, :, :seen], x[b, :, block], g[b, :, block]
                weights = (_logits(queries, keys, hidden, factor) - level[b, :, block, None]).exp_()
                if "v" in found:
                    found["v"][b, :, :seen] += _multiplied(_grouped(weights, h).mT, _grouped(incoming, h))
                if "q" in found or "k" in found:
                    toward = _multiplied(_grouped(incoming, h), values.mT).view(hq, incoming.shape[1], seen)
                    dots = (incoming * o[b, :, block]).sum(-1, keepdim=True)
                    weights = weights.mul_(toward.sub_(dots)).mul_(factor)
                if "q" in found:
                    found["q"][b, :, block] = _multiplied(_grouped(weights, h), keys).view(hq, queries.shape[1], keys.shape[2])
                if "k" in found:
                    found["k"][b, :, :seen] += _multiplied(_grouped(weights, h).mT, _grouped(queries, h))
        return tuple(found[name].to(dtype) for name, _, dtype in wanted)

    takes, gives = ["grad", "q", "k", "v", "out", "lse", "lost"], [(f"d_{n}", shape, dtype) for n, shape, dtype in wanted]
    writes = [n for n, _, _ in wanted]
    made = p.call(
        "attention_gradients", run, takes, gives, writes=writes, scratch=4 * BLOCK * wide.itemsize, promise=Determinism.RUN_TO_RUN
    )
    return p.returns(*made)
