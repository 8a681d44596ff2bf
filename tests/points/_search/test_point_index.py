"""An index changes speed and nothing else, and is refused for any points but its own."""

# ruff: noqa: E731 (short functions read better on one line)

import copy
import pickle
import re
import weakref
from functools import partial

import pytest
import torch

import sonde
from helpers.exactness import same_bits
from helpers.operators import Target, value_and_grads
from helpers.versions import MAPS_VIEWS_OF_BITS, sizes_from_data
from sonde.jit import Unsupported
from sonde.points._search import arguments

pytestmark = pytest.mark.interpreted(False)  # seconds each in the interpreter; a few tests stand for all


def calls(impl, **options):
    return [
        lambda q, p, f: sonde.knn_aggregate(q, p, f, 5, impl=impl, **options),
        lambda q, p, f: sonde.radius_aggregate(q, p, f, 0.3, impl=impl, **options),
        lambda q, p, f: sonde.knn(q, p, 5, impl=impl, **options).distances,
    ]


def made(device="cpu", dtype=torch.float32, N=200):
    g = torch.Generator().manual_seed(0)
    return [torch.rand(*shape, generator=g).to(device, dtype) for shape in ((30, 3), (N, 3), (N, 4))]


@pytest.mark.parametrize("N", [20, 200])
def test_changes_no_bit(target, N, monkeypatch):
    """Values and gradients have the same bits with an index as without, for both algorithms; one index serves all radii."""
    queries, points, features = made(target.device, N=N)
    if N == 200:
        monkeypatch.setattr(arguments, "PAIRS", 0)
    points.requires_grad_()  # a leaf already, so the call sees the same tensor
    index = sonde.PointIndex.build(points, impl=target.impl)
    for with_index, without in zip(calls(target.impl, index=index), calls(target.impl)):
        leaf = [queries.requires_grad_(), points, features.requires_grad_()]
        found = []
        for call in (with_index, without):
            out = call(*leaf)
            found.append([out.detach(), *torch.autograd.grad(out.sum(), leaf, allow_unused=True)])
        assert same_bits([x for x in found[0] if x is not None], [x for x in found[1] if x is not None])


def test_is_not_built_again(numba_target, monkeypatch):
    """A given index is the one searched; without one, forward and backward share the index they build."""
    from sonde.op import cpu

    queries, points, features = made()
    index = sonde.PointIndex.build(points)
    built = []
    real = cpu.run
    monkeypatch.setattr(
        cpu, "run", lambda kernel, *a, **o: (kernel.__name__ == "finite" and built.append(a), real(kernel, *a, **o))
    )
    sonde.knn_aggregate(queries, points, features, 5, index=index)
    assert not built
    value_and_grads(lambda q, p, f: sonde.knn_aggregate(q, p, f, 5), (queries, points, features))
    assert len(built) == 1


def test_sizes_alone_decide():
    """The algorithm depends on sizes alone: below the threshold nothing is built, with or without an index."""
    assert not arguments.tiled("numba", 1, arguments.FEW)
    assert arguments.tiled("numba", 1, arguments.FEW + 1)
    assert not arguments.tiled("reference", 10**6, 10**6)


@pytest.mark.parametrize(
    ("points", "word"),
    [
        (lambda p: torch.cat([p, p[:1]]), "shape"),
        (lambda p: p[:, :2].contiguous(), "shape"),
        (lambda p: p[None], "shape"),
        (lambda p: p.double(), "dtype"),
        (lambda p: p.bfloat16(), "dtype"),
        (lambda p: p.clone(), "moved or written"),
        (lambda p: p.add_(1), "moved or written"),
        (lambda p: p.t().contiguous().t(), "moved or written"),
    ],
)
def test_wrong_points_are_refused(points, word):
    """Another count, dimension, dtype, copy or version: a clear error, and nothing is searched."""
    _, own, _ = made()
    index = sonde.PointIndex.build(own)
    other = points(own)
    queries = torch.rand(*other.shape[:-2], 5, other.shape[-1]).to(other.dtype)
    with pytest.raises(ValueError, match=rf"knn: index must .*{word}.*PointIndex.build\(points\)"):
        sonde.knn(queries, other, 3, index=index)


