"""Random calls of every operator: combinations of sizes, dtypes, layouts and options that no test lists, and wrong arguments.

Run alone, it prints for each finding how to repeat it: ``python tests/fuzz.py --calls 20000 --seed 7``. A soak test is ``python
tests/fuzz.py --calls 1000000 --seconds 3600 --threads 4 --json soak.json``.
A call must give a right result, values and gradients within the bounds of the tests, or raise one of ``REFUSALS``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__":  # before triton is imported
    import os

    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

import sonde
from helpers.exactness import assert_agrees
from helpers.interpreter import improve_interpreter
from helpers.memory import LAYOUTS, restride
from helpers.operators import Target, leaves
from sonde.operators import OPERATORS, Operator

FUZZED = [operator for operator in OPERATORS.values() if operator.graded]
REFUSALS = (TypeError, ValueError, NotImplementedError)
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 40)
FEW = (0, 1, 1, 2, 3, 4, 5, 7, 9)  # for sizes that an interpreter loops over or that multiply


class Case(NamedTuple):
    operator: Operator
    args: tuple
    given: tuple  # the same values in other layouts, or an invalid argument
    wrong: str  # what is wrong, if anything
    said: str  # a description for the report


def case(seed: int, target: Target, operator: Operator | None = None) -> Case:
    """The same seed gives the same case."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    found = operator or choose.choice(FUZZED)
    name = choose.choice(list(found.cases.SMALL))
    sizes = dict(found.cases.SMALL[name])
    few = target.interpreted
    fixed = {"dims", "seed", "grids", "inputs"} | ({"cams", "L"} if "levels" in sizes else set()) | {*found.as_given}
    for key, value in sizes.items():
        if isinstance(value, int) and not isinstance(value, bool) and key not in fixed and choose.random() < 0.5:
            sizes[key] = max(
                found.least.get(key, 0), choose.choice(FEW if few or key in ("B", "heads", "L", "cams", "octaves") else SIZES)
            )
    if "dims" in sizes:
        sizes["dims"] = choose.choice((1, 2, 3, 3))
    if "N" in sizes and not few and choose.random() < 0.3:
        sizes["N"] = choose.choice((64, 65, 100, 333))  # around the smallest size of a tree
    if sizes.get("sigma_shape"):
        sizes["sigma_shape"] = (sizes["B"],)
    if sizes.get("layout") == "ragged":
        sizes["M"], sizes["N"] = max(5, sizes["M"]), max(5, sizes["N"])
    dtype = choose.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    coords = choose.choice((None, None, torch.float32, torch.float64))
    if found.lists and dtype == torch.float64:
        coords = None  # distances are as exact as coordinates, so wide features on narrow ones need bounds of their own
    try:
        args = found.make(**{"seed": seed, **sizes}, dtype=dtype, coords=coords, device=target.device)
    except (ZeroDivisionError, IndexError, RuntimeError):  # no input of these sizes exists
        return case(seed + 1_000_003, target, operator)
    layouts = [choose.choice((*LAYOUTS[:-3], "misaligned", "padded_rows")) if choose.random() < 0.4 else "contiguous" for _ in args]
    given = tuple(restride(x, how) if isinstance(x, Tensor) and x.ndim and x.numel() else x for x, how in zip(args, layouts))
    wrong = ""
    if choose.random() < 0.25:
        given, wrong = sabotage(choose, given)
    said = f"seed {seed}: {found.name} {name} {sizes} {dtype} {coords} {layouts} {wrong}"
    return Case(found, tuple(args), given, wrong, said)


