"""Ahead-of-time builds: what ``sonde build`` writes, and how a process that uses one compiles nothing.

A release is a folder with Triton's cache entries, an index that maps a launch to its entry and has a SHA-256 of every file, and a
manifest of the versions it was built with. If these differ from what is running, a warning says so and the release is ignored:
code from another compiler is never loaded. Kernels in the index are loaded without Triton's compiler, which would first hash its
own sources for half a second.

Index and manifest are JSON. A file is loaded only if it lies inside the release and has the recorded hash; anything else is
ignored, with one warning. That protects against damage, not against forgery: a release is machine code (see SECURITY.md).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..op.cache import sources_digest, warn_once
from . import winners
from .process import Lost, Worker, describe

logger = logging.getLogger("sonde")
MANIFEST, INDEX = "sonde-release.json", "index.json"
FORMAT = 2


class Entry(NamedTuple):
    """One compiled kernel: what Triton needs to load and launch it."""

    folder: str
    hash: str
    signature: dict
    constants: dict


_folder: Path | None = None  # the release in use
_index: dict[str, Entry] = {}
_files: dict[str, dict[str, str]] = {}  # SHA-256 of each file, by folder and by name in it
_building: dict[str, Entry] | None = None  # in a process that builds a release: what it has compiled


class Task(NamedTuple):
    """Build one case of one operator for one architecture, with the winners shipped for one device or with the defaults.

    Or build what a user's function calls, ``"module:function"``; then there is no case, dtype or layout.
    """

    operator: str  # its name in the table
    case: str
    dtype: str
    layout: str
    arch: str  # as in sm_90
    device: str = ""  # whose shipped winners to build; the defaults if empty


class Built(NamedTuple):
    task: Task
    entries: dict[str, Entry]
    seconds: float
    cause: str | None  # set if it failed


def attach() -> None:
    """Let Triton look into the folder that SONDE_RELEASE names, after its own cache. Called once, before the first kernel.

    Never raises: if a release cannot be used, a warning says why, and kernels are compiled as usual.
    """
    given = os.environ.get("SONDE_RELEASE")
    if not given:
        return
    try:
        reason = _attach(Path(given).absolute())
    except Exception as problem:  # a folder may hold anything
        reason = f"{type(problem).__name__}: {problem}"
    if reason is not None:
        warn_once(f"release {given}", f"the release build {given} is ignored: {reason[:1000]}")


def _attach(folder: Path) -> str | None:
    """Use the release in `folder`; returns the reason if it cannot be used."""
    from triton import knobs

    reason = mismatch(folder)
    if reason is not None:
        return reason
    if knobs.cache.manager_class is not None:
        return "TRITON_CACHE_MANAGER is set, and only one of them can be asked"
    index, files, odd = read_index(json.loads((folder / INDEX).read_bytes()))
    if odd:
        warn_once(
            f"release {folder} entries", f"the release build {folder} has odd entries, which are ignored: {'; '.join(odd[:5])}"
        )
    global _folder
    _folder = folder
    _index.update(index)
    _files.update(files)
    knobs.cache.manager_class = _manager()
    logger.info("release build %s in use", folder)
    return None


def find(kernel: Any, name: str) -> Any:
    """The compiled kernel that the release in use holds under this name, or None."""
    entry = _index.get(name)
    if entry is None:
        return None
    from triton.compiler.compiler import CompiledKernel

    names = [file for file in _files.get(entry.folder, ()) if not file.startswith("__grp__")]
    paths = [artefact(entry.folder, file) for file in names]
    if None in paths:
        return None
    try:
        source = SimpleNamespace(fn=kernel, signature=entry.signature, constants=entry.constants)
        return CompiledKernel(source, dict(zip(names, map(str, paths))), entry.hash)
    except Exception as problem:
        warn_once(f"release {name}", f"{name} of the release build {_folder} cannot be loaded and is compiled: {problem!r:.300}")
        return None


def artefact(folder: str, file: str) -> Path | None:
    """The path of this file, if it is in the index, lies inside the release and has the recorded hash; else None."""
    digest = _files.get(folder, {}).get(file)
    if _folder is None or digest is None:
        return None
    path = _folder / folder / file
    try:
        if not path.resolve(strict=True).is_relative_to(_folder.resolve()):
            raise ValueError("it leads out of the release")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ValueError("it is not what was built")
    except (OSError, ValueError, RuntimeError) as problem:  # RuntimeError: links in a circle
        warn_once(f"release {path}", f"{path} of a release build is ignored: {problem}")
        return None
    return path


def note(name: str, compiled: Any) -> None:
    """If this process builds a release, add what was compiled to it."""
    if _building is not None:
        from triton.runtime.cache import _base32

        _building[name] = Entry(_base32(compiled.hash), compiled.hash, compiled.src.signature, compiled.src.constants)


def mismatch(folder: Path) -> str | None:
    """Why a release cannot be used here; None if it can."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        built, digest = manifest["built_with"], manifest.get("index")
        differing = [
            f"{name} {built.get(name)!r:.60} there, {value!r} here"
            for name, value in identity().items()
            if built.get(name) != value
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
        return f"it has no readable {MANIFEST} ({type(problem).__name__})"
    if type(manifest.get("format")) is not int or manifest["format"] != FORMAT:
        return f"its format is {manifest.get('format')!r:.60}, this version reads {FORMAT}"
    if differing:
        return f"built with other versions: {'; '.join(differing)}"
    try:
        found = hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()
    except OSError as problem:
        return f"its {INDEX} cannot be read ({problem})"
    return None if found == digest else f"its {INDEX} is not what was built"


def identity() -> dict[str, str]:
    """What must be equal where a release is built and where it is used."""
    import triton

    from .. import __version__

    return dict(
        sonde=__version__,
        kernels=sources_digest()[:16],  # every source file: kernels, and the constants that they import
        triton=triton.__version__,
        python=sysconfig.get_config_var("SOABI") or platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
    )


def _manager() -> type:
    from triton.runtime.cache import FileCacheManager

    class Released(FileCacheManager):
        """Triton's cache, with the release as a fallback."""

        def get_file(self, filename: str) -> str | None:
            found = super().get_file(filename)
            released = artefact(self.key, filename) if found is None else None
            return found if released is None else str(released)

        def get_group(self, filename: str) -> dict[str, str] | None:
            found = super().get_group(filename)
            group = artefact(self.key, f"__grp__{filename}") if not found else None
            if group is None:
                return found
            paths = {name: artefact(self.key, name) for name in json.loads(group.read_bytes())["child_paths"]}
            return {name: str(path) for name, path in paths.items()} if all(paths.values()) else found

    return Released


def index_of(entries: Mapping[str, Entry], folder: Path) -> dict[str, Any]:
    """The index as JSON holds it: kernels by name, and a SHA-256 of every file."""
    kernels = {}
    for name, entry in entries.items():
        try:
            constants = [[_plain(path), _plain(value)] for path, value in entry.constants.items()]
            kernels[name] = dict(folder=entry.folder, hash=entry.hash, signature=_plain(entry.signature), constants=constants)
        except TypeError as problem:  # this kernel will be compiled when it is first used
            logger.warning("%s is not in the release: %s", name, problem)
    files = [file for entry in _entries(folder) for file in sorted(entry.iterdir()) if file.is_file() and not file.is_symlink()]
    digests = {f"{file.parent.name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return dict(kernels=kernels, files=digests)


def read_index(document: Any) -> tuple[dict[str, Entry], dict[str, dict[str, str]], list[str]]:
    """Kernels by name, hashes of files by folder and name, and the entries that are neither."""
    if not (isinstance(document, dict) and all(isinstance(document.get(part), dict) for part in ("kernels", "files"))):
        raise ValueError(f"{INDEX} holds no kernels and files")
    odd: list[str] = []
    files: dict[str, dict[str, str]] = {}
    for name, digest in document["files"].items():
        if _is_file(name, digest):
            folder, _, file = name.partition("/")
            files.setdefault(folder, {})[file] = digest
        else:
            odd.append(f"{name!r:.100}")
    kernels = {}
    for name, given in document["kernels"].items():
        try:
            folder, hash = given["folder"], given["hash"]
            constants = {_restored(path): _restored(value) for path, value in given["constants"]}
            signature = _restored(given["signature"])
            if not (_FOLDER.fullmatch(folder) and _HEX.fullmatch(hash) and isinstance(signature, dict)):
                raise ValueError
            kernels[name] = Entry(folder, hash, signature, constants)
        except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RecursionError):
            odd.append(f"{name!r:.100}")
    return kernels, files, odd


_FOLDER, _HEX = re.compile(r"[A-Z2-7]{26,104}"), re.compile(r"[0-9a-f]{64}")  # Triton's folders are named by a hash in base 32
_FILE = re.compile(r"[\w.+-]{1,200}")


def _is_file(name: str, digest: Any) -> bool:
    """True for ``folder/file`` with a folder name of Triton's form; no path out of the release has that form."""
    folder, _, file = name.partition("/")
    plain = _FOLDER.fullmatch(folder) and _FILE.fullmatch(file) and file not in (".", "..")
    return bool(plain) and isinstance(digest, str) and _HEX.fullmatch(digest) is not None


def _plain(value: Any) -> Any:
    """The value in a form that JSON can hold; TypeError if there is none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"dict": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if isinstance(value, (tuple, list)):
        return {"tuple": [_plain(v) for v in value]}
    if type(value).__module__ == "triton.language.core" and type(value).__name__ == "dtype":
        return {"dtype": str(value)}
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def _restored(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {_restored(k): _restored(v) for k, v in inner}
    if kind == "tuple":
        return tuple([_restored(v) for v in inner])
    if kind == "dtype":
        from triton.language import dtype

        return dtype(inner)
    raise ValueError(kind)


def _entries(folder: Path) -> list[Path]:
    """The folders that Triton made; anything beside them is not ours."""
    return [
        entry for entry in sorted(folder.iterdir()) if _FOLDER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
    ]


def build(tasks: Sequence[Task], folder: Path, num_workers: int, limit_s: float = 600) -> Iterator[Built]:
    """Compile into `folder`, in processes that need no GPU; yields each task as it finishes, and writes the manifest last."""
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
    """Make paths relative, so that the folder can be moved, and write the index and the manifest."""
    for entry in _entries(folder):
        for group in entry.glob("__grp__*"):
            children = json.loads(group.read_text())["child_paths"]
            group.write_text(json.dumps({"child_paths": {name: name for name in children}}))
        (entry / "lock").unlink(missing_ok=True)
    index = json.dumps(index_of({name: entry for built in done for name, entry in built.entries.items()}, folder)).encode()
    tasks = [dict(built.task._asdict(), kernels=len(built.entries)) for built in done if built.cause is None]
    digest = hashlib.sha256(index).hexdigest()
    document = dict(format=FORMAT, built_with=identity(), index=digest, tasks=sorted(tasks, key=str))
    _replace(folder / INDEX, index)
    _replace(folder / MANIFEST, json.dumps(document, indent=1).encode())  # last, so that an interrupted build is not a release


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(f".{file.name}")
    temporary.write_bytes(data)
    temporary.replace(file)


def _stub_driver(folder: Path) -> bool:
    """Make an empty libcuda to link launchers against where no driver is installed; where they run, the real one is loaded."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None or platform.system() != "Linux":
        return False  # launchers are then compiled at the first call, as without a release
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
    """Call the operator on a driver that launches nothing: it compiles exactly the kernels that a real call will need."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from ..operators import OPERATORS
    from .launch import _compiled
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
        _compiled.clear()  # it may hold kernels for another architecture
        if ":" in task.operator:
            module, _, function = task.operator.partition(":")
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                getattr(import_module(module), function)()
            return _building, None
        operator = OPERATORS[task.operator]
        sizes = {**operator.cases.SMALL, **operator.cases.BENCH}[task.case]
        args = list(operator.make(**sizes, dtype=getattr(torch, task.dtype)))
        if task.layout == "channels_last":
            if not operator.has_images:
                return _building, None  # the operator has only one layout
            form = torch.channels_last_3d if args[0].ndim == 5 else torch.channels_last
            args[0] = args[0].contiguous(memory_format=form)
        given = [a.requires_grad_() for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            out = operator.function(*args, impl="triton")
            if operator.graded:
                torch.autograd.grad(out, given, torch.empty_like(out))
    except Exception as problem:
        return _building, describe(problem)
    return _building, None


def _build_launcher(src: Any, metadata: Any) -> None:
    """Triton compiles the C code that launches a kernel on first use; building it now puts it into the cache."""
    from triton.backends.nvidia import driver as nvidia

    for make in (nvidia.CudaUtils, partial(nvidia.CudaLauncher, src, metadata)):
        try:
            make()
        except Exception as problem:  # built, but cannot be loaded without a driver; or there is no C compiler
            logger.debug("launcher: %s", problem)
