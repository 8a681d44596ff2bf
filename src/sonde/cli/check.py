"""Check values and every gradient against the float64 reference, in the same run that is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..operators import Operator

FIXED = {torch.float32: 2e-6, torch.float64: 1e-13}  # relative error in norm
OF_REFERENCE = 1.1  # half precision: the allowed error, as a multiple of the reference's own in that dtype
ROUNDED = 2.5, 3e-3  # the same, and the relative error of float32 results, where terms are rounded to half precision


@dataclass(frozen=True)
class Verdict:
    """Relative errors of the value and of each gradient, with the tolerance for each."""

    errors: dict[str, float]
    tolerances: dict[str, float]

    @property
    def wrong(self) -> dict[str, float]:
        return {k: e for k, e in self.errors.items() if not e <= self.tolerances[k]}  # NaN is wrong

    def __str__(self) -> str:
        return ", ".join(f"{k} is off by {e:.1e} (at most {self.tolerances[k]:.1e})" for k, e in self.wrong.items())


class Truth:
    """The correct results of a case, computed once in float64; each contender is compared with them.

    If a case has more queries than the operator's `checked`, only every n-th is compared: its values, and the gradients of a
    cotangent that is zero for the others.
    """

    def __init__(self, operator: Operator, args: Sequence, cotangent: Tensor, taps: int):
        self.seen = (slice(None),) * (operator.result % cotangent.ndim) + (slice(None, None, every(operator, cotangent)),)
        self.names = [
            name if isinstance(a, Tensor) else f"{name}[{i}]"
            for name, a in zip(operator.arguments, args)
            for i, _ in enumerate(tensors([a]))
        ]
        self.dtype = cotangent.dtype
        exact = dict(zip(operator.arguments, args))
        samples = exact.get(operator.samples)
        if samples is not None and samples.dtype == torch.float32 and self.dtype != torch.float64:
            exact[operator.samples] = _pixel_exact(samples, exact[operator.image], exact.get(operator.align, False))
        with operator.exactly(args):
            self.exact = _definition(operator, list(exact.values()), cotangent, torch.float64, taps)
        self.tolerances = dict.fromkeys(["out", *self.names], FIXED.get(self.dtype, 0.0))
        if self.dtype not in FIXED:
            rounded = _definition(operator, args, cotangent, torch.float32, taps)
            dtypes = [self.dtype, *(a.dtype for a in tensors(args))]
            floor = self._errors(*(x.to(dtype) for x, dtype in zip(rounded, dtypes)))
            times, least = ROUNDED if operator.rounded else (OF_REFERENCE, FIXED[torch.float32])
            self.tolerances = {
                k: max(times * e, least if dtype in FIXED else FIXED[torch.float32]) for (k, e), dtype in zip(floor.items(), dtypes)
            }

    def _errors(self, out: Tensor, *grads: Tensor | None) -> dict[str, float]:
        exact, *others = self.exact
        pairs = zip(["out", *self.names], [out[self.seen], *grads], [exact[self.seen], *others])
        return {k: relative_error(x, y) for k, x, y in pairs}

    def judge(self, function: Callable, args: Sequence, cotangent: Tensor | None) -> Verdict:
        """Compare the value and the gradients; without a cotangent, only the value."""
        out, grads = (function(*args), ()) if cotangent is None else forward_backward(function, args, cotangent)
        return Verdict(self._errors(out, *grads), self.tolerances)


def every(operator: Operator, result: Tensor) -> int:
    """The n for which every n-th query is compared with the truth."""
    Q = result.shape[operator.result]
    return max(1, -(-Q // (operator.checked or Q or 1)))


def relative_error(x: Tensor | None, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖; a gradient that does not exist counts as zero."""
    difference = exact.norm() if x is None else (x.detach().to(exact.dtype) - exact).norm()
    size = exact.norm()
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / size)


def forward_backward(function: Callable, args: Sequence, cotangent: Tensor) -> tuple[Tensor, tuple]:
    """The value, and the gradient of every tensor among the arguments."""
    out = function(*args)
    return out, torch.autograd.grad(out, tensors(args), cotangent, allow_unused=True)


def leaves(args: Sequence) -> list:
    """The same arguments with ``requires_grad``."""
    return mapped(lambda a: a.detach().requires_grad_(), args)


def tensors(args: Sequence) -> list[Tensor]:
    """The tensors among the arguments, those in tuples and lists included."""
    found: list[Tensor] = []
    mapped(found.append, args)
    return found


def mapped(function: Callable[[Tensor], Any], args: Sequence) -> list:
    """The arguments with every tensor replaced, those in tuples and lists included."""

    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        return type(x)(map(one, x)) if type(x) in (tuple, list) else x

    return [one(x) for x in args]


def _pixel_exact(samples: Tensor, images: Tensor, align: bool = False) -> Tensor:
    """float64 coordinates at which the reference lands on the pixel positions that float32 arithmetic gives.

    A coordinate that float32 rounds across a pixel's edge is not the kernel's error, and float64 must not round it back: the last
    lines therefore raise a position that comes out too low by 2⁻⁵⁰, which is far below every tolerance.
    """
    size = torch.tensor(images.shape[: -1 - samples.shape[-1] : -1], device=samples.device)
    if align:
        x = ((samples + 1) / 2 * (size - 1)).double()
        u = torch.where(size > 1, 2 * x / (size - 1) - 1, samples.double())
        return torch.where((u + 1) / 2 * (size - 1) < x, u + 2.0**-50, u)
    x = (((samples + 1) * size - 1) / 2).double()
    u = (2 * x + 1) / size - 1
    return torch.where(((u + 1) * size - 1) / 2 < x, u + 2.0**-50, u)


def _definition(operator: Operator, args: Sequence, cotangent: Tensor, dtype: torch.dtype, taps: int) -> list[Tensor]:
    """Value and gradients by the reference in `dtype`, a slice of the queries at a time; or by the case's own `definition`."""
    definition = getattr(operator.cases, "definition", operator.defined)
    wide = dict(zip(operator.arguments, mapped(lambda a: a.to(dtype) if a.is_floating_point() else a, args)))
    out = torch.zeros_like(cotangent, dtype=dtype, memory_format=torch.contiguous_format)
    grads = [torch.zeros_like(a) for a in tensors([*wide.values()])]
    dims = [operator.queries.get(k) for k, a in wide.items() for _ in tensors([a])]
    along, Q, n = operator.queries, cotangent.shape[operator.result], every(operator, cotangent)
    step = n * max(1, int(_budget(cotangent.device) * Q / max(1, taps * 8 * 24)))  # about 24 temporaries per tap are alive at once
    if not along:  # nothing says how to slice the arguments
        step, n = max(1, Q), 1
    for start in range(0, Q, step):

        def rows(x: Tensor, dim: int | None, start: int = start) -> Tensor:
            return x if dim is None else x[(slice(None),) * (dim % x.ndim) + (slice(start, start + step, n),)]

        part = leaves([x for k, a in wide.items() for x in mapped(partial(rows, dim=along.get(k)), [a])])
        value, found = forward_backward(definition, part, rows(cotangent, operator.result).to(dtype))
        rows(out, operator.result).copy_(value.detach())
        for total, dim, grad in zip(grads, dims, found):
            if grad is not None:
                rows(total, dim).add_(grad)
    return [out, *grads]


def _budget(device: torch.device) -> int:
    """How many bytes one slice may use."""
    if device.type == "cuda":
        return min(4 << 30, torch.cuda.mem_get_info(device)[0] // 4)
    return 512 << 20
