"""torch.vmap over any of the arguments: unmapped arguments, an index included, are shared by all rows."""

from functools import partial
from itertools import product

import pytest
import torch

import sonde
from sonde.points._search import arguments

pytestmark = pytest.mark.interpreted(False)  # seconds each in the interpreter; a few tests stand for all

CALLS = {
    "knn": lambda q, p, f, impl: sonde.knn(q, p, 3, impl=impl),
    "radius_neighbors": lambda q, p, f, impl: sonde.radius_neighbors(q, p, 0.8, 3, impl=impl),
    "knn_aggregate": lambda q, p, f, impl: sonde.knn_aggregate(q, p, f, 3, p.new_tensor(0.5), impl=impl),
    "radius_aggregate": lambda q, p, f, impl: sonde.radius_aggregate(q, p, f, 0.8, p.new_tensor(0.5), impl=impl),
}


def several(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("dims", [dims for dims in product((0, None), repeat=3) if 0 in dims[:2]])
@pytest.mark.parametrize("name", CALLS)
def test_vmap_over_some(name, dims, impl, monkeypatch):
    monkeypatch.setattr(arguments, "FEW", 0)
    monkeypatch.setattr(arguments, "PAIRS", 0)
    g = torch.Generator().manual_seed(0)
    shapes = [((2,) if d == 0 else ()) + shape for d, shape in zip(dims, [(4, 3), (70, 3), (70, 2)])]
    args = [torch.randn(*shape, generator=g).to(impl.device).requires_grad_() for shape in shapes]
    call = partial(CALLS[name], impl=impl.impl)
    got = several(torch.vmap(call, dims)(*args))
    rows = [[x if d is None else x[b] for x, d in zip(args, dims)] for b in range(2)]
    want = [torch.stack(parts) for parts in zip(*(several(call(*row)) for row in rows))]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    tensors = args if "aggregate" in name else args[:2]
    grads = [torch.autograd.grad(out[0].square().sum(), tensors) for out in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [*CALLS, "radius_search"])
def test_jacobian(name, impl, monkeypatch):
    """Only the incoming gradient is mapped; everything saved is shared."""
    monkeypatch.setattr(arguments, "FEW", 0)
    monkeypatch.setattr(arguments, "PAIRS", 0)
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(*shape, generator=g).to(impl.device) for shape in ((2, 3), (40, 3), (40, 2))]
    call = CALLS.get(name, lambda q, p, f, impl: sonde.radius_search(q, p, 0.8, impl=impl).distances)
    which = (0, 1, 2) if "aggregate" in name else (0, 1)
    got, want = (torch.func.jacrev(lambda *args, i=i: several(call(*args, i))[0], which)(*args) for i in (impl.impl, "reference"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
