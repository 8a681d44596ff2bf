"""A kernel without Triton, whose configurations are named after what they do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Problem(NamedTuple):
    factor: float
    note: str = ""  # a file to which process ids are written


class Config(NamedTuple):
    does: str
    ms: float = 0.0


class Toy:
    """``out = factor · x`` and ``total += Σ x``."""

    name, module, attribute, function = "toy", "toy", "TOY", None
    writes, adds = (2, 3), (3,)

    def __init__(self, *configs: Config) -> None:
        self.configs = configs

    def candidates(self, problem):
        return list(self.configs)

    def fits(self, problem, config):
        return config.does != "misfit"

    def expected(self, problem, *tensors):
        if problem.note == "no reference":
            raise MemoryError("the reference is too large")
        return {2: tensors[0].double() * problem.factor, 3: tensors[0].double().sum().reshape(1)}

    tolerance = 1e-5

    def run(self, problem, config, tensors):
        x, absent, out, total = tensors
        assert absent is None
        time.sleep(config.ms / 1e3)
        written = slice(0, -1 if config.does == "forgets" else None)
        out[written].copy_(x[written] * problem.factor)
        total += x.sum()
        if config.does not in ("right", "forgets"):
            getattr(self, config.does)(problem, tensors)

    def wrong(self, problem, tensors):
        tensors[2].mul_(1.01)

    def wavers(self, problem, tensors):  # right in the first ten runs
        self.times = getattr(self, "times", 0) + 1
        if self.times > 10:
            self.wrong(problem, tensors)

    def raises(self, problem, tensors):
        raise RuntimeError("out of resource: shared memory")

    def aborts(self, problem, tensors):
        print("a last word", file=sys.stderr, flush=True)
        os.abort()

    def exits(self, problem, tensors):
        os._exit(3)

    def hangs(self, problem, tensors):
        if problem.note:
            other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(problem.note + ".part").write_text(f"{os.getpid()} {other.pid}")
            os.rename(problem.note + ".part", problem.note)
        time.sleep(600)

    def prints(self, problem, tensors):
        print("noise", flush=True)
        os.write(1, b"\x00" * 100)
        os.write(2, b"more noise")

    def strides(self, problem, tensors):
        x, _, out, _ = tensors
        raise RuntimeError(
            f"{tuple(x.shape)} {x.stride()} {x.data_ptr() % 16} {tuple(out.shape)} {out.stride()} {out.data_ptr() % 16}"
        )


TOY = Toy(Config("right"))
