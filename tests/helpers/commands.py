"""Shared by the tests of the commands: running a command, sizes small enough to measure, loading benchmark scripts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from sonde.cli import main
from sonde.operators import OPERATORS, Operator

ROOT = Path(__file__).parents[2]
TINY = dict(B=2, C=4, H=6, W=7, Q=12, D=3, heads=2, octaves=2)
CLOUD = dict(M=12, N=20, F=8, k=3, radius=1.2)
CPU = torch.device("cpu")
MEASURED = [name for name, operator in OPERATORS.items() if "bench" not in operator.refuses]


def small(operator: Operator) -> dict:
    return CLOUD if operator.engine == "_search" else TINY


def sonde(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
