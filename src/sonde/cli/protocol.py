"""The measuring protocol: check one operator on one case, time it, measure its memory, compare with PyTorch and the floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from ..op.plan import choose
from ..op.torch_private import fake_mode
from ..operators import Operator
from . import timing
from .check import Truth, every, forward_backward, leaves, mapped, tensors
from .environment import environment

SECONDS = 0.1  # spent on each figure
STAGES = ("compiling and checking", "timing", "measuring memory", "floor and host cost")


@dataclass(frozen=True)
class Job:
    """What to measure. `against`: "eager" is what a user of plain PyTorch writes, "compile" is ``torch.compile`` of that."""

    operator: Operator
    case: str
    sizes: Mapping
    device: torch.device
    impl: str = "auto"
    dtype: str = "float32"
    layout: str = "contiguous"
    against: Sequence[str] = ("eager",)
    backward: bool = True

    def __str__(self) -> str:
        return f"{self.operator.name} {self.case} {self.dtype} {self.layout} {self.impl}"

    def inputs(self, **sizes) -> list:
        args = list(self.operator.make(**(sizes or self.sizes), dtype=getattr(torch, self.dtype), device=str(self.device)))
        if self.layout == "channels_last" and self.operator.has_images:
            args[0] = self._channels_last(args[0])
        return args

    def _channels_last(self, images: Tensor) -> Tensor:
        if images.ndim == 5 and self.operator.views:
            return images.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, images.shape[:2])
        return images.contiguous(memory_format=torch.channels_last_3d if images.ndim == 5 else torch.channels_last)

    def outlines(self, grad: bool) -> list:
        """The inputs without values, for a plan: they take no memory, and their device need not exist here."""
        with fake_mode():
            args = replace(self, device=torch.device("cpu")).inputs()  # a random generator for another device needs that device
            new = partial(torch.empty_strided, device=self.device, requires_grad=grad)
            return mapped(lambda a: new(a.shape, a.stride(), dtype=a.dtype), args)


def measure(job: Job, begin: Callable[[str], None] = lambda text: None, extras: bool = True) -> dict:
    """One record, ready for JSON. It has a speed-up only if the value and every gradient are right.

    `begin` is called with each stage; `extras` are the index and the search timed separately, the floor and the host cost.
    """
    operator, device = job.operator, job.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    args = job.inputs()
    asking = leaves(args)
    counted = operator.count(**job.sizes)
    contenders = _contenders(job, job.against)

    begin(f"{job}: compiling and checking")
    out = _forward(contenders["sonde"], args)
    cotangent = _cotangent(out)
    n = every(operator, out)
    part = cotangent
    if n > 1:  # queries that the truth leaves out must not contribute to gradients
        number = torch.arange(out.shape[operator.result], device=device)
        part = cotangent * (number % n == 0).view(-1, *(1,) * (out.ndim - 1 - operator.result % out.ndim))
    read, written = sum(a.nbytes for a in tensors(args)), out.nbytes
    truth = Truth(operator, args, part, counted["taps"])
    verdict = truth.judge(contenders["sonde"], asking, part)
    figures: dict[str, dict] = {"sonde": {"errors": verdict.errors}}
    for name in job.against:
        figures[name] = {}
        for given in ((asking, part), (args, None)):  # the forward pass may fit into memory where gradients do not
            try:
                figures[name]["errors"] = truth.judge(contenders[name], *given).errors
                break
            except RuntimeError as problem:  # out of memory, or no compiler: a result too
                figures[name]["failed"] = str(problem).strip().splitlines()[0]
        else:
            del contenders[name]
    del truth, out, part

    begin(f"{job}: timing")
    phases = _phases(job, contenders, args, asking, cotangent, figures)
    fits = device.type == "cuda" and read <= torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(256 * timing.MIB, dtype=torch.uint8, device=device) if fits else None
    for phase, calls in phases.items():
        for name, ms in timing.call_ms(calls, device, SECONDS).items():
            figures[name][phase] = {"call_ms": ms}
            if device.type == "cuda":
                figures[name][phase] |= timing.graph_ms(calls[name], SECONDS, flush)
    apart = _apart(job, args) if extras else None
    deterministic = _deterministic_ms(phases) if device.type == "cuda" and job.backward else None

    begin(f"{job}: measuring memory")
    for phase, calls in phases.items():
        for name, call in calls.items():
            figures[name][phase]["peak_mib"] = timing.peak_mib(call, device)

    record = dict(
        operator=operator.name,
        case=job.case,
        sizes=dict(job.sizes),
        impl=job.impl,
        runs=choose(operator.name, job.impl, args[0]),
        dtype=job.dtype,
        layout=job.layout,
        environment=environment(device),
        counted={**counted, "bytes": {"forward": read + written, "forward_backward": 3 * read + 2 * written}},
        fits_l2=fits,
        tolerances=verdict.tolerances,
        checked_every=n,
        correct=not verdict.wrong,
        wrong=str(verdict) or None,
        figures=figures,
        speedup=None if verdict.wrong else _speedups(figures),
        deterministic_ms=deterministic,
        apart=apart,
    )
    if extras:
        begin(f"{job}: floor and host cost")
        record["floor"] = _floor(job, args, flush, record)
        record["host_us"] = _host(operator, device, job.impl, job.dtype, job.layout)
    return record


def again(job: Job, record: dict) -> None:
    """Time the calls of a correct record once more, and keep the smaller time of each contender."""
    figures, args = record["figures"], job.inputs()
    contenders = _contenders(job, [name for name in job.against if "forward" in figures[name]])
    cotangent = _cotangent(_forward(contenders["sonde"], args))
    for phase, calls in _phases(job, contenders, args, leaves(args), cotangent, figures).items():
        for name, ms in timing.call_ms(calls, job.device, SECONDS).items():
            figures[name][phase]["call_ms"] = min(ms, figures[name][phase]["call_ms"])
    record["speedup"] = _speedups(figures)


def _contenders(job: Job, against: Sequence[str]) -> dict[str, Callable]:
    return {"sonde": job.operator.call(job.impl), **{name: _baseline(job, name) for name in against}}


def _cotangent(out: Tensor) -> Tensor:
    generator = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, device=out.device, generator=generator).to(out.dtype)


def _phases(
    job: Job, contenders: Mapping[str, Callable], args: list, asking: list, cotangent: Tensor, figures: Mapping[str, dict]
) -> dict[str, dict[str, Callable]]:
    """The calls to time: each contender's forward pass and, if asked for and if it did not fail, forward with backward."""
    direct, positional = job.operator.written(args, job.impl)
    few, timed = {"sonde": len(positional)}, {**contenders, "sonde": direct}
    phases: dict[str, dict[str, Callable]] = {
        "forward": {name: partial(_forward, call, args[: few.get(name)]) for name, call in timed.items()}
    }
    if job.backward:
        both = {name: call for name, call in timed.items() if "failed" not in figures[name]}
        phases["forward_backward"] = {
            name: partial(forward_backward, call, asking[: few.get(name)], cotangent) for name, call in both.items()
        }
    return phases


