"""Triton implementation of ``attention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch, cdiv, has_descriptors, is_hopper, power_of_2, vector_of
from ...jit.launch import accumulator as triton_dtype
from ...jit.steps import Pass
from ...op.dtypes import accumulator
from .._dense.gpu import common_dtype, is_aligned, operand
from .._dense.gpu_configs import batch_grid, registers
from .._dense.gpu_kernels import TRITON
from .._dense.reference import residual_dtype, scale_of
from .._sympow.gpu import parts
from . import gpu_configs, gpu_kernels
from .gpu_configs import Config, Problem, Strides

FORCE_INT64 = False
SMALLEST = 2.0**-120  # the least |scale| of logits: with 0, the −∞ of a masked key would become NaN


def rows_of(p: Pass, name: str) -> tuple[str, Strides, int]:
    """A slot with the argument's values and contiguous rows (a copy if needed), its strides, and their extent."""
    slot, t = operand(p, name)
    strides = t.stride(0), t.stride(1), t.stride(2)
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        slot, shape = p.copy(name, Tensor.contiguous), t.shape
        strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3])
    return slot, strides, t.shape[2] * abs(strides[2])


def problem_of(p: Pass, names: Sequence[str], causal: bool, scale: float | None, tf32: bool) -> tuple[Problem, dict[str, str]]:
    """The problem that a launch on these arguments solves, and the arguments' slots."""
    q, k, v = (cast(Tensor, p.given[name]) for name in ("q", "k", "v"))
    found = {name: rows_of(p, name) for name in names}
    nothing = ("", (0, 0, 0), 0)
    strides: Any = [found.get(name, nothing)[1] for name in ("q", "k", "v", "out", "grad")]
    slabs = [p.given.get(slot) for name, (slot, _, _) in found.items() if name in "qkv"]
    described = all(t is not None and is_described(t) for t in slabs) and has_descriptors(p.device)
    common = common_dtype(*(p.slots[slot].dtype for name, (slot, _, _) in found.items() if name != "out"))
    problem = Problem(
        q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], causal,
        strides[0], strides[1], strides[2], strides[3], strides[4],
        units=tuple(vector_of(16, *s) for s in strides), common=common, wide=p.accumulator,
        precision="tf32" if tf32 and common == torch.float32 else "ieee",
        far=FORCE_INT64 or max(extent for _, _, extent in found.values()) >= 2**31, scale=scale_of(q, scale), described=described,
        hopper=is_hopper(p.device),
    )  # fmt: skip
    return problem, {name: slot for name, (slot, _, _) in found.items()}


def is_described(t: Tensor) -> bool:
    """Whether a descriptor can describe it: half precision, rows of 2ⁿ elements, other strides multiples of 16 bytes."""
    near = t.dtype.itemsize == 2 and t.stride(-1) == 1 and power_of_2(max(16, t.shape[-1])) == t.shape[-1] and is_aligned(t)
    return near and 0 not in t.shape and all(s > 0 and s % 8 == 0 for s in t.stride()[:3])


def forward_pass(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool) -> Pass:
    p = Pass(q.device, accumulator(q, k, v), dict(q=q, k=k, v=v))
    problem, slots = problem_of(p, ("q", "k", "v"), causal, scale, tf32)
    rows = q.shape[:3]
    out, lse = p.buffer("out", (*rows, v.shape[3]), q.dtype), p.buffer("lse", rows, p.accumulator)
    dtype = residual_dtype(accumulator(q, k, v), q, k, v)
    lost = p.buffer("lost", (*rows, v.shape[3] if dtype else 0), dtype or q.dtype)
    p.launch(attend, problem, [slots["q"], slots["k"], slots["v"], out, lse, lost if dtype else None], writes=["out"])
    return p.returns(out, lse, lost)


