"""A Triton kernel, the configurations that it can run in, and the choice between them: ours and users' own alike.

In short; ``docs/tuning.md`` has the whole of it:

    class Problem(NamedTuple):
        n: int

    @dataclass(frozen=True)
    class Config:
        block: int
        num_warps: int

    double = sonde.jit.kernel(
        _double,  # a Triton kernel of (x, out, N, BLOCK: tl.constexpr)
        "mine.double",
        default=lambda p: Config(1024, 4),
        candidates=lambda p: [Config(b, w) for b in (1024, 256, 4096) for w in (4, 2, 8)],
        launch=lambda p, c: sonde.jit.Launch((-(-p.n // c.block), 1, 1), (p.n,), (c.block,), c.num_warps),
        sizes=("n",),
        writes=(1,),
        expected=lambda p, x, out: {1: 2 * x},
    )
    double(Problem(x.numel()), x, out)
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..op.cache import CallCache, warn_once
from . import settings, winners
from .policies import PickBest, PickFixed, PickStored
from .store import Key, open_store

logger = logging.getLogger("sonde")
MOST_WARPS = 32  # of a block, on any device
WAIT_S = 600.0  # a process that finds another one tuning waits this long for its winner


class Unsupported(ValueError):
    """The request is valid, but no kernel can meet it; the message says what would."""


class Launch(NamedTuple):
    """``kernel[grid](*tensors, *sizes, *constants, num_warps=…)``; the kernel's sizes are declared ``do_not_specialize``."""

    grid: tuple[int, int, int]
    sizes: tuple[float, ...]
    constants: tuple[Any, ...]
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True  # whether a product and a sum may become one operation, which rounds once
    registers: int | None = None  # of a thread; on NVIDIA's devices, whose compiler may spill a few to have room for more programs
    descriptors: tuple[tuple[int, tuple[int, ...]], ...] = ()  # tensors by position that go as descriptors of blocks of this shape

    def options(self, backend: str) -> dict[str, Any]:
        """What the compiler is told beside the arguments."""
        unfused = {} if self.fp_fusion else {"enable_fp_fusion": False}
        limited = {"maxnreg": self.registers} if self.registers and backend == "cuda" else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **unfused, **limited}


class Choice(NamedTuple):
    config: Any
    origin: Literal["tuned", "shipped", "default", "fixed"]
    candidates: int = 1
    key: Key | None = None  # of the store; None where there is nothing to choose


