"""Without a GPU: every kernel compiles for every architecture we claim, through the real launchers, none spills registers, and none
overwrites registers that a matrix unit still reads.

One architecture compiles every case, the others one or two of each operator. The slow test compiles the dense family's other cases.

Each target has a process of its own (this file, run as a script), because it installs a driver whose launches do nothing and
needs a Triton that does not interpret.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TARGETS = ["cuda-80", "cuda-89", "cuda-90", "cuda-100", "cuda-120", "hip-gfx942"]
ROOT = Path(__file__).parents[1]

FEW = 1000  # numbers read; the real case converts its images, the others read planes
FULL = "cuda-90"  # the others compile one or two cases of each operator, to save time
NARROW = {"_gradient", "_gate_gradient"}  # programs that read one number of each row


@pytest.mark.longest
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills(target):
    """No kernel uses local memory, more shared memory than a block has, features the architecture lacks, or registers too early."""
    report = check(target, "sonde." if target == FULL else "none")
    if target == FULL:  # a stride that the compiler knows nothing about makes accesses 2 bytes wide, and results stay right
        wide = {kernel["name"] for kernel in report["kernels"] if kernel["widest"] >= 16}
        assert set(report["dense"]) - wide == NARROW


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted({*TARGETS} - {FULL}))
def test_every_case_compiles_without_spills(target):
    check(target, "sonde.power")


def check(target: str, whole: str) -> dict:
    """`whole`: the operators whose every case is compiled, as the beginning of their module's name."""
    pytest.importorskip("triton")
    from helpers.versions import SPILLED

    report = compile_for(target, whole)
    missing = set(report["expected"]) - {kernel["name"] for kernel in report["kernels"]}
    assert report["expected"]
    assert not missing, f"never launched: {missing}"
    spilling = [kernel for kernel in report["kernels"] if kernel["spills"] > SPILLED[target.partition("-")[0]]]
    assert not spilling, "\n".join(f"{k['name']} {k['of']}: {k['usage']}" for k in spilling)
    racing = [kernel for kernel in report["kernels"] if kernel["races"]]
    assert not racing, "\n".join(f"{k['name']} {k['of']}: {k['races'][0]}" for k in racing)
    return report


def compile_for(target: str, whole: str) -> dict:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, target, whole], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{target}: {done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


# ---- the script ---------------------------------------------------------------------------------------------------------------


def main(name: str, whole: str) -> None:
    os.nice(10)  # tests running in parallel measure time
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        import torch
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        from helpers.machine_code import resources, watch
        from helpers.operators import floats
        from sonde.grid._device import layout
        from sonde.jit.workers import CompileOnly
        from sonde.op import plan
        from sonde.operators import OPERATORS

        backend, arch = name.split("-")
        driver.set_active(CompileOnly(GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64)))
        seen: list[tuple] = []
        watch(seen)
        layout.FEW = FEW
        plan.only_compiled = True
        torch.utils.deterministic.fill_uninitialized_memory = False
        for operator in OPERATORS.values():
            for case in operator.cases.TARGETS:
                if not operator.function.__module__.startswith(whole) and not case.get("everywhere"):
                    continue
                args = operator.make(**case["sizes"], dtype=getattr(torch, case["dtype"]))
                if case.get("on_device"):
                    passes(operator, told_by_tensors(operator.registered(*args)))
                    continue
                given = [args[i].requires_grad_() for i in floats(args)]
                for deterministic in (False, True):
                    torch.use_deterministic_algorithms(deterministic)
                    out = operator.function(*args, impl="triton")
                    if operator.graded:
                        torch.autograd.grad(out, given, torch.empty_like(out))
        modules = [m for n, m in list(sys.modules.items()) if n.startswith("sonde.")]
        jitted = {v for m in modules for v in vars(m).values() if isinstance(v, triton.JITFunction)}
        expected = {k for k in jitted if k.__name__.startswith("_")}  # helpers that kernels call have no underscore
        dense = {k for k in expected if k.__module__.startswith("sonde.power.")}
        names = {what: sorted({k.__name__ for k in kernels}) for what, kernels in dict(expected=expected, dense=dense).items()}
        print(json.dumps(dict(**names, kernels=[resources(*kernel, folder) for kernel in seen])))


def passes(operator, args: tuple) -> None:
    """Runs both passes on the registered operator's arguments, as the public function would prepare them."""
    from sonde.op.register import decide

    gpu = operator.kernels("triton")
    given = (decide(gpu, args)(*args), *args)
    for deterministic in (False, True):
        list(decide(gpu, given, [True] * 3, deterministic)(*given))


def told_by_tensors(args: tuple) -> tuple:
    """The same levels as tensors that the host does not read."""
    import torch

    *others, levels, flag = args
    table = torch.tensor(levels).view(*others[4].shape[3:-1], 3)
    return others[0], table[..., :2], table[..., 2], *others[3:], (), flag


if __name__ == "__main__":
    main(*sys.argv[1:])
