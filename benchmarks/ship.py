"""Turn times that benchmarks/power.py recorded into winners that ship with the package. Needs no GPU.

    PYTHONPATH=src python benchmarks/ship.py benchmarks/results/nvidia-h200/power.json

For each kernel of each case the fastest correct candidate wins, unless the default is less than 5 % slower. Candidates are compiled
for the device's architecture here, and those that spill registers, or overwrite them while a matrix unit still reads, cannot win.
Neither can configurations that the kernel no longer has. Winners of other kernels in the file stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
GAIN = 1.05  # how much faster than the default a winner must be
LARGEST_ERROR = 0.02  # in bfloat16, as in power.py
REPEATS = 7  # of each time that power.py recorded


def winners_of(document: dict[str, Any], arch: int) -> Iterator[dict[str, Any]]:
    from power import Captured, sizes_of
    from sonde.operators import OPERATORS

    groups: dict[tuple[str, str, str], list[dict]] = {}
    for record in document["records"]:
        if "candidates" in record:
            groups.setdefault((record["operator"], record["case"], record["phase"]), []).append(record)
    for (name, case, phase), records in groups.items():
        operator = OPERATORS[name]
        with mock.patch.multiple(torch, randn=empty, rand=empty, randn_like=torch.empty_like):  # values do not matter here
            args = operator.make(**sizes_of(name, case), dtype=getattr(torch, document["dtype"]))
            launches = Captured(operator, args, phase == "backward").launches()
        if [kernel.name for kernel, _, _ in launches] != [record["kernel"] for record in records]:
            print(f"{name} {case} {phase}: its kernels have changed; measure it again")
            continue
        for (kernel, problem, tensors), record in zip(launches, records):
            found = fastest(kernel, problem, tensors, record["candidates"])
            if found is None:
                print(f"{name} {case} {phase} {kernel.name}: no recorded candidate can run now; measure it again")
            else:
                yield row(kernel, problem, tensors, *found, document, arch)


def empty(*sizes: int, **_: Any) -> torch.Tensor:
    return torch.empty(*sizes)


def fastest(kernel: Any, problem: Any, tensors: list, candidates: list[dict]) -> tuple[Any, float] | None:
    """The winning configuration and its milliseconds."""
    default, own = kernel.default(problem), {str(config): config for config in kernel.fitting(problem)}
    timed = {r["config"]: r["ms"] for r in candidates if r.get("ms") and r.get("error", 0) <= LARGEST_ERROR}
    limit = timed.get(str(default), float("inf")) / GAIN
    for text, ms in sorted(timed.items(), key=lambda item: item[1]):
        if ms <= limit and text in own and runs_well(kernel, problem, tensors, own[text]):
            return own[text], ms
    return (default, timed[str(default)]) if str(default) in timed else None


def runs_well(kernel: Any, problem: Any, tensors: list, config: Any) -> bool:
    """Whether it compiles, without spills and without races."""
    from helpers.machine_code import resources
    from sonde.jit.launch import bind

    before = len(_compiled)
    try:
        bind(kernel.function, tensors, kernel.launch(problem, config))
    except Exception as error:  # whatever the compiler refuses, on this architecture
        print(f"{kernel.name} {config}: {type(error).__name__}")
        return False
    found = [resources(*compiled, os.environ["TRITON_CACHE_DIR"]) for compiled in _compiled[before:]]
    return all(not each["spills"] and not each["races"] for each in found)


def row(kernel: Any, problem: Any, tensors: list, config: Any, ms: float, document: dict[str, Any], arch: int) -> dict[str, Any]:
    from sonde.jit import winners
    from sonde.jit.kernel import dtypes_of

    key = kernel.key(problem, dtypes_of(tensors), torch.device("cpu"))
    where = dict(device=f"{document['device']} sm_{arch}", torch=document["torch"], triton=document["triton"])
    measured = dict(config=winners.write(config), median_us=round(ms * 1e3, 2), timings=REPEATS, at=int(time.time()))
    return {**key._asdict(), **where, **measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="the device's compute capability, times ten")
    options = parser.parse_args()
    document = json.loads(options.record.read_text(encoding="utf-8"))

    pretend_gpu(options.arch)
    from sonde.jit import winners

    device = f"{document['device']} sm_{options.arch}"
    file = winners.SHIPPED / f"{winners.slug(device)}.json"
    shipped = json.loads(file.read_text(encoding="utf-8"))["winners"]
    found = {portable(each): each for each in winners_of(document, options.arch)}
    kernels = Counter(each["kernel"] for each in found.values())
    kept = [each for each in shipped if each["kernel"] not in kernels]
    lines = ",\n".join(json.dumps(each) for each in [*kept, *found.values()])
    file.write_text(f'{{"format": 1, "device": {json.dumps(device)}, "winners": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{file.name}: {dict(kernels)}, and {len(kept)} of other kernels")


def portable(winner: dict[str, Any]) -> tuple[str, ...]:
    return tuple(winner[name] for name in ("kernel", "dtypes", "constants", "bucket"))


def pretend_gpu(arch: int) -> None:
    """From now on kernels are compiled for this architecture, and launches do nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from helpers.machine_code import watch
    from sonde.jit.workers import CompileOnly
    from sonde.op import plan

    driver.set_active(CompileOnly(GPUTarget("cuda", arch, 32)))
    plan.only_compiled = True
    torch.utils.deterministic.fill_uninitialized_memory = False
    watch(_compiled)


_compiled: list[tuple] = []  # kernels, in the order of compilation, as `watch` records them

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main()
