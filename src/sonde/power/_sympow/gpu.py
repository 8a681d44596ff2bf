"""Recording launches of symmetric powers; the basis is passed as tables, which are cached on the device."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch, cdiv, power_of_2, vector_of
from ...jit.launch import accumulator as triton_dtype
from ...jit.steps import Pass
from .._dense.gpu import Slab, common_dtype, units
from .._dense.gpu_configs import ALL_REGISTERS, batch_grid
from .._dense.gpu_kernels import TRITON
from . import gpu_configs, gpu_kernels
from .basis import Basis, dimension, tables, tile_count
from .gpu_configs import Config, Problem
from .reference import power_of

FORCE_INT64 = False
NO_STRIDES = (0, 0, 0)


def problem_of(
    x: Slab,
    power: int,
    T: int,
    scaled: bool,
    N: int,
    wide: torch.dtype,
    y: Slab | None = None,
    z: Slab | None = None,
    tf32: bool = False,
) -> Problem:
    """The problem that a launch on these slabs solves."""
    (B, R, d) = x.shape
    slabs = [s for s in (x, y, z) if s is not None]
    common = common_dtype(*(s.dtype for s in slabs))
    strides: Any = [s.strides if s is not None else NO_STRIDES for s in (x, y, z)]
    far = max([s.extent for s in slabs] + [R * N, R * d, dimension(d, power, T) * max(N, 1)]) >= 2**31
    return Problem(
        B, R, N, d, dimension(d, power, T), power, T, scaled, strides[0], strides[1], strides[2],
        units=(*units(x), *units(y), *units(z), vector_of(16, N) if N else 16), common=common, wide=wide,
        precision="tf32" if tf32 and common == torch.float32 else "ieee", far=FORCE_INT64 or far,
    )  # fmt: skip


def basis(p: Pass, n: int, power: int) -> tuple[str, str]:
    """Slots of the tables of a basis."""

    def find(which: int) -> Tensor:
        return tables(n, power, p.device)[which]

    names = f"tiles {power}", f"roots {power}"
    return p.outside(names[0], torch.int32, partial(find, 0)), p.outside(names[1], torch.float64, partial(find, 1))


def parts(value: float) -> tuple[float, float]:
    """Split a number into two float32 parts, which together hold 48 of its bits."""
    high = struct.unpack("f", struct.pack("f", value))[0]
    return high, value - high


def _registers(p: Problem) -> int | None:
    return None if p.common.itemsize == 2 else ALL_REGISTERS


def _far(p: Problem) -> tl.dtype:
    return tl.int64 if p.far else tl.int32


def launch_expand(p: Problem, c: Config) -> Launch:
    about = p.D, p.power, p.T, p.T**p.power, p.scaled, p.paired
    constants = *about, triton_dtype(p.wide), _far(p), p.units, c.block_r, c.block_d
    grid = cdiv(p.R, c.block_r) * cdiv(p.D, c.block_d), 1, 1
    limit = None if p.paired else ALL_REGISTERS
    return Launch(grid, (p.R, *p.x[1:]), constants, c.num_warps, c.num_stages, registers=limit)


def _constants(p: Problem, c: Config) -> tuple:
    return (
        p.d, p.D, p.power, p.T, p.T**p.power, p.scaled, p.paired, triton_dtype(p.wide), TRITON[p.common], p.precision, _far(p),
        p.units, c.block_r, c.block_n, c.block_d,
    )  # fmt: skip


def _numbers(p: Problem) -> tuple:
    alpha, beta = p.factors
    return (p.R, p.N, *p.x, *p.y, *p.z, *parts(alpha), *parts(beta))


def launch_times(p: Problem, c: Config) -> Launch:
    grid = batch_grid(cdiv(p.R, c.block_r) * cdiv(p.N, c.block_n), p.B)
    return Launch(grid, _numbers(p), _constants(p, c), c.num_warps, c.num_stages, registers=_registers(p))


def launch_sums(p: Problem, c: Config) -> Launch:
    grid = batch_grid(cdiv(p.D, c.block_d) * cdiv(p.N, c.block_n), p.B)
    return Launch(grid, _numbers(p), _constants(p, c), c.num_warps, c.num_stages, registers=_registers(p))


def _gradient_numbers(p: Problem) -> tuple:
    return (p.R, p.N, *p.x, *p.y, *p.z, *parts(p.factors[0]))


def launch_gradient(p: Problem, c: Config) -> Launch:
    less, T = p.power - 1, p.T
    constants = (
        p.d, p.straight, tile_count(p.d // T, less) * T**less, p.power, T, T**p.power, T**less, p.scaled, triton_dtype(p.wide),
        TRITON[p.common], p.precision, _far(p), p.units, c.block_r, max(16, c.block_n), c.block_d,
    )  # fmt: skip
    grid = batch_grid(cdiv(p.R, c.block_r) * p.d, p.B)
    return Launch(grid, _gradient_numbers(p), constants, c.num_warps, c.num_stages, registers=_registers(p))


def launch_paired_gradient(p: Problem, c: Config) -> Launch:
    constants = (
        p.d, p.straight, p.T, power_of_2(p.d // p.T), p.scaled, triton_dtype(p.wide), TRITON[p.common], p.precision, _far(p),
        p.units, c.block_r, max(16, c.block_n),
    )  # fmt: skip
    grid = batch_grid(cdiv(p.R, c.block_r), p.B)
    return Launch(grid, _gradient_numbers(p), constants, c.num_warps, c.num_stages, registers=_registers(p))


def fits(p: Problem, c: Config) -> bool:
    """Paired tiles have a size of their own, T·T."""
    return not p.paired or c.block_d == p.T * p.T


def _phi(p: Problem, x: Tensor) -> Tensor:
    wide = torch.float64 if p.common.itemsize >= 4 else torch.float32
    return power_of(x.to(wide), p.power, p.T, p.scaled)


def expected_times(
    p: Problem, x: Tensor, y: Tensor, z: Tensor | None, tiles: Tensor, roots: Tensor, out: Tensor
) -> dict[int, Tensor]:
    """For the search: in plain PyTorch."""
    phi = _phi(p, x.as_strided((p.B, p.R, p.d), p.x))
    left = phi if out.shape[1] == p.R else phi.mT
    y = y.as_strided((p.B, left.shape[2], p.N), p.y)
    found = p.factors[0] * (left @ y.to(phi.dtype))
    if z is not None:
        found = found + p.factors[1] * z.as_strided(out.shape, p.z)
    return {5: found.to(out.dtype)}


def expected_expand(p: Problem, x: Tensor, tiles: Tensor, roots: Tensor, out: Tensor) -> dict[int, Tensor]:
    return {3: _phi(p, x.as_strided((p.R, p.d), p.x[1:])).to(out.dtype)}


def _gradient_of(p: Problem, x: Tensor, y: Tensor, z: Tensor | None, out: Tensor) -> Tensor:
    """For the search: ∂x in plain PyTorch, one matrix of the batch at a time."""
    wide = torch.float64 if p.common.itemsize >= 4 else torch.float32
    basis = Basis(p.d, p.power, p.T, p.scaled, x.device)
    x = x.as_strided((p.B, p.R, p.d), p.x).to(wide)
    y = y.as_strided((p.B, p.R, p.N if z is not None else p.D), p.y).to(wide)
    found = torch.empty_like(x)
    for b in range(p.B):
        phi = y[b] if z is None else y[b] @ z.as_strided((p.B, p.D, p.N), p.z)[b].to(wide).mT
        found[b] = p.factors[0] * basis.gradient(phi, x[b])
    return (found if p.straight else found.mT).to(out.dtype).reshape(out.shape)


def expected_gradient(
    p: Problem, x: Tensor, y: Tensor, z: Tensor | None, others: Tensor, roots: Tensor, out: Tensor
) -> dict[int, Tensor]:
    return {5: _gradient_of(p, x, y, z, out)}


def expected_paired_gradient(p: Problem, x: Tensor, y: Tensor, z: Tensor | None, out: Tensor) -> dict[int, Tensor]:
    return {3: _gradient_of(p, x, y, z, out)}


BATCH = ("B", "x", "y", "z", "factors")
expand = jit.kernel(
    gpu_kernels._expand, "power.expand", default=gpu_configs.expand_config, candidates=gpu_configs.expand_candidates,
    launch=launch_expand, sizes=("R",), batch=BATCH, writes=(3,), fits=fits, expected=expected_expand, tolerance=1e-2,
)  # fmt: skip
times = jit.kernel(
    gpu_kernels._times, "power.times", default=gpu_configs.times_config, candidates=gpu_configs.times_candidates,
    launch=launch_times, sizes=("R", "N"), batch=BATCH, writes=(5,), fits=fits, expected=expected_times, tolerance=1e-2,
)  # fmt: skip
sums = jit.kernel(
    gpu_kernels._sums, "power.sums", default=gpu_configs.sums_config, candidates=gpu_configs.sums_candidates,
    launch=launch_sums, sizes=("R", "N"), batch=BATCH, writes=(5,), fits=fits, expected=expected_times, tolerance=1e-2,
)  # fmt: skip
gradient = jit.kernel(
    gpu_kernels._gradient, "power.gradient", default=gpu_configs.gradient_config, candidates=gpu_configs.gradient_candidates,
    launch=launch_gradient, sizes=("R", "N"), batch=BATCH, writes=(5,), expected=expected_gradient, tolerance=1e-2,
)  # fmt: skip
paired_gradient = jit.kernel(
    gpu_kernels._paired_gradient, "power.paired_gradient", default=gpu_configs.paired_gradient_config,
    candidates=gpu_configs.paired_gradient_candidates, launch=launch_paired_gradient, sizes=("R", "N"), batch=BATCH, writes=(3,),
    fits=fits, expected=expected_paired_gradient, tolerance=1e-2,
)  # fmt: skip


def record_product(
    p: Pass, x: Slab, y: Slab, z: Slab | None, problem: Problem, expands: str, out: str, dtype: torch.dtype, writes: str
) -> str:
    """Record φ(x) @ y if `expands` is "k", φ(x)ᵀ @ y if it is "m"; returns the slot of the result, which is contiguous."""
    rows = problem.R if expands == "k" else problem.D
    made = p.buffer(out, (problem.B, rows, problem.N), dtype)
    takes = [x.slot, y.slot, None if z is None else z.slot, *basis(p, problem.d // problem.T, problem.power), made]
    p.launch(times if expands == "k" else sums, problem, takes, writes=[writes])
    return made


def record_gradient(p: Pass, x: Slab, y: Slab, z: Slab | None, problem: Problem, out: str, like: Tensor, writes: str) -> str:
    """Record ∂x, where ∂φ is `y` or the product of the rows of `y` and `z`; returns its contiguous slot, shaped like `like`."""
    made = p.buffer(out, tuple(like.shape), like.dtype)
    if problem.paired and problem.d // problem.T <= 32:
        p.launch(paired_gradient, problem, [x.slot, y.slot, None if z is None else z.slot, made], writes=[writes])
    else:
        n = problem.d // problem.T
        takes = [
            x.slot,
            y.slot,
            None if z is None else z.slot,
            basis(p, n, problem.power - 1)[0],
            basis(p, n, problem.power)[1],
            made,
        ]
        p.launch(gradient, problem, takes, writes=[writes])
    return made
