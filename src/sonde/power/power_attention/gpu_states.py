"""Kernels of power attention's states: gates and norms, what each chunk adds to the state, and the state before each chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from .._device.powers import outer_columns
from .._device.product import add_exactly, landed, nearest
from .._device.tiles import head_program, load, load_rows, multiple, places

SIZES = ["h", "groups", "T", "C", "chunks"]
X, Y = ["x_batch", "x_head", "x_row"], ["y_batch", "y_head", "y_row"]
LEAST_GATE = tl.constexpr(-1000.0)  # as in the reference
SMALLEST, SMALLEST_64 = tl.constexpr(2.0**-103), tl.constexpr(2.0**-970)  # sums of weights; the smallest normal number over eps


@triton.jit
def is_rounding(norm, most, least):
    """Whether a sum of weights is only rounding error, as in the reference."""
    smallest = SMALLEST_64 if norm.dtype == tl.float64 else SMALLEST
    return (norm <= tl.maximum(least * most, smallest)) & (most < float("inf"))


@triton.jit
def after(kept, added, kept_later, added_later):
    """Combine two steps x → kept · x + added into one."""
    return kept * kept_later, added * kept_later + added_later


@triton.jit(do_not_specialize=[*SIZES, "k_batch", "k_head", "k_row", "g_batch", "g_head", "g_row"])
def _prepare(
    k,  # [B, h, T, d], rows contiguous
    log_gate,  # [B, h, T], any strides; or None
    high,  # [B, h, T], sums of the gates since the beginning of the chunk
    low,  # [B, h, T], their rounding errors
    early,  # [B, h, T], the decay e^ΔG from there to the last of its BT rows
    late,  # [B, h, T], the decay since the first of its BT rows
    since,  # [B, h, T], the decay since the beginning of the chunk
    until,  # [B, h, T], the decay from there to the end of the chunk
    whole,  # [B, h, chunks], the decay over the whole chunk
    lengths,  # [B, h, T], Σ ‖k_j‖^p e^{G_i − G_j} over the rows of the chunk so far
    norms,  # [B, h, chunks], the same at its end
    h,
    groups,
    T,
    C,
    chunks,
    k_batch,
    k_head,
    k_row,
    g_batch,
    g_head,
    g_row,
    D: tl.constexpr,
    BD: tl.constexpr,
    POWER: tl.constexpr,
    ACC: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    BT: tl.constexpr,
):
    """Gates are summed in float64, since weights depend on differences of the sums."""
    chunk = tl.program_id(0)
    row_of, batch, head = head_program(h)
    start = chunk * C
    stop = tl.minimum(start + C, T)
    k += batch * multiple(k_batch, UNITS[1]) + head * multiple(k_head, UNITS[1])
    total, norm = tl.zeros([], tl.float64), tl.zeros([], ACC)
    here, last = row_of * T, tl.arange(0, BT) == BT - 1
    for first in range(start, stop, BT):
        i = places(first, BT, OFFSET)
        x = load_rows(k, i, stop, multiple(k_row, UNITS[1]), D, BD, ACC)
        length = tl.sum(x * x, 1)
        if POWER == 4:
            length = length * length
        kept = tl.full([BT], 1, ACC)
        if log_gate is not None:
            gate = tl.load(log_gate + batch * g_batch + head * g_head + i * g_row, mask=i < stop, other=0).to(tl.float64)
            gate = tl.where(gate < LEAST_GATE, LEAST_GATE, gate)
            G = total + tl.cumsum(gate, 0)
            kept = tl.exp(gate.to(ACC))
            rounded = G.to(ACC)
            tl.store(high + here + i, rounded, mask=i < stop)
            tl.store(low + here + i, (G - rounded.to(tl.float64)).to(ACC), mask=i < stop)
            if since is not None:
                tl.store(since + here + i, tl.exp(G.to(ACC)), mask=i < stop)
            total = tl.sum(tl.where(last, G, 0), 0)
            tl.store(early + here + i, tl.exp((total - G).to(ACC)), mask=i < stop)
            tl.store(late + here + i, tl.exp((G - tl.sum(tl.where(tl.arange(0, BT) == 0, G, 0), 0)).to(ACC)), mask=i < stop)
        left, added = tl.associative_scan((kept, length), 0, after)
        added += left * norm
        tl.store(lengths + here + i, added, mask=i < stop)
        norm = tl.sum(tl.where(last, added, 0), 0)
    if norms is not None:
        tl.store(norms + row_of * chunks + chunk, norm)
        if log_gate is not None:
            tl.store(whole + row_of * chunks + chunk, tl.exp(total.to(ACC)))
            G = tl.zeros([], tl.float64)
            for first in range(start, stop, BT):
                i = places(first, BT, OFFSET)
                gate = tl.load(log_gate + batch * g_batch + head * g_head + i * g_row, mask=i < stop, other=0).to(tl.float64)
                gate = tl.where(gate < LEAST_GATE, LEAST_GATE, gate)
                sums = G + tl.cumsum(gate, 0)
                tl.store(until + here + i, tl.exp((total - sums).to(ACC)), mask=i < stop)
                G = tl.sum(tl.where(last, sums, 0), 0)


@triton.jit
def packed(a, b, n, TILE: tl.constexpr):
    """The position of x_a · x_b in φ, for paired tiles."""
    s, t = a // TILE, b // TILE
    less, more = tl.minimum(s, t), tl.maximum(s, t)
    within = tl.where(s <= t, a % TILE * TILE + b % TILE, b % TILE * TILE + a % TILE)
    return (less * n - less * (less - 1) // 2 + more - less) * (TILE * TILE) + within


@triton.jit
def first_tile(program, n, TILES: tl.constexpr):
    """The first tile (s, t ≥ s) that a program computes: it has up to TILES of the n − s tiles with the same s."""
    s, before = 0, 0  # programs for smaller s
    for _ in range(n):
        here = tl.cdiv(n - s, TILES)
        last = program < before + here
        before, s = tl.where(last, before, before + here), tl.where(last, s, s + 1)
    return s, s + (program - before) * TILES


@triton.jit(do_not_specialize=[*SIZES, "skipped", *X, *Y])
def _fold(
    x,  # [B, h · groups, T, d], rows contiguous: keys, or queries
    y,  # [B, h · groups, T, e], rows contiguous: values, or gradients of results
    factors,  # [B, h · groups, T], or None
    out,  # [B, h, chunks − skipped, D, e], Σ factor · φ(x) yᵀ over the rows of each chunk, without roots
    h,
    groups,
    T,
    C,
    chunks,
    skipped,  # chunks at the beginning that are not needed
    x_batch,
    x_head,
    x_row,
    y_batch,
    y_head,
    y_row,
    D: tl.constexpr,
    E: tl.constexpr,
    TILE: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
    EVEN: tl.constexpr,  # blocks of rows end where chunks do
    BR: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program computes up to TILES tiles (s, t) of φ with the same s: they share a piece of x and the rows of y.

    φ is multiplied by the factors before it is rounded, so that the rows of y go unchanged from memory to the matrix units.
    """
    n: tl.constexpr = D // TILE
    WIDE: tl.constexpr = TILE * TILES
    FULL: tl.constexpr = EVEN and E % BN == 0
    ACROSS: tl.constexpr = (E + BN - 1) // BN
    ROWS: tl.constexpr = n // TILES
    PROGRAMS: tl.constexpr = (TILES * ROWS * (ROWS + 1) // 2 + n % TILES * (ROWS + 1)) * ACROSS
    chunk, program = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    s, t = first_tile(program // ACROSS, n, TILES)
    column = places(program % ACROSS * BN, BN, OFFSET)
    row_of, batch, head = head_program(h)
    start = (chunk + skipped) * C
    stop = tl.minimum(start + C, T)
    x_step, y_step = multiple(x_row, X_UNIT), multiple(y_row, Y_UNIT)
    a, b = (s * TILE + tl.arange(0, TILE))[:, None], (t * TILE + tl.arange(0, WIDE))[:, None]
    total = tl.zeros([TILE * WIDE, BN], ACC)
    for member in range(groups):
        row_head = head * groups + member
        left = x + batch * multiple(x_batch, X_UNIT) + row_head * multiple(x_head, X_UNIT)
        right = y + batch * multiple(y_batch, Y_UNIT) + row_head * multiple(y_head, Y_UNIT) + column[None, :]
        for first in range(start, stop, BR):
            row = places(first, BR, OFFSET)
            inside = (row < stop)[None, :]
            rows = load(right + row[:, None] * y_step, None if FULL else (row < stop)[:, None] & (column < E)[None, :]).to(COMMON)
            u = load(left + row[None, :] * x_step + a, None if EVEN else inside)
            v = load(left + row[None, :] * x_step + b, b < D if EVEN else inside & (b < D))
            if factors is not None:
                factor = load(factors + (row_of * groups + member) * T + row, None if EVEN else row < stop)
                phi = outer_columns(u.to(ACC) * factor[None, :], v.to(ACC))
            else:
                phi = outer_columns(u.to(COMMON), v.to(COMMON))
            phi = nearest(phi, COMMON, PRECISION)
            total = landed(tl.dot(phi, rows, total, input_precision=PRECISION, out_dtype=ACC), first)
    k = tl.arange(0, TILE * WIDE)
    a, b = s * TILE + k // WIDE, t * TILE + k % WIDE
    out += (row_of * chunks + chunk) * (n * (n + 1) // 2 * TILE * TILE) * E
    tl.store(out + packed(a, b, n, TILE)[:, None] * E + column[None, :], total, mask=(b < D)[:, None] & (column < E)[None, :])


@triton.jit(do_not_specialize=[*SIZES, "skipped", *X])
def _moments(
    x,  # [B, h · groups, T, d], rows contiguous
    factors,  # [B, h · groups, T], or None
    out,  # [B, h, chunks − skipped, D], Σ factor · x_a x_b over the rows of each chunk
    h,
    groups,
    T,
    C,
    chunks,
    skipped,
    x_batch,
    x_head,
    x_row,
    D: tl.constexpr,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    X_UNIT: tl.constexpr,
    BR: tl.constexpr,
    BA: tl.constexpr,
):
    """z, exact to float32 even for half-precision inputs, since terms of different signs may cancel."""
    n: tl.constexpr = D // TILE
    chunk = tl.program_id(0) % chunks
    row_of, batch, head = head_program(h)
    start = (chunk + skipped) * C
    stop = tl.minimum(start + C, T)
    a, b = (tl.program_id(0) // chunks * BA + tl.arange(0, BA))[:, None], tl.arange(0, BD)[None, :]
    total = tl.zeros([BA, BD], ACC)
    for member in range(groups):
        rows = x + batch * multiple(x_batch, X_UNIT) + (head * groups + member) * multiple(x_head, X_UNIT)
        for first in range(start, stop, BR):
            row = places(first, BR, OFFSET)
            right = load_rows(rows, row, stop, multiple(x_row, X_UNIT), D, BD, COMMON)
            left = tl.load(rows + row[None, :] * multiple(x_row, X_UNIT) + a, mask=(row < stop)[None, :] & (a < D), other=0)
            if factors is not None:
                factor = tl.load(factors + (row_of * groups + member) * T + row, mask=row < stop, other=0)
                total = landed(add_exactly(total, left.to(ACC) * factor[None, :], right, COMMON, PRECISION), first)
            else:
                total = tl.dot(left.to(COMMON), right, total, input_precision=PRECISION, out_dtype=ACC)
    out += (row_of * chunks + chunk) * (n * (n + 1) // 2 * TILE * TILE)
    tl.store(out + packed(a, b, n, TILE), total, mask=(a < D) & (b < D) & (a // TILE <= b // TILE))


@triton.jit
def scan_norms(row_of, norms, begin, whole, kept, end, chunks, ACC: tl.constexpr):
    """The norms before each chunk and after the last one: one number per chunk, so a single program adds them up."""
    norm = tl.zeros([], ACC)
    if begin is not None:
        norm += tl.load(begin + row_of).to(ACC)
    for chunk in range(chunks):
        tl.store(kept + row_of * chunks + chunk, norm)
        if whole is not None:
            norm *= tl.load(whole + row_of * chunks + chunk)
        norm += tl.load(norms + row_of * chunks + chunk)
    if end is not None:
        tl.store(end + row_of, norm)


@triton.jit(do_not_specialize=["h", "chunks", "first", "count", "flow_columns", "flow_column"])
def _scan(
    tiles,  # [tiles, 2]
    made,  # [B, h, count, D · E], what each chunk from `first` on adds to the state; None if nothing is added
    begin,  # [B, h, D · E], the caller's initial state, or None
    whole,  # [B, h, chunks], how much of the state a chunk keeps; or None
    kept,  # [B, chunks, h, D · E], the state before each chunk (after it, if REVERSE); None if not needed
    end,  # [B, h, D · E], the state after the last one, or None
    norms,  # [B, h, chunks], each chunk's own; or None
    begin_norms,  # [B, h], or None
    kept_norms,  # [B, h, chunks]
    end_norms,  # [B, h], or None
    states,  # [B, chunks, h, D · E], the states before each chunk, if the scan computes their gradients; None without `flows`
    begin_state,  # [B, h, D · E], the one before the first chunk, as the caller passed it, or None
    flows,  # [B · h, chunks + 1, ≥ column + programs]: Σ state · gradient before each chunk; the last row adds to all but the first
    h,
    chunks,
    first,
    count,
    flow_columns,
    flow_column,
    LENGTH: tl.constexpr,  # D · E
    E: tl.constexpr,
    TILE: tl.constexpr,
    REVERSE: tl.constexpr,  # from the last chunk to the first, for the gradients of states
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Internal states have no roots, and their diagonal tiles are symmetric; `begin` and `end` are in the users' form."""
    row_of, batch, head = head_program(h)
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = x < LENGTH
    row, column = x // E, x % E
    tile, within = row // (TILE * TILE), row % (TILE * TILE)
    square = tl.load(tiles + tile * 2, mask=inside, other=0) == tl.load(tiles + tile * 2 + 1, mask=inside, other=0)
    root = tl.where(square, tl.full([], 1, ACC), tl.full([], 1.4142135623730951, ACC))
    before, given = tl.zeros([BLOCK], ACC), tl.zeros([BLOCK], ACC)
    if begin is not None:
        given = tl.load(begin + row_of * LENGTH + x, mask=inside, other=0).to(ACC)
        twin = tile * (TILE * TILE) + tl.where(square, within % TILE * TILE + within // TILE, within)
        other = tl.load(begin + row_of * LENGTH + twin * E + column, mask=inside, other=0).to(ACC)
        before = (given + other) * (0.5 / root)
    if flows is not None:
        flows += row_of * (chunks + 1) * flow_columns + flow_column + tl.program_id(0)
    total, left = tl.zeros([BLOCK], ACC), tl.full([], 1, ACC)
    for step in range(chunks):
        chunk = chunks - 1 - step if REVERSE else step
        if kept is not None:
            found = total + before * left if begin is not None else total
            at = (batch * chunks + chunk) * h + head
            tl.store(kept + at * LENGTH + x, found.to(kept.dtype.element_ty), mask=inside)
            if flows is not None:  # noqa: SIM102 (decided at compile time)
                if step > 0:
                    state = tl.load(states + (at + h) * LENGTH + x, mask=inside, other=0).to(ACC)
                    tl.store(flows + (chunk + 1) * flow_columns, tl.sum(state * found * (root * root), 0))
        if whole is not None:
            decay = tl.load(whole + row_of * chunks + chunk)
            total *= decay
            left *= decay
        if made is not None:
            here = inside & (chunk >= first) & (chunk < first + count)
            total += tl.load(made + (row_of * count + chunk - first) * LENGTH + x, mask=here, other=0)
    if end is not None:
        found = total * root + given * left if begin is not None else total * root
        tl.store(end + row_of * LENGTH + x, found, mask=inside)
    if flows is not None:
        through, skew = tl.zeros([], ACC), tl.zeros([], ACC)
        if begin_state is not None:
            state = tl.load(begin_state + row_of * LENGTH + x, mask=inside, other=0).to(ACC)
            if end is not None:
                through = tl.sum(state * found, 0)
            if begin is not None:  # internal states are symmetric; the rest of `begin` only decays
                skew = tl.sum(state * (given - before * root) * left, 0)
        tl.store(flows, through)
        tl.store(flows + chunks * flow_columns, skew)
    if norms is not None:  # noqa: SIM102 (decided at compile time)
        if tl.program_id(0) == 0:
            scan_norms(row_of, norms, begin_norms, whole, kept_norms, end_norms, chunks, ACC)


@triton.jit
def _spread(
    moments,  # [matrices, D]
    out,  # [matrices, PARTS, d, d]
    D: tl.constexpr,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    COMMON: tl.constexpr,
    PARTS: tl.constexpr,
    BA: tl.constexpr,
):
    """Unpack moments into symmetric matrices, each split into PARTS of lower precision that add up to it."""
    n: tl.constexpr = D // TILE
    at = tl.program_id(0).to(tl.int64)
    a, b = tl.program_id(1) * BA + tl.arange(0, BA)[:, None], tl.arange(0, BD)[None, :]
    inside = (a < D) & (b < D)
    rest = tl.load(moments + at * (n * (n + 1) // 2 * TILE * TILE) + packed(a, b, n, TILE), mask=inside, other=0)
    for part in tl.static_range(PARTS):
        rounded = rest.to(COMMON)
        tl.store(out + (at * PARTS + part) * D * D + a * D + b, rounded, mask=inside)
        rest -= rounded.to(rest.dtype)
