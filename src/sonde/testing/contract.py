"""``check_operator``: checks everything that an operator promises, for each of its implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..op.custom import CustomOperator
from . import device, frame, memory_checks, values
from .subject import Subject

Check = Callable[[Subject], Iterator[str]]

CHECKS: dict[str, Check] = {
    "values": values.values,
    "arguments": memory_checks.arguments,
    "aliasing": memory_checks.aliasing,
    "foreign memory": memory_checks.foreign_memory,
    "uninitialised memory": memory_checks.uninitialised_memory,
    "gradients": values.gradients,
    "determinism": values.determinism,
    "strides": values.strided,
    "empty inputs": values.empty_inputs,
    "autocast": values.autocast,
    "vmap": frame.vmap,
    "compile": frame.compiled,
    "export": frame.exported,
    "synchronisation": device.synchronisation,
    "streams": device.streams,
}
ONCE = ("compile", "export", "synchronisation")  # once per implementation: they take long, and hardly depend on values
SAID = 2  # how many problems of one check of one implementation are reported; more would repeat the same


@dataclass
class Report:
    """What was checked, and what could not be."""

    name: str
    checked: dict[str, list[str]] = field(default_factory=dict)  # implementation: checks
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.name}: {impl}: {', '.join(checks)}" for impl, checks in self.checked.items()]
        return "\n".join([*lines, *(f"not checked: {each}" for each in self.left_out)])


def check_operator(
    op: CustomOperator,
    cases: Iterable[Sequence[Any]] | Mapping[str, Sequence[Any]],
    *,
    impl: str | Sequence[str] | None = None,
    tolerance: float | None = None,
    skip: Sequence[str] = (),
) -> Report:
    """Check each implementation of an operator against its reference and against all that an operator promises.

    Values and gradients (of every argument, alone and together, for three layouts of cotangents) agree with the reference; results
    have its shapes, strides, dtypes and devices; arguments are not changed and share no memory with results; no memory outside
    the arguments and no uninitialised memory is read, and none outside is written; results have the same bits in every run, if
    that is promised. It tries other strides, empty inputs, autocast and mixed dtypes, ``torch.vmap``,
    ``torch.compile(fullgraph=True)`` and ``torch.export``; on GPUs it checks that nothing waits for the device, and that kernels
    run on the current stream.

    Args:
        op: What ``sonde.operator`` returned.
        cases: Argument tuples, or a dictionary of them by name. Small ones with odd sizes find the most.
        impl: The implementations to check; all that can take the case's tensors, unless given.
        tolerance: Relative error, in norm, that values and gradients may have, on top of twice the reference's own error: 10⁻⁵ in
            float32, 10⁻¹⁰ in float64, 4·10⁻³ in float16 and 3·10⁻² in bfloat16, unless given.
        skip: Names of checks to leave out (``sonde.testing.CHECKS``).

    Returns:
        What was checked, and what was left out and why; ``str()`` of it is a list.

    Raises:
        AssertionError: With one line for each problem.

    Example:
        >>> import torch, sonde
        >>> from torch import Tensor
        >>> from sonde.testing import check_operator
        >>> @sonde.operator("doctest::halve", reference=lambda x: x / 2)
        ... def halve(x: Tensor) -> Tensor:
        ...     return x.mul_(0.5)
        >>> check_operator(halve, [(torch.ones(3),)], skip=["compile", "export"])
        Traceback (most recent call last):
        AssertionError: doctest::halve: ...
    """
    unknown = set(skip) - set(CHECKS)
    if unknown:
        raise ValueError(f"check_operator: skip must be of {', '.join(CHECKS)}; got {', '.join(sorted(unknown))}")
    report, named = Report(op.name), _named(cases)
    if not named:
        raise ValueError("check_operator: there are no cases; give at least one tuple of arguments")
    report.left_out += [f"{name}, as asked for" for name in skip]
    for which in _implementations(op, impl):
        once: set[str] = set()
        for label, args in named.items():
            bound = op._bound(tuple(_detached(x) for x in args), {})
            subject = Subject(op, which, bound, tolerance)
            if not subject.tensors:
                raise ValueError(f"check_operator: case {label} has no tensor")
            reason = op._registry.known[which].refusal(subject.device.type)
            if reason is not None:
                if impl is not None:
                    raise ValueError(f"check_operator: impl={which!r} {reason}")
                report.left_out.append(f"{which}, case {label}: it {reason}")
                continue
            for name, check in CHECKS.items():
                if name in skip or name in once:
                    continue
                if name in ONCE:
                    once.add(name)
                _apply(report, name, check, subject, label)
    if report.problems:
        raise AssertionError("\n".join(report.problems))
    if not report.checked:
        raise ValueError(f"check_operator: nothing of {op.name} could be checked: {'; '.join(report.left_out)}")
    return report


def _apply(report: Report, name: str, check: Check, subject: Subject, label: str) -> None:
    """Run one check; an exception is a problem, too."""
    done = report.checked.setdefault(subject.impl, [])
    found: list[str] = []
    try:
        found = list(check(subject))
    except values.NotApplicable as why:
        text = f"{subject.impl}, {name}: {why}"
        if text not in report.left_out:
            report.left_out.append(text)
        return
    except Exception as problem:
        text = " ".join(str(problem).split())[:400]
        found = [f"raises {type(problem).__name__}: {text}"]
    finally:
        torch.use_deterministic_algorithms(False)
    if name not in done:
        done.append(name)
    start = f"{report.name}: impl={subject.impl!r}, {name}"
    room = SAID - sum(line.startswith(f"{start},") for line in report.problems)
    report.problems += [f"{start}, case {label}: {each}" for each in found[: max(0, room)]]


def _implementations(op: CustomOperator, impl: str | Sequence[str] | None) -> list[str]:
    if impl is None:
        return list(op._registry.known)
    return [impl] if isinstance(impl, str) else list(impl)


def _named(cases: Iterable[Sequence[Any]] | Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    given = cases.items() if isinstance(cases, Mapping) else ((str(i), case) for i, case in enumerate(cases))
    named = dict(given)
    for label, case in named.items():
        if not isinstance(case, (tuple, list)):
            raise TypeError(f"check_operator: case {label} must be a tuple of arguments; got {type(case).__name__}")
    return named


def _detached(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach()
    return [_detached(y) for y in x] if isinstance(x, list) else x