def sabotage(choose: random.Random, args: Sequence) -> tuple[tuple, str]:
    """Change one argument into something it should not be; a few of the results are still valid."""
    args, i = list(args), choose.randrange(len(args))
    x = args[i]
    ways: dict[str, Any] = {
        "nothing": lambda x: None,
        "text": lambda x: "x",
        "bytes": lambda x: b"01",
        "a number": lambda x: choose.choice((0, -1, 3, 2**63, -(2**70), 0.5, float("nan"), float("inf"), True)),
        "a list": lambda x: [],
        "an object": lambda x: object(),
        "a dictionary": lambda x: {},
    }
    if isinstance(x, Tensor):
        ways |= {
            "an array": lambda x: x.double().cpu().numpy(),
            "integers": lambda x: x.nan_to_num(0, 0, 0).clamp(-100, 100).long(),
            "booleans": lambda x: x > 0,
            "complex": lambda x: x.to(torch.complex64),
            "a dimension more": lambda x: x[None],
            "a dimension less": lambda x: x.flatten(0, 1) if x.ndim > 1 else x.sum(),
            "a size more": lambda x: torch.cat([x, x], choose.randrange(x.ndim)) if x.ndim else x[None],
            "a size less": lambda x: x.narrow(d := choose.randrange(x.ndim), 0, x.shape[d] // 2) if x.ndim else x[None],
            "turned around": lambda x: x.mT if x.ndim > 1 else x.flip(0),
            "on meta": lambda x: x.to("meta"),
            "sparse": lambda x: x.to_sparse(),
            "a scalar": lambda x: x.new_zeros(()),
            "float8": lambda x: x.to(torch.float8_e5m2),
            "a list of rows": lambda x: list(x) if x.ndim else [],
        }
    elif isinstance(x, tuple):
        ways |= {
            "an array": lambda x: np.zeros((2, 2)),
            "a tensor": lambda x: torch.zeros(2, 2),
            "numbers that are none": lambda x: ((float("nan"), 1.5),),
            "negative": lambda x: ((-1, 2),) * max(1, len(x)),
            "too many": lambda x: (*x, *x),
            "huge": lambda x: ((2**40, 2**40),) * max(1, len(x)),
        }
    how = choose.choice(list(ways))
    args[i] = ways[how](x)
    return tuple(args), f"argument {i} is {how}"


def run(case: Case, target: Target) -> str:
    """The outcome of the call, in a word; an AssertionError or any other unexpected exception is a finding."""
    if case.wrong:
        try:
            args = leaves(case.given)
            out = case.operator.function(*args, impl=target.impl)
            if out.requires_grad:
                out.sum().backward()
            torch.isfinite(out).all()
        except REFUSALS:
            return "refused"
        return "taken after all"
    assert_agrees(case.operator, target, case.args, case.said, case.given, slack=True)
    return "right"


def resident() -> int:
    """Megabytes of this process in memory; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")), 0)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--calls", type=int, default=1000)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--impl", default="numba", choices=["numba", "triton"])
    ask.add_argument("--operator", choices=[operator.name for operator in FUZZED])
    ask.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, wherever it is")
    ask.add_argument("--threads", type=int, default=1)
    ask.add_argument("--json", type=Path, help="where a summary goes")
    given = ask.parse_args()
    target = Target(given.impl)
    if target.interpreted:
        improve_interpreter()
    operator = OPERATORS[given.operator] if given.operator else None
    found, findings, start, before = Counter(), [], time.monotonic(), resident()
    seeds = iter(range(given.seed, given.seed + given.calls))  # next() is atomic, so threads share them

    def work() -> None:
        for seed in seeds:
            if time.monotonic() - start > given.seconds:
                break
            one = case(seed, target, operator)
            try:
                found[run(one, target)] += 1
            except Exception as problem:
                found["FOUND"] += 1
                findings.append(f"{one.said}\n    {type(problem).__name__}: {str(problem)[:400]}")
                print(findings[-1], *traceback.format_tb(problem.__traceback__)[-2:], sep="\n", flush=True)

    threads = [threading.Thread(target=work) for _ in range(given.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(found), f"in {time.monotonic() - start:.0f} s")
    if given.json:
        about = dict(impl=given.impl, device=target.device, seed=given.seed, torch=torch.__version__, sonde=sonde.__version__)
        cost = dict(seconds=round(time.monotonic() - start), threads=given.threads, resident_mb=[before, resident()])
        given.json.write_text(json.dumps({**about, **cost, "calls": dict(found), "findings": findings}, indent=1) + "\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
