"""Aggregates of neighbours' features: every gradient, every σ, and values that must not leak into results."""

import pytest
import torch

import sonde
from helpers.exactness import same_bits
from helpers.operators import cotangents, leaves, value_and_grads
from sonde.points._search import arguments
from sonde.points._search.reference import searching_in

pytestmark = pytest.mark.interpreted(False)  # seconds each in the interpreter; a few tests stand for all

try:
    from hypothesis import given
    from hypothesis import strategies as st
except ImportError:  # the GPU machine has none
    given = None
NAMES = ["knn_aggregate", "radius_aggregate"]
needs_hypothesis = pytest.mark.skipif(given is None, reason="needs hypothesis")


@pytest.fixture(params=["by default", "by boxes"])
def algorithm(request, monkeypatch):
    """Both algorithms: the one chosen by size, and the search by boxes at any size."""
    if request.param == "by boxes":
        monkeypatch.setattr(arguments, "FEW", 0)
        monkeypatch.setattr(arguments, "PAIRS", 0)
    return request.param


def made(M=9, N=80, F=5, D=3, dtype=torch.float32, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (M, D), (N, D), (N, F)
    return [torch.rand(*shape, generator=g, dtype=torch.float64).to(device, dtype) for shape in shapes]


def call(name, impl, sigma=0.1, reach=0.4, k=6):
    what = k if name == "knn_aggregate" else reach
    return lambda q, p, f, *s: getattr(sonde, name)(q, p, f, what, *(s or (sigma,)), impl=impl)


def dense(name, q, p, f, sigma, reach=0.4, k=6):
    """The textbook formula in float64, with the M×N matrix."""
    d = (q[:, None] - p[None]).square().sum(-1).sqrt()
    if name == "knn_aggregate":
        inside = torch.zeros_like(d, dtype=torch.bool).scatter_(1, d.topk(k, largest=False).indices, True)
    else:
        inside = d <= reach
    w = torch.softmax(torch.where(inside, -d / sigma, -torch.inf), -1).nan_to_num(0)
    return w @ f


@pytest.mark.interpreted(True)
@pytest.mark.parametrize("name", NAMES)
def test_is_the_textbook_form(name, impl, algorithm):
    """Values and all four gradients agree with a dense masked softmax and autograd."""
    args = leaves([*made(dtype=torch.float64, device=impl.device), torch.tensor(0.2, dtype=torch.float64, device=impl.device)])
    out, want = call(name, impl.impl)(*args), dense(name, *args)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    weights = torch.arange(out.numel(), dtype=out.dtype, device=out.device).view(out.shape).cos()
    for a, b in zip(torch.autograd.grad(out, args, weights), torch.autograd.grad(want, args, weights)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 10])
@pytest.mark.parametrize("name", NAMES)
def test_any_sigma(name, target, algorithm, ratio):
    """For σ/r from 1e-3 to 10 no epsilon interferes, nothing overflows, and all gradients are as exact as d/σ."""
    reach = 0.4
    args = [*made(device=target.device), torch.tensor(ratio * reach, device=target.device)]
    got = value_and_grads(call(name, target.impl), args)
    want = value_and_grads(call(name, "reference"), [a.double() for a in args])
    sigma = float(args[3])
    ulp = 1e-6 * (4 + reach / sigma)  # rounding of d / σ, which the softmax sees
    along = cotangents(got[0])[0].norm() * args[2].norm(dim=1).max()  # bounds |go·f|; where a − Δ cancels, its rounding stays
    floor = [0, along / sigma, along / sigma, 0, along * reach / sigma**2]
    for a, b, least in zip([*got[0], *got[1]], [*want[0], *want[1]], floor):
        assert a.isfinite().all()
        assert (a.double() - b).norm() <= ulp * (b.norm() + least)
    ones = call(name, target.impl, ratio * reach)(*args[:2], torch.ones_like(args[2]))
    some = want[0][0].abs().sum(1) > 0
    torch.testing.assert_close(ones[some], torch.ones_like(ones[some]), rtol=1e-6, atol=0)


