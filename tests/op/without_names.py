"""Call every operator while torch lacks one of the private names that we use; run by `test_torch_private.py`.

One child process per name hides it before importing the package and prints its findings: a digest per part, or the error.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import sys
import traceback
import warnings
from pathlib import Path

import torch  # imported in the parent, so that children need not
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

SOURCE = (Path(__file__).parents[2] / "src/sonde/op/torch_private.py").read_text()
NAMES = re.findall(r'_find\(\s*"([^"]+)"', SOURCE) + [f"_subclasses.fake_tensor.{x}" for x in re.findall(r'_fake\("(\w+)"', SOURCE)]


def import_without(*names: str) -> list[str]:
    """Import the package while torch seems to lack these names; return the names that it reports as missing."""
    real = operator.attrgetter

    def attrgetter(path: str):
        if path in names:
            raise AttributeError(path)
        return real(path)

    operator.attrgetter = attrgetter
    from sonde.op import torch_private

    missing = list(torch_private.missing())
    operator.attrgetter = real
    return missing


def values():
    """Values and gradients, with cold and warm caches."""
    from op.calls import CALLS, value_and_gradients

    for call in CALLS.values():
        for _ in range(3):
            yield from value_and_gradients(call)


def observers():
    """A profiler, a function mode, a tracer."""
    from op.calls import CALLS

    call = CALLS["sample_sum"]
    with torch.autograd.profiler.profile():
        yield call.function(*call.args)
    with torch.device("meta"):
        yield call.function(*call.args)
    graph = make_fx(lambda *args: call.function(*args))(*call.args)
    yield graph(*[x.flip(0) for x in call.args])


def zeros():
    """Zero tensors without memory, as forward mode makes them, after warm calls with the same shapes."""
    from op.calls import CALLS

    for call in CALLS.values():
        for i, x in enumerate(call.args):
            args = list(call.args)
            call.function(*args)
            args[i] = torch._efficientzerotensor(x.shape)
            yield call.function(*args)


def forward_mode():
    from op.calls import CALLS

    for name in ("sample_sum", "knn_aggregate"):
        call = CALLS[name]
        with forward_ad.dual_level():
            out = call.function(*[forward_ad.make_dual(x, x.flip(0)) for x in call.args])
            yield forward_ad.unpack_dual(out).tangent


def grad():
    from op.calls import CALLS

    for name in ("sample_sum", "ms_deform_attn", "knn_aggregate"):
        call = CALLS[name]
        yield from torch.func.grad(lambda *args, f=call.function: f(*args).sin().sum(), argnums=(0, 1, 2))(*call.args)


def second():
    """A second derivative."""
    from op.calls import CALLS

    call = CALLS["sample_sum"]

    def first(*args):
        return torch.func.grad(lambda *args: call.function(*args).sin().sum(), argnums=2)(*args).square().sum()

    yield from torch.func.grad(first, argnums=(0, 1, 2))(*call.args)


def jvp():
    from op.calls import CALLS

    call = CALLS["sample_sum"]
    yield from torch.func.jvp(call.function, call.args, tuple(x.flip(0) for x in call.args))


def vmap():
    from op.calls import CALLS

    for name in ("sample_sum", "ms_deform_attn", "knn_aggregate"):
        call = CALLS[name]
        stacked = [torch.stack([x, x.flip(0)]) for x in call.args]
        yield torch.vmap(call.function)(*stacked)
        yield from torch.vmap(torch.func.grad(lambda *args, f=call.function: f(*args).sin().sum(), argnums=(0, 1, 2)))(*stacked)


def functionalize():
    from op.calls import CALLS

    call = CALLS["sample_sum"]
    yield torch.func.functionalize(call.function)(*call.args)


def index():
    """A point index: under vmap, under grad, and after its points were overwritten."""
    import sonde

    points, queries = torch.linspace(0, 1, 270).sin().reshape(90, 3).clone(), torch.linspace(0, 1, 27).cos().reshape(9, 3)
    built = sonde.PointIndex.build(points)
    yield sonde.knn(queries, points, 3, index=built).distances
    yield torch.func.grad(lambda q: sonde.knn(q, points, 3, index=built).distances.sum())(queries)
    points.mul_(0.5)
    try:
        yield sonde.knn(queries, points, 3, index=built).distances.isnan().all()
    except ValueError:
        yield torch.tensor(True)


def mapped_index():
    import sonde

    points, queries = torch.linspace(0, 1, 540).sin().reshape(2, 90, 3).clone(), torch.linspace(0, 1, 27).cos().reshape(9, 3)
    yield torch.vmap(lambda x: sonde.knn(queries, x, 3, index=sonde.PointIndex.build(x)).distances)(points)


def compiled():
    """torch.func inside torch.compile."""
    from op.calls import CALLS

    call = CALLS["sample_sum"]
    function = torch.func.grad(lambda *args: call.function(*args).sin().sum(), argnums=2)
    yield torch.compile(function, backend="aot_eager", fullgraph=True)(*call.args)


PARTS = [values, observers, zeros, forward_mode, grad, second, jvp, vmap, functionalize, index, mapped_index, compiled]


def digests() -> dict[str, str]:
    out = {}
    for part in PARTS:
        found = hashlib.sha256()
        try:
            for x in part():
                found.update(x.detach().contiguous().numpy().tobytes())
            out[part.__name__] = found.hexdigest()
        except Exception as error:
            out[part.__name__] = f"{type(error).__name__}: {error}"
    return out


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        sys.stdout.flush()
        if pid := os.fork():
            os.waitpid(pid, 0)
            continue
        try:
            missing = import_without(*name.split("+"))
            print(json.dumps(dict(name=name, missing=missing, parts=digests())), flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main(["nothing", *(sys.argv[1:] or NAMES)])