def test_points_in_the_place_of_others_are_refused():
    """An index does not keep its points alive, and refuses others that the allocator later puts at the same address."""
    queries, points, _ = made(N=3000)
    index = sonde.PointIndex.build(points)
    was, alive = points.data_ptr(), weakref.ref(points.untyped_storage())
    del points
    assert alive() is None
    others = []
    while len(others) < 100 and (not others or others[-1].data_ptr() != was):
        others.append(torch.rand(3000, 3))
    with pytest.raises(ValueError, match="knn: index must be that of these points"):
        sonde.knn(queries, others[-1], 3, index=index)


def test_points_of_another_layout_are_refused():
    """Points with the same address, shape and version but other strides are refused, and so is another slice of the same tensor."""
    queries, whole = torch.rand(5, 3), torch.rand(100, 6)
    index = sonde.PointIndex.build(whole[:, :3])
    assert same_bits(sonde.knn(queries, whole[:, :3], 3, index=index), sonde.knn(queries, whole[:, :3], 3))
    for others in (whole.view(200, 3)[:100], whole[:, 3:]):
        with pytest.raises(ValueError, match="knn: index must be that of these points"):
            sonde.knn(queries, others, 3, index=index)


@pytest.mark.parametrize("view", [lambda p: p.detach(), lambda p: p.view_as(p), lambda p: p[:], lambda p: p.view(-1).view(-1, 3)])
def test_views_of_the_same_elements_are_the_points(view):
    queries, points, _ = made()
    index = copy.deepcopy(sonde.PointIndex.build(points))
    sonde.knn(queries, view(points), 3, index=index)
    with torch.inference_mode():
        points = points.clone()
        sonde.knn(queries, view(points), 3, index=sonde.PointIndex.build(points))


def test_a_pickled_index_has_lost_its_points():
    """An index can be pickled, but then matches no points of this process."""
    queries, points, _ = made()
    index = sonde.PointIndex.build(points)
    again = pickle.loads(pickle.dumps(index))
    assert same_bits(again[:3], index[:3])
    with pytest.raises(ValueError, match="knn: index must be that of these points"):
        sonde.knn(queries, points, 3, index=again)


@pytest.mark.parametrize("name", ["numba", pytest.param("reference", marks=MAPS_VIEWS_OF_BITS)])
def test_is_mapped_where_points_are(name):
    """Under torch.vmap an index built inside, or one of shared points, is accepted; one of a single row is refused for mapped
    points."""
    if name == "numba":
        pytest.importorskip("numba")
    queries, points = torch.rand(2, 5, 3), torch.rand(2, 200, 3)
    build, search = partial(sonde.PointIndex.build, impl=name), partial(sonde.knn, k=3, impl=name)
    want = search(queries, points).indices
    one = build(points[0])
    got = torch.vmap(lambda q, p: search(q, p, index=build(p)).indices)(queries, points)
    assert torch.equal(got, want)
    got = torch.vmap(lambda q: search(q, points[0], index=one).indices)(queries)
    assert torch.equal(got[0], want[0])
    with pytest.raises(ValueError, match=r"knn: index must be mapped by torch\.vmap where points are; build it inside"):
        torch.vmap(lambda q, p: search(q, p, index=one).indices)(queries, points)
    with pytest.raises(ValueError, match="knn: index must be that of these points"):
        torch.vmap(lambda q: search(q, points[1], index=one).indices)(queries)
    with pytest.raises(ValueError, match="knn: index must be mapped"):
        torch.vmap(lambda q, p: search(q, points[0], index=build(p)).indices)(queries, points)


