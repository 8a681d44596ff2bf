"""Say what can run on this machine: versions, devices, implementations, cache. Never fails.

Each implementation is tried on a tiny input, so that a broken installation shows here and not in your program.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from .console import dump, table

IMPLEMENTATIONS = ("triton", "numba", "reference")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    found = examine()
    if options.json:
        dump(found)
    else:
        show(found)
    return 0


def examine() -> dict:
    """Everything as plain data; a probe that failed is ``{"error": why}``."""
    return dict(
        versions={name: _try(probe) for name, probe in _versions().items()},
        devices=_list(_devices),
        implementations=_list(_implementations),
        cache=_try(_cache),
        missing_in_torch=_try(_missing),
    )


def _try(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as problem:  # the failure is what the user wants to see
        return {"error": f"{type(problem).__name__}: {problem}"}


def _list(probe: Callable[[], list]) -> list:
    found = _try(probe)
    return found if isinstance(found, list) else [found]


def _versions() -> dict[str, Callable[[], Any]]:
    def imported(name: str) -> Callable[[], Any]:
        def probe():
            try:
                return import_module(name).__version__
            except ModuleNotFoundError as problem:
                if problem.name == name:
                    return None  # not installed
                raise

        return probe

    def cuda():
        import torch

        return torch.version.cuda or torch.version.hip

    def driver():
        from .environment import driver

        return driver()

    def rich():
        from .environment import version

        return version("rich")

    found: dict[str, Callable[[], Any]] = {"python": platform.python_version}
    found |= {name: imported(name) for name in ("sonde", "torch", "triton", "numba", "numpy", "matplotlib")}
    return found | {"rich": rich, "cuda": cuda, "driver": driver}


def _devices() -> list[dict]:
    import torch

    from .environment import cpu_model

    found: list[dict] = [
        dict(
            name="cpu",
            model=_try(cpu_model),
            cores=os.cpu_count(),
            usable=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            threads=_try(torch.get_num_threads),
        )
    ]
    count = _try(torch.cuda.device_count)
    if isinstance(count, dict):
        return [*found, dict(name="cuda", **count)]
    return found + [dict(name=f"cuda:{i}", **_try(partial(_gpu, i))) for i in range(count)]


def _gpu(index: int) -> dict:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return dict(
        model=properties.name,
        memory_gib=round(properties.total_memory / 2**30, 1),
        multiprocessors=properties.multi_processor_count,
        capability=f"{properties.major}.{properties.minor}",
    )


def _implementations() -> list[dict]:
    """Each implementation on each kind of device: does it run, does ``auto`` choose it, and if not, why and what to do."""
    import torch

    gpu = _try(torch.cuda.is_available)
    kinds = ["cpu", "cuda"] if gpu is True else ["cpu"]
    rows = [dict(impl=impl, device=kind, **_implementation(impl, kind)) for kind in kinds for impl in IMPLEMENTATIONS]
    if gpu is not True:
        if isinstance(gpu, dict):
            reason = gpu["error"]
        elif torch.version.cuda or torch.version.hip:
            reason = "torch sees no GPU; check the driver and CUDA_VISIBLE_DEVICES"
        else:
            reason = "this torch is built for CPUs; install a CUDA build of torch to use a GPU"
        rows.append(dict(impl="triton", device="cuda", runs=False, auto=False, note=reason))
    return rows


def _implementation(impl: str, kind: str) -> dict:
    def probe() -> dict:
        import torch

        from ..op import plan

        reason = plan.refusal(impl, kind)
        if reason:
            return dict(runs=False, auto=False, note=reason)
        auto = plan.choose("doctor", "auto", torch.empty(0, device=kind)) == impl
        return dict(runs=True, auto=auto, note=_smoke(impl, kind))

    found = _try(probe)
    return dict(runs=False, auto=False, note=found["error"]) if "error" in found else found


def _smoke(impl: str, kind: str) -> str:
    """Try a tiny call with its gradients; the first one compiles kernels or loads them from the cache."""
    import torch

    from ..grid.sample_sum import cases, sample_sum

    args = [a.requires_grad_() for a in cases.make(**cases.SMALL["odd_sizes"], device=kind)]
    start = time.perf_counter()
    out = sample_sum(*args, impl=impl)  # type: ignore[arg-type]
    torch.autograd.grad(out.sum(), args)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        error = float((out - sample_sum(*args, impl="reference")).norm() / out.norm())
    if not error < 1e-5:
        raise RuntimeError(f"runs, but its result is off by {error:.1e}; please report this")
    return f"tried with gradients, first call {seconds:.1f} s"


def _missing() -> dict[str, str]:
    """Private names that this torch does not have, and the consequence of each."""
    from ..op.torch_private import missing

    return missing()


def _cache() -> dict:
    from ..op.cache import cache_dir

    folder = cache_dir()
    above = next(p for p in (folder, *folder.parents) if p.exists())
    files = [f for f in folder.rglob("*") if f.is_file()] if folder.exists() else []
    return dict(
        folder=str(folder),
        exists=folder.exists(),
        writable=os.access(above, os.W_OK),
        files=len(files),
        mib=round(sum(f.stat().st_size for f in files) / 2**20, 1),
    )


def show(found: dict) -> None:
    def text(value: Any, absent: str = "unknown") -> str:
        return absent if value is None else value["error"] if isinstance(value, dict) else str(value)

    absent = {"cuda": "none", "driver": "none"}
    rows = [[name, text(value, absent.get(name, "not installed"))] for name, value in found["versions"].items()]
    table(["software", "version"], rows, left=2)
    rows = []
    for each in found["devices"]:
        if "error" in each:
            rows.append([each.get("name", "?"), each["error"]])
        elif "memory_gib" in each:
            parts = f"{each['memory_gib']} GiB, {each['multiprocessors']} multiprocessors, capability {each['capability']}"
            rows.append([each["name"], f"{each['model']}: {parts}"])
        else:
            parts = f"{each['usable']} of {each['cores']} cores usable, torch runs {text(each['threads'])} threads"
            rows.append([each["name"], f"{text(each['model'])}: {parts}"])
    table(["device", ""], rows, left=2)
    rows = []
    for each in found["implementations"]:
        if "error" in each:
            rows.append(["?", "", "no", each["error"]])
        else:
            status = "no" if not each["runs"] else "yes, by default" if each["auto"] else "yes"
            rows.append([each["impl"], each["device"], status, each["note"]])
    table(["implementation", "on", "runs", ""], rows, left=4)
    for name, without in found["missing_in_torch"].items():
        print(f"This torch has no {name}: {without}.")
    cache = found["cache"]
    if "error" in cache:
        print(f"Cache: {cache['error']}")
        return
    state = "" if cache["writable"] else "NOT "
    print(f"Cache: {cache['folder']} ({cache['files']} files, {cache['mib']} MiB, {state}writable)")
    if not cache["writable"]:
        print("Every process compiles its kernels again; set SONDE_CACHE_DIR to a writable folder.")
