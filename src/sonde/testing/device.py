"""Checks that need a GPU: nothing waits for it, and kernels run on the current stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .compare import difference
from .subject import Subject
from .values import NotApplicable, title

cuda: Any = torch.cuda  # as Any, because its streams and events have no annotations


def busy(stream: Any, tensor: Tensor, times: int = 40) -> Any:
    """Keep a stream busy for tens of milliseconds; returns an event recorded after that work."""
    with torch.cuda.stream(stream):
        for _ in range(times):
            tensor @ tensor
        done = cuda.Event()
        done.record(stream)
    return done


def synchronisation(subject: Subject) -> Iterator[str]:
    """The call and its backward pass return while the device is still busy with earlier work."""
    if subject.device.type != "cuda":
        raise NotApplicable("only GPUs work behind the host's back")
    work = torch.randn(6144, 6144, device=subject.device)
    stream = torch.cuda.current_stream(subject.device)
    graded = bool(subject.differentiable and subject.graded)
    for _ in range(2):  # compile, tune, allocate
        subject.gradients() if graded else subject.run()
        work @ work
    torch.cuda.synchronize(subject.device)
    with torch.no_grad():
        done = busy(stream, work)
        subject.run()
        if done.query():
            yield "it waits for the device"
    torch.cuda.synchronize(subject.device)
    if graded:
        done = busy(stream, work)
        subject.gradients()
        if done.query():
            yield "its backward pass waits for the device"
    torch.cuda.synchronize(subject.device)


def streams(subject: Subject) -> Iterator[str]:
    """Arguments are written late, on a stream that is not the default one: a kernel on another stream reads too early."""
    if subject.device.type != "cuda":
        raise NotApplicable("only GPUs have streams")
    floats = {name: x for name, x in subject.tensors.items() if x.is_floating_point()}
    if not floats:
        raise NotApplicable("no argument is of floating point")
    work = torch.randn(6144, 6144, device=subject.device)
    late = {name: torch.zeros_like(x) for name, x in floats.items()}
    side = cuda.Stream(subject.device)
    with torch.no_grad():
        subject.run(subject.using(late))
        torch.cuda.synchronize(subject.device)
        busy(side, work)
        with torch.cuda.stream(side):
            for name, x in floats.items():
                late[name].copy_(x)
            got = subject.run(subject.using(late))
        side.synchronize()
        torch.cuda.synchronize(subject.device)
    for i, (a, b) in enumerate(zip(got, subject.value)):
        found = difference(a, b, subject.tolerance)
        if found:
            yield f"{title(i, len(got))} is not computed on the current stream: it {found}".replace(
                "the reference", "the usual one"
            )
