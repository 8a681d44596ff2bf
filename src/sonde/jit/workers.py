"""Compile and try configurations in other processes, so that this one survives their crashes and hangs."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from .bench import Bench, Layout, copies, spans
from .process import START_LIMIT_S, Lost, Worker, describe
from .timing import Trial


def precompile(
    kernel: Any, problem: Any, configs: Sequence, tensors: Sequence[Tensor | None], num_workers: int, limit_s: float
) -> Iterator[tuple[Any, float, str | None]]:
    """Compile `configs` into Triton's cache on disk, in processes that never touch the GPU.

    Yields each configuration as it finishes, with the seconds it took and, if it failed, the cause. The processes keep compiling
    between yields; closing the iterator ends them.
    """
    if not is_compiled(kernel.function):
        yield from ((config, 0.0, None) for config in configs)
        return
    if not is_importable(kernel):
        for config in configs:
            yield config, *_compile(kernel, problem, config, tensors)
        return
    from triton.runtime import driver

    target = driver.active.get_current_target()
    about = kernel.module, kernel.attribute, problem, [None if t is None else Pointer.to(t) for t in tensors]
    role = _start_compiler, ((target.backend, target.arch, target.warp_size),), _environment(kernel)
    workers = [_kept_or_new(*role) for _ in range(max(1, min(num_workers, len(configs))))]
    tasks, results = deque(configs), SimpleQueue[Any]()
    threads = [threading.Thread(target=_feed, args=(w, about, tasks, results, limit_s), daemon=True) for w in workers]
    finished = False
    try:
        for thread in threads:
            thread.start()
        for _ in configs:
            found = results.get()
            if isinstance(found, BaseException):
                raise found
            yield found
        finished = True
    finally:
        tasks.clear()
        for worker in workers if not finished else ():
            worker.kill()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for worker in workers:
            _keep_or_close(worker, finished)


_kept: dict[Callable, list[Worker]] | None = None  # by role


@contextmanager
def keep() -> Iterator[None]:
    """Inside this context, processes are kept for the next search, since each takes seconds to start."""
    global _kept
    if _kept is not None:
        yield
        return
    _kept = {}
    try:
        yield
    finally:
        kept, _kept = _kept, None
        for workers in kept.values():
            for worker in workers:
                worker.close()


def _kept_or_new(role: Callable, *about: Any) -> Worker:
    waiting = (_kept or {}).get(role)
    return waiting.pop() if waiting else Worker(role, *about)


def _keep_or_close(worker: Worker, idle: bool) -> None:
    """Keep an idle worker for the next search; close one that still owes an answer."""
    if idle and _kept is not None:
        _kept.setdefault(worker.role, []).append(worker)
    else:
        worker.close()


def _feed(worker: Worker, about: tuple, tasks: deque, results: SimpleQueue, limit_s: float) -> None:
    try:
        while tasks:
            try:
                config = tasks.popleft()
            except IndexError:  # another thread took the last one
                return
            start = time.monotonic()
            try:
                seconds, cause = worker.ask((*about, config), limit_s, "compilation", "compiler")
            except Lost as lost:
                seconds, cause = time.monotonic() - start, str(lost)
            except Exception as error:  # a configuration that cannot be pickled, say; go on with the others
                seconds, cause = time.monotonic() - start, describe(error)
            results.put((config, seconds, cause))
    except BaseException as error:
        results.put(error)


def _start_compiler(target: tuple) -> Callable:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    os.nice(5)  # lower priority than the process that times
    driver.set_active(CompileOnly(GPUTarget(*target)))

    def compile(module: str, attribute: str, problem: Any, tensors: Sequence, config: Any) -> tuple[float, str | None]:
        try:
            kernel = getattr(import_module(module), attribute)
        except Exception as error:
            return 0.0, describe(error)
        return _compile(kernel, problem, config, tensors)

    return compile


def _compile(kernel: Any, problem: Any, config: Any, tensors: Sequence) -> tuple[float, str | None]:
    start, cause = time.monotonic(), None
    try:
        from triton.runtime import driver

        from .launch import described

        launch = kernel.launch(problem, config)
        options = launch.options(driver.active.get_current_target().backend)
        given = described(tensors, dict(launch.descriptors))
        kernel.function.warmup(*given, *launch.sizes, *launch.constants, grid=launch.grid, **options)
    except Exception as error:
        cause = describe(error)
    return time.monotonic() - start, cause


@dataclass(frozen=True)
class Pointer:
    """Stands in for a tensor: all that Triton's cache key and descriptors read from one."""

    dtype: torch.dtype
    address: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def to(cls, t: Tensor) -> Pointer:
        return cls(t.dtype, t.data_ptr() % 16, t.untyped_storage().nbytes(), tuple(t.shape), t.stride())

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:  # AMD's backend offsets storages below 2 GiB in 32 bits
        return self.nbytes