def _baseline(job: Job, name: str) -> Callable:
    eager = job.operator.cases.eager
    if name != "eager":
        torch.compiler.reset()  # each case is compiled for its own sizes
        eager = torch.compile(eager, dynamic=False)
    return job.operator.of(eager)


def _forward(call: Callable, args: Sequence) -> Tensor:
    with torch.no_grad():
        return call(*args)


def _deterministic_ms(phases: Mapping) -> float:
    """Device time of forward and backward under ``torch.use_deterministic_algorithms``."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return timing.graph_ms(phases["forward_backward"]["sonde"], SECONDS)["graph_ms"]
    finally:
        torch.use_deterministic_algorithms(before)


def _apart(job: Job, args: Sequence) -> dict[str, dict] | None:
    """For operators with a search: the time to build the index of points, and of a call that is given one."""
    if not job.operator.searched or choose(job.operator.name, job.impl, args[0]) == "reference":
        return None
    from ..points import PointIndex

    points = args[job.operator.arguments.index(job.operator.searched[1])]
    build = partial(PointIndex.build, points, impl=job.impl)  # type: ignore[arg-type]
    with torch.no_grad():
        calls = {"build": build, "given": partial(job.operator.call(job.impl), *args, build())}
        found = {name: {"call_ms": ms} for name, ms in timing.call_ms(calls, job.device, SECONDS).items()}
        if job.device.type == "cuda":
            found = {name: figures | timing.graph_ms(calls[name], SECONDS) for name, figures in found.items()}
    return found


def _speedups(figures: Mapping) -> dict:
    """The ratios of each other contender's time and memory to ours, by phase and figure."""
    ours = figures["sonde"]
    return {
        name: {
            phase: {k: theirs[phase][k] / value for k, value in ours[phase].items() if value}
            for phase in ("forward", "forward_backward")
            if phase in ours and phase in theirs
        }
        for name, theirs in figures.items()
        if name != "sonde"
    }