def test_torch_func_knows_the_points():
    """Under torch.func an index recognises the caller's tensor through every nesting of transforms."""
    queries, points, _ = made()
    own, index = points[:100], sonde.PointIndex.build(points[:100])
    length = lambda p: sonde.knn(queries, p, 3, index=index).distances.sum()
    inside = lambda p: sonde.knn(queries, p, 3, index=sonde.PointIndex.build(p)).distances.sum()
    torch.testing.assert_close(torch.func.grad(length)(own), torch.func.grad(inside)(own))
    rows = points.view(2, 100, 3)
    torch.testing.assert_close(torch.vmap(torch.func.grad(inside))(rows)[0], torch.func.grad(inside)(own))
    torch.func.jvp(length, (own,), (own,))
    with pytest.raises(ValueError, match="knn: index must be that of these points"):
        torch.func.grad(length)(points[100:])
    with pytest.raises(ValueError, match="knn: index must be mapped"):
        torch.vmap(torch.func.grad(length))(rows)


def test_wrong_things_are_refused():
    """Something that is not an index, and an index of other segments."""
    queries, points, _ = made()
    with pytest.raises(TypeError, match="knn: index must be a PointIndex; got Tensor"):
        sonde.knn(queries, points, 3, index=points)
    batch = ([0, 10, 30], [0, 50, 200])
    index = sonde.PointIndex.build(points, batch=batch[1])
    assert same_bits(sonde.knn(queries, points, 3, batch=batch, index=index), sonde.knn(queries, points, 3, batch=batch))
    for other in (None, ([0, 10, 30], [0, 51, 200]), ([0, 30], [0, 200])):
        with pytest.raises(ValueError, match="knn: index must be built with the same batch"):
            sonde.knn(queries, points, 3, batch=other, index=index)
    with pytest.raises(ValueError, match=r"PointIndex.build: batch must ascend from 0 to 200.*got \[0, 201\]"):
        sonde.PointIndex.build(points, batch=[0, 201])
    with pytest.raises(ValueError, match=r"PointIndex.build: batch must be None for batched points"):
        sonde.PointIndex.build(points[None], batch=[0, 200])
    with pytest.raises(TypeError, match=r"PointIndex\.build: points must be a tensor"):
        sonde.PointIndex.build([1.0])


def test_a_kernel_by_name_is_that_kernel():
    """As in every search: an unsupported request is refused if a kernel is named, and goes to the reference by default."""
    points = torch.rand(9, 4)
    for impl in ("auto", "reference"):
        assert sonde.PointIndex.build(points, impl=impl).impl == "reference"
    with pytest.raises(ValueError, match=r"PointIndex\.build: impl='bogus' must be one of 'auto'"):
        sonde.PointIndex.build(points, impl="bogus")
    pytest.importorskip("numba")
    with pytest.raises(Unsupported, match=r"PointIndex\.build: impl='numba' has kernels for 1 to 3 dimensions, got 4"):
        sonde.PointIndex.build(points, impl="numba")


def test_wide_queries_search_narrow_points():
    """A float32 index cannot answer float64 queries: it is checked, then ignored."""
    queries, points, _ = made()
    index = sonde.PointIndex.build(points)
    assert same_bits(sonde.knn(queries.double(), points, 3, index=index), sonde.knn(queries.double(), points.double(), 3))


def test_goes_through_compiled_functions(numba_target):
    """An index is an ordinary argument of compiled functions; a new one does not recompile."""
    torch._dynamo.reset()
    queries, points, features = made()
    fn = lambda q, p, f, index: sonde.knn_aggregate(q, p, f, 5, index=index) * 2
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    index = sonde.PointIndex.build(points)
    torch.testing.assert_close(compiled(queries, points, features, index), fn(queries, points, features, index))
    other = points + 1
    index = sonde.PointIndex.build(other)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(queries, other, features, index), fn(queries, other, features, index))
    torch._dynamo.reset()


