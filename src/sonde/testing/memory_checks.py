"""Checks of memory accesses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .compare import difference, same_bits
from .memory import poisoned, redzone, zones
from .subject import Subject
from .values import compared, title


def arguments(subject: Subject) -> Iterator[str]:
    """Arguments are unchanged after the call and after its backward pass."""
    before = {name: x.clone() for name, x in subject.tensors.items()}
    mine = {name: x.clone() for name, x in subject.tensors.items()}
    with torch.no_grad():
        subject.run(subject.using(mine))
    for name, x in mine.items():
        if not same_bits([x], [before[name]]):
            yield f"it writes into its argument {name}"
    if subject.differentiable and subject.graded:
        mine = {name: x.clone() for name, x in subject.tensors.items()}
        subject.gradients(tensors=mine)
        for name, x in mine.items():
            if not same_bits([x], [before[name]]):
                yield f"its argument {name} is another after the backward pass"


def aliasing(subject: Subject) -> Iterator[str]:
    """Results have memory of their own."""
    mine = {name: x.clone() for name, x in subject.tensors.items()}
    for who, impl in (("it", subject.impl), ("the reference", "reference")):
        with torch.no_grad():
            out = subject.run(subject.using(mine), impl)
        seen = {x.untyped_storage().data_ptr(): f"its argument {name}" for name, x in mine.items() if x.numel()}
        for i, x in enumerate(out):
            start = x.untyped_storage().data_ptr()
            if x.numel() and start in seen:
                yield f"{title(i, len(out))} of {who} shares memory with {seen[start]}; return a copy"
            seen[start] = title(i, len(out)) if x.numel() else ""


def foreign_memory(subject: Subject) -> Iterator[str]:
    """Nothing before or after the arguments is read or written: that memory holds NaN, then huge numbers."""
    for fill in (torch.nan, 1e30):
        zoned = {
            name: redzone(x, fill=fill if x.dtype is not torch.float16 else min(fill, 6e4))
            for name, x in subject.tensors.items()
            if x.is_floating_point()
        }
        clean = {name: zones(x).clone() for name, x in zoned.items()}
        with torch.no_grad():
            got = subject.run(subject.using(zoned))
        found = list(compared(subject, got, subject.value, "it reads memory outside of its arguments: there, with other values, "))
        if not found and subject.differentiable and subject.graded:
            for name, a in _gradients(subject, zoned).items():
                b = subject.gradient[name]
                off = difference(a, b, subject.tolerance) if a is not None and b is not None else None
                if off:
                    found.append(f"its backward pass reads memory outside of its arguments: the gradient of {name} {off}")
        yield from (each.replace("from the reference", "from that of the same arguments") for each in found)
        for name, x in zoned.items():
            if not same_bits([zones(x)], [clean[name]]):
                yield f"it writes outside of its argument {name}"
        if found:
            return


def _gradients(subject: Subject, tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return subject.gradients(tensors=tensors, cotangents=[redzone(g) for g in subject.cotangents])


def uninitialised_memory(subject: Subject) -> Iterator[str]:
    """Memory from ``torch.empty`` and the like is written before it is read."""
    graded = bool(subject.differentiable and subject.graded)
    _ = subject.value, subject.gradient if graded else None  # compiles the kernels
    try:
        with poisoned(arrays=True):
            with torch.no_grad():
                got = [x.clone() for x in subject.run()]
            found = subject.gradients() if graded else {}
            grads = {name: None if g is None else g.clone() for name, g in found.items()}
    except AssertionError as problem:
        yield f"it {problem} that it allocated"
        return
    note = "it reads memory that it has not written, or leaves some of it unwritten: "
    for each in compared(subject, got, subject.value, note):
        yield each.replace("from the reference", "from that of another run")
    for name, a in grads.items():
        b = subject.gradient[name]
        off = difference(a, b, subject.tolerance) if a is not None and b is not None else None
        if off:
            yield f"{note}the gradient of {name} {off}".replace("from the reference", "from that of another run")
