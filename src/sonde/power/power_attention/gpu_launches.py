"""The launches of power attention's kernels: their problems, grids and arguments."""

from __future__ import annotations

import triton.language as tl

from ... import jit
from ...jit.launch import Launch, cdiv, power_of_2, vector_of
from ...jit.launch import accumulator as triton_dtype
from .._dense.gpu_configs import ALL_REGISTERS, batch_grid, registers
from .._dense.gpu_kernels import TRITON
from . import gpu_configs, gpu_decoding, gpu_expected, gpu_gradients, gpu_kernels, gpu_past, gpu_states
from .gpu_configs import Config, Fold, Past, Problem, Strides

prepare, moments, scan, spread = gpu_states._prepare, gpu_states._moments, gpu_states._scan, gpu_states._spread
row_factors, gate_gradient = gpu_gradients._row_factors, gpu_gradients._gate_gradient


REGISTERS_FOR_THREE = 168  # of a thread, so that three blocks of four warps fit on a multiprocessor


def _sizes(p: Problem) -> tuple[int, ...]:
    """One list for all kernels, though `_prepare` and `_gate_gradient` do not read the groups, `_query_gradients` not the number of
    chunks, and `_row_factors` neither their number nor their length."""
    return p.h, p.groups, p.T, p.C, p.chunks


def _offset(p: Problem | Fold | Past) -> tl.dtype:
    return tl.int64 if p.far else tl.int32


def _launch(p: Problem | Fold | Past, c: Config, grid: tuple[int, int, int], numbers: tuple, constants: tuple) -> Launch:
    return Launch(grid, numbers, constants, c.num_warps, c.num_stages, registers=registers(p.half, p.hopper))


def _even(p: Problem | Fold | Past, *blocks: int) -> bool:
    """Whether blocks of rows end where chunks do, so that loads need no masks."""
    return p.T % p.C == 0 and p.C % max(blocks) == 0


def launch_prepare(p: Problem) -> Launch:
    rows = min(gpu_configs.BLOCK, power_of_2(max(16, p.C)))
    constants = p.d, p.blocks[0], p.power, triton_dtype(p.wide), _offset(p), p.units, rows
    return Launch(batch_grid(p.chunks, p.B * p.h), (*_sizes(p), *p.k, *p.gate), constants, 4, registers=registers(p.half, p.hopper))


def fold_of(p: Problem, x: Strides, y: Strides, members: int, skipped: int, chunks: int) -> Fold:
    """The problem of a fold over these rows."""
    return Fold(
        p.B, p.h, members, p.T, p.C, chunks, skipped, p.d, p.e, p.tile, p.D, x, y, (vector_of(16, *x), vector_of(16, *y)), p.common,
        p.wide, p.precision, p.exact, p.far, p.hopper,
    )  # fmt: skip


def launch_fold(p: Fold, c: Config) -> Launch:
    n = p.d // p.tile
    grid = batch_grid(sum(cdiv(n - s, c.parts) for s in range(n)) * cdiv(p.e, c.block_n) * p.chunks, p.B * p.h)
    constants = (
        p.d, p.e, p.tile, triton_dtype(p.wide), TRITON[p.common], p.precision, _offset(p), *p.units, _even(p, c.block_m),
        c.block_m, c.block_n, c.parts,
    )  # fmt: skip
    sizes = p.h, p.members, p.T, p.C, p.chunks, p.skipped
    return _launch(p, c, grid, (*sizes, *p.x, *p.y), constants)


def launch_moments(p: Fold) -> Launch:
    c = gpu_configs.moment_config(p)
    sizes = (p.h, p.members, p.T, p.C, p.chunks, p.skipped, *p.x)
    constants = (
        p.d, power_of_2(max(16, p.d)), p.tile, triton_dtype(p.wide), TRITON[p.common], p.exact, _offset(p), p.units[0], c.block_m,
        c.block_n,
    )  # fmt: skip
    return _launch(p, c, batch_grid(p.chunks * cdiv(p.d, c.block_n), p.B * p.h), sizes, constants)


def launch_spread(p: Past) -> Launch:
    BD = power_of_2(max(16, p.d))
    rows = min(64, BD)
    constants = p.d, BD, p.tile, TRITON[p.common], p.parts, rows
    return Launch((p.B * p.chunks * p.h, cdiv(p.d, rows), 1), (), constants, 4)


