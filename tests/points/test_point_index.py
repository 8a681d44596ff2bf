"""An index changes speed and nothing else, and is refused where it is not that of the points."""

# ruff: noqa: E731 (short functions read better on one line)

import copy
import pickle
import re
import weakref
from functools import partial

import pytest
import torch

import sonde
from helpers import Target, same_bits, value_and_grads
from sonde.jit import Unsupported
from sonde.op import library
from sonde.points import _points


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
    """Values and gradients with an index are those without, whichever algorithm runs; one index serves all radii."""
    queries, points, features = made(target.device, N=N)
    if N == 200:
        monkeypatch.setattr(_points, "PAIRS", 0)
    points.requires_grad_()  # so that its address is that of the leaf
    index = sonde.PointIndex.build(points, impl=target.impl)
    for with_index, without in zip(calls(target.impl, index=index), calls(target.impl)):
        leaf = [queries.requires_grad_(), points, features.requires_grad_()]
        found = []
        for call in (with_index, without):
            out = call(*leaf)
            found.append([out.detach(), *torch.autograd.grad(out.sum(), leaf, allow_unused=True)])
        assert same_bits([x for x in found[0] if x is not None], [x for x in found[1] if x is not None])


def test_is_not_built_again(numba_target, monkeypatch):
    """A given index is what is searched; without one, forward and backward share theirs."""
    from sonde.points.point_index import cpu

    queries, points, features = made()
    index = sonde.PointIndex.build(points)
    built = []
    real = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args: built.append(args) or real(*args))
    library.forget()
    sonde.knn_aggregate(queries, points, features, 5, index=index)
    assert not built
    value_and_grads(lambda q, p, f: sonde.knn_aggregate(q, p, f, 5), (queries, points, features))
    assert len(built) == 1


def test_sizes_alone_decide():
    """Below the threshold nothing is built, whether an index was given or not."""
    assert not _points.tiled("numba", 1, _points.FEW)
    assert _points.tiled("numba", 1, _points.FEW + 1)
    assert not _points.tiled("reference", 10**6, 10**6)


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
    """An index keeps its points alive no longer than their owner does; what the allocator puts there next are others."""
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
    """The same address, shape and version, but other elements between them."""
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
    """It can be pickled; then it is that of points elsewhere."""
    queries, points, _ = made()
    index = sonde.PointIndex.build(points)
    again = pickle.loads(pickle.dumps(index))
    assert same_bits(again[:3], index[:3])
    with pytest.raises(ValueError, match="knn: index must be that of these points"):
        sonde.knn(queries, points, 3, index=again)


@pytest.mark.parametrize("name", ["numba", "reference"])
def test_is_mapped_where_points_are(name):
    """An index of one row is not that of all rows; one that is built inside of torch.vmap is, and so is that of shared points."""
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
    """What torch.func differentiates by is the caller's tensor, in every nesting."""
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
    """What is no index, and an index of other segments."""
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
    """As in every search: what no kernel can take is refused where one is asked for, and by default the reference takes it."""
    points = torch.rand(9, 4)
    for impl in ("auto", "reference"):
        assert sonde.PointIndex.build(points, impl=impl).impl == "reference"
    with pytest.raises(ValueError, match=r"PointIndex\.build: impl='bogus' must be one of 'auto'"):
        sonde.PointIndex.build(points, impl="bogus")
    pytest.importorskip("numba")
    with pytest.raises(Unsupported, match=r"PointIndex\.build: impl='numba' has kernels for 1 to 3 dimensions, got 4"):
        sonde.PointIndex.build(points, impl="numba")


def test_wide_queries_search_narrow_points():
    """An index in float32 cannot answer in float64: it is checked, and then not used."""
    queries, points, _ = made()
    index = sonde.PointIndex.build(points)
    assert same_bits(sonde.knn(queries.double(), points, 3, index=index), sonde.knn(queries.double(), points.double(), 3))


def test_goes_through_compiled_functions(numba_target):
    """An index is an argument like others; a new one compiles nothing again."""
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
    """PointIndex.build and the search with it are one graph."""
    torch._dynamo.reset()
    queries, points, features = made()
    fn = lambda q, p, f: sonde.radius_aggregate(q, p, f, 0.3, index=sonde.PointIndex.build(p))
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(queries, points, features), fn(queries, points, features))
    torch._dynamo.reset()


def test_registration(numba_target):
    """Schema, fake and tracing of the index agree, with and without segments."""
    from sonde.points.point_index.api import _point_index

    points = torch.rand(2, 70, 3)
    points[0, 3] = torch.nan
    for offsets in (None, torch.tensor([0, 3, 3, 60, 70])):
        torch.library.opcheck(_point_index.forward_op, (points, offsets, "numba", True))


def test_orders_all_points(impl):
    """A permutation; what is not finite is in the last leaf and stays there."""
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
        ("numba", 5, 70, dict(min=65), None),
        ("numba", 5, 50, dict(max=64), None),
        ("numba", 5, 70, dict(min=2), "Dim('N', min=65)"),
        ("triton", 6_000, 9_000, dict(min=8_193), None),
        ("triton", 5_000, 9_000, dict(min=8_193), None),
        ("triton", 5_000, 9_000, dict(min=2), "Dim('N', min=8193)"),
        ("triton", 5_000, 5_000, dict(min=2), "Dim('N', max=8192)"),
    ],
)
def test_an_exported_graph_is_of_one_algorithm(impl, M, N, points, word):
    """Which one is a matter of sizes, so dynamic ones lie on one side; of many points, whatever the number of queries is."""
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
