"""``attention`` on CPUs: torch's flash kernel in the accumulation dtype, and our own blocks where it does not apply."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...jit.steps import Pass
from ...op import torch_private
from ...op.cpu_steps import CpuPass, by_threads
from ...op.dtypes import accumulator
from ...op.plan import Determinism
from .._dense.cpu import is_long
from .._dense.reference import residual_dtype, scale_of
from . import cpu_blocks, cpu_flash


def _flash(q: Tensor, v: Tensor) -> bool:
    """Whether torch's kernel can be used, if the values of q and k allow it (``cpu_flash.applies``)."""
    known = torch_private.flash_attention is not None and torch_private.flash_attention_backward is not None
    T, S, e = q.shape[2], *v.shape[2:]
    exact = not (is_long(S, T, e) or is_long(T, S, e))
    return known and exact and q.shape[3] == v.shape[3] and 0 not in (*q.shape, *v.shape)


@by_threads
def forward_pass(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool) -> Pass:
    p = CpuPass(accumulator(q, k, v), dict(q=q, k=k, v=v))
    flash, factor = _flash(q, v), scale_of(q, scale)
    rows, dtype, wide, e = tuple(q.shape[:3]), q.dtype, p.accumulator, v.shape[3]
    lost = residual_dtype(wide, q, k, v)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, z = (t.detach().to(wide) for t in (q, k, v))
        way = cpu_flash if flash and cpu_flash.applies(x, y, factor) else cpu_blocks
        out, lse = way.attend(x, y, z, causal, factor)
        rounded = out.to(dtype)
        return rounded, lse, out.sub_(rounded).to(lost) if lost else out.new_empty(*rows, 0, dtype=dtype)

    made = [("out", (*rows, e), dtype), ("lse", rows, wide), ("lost", (*rows, e if lost else 0), lost or dtype)]
    scratch = (cpu_flash if flash else cpu_blocks).scratch(q, k, v, wide)
    found = p.call("attention", run, ["q", "k", "v"], made, writes=["out"], scratch=scratch, promise=Determinism.RUN_TO_RUN)
    return p.returns(*found)


@by_threads
def backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool, out: Tensor, lse: Tensor,
    lost: Tensor, *, needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    saved = dict(causal=None, scale=None, tf32=None, out=out, lse=lse, lost=lost)
    p = CpuPass(accumulator(q, k, v), dict(grad=grad, q=q, k=k, v=v, **saved))
    flash, factor, wide = _flash(q, v), scale_of(q, scale), p.accumulator
    wanted = [(name, x.shape, x.dtype) for name, x, need in zip("qkv", (q, k, v), needs) if need]
    names = [name for name, _, _ in wanted]

    def run(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lost: Tensor) -> tuple[Tensor, ...]:
        g, x, y, z, o, level = (t.detach().to(wide) for t in (grad, q, k, v, out, lse))
        o = o + lost.detach().to(wide) if lost.shape[3] else o
        level = level + (level - level)  # NaN if the row's lse is infinite or NaN
        way = cpu_flash if flash and cpu_flash.applies(x, y, factor) else cpu_blocks
        found = way.differentiate(g, x, y, z, o, level, causal, factor, names)
        return tuple(found[name].to(dtype).contiguous() for name, _, dtype in wanted)

    takes, gives = ["grad", "q", "k", "v", "out", "lse", "lost"], [(f"d_{name}", shape, dtype) for name, shape, dtype in wanted]
    scratch = 3 * (cpu_flash if flash else cpu_blocks).scratch(q, k, v, wide)
    made = p.call("attention_gradients", run, takes, gives, writes=names, scratch=scratch, promise=Determinism.RUN_TO_RUN)
    return p.returns(*made)
