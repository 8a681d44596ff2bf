"""Try configurations on one problem: does each compute what the reference does, and how fast is it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .process import describe
from .timing import time_us

ALIGNMENT = 512  # bytes, as torch's CUDA allocator aligns


class Bench:
    """A problem, tensors that it owns, and the expected results."""

    def __init__(self, kernel: Any, problem: Any, tensors: Sequence[Tensor | None]) -> None:
        self.kernel, self.problem, self.tensors = kernel, problem, tensors
        self.device = next(t.device for t in tensors if t is not None)
        self.expected = kernel.expected(problem, *tensors)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the reference needs far more than any candidate

    def trial(self, config: Any, best_us: float | None) -> tuple[tuple[float, ...], str | None, float | None, bool]:
        """Times, cause of failure, error, and whether this process is still usable."""
        try:
            return *self._try(config, best_us), True
        except Exception as error:
            return (), describe(error), None, self._is_healthy()

    def _try(self, config: Any, best_us: float | None) -> tuple[tuple[float, ...], str | None, float]:
        def run() -> None:
            self.kernel.run(self.problem, config, self.tensors)

        for position in self.kernel.writes:
            _poison(self.tensors[position])
        self._zero()
        run()
        error, allowed = self._error()
        times: tuple[float, ...] = ()
        if error <= allowed:
            times = time_us(run, self.device, best_us, before=self._zero if self.kernel.adds else None)
            error, allowed = self._error()  # again: a race may show only in some runs
        if error <= allowed:
            return times, None, error
        return (), f"disagrees with the reference: relative error {error:.3g}, allowed is {allowed:.3g}", error

    def _zero(self) -> None:
        for position in self.kernel.adds:
            tensor = self.tensors[position]
            if tensor is not None:
                tensor.zero_()

    def _error(self) -> tuple[float, float]:
        """Error of the worst result and the error it may have, which is at least twice its dtype's epsilon."""
        found = []
        for position, want in self.expected.items():
            got = self.tensors[position]
            if got is not None:
                smallest = 2 * torch.finfo(got.dtype).eps if got.is_floating_point() else 0.0
                found.append((relative_error(got, want), max(self.kernel.tolerance, smallest)))
        unequal = [(e, allowed) for e, allowed in found if e != e]  # NaN counts as worst
        return max(unequal or found, key=lambda pair: pair[0] / pair[1], default=(0.0, self.kernel.tolerance))

    def _is_healthy(self) -> bool:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception:  # after an illegal access, every CUDA call of this process fails
            return False
        return True


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖, where equal infinities and NaNs differ by nothing."""
    if not (got.is_floating_point() or got.is_complex()):
        got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    apart = torch.linalg.vector_norm(torch.where(same, 0, got - want), dtype=torch.float64)
    size = torch.linalg.vector_norm(torch.where(want.isfinite(), want, 0), dtype=torch.float64)
    return float(apart / size) if size > 0 else float(apart)


class Layout(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    address: int  # modulo ALIGNMENT

    @classmethod
    def of(cls, t: Tensor) -> Layout:
        return cls(t.dtype, tuple(t.shape), t.stride(), t.data_ptr() % ALIGNMENT)

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride)) if all(self.size) else 0


def spans(tensors: Sequence[Tensor | None], writes: Sequence[int]) -> list[Tensor | None]:
    """The part of its storage that each input covers; None for outputs, whose values do not matter."""
    inputs = [None if i in writes else t for i, t in enumerate(tensors)]
    return [None if t is None else t.detach().as_strided((Layout.of(t).span,), (1,)) for t in inputs]


def copies(layouts: Sequence[Layout | None], spans: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """New tensors with the same strides and alignment."""
    found: list[Tensor | None] = []
    for layout, span in zip(layouts, spans):
        if layout is None:
            found.append(None)
            continue
        buffer = torch.empty(layout.span + ALIGNMENT // layout.dtype.itemsize, dtype=layout.dtype, device=device)
        offset = (layout.address - buffer.data_ptr()) % ALIGNMENT // layout.dtype.itemsize
        if span is not None:
            buffer[offset : offset + layout.span].copy_(span)
        else:
            _poison(buffer)
        found.append(buffer.as_strided(layout.size, layout.stride, offset))
    return found


def _poison(t: Tensor | None) -> None:
    if t is None:
        return
    if t.is_floating_point() or t.is_complex():
        t.fill_(torch.nan)
    else:
        t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max)
