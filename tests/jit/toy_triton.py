"""A small Triton kernel, whose configurations compile, crash or hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import triton
import triton.language as tl

from sonde.jit import Launch


class Problem(NamedTuple):
    n: int
    factor: int
    note: str = ""


class Config(NamedTuple):
    block: int
    num_warps: int = 4
    num_stages: int = 3
    does: str = "compile"


@triton.jit
def widen(x, ACC: tl.constexpr):
    return x.to(ACC)


@triton.jit(do_not_specialize=["N"])
def _scale(x, bias, out, N, FACTOR: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = widen(tl.load(x + i, i < N), ACC) * FACTOR
    if bias is not None:
        y += tl.load(bias + i, i < N)
    tl.store(out + i, y, i < N)


class Scale:
    name, module, attribute, function = "scale", "toy_triton", "SCALE", _scale
    writes, adds = (2,), ()

    def candidates(self, problem):
        return [Config(64), Config(128), Config(64)]

    def fits(self, problem, config):
        return True

    def launch(self, problem, config):
        if config.does == "hang":
            Path(problem.note).write_text(str(os.getpid()))
            time.sleep(600)
        if config.does == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        grid = (-(-problem.n // config.block), 1, 1)
        return Launch(grid, (problem.n,), (problem.factor, tl.float32, config.block), config.num_warps, config.num_stages)

    def run(self, problem, config, tensors):
        launch = self.launch(problem, config)
        self.function[launch.grid](*tensors, *launch.sizes, *launch.constants, **launch.options("interpreter"))

    def expected(self, problem, *tensors):
        return {2: tensors[0].double() * problem.factor}

    tolerance = 1e-6


SCALE = Scale()


@triton.jit(do_not_specialize=["N"])
def _move(x, out, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    out.store([0, 0], x.load([0, 0]))


class Move:
    """A kernel that gets its tensors as descriptors of blocks."""

    module, attribute, function = "toy_triton", "MOVE", _move

    def launch(self, problem, config):
        block = (8, config.block)
        return Launch((1, 1, 1), (problem.n,), block, config.num_warps, config.num_stages, descriptors=((0, block), (1, block)))


MOVE = Move()
