"""Without a GPU: every kernel compiles for every architecture we claim, through the real launchers, and none spills registers.

One architecture compiles every case, the others one or two of each operator, in float32.

Each target has a process of its own (this file, run as a script), because it installs a driver whose launches do nothing and
needs a Triton that does not interpret.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

TARGETS = ["cuda-80", "cuda-89", "cuda-90", "cuda-100", "cuda-120", "hip-gfx942"]
ROOT = Path(__file__).parents[1]

# constexprs come from channels, heads, octaves, depth and dtype: a real case, an odd one, and more samples than a program holds
REAL = dict(B=1, C=128, H=8, W=8, Q=4, D=32, heads=4, octaves=10)
ODD = dict(B=1, C=17, H=5, W=7, Q=3, D=5, heads=3)
DEEP = dict(B=1, C=20, H=5, W=7, Q=3, D=200, heads=1)
FEW = 1000  # numbers tapped; the real case converts its images, the others read planes
CASES = [(REAL, "float32"), (REAL, "bfloat16"), (ODD, "float32"), (DEEP, "float16")]
# pyramids of so many cameras or heads and levels as models have, and so few anchors that their samples are cut into slices
PYRAMID = dict(B=1, C=32, H=16, W=24, Q=3, D=50, heads=8, cams=6, L=4)
PYRAMIDS = {
    "deformable_aggregation": [(PYRAMID, "bfloat16"), (PYRAMID, "float32"), (dict(PYRAMID, outside="zeros"), "bfloat16")],
    "ms_deform_attn": [
        (dict(PYRAMID, D=4, Q=2000), "float32"),
        (dict(PYRAMID, D=4, logits=True), "bfloat16"),
        (dict(PYRAMID, D=4, Q=2000), "bfloat16"),
        (dict(PYRAMID, D=8, Q=2000, C=256), "float32"),
    ],
}
# dimensions, neighbours, features, their dtype, that of coordinates, whether the batch is ragged
CLOUDS = [
    (3, 7, 25, "float32", "float32", False),
    (2, 64, 150, "bfloat16", "float32", True),
    (3, 16, 3, "float64", "float64", False),
]
FULL = "cuda-90"  # elsewhere one or two cases of each operator stand for the rest, for time's sake


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills(target):
    """No kernel needs local memory, more shared memory than a block has, or something the architecture lacks."""
    pytest.importorskip("triton")
    report = compile_for(target)
    missing = set(report["expected"]) - {kernel["name"] for kernel in report["kernels"]}
    assert report["expected"]
    assert not missing, f"never launched: {missing}"
    spilling = [kernel for kernel in report["kernels"] if kernel["spills"]]
    assert not spilling, "\n".join(f"{k['name']} {k['of']}: {k['usage']}" for k in spilling)


def compile_for(target: str) -> dict:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, target], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{target}: {done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


# ---- the script ---------------------------------------------------------------------------------------------------------------


def main(name: str) -> None:
    os.nice(10)  # some of the tests beside have a clock
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        import torch
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        from helpers import OPERATORS, Operator, floats
        from sonde.grid._device import layout
        from sonde.jit.workers import CompileOnly
        from sonde.op.register import decide

        backend, arch = name.split("-")
        driver.set_active(CompileOnly(GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64)))
        seen = watch(triton.JITFunction)
        layout.FEW = FEW
        for cloud in CLOUDS[: None if name == FULL else 1]:
            search(*cloud)
        for path in OPERATORS:
            if path.startswith("points."):
                continue
            operator = Operator.find(path)
            gpu = operator.kernels("triton")
            more = [*getattr(operator.cases, "TARGETS", ()), *PYRAMIDS.get(operator.name, ())]
            for sizes, dtype in [*CASES, *more] if name == FULL else [CASES[0], *more[:1]]:
                args = operator.registered(*operator.make(**sizes, dtype=getattr(torch, dtype)))
                if sizes is ODD and operator.name in PYRAMIDS:
                    args = told_by_tensors(args)
                grad = decide(gpu, args)(*args)
                for deterministic in (False, True):
                    given = (grad, *args)
                    list(decide(gpu, given, [True] * len(floats(args)), deterministic)(*given))
        modules = [m for n, m in list(sys.modules.items()) if n.startswith("sonde.")]
        jitted = {v for m in modules for v in vars(m).values() if isinstance(v, triton.JITFunction)}
        expected = sorted(k.__name__ for k in jitted if k.__name__.startswith("_"))  # what kernels call has no underscore
        print(json.dumps(dict(expected=expected, kernels=[resources(*kernel, folder) for kernel in seen])))


def search(D: int, k: int, F: int, dtype: str, coords: str, ragged: bool) -> None:
    """Every operator on points, by boxes of three levels."""
    import torch

    from sonde.op.register import decide
    from sonde.points._search.index import gpu_kernels as index_kernels

    N, width = 140_000, torch.empty(1, dtype=getattr(torch, coords))
    queries, points = (torch.empty(1, n, D, dtype=getattr(torch, coords)) for n in (50, N))
    offsets = [torch.tensor([0, 20, n]) if ragged else None for n in (50, N)]
    index = [made for given in ((points, offsets[1]), (queries, offsets[0])) for made in index_kernels.build(*given).bind()(*given)]
    decide(import_module("sonde.points._search.hash.gpu"), (points,))(points)
    features = torch.empty(1, N, F, dtype=getattr(torch, dtype))
    for operator, args, graded in (
        ("knn", (queries, points, *index, *offsets, k), 0),
        ("radius_neighbors", (queries, points, *index, *offsets, 0.5, k), 0),
        ("radius_search", (queries, points, *index, *offsets, 0.5), 2),
        ("knn_aggregate", (queries, points, features, *index, *offsets, width, 0.0, k), 0),
        ("radius_aggregate", (queries, points, features, *index, *offsets, width, 0.0, 0.5), 0),
    ):
        gpu = import_module(f"sonde.points.{operator}.gpu")
        out = decide(gpu, args)(*args)
        saved = {"knn_aggregate": out[1:], "radius_aggregate": out[1:], "radius_search": out}.get(operator, out[:2])
        given = (out[graded], *args, *saved)
        decide(gpu, given, [True] * (4 if "aggregate" in operator else 2))(*given)


def told_by_tensors(args: tuple) -> tuple:
    """The same levels, of which the host knows nothing."""
    import torch

    *others, levels, flag = args
    table = torch.tensor(levels).view(*others[4].shape[3:-1], 3)
    return others[0], table[..., :2], table[..., 2], *others[3:], (), flag


def watch(JITFunction) -> list[tuple]:
    """Note every kernel that is compiled, with the constants that it is compiled for."""
    real, seen = JITFunction.warmup, []

    def warmup(self, *args, **options):
        compiled = real(self, *args, **options)
        constants = {n: str(v) for n, v in zip(self.arg_names, args) if n.isupper()} | {"num_warps": options["num_warps"]}
        given = [str(getattr(v, "dtype", v)).removeprefix("torch.") for n, v in zip(self.arg_names, args) if not n.isupper()]
        seen.append((self.__name__, f"{constants} {given}", compiled.asm))
        return compiled

    JITFunction.warmup = warmup
    return seen


def resources(name: str, of: str, asm: dict, folder: str) -> dict:
    """What a compiled kernel takes of registers, stack and local memory."""
    import triton

    if "cubin" in asm:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        out = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        usage = " ".join(re.findall(r"REG:.*LOCAL:\d+ ", out))
        return dict(name=name, of=of, usage=usage, spills="STACK:0 " not in usage or "LOCAL:0 " not in usage)
    # scalar registers that are kept in lanes of vector registers touch no memory and do not count
    found = re.findall(r"\.(vgpr_spill_count|private_segment_fixed_size): *(\d+)", asm["amdgcn"])
    return dict(name=name, of=of, usage=str(found), spills=not found or any(int(n) for _, n in found))


if __name__ == "__main__":
    main(sys.argv[1])
