"""Triton implementation of ``power_attention``: states between chunks, and weights within them.

With power 2, tiles of 4 or 8 and d and e up to 128 (64 in float64), this folder's kernels do everything on matrix units; their
states leave out the roots of φ. Otherwise the kernels of symmetric powers compute the part that goes through states
(``gpu_any_power.py``), in the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...jit.launch import has_tf32, is_hopper, vector_of
from ...jit.steps import Pass
from ...op import plan
from ...op.dtypes import accumulator
from .._dense.gpu import common_dtype, operand
from .._dense.reference import residual_dtype
from .._sympow.basis import default_tile, dimension
from .._sympow.gpu import basis
from . import gpu_any_power, gpu_launches
from .gpu_configs import Past, Problem, Strides
from .reference import kept_dtype, least_share, rows_of_chunk

FORCE_INT64 = False
KEPT = ("S", "z", "norms")


def rows_of(p: Pass, name: str) -> tuple[str, Strides]:
    """A slot with the argument's values and contiguous rows (a copy if needed), and its strides: batch, head and row."""
    slot, t = operand(p, name)
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        return p.copy(name, Tensor.contiguous), (t.shape[1] * t.shape[2] * t.shape[3], t.shape[3], t.shape[2] * t.shape[3])
    return slot, (t.stride(0), t.stride(2), t.stride(1))


def problem_of(
    p: Pass, names: Sequence[str], power: int, scale: float | None, chunk_size: int | None, return_state: bool, tf32: bool
) -> tuple[Problem, dict[str, str]]:
    """The problem that launches on these arguments solve, and the arguments' slots."""
    q, v = cast(Tensor, p.given["q"]), cast(Tensor, p.given["v"])
    gate, S = p.given["log_gate"], p.given["S"]
    (B, T, hq, d), (h, e) = q.shape, v.shape[2:]
    found = {name: rows_of(p, name) for name in names}
    strides: Any = [found[name][1] if name in found else (0, 0, 0) for name in ("q", "k", "v", "out", "grad")]
    C, tile, wide = rows_of_chunk(T, d, e, power, chunk_size), default_tile(d), p.accumulator
    common = common_dtype(*(p.slots[slot].dtype for name, (slot, _) in found.items() if name != "out"))
    if wide == torch.float64:  # of gates or a state, perhaps
        common = wide
    elif common == torch.float16:  # weights and states would overflow, so multiply in tf32, which has as many digits
        common, tf32 = torch.float32, has_tf32(p.device)
    gates = (0, 0, 0) if gate is None else (gate.stride(0), gate.stride(2), gate.stride(1))
    extent = max([T * abs(s[2]) for s in (*strides, gates)] + [T * hq * max(d, e)])
    problem = Problem(
        B, h, hq // max(1, h), T, C, -(-T // C), d, e, power, tile, dimension(d, power, tile), gate is not None,
        T > C or S is not None, S is not None, return_state, least_share(wide, q, scale),
        strides[0], strides[1], strides[2], strides[3], strides[4],
        gates,
        units=tuple(vector_of(16, *s) for s in strides), common=common, wide=wide,
        precision="tf32" if tf32 and common == torch.float32 else "ieee",
        exact="tf32x3" if tf32 and common == torch.float32 and q.dtype == torch.float16 else "ieee",
        far=FORCE_INT64 or extent >= 2**31,
        hopper=is_hopper(p.device),
    )  # fmt: skip
    return problem, {name: slot for name, (slot, _) in found.items()}


