"""A Triton kernel, the configurations it can run in, and how one of them is chosen. Users' own kernels work the same way.

An example (``docs/tuning.md`` explains it in full):

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
MOST_WARPS = 32  # per block, on any device
WAIT_S = 600.0  # how long to wait for the winner when another process is already tuning the same kernel


class Unsupported(ValueError):
    """The request is valid, but no kernel can meet it; the message says what would."""


class Launch(NamedTuple):
    """``kernel[grid](*tensors, *sizes, *constants, num_warps=…)``; the kernel's sizes are declared ``do_not_specialize``."""

    grid: tuple[int, int, int]  # programs along each axis
    sizes: tuple[float, ...]  # numbers that may vary without another compilation
    constants: tuple[Any, ...]  # values of the ``tl.constexpr`` parameters
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True  # whether the compiler may contract a multiply and an add into one FMA, which rounds once
    registers: int | None = None  # limit per thread, NVIDIA only: spilling a few registers can raise occupancy
    descriptors: tuple[tuple[int, tuple[int, ...]], ...] = ()  # by position: tensors passed as descriptors of blocks of this shape

    def options(self, backend: str) -> dict[str, Any]:
        """The options passed to Triton's compiler."""
        unfused = {} if self.fp_fusion else {"enable_fp_fusion": False}
        limited = {"maxnreg": self.registers} if self.registers and backend == "cuda" else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **unfused, **limited}