def scan_programs(p: Problem, e: int) -> int:
    """How many programs share a state with `e` columns."""
    return cdiv(p.D * e, _scan_block(e))


def flow_columns(p: Problem) -> int:
    """In how many partial sums the product of a state and its gradient is stored."""
    return scan_programs(p, p.e) + scan_programs(p, 1) if p.paired else 1


def _scan_block(e: int) -> int:
    return 1024 if e > 1 else 256


def launch_scan(p: Problem, e: int, first: int, count: int, reverse: bool = False, column: int = 0) -> Launch:
    constants = p.D * e, e, p.tile, reverse, triton_dtype(p.wide), _scan_block(e)
    return Launch(
        batch_grid(scan_programs(p, e), p.B * p.h), (p.h, p.chunks, first, count, flow_columns(p), column), constants, 4, 4
    )


def past_of(p: Problem, x: Strides, y: Strides | None, groups: int, first: int, count: int) -> Past:
    """The problem of sending these rows through states: those of `count` chunks, from `first` on."""
    return Past(
        p.B, p.h, groups, p.T, p.C, p.chunks, first, count, p.d, p.e, p.tile, p.D, x, y or (0, 0, 0), vector_of(16, *x),
        vector_of(16, *y) if y else 0, p.common, p.wide, p.precision, p.exact, p.far, p.hopper,
    )  # fmt: skip


def _past_grid(p: Past, c: Config) -> tuple[int, int, int]:
    return batch_grid(p.states * cdiv(p.C, c.block_m), p.B * p.h * p.groups)


def _past_constants(p: Past) -> tuple:
    blocks = power_of_2(max(16, p.d)), power_of_2(max(16, p.e))
    return p.d, p.e, *blocks, p.tile, triton_dtype(p.wide), TRITON[p.common], p.precision, p.exact, p.parts, _offset(p)


def launch_past_sums(p: Past, c: Config) -> Launch:
    sizes = p.h, p.groups, p.T, p.C, p.chunks, p.first, *p.x
    made = _launch(p, c, _past_grid(p, c), sizes, (*_past_constants(p), p.x_unit, _even(p, c.block_m), c.block_m, c.parts))
    third = p.half and p.hopper and p.widest <= 64 and c.num_warps == 4 and c.parts <= 2  # a multiprocessor holds a third block
    return made._replace(registers=REGISTERS_FOR_THREE) if third else made


def launch_past_gradients(p: Past, c: Config) -> Launch:
    sizes = p.h, p.groups, p.T, p.C, p.chunks, p.first, *p.x, *p.y
    return _launch(
        p, c, _past_grid(p, c), sizes, (*_past_constants(p), p.x_unit, p.y_unit, _even(p, c.block_m), c.block_m, c.parts)
    )


def _constants(p: Problem, last: bool, c: Config) -> tuple:
    return (
        p.d, p.e, *p.blocks, p.power, triton_dtype(p.wide), TRITON[p.common], p.precision, _offset(p), p.units, last,
        gpu_configs.BLOCK, _even(p, c.block_m, c.block_n), c.block_m, c.block_n,
    )  # fmt: skip


def launch_outputs(p: Problem, c: Config) -> Launch:
    grid = batch_grid(p.chunks * cdiv(p.C, c.block_m), p.B * p.h * p.groups)
    return _launch(p, c, grid, (*_sizes(p), *p.q, *p.k, *p.v, p.least), _constants(p, p.begun, c))


def launch_row_factors(p: Problem) -> Launch:
    constants = p.e, p.blocks[1], triton_dtype(p.wide), _offset(p), p.units, 32
    return Launch(
        batch_grid(cdiv(p.T, 32), p.B * p.h * p.groups), (*_sizes(p), *p.out, *p.grad), constants, 4, registers=ALL_REGISTERS
    )


def launch_query_gradients(p: Problem, c: Config) -> Launch:
    grid = batch_grid(p.chunks * cdiv(p.C, c.block_m), p.B * p.h * p.groups)
    return _launch(p, c, grid, (*_sizes(p), *p.q, *p.k, *p.v, *p.grad), _constants(p, p.begun, c))


def launch_key_gradients(p: Problem, c: Config) -> Launch:
    grid = batch_grid(p.chunks * cdiv(p.C, c.block_m), p.B * p.h)
    return _launch(p, c, grid, (*_sizes(p), *p.q, *p.k, *p.v, *p.grad), _constants(p, p.returned, c))