def test_can_be_built_in_a_graph(numba_target):
    """PointIndex.build and the search with its result compile to one graph."""
    torch._dynamo.reset()
    queries, points, features = made()
    fn = lambda q, p, f: sonde.radius_aggregate(q, p, f, 0.3, index=sonde.PointIndex.build(p))
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(queries, points, features), fn(queries, points, features))
    torch._dynamo.reset()


def test_registration(numba_target):
    """Schema, fake implementation and tracing of the index agree, with and without segments."""
    from sonde.points._search.index.api import _point_index

    points = torch.rand(2, 70, 3)
    points[0, 3] = torch.nan
    for offsets in (None, torch.tensor([0, 3, 3, 60, 70])):
        torch.library.opcheck(_point_index.forward_op, (points, offsets, "numba", True))


def test_orders_all_points(impl):
    """The order is a permutation, with non-finite points in the last leaf."""
    points = torch.rand(2, 100, 3)
    points[0, 7, 1], points[1, 50] = torch.nan, torch.inf
    index = sonde.PointIndex.build(points.to(impl.device), impl=impl.impl)
    order = index.order.cpu()
    assert torch.equal(order.sort().values, torch.arange(100, dtype=torch.int32).expand(2, -1))
    ordered = points.gather(1, order.long()[..., None].expand(-1, -1, 3))
    for b, bad in ((0, 7), (1, 50)):
        (at,) = (order[b] == bad).nonzero()
        assert at >= 100 - 32
        assert not index.sorted[b, at].isfinite().all()
        rest = torch.arange(100) != at
        assert torch.equal(index.sorted[b].cpu()[rest], ordered[b, rest])


@pytest.mark.parametrize(
    ("impl", "M", "N", "points", "word"),
    [
        (Target("numba"), 5, 70, dict(min=65), None),
        (Target("numba"), 5, 50, dict(max=64), None),
        (Target("numba"), 5, 70, dict(min=2), "Dim('N', min=65)"),
        (Target("triton"), 6_000, 9_000, dict(min=8_193), None),
        (Target("triton"), 5_000, 9_000, dict(min=8_193), None),
        (Target("triton"), 5_000, 9_000, dict(min=2), "Dim('N', min=8193)"),
        (Target("triton"), 5_000, 5_000, dict(min=2), "Dim('N', max=8192)"),
    ],
)
def test_an_exported_graph_is_of_one_algorithm(impl, M, N, points, word):
    """Sizes choose the algorithm, so a dynamic size must stay on one side of the threshold; with many points any number of queries
    does."""
    pytest.importorskip(impl)

    class Model(torch.nn.Module):
        def forward(self, q, p):
            return sonde.knn(q, p, 3, impl=impl)

    dims = {0: torch.export.Dim("M")}, {0: torch.export.Dim("N", **points)}
    args = torch.empty(M, 3, device=Target(impl).device), torch.empty(N, 3, device=Target(impl).device)
    if word is None:
        program = torch.export.export(Model(), args, dynamic_shapes=dims)
        assert not getattr(program, "_guards_code", [])
    else:
        with pytest.raises(Exception, match=re.escape(word)):
            torch.export.export(Model(), args, dynamic_shapes=dims)


SEARCHES = {
    "knn": lambda q, p, f, **o: sonde.knn(q, p, 5, **o),
    "radius_neighbors": lambda q, p, f, **o: sonde.radius_neighbors(q, p, 0.3, 5, **o),
    "radius_search": lambda q, p, f, **o: sonde.radius_search(q, p, 0.3, **o),
    "knn_aggregate": lambda q, p, f, **o: (sonde.knn_aggregate(q, p, f, 5, **o),),
    "radius_aggregate": lambda q, p, f, **o: (sonde.radius_aggregate(q, p, f, 0.3, **o),),
}