class Choice(NamedTuple):
    config: Any
    origin: Literal["tuned", "shipped", "default", "fixed"]
    candidates: int = 1
    key: Key | None = None  # in the store; None where there is nothing to choose


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
    module: str | None  # which other processes import it from; None if they cannot

    def __call__(self, problem: Any, *tensors: Tensor | None) -> None:
        """Run on these tensors in the configuration that the policy picks."""
        kinds = [None if t is None else (t.dtype, t.data_ptr() & 15) for t in tensors]
        key = (problem, winners.token(), tensors[0].get_device(), *kinds)  # type: ignore[union-attr]
        start = self._bound.get(key)
        if start is None:
            start = self._bound.put(key, self.bind(problem, tensors))
        start(*tensors)

    def bind(self, problem: Any, tensors: Sequence[Tensor | None]) -> Callable[..., None]:
        """Choose a configuration, by a search if the policy asks for one, and compile; returns the function that launches it."""
        from .launch import bind  # which imports Triton

        dtypes, device = dtypes_of(tensors), tensors[0].device  # type: ignore[union-attr]
        choice, policy = self.choose(problem, dtypes, device), winners.state()[0]
        if type(policy) is PickBest and choice.key is not None:
            again = policy.again and choice.key not in _searched
            if choice.origin != "tuned" or again:
                choice = self._search(problem, tensors, dtypes, device, again)
        first = error = None  # the configuration that was chosen first, if it cannot run here
        while True:
            try:
                start = bind(self.function, tensors, self.launch(problem, choice.config))
                break
            except Exception as caught:  # this compiler may reject a winner that was found with another version
                large = choice.origin == "default" and type(caught).__name__ == "OutOfResources"  # too large for this device
                if not (large or choice.origin in ("tuned", "shipped")) or type(policy) is PickStored:
                    raise
                self._refused.add((choice.key, choice.config))
                first, error = first or choice, caught
                choice = self.choose(problem, dtypes, device)
                if (choice.key, choice.config) in self._refused:
                    text = f"{self.name}: no configuration fits this device; impl='reference' computes the same ({caught})"
                    raise Unsupported(text) from caught
        if first is not None:
            text = f"{self.name}: the {first.origin} {first.config} cannot run here, going on with {choice.config}"
            warn_once(f"{self.name} {first.config}", f"{text} ({type(error).__name__}: {str(error).strip()[:300]})")
        return start

    def run(self, problem: Any, config: Any, tensors: Sequence[Tensor | None]) -> None:
        """Run in exactly this configuration."""
        from .launch import bind

        bind(self.function, tensors, self.launch(problem, config))(*tensors)

    def tunable(self, problem: Any) -> bool:
        """True if there is work to do, more than one configuration to choose from, and a reference to check them against."""
        some = self.expected is not None and 0 not in self.launch(problem, self.default(problem)).grid
        return some and len(self.fitting(problem)) > 1

    def fitting(self, problem: Any) -> list[Any]:
        """The candidates that can run, in order, without duplicates."""
        return [config for config in dict.fromkeys(self.candidates(problem)) if self.fits(problem, config)]

    def choose(self, problem: Any, dtypes: str, device: torch.device) -> Choice:
        """What runs without a search: the stored winner, the shipped one or the default, depending on the policy."""
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
            return Choice(next((c for c in (default, *fitting) if (key, c) not in self._refused), default), "default", *about)
        return Choice(default, "default")

    def _known(self, found: Any, problem: Any, key: Key, own: Sequence[Any]) -> Any:
        """A stored or shipped entry as a configuration; None unless its values have the types and signs of ours and it fits.

        Files can hold anything. An entry that passes these checks and still does not compile is dropped by `bind`.
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
        except Exception:  # `fits` and `launch` may assume a sensible configuration
            return None
        return config if fits else None

    def key(self, problem: Any, dtypes: str, device: torch.device) -> Key:
        """The store's key for this problem: sizes are rounded to powers of two, everything else counts exactly."""
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
        """The name that a profiler shows."""
        return str(self.function.__name__)

    @cached_property
    def source(self) -> str:
        """A hash of the source of the kernel and of every function it calls, except Triton's own."""
        digest, todo, seen = hashlib.sha256(), [self.function], set()
        while todo:
            function = todo.pop().fn
            if function not in seen:
                seen.add(function)
                digest.update(inspect.getsource(function).encode())
                used = [function.__globals__.get(name) for name in sorted(function.__code__.co_names)]
                called = [value for value in used if inspect.isfunction(getattr(value, "fn", None))]
                todo += [value for value in called if not value.fn.__module__.startswith("triton.")]
                digest.update(repr([value for value in used if type(value).__name__ == "constexpr"]).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def attribute(self) -> str | None:
        """The name under which its module holds it."""
        known = vars(sys.modules[self.module]) if self.module in sys.modules else {}
        return next((name for name, value in known.items() if value is self), None)

    @cached_property
    def _refused(self) -> set[tuple[Any, ...]]:
        """(key, configuration) of stored and shipped winners that did not compile, and of defaults too large for the device."""
        return set()

    @cached_property
    def _bound(self) -> CallCache[Callable[..., Any]]:
        return CallCache()

    def _search(self, problem: Any, tensors: Sequence[Tensor | None], dtypes: str, device: torch.device, again: bool) -> Choice:
        """Tune, unless another process (another rank, say) is already tuning this key: then wait for its winner."""
        from .search import best, search

        now, store, key = settings.current(), open_store(), self.key(problem, dtypes, device)
        owner = f"{os.getpid()}.{threading.get_ident()}"  # per thread, since two threads that time at once disturb each other
        if store.claim(key, owner, (now.budget_s or WAIT_S) + 60):
            try:
                winners.forget()
                if again or self.choose(problem, dtypes, device).origin != "tuned":  # the previous owner may have finished
                    limits: dict[str, Any] = dict(num_workers=now.num_workers, max_configs=now.max_configs, budget_s=now.budget_s)
                    trials = search(self, problem, tensors, **limits, progress=listener(self, problem, key, now.verbose))
                    store.record(key, [replace(trial, config=winners.write(trial.config)) for trial in trials])
                    best(trials, self.name)  # raises, listing every cause, if no candidate is usable
                    _say_failures(self.name, trials)
            except OSError as error:  # the machine's fault: disk full, no memory for another process
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
        name: Family and kernel, as in ``"grid.form"``.
        default: problem → the configuration that runs when nothing was tuned.
        launch: (problem, configuration) → ``Launch(grid, sizes, constants, num_warps, num_stages, fp_fusion, registers,
            descriptors)``.
        candidates: problem → the configurations that a search tries, the most promising first.
        sizes: Fields of the problem that may vary without recompiling; winners are stored by their power of two.
        batch: Fields that the choice must ignore, so that a row's bits do not depend on how many rows there are.
        writes: Positions of the tensors that the kernel writes; a search passes copies of its own.
        adds: Those of `writes` that the kernel adds to instead of overwriting.
        fits: (problem, configuration) → whether it can run; also checked for every stored configuration.
        expected: (problem, *tensors) → the expected outputs by position, in plain PyTorch. Without it there is no search.
        tolerance: The relative error, in norm, that a candidate may have.
    """
    module = sys._getframe(1).f_globals.get("__name__")
    return Tunable(
        function, name, default, candidates or (lambda problem: [default(problem)]), launch, tuple(sizes), tuple(batch),
        tuple(writes), tuple(adds), fits, expected, tolerance, None if module == "__main__" else module,
    )  # fmt: skip


_searched: set[Key] = set()  # keys that this process has searched already
_listeners: list[Callable[[Tunable, Any, Key], Callable[..., Any]]] = []  # each returns the progress callback for one search


def listener(kernel: Tunable, problem: Any, key: Key, verbose: bool) -> Callable[..., Any] | None:
    """The progress callback for a search: the newest progress bar if there is one, else the log if `verbose`."""
    if _listeners:
        return _listeners[-1](kernel, problem, key)
    if not verbose:
        return None

    def say(done: int, total: int, best: Any, latest: Any) -> None:
        outcome = latest.cause or f"{latest.median_us:.1f} us"
        logger.warning("%s %d/%d: %s: %s", kernel.name, done, total, latest.config, outcome)

    return say


def _say_failures(name: str, trials: Sequence[Any]) -> None:
    """Log the candidates that did not compile, crashed or hung. Where a progress bar is shown, its owner reports them."""
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