def launch_gate_gradient(p: Problem) -> Launch:
    constants = p.begun, p.returned, min(1024, power_of_2(max(16, p.C)))
    numbers = (*_sizes(p), *p.gate, flow_columns(p))
    return Launch(batch_grid(p.chunks, p.B * p.h), numbers, constants, 4, registers=registers(p.half, p.hopper))


def launch_step(p: Problem, c: Config) -> Launch:
    numbers = (p.h, *p.q[:2], *p.k[:2], *p.v[:2], *p.gate[:2], p.least)
    constants = (
        p.d, p.e, p.blocks[0], p.D, p.power, p.tile, p.tile**p.power, p.groups, triton_dtype(p.wide), c.block_m, c.block_n,
    )  # fmt: skip
    return _launch(p, c, batch_grid(cdiv(p.e, c.block_n), p.B * p.h), numbers, constants)


def fits(p: Problem, c: Config) -> bool:
    """Whether the matrix units accept tiles of these sizes."""
    return min(c.block_m, c.block_n) >= 16


def fits_keys(p: Problem, c: Config) -> bool:
    """Queries are read from the first key of a block on, and those that see the whole block from its end on."""
    return fits(p, c) and c.block_m % c.block_n == 0


def fits_fold(p: Fold, c: Config) -> bool:
    return min(c.block_m, c.block_n) >= 16 and 1 <= c.parts <= p.d // p.tile


def fits_past(p: Past, c: Config) -> bool:
    return c.block_m >= 16 and c.parts > 0


SIZES = ("T", "chunks")
PAST_SIZES, PAST_BATCH = (*SIZES, "states"), ("B", "x", "y", "first")
BATCH = ("B", "q", "k", "v", "out", "grad", "gate", "least")
outputs = jit.kernel(
    gpu_kernels._outputs, "power.outputs", default=gpu_configs.output_config, candidates=gpu_configs.output_candidates,
    launch=launch_outputs, sizes=SIZES, batch=BATCH, writes=(10, 11, 12), fits=fits, expected=gpu_expected.outputs, tolerance=1e-2,
)  # fmt: skip
fold = jit.kernel(
    gpu_states._fold, "power.fold", default=gpu_configs.fold_config, candidates=gpu_configs.fold_candidates,
    launch=launch_fold, sizes=SIZES, batch=("B", "x", "y", "skipped"), writes=(3,), fits=fits_fold, expected=gpu_expected.fold,
    tolerance=1e-2,
)  # fmt: skip
past_sums = jit.kernel(
    gpu_past._past_sums, "power.past_sums", default=gpu_configs.past_sums_config, candidates=gpu_configs.past_sums_candidates,
    launch=launch_past_sums, sizes=PAST_SIZES, batch=PAST_BATCH, writes=(4, 5), fits=fits_past,
    expected=gpu_expected.past_sums, tolerance=1e-2,
)  # fmt: skip
past_gradients = jit.kernel(
    gpu_past._past_gradients, "power.past_gradients", default=gpu_configs.past_gradients_config,
    candidates=gpu_configs.past_gradients_candidates, launch=launch_past_gradients, sizes=PAST_SIZES, batch=PAST_BATCH,
    writes=(6,), fits=fits_past, expected=gpu_expected.past_gradients, tolerance=1e-2,
)  # fmt: skip
query_gradients = jit.kernel(
    gpu_gradients._query_gradients, "power.attention_queries", default=gpu_configs.query_config,
    candidates=gpu_configs.query_candidates, launch=launch_query_gradients, sizes=SIZES, batch=BATCH, writes=(10, 11, 12),
    fits=fits, expected=gpu_expected.query_gradients, tolerance=2e-2,
)  # fmt: skip
key_gradients = jit.kernel(
    gpu_gradients._key_gradients, "power.attention_keys", default=gpu_configs.key_config, candidates=gpu_configs.key_candidates,
    launch=launch_key_gradients, sizes=SIZES, batch=BATCH, writes=(11, 12, 13), fits=fits_keys, expected=gpu_expected.key_gradients,
    tolerance=2e-2,
)  # fmt: skip
step = jit.kernel(
    gpu_decoding._step, "power.step", default=gpu_configs.step_config, candidates=gpu_configs.step_candidates,
    launch=launch_step, sizes=SIZES, batch=BATCH, writes=(9, 10, 11, 12, 13, 14), expected=gpu_expected.step, tolerance=1e-2,
)  # fmt: skip