def backward_pass(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, tf32: bool, out: Tensor, lse: Tensor,
    lost: Tensor, *, needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    p = Pass(
        q.device,
        accumulator(q, k, v),
        dict(grad=grad, q=q, k=k, v=v, causal=None, scale=None, tf32=None, out=out, lse=lse, lost=lost),
    )
    problem, slots = problem_of(p, ("q", "k", "v", "out", "grad"), causal, scale, tf32)
    saved = p.contiguous("lse")
    dot = None
    if needs[0] or needs[1]:
        dot = p.buffer("dots", q.shape[:3], p.accumulator)
        p.launch(dots, problem, [slots["out"], p.contiguous("lost") if lost.shape[3] else None, slots["grad"], dot])
    given = [slots["q"], slots["k"], slots["v"], slots["grad"], saved, dot]
    found = {name: p.buffer(f"d_{name}", t.shape, t.dtype) for name, t, n in zip("qkv", (q, k, v), needs) if n}
    if needs[0]:
        p.launch(query_gradients, problem, [*given, found["q"]], writes=["q"])
    if needs[1] or needs[2]:
        p.launch(key_gradients, problem, [*given, found.get("k"), found.get("v")], writes=[n for n in "kv" if n in found])
    return p.returns(*found.values())


def _heads(p: Problem) -> tuple[int, ...]:
    """One list for all kernels, though `_dots` does not read the number of keys."""
    return p.h, p.groups, p.T, p.S


def _constants(p: Problem) -> tuple:
    blocks = power_of_2(max(16, p.d)), power_of_2(max(16, p.e))
    offset = tl.int64 if p.far else tl.int32
    return p.d, p.e, *blocks, p.causal, triton_dtype(p.wide), TRITON[p.common], p.precision, offset, p.units


def launch_attend(p: Problem, c: Config) -> Launch:
    grid = batch_grid(cdiv(p.T, c.block_m), p.B * p.h * p.groups)
    sizes = (*_heads(p), *p.q, *p.k, *p.v, *parts(max(abs(p.scale), SMALLEST)))
    first, rest = _constants(p)[:5], _constants(p)[5:]
    constants = (*first, p.scale < 0, c.described, *rest, c.block_m, c.block_n)
    m, n = (1, 1, c.block_m, p.d), (1, 1, c.block_n)
    described = ((0, m), (1, (*n, p.d)), (2, (*n, p.e))) if c.described else ()
    return Launch(grid, sizes, constants, c.num_warps, c.num_stages, registers=registers(p.half, p.hopper), descriptors=described)


def launch_dots(p: Problem, c: Config) -> Launch:
    constants = p.e, power_of_2(max(16, p.e)), triton_dtype(p.wide), tl.int64 if p.far else tl.int32, p.units, c.block_m
    grid = batch_grid(cdiv(p.T, c.block_m), p.B * p.h * p.groups)
    return Launch(grid, (*_heads(p), *p.out, *p.grad), constants, c.num_warps, registers=registers(p.half, p.hopper))


def launch_query_gradients(p: Problem, c: Config) -> Launch:
    sizes = (*_heads(p), *p.q, *p.k, *p.v, *p.grad, *parts(p.scale))
    grid = batch_grid(cdiv(p.T, c.block_m), p.B * p.h * p.groups)
    constants = (*_constants(p), c.block_m, c.block_n)
    return Launch(grid, sizes, constants, c.num_warps, c.num_stages, registers=registers(p.half, p.hopper))


def launch_key_gradients(p: Problem, c: Config) -> Launch:
    return launch_query_gradients(p, c)._replace(grid=batch_grid(cdiv(p.S, c.block_n), p.B * p.h))


def fits(p: Problem, c: Config) -> bool:
    """Whether the matrix units accept tiles of these sizes."""
    return min(c.block_m, c.block_n) >= 16 and (p.described or not c.described)


def _truth(p: Problem, *tensors: Tensor) -> list[Tensor]:
    """Arguments as the kernel sees them, in a wider dtype; k and v have h heads, q and the gradient h · groups."""
    shapes = [(p.B, p.h * p.groups, p.T, p.d), (p.B, p.h, p.S, p.d), (p.B, p.h, p.S, p.e), (p.B, p.h * p.groups, p.T, p.e)]
    wide = torch.float32 if p.half else torch.float64
    return [t.as_strided(shape, (*s, 1)).to(wide) for t, shape, s in zip(tensors, shapes, (p.q, p.k, p.v, p.grad))]


def expected(p: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *others: Tensor | None) -> dict[int, Tensor]:
    """For the search: by torch."""
    x, y, z = _truth(p, q, k, v)
    found = torch.nn.functional.scaled_dot_product_attention(x, y, z, is_causal=p.causal, scale=p.scale, enable_gqa=p.groups > 1)
    return {3: found.to(out.dtype)}


def expected_gradients(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lse: Tensor, dots: Tensor | None, *made: Tensor | None
) -> dict[int, Tensor]:
    """For the search: the gradients that are needed, by torch."""
    x, y, z, g = _truth(p, q, k, v, grad)
    with torch.enable_grad():
        inputs = [t.requires_grad_() for t in (x, y, z)]
        out = torch.nn.functional.scaled_dot_product_attention(x, y, z, is_causal=p.causal, scale=p.scale, enable_gqa=p.groups > 1)
        found = torch.autograd.grad(out, inputs, g)
    found = found[:1] if len(made) == 1 else found[1:]
    return {6 + i: x.to(m.dtype) for i, (x, m) in enumerate(zip(found, made)) if m is not None}


SIZES, BATCH = ("T", "S"), ("B", "q", "k", "v", "out", "grad", "scale")
attend = jit.kernel(
    gpu_kernels._attend, "power.attend", default=gpu_configs.forward_config, candidates=gpu_configs.forward_candidates,
    launch=launch_attend, sizes=SIZES, batch=BATCH, writes=(3, 4, 5), fits=fits, expected=expected, tolerance=1e-2,
)  # fmt: skip
dots = jit.kernel(
    gpu_kernels._dots,
    "power.dots",
    default=lambda p: Config(32, 0, 4, 1),
    launch=launch_dots,
    sizes=SIZES,
    batch=BATCH,
    writes=(3,),
)
query_gradients = jit.kernel(
    gpu_kernels._query_gradients, "power.query_gradients", default=gpu_configs.query_config,
    candidates=gpu_configs.query_candidates, launch=launch_query_gradients, sizes=SIZES, batch=BATCH, writes=(6,), fits=fits,
    expected=expected_gradients, tolerance=2e-2,
)  # fmt: skip
key_gradients = jit.kernel(
    gpu_kernels._key_gradients, "power.key_gradients", default=gpu_configs.key_config,
    candidates=gpu_configs.key_candidates, launch=launch_key_gradients, sizes=SIZES, batch=BATCH, writes=(6, 7), fits=fits,
    expected=expected_gradients, tolerance=2e-2,
)  # fmt: skip
