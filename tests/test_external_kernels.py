"""Other libraries' kernels as operators: ``examples/own_kernels`` keep the contract and agree with ours where we have the
operator."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

import sonde
from sonde.testing import check_operator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape, device=DEVICE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def test_triton():
    """In the interpreter on a CPU."""
    pytest.importorskip("triton")
    op = import_module("own_kernels.triton_swiglu").swiglu
    report = check_operator(op, {"odd": (randn(3, 5), randn(3, 5)), "more": (randn(7, 301), randn(7, 301))}, impl="triton")
    assert {"gradients", "determinism", "strides", "compile"} <= set(report.checked["triton"])


def test_triton_kernel_can_be_tuned():
    pytest.importorskip("triton")
    example = import_module("own_kernels.triton_swiglu")
    assert example.forward.tunable(example.Problem(1000))


def test_numba():
    pytest.importorskip("numba")
    op = import_module("own_kernels.numba_smooth").smooth
    check_operator(op, [(randn(3, 17, device="cpu"), 0.9), (randn(1, 1, device="cpu"), 0.5)])


def neighbours(device):
    return {
        "odd": (randn(5, 3, device=device), randn(17, 3, device=device), 4),
        "line": (randn(3, 1, device=device), randn(9, 1, device=device), 1),
    }


def test_scipy():
    pytest.importorskip("scipy")
    nearest = import_module("own_kernels.scipy_nearest").nearest
    check_operator(nearest, neighbours("cpu"), impl="scipy")
    queries, points = randn(50, 3, device="cpu"), randn(300, 3, device="cpu")
    distances, indices = nearest(queries, points, 7)
    ours = sonde.knn(queries, points, 7)
    assert torch.equal(indices, ours.indices)
    torch.testing.assert_close(distances, ours.distances)


@pytest.mark.gpu
def test_cupy():
    pytest.importorskip("cupy")
    nearest = import_module("own_kernels.scipy_nearest").nearest
    check_operator(nearest, neighbours("cuda"), impl="cupy")
    queries, points = randn(5000, 3), randn(3000, 3)
    distances, indices = nearest(queries, points, 7)
    ours = sonde.knn(queries, points, 7)
    assert (indices == ours.indices).float().mean() > 0.9999  # near ties: fused multiply-adds may differ
    torch.testing.assert_close(distances, ours.distances)


def test_warp():
    """Values and gradients match ours; the adjoint in the tutorial does not give the right ones."""
    pytest.importorskip("warp")
    op = import_module("own_kernels.warp_radius").radius_aggregate
    cases = {
        "odd": (randn(5, 3), randn(17, 3), randn(17, 4), 1.5, 0.3),
        "far": (randn(3, 3) + 100, randn(6, 3), randn(6, 1), 0.5, 0.1),
    }
    check_operator(op, cases, impl="warp", tolerance=1e-4)


def test_warp_agrees_with_ours():
    pytest.importorskip("warp")
    op = import_module("own_kernels.warp_radius").radius_aggregate
    given = [randn(200, 3), randn(500, 3), randn(500, 8)]

    def with_gradients(call):
        leaves = [x.clone().requires_grad_() for x in given]
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, randn(200, 8))]

    theirs = with_gradients(lambda *args: op(*args, 0.7, 0.05, impl="warp"))
    ours = with_gradients(lambda *args: sonde.radius_aggregate(*args, 0.7, 0.05))
    for a, b in zip(theirs, ours):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.fixture
def cuml(monkeypatch):
    """Stand-ins for cuML and CuPy: cuML's signatures, plain PyTorch inside."""

    class NearestNeighbors:
        def __init__(
            self, *, n_neighbors=5, radius=1.0, algorithm="auto", metric="euclidean", p=2, algo_params=None, metric_params=None,
            n_jobs=None, verbose=False, output_type=None,
        ):  # fmt: skip
            assert output_type == "cupy"
            assert metric == "euclidean"
            self.n_neighbors = n_neighbors

        def fit(self, X, y=None):
            assert X.dtype is torch.float32
            assert X.is_contiguous()
            self.points = X
            return self

        def kneighbors(self, X=None, n_neighbors=None, return_distance=True, *, two_pass_precision=False):
            distances, indices = torch.cdist(X, self.points).topk(n_neighbors or self.n_neighbors, largest=False)
            return (distances, indices) if return_distance else indices

    stream = types.SimpleNamespace(synchronize=lambda: None)
    fake_cupy = types.ModuleType("cupy")
    fake_cupy.from_dlpack = torch.from_dlpack
    fake_cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    neighbors = types.ModuleType("cuml.neighbors")
    neighbors.NearestNeighbors = NearestNeighbors
    known = {"cupy": fake_cupy, "cuml": types.ModuleType("cuml"), "cuml.neighbors": neighbors}
    for name, module in known.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    yield NearestNeighbors
    sys.modules.pop("own_kernels.cuml_nearest", None)


def test_cuml_by_a_stand_in(cuml):
    """The example follows cuML's documented interface and has never run with cuML itself, so it is tested with a stand-in."""
    queries, points = randn(5, 3, device="cpu"), randn(17, 3, device="cpu")
    distances, indices = import_module("own_kernels.cuml_nearest").nearest(queries, points, 4)
    want = sonde.knn(queries, points, 4)
    assert torch.equal(indices, want.indices)
    torch.testing.assert_close(distances, want.distances)


@pytest.mark.slow
def test_the_stand_in_has_the_signatures_of_cuml(cuml, tmp_path):
    """Signatures are read from the sources in cuML's wheel, in the version the example names."""
    wheel = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(tmp_path)]
    platform = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.12"]
    done = subprocess.run([*wheel, *platform, "cuml-cu12==26.10.*"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the wheel cannot be had: {done.stderr[-200:]}")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as files:
        source = files.read("cuml/neighbors/nearest_neighbors.pyx").decode()
    whole = source[source.index("class NearestNeighbors(") :]
    base = source[source.index("class NeighborsBase") : source.index("class NearestNeighbors(")]
    assert parameters(whole, "__init__") == named(cuml.__init__)
    assert parameters(base, "kneighbors") == named(cuml.kneighbors)
    assert parameters(base, "fit") == named(cuml.fit)


def parameters(source: str, function: str) -> list[str]:
    """Names and defaults of a function's parameters in Cython source."""
    text = source[source.index(f"def {function}(") + len(f"def {function}(") :]
    depth, end = 1, 0
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    lines = (line.split("#")[0] for line in text[: end - 1].splitlines())
    return [part.strip() for part in " ".join(lines).split(",") if part.strip()]


def named(function) -> list[str]:
    words, starred = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        words.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return [word.replace("'", '"') for word in words]


def test_files_fit_on_a_page():
    folder = Path(import_module("own_kernels.scipy_nearest").__file__).parent
    for file in folder.glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 150, file
