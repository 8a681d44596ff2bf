"""The product's kernel: one function that reads its tiles by pointers or through descriptors."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import jit
from ...jit.launch import Launch
from ...jit.launch import accumulator as triton_dtype
from .._device.product import add_described_products, add_products
from .._device.tiles import batch_program, grouped, multiple, places, step
from .gpu_configs import Config, Problem, candidate_configs, default_config, fits, launch_product


@triton.jit(do_not_specialize=["M", "N", "K", "a_batch", "a_row", "a_column", "b_batch", "b_row", "b_column"])
def _product(
    a,  # [B, M, K], any strides; or a descriptor of its only matrix
    b,  # [B, K, N], any strides; or a descriptor
    out,  # [B, M, N], contiguous; or a descriptor
    M,
    N,
    K,
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    ACC: tl.constexpr,
    COMMON: tl.constexpr,
    PRECISION: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,  # divisors of strides and sizes: see Problem.units
    EVEN: tl.constexpr,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    if DESCRIBED:  # as many programs as the device runs at once, each computing one tile after another
        rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
        for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
            i, j = grouped(tile, rows, columns, GROUP)
            total = tl.zeros([BM, BN], ACC)
            total = add_described_products(total, a, b, i * BM, j * BN, K, A_TURNED, B_TURNED, PRECISION, BK)
            out.store([i * BM, j * BN], total.to(out.dtype))
    else:
        M, N, K = multiple(M, UNITS[4]), multiple(N, UNITS[5]), multiple(K, UNITS[6])
        i, j = grouped(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
        batch = batch_program()
        m, n, k = places(i * BM, BM, OFFSET), places(j * BN, BN, OFFSET), places(0, BK, OFFSET)
        a_step, b_step = step(a_column, UNITS[1], OFFSET), step(b_row, UNITS[2], OFFSET)
        a_tile = a + batch * multiple(a_batch, max(UNITS[0], UNITS[1])) + (m[:, None] * step(a_row, UNITS[0]) + k[None, :] * a_step)
        b_tile = (
            b + batch * multiple(b_batch, max(UNITS[2], UNITS[3])) + (k[:, None] * b_step + n[None, :] * step(b_column, UNITS[3]))
        )
        inside = (m < M)[:, None], (n < N)[None, :]
        total = tl.zeros([BM, BN], ACC)
        total = add_products(total, a_tile, b_tile, a_step, b_step, inside[0], inside[1], K, COMMON, PRECISION, EVEN, BK)
        places_out = batch * M * N + (m[:, None] * N + n[None, :])
        tl.store(out + places_out, total.to(out.dtype.element_ty), mask=inside[0] & inside[1])


def launch(p: Problem, config: Config) -> Launch:
    constants = (
        triton_dtype(p.wide), TRITON[p.common], p.precision, tl.int64 if p.far else tl.int32, p.units, p.K % config.block_k == 0,
        *p.turned, config.described, *config[:4],
    )  # fmt: skip
    return launch_product(p, config, processors() if config.described else 1, constants)


TRITON = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


@lru_cache(1)
def processors() -> int:
    """The number of programs that a device runs at once; an arbitrary number if there is no device."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 128


def expected(p: Problem, a: Tensor, b: Tensor, out: Tensor) -> dict[int, Tensor]:
    """For the search: torch's product of the operands, viewed with their strides."""
    wide = torch.float64 if p.common in (torch.float32, torch.float64) else torch.float32
    a, b = a.as_strided((p.B, p.M, p.K), p.a), b.as_strided((p.B, p.K, p.N), p.b)
    return {2: (a.to(wide) @ b.to(wide)).to(out.dtype).view(out.shape)}


product = jit.kernel(
    _product,
    "power.product",
    default=default_config,
    candidates=candidate_configs,
    launch=launch,
    sizes=("M", "N", "K"),
    batch=("B", "a", "b"),
    writes=(2,),
    fits=fits,
    expected=expected,
    tolerance=1e-2,
)
