"""How exact a result must be: error bounds against the float64 reference, and equal bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from helpers.memory import redzone
from helpers.operators import Target, cotangents, floats, value_and_grads
from sonde.operators import Operator


def accumulator(args: Sequence) -> torch.dtype:
    return torch.float64 if any(a.dtype == torch.float64 for a in args if isinstance(a, Tensor)) else torch.float32


def exact(operator: Operator, args: Sequence) -> list:
    """float64 arguments for the reference, with pixel positions as the accumulation dtype rounds them.

    Every operation of a position is rounded, so that positions have the same bits in every implementation;
    a coordinate that rounds across a pixel's edge then does not count as an error.
    """
    wide = accumulator(args)
    made = [a.detach().double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    if operator.samples and wide is not torch.float64:
        named, at = dict(zip(operator.arguments, args)), operator.arguments.index(operator.samples)
        coordinates = args[at].detach().to(wide).unbind(-1)
        sizes, align = named[operator.image].shape[:1:-1], named.get(operator.align, False)
        made[at] = torch.stack([_same_position(u, n, align) for u, n in zip(coordinates, sizes)], -1)
    return made


def _same_position(u: Tensor, size: int, align: bool = False) -> Tensor:
    """The float64 coordinate of the pixel position that float32 finds for `u`, in the same cell."""

    def position(u: Tensor) -> Tensor:
        return (u + 1) / 2 * (size - 1) if align else ((u + 1) * size - 1) / 2

    if size - align <= 0:
        return u.double()
    x = position(u).double()
    u = 2 * x / (size - 1) - 1 if align else (2 * x + 1) / size - 1
    for _ in range(64):
        below = position(u).floor() < x.floor()  # false for NaN
        u = torch.where(below, torch.nextafter(u, torch.full_like(u, torch.inf)), u)
    return u


def error(got: Tensor, want: Tensor) -> float:
    return (got.double() - want).norm().item()


def assert_exact(
    what: str, got: Tensor, want: Tensor, lossy: Tensor, slack: float = 0.0, half: float = 1.1, single: float = 2e-6
) -> None:
    """Check `got` against the bound of its dtype; `want` is float64, `lossy` the reference run with the same arguments.

    In half precision `got` may have `half` times the error of the reference, whose terms are not rounded.
    """
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert got.dtype == lossy.dtype, f"{what}: {got.dtype}, expected {lossy.dtype}"
    scale, found, of_reference = want.norm().item(), error(got, want), error(lossy, want)
    bound = {
        torch.float64: 1e-12 * scale,
        torch.float32: single * scale,
    }.get(got.dtype, half * of_reference + 2e-6 * scale)
    bound += slack
    assert found <= bound, (  # also false for NaN
        f"{what}: error {found:.3g} in norm, allowed {bound:.3g} "
        f"(norm {scale:.3g}, the reference in {got.dtype} loses {of_reference:.3g})"
    )


def assert_agrees(
    operator: Operator, target: Target, args: Sequence, note: str = "", given: Sequence | None = None, slack: bool = False
):
    """Check values and all gradients of `args` against the float64 reference; `given` are the same values in another layout.

    `slack` allows for cancellation in results of very few elements.
    """
    lossy, lossy_grads = value_and_grads(operator.reference, args)
    grads = [redzone(g) for g in cotangents(lossy)]
    with operator.exactly(args):
        want, want_grads = value_and_grads(operator.reference, exact(operator, args), grads)
    got, got_grads = value_and_grads(operator.call(target), args if given is None else given, grads)
    names = [*[None] * len(want), *(operator.arguments[i] for i in floats(args))]
    for name, a, b, c in zip(names, [*got, *got_grads], [*want, *want_grads], [*lossy, *lossy_grads], strict=True):
        what = f"gradient of {name}" if name else "value"
        extra = (
            128 * torch.finfo(accumulator(args)).eps * b.numel() ** 0.5 + torch.finfo(a.dtype).eps * b.norm().item()
            if slack or name in operator.summed
            else 0.0
        )
        if operator.lists and args[0].dtype != torch.float64:
            extra += 1.1 * error(c, b) * (a.dtype == torch.float64)  # distances are as exact as coordinates, whatever else is wide
        terms = operator.rounded and args[0].dtype.itemsize == 2  # rounded to half precision, whatever the result is
        assert_exact(f"{note} {what}".strip(), a, b, c, extra, 2.5 if operator.rounded else 1.1, 3e-3 if terms else 2e-6)
    return got, got_grads


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    def bits(t: Tensor) -> Tensor:
        return t.contiguous().flatten().view(torch.uint8)

    return all(x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))
