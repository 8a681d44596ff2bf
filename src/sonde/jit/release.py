"""Ahead-of-time builds: what ``sonde build`` makes, and how a process that is pointed at one compiles nothing.

A release is a folder of Triton's cache entries, an index of them by what a launch knows, and a manifest that says what it was
built with. Where that differs from what is running, the release is named and left alone: code for another compiler is never
loaded. A kernel of the index is loaded without asking Triton's compiler, which would first hash all of itself for half a second.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import winners
from .process import Lost, Worker, describe

logger = logging.getLogger("sonde")
MANIFEST, INDEX = "sonde-release.json", "index.pickle"
FORMAT = 1


class Entry(NamedTuple):
    """One compiled kernel: what Triton needs to know to load and start it."""

    folder: str
    hash: str
    signature: dict
    constants: dict


_folder: Path | None = None  # the release in use
_index: dict[str, Entry] = {}
_building: dict[str, Entry] | None = None  # what this process compiles for a release


class Task(NamedTuple):
    """One case of one operator, to be built for one architecture with the configurations of one device, or the defaults."""

    package: str  # of the operator
    case: str
    dtype: str
    layout: str
    arch: str  # as in sm_90
    device: str = ""  # whose shipped winners are built

    @property
    def operator(self) -> str:
        return self.package.rpartition(".")[2]


class Built(NamedTuple):
    task: Task
    entries: dict[str, Entry]
    seconds: float
    cause: str | None  # why it failed


def attach() -> None:
    """Let Triton look into the folder that SONDE_RELEASE names, behind its own cache. Called once, before the first kernel."""
    given = os.environ.get("SONDE_RELEASE")
    if not given:
        return
    from triton import knobs

    folder = Path(given).absolute()
    reason = mismatch(folder)
    if reason is None and knobs.cache.manager_class is not None:
        reason = "TRITON_CACHE_MANAGER is set, and only one of them can be asked"
    if reason is not None:
        warnings.warn(f"sonde: the release build {given} is ignored: {reason}", RuntimeWarning, stacklevel=2)
        return
    global _folder
    _folder = folder
    _index.update(pickle.loads((folder / INDEX).read_bytes()))
    knobs.cache.manager_class = _manager(folder)
    logger.info("release build %s in use", folder)


def find(kernel: Any, name: str) -> Any:
    """The compiled kernel that a release has under this name, or None."""
    entry = _index.get(name)
    if entry is None or _folder is None:
        return None
    from triton.compiler.compiler import CompiledKernel

    files = {file.name: str(file) for file in (_folder / entry.folder).iterdir() if not file.name.startswith("__grp__")}
    source = SimpleNamespace(fn=kernel, signature=entry.signature, constants=entry.constants)
    return CompiledKernel(source, files, entry.hash)


def note(name: str, compiled: Any) -> None:
    """Remember what was compiled, if this process builds a release."""
    if _building is not None:
        from triton.runtime.cache import _base32

        _building[name] = Entry(_base32(compiled.hash), compiled.hash, compiled.src.signature, compiled.src.constants)


def mismatch(folder: Path) -> str | None:
    """Why a release cannot be used here."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        built = manifest["built_with"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        return f"it has no readable {MANIFEST} ({type(problem).__name__})"
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')!r}, this version reads {FORMAT}"
    differing = [
        f"{name} {built.get(name)!r} there, {value!r} here" for name, value in identity().items() if built.get(name) != value
    ]
    return f"built with other versions: {'; '.join(differing)}" if differing else None


def identity() -> dict[str, str]:
    """What must agree between a build and its user."""
    import triton

    from .. import __version__

    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*gpu*.py")):  # where kernels are written
        digest.update(file.read_bytes())
    return dict(
        sonde=__version__,
        kernels=digest.hexdigest()[:16],
        triton=triton.__version__,
        python=sysconfig.get_config_var("SOABI") or platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
    )


def _manager(folder: Path) -> type:
    from triton.runtime.cache import FileCacheManager

    class Released(FileCacheManager):
        """Triton's cache, and what it does not have from the release."""

        def get_file(self, filename: str) -> str | None:
            found = super().get_file(filename)
            released = folder / self.key / filename
            return found if found is not None or not released.is_file() else str(released)

        def get_group(self, filename: str) -> dict[str, str] | None:
            found = super().get_group(filename)
            group = folder / self.key / f"__grp__{filename}"
            if found or not group.is_file():
                return found
            return {name: str(group.parent / name) for name in json.loads(group.read_text())["child_paths"]}

    return Released


