"""Checks of results: values, gradients, bits; also with other strides, empty inputs and other dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .compare import difference, layout, same_bits, strides
from .memory import LAYOUTS, restride
from .subject import Subject


class NotApplicable(Exception):
    """A check does not apply; the message says why."""


def title(i: int, count: int) -> str:
    return "the result" if count == 1 else f"result {i}"


def compared(subject: Subject, got: Sequence[Tensor], want: Sequence[Tensor], note: str = "") -> Iterator[str]:
    """Compare two lists of results; `want` may be the reference's, in another precision."""
    for i, (a, b) in enumerate(zip(got, want)):
        found = difference(a, b, subject.tolerance)
        if found:
            yield f"{note}{title(i, len(got))} {found}"


def values(subject: Subject) -> Iterator[str]:
    """Values, shapes, dtypes, devices and strides agree with the reference's."""
    got, want, exact = subject.value, subject.want, subject.exact
    if len(got) != len(want):
        yield f"it returns {len(got)} results, the reference {len(want)}"
        return
    for i, (a, b) in enumerate(zip(got, want)):
        differs = layout(a, b)
        if differs is None:
            truth, allowance = b, 0.0
            if exact is not None and a.is_floating_point() and exact[i].is_floating_point():
                own = (b.double() - exact[i].double()).nan_to_num(0, 0, 0).norm().item()
                truth, allowance = torch.where(b.isfinite(), exact[i].to(torch.float64), b.double()), 2 * own
            differs = difference(a, truth, subject.tolerance, allowance) or strides(a, b)
        if differs:
            yield f"{title(i, len(got))} {differs}"


def gradients(subject: Subject) -> Iterator[str]:
    """Gradients of all arguments, together and alone, for several memory layouts of the results' gradients."""
    names = subject.differentiable
    if not names or not subject.graded:
        raise NotApplicable("nothing is differentiable")
    got, want, exact = subject.gradient, subject.wanted_gradient, subject.exact_gradient
    problems = list(_against_reference(subject, got, want, exact))
    yield from problems
    if problems:
        return  # the rest would report the same again
    mine = [g.clone() for g in subject.cotangents]
    subject.gradients(cotangents=mine)
    if not same_bits(mine, subject.cotangents):
        yield "the backward pass writes into the gradients of results that it is given"
        return
    for name in names if len(names) > 1 else ():
        alone = subject.gradients([name])
        yield from _same(subject, alone, {name: got[name]}, f"asked for alone, the gradient of {name}")
    for note, cotangents in _cotangents(subject):
        again = [g.contiguous().clone() for g in cotangents]
        pairs = subject.gradients(cotangents=cotangents), subject.gradients(cotangents=again)
        yield from _same(subject, *pairs, f"for {note} gradients of results, the gradient of {{}}")


def _against_reference(
    subject: Subject, got: dict[str, Tensor | None], want: dict[str, Tensor | None], exact: dict[str, Tensor | None] | None
) -> Iterator[str]:
    for name, b in want.items():
        a = got[name]
        if b is None or not bool((b != 0).any()):
            if a is not None and bool((a != 0).any()):
                yield f"the gradient of {name} is not zero, that of the reference is"
            continue
        if a is None or not bool((a != 0).any()):
            yield f"the gradient of {name} is forgotten: it is zero, that of the reference is not"
            continue
        differs = layout(a, b)
        if differs is None:
            truth, allowance = b, 0.0
            wide = exact[name] if exact is not None else None
            if wide is not None:
                truth, allowance = wide, 2 * (b.double() - wide).nan_to_num(0, 0, 0).norm().item()
            differs = difference(a, truth, subject.tolerance, allowance)
            if differs:
                others = [k for k, x in want.items() if k != name and x is not None and x.shape == a.shape]
                mixed = [k for k in others if difference(a, want[k], subject.tolerance) is None]  # type: ignore[arg-type]
                if mixed:
                    differs = f"is that of {mixed[0]}: they are mixed up"
                elif difference(-a, b, subject.tolerance) is None:
                    differs = "has the opposite sign"
        if differs:
            yield f"the gradient of {name} {differs}"


def _same(subject: Subject, got: dict[str, Tensor | None], want: dict[str, Tensor | None], what: str) -> Iterator[str]:
    for name, b in want.items():
        a = got[name]
        if a is None or b is None:
            if a is not b:
                yield f"{what.format(name)} is {'forgotten' if a is None else 'returned, and otherwise none is'}"
            continue
        found = layout(a, b) or difference(a, b, subject.tolerance)
        if found:
            yield f"{what.format(name)} is another: it {found}".replace("the reference", "the usual one")


def _cotangents(subject: Subject) -> Iterator[tuple[str, list[Tensor]]]:
    yield "expanded", [torch.ones((), dtype=g.dtype, device=g.device).expand(g.shape) for g in subject.cotangents]
    yield "transposed", [restride(g, "reversed") for g in subject.cotangents]


