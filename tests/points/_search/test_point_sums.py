"""Every long sum in the points family is as exact as the reference's, which torch adds pairwise."""

import pytest
import torch

import sonde
from helpers.exactness import assert_agrees, error
from helpers.operators import cotangents, tuple_of, value_and_grads
from sonde.operators import OPERATORS
from sonde.points._search.reference import searching_in

FEW, MANY = 2, 20_000


def cloud(n, seed=0, scale=0.01):
    return scale * torch.rand(n, 3, generator=torch.Generator().manual_seed(seed))


def line(n):
    """Evenly spaced points, so that consecutive leaves are equally far apart."""
    points = torch.zeros(n, 3)
    points[:, 0] = torch.linspace(0, 1, n)
    return points


def features(n, F=3, seed=1, kind="positive", dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    made = {"positive": torch.rand, "centred": torch.randn}[kind](n, F, generator=g) if kind != "equal" else torch.full((n, F), 0.1)
    return made.to(dtype)


def radius(reach=2.0):
    return lambda impl: lambda q, p, f, s: sonde.radius_aggregate(q, p, f, reach, s, impl=impl)


def knn(k):
    return lambda impl: lambda q, p, f, s: sonde.knn_aggregate(q, p, f, k, s, impl=impl)


WIDTH = torch.tensor(0.1)
# name: the operator by implementation, arguments for n terms, and whether the incoming gradient is all ones
SUMS = {
    "neighbours": (radius(), lambda n: [cloud(FEW, 2), cloud(n), features(n), WIDTH], False),
    "centred": (radius(), lambda n: [cloud(FEW, 2), cloud(n), features(n, kind="centred"), WIDTH], False),
    "equal": (radius(), lambda n: [cloud(FEW, 2), cloud(n), features(n, kind="equal"), WIDTH], True),
    "ever nearer": (radius(), lambda n: [line(1) + 1.1, line(n), features(n), torch.tensor(0.5)], False),
    "ever nearer, in leaps": (radius(), lambda n: [line(1) + 1.1, line(n), features(n), torch.tensor(0.01)], False),
    "half": (radius(), lambda n: [cloud(FEW, 2), cloud(n), features(n, dtype=torch.bfloat16), WIDTH], False),
    "queries": (radius(), lambda n: [cloud(n), cloud(3, 2), features(3), WIDTH], True),
    "half, of queries": (radius(), lambda n: [cloud(n), cloud(3, 2), features(3, dtype=torch.float16), WIDTH], True),
    "features": (radius(), lambda n: [cloud(FEW, 2, 1.0), cloud(5, 3, 1.0), features(5, n), WIDTH], False),
    "queries of the nearest": (knn(2), lambda n: [cloud(n), cloud(3, 2), features(3), WIDTH], True),
    "features of the nearest": (knn(3), lambda n: [cloud(FEW, 2, 1.0), cloud(5, 3, 1.0), features(5, n), WIDTH], False),
    "nearest": (None, lambda n: [cloud(FEW, 2), cloud(n), features(n), WIDTH], False),
    "distances": (lambda impl: lambda q, p: sonde.knn(q, p, 2, impl=impl).distances, lambda n: [cloud(n) + 1, cloud(3, 2)], True),
    "lists of points": (
        lambda impl: lambda q, p: sonde.radius_search(q, p, 9.0, impl=impl).distances, lambda n: [cloud(2, 2) + 1, cloud(n)], True,
    ),
    "lists of queries": (
        lambda impl: lambda q, p: sonde.radius_search(q, p, 9.0, impl=impl).distances, lambda n: [cloud(n) + 1, cloud(2, 2)], True,
    ),
}  # fmt: skip


def check(name, impl, device, n):
    """At most 2e-6 of the result's scale, or four times the reference's error in the same dtype."""
    call, make, ones = SUMS[name]
    call, args = call or knn(n), make(n)
    outs = tuple_of(call("reference")(*args))
    along = [torch.ones_like(o) for o in outs] if ones else cotangents(outs)
    lossy, lossy_grads = value_and_grads(call("reference"), args, along)
    with searching_in(torch.float32):
        want, want_grads = value_and_grads(call("reference"), [a.double() for a in args], along)
    got, got_grads = value_and_grads(call(impl), [a.to(device) for a in args], [g.to(device) for g in along])
    for i, (a, b, c) in enumerate(zip([*got, *got_grads], [*want, *want_grads], [*lossy, *lossy_grads], strict=True)):
        allowed = max(2e-6 * b.norm().item(), 4 * error(c, b))
        assert error(a.cpu(), b) <= allowed, f"{name}, result {i}: {error(a.cpu(), b):.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("name", SUMS)
def test_any_number_of_terms(name, numba_target):
    check(name, "numba", "cpu", MANY)


def test_what_cancels_leaves_nothing(numba_target):
    """With all points in one place the gradients cancel: what is left in float64 is the rounding of a few terms."""
    operator = OPERATORS["radius_aggregate"]
    args = operator.make("one_pixel", M=17, N=333, F=33, dtype=torch.float64)
    assert_agrees(operator, numba_target, args, slack=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_a_hundred_thousand_terms(name, numba_target):
    check(name, "numba", "cpu", 100_000)


QUICK = ("features", "features of the nearest")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SUMS if name != "nearest"]
)
def test_any_number_of_terms_on_a_gpu(name, triton_target):
    """With few enough terms for the interpreter. (On a GPU knn's k is at most 64.)"""
    check(name, "triton", triton_target.device, 1500 if triton_target.interpreted else MANY)


def test_some_leaves_on_a_gpu(triton_target):
    """A short version of the tests above."""
    check("ever nearer", "triton", triton_target.device, 100)
