"""Recording products: operands are slots with strides, and we work out what the compiler may assume about their memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...jit.launch import has_descriptors, interpreting, is_hopper, vector_of
from ...jit.steps import Pass
from .gpu_configs import Problem
from .gpu_kernels import product as kernel

FORCE_INT64 = False


class Slab(NamedTuple):
    """A batch of matrices in a slot."""

    slot: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool  # to 16 bytes

    @property
    def T(self) -> Slab:
        return self._replace(
            shape=(*self.shape[:-2], self.shape[-1], self.shape[-2]),
            strides=(*self.strides[:-2], self.strides[-1], self.strides[-2]),
        )

    @property
    def turned(self) -> bool:
        """Whether columns are contiguous and rows are not."""
        return self.strides[-2] == 1 and self.strides[-1] != 1

    @property
    def extent(self) -> int:
        """The largest offset within one matrix, in elements."""
        return sum((n - 1) * abs(s) for n, s in zip(self.shape[1:], self.strides[1:]))


def slab(p: Pass, name: str) -> Slab:
    """An argument of the pass."""
    slot, t = operand(p, name)
    return Slab(slot, tuple(t.shape), tuple(t.stride()), t.dtype, is_aligned(t))


def operand(p: Pass, name: str) -> tuple[str, Tensor]:
    """An argument's slot, and a tensor like it. Triton does not multiply half precision by float64, so that is converted first."""
    t = p.given[name]
    assert t is not None
    if p.accumulator != torch.float64 or t.dtype.itemsize > 2:
        return name, t
    slot = f"{name} in float64"
    if slot not in p.slots:
        p.call("copy_", lambda t: t.contiguous().double(), [name], [(slot, t.shape, torch.float64)], scratch=t.nbytes)
    return slot, torch.empty(t.shape, dtype=torch.float64, device="meta")


def is_aligned(t: Tensor) -> bool:
    return type(t) not in (Tensor, torch.nn.Parameter) or t.data_ptr() % 16 == 0  # tensor subclasses (fake tensors) have no memory


def common_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which tiles are multiplied: the one that holds all operands. The interpreter cannot multiply bfloat16."""
    found = dtypes[0]
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return torch.float32 if found == torch.bfloat16 and interpreting() else found


def units(x: Slab | None) -> tuple[int, int]:
    """For rows and columns, the largest power of two up to 16 that divides their stride and the batch's; 0 for a stride of 1."""
    if x is None:
        return 16, 16
    batch = x.strides[0] if x.shape[0] > 1 else 0
    row, column = (0 if stride == 1 else vector_of(16, stride, batch) for stride in x.strides[1:])
    return row, column


def product(p: Pass, a: Slab, b: Slab, out: str, dtype: torch.dtype, tf32: bool, writes: str) -> str:
    """Record ``a @ b``; returns the slot of the result, which is contiguous."""
    (B, M, K), N = a.shape, b.shape[-1]
    made = p.buffer(out, (B, M, N), dtype)
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    common = common_dtype(a.dtype, b.dtype)
    described = common.itemsize == 2 and dtype == a.dtype == b.dtype and B == 1 and 0 not in (M, N, K)
    described = described and N % 8 == 0 and described_in_memory(a) and described_in_memory(b) and has_descriptors(p.device)
    problem = Problem(
        B, M, N, K, a.strides, b.strides,  # type: ignore[arg-type]
        (*units(a), *units(b), *(vector_of(16, n) for n in (M, N, K))),
        common, wide, "tf32" if tf32 and common == torch.float32 else "ieee",
        FORCE_INT64 or max(a.extent, b.extent, M * N) >= 2**31, (a.turned, b.turned), described,
        is_hopper(p.device),
    )  # fmt: skip
    takes = [a.slot, b.slot, made]
    if described:
        takes = [matrix(p, a.slot), matrix(p, b.slot), p.view(made, made, lambda t: t[0])]
    p.launch(kernel, problem, takes, writes=[writes])
    return made


def described_in_memory(x: Slab) -> bool:
    """Whether a descriptor can describe the matrix: one stride is 1, the other a multiple of 16 bytes."""
    near, far = (x.strides[-2:]) if x.turned else x.strides[:-3:-1]
    return x.aligned and near == 1 and far % 8 == 0 and far > 0


def matrix(p: Pass, slot: str) -> str:
    """The only matrix of a batch, as it lies in memory: transposed if its columns are contiguous."""
    return p.view(slot, slot, lambda t: t[0] if t.stride(-1) == 1 else t[0].mT)
