"""Kernels of ``cpu``. A task of ``per_unit`` has some units, a task of ``per_channel`` some channels of the gradient of features,
so that the order of sums is fixed. Both process the places of a unit in tiles: they list the samples of a tile that see a pixel,
sixteen places at a time, and prefetch the pixels of the next tile while they process the current one.
"""

from __future__ import annotations

import numpy as np

from ...op.cpu import array_part, called_part, exact_part, jit, part
from ...op.simd import (
    LANES,
    cast,
    floor,
    fma,
    load,
    load_four,
    prefetch,
    spread,
    store,
    store_some,
    total,
    totals,
    unzip,
    where,
    zipped,
)
from .._scatter.cpu_sums import COUNTED, FULL, add_spilled, block_full, clear, flush, hash16, new_spill

TILE = 64  # samples per tile; more if sixteen places have more in all their levels
TILES = 32  # this many tiles are summed in the dtype of the operands, and these sums in float64


@jit
def per_unit(
    start,
    stop,
    S,
    Q,
    heads,
    D,
    drop,
    logits,
    spare,  # a row of zeros for corners outside of the features; −1 if there are none
    levels,  # [L*2, places]: widths and starts, from `_table`
    sizes,  # [L*2, places]: widths and heights
    features,  # [1, B*S*heads*G*D]
    locations,  # [N, M*2]
    weights,  # [N*M*L, G]
    grad,  # [N, G*D]; empty in the forward pass
    out,  # [N, G*D]; results that are not needed are empty
    g_locations,  # [N, M*2]
    g_weights,  # [N*M*L, G]
):
    """The results of units `start` to `stop`, or the gradients of their locations and weights."""
    M, G, want_out = locations.shape[1] // 2, weights.shape[1], out.size > 0
    each = M * (levels.shape[0] // 2)  # weights per unit
    step, tiles, room = _tiles(M, levels)
    samples = _scratch(room, features, not want_out)
    share = np.empty((each if logits else 0, 1), features.dtype)
    coef = share if logits else weights
    row = np.zeros((G, -(-D // LANES) * LANES), features.dtype)
    whole = np.empty(G * D if tiles > TILES else 0, np.float64)

    here, found = 0, 0  # the current tile has `found` samples, listed from `here` on
    for t in range(start * tiles, stop * tiles + 1):  # process tile t − 1 while prefetching the pixels of tile t
        n, m, there, coming = t // tiles, t % tiles * step, room - here, 0
        if n < stop:
            rows = n // (Q * heads) * S, S, heads * G * D, n % heads * G * D
            coming = _locate(n, m, there, rows, drop, spare, levels, sizes, locations, samples)
        n, m = (t - 1) // tiles, (t - 1) % tiles * step
        own = 0 if logits else n * each
        if n >= start and m == 0:
            if logits:
                _softmax(n * each, weights, share)
            if not want_out:
                _copy(n, D, grad, row)
        if want_out:
            _sum(found, coming, here, there, D, features, coef, own, samples, row)
        for i in range(0 if want_out else max(found, coming)):
            if i < coming:
                _prefetch(there + i, 0, G * D, samples, features)
            if i < found:
                _dots(here + i, n, n * each, D, features, coef, own, samples, row, g_locations, g_weights)
        if n >= start and want_out:  # sum tile by tile: one long sum would lose digits
            if tiles > TILES:
                _add_up((t - 1) % tiles, tiles, n, D, row, out, whole)
            else:
                for g in range(G):
                    for k in range(D):
                        out[n, g * D + k] = out[n, g * D + k] + row[g, k] if m else row[g, k]
        if n >= start and logits and m + step >= M:
            _through_softmax(n * each, share, g_weights)
        here, found = there, coming


@jit
def per_channel(
    start,
    stop,
    S,
    Q,
    heads,
    D,
    drop,
    logits,
    spare,  # as above
    many,
    width,
    levels,  # [L*2, places]
    sizes,  # [L*2, places]
    locations,  # [N, M*2]
    weights,  # [N*M*L, G]
    grad,  # [N, G*D]
    features,  # [1, B*S*heads*G*D]; empty if the next two are
    g_locations,  # [N, M*2]; empty if not needed
    g_weights,  # [N*M*L, G]
    g_features,  # [1, B*S*heads*G*D]
):
    """Pieces `start` to `stop` of the gradient of features; a piece is `width` SIMD blocks of each of `many` heads.

    The order of sums is always queries, samples, corners. If pieces have all channels of their heads, the other gradients are
    computed on the way, with the same bits as in ``per_unit``.
    """
    M, G, more = locations.shape[1] // 2, weights.shape[1], features.size > 0
    each = M * (levels.shape[0] // 2)  # weights per unit
    per_group = -(-D // LANES)
    cuts, pieces = -(-heads // many), -(-G * per_group // width)
    step, tiles, room = _tiles(M, levels)
    samples = _scratch(room, g_features, more)
    share = np.empty((each if logits else 0, 1), g_features.dtype)
    coef = share if logits else weights
    row = np.zeros((G, per_group * LANES), g_features.dtype)
    spill = new_spill((S + 1) * many, Q * each * many, 4, G * D)  # pixels of each head, and one more for corners outside

    for task in range(start, stop):
        b, head, low = task // (cuts * pieces), task // pieces % cuts * many, task % pieces * width
        those, high = min(many, heads - head), min(low + width, G * per_group)
        groups = low // per_group, -(-high // per_group)
        begin, size = groups[0] * D, (groups[1] - groups[0]) * D  # channels that are prefetched: whole groups
        lowest = groups[0] * D + low % per_group * LANES  # channels that are added to: up to `highest`
        highest = (groups[1] - 1) * D + min(D, ((high - 1) % per_group + 1) * LANES)
        clear(spill)
        here, found = 0, 0
        for t in range(Q * those * tiles + 1):  # process tile t − 1 while prefetching the pixels of tile t
            unit, m, there, coming = t // tiles, t % tiles * step, room - here, 0
            n = (b * Q + unit // those) * heads + head + unit % those
            if t < Q * those * tiles:
                rows = b * S, S, heads * G * D, n % heads * G * D
                coming = _locate(n, m, there, rows, drop, spare, levels, sizes, locations, samples)
            unit, m = (t - 1) // tiles, (t - 1) % tiles * step
            n = (b * Q + unit // those) * heads + head + unit % those
            own = 0 if logits else n * each
            if t > 0 and m == 0:
                if logits:
                    _softmax(n * each, weights, share)
                if more:
                    _copy(n, D, grad, row)
            for i in range(max(found, coming)):
                if i < coming:
                    _prefetch(there + i, begin, size, samples, g_features)
                    if more:
                        _prefetch(there + i, begin, size, samples, features)
                if i < found:
                    _scatter(here + i, n, low, high, groups, per_group, D, coef, own, samples, grad, g_features)
                    if more:
                        _dots(here + i, n, n * each, D, features, coef, own, samples, row, g_locations, g_weights)
            for i in range(here + hash16((n - b * Q * heads) * M + m), here + found, COUNTED):  # alike in any batch
                j, of_head = samples[0][i, 0], n % heads - head
                if block_full(min(samples[1][j, 0] // (heads * G * D) - b * S, S) * many + of_head, FULL, spill):
                    _flush_cell(j, heads * G * D, b * S, S, many, of_head, lowest, highest, samples[1], g_features, spill)
            if t > 0 and logits and m + step >= M:
                _through_softmax(n * each, share, g_weights)
            here, found = there, coming
        add_spilled(g_features, highest - lowest, spill)


@called_part
def _flush_cell(j, channels, base, S, many, of_head, lowest, highest, corner, g_features, spill):
    """Flush the blocks of the four pixels of sample j."""
    for k in range(4):
        at = corner[j, k]
        flush(min(at // channels - base, S) * many + of_head, g_features, at + lowest, at + highest, spill)


@called_part
def _add_up(tile, tiles, n, D, row, out, whole):
    """out[n] += row; after every TILES tiles, that sum is added to the float64 sum `whole`."""
    for g in range(row.shape[0]):
        for k in range(D):
            out[n, g * D + k] = out[n, g * D + k] + row[g, k] if tile % TILES else row[g, k]
    if tile % TILES == TILES - 1 or tile == tiles - 1:
        for c in range(len(whole)):
            whole[c] = whole[c] + out[n, c] if tile >= TILES else out[n, c]
            out[n, c] = whole[c]


@part
def _tiles(M, levels):
    """→ places per tile, tiles per unit, samples per tile."""
    L = max(1, levels.shape[0] // 2)
    step = max(1, TILE // LANES // L) * LANES
    return step, max(1, -(-M // step)), step * L


@array_part
def _scratch(room, like, slopes):
    """Buffers for the samples of two tiles: the list of those that see a pixel (sample, weight, place); offsets of their corners;
    weights of the corners; derivatives of these in x and y, if `slopes`; and which of sixteen see a pixel."""
    listed, corner, real = np.empty((2 * room, 3), np.int64), np.empty((2 * room, 4), np.int64), like.dtype
    weigh, sloping = np.empty((2 * room, 4), real), 2 * room if slopes else 0
    by_x, by_y = np.empty((sloping, 4), real), np.empty((sloping, 4), real)
    return listed, corner, weigh, by_x, by_y, np.empty((1, LANES), np.int32)


@exact_part
def _locate(n, first, here, rows, drop, spare, levels, sizes, locations, samples):
    """List the samples of a tile that see a pixel, from `here` on; the tile has the places of unit n from `first` on.

    `rows` has the first row of the image, their number, their length, and the unit's first channel. Returns how many samples were
    listed.
    """
    listed, corner, weigh, by_x, by_y, seen = samples
    base, S, channels, column = rows
    (L, wide), found = (levels.shape[0] // 2, levels.shape[1]), here
    step = listed.shape[0] // 2 // max(1, L)
    last = min(first + step, locations.shape[1] // 2)
    for m in range(first, last if wide else first, LANES):
        u, v = unzip(load(locations, n, 2 * m, 2 * last), load(locations, n, 2 * m + LANES, 2 * last))
        slot = m % (wide - LANES + 1)
        for j in range(L):
            W, H = load(sizes, 2 * j, slot, wide), load(sizes, 2 * j + 1, slot, wide)
            w, begin = load(levels, 2 * j, slot, wide), load(levels, 2 * j + 1, slot, wide)
            x, y = u * W - 0.5, v * H - 0.5  # each operation rounded: the same bits as the reference
            inside = (x >= -1) & (x < W) & (y >= -1) & (y < H) & (W > 0) & (H > 0)
            if drop:
                inside = inside & (u > 0) & (u < 1) & (v > 0) & (v < 1)
            left, alone, ax, bx, sax, sbx = _axis(where(inside, x, 0), W)
            line, single, ay, by, say, sby = _axis(where(inside, y, 0), H)
            right, down = cast(where(alone, 0, 1), np.int64), where(single, 0, w)
            p, i = begin + line * w + left + base, here + j * step + m - first
            c0, c1, c2, c3 = p, p + right, p + down, p + down + right
            if spare >= 0:
                c0, c1 = _row(c0, base, S, spare), _row(c1, base, S, spare)
                c2, c3 = _row(c2, base, S, spare), _row(c3, base, S, spare)
            _store_four(c0 * channels + column, c1 * channels + column, c2 * channels + column, c3 * channels + column, corner, i)
            _store_four(ay * ax, ay * bx, by * ax, by * bx, weigh, i)
            if by_x.size:
                _store_four(ay * sax, ay * sbx, by * sax, by * sbx, by_x, i)
                _store_four(say * ax, say * bx, sby * ax, sby * bx, by_y, i)
            store(where(inside, 1, 0), seen, 0, 0)
            for k in range(min(LANES, last - m)):
                listed[found, 0], listed[found, 1], listed[found, 2] = i + k, (m + k) * L + j, m + k
                found += seen[0, k]
    return found - here


@exact_part
def _axis(x, size):
    """Along one axis → the lower corner, whether there is only one, weights of both, and their derivatives in the location.

    If one corner is outside, the other stands for both, with half of its weight each.
    """
    below = floor(x)
    b = x - below
    a = 1 - b
    low = below < 0
    alone = low | (below + 1 == size)
    both, slope = where(low, b, a) * 0.5, where(low, size, 0 - size) * 0.5
    column = cast(where(low, 0, below), np.int64)
    return column, alone, where(alone, both, a), where(alone, both, b), where(alone, slope, 0 - size), where(alone, slope, size)


@part
def _row(p, base, S, spare):
    return where((p >= base) & (p < base + S), p, spare)


@part
def _store_four(a, b, c, d, x, i):
    """x[i + k] = a[k], b[k], c[k], d[k]"""
    a0, a1 = zipped(a, c)
    b0, b1 = zipped(b, d)
    v0, v1 = zipped(a0, b0)
    v2, v3 = zipped(a1, b1)
    store(v0, x, i, 0)
    store(v1, x, i + 4, 0)
    store(v2, x, i + 8, 0)
    store(v3, x, i + 12, 0)


@part
def _prefetch(i, begin, size, samples, features):
    """Prefetch the pixels of sample i, which are far apart in memory."""
    listed, corner, _, _, _, _ = samples
    j = listed[i, 0]
    for k in range(begin, begin + size, LANES):
        prefetch(features, 0, corner[j, 0] + k)
        prefetch(features, 0, corner[j, 1] + k)
        prefetch(features, 0, corner[j, 2] + k)
        prefetch(features, 0, corner[j, 3] + k)


@part
def _copy(n, D, grad, row):
    for g in range(row.shape[0]):
        for k in range(D):
            row[g, k] = grad[n, g * D + k]


@part
def _sum(found, coming, here, there, D, features, coef, own, samples, row):
    """row[g] = Σ_i coef[i, g]·tap_i[g] over the samples listed from `here` on, prefetching those from `there` on."""
    listed, zero = samples[0], spread(row.dtype.type(0))
    for g in range(row.shape[0]):
        for k in range(0, D, 2 * LANES):
            one, other, two, c, end = zero, zero, k + LANES < D, g * D + k, (g + 1) * D
            for i in range(max(found, coming)):
                if i < coming:
                    _prefetch(there + i, c, 2 * LANES if two else LANES, samples, features)
                if i < found:
                    j, f = listed[here + i, 0], coef[own + listed[here + i, 1], g]
                    one = fma(f, _tap(j, c, end, features, samples), one)
                    if two:
                        other = fma(f, _tap(j, c + LANES, end, features, samples), other)
            store(one, row, g, k)
            if two:
                store(other, row, g, k + LANES)


@part
def _tap(j, c, end, features, samples):
    """Sample j: LANES channels from `c` on."""
    _, corner, weigh, _, _, _ = samples
    c0, c1, c2, c3 = corner[j, 0], corner[j, 1], corner[j, 2], corner[j, 3]
    v = fma(weigh[j, 0], load(features, 0, c0 + c, c0 + end), spread(weigh.dtype.type(0)))
    v = fma(weigh[j, 1], load(features, 0, c1 + c, c1 + end), v)
    v = fma(weigh[j, 2], load(features, 0, c2 + c, c2 + end), v)
    return fma(weigh[j, 3], load(features, 0, c3 + c, c3 + end), v)


@exact_part
def _dots(i, n, begin, D, features, coef, own, samples, row, g_locations, g_weights):
    """Add the gradients of sample i's location and weights; the latter are tap_i[g]·row[g].

    An exact part, since two kernels must return the same bits: the compiler may not reorder sums.
    """
    listed, corner, weigh, by_x, by_y, _ = samples
    j, at = listed[i, 0], listed[i, 1]
    zero, weight = spread(row.dtype.type(0)), load_four(weigh, j, 0, 4)
    whole = weight * 0  # Σ_g coef[g]·(pixel[g]·row[g]) of the four corners
    for g in range(row.shape[0]):
        d = g * D
        c0, c1, c2, c3 = corner[j, 0] + d, corner[j, 1] + d, corner[j, 2] + d, corner[j, 3] + d
        v0, v1, v2, v3 = zero, zero, zero, zero
        for k in range(0, D, LANES):
            v = load(row, g, k, D)
            v0, v1 = fma(v, load(features, 0, c0 + k, c0 + D), v0), fma(v, load(features, 0, c1 + k, c1 + D), v1)
            v2, v3 = fma(v, load(features, 0, c2 + k, c2 + D), v2), fma(v, load(features, 0, c3 + k, c3 + D), v3)
        dots = totals(v0, v1, v2, v3)
        if g_weights.size:
            g_weights[begin + at, g] = total(weight * dots)
        whole = whole + dots * coef[own + at, g]
    if g_locations.size:
        g_locations[n, 2 * listed[i, 2]] += total(load_four(by_x, j, 0, 4) * whole)
        g_locations[n, 2 * listed[i, 2] + 1] += total(load_four(by_y, j, 0, 4) * whole)


@part
def _scatter(i, n, low, high, groups, per_group, D, coef, own, samples, grad, g_features):
    """g_features[p] += weight·coef[i, g]·grad[g] for the four corners p, in blocks `low` to `high`, those of `groups`."""
    listed, corner, weigh, _, _, _ = samples
    zero, j, at = spread(grad.dtype.type(0)), listed[i, 0], own + listed[i, 1]
    w0, w1, w2, w3 = weigh[j, 0], weigh[j, 1], weigh[j, 2], weigh[j, 3]
    for g in range(groups[0], groups[1]):
        begin, end = max(low - g * per_group, 0) * LANES, min((high - g * per_group) * LANES, D)
        f, d = coef[at, g], g * D
        c0, c1, c2, c3 = corner[j, 0] + d, corner[j, 1] + d, corner[j, 2] + d, corner[j, 3] + d
        for k in range(begin, end, LANES):
            v = fma(f, load(grad, n, d + k, d + D), zero)
            # one after the other, since two corners may be the same pixel
            store_some(fma(w0, v, load(g_features, 0, c0 + k, c0 + D)), g_features, 0, c0 + k, c0 + D)
            store_some(fma(w1, v, load(g_features, 0, c1 + k, c1 + D)), g_features, 0, c1 + k, c1 + D)
            store_some(fma(w2, v, load(g_features, 0, c2 + k, c2 + D)), g_features, 0, c2 + k, c2 + D)
            store_some(fma(w3, v, load(g_features, 0, c3 + k, c3 + D)), g_features, 0, c3 + k, c3 + D)


@exact_part
def _softmax(begin, logits, share):
    """share = softmax of a unit's logits, from `begin` on."""
    most, whole = logits.dtype.type(-np.inf), 0.0
    for i in range(share.shape[0]):
        most = max(most, logits[begin + i, 0])
    for i in range(share.shape[0]):
        share[i, 0] = np.exp(logits[begin + i, 0] - most)
        whole += share[i, 0]
    for i in range(share.shape[0]):
        share[i, 0] /= whole


@exact_part
def _through_softmax(begin, share, g):
    """Turn the gradient of the shares into that of the logits, if it is needed."""
    mean = 0.0
    for i in range(share.shape[0] if g.size else 0):
        mean += share[i, 0] * g[begin + i, 0]
    for i in range(share.shape[0] if g.size else 0):
        g[begin + i, 0] = share[i, 0] * (g[begin + i, 0] - mean)
