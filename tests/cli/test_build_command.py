"""``sonde build``: it builds exactly what was requested, and rejects misspelt requests before anything starts."""

import json
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("triton")

from sonde.cli import main
from sonde.jit import release, winners
from sonde.jit.kernel import Tunable
from sonde.jit.release import Built, Entry
from sonde.operators import OPERATORS


@pytest.fixture
def asked(monkeypatch) -> list:
    """Record the tasks that reach the builder, and build nothing."""
    tasks = []

    def build(given, folder, num_workers):
        tasks.extend(given)
        for task in given:
            failed = "ptxas: too many registers" if task.dtype == "float16" else None
            yield Built(task, {"kernel": Entry("folder", "hash", {}, {})}, 1.0, failed)

    monkeypatch.setattr(release, "build", build)
    return tasks


def test_every_case_for_every_architecture(asked, tmp_path, capsys):
    """Operators × cases × dtypes × layouts × architectures, in default and in shipped configurations."""
    file = tmp_path / "built.json"
    assert main(["build", "--arch", "sm_80,sm_90", "--dtype", "float32", "-o", str(tmp_path / "out"), "--json", str(file)]) == 0
    assert {task.arch for task in asked} == {"sm_80", "sm_90"}
    assert {task.layout for task in asked} == {"contiguous", "channels_last"}
    shipped = {json.loads(f.read_text())["device"] for f in winners.SHIPPED.glob("*.json")}
    assert {task.device for task in asked if task.arch == "sm_80"} == {""}
    assert {task.device for task in asked if task.arch == "sm_90"} == {"", *(d for d in shipped if d.endswith(" sm_90"))}
    assert len(json.loads(file.read_text())) == len(asked)
    assert "sample_dot" in capsys.readouterr().out


def test_failures_are_listed(asked, tmp_path, capsys):
    args = ["build", "sample_sum", "--arch", "sm_90", "--case", "pixelsplat_infer", "--layout", "contiguous"]
    assert main([*args, "-o", str(tmp_path / "out")]) == 1
    assert "ptxas: too many registers" in capsys.readouterr().out


def test_functions_of_users(asked, tmp_path):
    """Users' functions are built instead of operators, for every architecture."""
    assert main(["build", "--arch", "sm_80,sm_90", "--call", "mylib.blur:all_sizes", "-o", str(tmp_path / "out")]) == 0
    assert {(task.operator, task.case) for task in asked} == {("mylib.blur:all_sizes", "")}
    assert {task.arch for task in asked} == {"sm_80", "sm_90"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--arch", "sm_90", "--call", "mylib.blur"], "must be MODULE:FUNCTION"),
        (["--arch", "90"], "must be an architecture of NVIDIA, such as sm_90"),
        (["--arch", ""], "name at least one"),
        (["--arch", "sm_90", "--case", "pixelspalt_infer"], "Did you mean 'pixelsplat_infer'?"),
        (["--arch", "sm_90", "--dtype", "float8"], "unknown dtype 'float8'"),
        (["--arch", "sm_90", "--workers", "0"], "must be at least 1"),
        (["sample_som", "--arch", "sm_90"], "Did you mean 'sample_sum'?"),
    ],
)
def test_misspelt_requests(asked, args, message, capsys):
    assert main(["build", *args]) == 2
    assert message in capsys.readouterr().err
    assert not asked


def test_shipped_winners_are_known_and_fit():
    """Every shipped configuration has the right type for its kernel, and its device's file is found by the device's name."""
    form = import_module("sonde.grid._epipolar.gpu_kernels")
    modules = [(form, form)]
    for operator in OPERATORS.values():
        if find_spec(f"{operator.package}.gpu_configs"):
            modules.append((operator.module(".gpu_kernels"), operator.module(".gpu_configs")))
    kernels = {x.name: (x, configs) for module, configs in modules for x in vars(module).values() if isinstance(x, Tunable)}
    for file in winners.SHIPPED.glob("*.json"):
        document = json.loads(file.read_text())
        assert file.stem == winners.slug(document["device"])
        assert len(winners.shipped(document["device"])) == len(document["winners"]) > 0
        for row in document["winners"]:
            kernel, configs = kernels[row["kernel"]]
            constants = json.loads(row["constants"])
            if "wide" in constants:
                constants["wide"] = getattr(torch, constants["wide"].removeprefix("torch."))
            exact = {**constants, **{k: 1 << (bits - 1) for k, bits in json.loads(row["bucket"]).items()}}
            strides = dict(of_input=(1,) * 5, of_grid=(1,) * 3, of_out=(1,) * 3, of_gradient=(1,) * 5, scale=(0, 0))
            some = {name: strides.get(name, 1) for name in kernel.batch}
            problem = configs.Problem(**{**some, **exact})
            config = winners.read(type(kernel.default(problem)), row["config"])
            assert config is not None, row
            assert kernel.fits(problem, config), row
            own = [kernel.default(problem), *kernel.fitting(problem)]
            assert kernel._known(row["config"], problem, kernel.key(problem, row["dtypes"], torch.device("cpu")), own) == config, (
                row
            )
