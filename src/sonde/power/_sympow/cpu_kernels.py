"""φ and its gradient on CPUs: one row after another, a tile of φ at a time.

A tile belongs to a sequence u₀ ≤ … ≤ u_{P−1} of pieces of the row, T numbers each. The first P − 1 pieces are the tile's prefix:
all tiles with this prefix lie side by side in φ, and share its T^(P−1) partial products, each of which is multiplied by the T
numbers of the last piece.
"""

from __future__ import annotations

import numpy as np

from ...op import cpu


@cpu.part
def multiply(factor, x, first, out, at, T):
    """out[at : at + T] = factor · x[first : first + T]."""
    for i in range(T):
        out[at + i] = factor * x[first + i]


@cpu.part
def partial_products(x, pieces, prefix, P, T, out):
    """All products of one number from each of the prefix's pieces, in `out`; returns their count."""
    out[0] = 1
    count = 1
    for i in range(P - 1):
        for j in range(count - 1, -1, -1):  # from the end, because the products with out[j] start at out[j · T]
            multiply(out[j], x, pieces[prefix, i] * T, out, j * T, T)
        count *= T
    return count


@cpu.part
def expand_8(root, partial, count, x, first, out, at):
    """A tile with T = 8. The piece is kept in local variables: `out` might alias `x`, so the compiler would reload it."""
    a, b, c, d = root * x[first], root * x[first + 1], root * x[first + 2], root * x[first + 3]
    e, f, g, h = root * x[first + 4], root * x[first + 5], root * x[first + 6], root * x[first + 7]
    for j in range(count):
        w, k = partial[j], at + 8 * j
        out[k], out[k + 1], out[k + 2], out[k + 3] = w * a, w * b, w * c, w * d
        out[k + 4], out[k + 5], out[k + 6], out[k + 7] = w * e, w * f, w * g, w * h


@cpu.jit
def expand(start, stop, x, pieces, roots, P, T, out):
    """out [R, D] = φ(x [R, d]); `pieces` [prefixes, ·] are the prefixes, `roots` [tiles] the factors of the tiles."""
    partial, n = np.empty(T ** (P - 1), x.dtype), x.shape[1] // T
    for row in range(start, stop):
        column, tile, y, z = 0, 0, x[row], out[row]
        for prefix in range(len(pieces)):
            count, begin = partial_products(y, pieces, prefix, P, T, partial), pieces[prefix, -1]
            if T == 1:
                for i in range(n - begin):
                    z[column + i] = partial[0] * roots[tile + i] * y[begin + i]
            else:
                for i in range(n - begin):
                    at = column + i * count * T
                    if T == 8:
                        expand_8(roots[tile + i], partial, count, y, (begin + i) * 8, z, at)
                    else:
                        for j in range(count):
                            multiply(partial[j] * roots[tile + i], y, (begin + i) * T, z, at + j * T, T)
            tile += n - begin
            column += (n - begin) * count * T


@cpu.part
def differentiate_8(root, partial, count, x, first, grad, at, through, total):
    """A tile with T = 8: adds to `through` and `total`, the gradients of the partial products and of the piece's numbers."""
    a, b, c, d = root * x[first], root * x[first + 1], root * x[first + 2], root * x[first + 3]
    e, f, g, h = root * x[first + 4], root * x[first + 5], root * x[first + 6], root * x[first + 7]
    for block in range(0, count, 8):
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = x.dtype.type(0)
        for j in range(block, block + 8):
            w, k = partial[j], at + 8 * j
            g0, g1, g2, g3, g4, g5, g6, g7 = (
                grad[k], grad[k + 1], grad[k + 2], grad[k + 3], grad[k + 4], grad[k + 5], grad[k + 6], grad[k + 7]
            )  # fmt: skip
            s0, s1, s2, s3 = s0 + g0 * w, s1 + g1 * w, s2 + g2 * w, s3 + g3 * w
            s4, s5, s6, s7 = s4 + g4 * w, s5 + g5 * w, s6 + g6 * w, s7 + g7 * w
            through[j] += ((g0 * a + g1 * b) + (g2 * c + g3 * d)) + ((g4 * e + g5 * f) + (g6 * g + g7 * h))
        for i, s in enumerate((s0, s1, s2, s3, s4, s5, s6, s7)):
            total[first + i] += s * root


@cpu.part
def add_share(through, j, x, pieces, prefix, P, T, total):
    """Add to the gradients of the prefix's numbers that make product j; `through` is the gradient of that product."""
    digits = j
    for i in range(P - 2, -1, -1):
        share, others = through, j
        for k in range(P - 2, -1, -1):
            if k != i:
                share *= x[pieces[prefix, k] * T + others % T]
            others //= T
        total[pieces[prefix, i] * T + digits % T] += share
        digits //= T


@cpu.jit
def differentiate(start, stop, grad, x, pieces, roots, P, T, out):
    """out [R, d] = ∂x, from grad [R, D] = ∂φ. Sums are in float64, except for those of up to eight terms."""
    n, most = x.shape[1] // T, T ** (P - 1)
    partial, through, total = np.empty(most, x.dtype), np.empty(most, np.float64), np.empty(n * T, np.float64)
    for row in range(start, stop):
        column, tile, g, y = 0, 0, grad[row], x[row]
        total[:] = 0
        for prefix in range(len(pieces)):
            count, begin = partial_products(y, pieces, prefix, P, T, partial), pieces[prefix, -1]
            through[:count] = 0
            if T == 1:
                run = 0.0
                for i in range(n - begin):
                    term = g[column + i] * roots[tile + i]
                    total[begin + i] += np.float64(term * partial[0])
                    run += np.float64(term * y[begin + i])
                through[0] = run
            else:
                for i in range(n - begin):
                    root, first, at = roots[tile + i], (begin + i) * T, column + i * count * T
                    if T == 8 and count > 1:
                        differentiate_8(root, partial, count, y, first, g, at, through, total)
                    else:
                        for j in range(count):
                            w, run = partial[j] * root, 0.0
                            for k in range(T):
                                term = g[at + j * T + k]
                                total[first + k] += np.float64(term * w)
                                run += np.float64(term * y[first + k])
                            through[j] += run * root
            for j in range(count):
                add_share(through[j], j, y, pieces, prefix, P, T, total)
            tile += n - begin
            column += (n - begin) * count * T
        for i in range(n * T):
            out[row, i] = total[i]