def build(tasks: Sequence[Task], folder: Path, num_workers: int, limit_s: float = 600) -> Iterator[Built]:
    """Compile into `folder`, in processes that need no GPU; yields each task when it is done, and writes the manifest last."""
    from concurrent.futures import ThreadPoolExecutor, as_completed
    from queue import SimpleQueue

    folder.mkdir(parents=True, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "SONDE_RELEASE")}
    with tempfile.TemporaryDirectory() as stub:
        env |= {"TRITON_CACHE_DIR": str(folder), "TRITON_STORE_BINARY_ONLY": "1"}
        if not torch.cuda.is_available() and _stub_driver(Path(stub)):
            env["TRITON_LIBCUDA_PATH"] = stub
        idle = SimpleQueue[Worker]()
        workers = [Worker(_start_builder, (), env) for _ in range(max(1, min(num_workers, len(tasks))))]
        for worker in workers:
            idle.put(worker)

        def one(task: Task) -> Built:
            worker, start = idle.get(), time.monotonic()
            try:
                entries, cause = worker.ask((task,), limit_s, "the build", "the compiler")
            except Lost as lost:
                entries, cause = {}, str(lost)
            finally:
                idle.put(worker)
            return Built(task, entries, time.monotonic() - start, cause)

        pool = ThreadPoolExecutor(len(workers))
        try:
            done = []
            for future in as_completed([pool.submit(one, task) for task in tasks]):
                done.append(future.result())
                yield done[-1]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.close()
        seal(folder, done)


def seal(folder: Path, done: Sequence[Built]) -> None:
    """Make paths relative, so that the folder can move, and say what it was built with."""
    for group in folder.rglob("__grp__*"):
        children = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: name for name in children}}))
    for leftover in folder.rglob("lock"):
        leftover.unlink()
    index = {name: entry for built in done for name, entry in built.entries.items()}
    (folder / INDEX).write_bytes(pickle.dumps(index))
    tasks = [dict(built.task._asdict(), kernels=len(built.entries)) for built in done if built.cause is None]
    document = dict(format=FORMAT, built_with=identity(), tasks=sorted(tasks, key=str))
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
    temporary.replace(folder / MANIFEST)  # last, and at once: an interrupted build is no release


def _stub_driver(folder: Path) -> bool:
    """Something to link launchers against where there is no GPU's driver; the real one is loaded where they run."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None or platform.system() != "Linux":
        return False  # then launchers are compiled at the first call, as without a release
    source, library = folder / "empty.c", folder / "libcuda.so.1"
    source.write_text("")
    made = subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], capture_output=True)
    if made.returncode == 0:
        (folder / "libcuda.so").symlink_to(library)
    return made.returncode == 0


def _start_builder() -> Callable[[Task], tuple[dict[str, Entry], str | None]]:
    from ..op import plan

    os.nice(5)
    torch.set_num_threads(1)
    plan.only_compiled = True
    return _build


def _build(task: Task) -> tuple[dict[str, Entry], str | None]:
    """Run the operator's own launchers on a driver that launches nothing: what they compile is what they will ask for."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from ..op.checks import by_position
    from ..op.gpu import _compiled
    from .workers import CompileOnly

    class Builder(CompileOnly):
        def launcher_cls(self, src: Any, metadata: Any) -> Callable:
            _build_launcher(src, metadata)
            return super().launcher_cls(src, metadata)

    global _building
    _building = {}
    try:
        driver.set_active(Builder(GPUTarget("cuda", int(task.arch.removeprefix("sm_")), 32)))
        winners.pretend(task.device or None)
        _compiled.clear()  # for another architecture
        cases = import_module(f"{task.package}.cases")
        call = by_position(getattr(import_module(task.package), task.package.rpartition(".")[2]))
        args = list(cases.make(**{**cases.SMALL, **cases.BENCH}[task.case], dtype=getattr(torch, task.dtype)))
        if task.layout == "channels_last":
            if args[0].ndim not in (4, 5):
                return _building, None  # it has no other layout
            form = torch.channels_last_3d if args[0].ndim == 5 else torch.channels_last
            args[0] = args[0].contiguous(memory_format=form)
        given = [a.requires_grad_() for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            out = call(*args, impl="triton")
            torch.autograd.grad(out, given, torch.empty_like(out))
    except Exception as problem:
        return _building, describe(problem)
    return _building, None


def _build_launcher(src: Any, metadata: Any) -> None:
    """Triton compiles C code that starts kernels on first use; where it is in the cache by then, nothing is compiled."""
    from triton.backends.nvidia import driver as nvidia

    for make in (nvidia.CudaUtils, partial(nvidia.CudaLauncher, src, metadata)):
        try:
            make()
        except Exception as problem:  # it is built, but cannot be loaded without a driver; or there is no C compiler here
            logger.debug("launcher: %s", problem)