def _floor(job: Job, args: Sequence, flush: Tensor | None, record: Mapping) -> dict:
    """The least time that each phase could take here, and its share of the measured time.

    ``copy``: read every input once and write every result once at the speed of a copy (the backward pass reads the inputs and
    the cotangent and writes a gradient for each input). ``gather``: a kernel that reads the rows that the samples touch, in the
    same order, and computes nothing.
    """
    bandwidth = _bandwidth(job.device)
    figure = "graph_ms" if job.device.type == "cuda" else "call_ms"
    found: dict = {"copy_bytes_per_s": bandwidth}
    for phase in ("forward", "forward_backward"):
        if phase in record["figures"]["sonde"]:
            ms = 1e3 * record["counted"]["bytes"][phase] / bandwidth
            found[phase] = {"kind": "copy", "ms": ms, "share": ms / record["figures"]["sonde"][phase][figure]}
    gather = _gather(job, args)
    if gather is not None:
        times = timing.graph_ms(gather, SECONDS, flush)
        ours = record["figures"]["sonde"]["forward"]
        found["forward"] = {"kind": "gather", "ms": times["graph_ms"], "share": times["graph_ms"] / ours["graph_ms"]}
        if "cold_ms" in times:
            found["forward"] |= {"cold_ms": times["cold_ms"], "cold_share": times["cold_ms"] / ours["cold_ms"]}
    return found


def _gather(job: Job, args: Sequence) -> Callable | None:
    if job.device.type != "cuda" or not job.operator.gathers:
        return None
    named = dict(zip(job.operator.arguments, args))
    try:
        from .floor import floor
    except ImportError:  # no Triton
        return None
    images, samples = named[job.operator.image], named[job.operator.samples]
    if images.ndim == 5:  # several views
        images, samples = images.flatten(0, 1), samples.flatten(0, 1)
    return partial(floor, images.permute(0, 2, 3, 1).contiguous(), samples)


_bandwidth = cache(timing.copy_bandwidth)


@cache
def _host(operator: Operator, device: torch.device, impl: str, dtype: str, layout: str) -> dict:
    """Host time of a call on a tiny input, above ``torch.relu`` forward and above a bare ``autograd.Function`` with backward."""
    job = Job(operator, "", {}, device, impl, dtype, layout)
    call, args = operator.written(job.inputs(**operator.cases.SMALL["odd_sizes"]), impl)
    asking = leaves(args)
    cotangent = torch.ones_like(call(*args))
    x = torch.ones(8, device=device)
    y = x.clone().requires_grad_()
    forward = timing.host_us({"sonde": partial(_forward, call, args), "torch.relu": partial(_forward, torch.relu, [x])}, device)
    backward = timing.host_us(
        {
            "sonde": partial(forward_backward, call, asking, cotangent),
            "autograd.Function": partial(forward_backward, _bare, [y], x),
        },
        device,
    )
    return {
        "least_of": timing.HOST_TURNS[device.type],
        "forward": {**forward, "above": forward["sonde"] - forward["torch.relu"]},
        "forward_backward": {**backward, "above": backward["sonde"] - backward["autograd.Function"]},
    }


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, x, 0)  # one launch, as in torch.relu


_bare = _Bare.apply
