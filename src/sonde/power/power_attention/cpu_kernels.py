"""Numba kernels of ``power_attention``: what happens to products q·k between two products of matrices.

Rows belong to blocks of BLOCK. The decay e^{G_i − G_j} between a key and a query of a later block is a product of three: from the
key to the end of its block (`early`), from there to the end of the block before the query's, and from there to the query. So
exponentials are computed per row and per pair of blocks; only within a block each weight has its own.
"""

from __future__ import annotations

import numpy as np

from ...op import cpu

BLOCK = 16  # rows
RUN = 256  # weights that are added before the sum is added to a float64


@cpu.jit
def prepare(start, stop, k, G, power, early, lengths):
    """For each row of k [heads, T, d] the decay to the end of its block, and Σ ‖k_j‖^power e^{G_i − G_j}; G [heads, T or 0]."""
    T, gated = k.shape[1], G.shape[1] > 0
    for head in range(start, stop):
        total = 0.0
        for i in range(T):
            square = 0.0
            for c in range(k.shape[2]):
                square += np.float64(k[head, i, c]) * k[head, i, c]
            if gated:
                early[head, i] = np.exp(G[head, min(T, i // BLOCK * BLOCK + BLOCK) - 1] - G[head, i])
                total *= np.exp(G[head, i] - G[head, max(i - 1, 0)])
            total += square if power == 2 else square * square
            lengths[head, i] = total


@cpu.part
def spread(head, seen, G, early, factors):
    """factors[j] = the decay from key j to the last of the first `seen` rows, which are whole blocks."""
    for first in range(0, seen, BLOCK):
        between = factors.dtype.type(np.exp(G[head, seen - 1] - G[head, first + BLOCK - 1]))
        for j in range(first, first + BLOCK):
            factors[j] = between * early[head, j]


@cpu.part
def decay(head, seen, i, G, factors, decays):
    """decays[j] = e^{G_i − G_j} for the keys up to query i, `seen` of which belong to earlier blocks, where `factors` holds."""
    if seen > 0:
        late = factors.dtype.type(np.exp(G[head, i] - G[head, seen - 1]))
        for j in range(seen):
            decays[j] = late * factors[j]
    for j in range(seen, i + 1):
        decays[j] = np.exp(G[head, i] - G[head, j])


@cpu.exact_part
def slope(product, decay, power):
    """A weight is this times the product. Rounded as written, since (q·k)² may overflow where the weight does not."""
    return product * decay if power == 2 else product * product * product * decay


@cpu.jit
def weigh(start, stop, weights, G, early, power, begin, norms):
    """Products become weights, in place, and `norms` [heads, groups, R] their sums.

    `weights` is [heads, groups, R, S]: R queries, the first of which is row `begin` of the chunk, and the chunk's first S keys.
    """
    _, groups, R, S = weights.shape
    factors, decays = np.ones(S, weights.dtype), np.ones(S, weights.dtype)
    zero, blocks, gated = weights.dtype.type(0), -(-R // BLOCK), G.shape[1] > 0
    for item in range(start, stop):
        head, first = item // blocks, item % blocks * BLOCK
        if gated:
            spread(head, begin + first, G, early, factors)
        for row in range(first, min(R, first + BLOCK)):
            seen = begin + row + 1
            if gated:
                decay(head, begin + first, begin + row, G, factors, decays)
            for g in range(groups):
                w, norm = weights[head, g, row], 0.0
                for at in range(0, seen, RUN):
                    run = zero
                    for j in range(at, min(at + RUN, seen)):
                        w[j] *= slope(w[j], decays[j], power)
                        run += w[j]
                    norm += run
                w[seen:] = zero
                norms[head, g, row] = norm


@cpu.jit
def differentiate(start, stop, products, toward, G, early, rates, shifts, power, begin, changes):
    """Products become their gradients, and `toward`, [heads, groups, R, S] like them, weights times rates, in place.

    ∂w is toward · rate + shift, [heads, groups, R]. `changes` [heads, R, S], if it is not empty, becomes Σ w ∂w over the groups.
    """
    _, groups, R, S = products.shape
    factors, decays, dtype = np.ones(S, products.dtype), np.ones(S, products.dtype), products.dtype.type
    zero, scale, blocks, gated, kept = dtype(0), dtype(power), -(-R // BLOCK), G.shape[1] > 0, changes.size > 0
    for item in range(start, stop):
        head, first = item // blocks, item % blocks * BLOCK
        if gated:
            spread(head, begin + first, G, early, factors)
        for row in range(first, min(R, first + BLOCK)):
            seen = begin + row + 1
            if gated:
                decay(head, begin + first, begin + row, G, factors, decays)
            if kept:
                changes[head, row] = zero
            for g in range(groups):
                p, t, rate, shift = products[head, g, row], toward[head, g, row], rates[head, g, row], shifts[head, g, row]
                if kept:
                    change = changes[head, row]
                    for j in range(seen):
                        w = slope(p[j], decays[j], power) * p[j]
                        change[j] += zero if w == 0 else w * (t[j] * rate + shift)
                for j in range(seen):
                    one = slope(p[j], decays[j], power)
                    w, through = one * p[j], t[j] * rate + shift
                    p[j] = zero if one == 0 else one * scale * through
                    t[j] = w * rate
                p[seen:], t[seen:] = zero, zero


@cpu.exact_part
def before(total, x):
    """The sum before x, given the sum up to it; not finite if x is not, as in the reference."""
    return total - x


@cpu.jit
def flow(start, stop, changes, begin, out):
    """Add to out[head, m] the sum of changes[head, i, j] over rows i from m on and columns j before m, in float64.

    `changes` is [heads, R, S]; its first row is row `begin` of `out`.
    """
    R, columns = changes.shape[1], np.empty(begin, np.float64)
    for head in range(start, stop):
        columns[:] = 0
        through = 0.0  # Σ over the columns before `begin`, of the rows from m on
        for row in range(R - 1, -1, -1):
            x, run = changes[head, row], 0.0
            for at in range(0, begin, RUN):
                for j in range(at, min(at + RUN, begin)):
                    columns[j] += x[j]
                    run += np.float64(x[j])
            through += run
            out[head, begin + row] += through
            total = 0.0
            for m in range(begin, begin + row + 1):
                total += x[m]
                out[head, m] += before(total, x[m])
        total = 0.0
        for m in range(begin):
            total += columns[m]
            out[head, m] += before(total, columns[m])


@cpu.jit
def inner(start, stop, x, y, out):
    """Add Σ x y to each number of out [heads, ·], where x and y are [heads, ·] too."""
    for head in range(start, stop):
        total = 0.0
        for i in range(x.shape[1]):
            total += np.float64(x[head, i]) * y[head, i]
        out[head] += total
