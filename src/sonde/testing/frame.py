"""Checks of an operator in torch's transforms: ``vmap``, ``torch.compile``, ``torch.export``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op.autograd import as_tuple
from .compare import difference, layout, strides
from .subject import Subject
from .values import NotApplicable, title


def vmap(subject: Subject) -> Iterator[str]:
    """Three rows at once give the same as three calls."""
    fixed = {subject.op._about.signature.names[i] for i in subject.op._about.signature.unbatched}
    names = [k for k in subject.tensors if k.split("[")[0] not in fixed]
    if not names:
        raise NotApplicable("no argument may be mapped")
    scale = (1.0, 0.5, -2.0)
    rows = [{k: x * s if x.is_floating_point() else x for k, x in subject.tensors.items() if k in names} for s in scale]
    stacked = [torch.stack([row[k] for row in rows]) for k in names]

    def call(*tensors: Tensor) -> Any:
        return subject.op(*subject.using(dict(zip(names, tensors))), impl=subject.impl)

    with torch.no_grad():
        got = as_tuple(torch.vmap(call)(*stacked))
        apart = [subject.run(subject.using(row)) for row in rows]
    for i, x in enumerate(got):
        want = torch.stack([each[i] for each in apart])
        found = layout(x, want) or difference(x, want, subject.tolerance)
        if found:
            yield f"{title(i, len(got))} of torch.vmap {found}".replace("the reference", "that of separate calls")


def compiled(subject: Subject) -> Iterator[str]:
    """A single graph without breaks gives the same values, strides and gradients."""
    tensors = list(subject.tensors)

    def call(*given: Tensor) -> Any:
        return subject.op(*subject.using(dict(zip(tensors, given))), impl=subject.impl)

    call.__code__ = call.__code__.replace()  # torch counts recompilations per code object, which operators would share
    graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got = as_tuple(graph(*subject.tensors.values()))
    for i, (a, b) in enumerate(zip(got, subject.value)):
        found = layout(a, b) or strides(a, b) or difference(a, b, subject.tolerance)
        if found:
            yield f"{title(i, len(got))} of torch.compile {found}".replace("the reference", "that of an eager call")
    if not subject.differentiable or not subject.graded:
        return

    def in_graph(*args: Any) -> Any:
        return graph(*Subject(subject.op, subject.impl, args).tensors.values())

    for name, grad in subject.gradients(call=in_graph).items():
        usual = subject.gradient[name]
        if grad is None or usual is None:
            continue
        found = layout(grad, usual) or difference(grad, usual, subject.tolerance)
        if found:
            yield f"the gradient of {name} under torch.compile {found}".replace("the reference", "that of an eager call")


def exported(subject: Subject) -> Iterator[str]:
    """A program of torch.export gives the same values, and holds the operator."""
    tensors = list(subject.tensors)

    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return subject.op(*subject.using(dict(zip(tensors, given))), impl=subject.impl)

    given = tuple(subject.tensors.values())
    with torch.no_grad():
        program = torch.export.export(Model(), given)
        got = as_tuple(program.module()(*given))
    qualname = subject.op.name.replace("::", ".")
    if not any(str(node.target).startswith(f"{qualname}.") for node in program.graph.nodes):
        yield f"the exported graph does not hold {subject.op.name}"
    for i, (a, b) in enumerate(zip(got, subject.value)):
        found = layout(a, b) or difference(a, b, subject.tolerance)
        if found:
            yield f"{title(i, len(got))} of the exported program {found}".replace("the reference", "that of an eager call")
    outs = [node.meta["val"] for node in program.graph.nodes if str(node.target).startswith(f"{qualname}.")]
    for i, (a, b) in enumerate(zip(as_tuple(outs[0]) if outs else (), subject.value)):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            traced, called = (f"{list(x.shape)} of {x.dtype} on {x.device}" for x in (a, b))
            yield f"{title(i, len(got))} of a trace is {traced}, that of a call {called}"