def determinism(subject: Subject) -> Iterator[str]:
    """The same bits in every run, if that is promised."""
    if not subject.deterministic:
        raise NotApplicable("it does not say that it is deterministic")
    torch.use_deterministic_algorithms(True)

    def once() -> list[Tensor]:
        with torch.no_grad():
            out = list(subject.run())
        found = subject.gradients() if subject.differentiable and subject.graded else {}
        return [*out, *(g for g in found.values() if g is not None)]

    first = once()
    count = len(subject.value)
    for _ in range(4):
        for i, (a, b) in enumerate(zip(once(), first, strict=True)):
            if not same_bits([a], [b]):
                what = title(i, count) if i < count else f"gradient {i - count}"
                yield f"it says that it is deterministic, but {what} has other bits in another run"
                return


def strided(subject: Subject) -> Iterator[str]:
    """The same results for other memory layouts of the arguments."""
    for name, x in subject.tensors.items():
        for how in LAYOUTS[1:]:
            laid = restride(x, how)
            if laid.stride() == x.stride() and how != "misaligned":
                continue
            usual = {name: laid.clone(memory_format=torch.contiguous_format)}
            with torch.no_grad():
                got, want = subject.run(subject.using({name: laid})), subject.run(subject.using(usual))
                reference = subject.reference(subject.using({name: laid}))
            note = f"with {name} {how.replace('_', ' ')} in memory, "
            found = list(compared(subject, got, want, note))
            for i, (a, b) in enumerate(zip(got, reference)):
                other = layout(a, b) or strides(a, b)
                found += [f"{note}{title(i, len(got))} {other}"] if other else []
            yield from (each.replace("from the reference by", "from that of a contiguous one by") for each in found)
            if found or not subject.differentiable or not subject.graded:
                continue
            pairs = subject.gradients(tensors={name: laid}), subject.gradients(tensors=usual)
            yield from _same(subject, *pairs, f"{note}the gradient of {{}}")


def empty_inputs(subject: Subject) -> Iterator[str]:
    """Set one size after the other to 0, in all tensors that have it, if the reference allows it."""
    sizes = {n for x in subject.tensors.values() for n in x.shape if n}
    tried = 0
    for n in sorted(sizes):
        none = {name: _without(x, n) for name, x in subject.tensors.items() if n in x.shape}
        args = subject.using(none)
        try:
            want = subject.reference(args)
            wanted = subject.gradients(impl="reference", tensors=none, cotangents=[_like(want[i]) for i in subject.graded])
        except Exception:  # the reference does not allow it
            continue
        tried += 1
        note = f"with no elements where there were {n}, "
        try:
            got = subject.run(args)
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                found = layout(a, b) or difference(a, b, subject.tolerance)
                if found:
                    yield f"{note}{title(i, len(got))} {found}"
            if subject.differentiable and subject.graded:
                grads = subject.gradients(tensors=none, cotangents=[_like(got[i]) for i in subject.graded])
                for name, grad in grads.items():
                    other = wanted[name]
                    found = layout(grad, other) or difference(grad, other) if grad is not None and other is not None else None
                    if found:
                        yield f"{note}the gradient of {name} {found}"
        except Exception as problem:
            yield f"{note}it raises {type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
    if not tried:
        raise NotApplicable("the reference does not take empty tensors")


def _without(x: Tensor, n: int) -> Tensor:
    return x.new_zeros([0 if size == n else size for size in x.shape])


def _like(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def autocast(subject: Subject) -> Iterator[str]:
    """Results are the same under autocast, and right for the mix of dtypes that autocast may pass."""
    kind = subject.device.type
    with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16):
        got = subject.run()
    for i, (a, b) in enumerate(zip(got, subject.value)):
        found = layout(a, b) or difference(a, b, subject.tolerance)
        if found:
            yield f"under autocast {title(i, len(got))} {found}".replace("the reference", "otherwise")
    for name in [k for k, x in subject.tensors.items() if x.dtype is torch.float32][:1]:
        half = {name: subject.tensors[name].bfloat16()}
        args, wide = subject.using(half), subject.using({name: half[name].float()})
        try:
            with torch.no_grad():
                want, exact = subject.reference(args), subject.reference(wide)
        except Exception:  # the reference takes only one dtype
            continue
        with torch.no_grad():
            got = subject.run(args)
        for i, (a, b, c) in enumerate(zip(got, want, exact)):
            found = layout(a, b)
            if found is None and a.is_floating_point() and b.shape == c.shape:
                own = (b.double() - c.double()).nan_to_num(0, 0, 0).norm().item()
                rounding = torch.finfo(a.dtype).eps * c.double().nan_to_num(0, 0, 0).norm().item()
                found = difference(a, torch.where(b.isfinite(), c.double(), b.double()), subject.tolerance, 2 * own + rounding)
            if found:
                yield f"with {name} in bfloat16, as under autocast, {title(i, len(got))} {found}"