@dataclass(frozen=True, eq=False)
class Tunable:
    """What :func:`kernel` returns; call it with a problem and the kernel's tensors."""

    function: Any
    name: str
    default: Callable[[Any], Any]
    candidates: Callable[[Any], Sequence[Any]]
    launch: Callable[[Any, Any], Launch]
    sizes: tuple[str, ...]
    batch: tuple[str, ...]
    writes: tuple[int, ...]
    adds: tuple[int, ...]
    fits: Callable[[Any, Any], bool]
    expected: Callable[..., Mapping[int, Tensor]] | None
    tolerance: float
    module: str | None  # where another process finds it; None if it cannot

    def __call__(self, problem: Any, *tensors: Tensor | None) -> None:
        """Run on these tensors, in the configuration that the policy picks."""
        kinds = [None if t is None else (t.dtype, t.data_ptr() & 15) for t in tensors]
        key = (problem, winners.token(), tensors[0].get_device(), *kinds)  # type: ignore[union-attr]
        start = self._bound.get(key)
        if start is None:
            start = self._bound.put(key, self.bind(problem, tensors))
        start(*tensors)

    def bind(self, problem: Any, tensors: Sequence[Tensor | None]) -> Callable[..., None]:
        """Choose, by a search if the policy says so, and compile; what comes back takes the tensors and starts the kernel."""
        from .launch import bind  # which imports Triton

        dtypes, device = dtypes_of(tensors), tensors[0].device  # type: ignore[union-attr]
        choice, policy = self.choose(problem, dtypes, device), winners.state()[0]
        if type(policy) is PickBest and choice.key is not None:
            again = policy.again and choice.key not in _searched
            if choice.origin != "tuned" or again:
                choice = self._search(problem, tensors, dtypes, device, again)
        while True:
            try:
                return bind(self.function, tensors, self.launch(problem, choice.config))
            except Exception as error:  # of the compiler, which is not the one that the winner was found with
                if choice.origin not in ("tuned", "shipped") or type(policy) is PickStored:
                    raise
                self._refused.add((choice.key, choice.config))
                refused = choice.config
                choice = self.choose(problem, dtypes, device)
                text = f"{self.name}: the stored or shipped {refused} cannot run here, going on with {choice.config}"
                warn_once(f"{self.name} {refused}", f"{text} ({type(error).__name__}: {str(error).strip()[:300]})")

    def run(self, problem: Any, config: Any, tensors: Sequence[Tensor | None]) -> None:
        """Run in this very configuration."""
        from .launch import bind

        bind(self.function, tensors, self.launch(problem, config))(*tensors)

    def tunable(self, problem: Any) -> bool:
        """Whether there is anything to run, a choice of how, and a way to check it."""
        some = self.expected is not None and 0 not in self.launch(problem, self.default(problem)).grid
        return some and len(self.fitting(problem)) > 1

    def fitting(self, problem: Any) -> list[Any]:
        """The candidates that can run, each once, in their order."""
        return [config for config in dict.fromkeys(self.candidates(problem)) if self.fits(problem, config)]

    def choose(self, problem: Any, dtypes: str, device: torch.device) -> Choice:
        """What runs unless something is searched for: the stored winner, the shipped one or the default, as the policy has it."""
        policy, default = winners.state()[0], self.default(problem)
        fixed = winners.read(type(default), policy.config) if type(policy) is PickFixed else None
        if fixed is not None:
            if not self.fits(problem, fixed):
                raise Unsupported(f"{self.name}: {fixed} does not fit {problem}; take another configuration, or PickAny")
            return Choice(fixed, "fixed")
        if device.type in ("cuda", "cpu") and self.tunable(problem):
            key = self.key(problem, dtypes, device)
            fitting = self.fitting(problem)
            about = len(fitting), key
            found = self._known(winners.stored(key.device).get(key), problem, key, [default, *fitting])
            if found is not None:
                return Choice(found, "tuned", *about)
            if type(policy) is PickStored:
                raise Unsupported(
                    f"{self.name}: nothing is stored for {problem} in {dtypes} on {key.device}. Tune it with `sonde tune` or in "
                    "settings.set(PickBest), bring it with `sonde cache import`, or use PickAny"
                )
            found = self._known(winners.shipped(key.device).get(winners.portable(key)), problem, key, [default, *fitting])
            if found is not None:
                return Choice(found, "shipped", *about)
            return Choice(default, "default", *about)
        return Choice(default, "default")

    def _known(self, found: Any, problem: Any, key: Key, own: Sequence[Any]) -> Any:
        """What was stored or shipped, as a configuration; None unless each value is like one of our own, and all of it fits.

        Files can hold anything. What gets by this and does not compile is refused by `bind`.
        """
        config = winners.read(type(own[0]), found)
        if config is None or (key, config) in self._refused:
            return None
        for name, value in winners.write(config).items():
            ours = [getattr(each, name) for each in own]
            alike = [each for each in ours if type(each) is type(value)]
            signed = isinstance(value, (int, float)) and value <= 0 and all(each > 0 for each in alike)
            if not alike or signed:
                return None
        try:
            fits = self.fits(problem, config) and self.launch(problem, config).num_warps <= MOST_WARPS
        except Exception:  # written for configurations that make sense
            return None
        return config if fits else None

    def key(self, problem: Any, dtypes: str, device: torch.device) -> Key:
        """Under which the store keeps what is known of such problems: sizes by their power of two, the rest exactly."""
        sized = {k: getattr(problem, k).bit_length() for k in self.sizes}
        exact = {
            k: v if isinstance(v, (int, str)) else str(v)
            for k, v in problem._asdict().items()
            if k not in (*self.sizes, *self.batch)
        }
        where = winners.device_name(device), torch.__version__, _triton_version()
        return Key(self.name, self.source, *where, dtypes, json.dumps(exact), json.dumps(sized))

    @cached_property
    def title(self) -> str:
        """As a profiler shows it."""
        return str(self.function.__name__)

    @cached_property
    def source(self) -> str:
        """A hash of the kernel and of everything that it calls, wherever in a file it is written."""
        digest, todo, seen = hashlib.sha256(), [self.function], set()
        while todo:
            function = todo.pop().fn
            if function not in seen:
                seen.add(function)
                digest.update(inspect.getsource(function).encode())
                used = [function.__globals__.get(name) for name in sorted(function.__code__.co_names)]
                todo += [value for value in used if inspect.isfunction(getattr(value, "fn", None))]
                digest.update(repr([value for value in used if type(value).__name__ == "constexpr"]).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def attribute(self) -> str | None:
        """Its name in its module."""
        known = vars(sys.modules[self.module]) if self.module in sys.modules else {}
        return next((name for name, value in known.items() if value is self), None)

    @cached_property
    def _refused(self) -> set[tuple[Any, ...]]:
        """Stored and shipped configurations that did not compile, with their keys."""
        return set()

    @cached_property
    def _bound(self) -> CallCache[Callable[..., Any]]:
        return CallCache()

    def _search(self, problem: Any, tensors: Sequence[Tensor | None], dtypes: str, device: torch.device, again: bool) -> Choice:
        """Tune, unless another process is at it, such as another rank: then wait for what it finds."""
        from .search import best, search

        now, store, key = settings.current(), open_store(), self.key(problem, dtypes, device)
        owner = f"{os.getpid()}.{threading.get_ident()}"  # two threads that time at once disturb each other, too
        if store.claim(key, owner, (now.budget_s or WAIT_S) + 60):
            try:
                winners.forget()
                if again or self.choose(problem, dtypes, device).origin != "tuned":  # the owner before may have found it
                    limits: dict[str, Any] = dict(num_workers=now.num_workers, max_configs=now.max_configs, budget_s=now.budget_s)
                    trials = search(self, problem, tensors, **limits, progress=listener(self, problem, key, now.verbose))
                    store.record(key, [replace(trial, config=winners.write(trial.config)) for trial in trials])
                    best(trials, self.name)  # or an error that lists every cause
                    _say_failures(self.name, trials)
            except OSError as error:  # the machine's: no room on the disk, no memory for a process
                logger.warning("%s: the search could not be made: %s", self.name, error)
            finally:
                store.release(key, owner)
        else:
            store.wait(key, WAIT_S)
        _searched.add(key)
        winners.forget()
        choice = self.choose(problem, dtypes, device)
        if choice.origin != "tuned":
            logger.warning("%s: there is no winner; going on with %s", self.name, choice.config)
        return choice


def kernel(
    function: Any,
    name: str,
    *,
    default: Callable[[Any], Any],
    launch: Callable[[Any, Any], Launch],
    candidates: Callable[[Any], Sequence[Any]] | None = None,
    sizes: Sequence[str] = (),
    batch: Sequence[str] = (),
    writes: Sequence[int] = (),
    adds: Sequence[int] = (),
    fits: Callable[[Any, Any], bool] = lambda problem, config: True,
    expected: Callable[..., Mapping[int, Tensor]] | None = None,
    tolerance: float = 1e-5,
) -> Tunable:
    """Declare a kernel. A problem is a NamedTuple of plain values, a configuration a frozen dataclass or a NamedTuple.

    Args:
        function: Decorated with ``triton.jit``; takes tensors, then sizes (``do_not_specialize``), then constants.
        name: Of the family and the kernel, as in ``"grid.form"``.
        default: problem → the configuration that runs untuned.
        launch: (problem, configuration) → ``Launch(grid, sizes, constants, num_warps, num_stages, fp_fusion, registers)``.
        candidates: problem → the configurations that a search tries, the most promising first.
        sizes: Fields of the problem that may vary without another compilation; winners are kept by their power of two.
        batch: Fields that the choice does not depend on, so that a row's bits do not depend on how many rows there are.
        writes: Positions of the tensors that are written; a search hands the kernel its own.
        adds: Those among them that the kernel adds to.
        fits: (problem, configuration) → whether it can run; asked whenever a stored configuration is found.
        expected: (problem, *tensors) → what is written, by position, in plain PyTorch. There is no search without it.
        tolerance: Relative error in norm that a candidate may have.
    """
    module = sys._getframe(1).f_globals.get("__name__")
    return Tunable(
        function, name, default, candidates or (lambda problem: [default(problem)]), launch, tuple(sizes), tuple(batch),
        tuple(writes), tuple(adds), fits, expected, tolerance, None if module == "__main__" else module,
    )  # fmt: skip


_searched: set[Key] = set()  # by this process, which need not search them again
_listeners: list[Callable[[Tunable, Any, Key], Callable[..., Any]]] = []  # each makes the progress function of a search


def listener(kernel: Tunable, problem: Any, key: Key, verbose: bool) -> Callable[..., Any] | None:
    """Who hears of a search's progress: a progress bar if one is there, else the log."""
    if _listeners:
        return _listeners[-1](kernel, problem, key)
    if not verbose:
        return None

    def say(done: int, total: int, best: Any, latest: Any) -> None:
        outcome = latest.cause or f"{latest.median_us:.1f} us"
        logger.warning("%s %d/%d: %s: %s", kernel.name, done, total, latest.config, outcome)

    return say


def _say_failures(name: str, trials: Sequence[Any]) -> None:
    """A search survives candidates that do not compile, crash or hang, and says so; where a progress bar is, its owner does."""
    failed = [f"{trial.config}: {trial.cause.splitlines()[0]}" for trial in trials if trial.cause]
    if failed and not _listeners:
        more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
        logger.warning("%s: %d of %d candidates cannot be used: %s%s", name, len(failed), len(trials), "; ".join(failed[:3]), more)


def dtypes_of(tensors: Iterable[Tensor | torch.dtype | None]) -> str:
    return " ".join("-" if t is None else str(getattr(t, "dtype", t)).removeprefix("torch.") for t in tensors)


@lru_cache(1)
def _triton_version() -> str:
    import triton

    return str(triton.__version__)