class CompileOnly:
    """A Triton driver that compiles for `target` and launches nothing, so that our launch code runs on CPU tensors."""

    SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # noqa: RUF012 (bytes per block)

    def __init__(self, target: Any) -> None:
        self.target, self.utils = target, self

    def launcher_cls(self, src: Any, metadata: Any) -> Callable:
        return lambda *args, **options: None

    def load_binary(self, *args: Any) -> tuple:
        return None, None, 0, 0, 1024

    def unload_module(self, *args: Any) -> None:
        pass

    def get_device_properties(self, device: Any) -> dict:
        shared = self.SHARED_MEMORY.get(self.target.arch, 65536)
        return dict(max_shared_mem=shared, max_num_regs=65536, warpSize=self.target.warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target.arch)  # Triton caches kernels per device

    def get_current_stream(self, device: Any) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def trials(kernel: Any, problem: Any, tensors: Sequence[Tensor | None]) -> Trials | InProcess:
    return (Trials if is_importable(kernel) else InProcess)(kernel, problem, tensors)


class Trials:
    """Checks and times configurations one by one in a separate process, on copies of `tensors`."""

    def __init__(self, kernel: Any, problem: Any, tensors: Sequence[Tensor | None]) -> None:
        device = next(t.device for t in tensors if t is not None)
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        inputs = [None if span is None else span.to("cpu", copy=True) for span in spans(tensors, kernel.writes)]
        try:
            torch.save(inputs, self._file)
            self._file.flush()
        except (OSError, RuntimeError) as problem:  # torch raises RuntimeError when the disk is full
            raise OSError(f"its tensors cannot be written to {tempfile.gettempdir()}: {problem}") from problem
        layouts = [None if t is None else Layout.of(t) for t in tensors]
        self._case = kernel.module, kernel.attribute, problem, str(device), layouts, self._file.name
        self._worker = _kept_or_new(_start_bench, (str(device),), _environment(kernel))
        with suppress(Lost):  # the first question raises it again
            self._worker.start()  # so that its imports overlap with the first compilation
        self._knows, self._idle, self._broken = False, True, ""

    def trial(self, config: Any, best_us: float | None, limit_s: float) -> Trial:
        self._idle = False  # stays so if an interrupt leaves the question unanswered
        trial = self._ask(config, best_us, limit_s)
        self._idle = True
        return trial

    def _ask(self, config: Any, best_us: float | None, limit_s: float) -> Trial:
        try:
            if not self._knows and not self._broken:
                self._broken = self._worker.ask(("case", *self._case), START_LIMIT_S, "the reference", "the reference")
            if self._broken:
                return Trial(config, cause=self._broken)
            self._knows = True
            times_us, cause, error, healthy = self._worker.ask(("trial", config, best_us), limit_s, "the run", "the run")
        except Lost as lost:
            if not self._knows:
                self._broken = str(lost)
            self._knows = False
            return Trial(config, cause=str(lost))
        if not healthy:
            self._worker.stop()
            self._knows = False
        return Trial(config, times_us, cause, error)

    def close(self) -> None:
        _keep_or_close(self._worker, self._idle)
        self._file.close()


class InProcess:
    """The same in this process, for kernels that another process cannot import; `limit_s` is ignored."""

    def __init__(self, kernel: Any, problem: Any, tensors: Sequence[Tensor | None]) -> None:
        device = next(t.device for t in tensors if t is not None)
        layouts = [None if t is None else Layout.of(t) for t in tensors]
        self._bench = Bench(kernel, problem, copies(layouts, spans(tensors, kernel.writes), device))

    def trial(self, config: Any, best_us: float | None, limit_s: float) -> Trial:
        times_us, cause, error, _ = self._bench.trial(config, best_us)
        return Trial(config, times_us, cause, error)

    def close(self) -> None:
        del self._bench


def _start_bench(device: str) -> Callable:
    where, bench = torch.device(device), None
    if where.type == "cuda":
        torch.cuda.set_device(where)
        torch.cuda.init()

    def case(module: str, attribute: str, problem: Any, device: str, layouts: Sequence[Layout | None], file: str) -> str:
        nonlocal bench
        bench = None  # free the previous one's memory first
        try:
            where = torch.device(device)
            if where.type == "cuda":
                torch.cuda.set_device(where)
            tensors = copies(layouts, torch.load(file, map_location="cpu"), where)
            bench = Bench(getattr(import_module(module), attribute), problem, tensors)
        except Exception as error:
            return describe(error)
        return ""

    def answer(kind: str, *question: Any) -> Any:
        return case(*question) if kind == "case" else bench.trial(*question)  # type: ignore[union-attr]

    return answer


def _environment(kernel: Any) -> dict[str, str]:
    """The environment for a worker: Triton must interpret there if and only if it does here, whatever the variable says now."""
    env = dict(os.environ)
    if is_compiled(kernel.function):
        env.pop("TRITON_INTERPRET", None)
    elif type(kernel.function).__name__ == "InterpretedFunction":
        env["TRITON_INTERPRET"] = "1"
    return env


def is_compiled(function: object) -> bool:
    """True if the kernel is compiled, not interpreted; checked without importing Triton."""
    triton = sys.modules.get("triton")
    return triton is not None and isinstance(function, triton.JITFunction)


def is_importable(kernel: Any) -> bool:
    return kernel.module not in (None, "__main__") and kernel.attribute is not None and os.name == "posix"