def prepared(p: Pass, problem: Problem, k: str) -> dict[str, str | None]:
    """Record the kernel that adds up gates and norms within chunks; returns its slots."""
    n, wide = problem, p.accumulator
    rows = n.B, n.h, n.T
    made = dict[str, str | None](high=None, low=None, early=None, late=None, since=None, until=None, whole=None)
    if n.gated:
        made.update({x: p.buffer(x, rows, wide) for x in ("high", "low", "early", "late")})
    crossed = n.crossed or n.returned
    if crossed and n.gated:
        made.update({x: p.buffer(x, rows, wide) for x in ("since", "until")})
        made["whole"] = p.buffer("whole", (n.B, n.h, n.chunks), wide)
    made["lengths"] = p.buffer("lengths", rows, wide)
    made["norms"] = p.buffer("norms of chunks", (n.B, n.h, n.chunks), wide) if crossed else None
    takes = [k, "log_gate" if n.gated else None, *made.values()]
    p.start(gpu_launches.prepare, takes, gpu_launches.launch_prepare(n))
    return made


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, S: Tensor | None, z: Tensor | None, norms: Tensor | None,
    power: int, scale: float | None, chunk_size: int | None, return_state: bool, tf32: bool,
) -> Pass:  # fmt: skip
    wide = accumulator(q, k, v, log_gate, S, z)
    p = Pass(q.device, wide, dict(q=q, k=k, v=v, log_gate=log_gate, S=S, z=z, norms=norms))
    n, slots = problem_of(p, ("q", "k", "v"), power, scale, chunk_size, return_state, tf32)
    (B, T, hq, _), e, lost_dtype = q.shape, n.e, residual_dtype(wide, q, k, v)
    nothing = (B, T, 0)
    out = p.buffer("out", (B, T, hq, e), q.dtype)
    state = [(B, n.h, n.D, e), (B, n.h, n.D), (B, n.h)] if return_state else [nothing] * 3
    new = [p.buffer(f"new {name}", shape, wide) for name, shape in zip(KEPT, state)]
    rates = p.buffer("rates", (B, T, hq), wide)
    lost = p.buffer("lost", (B, T, hq, e) if lost_dtype else nothing, lost_dtype or q.dtype)
    several = n.chunks > 1
    shapes = [(B, n.chunks, n.h, n.D, e), (B, n.chunks, n.h, n.D)] if several or S is not None else [nothing] * 2
    kinds = _kept(q, k, v, power, p) if shapes[0] != nothing else wide, wide
    kept = [p.buffer(name, shape, kind) for name, shape, kind in zip(("states", "moments"), shapes, kinds)]
    saved = kept if several else [p.buffer(name, nothing, wide) for name in ("no states", "no moments")]
    writes = ["out", *(KEPT if return_state else ())]
    if T == 1 and S is not None and return_state:
        tables = basis(p, n.d // n.tile, power)
        takes = [slots["q"], slots["k"], slots["v"], "log_gate" if n.gated else None]
        takes += [p.contiguous(name) for name in KEPT]
        p.launch(gpu_launches.step, n, [*takes, *tables, out, *new, rates, lost if lost_dtype else None], writes=writes)
        return p.returns(out, *new, rates, lost, *saved)
    about = prepared(p, n, slots["k"])
    past: Sequence[str | None] = None, None  # sums over earlier chunks, and sums of weights
    lengths = None
    if n.crossed or return_state:
        lengths = p.buffer("norms before chunks", (B, n.h, n.chunks), wide)
        if n.paired:
            _states(p, n, slots, about, kept if n.crossed else None, new if return_state else None, lengths)
            past = _past_sums(p, n, slots["q"], about, kept) if n.crossed else past
        else:
            past = gpu_any_power.states(p, n, slots, about, kept if several else None, new if return_state else None, lengths)
    p.launch(
        gpu_launches.outputs, n,
        [*(slots[x] for x in "qkv"), *(about[x] for x in ("high", "low", "early", "lengths")), *past,
         lengths if n.crossed else None, out, rates, lost if lost_dtype else None], writes=["out"],
    )  # fmt: skip
    return p.returns(out, *new, rates, lost, *saved)


def _kept(q: Tensor, k: Tensor, v: Tensor, power: int, p: Pass) -> torch.dtype:
    """The dtype of the states between chunks; where kernels are compiled for a GPU that is not here, that GPU's."""
    device = torch.device("cuda") if plan.only_compiled else p.device
    return kept_dtype(q, k, v, power, p.accumulator, device)


def _past_sums(p: Pass, n: Problem, q: str, about: dict[str, str | None], kept: Sequence[str]) -> list[str | None]:
    """Record the contribution of earlier chunks: queries applied to the states before their chunks."""
    rows = (n.B, n.h * n.groups, n.T)
    made = [p.buffer("sums of the past", (*rows, n.e), n.wide), p.buffer("norms of the past", rows, n.wide)]
    first = 0 if n.begun else 1
    problem = gpu_launches.past_of(n, n.q, None, n.groups, first, n.chunks - first)
    p.launch(gpu_launches.past_sums, problem, [q, about["since"], kept[0], _spread(p, problem, kept[1]), *made])
    return list(made)


def _spread(p: Pass, problem: Past, moments: str | None) -> str:
    """Record the moments as matrices."""
    n = problem
    made = p.buffer(f"{moments} as matrices", (n.B, n.chunks, n.h, n.parts, n.d, n.d), n.common)
    p.start(gpu_launches.spread, [moments, made], gpu_launches.launch_spread(problem))
    return made


def _states(
    p: Pass, n: Problem, slots: dict[str, str], about: dict[str, str | None], kept: Sequence[str] | None,
    new: Sequence[str] | None, lengths: str,
) -> None:  # fmt: skip
    """Record the states before each chunk, and the one after the last."""
    count = n.chunks if n.returned else n.chunks - 1
    tables, made = basis(p, n.d // n.tile, 2), [None, None]
    if count > 0:
        made = _folded(p, n, slots["k"], n.k, slots["v"], n.v, about["until"], about["until"], 1, 0, count)
    nothing, whole = [None] * 3, about["whole"]
    begin = [p.contiguous(name) for name in KEPT] if n.begun else nothing
    end, before, names = new or nothing, kept or nothing, KEPT if new else ("", "", "")
    launch = gpu_launches.launch_scan(n, n.e, 0, count)
    p.start(
        gpu_launches.scan, [tables[0], made[0], begin[0], whole, before[0], end[0], *[None] * 7], launch,
        writes=[names[0]] if new else [],
    )  # fmt: skip
    launch = gpu_launches.launch_scan(n, 1, 0, count)
    takes = [tables[0], made[1], begin[1], whole, before[1], end[1], about["norms"], begin[2], lengths, end[2], *[None] * 3]
    p.start(gpu_launches.scan, takes, launch, writes=list(names[1:]) if new else [])


def _folded(
    p: Pass, n: Problem, x: str, x_strides: Strides, y: str, y_strides: Strides, factors: str | None, shares: str | None,
    members: int, skipped: int, count: int,
) -> list[Any]:  # fmt: skip
    """Record Σ φ(x) yᵀ and Σ φ(x) over the rows of each chunk, where `members` heads of x share a state."""
    name, wide = "queries" if members > 1 or skipped or x != "k" else "keys", p.accumulator
    made = p.buffer(f"states of {name}", (n.B, n.h, count, n.D, n.e), wide)
    moments = p.buffer(f"moments of {name}", (n.B, n.h, count, n.D), wide)
    fold = gpu_launches.fold_of(n, x_strides, y_strides, members, skipped, count)
    p.launch(gpu_launches.fold, fold, [x, y, factors, made])
    p.start(gpu_launches.moments, [x, shares, moments], gpu_launches.launch_moments(fold))
    return [made, moments]


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
    p = Pass(q.device, wide, dict(grad=d_out, d_S=d_S, d_z=d_z, **inputs, norms=norms, **plain, **saved))
    n, slots = problem_of(p, ("q", "k", "v", "out", "grad"), power, scale, chunk_size, return_state, tf32)
    wanted = dict(zip(inputs, needs))
    made = {f"d_{x}": p.buffer(f"new d_{x}", cast(Tensor, t).shape, cast(Tensor, t).dtype) for x, t in inputs.items() if wanted[x]}
    about, heads = prepared(p, n, slots["k"]), (n.B, n.h * n.groups, n.T)
    rate, shift, balanced = (p.buffer(x, heads, wide) for x in ("rate", "shift", "balanced shift"))
    past_rate, past_shift, plain_past = (
        p.buffer(x, heads, wide) if n.crossed else None for x in ("past rate", "balanced past shift", "past shift")
    )
    takes = [slots["out"], p.contiguous("lost") if lost.shape[2:] != (0,) else None, slots["grad"], p.contiguous("rates")]
    takes += [about["since"], rate, shift, past_rate, plain_past]
    p.start(gpu_launches.row_factors, takes, gpu_launches.launch_row_factors(n))

    rows, of_gates = [*(slots[x] for x in ("q", "k", "v", "grad")), about["high"], about["low"]], wanted["log_gate"]
    before: list[Any] = [None, None]
    queries = of_queries = None
    if n.crossed and n.paired:
        before = _before(p, n, about)
        of_queries = p.buffer("gradients of queries", (*heads, n.d), wide)
        problem = gpu_launches.past_of(n, n.q, n.grad, n.groups, 0 if n.begun else 1, n.chunks - (0 if n.begun else 1))
        takes = [slots["q"], slots["grad"], past_rate, plain_past, before[0], _spread(p, problem, before[1]), of_queries]
        p.launch(gpu_launches.past_gradients, problem, takes)
    elif n.crossed:
        queries, of_queries = gpu_any_power.query_gradients(p, n, slots, (past_rate, plain_past))
    takes = [*rows, about["early"], rate, shift, of_queries, made.get("d_q"), balanced, past_shift]
    p.launch(gpu_launches.query_gradients, n, takes, writes=["q"] if wanted["q"] else [])

    of_begin = n.begun and (wanted["S"] or wanted["z"] or of_gates)
    end = [p.buffer(f"whole d_{x}", t.shape, wide) for x, t in (("S", S), ("z", z)) if t is not None] if of_begin else [None] * 2
    of_keys: Sequence[str | None] = None, None
    flows = None
    if (n.crossed or return_state) and not n.paired:
        of_keys, flows = gpu_any_power.gradients(p, n, slots, about, (past_rate, past_shift), queries, end if of_begin else None)
    elif n.crossed or return_state:
        if of_gates and n.crossed:
            flows = p.buffer("flows", (n.B * n.h, n.chunks + 1, gpu_launches.flow_columns(n)), wide)
        kind = _kept(q, k, v, power, p)
        after = _after(p, n, slots, about, (past_rate, past_shift), end if of_begin else None, kind, before, flows)
        if after[0] is not None:
            of_keys = _past_keys(p, n, slots, about, after)
    if wanted["k"] or wanted["v"] or of_gates:
        passed = p.buffer("passed", (n.B, n.h, n.T), wide) if of_gates else None
        takes = [*rows, about["late"], rate, balanced, *of_keys, made.get("d_k"), made.get("d_v"), passed]
        p.launch(gpu_launches.key_gradients, n, takes, writes=[x for x in "kv" if wanted[x]])
    if of_gates:
        takes = [passed, flows, "log_gate", made["d_log_gate"]]
        p.start(gpu_launches.gate_gradient, takes, gpu_launches.launch_gate_gradient(n), writes=["log_gate"])
    for x, found in zip(("S", "z"), end):
        if wanted[x] and found is not None:
            dtype = cast(Tensor, inputs[x]).dtype
            p.call("copy_", lambda to, t: to.copy_(t), [made[f"d_{x}"], found], writes=[x]) if dtype != wide else None
            if dtype == wide:
                made[f"d_{x}"] = found
    return p.returns(*made.values())


def _past_keys(
    p: Pass, n: Problem, slots: dict[str, str], about: dict[str, str | None], after: Sequence[str | None]
) -> list[str | None]:
    """Record the gradients of keys and values through the states after their chunks."""
    rows, count, until = (n.B, n.h, n.T), n.chunks - (0 if n.returned else 1), about["until"]
    made = [p.buffer(f"gradients of {x}", (*rows, width), n.wide) for x, width in (("keys", n.d), ("values", n.e))]
    problem = gpu_launches.past_of(n, n.k, n.v, 1, 0, count)
    takes = [slots["k"], slots["v"], until, until, after[0], _spread(p, problem, after[1]), made[0]]
    p.launch(gpu_launches.past_gradients, problem, takes)
    problem = gpu_launches.past_of(n, n.k, None, 1, 0, count)
    p.launch(gpu_launches.past_sums, problem, [slots["k"], until, after[0], None, made[1], None])
    return list(made)


def _before(p: Pass, n: Problem, about: dict[str, str | None]) -> list[Any]:
    """The states before each chunk: those saved by the forward pass or, for a single chunk, the given state."""
    if n.chunks > 1:
        return [p.contiguous("states"), p.contiguous("moments")]
    table = basis(p, n.d // n.tile, 2)[0]
    kind = torch.bfloat16 if n.common == torch.bfloat16 else n.wide
    kept = [p.buffer("states", (n.B, 1, n.h, n.D, n.e), kind), p.buffer("moments", (n.B, 1, n.h, n.D), n.wide)]
    for x, made, e in zip(("S", "z"), kept, (n.e, 1)):
        takes = [table, None, p.contiguous(x), about["whole"], made, *[None] * 8]
        p.start(gpu_launches.scan, takes, gpu_launches.launch_scan(n, e, 0, 0))
    return kept


def _after(
    p: Pass, n: Problem, slots: dict[str, str], about: dict[str, str | None], past: Sequence[str | None],
    end: Sequence[str | None] | None, kind: torch.dtype, before: Sequence[str | None], flows: str | None,
) -> list[Any]:  # fmt: skip
    """Record the gradients of the state after each chunk and, into `end`, that of the state before the first chunk.

    Their products with the states go into `flows`.
    """
    skipped = 0 if end else 1
    count, made = max(0, n.chunks - skipped) if n.crossed else 0, [None] * 2
    if count:
        made = _folded(p, n, slots["q"], n.q, slots["grad"], n.grad, past[0], past[1], n.groups, skipped, count)
    kept: list[Any] = [None] * 2
    if n.chunks > 1 or n.returned:
        kept = [
            p.buffer("d_states", (n.B, n.chunks, n.h, n.D, n.e), kind),
            p.buffer("d_moments", (n.B, n.chunks, n.h, n.D), n.wide),
        ]
    table, programs = basis(p, n.d // n.tile, 2)[0], gpu_launches.scan_programs(n, n.e)
    for i, (x, e) in enumerate((("S", n.e), ("z", 1))):
        last = end[i] if end else None
        if kept[i] is None and last is None:
            continue
        begin, state = (p.contiguous(name) if given else None for name, given in ((f"d_{x}", n.returned), (x, n.begun)))
        takes = [table, made[i], begin, about["whole"], kept[i], last, *[None] * 4]
        takes += [before[i], state, flows] if flows else [None] * 3
        p.start(gpu_launches.scan, takes, gpu_launches.launch_scan(n, e, skipped, count, True, i * programs))
    return kept