@pytest.mark.interpreted(True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_single_neighbour_pulls_at_nothing(name, target, dtype):
    """A single neighbour has weight 1 at any distance: gradients of queries, points and σ are exactly zero."""
    g = torch.Generator().manual_seed(0)
    points = 3 * torch.arange(30.0)[:, None].expand(-1, 3) + torch.rand(30, 3, generator=g)
    queries, features = points[::3] + 0.3 * torch.rand(10, 3, generator=g), torch.randn(30, 37, generator=g)
    wide = torch.promote_types(dtype, torch.float32)
    args = [queries.to(wide), points.to(wide), features.to(dtype), torch.tensor(0.07, dtype=wide)]
    out, grads = value_and_grads(call(name, target.impl, reach=1.0, k=1), [a.to(target.device) for a in args])
    assert torch.equal(out[0].cpu(), features[::3].to(dtype))
    assert [bool((g == 0).all()) for g in grads] == [True, True, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_nobody_there(name, impl):
    """No points, a non-finite query or an empty ball: zeros, and zero gradients."""
    queries, points, features = made(device=impl.device)
    queries[0], queries[1, 1], queries[2] = torch.nan, torch.inf, 50.0
    out, grads = value_and_grads(call(name, impl.impl), [queries, points, features])
    assert (out[0][:2] == 0).all()
    assert (grads[0][:2] == 0).all()
    assert (name == "knn_aggregate") != bool((out[0][2] == 0).all())
    assert all(g.isfinite().all() for g in [*out, *grads])
    out, grads = value_and_grads(call(name, impl.impl), [queries, points[:0], features[:0]])
    assert out[0].shape == (9, 5)
    assert (out[0] == 0).all()
    assert (grads[0] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_absent_does_not_poison(name, impl, algorithm):
    """Features of points that no query sees may be anything, and so may the coordinates of non-finite points."""
    queries, points, features = made(device=impl.device)
    points[:20] += 100
    points[20:25, 1] = torch.nan
    clean = features.clone()
    features[:25] = torch.nan
    got = value_and_grads(call(name, impl.impl), [queries, points, features])
    want = value_and_grads(call(name, impl.impl), [queries, points, clean])
    assert all(x.isfinite().all() for x in [*got[0], *got[1]])
    assert same_bits([*got[0], *got[1]], [*want[0], *want[1]])


@pytest.mark.parametrize("name", NAMES)
def test_duplicates_and_zero_distances(name, impl):
    """Queries on top of points, and coinciding points, cause no 0/0."""
    queries, points, features = made(dtype=torch.float64, device=impl.device)
    points[:9], points[9:18] = queries, queries
    got = value_and_grads(call(name, impl.impl), [queries, points, features])
    want = value_and_grads(call(name, "reference"), [queries, points, features])
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_sigma_of_every_row(name, impl):
    """A [B] tensor is one σ per row of the batch; a scalar tensor serves all rows, and its gradient is the sum over them."""
    rows = [made(dtype=torch.float64, device=impl.device, seed=s) for s in range(2)]
    batch = [torch.stack(x) for x in zip(*rows)]
    sigma = torch.tensor([0.1, 0.5], dtype=torch.float64, device=impl.device)
    out, _ = value_and_grads(call(name, impl.impl), [*batch, sigma])
    for b, row in enumerate(rows):
        torch.testing.assert_close(out[0][b], call(name, impl.impl, float(sigma[b]))(*row), rtol=1e-12, atol=1e-13)
    one = value_and_grads(call(name, impl.impl), [*batch, sigma[0]])
    each = value_and_grads(call(name, impl.impl), [*batch, sigma[:1].expand(2)])
    torch.testing.assert_close(one[0][0], call(name, impl.impl, 0.1)(*batch), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(one[1][3], each[1][3].sum(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_mapped_with_an_index(name, target, monkeypatch):
    """torch.vmap expands the index of unmapped points, and every row reads its own copy."""
    monkeypatch.setattr(arguments, "FEW", 0)
    monkeypatch.setattr(arguments, "PAIRS", 0)
    queries, points, features = made(M=4, N=40, F=3, dtype=torch.float64, device=target.device)
    sigma = torch.tensor([0.1, 0.3, 0.2], dtype=torch.float64, device=target.device)
    for args, dims in (
        ((queries, points, features, sigma), (None, None, None, 0)),
        ((torch.stack([queries, queries.flip(0)]), points, features, sigma[0]), (0, None, None, None)),
        ((queries, torch.stack([points, points.flip(0)]), features, sigma[0]), (None, 0, None, None)),
    ):
        gradients = torch.func.grad(lambda *x: call(name, target.impl)(*x).sin().sum(), (0, 1, 2, 3))
        wanted = torch.func.grad(lambda *x: call(name, "reference")(*x).sin().sum(), (0, 1, 2, 3))
        for a, b in zip(torch.vmap(gradients, dims)(*args), torch.vmap(wanted, dims)(*args)):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_point_that_everybody_sees(numba_target):
    """A point with thousands of pairs is summed in pieces: the same sums, and the same bits for any number of threads."""
    g = torch.Generator().manual_seed(0)
    queries, points, features = (torch.rand(n, c, generator=g) for n, c in ((20_000, 3), (3, 3), (3, 5)))
    want = value_and_grads(call("knn_aggregate", "reference", k=2), [x.double() for x in (queries, points, features)])
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outs, grads = value_and_grads(call("knn_aggregate", "numba", k=2), (queries, points, features))
        found.append([*outs, *grads])
    assert all(same_bits(found[0], other) for other in found[1:])
    for a, b in zip(found[0], [*want[0], *want[1]]):
        assert (a.double() - b).norm() <= 2e-5 * b.norm()


def test_offsets_that_nobody_checked(numba_target):
    """A graph may pass any offsets, unchecked: nothing out of bounds is read or written."""
    from sonde.points.knn_aggregate.api import _knn_aggregate, arguments

    args = list(arguments(*made(N=200)))
    at = [i for i, a in enumerate(_knn_aggregate.forward_op._schema.arguments) if a.name.endswith("_offsets")]
    for bad in ([0, 10**9], [-5, 3, 10**12], [7, 2, 1], [0, 0, 0]):
        given = list(args)
        given[at[0]] = given[at[1]] = torch.tensor(bad)
        given[3:6] = [None] * 3
        out, _, indices = _knn_aggregate.forward_op(*given, "numba", False)
        assert out.isfinite().all()
        assert ((indices >= -1) & (indices < 200)).all()


WRONG = {
    "k must be an integer >= 1; got 0": dict(k=0),
    "k must be an integer >= 1; got -2": dict(k=-2),
    "k must be an integer >= 1; got 2.0": dict(k=2.0),
    "k must be less than 2³¹; got 9223372036854775808": dict(k=2**63),
    "k must be less than 2³¹; got 2147483648": dict(k=2**31, queries=torch.rand(0, 3)),
    "k=2147483647 neighbours of 1000 queries take ": dict(k=2**31 - 1, queries=torch.rand(1000, 3)),
    "k must be an integer >= 1; got True": dict(k=True),
    "radius must be a number > 0; got 0": dict(radius=0),
    "radius must be a number > 0; got -1.0": dict(radius=-1.0),
    "radius must be a number > 0; got nan": dict(radius=float("nan")),
    "radius must be a number > 0; got '1'": dict(radius="1"),
    "radius must be a number > 0; got tensor": dict(radius=torch.tensor(1.0)),
    "sigma must be a number > 0; got 0": dict(sigma=0),
    "sigma must be a number > 0; got -0.1": dict(sigma=-0.1),
    "sigma must be a number > 0; got None": dict(sigma=None),
    "sigma must be > 0; got -1.0": dict(sigma=torch.tensor(-1.0)),
    "sigma must be a floating-point tensor or a number; got torch.int64": dict(sigma=torch.tensor(1)),
    "sigma must be a number, a tensor [] or one [B] with B=1; got [2]": dict(sigma=torch.ones(2)),
    "features must be [N, F] with N=80 (from points); got [79, 5]": dict(features=torch.rand(79, 5)),
    "points must be [N, D] with D=3 (from queries); got [80, 2]": dict(points=torch.rand(80, 2)),
    "points must have at least one dimension": dict(queries=torch.rand(9, 0), points=torch.rand(80, 0)),
    "points must have 3 dimensions [B, N, D]; got 2": dict(queries=torch.rand(1, 9, 3)),
    "batch must be a pair (query_offsets, point_offsets); got a list of 3": dict(batch=[0, 9, 80]),
    "query_offsets must ascend from 0 to 9, where the last segment ends; got [0, 8]": dict(batch=([0, 8], [0, 80])),
    "point_offsets must ascend from 0 to 80, where the last segment ends; got [0, 60, 50, 80]": dict(
        batch=([0, 1, 2, 9], [0, 60, 50, 80])
    ),
    "point_offsets must ascend from 0 to 80, where the last segment ends; got [1, 80]": dict(batch=([0, 9], [1, 80])),
    "query_offsets and point_offsets must have the same length, one more than there are segments; got 2 and 3": dict(
        batch=([0, 9], [0, 2, 80])
    ),
    "query_offsets must be int64 or int32; got torch.float32": dict(batch=(torch.tensor([0.0, 9.0]), [0, 80])),
    "query_offsets must be a vector of S + 1 offsets; got [1, 2]": dict(batch=(torch.tensor([[0, 9]]), [0, 80])),
    "query_offsets must be an integer tensor or a list of integers; got 'ab'": dict(batch=("ab", [0, 80])),
    "query_offsets must be an integer tensor or a list of integers; got b'": dict(batch=(bytes([0, 9]), [0, 80])),
    "point_offsets must be an integer tensor or a list of integers; got bytearray": dict(batch=([0, 9], bytearray([0, 80]))),
    "query_offsets must ascend from 0 to 9, where the last segment ends; got [0, 1180591620717411303424]": dict(
        batch=([0, 2**70], [0, 80])
    ),
    "impl='cuda' must be one of 'auto'": dict(impl="cuda"),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("name", [*NAMES, "knn", "radius_neighbors", "radius_search"])
@pytest.mark.usefixtures("numba_target")
def test_errors(name, message, monkeypatch):
    """Every wrong argument is named, with what was expected and what was given, and nothing is launched."""
    arguments = {
        "knn": ("queries", "points", "k"), "radius_search": ("queries", "points", "radius"),
        "radius_neighbors": ("queries", "points", "radius", "k"),
        "knn_aggregate": ("queries", "points", "features", "k", "sigma"),
        "radius_aggregate": ("queries", "points", "features", "radius", "sigma"),
    }[name]  # fmt: skip
    values = dict(zip(("queries", "points", "features"), made()), k=3, radius=0.4, sigma=0.1)
    if not set(WRONG[message]) <= {*arguments, "batch", "impl"}:
        pytest.skip(f"{name} has no such argument")
    module = __import__(f"sonde.points.{name}.cpu", fromlist=["forward"])
    first = "forward" if hasattr(module, "forward") else "forward_pass"
    monkeypatch.setattr(module, first, lambda *_: pytest.fail("launched"))
    given = {key: values[key] for key in arguments} | WRONG[message]
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(sonde, name)(**given)
    assert f"{name}: {message}" in str(caught.value)


if given is not None:

    @needs_hypothesis
    @pytest.mark.parametrize("name", NAMES)
    @given(st.data())
    def test_properties(name, numba_target, data):
        """Linear in features, a partition of unity, invariant to the order of points and queries and to the unit of length."""
        M, N, D, F = (data.draw(st.integers(low, high)) for low, high in ((1, 20), (7, 200), (1, 3), (1, 20)))
        q, p, f = made(M, N, F, D, torch.float64, seed=data.draw(st.integers(0, 99)))
        fn = call(name, "numba")
        out = fn(q, p, f)
        order, rows = torch.randperm(N), torch.randperm(M)
        torch.testing.assert_close(fn(q, p[order], f[order]), out, rtol=1e-9, atol=1e-11)
        assert same_bits([fn(q[rows], p, f)], [out[rows]])
        torch.testing.assert_close(fn(q, p, 2 * f + f.flip(1)), 2 * out + fn(q, p, f.flip(1)), rtol=1e-9, atol=1e-11)
        whole = fn(q, p, torch.ones_like(f))
        assert ((whole - 1).abs() < 1e-12).logical_or(whole == 0).all()
        twice = call(name, "numba", sigma=0.2, reach=0.8)
        assert same_bits([twice(2 * q, 2 * p, f)], [out])


@pytest.mark.interpreted(True)
@pytest.mark.parametrize("sigma", [1e-3, 1e-38, 1e-44, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_four_at_one_distance_weigh_a_quarter_each(name, sigma, impl, algorithm):
    """Four equidistant neighbours weigh ¼ each at any distance and any σ, in the value and in the features' gradient."""
    q, p, f = torch.zeros(1, 3), torch.tensor([[10.0, 0, 0], [-10, 0, 0], [0, 10, 0], [0, -10, 0]]), torch.eye(4)
    args = leaves([x.to(impl.device) for x in (q, p, f)])
    out = call(name, impl.impl, sigma, reach=11.0, k=4)(*args)
    assert out.tolist() == [[0.25] * 4]
    g_queries, g_points, g_features = torch.autograd.grad(out.sum(), args)
    assert g_features.tolist() == [[0.25] * 4] * 4
    assert not g_queries.isnan().any()
    assert not g_points.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_many_widths_away(name, impl, algorithm):
    """Distances of thousands of σ, as with coordinates in millimetres and the default σ, cost the features' gradient no digits."""
    q, p, f = (x.to(impl.device) for x in made(N=150))
    args = leaves([500 * q, 500 * p, f])
    out = call(name, impl.impl, 0.1, reach=1000.0)(*args)
    wide = leaves([x.detach().double() for x in args])
    want = call(name, "reference", 0.1, reach=1000.0)(*wide)
    ct = cotangents([out])
    a, b = torch.autograd.grad(out, args[2], ct)[0], torch.autograd.grad(want, wide[2], [c.double() for c in ct])[0]
    assert (out - want).norm() <= 2e-6 * want.norm()
    assert (a - b).norm() <= 2e-6 * b.norm()


TINY, HUGE = (5e-324, 1e-300, 1e-46, 1e-45, 1e-39), (1e39, 1e300, 1.7e308, float("inf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_width(name, dtype, impl):
    """For tiny σ only the nearest points count, equally; for huge σ all points do. As a number and as a tensor."""
    points = torch.tensor([[0.0, 2, 0], [1, 0, 0], [0, 0, 3], [-1, 0, 0], [0, 1, 0], [0, -1, 0]], dtype=dtype, device=impl.device)
    features = torch.tensor([[5.0], [2], [9], [2], [2], [2]], dtype=dtype, device=impl.device).expand(-1, 3).contiguous()
    features[1] *= 1 + torch.arange(3, dtype=dtype, device=impl.device)
    query = torch.zeros(1, 3, dtype=dtype, device=impl.device)
    for sigma in (*TINY, *HUGE):
        near = points.norm(dim=1) == 1 if sigma < 1 else points[:, 0] > -9
        want, share = features[near].mean(0, keepdim=True), near.to(dtype)[:, None].expand(-1, 3) / near.sum()
        limits = torch.finfo(dtype)
        widths = [torch.tensor(sigma, dtype=dtype, device=impl.device)]
        for width in [sigma, *(w for w in widths if limits.tiny * limits.eps <= float(w))]:
            given = () if isinstance(width, float) else (width,)
            fn = call(name, impl.impl, sigma, reach=4.0, k=6)
            out, grads = value_and_grads(fn, [query, points, features, *given], [torch.ones_like(want)])
            torch.testing.assert_close(out[0], want, msg=f"σ = {width}")
            torch.testing.assert_close(grads[2], share, msg=f"σ = {width}")
        if sigma < 1:  # only the nearest count, and ties share their features: zero gradients
            for some in (points[[0, 1, 2]], points[[0, 2, 3, 4, 5]], points[[2, 0]]):
                alike = torch.where(some.norm(dim=1, keepdim=True) == some.norm(dim=1).min(), 2.0, 7.0).to(dtype)
                for given in ((), (widths[0],) if float(widths[0]) > 0 else ()):
                    _, grads = value_and_grads(call(name, impl.impl, sigma, reach=4.0, k=len(some)), [query, some, alike, *given])
                    assert all((g == 0).all() for g in (*grads[:2], *grads[3:])), f"σ = {sigma}"
        else:
            assert all(g.isfinite().all() for g in grads), f"σ = {sigma}"
    huge = call(name, impl.impl, 10**400, reach=10**400, k=6)(query, points, features)
    torch.testing.assert_close(huge, features.mean(0, keepdim=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_width_of_nothing_or_no_number(name, impl):
    """σ that is NaN or not positive is refused, as a number and as a CPU tensor, whose value can be read."""
    args = [x.to(impl.device) for x in made()]
    for bad in (float("nan"), 0.0, -1.0, -float("inf")):
        with pytest.raises(ValueError, match=f"{name}: sigma must be a number > 0; got"):
            call(name, impl.impl, bad)(*args)
        if impl.device == "cpu":
            with pytest.raises(ValueError, match=f"{name}: sigma must be > 0; got"):
                call(name, impl.impl)(*args, torch.tensor(bad))


ENDS = [
    (torch.float32, 3e38), (torch.float32, -3.3e38), (torch.float32, 1e-36), (torch.float64, 1.7e308), (torch.float64, 1e-300),
    (torch.bfloat16, 3e38), (torch.float16, 65_000.0), (torch.float16, 6e-5),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "scale"), ENDS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_features_at_the_ends_of_their_range(name, dtype, scale, impl):
    """A mean never exceeds its terms, so no intermediate sum may overflow; small features lose no digits."""
    wide = torch.promote_types(dtype, torch.float32)
    queries, points, _ = (x.to(impl.device) for x in made(M=3, N=90, dtype=wide))
    unit = torch.rand(90, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.1 + 0.9
    unit[:, 1], unit[:, 2] = unit[:, 1] * -1, unit[:, 2] * (-1.0) ** torch.arange(90)
    unit[:, 3] *= 1e-30 if abs(scale) > 1e30 else 1.0
    features = (unit * scale).to(impl.device, dtype)
    for sigma in (0.1, 1e-3, 100.0):
        fn = call(name, impl.impl, sigma, reach=2.0, k=50)
        out, grads = value_and_grads(lambda f, fn=fn: fn(queries, points, f), [features])
        with searching_in(wide):
            want, _ = value_and_grads(
                lambda f, s=sigma: call(name, "reference", s, reach=2.0, k=50)(queries.double(), points.double(), f),
                [features.double() / scale],
            )
        got = out[0].double() / scale
        assert got.isfinite().all()
        assert grads[0].isfinite().all()
        bar = {torch.bfloat16: 5e-3, torch.float16: 1e-3}.get(dtype, 4e-6)
        for c in range(5):  # each channel by itself: one is far smaller than the others
            assert (got[:, c] - want[0][:, c]).abs().max() <= bar * unit[:, c].abs().max(), (sigma, c)


@pytest.mark.parametrize("name", NAMES)
def test_infinite_features_stay_infinite(name, impl):
    """An infinite feature makes its mean infinite with the same sign and affects no other."""
    queries, points, features = (x.to(impl.device) for x in made(M=3, N=150))
    features[0, 0], features[1, 1], features[2, 2], features[3, 2] = torch.inf, -torch.inf, torch.inf, -torch.inf
    out, want = (call(name, i, 0.5, reach=3.0, k=60)(queries, points, features) for i in (impl.impl, "reference"))
    torch.testing.assert_close(out, want, equal_nan=True, rtol=1e-5, atol=1e-6)
    if name == "radius_aggregate":
        assert (out[:, 0] == torch.inf).all()
        assert (out[:, 1] == -torch.inf).all()
        assert out[:, 2].isnan().all()
        assert out[:, 3:].isfinite().all()
