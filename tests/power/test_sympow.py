"""Symmetric powers against their purpose (inner products, sums over all pairs) and against values written out by hand."""

from __future__ import annotations

from itertools import combinations_with_replacement, permutations
from math import comb, prod

import pytest
import torch
from torch import Tensor

import sonde
from helpers.devices import OneDevice
from sonde.power import sympow, sympow_dim, sympow_mm

EVERY = [(d, p, t) for d in (8, 12, 16, 64) for p in (1, 2, 3, 4) for t in range(1, d + 1) if d % t == 0]
FEW = 3_000_000  # elements of φ: beyond that, one row at a time takes minutes


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("d", "power", "d_tile"), EVERY)
def test_inner_products_are_powers(d, power, d_tile):
    """⟨φ(x), φ(y)⟩ = (x·y)^p, for every tile that divides d."""
    D = comb(d // d_tile + power - 1, power) * d_tile**power
    assert sympow_dim(d, power, d_tile) == D
    rows = max(1, min(3, FEW // D))
    if D > 4 * FEW:
        pytest.skip(f"D is {D}")
    x, y = random(rows, d), random(rows, d, seed=1)
    found = sympow(x, power, d_tile=d_tile) @ sympow(y, power, d_tile=d_tile).mT
    want, scale = (x @ y.mT) ** power, x.norm(dim=1)[:, None] ** power * y.norm(dim=1) ** power
    assert ((found - want).abs() <= 1e-12 * scale).all()


@pytest.mark.parametrize("impl", ["reference", "numba", "triton"])
def test_the_order_of_the_basis(impl):
    """Tile indices never increase, and the first varies fastest; digits within tiles follow the definition."""
    if impl != "reference":
        pytest.importorskip(impl)
    x = random(6)
    n, t, p = 3, 2, 3
    s = sorted((tuple(reversed(c)) for c in combinations_with_replacement(range(n), p)), key=lambda c: c[::-1])
    assert s[:3] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    want = []
    for tiles in s:
        mult = len(set(permutations(tiles)))
        for digits in range(t**p):
            a = [digits // t ** (p - 1 - i) % t for i in range(p)]
            want.append(mult**0.5 * prod(x[tiles[p - 1 - i] * t + a[i]].item() for i in range(p)))
    torch.testing.assert_close(sympow(x, p, d_tile=t, impl=impl), torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0)
    plain = sympow(random(3), 2, d_tile=1, scaled=False, impl=impl)
    a, b, c = random(3)
    torch.testing.assert_close(plain, torch.stack([a * a, a * b, a * c, b * b, b * c, c * c]))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dimension(dim):
    x = random(4, 6, 8)
    want = sympow(x.movedim(dim, -1), 2, d_tile=2).movedim(-1, dim)
    torch.testing.assert_close(sympow(x, 2, d_tile=2, dim=dim), want)


def test_roots_are_applied_before_rounding():
    """√2 in bfloat16 is 1.4140625, so multiplying before rounding is more exact than multiplying by the rounded root."""
    x = random(2000, 8, dtype=torch.float32).bfloat16()
    exact = sympow(x.double(), 2, d_tile=1)
    torch.testing.assert_close(sympow(x, 2, d_tile=1), exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["numba", "triton"])
@pytest.mark.parametrize(("d", "d_tile", "power"), [(8, 4, 2), (6, 3, 2), (6, 2, 3), (4, 2, 4)])
def test_state_and_query_are_the_sum_over_pairs(impl, d, d_tile, power):
    """φ(q) (φ(k)ᵀ v) = Σ (q·k)^p v, and the gradients agree."""
    pytest.importorskip(impl)
    q, k, v = (x.requires_grad_() for x in (random(5, d), random(19, d, seed=1), random(19, 3, seed=2)))
    how = dict(d_tile=d_tile, impl=impl)
    out = sympow_mm(q, sympow_mm(k.mT, v, power, expand="m", **how), power, expand="k", **how)
    want = (q @ k.mT) ** power @ v
    torch.testing.assert_close(out, want, rtol=1e-11, atol=1e-10)
    ct = random(5, 3, seed=3)
    got, expected = torch.autograd.grad(out, (q, k, v), ct), torch.autograd.grad(want, (q, k, v), ct)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["reference", "numba", "triton"])
def test_what_is_not_added_is_not_read(impl):
    """As in BLAS, beta = 0 ignores `accumulate`, whatever it contains."""
    if impl != "reference":
        pytest.importorskip(impl)
    a, b = random(3, 4), random(10, 2)
    bad = torch.full((3, 2), torch.nan, dtype=torch.float64)
    want = sympow_mm(a, b, 2, expand="k", d_tile=1, impl=impl)
    assert torch.equal(sympow_mm(a, b, 2, expand="k", d_tile=1, accumulate=bad, beta=0.0, impl=impl), want)
    added = sympow_mm(a, b, 2, expand="k", d_tile=1, accumulate=want, alpha=0.1, beta=2.5, scale=3.0, impl=impl)
    torch.testing.assert_close(added, 0.3 * want + 2.5 * want, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((random(3, 6), 2), dict(d_tile=4), ("sympow", "d_tile must divide d=6", "d_tile=4")),
        ((random(3, 6), 0), {}, ("sympow", "power", ">= 1", "0")),
        ((random(3, 6), 5), {}, ("sympow", "power must be 1 to 4", "5")),
        ((random(3, 6), 2.0), {}, ("sympow", "power must be an integer", "2.0")),
        ((random(3, 6), 2), dict(dim=2), ("sympow", "dim must be in", "2")),
        ((random(3, 6), 2), dict(scaled=1), ("sympow", "scaled must be True or False",)),
    ],
)  # fmt: skip
def test_bad_input(arguments, options, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        sympow(*arguments, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_inner_sizes_that_do_not_match():
    """The message states the expected D."""
    with pytest.raises(ValueError, match=r"b must be \[B, D, N\].*D=2304 for d=64, power=2, d_tile=8.*got \[1, 2080, 5\]"):
        sympow_mm(random(3, 64), random(2080, 5), 2, expand="k", d_tile=8)
    with pytest.raises(ValueError, match=r"accumulate must be .*D=2304.*got"):
        sympow_mm(random(64, 3), random(3, 5), 2, expand="m", d_tile=8, accumulate=random(2080, 5), beta=1.0)
    with pytest.raises(ValueError, match="expand must be 'k' or 'm'"):
        sympow_mm(random(3, 8), random(36, 5), 2, expand="n")


def test_dimensions():
    assert sympow_dim(64, 2) == sympow_dim(64, 2, 8) == 2304
    assert sympow_dim(64, 4, 8) == 1_351_680
    with pytest.raises(ValueError, match="sympow_dim"):
        sympow_dim(64, 2, 5)
    assert sonde.power.sympow_dim(7, 3) == sympow_dim(7, 3, 1) == 84


def test_tables_are_computed_without_waiting():
    """In a graph capture, tables are computed on the device: the same, and nothing is copied from the host."""
    from sonde.power._sympow.basis import arrays, computed

    for n, power in [(1, 1), (1, 4), (5, 0), (5, 1), (16, 2), (7, 3), (6, 4)]:
        for x, y in zip(computed(n, power, torch.device("cpu")), arrays(n, power), strict=True):
            assert torch.equal(x, torch.from_numpy(y)), (n, power)
            assert x.dtype == torch.from_numpy(y).dtype
        with OneDevice():
            assert [x.shape for x in computed(n, power, torch.device("meta"))] == [x.shape for x in arrays(n, power)]
