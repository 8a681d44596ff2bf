"""``power_attention`` on CPUs: torch's BLAS, several heads at a time; weights within chunks, φ of a block of rows across them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...jit.steps import Pass
from ...op.cpu_steps import CpuPass, by_threads
from ...op.dtypes import accumulator
from ...op.plan import Determinism
from .._dense.reference import residual_dtype
from .._sympow.basis import BLOCK, default_tile, dimension
from .._sympow.cpu import CpuBasis
from .cpu_chunks import ROWS, WEIGHTS, State, chunks_of, fold, heads_first, heads_last, heads_of, outputs
from .cpu_gradients import differentiate, gradients_of
from .reference import LEAST_GATE, least_share, refuse_growth, rows_of_chunk


@by_threads
def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor | None, z: Tensor | None, norms: Tensor | None,
    power: int, scale: float | None, chunk_size: int | None, return_state: bool, tf32: bool,
) -> Pass:  # fmt: skip
    wide = accumulator(q, k, v, log_gate, S, z)
    given = dict(q=q, k=k, v=v, log_gate=log_gate, S=S, z=z, norms=norms)
    p = CpuPass(wide, given)
    (B, T, hq, d), (h, e), dtype = q.shape, v.shape[2:], q.dtype
    D, size, least = dimension(d, power, default_tile(d)), rows_of_chunk(T, d, e, power, chunk_size), least_share(wide, q, scale)
    basis, chunks, lost = CpuBasis(d, power, default_tile(d), True, wide), -(-T // size), residual_dtype(wide, q, k, v)
    state = [(B, h, D, e), (B, h, D), (B, h)] if return_state else [(B, T, 0)] * 3
    kept = [(B, chunks, h, D, e), (B, chunks, h, D)] if chunks > 1 else [(B, T, 0)] * 2
    dtypes = dtype, wide, wide, wide, wide, lost or dtype, wide, wide
    shapes: list[tuple[int, ...]] = [(B, T, hq, e), *state, (B, T, hq), (B, T, hq, e) if lost else (B, T, 0), *kept]
    allocators = [p.allocator(shape, x) for shape, x in zip(shapes, dtypes)]

    def run(
        q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor | None, z: Tensor | None, norms: Tensor | None
    ) -> tuple[Tensor, ...]:
        refuse_growth("power_attention", "log_gate", log_gate)
        heads = heads_of(q, k, v, log_gate, wide)
        begin = None if S is None else [x.detach().to(wide).flatten(0, 1) for x in (S, z, norms) if x is not None]
        out, *made, rates, left, states, moments = (allocate() for allocate in allocators)
        found, sums = k.new_empty(*heads.x.shape[:3], e, dtype=wide), k.new_empty(heads.x.shape[:3], dtype=wide)
        for part in heads.bundles(size, D):
            head = torch.arange(part.start, part.stop, device="cpu")
            past, before = (None, None) if begin is None else (State(begin[0][part], begin[1][part]), begin[2][part])
            end = State(made[0].flatten(0, 1)[part], made[1].flatten(0, 1)[part]) if return_state else None
            for n, chunk in enumerate(chunks_of(heads.some(part), size, basis)):
                if chunks > 1:
                    states[head // h, n, head % h], moments[head // h, n, head % h] = past or (0, 0)
                values, rate = found[part, :, chunk.rows], sums[part, :, chunk.rows]
                for rows in chunk.blocks():
                    values[:, :, rows], rate[:, :, rows] = outputs(chunk, rows, past, before, least)
                if return_state or chunk.rows.stop < T:
                    past, own = fold(chunk, past, end if chunk.rows.stop == T else None), chunk.lengths[:, -1]
                    before = own if before is None else before * chunk.whole + own
            if end is not None:
                if past is not end:  # there is no token
                    end.S[:], end.z[:] = past or (0, 0)
                made[2].flatten(0, 1)[part] = 0 if before is None else before
        values = heads_last(found.flatten(0, 1), B, hq)
        out.copy_(values)
        rates.copy_(heads_last(sums.flatten(0, 1), B, hq))
        if lost:
            left.copy_(values - out.to(wide))
        return out, *made, rates, left, states, moments

    names = ("out", "S", "z", "norms", "rates", "lost", "states", "moments")
    takes = [name if t is not None else None for name, t in given.items()]
    rows = sum(x.numel() for x in (q, k, v)) + 2 * B * T * hq * e
    scratch = (rows + 3 * BLOCK + 3 * max(WEIGHTS, (hq // max(1, h)) * min(ROWS, T) * size)) * wide.itemsize
    made = p.call(
        "power_attention", _without_autocast(run), takes, list(zip((f"new {n}" for n in names), shapes, dtypes)),
        writes=["out", "S", "z", "norms"] if return_state else ["out"], scratch=scratch, promise=Determinism.RUN_TO_RUN,
    )  # fmt: skip
    return p.returns(*made)


@by_threads
def backward_pass(
    d_out: Tensor, d_S: Tensor, d_z: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor | None,
    z: Tensor | None, norms: Tensor | None, power: int, scale: float | None, chunk_size: int | None, return_state: bool,
    tf32: bool, out: Tensor, rates: Tensor, lost: Tensor, states: Tensor, moments: Tensor, *, needs: Sequence[bool],
    deterministic: bool,
) -> Pass:  # fmt: skip
    wide = accumulator(q, k, v, log_gate, S, z)
    inputs = dict(q=q, k=k, v=v, log_gate=log_gate, S=S, z=z)
    plain = dict(power=None, scale=None, chunk_size=None, return_state=None, tf32=None)
    saved = dict(out=out, rates=rates, lost=lost, states=states, moments=moments)
    p = CpuPass(wide, dict(d_out=d_out, d_S=d_S, d_z=d_z, **inputs, norms=norms, **plain, **saved))
    (B, T, hq, d), (h, e) = q.shape, v.shape[2:]
    size, gated = rows_of_chunk(T, d, e, power, chunk_size), needs[3] and log_gate is not None
    D, basis, chunks = dimension(d, power, default_tile(d)), CpuBasis(d, power, default_tile(d), True, wide), -(-T // size)
    wanted = [(name, t.shape, t.dtype) for (name, t), need in zip(inputs.items(), needs) if need and t is not None]

    def run(
        grad: Tensor, d_S: Tensor, d_z: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor | None,
        z: Tensor | None, out: Tensor, rates: Tensor, lost: Tensor, states: Tensor, moments: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        heads = heads_of(q, k, v, log_gate, wide)
        o = out.detach().to(wide) + (lost.detach().to(wide) if lost.numel() else 0)
        given = gradients_of(heads, grad.detach().to(wide), o, rates.detach())
        begin = None if S is None or z is None else State(*(x.detach().to(wide).flatten(0, 1) for x in (S, z)))
        end = State(*(x.detach().to(wide).flatten(0, 1) for x in (d_S, d_z))) if return_state else None
        d_x, d_k, d_v = (torch.zeros_like(t) for t in heads[:3])
        d_gates = torch.zeros(heads.k.shape[:2], dtype=torch.float64, device="cpu")
        d_begin = None if begin is None else State(*(torch.empty_like(t) for t in begin))
        for part in heads.bundles(size, D):
            head = torch.arange(part.start, part.stop, device="cpu")
            later = None if end is None else State(end.S[part], end.z[part])
            for n, chunk in reversed(list(enumerate(chunks_of(heads.some(part), size, basis)))):
                past = None if begin is None else State(begin.S[part], begin.z[part])
                if chunks > 1:
                    kept = (t.detach()[head // h, n, head % h].to(wide) for t in (states, moments))
                    past = State(*kept) if n or begin is not None else None
                own, gates = given.some(part, chunk.rows), d_gates[part, chunk.rows] if gated else None
                made = d_x[part, :, chunk.rows], d_k[part, chunk.rows], d_v[part, chunk.rows]
                later = differentiate(chunk, own, past, later, *made, gates)
            if d_begin is not None:
                d_begin.S[part], d_begin.z[part] = later or (0, 0)
        if gated and log_gate is not None:
            d_gates.masked_fill_(heads_first(log_gate.detach()) < LEAST_GATE, 0)
        found = dict(q=heads_last(d_x.flatten(0, 1), B, hq))
        found |= {n: heads_last(t, B, h) for n, t in dict(k=d_k, v=d_v, log_gate=d_gates).items()}
        found |= {} if d_begin is None else {n: t.unflatten(0, (B, h)) for n, t in d_begin._asdict().items()}
        return tuple(found[name].to(dtype).contiguous() for name, _, dtype in wanted)

    takes = ["d_out", "d_S", "d_z", *(n if t is not None else None for n, t in inputs.items()), *saved]
    total = sum(t.numel() for t in (q, k, v, log_gate, S, z, q) if t is not None)
    made = p.call(
        "power_attention_gradients", _without_autocast(run), takes, [(f"d_{n} new", shape, dtype) for n, shape, dtype in wanted],
        writes=[n for n, _, _ in wanted], scratch=(6 * BLOCK + 2 * total) * wide.itemsize, promise=Determinism.RUN_TO_RUN,
    )  # fmt: skip
    return p.returns(*made)


def _without_autocast(run: Any) -> Any:
    def plain(*args: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return run(*args)

    return plain