def exchange(a, b):
    """Swaps two rows, or two elements."""

    def write(p):
        kept = p[a].clone()
        p[a] = p[b]
        p[b] = kept

    return write


def mirror(p):
    """Turns A, B, B, A into B, A, A, B, which a hash with linearly growing weights would miss."""
    p[:4] = p[[1, 0, 0, 1]]


WRITES = {
    "one bit": lambda p: p.view(torch.int32 if p.dtype == torch.float32 else torch.int16)[0, 0].bitwise_xor_(1),
    "the last": lambda p: p[-1].add_(1),
    "other points": lambda p: p.copy_(p.flip(0)),
    "two points": exchange(3, 150),
    "two coordinates": exchange((7, 0), (7, 2)),
    "mirrored": mirror,
}


def through_data(p, write):
    write(p.data)


def through_numpy(p, write):
    write(torch.from_numpy(p.detach().numpy()))


@pytest.mark.parametrize("way", [through_data, through_numpy])
@pytest.mark.parametrize("name", SEARCHES)
def test_no_write_goes_unseen(name, way, impl):
    """Writes that bypass the version counter are found by hashing the points' bits."""
    if impl.device != "cpu":
        pytest.skip("the next test's")
    queries, points, features = made()
    points[:4] = points[[0, 1, 1, 0]]
    for write in WRITES.values():
        index = sonde.PointIndex.build(points, impl=impl.impl)
        SEARCHES[name](queries, points, features, index=index, impl=impl.impl)
        version = points._version
        way(points, write)
        assert points._version == version
        with pytest.raises(ValueError, match=rf"{name}: index must be that of these points; they were .*written"):
            SEARCHES[name](queries, points, features, index=index, impl=impl.impl)


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        queries, points, features = made()
        index = sonde.PointIndex.build(points)
        points.mul_(0.5)
        for name, call in SEARCHES.items():
            with pytest.raises(ValueError, match=f"{name}: index must be that of these points"):
                call(queries, points, features, index=index)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_hash_is_of_the_callers_bits(dtype):
    """The hash covers half precision, batches, ragged batches, NaN and empty clouds."""
    g = torch.Generator().manual_seed(0)
    queries, rows = torch.rand(2, 5, 3, generator=g).to(dtype), torch.rand(2, 90, 3, generator=g).to(dtype)
    rows[0, 3] = torch.nan
    index = sonde.PointIndex.build(rows)
    assert index.hash.shape == (2,)
    assert index.hash[0] != index.hash[1]
    sonde.knn(queries, rows, 3, index=copy.deepcopy(index))
    rows.data[1, 8, 2] += 1
    with pytest.raises(ValueError, match="knn: index must be that of these points"):
        sonde.knn(queries, rows, 3, index=index)
    points, batch = rows[0].clone(), [0, 40, 90]
    ragged = sonde.PointIndex.build(points, batch=batch)
    sonde.knn(queries[0], points, 3, index=ragged, batch=([0, 2, 5], batch))
    points.data[3] = 0
    with pytest.raises(ValueError, match="knn: index must be that of these points"):
        sonde.knn(queries[0], points, 3, index=ragged, batch=([0, 2, 5], batch))
    nobody = points[:0]
    assert (sonde.knn(queries[0], nobody, 3, index=sonde.PointIndex.build(nobody)).indices == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_hash_is_the_same(dtype):
    """The reference and all kernels compute the same hash."""
    pytest.importorskip("numba")
    pytest.importorskip("triton")
    from sonde.op.register import decide
    from sonde.points._search.hash import cpu, gpu, reference

    for shape in ((1, 0, 3), (0, 5, 3), (2, 50, 3), (3, 33, 1), (1, 40_000, 2)):
        points = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert reference.point_hash(points).shape == shape[:1]
        for given in (points, points.transpose(0, 2)):
            for module, name in ((cpu, "numba"), (gpu, "triton")):
                moved = given.to(Target(name).device)
                found = decide(module, [moved])(moved).cpu()
                assert torch.equal(found, reference.point_hash(given))


@pytest.mark.slow
def test_compilers_compute_the_same_hash():
    """Compiling the reference, which a graph does where no kernel is installed, gives the same hash."""
    from sonde.points._search.hash import reference

    torch._dynamo.reset()
    compiled = torch.compile(reference.point_hash, fullgraph=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        points = torch.randn(2, 500, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(compiled(points), reference.point_hash(points))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SEARCHES)
def test_a_graph_says_it_in_its_results(name, numba_target):
    """A graph cannot raise without synchronising, so wrong points give −1 for indices and counts and NaN for distances, sums and
    gradients. Right points give the same bits."""
    torch._dynamo.reset()
    queries, points, features = made()
    index = sonde.PointIndex.build(points)
    compiled = torch.compile(
        lambda q, p, f, index: tuple(SEARCHES[name](q, p, f, index=index)), fullgraph=True, backend="aot_eager"
    )

    def gradients():
        leaf = [x.detach().requires_grad_() for x in (queries, points, features)]
        leaf[1] = points.detach().requires_grad_()
        results = compiled(*leaf, index)
        out = next(x for x in reversed(results) if x.requires_grad)
        return [x.detach() for x in results], torch.autograd.grad(out.sum(), leaf, allow_unused=True)

    with sizes_from_data():
        results, grads = gradients()
    assert same_bits(results, tuple(SEARCHES[name](queries, points, features)))
    points.data[5] += 0.01
    with sizes_from_data(), torch._dynamo.config.patch(error_on_recompile=True):
        results, grads = gradients()
    for x in results[1:] if name == "radius_search" else results:
        assert x.isnan().all() if x.is_floating_point() else (x == -1).all()
    assert all(g.isnan().any() for g in grads if g is not None)
    assert grads[0].isnan().any(1).sum() >= 20  # of 30 queries; some have no neighbour
    torch._dynamo.reset()


def test_is_built_and_used_in_exported_and_fake_graphs(numba_target):
    class Model(torch.nn.Module):
        def forward(self, q, p):
            return sonde.knn(q, p, 3, index=sonde.PointIndex.build(p))

    queries, points, _ = made()
    program = torch.export.export(Model(), (queries, points))
    assert same_bits(program.module()(queries, points), sonde.knn(queries, points, 3))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert Model()(torch.empty(5, 3), torch.empty(200, 3)).indices.shape == (5, 3)


def test_transforms_see_a_write(numba_target):
    """torch.func wraps the points, but their memory is still hashed."""
    queries, points, _ = made()
    index = sonde.PointIndex.build(points)
    length = lambda p: sonde.knn(queries, p, 3, index=index).distances.sum()
    torch.func.grad(length)(points)
    torch.vmap(lambda q: sonde.knn(q, points, 3, index=index).indices)(queries[None])
    points.data[0] += 1
    for call in (
        lambda: torch.func.grad(length)(points),
        lambda: torch.func.jvp(length, (points,), (points,)),
        lambda: torch.vmap(lambda q: sonde.knn(q, points, 3, index=index).indices)(queries[None]),
    ):
        with pytest.raises(ValueError, match="knn: index must be that of these points"):
            call()
    rows = torch.stack([points, points])
    got = torch.vmap(lambda p: sonde.knn(queries, p, 3, index=sonde.PointIndex.build(p)).distances)(rows)
    assert same_bits([got[1]], [sonde.knn(queries, points, 3).distances])


def test_no_dimensions():
    with pytest.raises(ValueError, match=r"PointIndex\.build: points must have at least one dimension; got \[5, 0\]"):
        sonde.PointIndex.build(torch.rand(5, 0))
    with pytest.raises(ValueError, match=r"PointIndex\.build: points must have at least one dimension; got \[2, 5, 0\]"):
        sonde.PointIndex.build(torch.rand(2, 5, 0))
