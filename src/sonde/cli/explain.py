"""Show what a call would launch: kernels, configurations and where they come from, determinism, workspace. Launches nothing.

The plan comes from the same code as the call, with tensors that have no memory, so it works on any machine: without a GPU,
--device cuda shows what would run on one that nothing was tuned for.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .bench import DTYPES, LAYOUTS
from .console import IMPLS, UsageError, did_you_mean, dump, names, table, writable
from .without_triton import planning

if TYPE_CHECKING:
    from ..op.plan import Plan
    from .protocol import Job

DEVICES = ("auto", "cpu", "cuda", "meta")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operator", metavar="OPERATOR", help=f"which operator: {names('explain')}")
    parser.add_argument("--case", metavar="NAME", help="which workload (default: the first)")
    parser.add_argument("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default: float32)")
    parser.add_argument("--layout", default="contiguous", help=f"{', '.join(LAYOUTS)} (default: contiguous)")
    parser.add_argument("--device", default="auto", help=f"{', '.join(DEVICES)} (default: auto, which is cuda where there is one)")
    parser.add_argument("--impl", default="auto", help=f"{', '.join(IMPLS)} (default: auto)")
    gradients = argparse.BooleanOptionalAction
    parser.add_argument("--backward", action=gradients, default=True, help="with all gradients (the default), or without")
    parser.add_argument("--deterministic", action="store_true", help="under torch.use_deterministic_algorithms(True)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the plan to FILE; print it without one")


def run(options: argparse.Namespace) -> int:
    writable("--json", options.json)
    without = options.device == "cuda" and options.impl in ("auto", "triton") and find_spec("triton") is None
    if without:
        print("sonde: triton is not installed here; this is the plan where it is", file=sys.stderr)
    with planning() if without else nullcontext():
        return _explain(options)


def _explain(options: argparse.Namespace) -> int:
    from ..jit import Unsupported

    job = _job(options)
    try:
        plan = planned(job, options.backward, options.deterministic)
    except Unsupported as problem:  # such as PickStored where nothing is stored
        print(f"sonde: {problem}", file=sys.stderr)
        return 1
    if options.json:
        dump(_record(job, plan, options.deterministic), options.json)
    else:
        _show(job, plan)
    return 0


def _job(options: argparse.Namespace) -> Job:
    import torch

    from ..op.plan import refusal
    from ..operators import OPERATORS
    from .protocol import Job

    def one(what: str, given: str, valid: Any) -> str:
        if given not in valid:
            raise UsageError(did_you_mean(what, given, valid))
        return given

    operator = OPERATORS[one("operator", options.operator, OPERATORS)]
    known = {**operator.cases.BENCH, **operator.cases.SMALL}
    case = one("case", options.case or next(iter(known)), known)
    kind = one("device", options.device, DEVICES)
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    impl = one("implementation", options.impl, IMPLS)
    reason = None if impl == "auto" else refusal(impl, kind)
    if reason:
        raise UsageError(f"--impl {impl} {reason}")
    dtype, layout = one("dtype", options.dtype, DTYPES), one("layout", options.layout, LAYOUTS)
    return Job(operator, case, known[case], torch.device(kind), impl, dtype, layout)


def planned(job: Job, backward: bool, deterministic: bool) -> Plan:
    """The plan of a job, with all gradients or none."""
    from ..op.plan import explain

    call, args = job.operator.written(job.outlines(backward), job.impl)
    with deterministic_algorithms(deterministic):
        return explain(call, *args)


@contextmanager
def deterministic_algorithms(mode: bool):
    import torch

    before, only_warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def short(config: str) -> str:
    """``Config(block=64, num_warps=4)`` as ``block=64 num_warps=4``."""
    return config.partition("(")[2].removesuffix(")").replace(",", "") if "(" in config else config


def _show(job: Job, plan: Plan) -> None:
    rows = [
        [
            k.phase,
            k.name,
            ", ".join(k.writes) or "(layout)",
            short(k.config),
            k.origin,
            str(k.accumulator).removeprefix("torch."),
            k.determinism.value,
            f"{k.workspace:,}",
        ]
        for k in plan.kernels
    ]
    head = ["phase", "kernel", "writes", "configuration", "from", "accumulates in", "deterministic", "workspace B"]
    title = f"{job.operator.name} {job.case}, {job.dtype}, {job.layout}: {plan.impl} on {job.device}"
    table(head, rows, title, left=len(head) - 1)
    print(f"Deterministic: {plan.determinism.value}. Workspace: {plan.workspace / 2**20:,.1f} MiB.")


def _record(job: Job, plan: Plan, deterministic: bool) -> dict[str, Any]:
    return dict(
        operator=job.operator.name,
        case=job.case,
        sizes=dict(job.sizes),
        dtype=job.dtype,
        layout=job.layout,
        device=str(job.device),
        impl=plan.impl,
        deterministic=deterministic,
        determinism=plan.determinism.value,
        workspace=plan.workspace,
        kernels=[
            dict(
                phase=k.phase,
                kernel=k.name,
                writes=list(k.writes),
                config=k.config or None,
                origin=k.origin or None,
                candidates=k.candidates,
                accumulator=str(k.accumulator).removeprefix("torch."),
                determinism=k.determinism.value,
                workspace=k.workspace,
            )
            for k in plan.kernels
        ],
    )
