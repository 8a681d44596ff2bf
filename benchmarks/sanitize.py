"""Every GPU kernel under NVIDIA's compute-sanitizer: small cases, values and gradients, default and shipped configurations.

    python benchmarks/sanitize.py --json benchmarks/results/nvidia-h200/sanitizer.json

Each pair of a tool and an operator runs in its own process, and its outcome is written at once. Pairs that are already clean in
the file, for the same sources, are not run again. So ten minutes of a machine at a time are enough: `--seconds` ends a session,
and the same command continues with the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

from sonde import jit
from sonde.jit import Unsupported, settings, winners
from sonde.op.cache import sources_digest
from sonde.operators import EDGES, OPERATORS

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def policies() -> Iterator[tuple[str, object]]:
    """The default configuration, and every shipped one, each once."""
    yield "default", jit.PickAny()
    found = {
        json.dumps(row["config"], sort_keys=True): row["config"]
        for file in sorted(winners.SHIPPED.glob("*.json"))
        for row in json.loads(file.read_text())["winners"]
    }
    for text, config in found.items():
        yield text, jit.PickFixed(config)


def inside(name: str, device: str) -> int:
    """Run the operator's cases in this process; print how many calls there were."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.operators import value_and_grads

    operator = OPERATORS[name]
    calls = refused = 0
    for config, policy in policies():
        for case in operator.cases.SMALL:
            if config != "default" and case not in EDGES:  # shipped configurations run these cases only, the default runs all
                continue
            for dtype in DTYPES if config == "default" else DTYPES[:2]:
                for deterministic in (False, True) if config == "default" else (False,):
                    torch.use_deterministic_algorithms(deterministic)
                    args = operator.make(case, dtype=dtype, device=device)
                    try:
                        with settings.set(policy):
                            value_and_grads(operator.call("triton"), args)
                        calls += 1
                    except Unsupported:  # a configuration for a larger problem
                        refused += 1
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"sanitize: {calls} calls, {refused} configurations that do not fit")
    return calls


def sources() -> str:
    """A hash of every file that a kernel can come from, and of every shipped configuration."""
    shipped = b"".join(file.read_bytes() for file in sorted(winners.SHIPPED.glob("*.json")))
    return hashlib.sha256(sources_digest().encode() + shipped).hexdigest()[:16]


def check(tool: str, name: str, limit_s: float) -> dict:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command, sys.executable, __file__, "--inside", name], capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return dict(outcome="ran out of time", seconds=round(time.monotonic() - start))
    said = done.stdout + done.stderr
    calls, errors = re.search(r"sanitize: (\d+) calls", said), re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    clean = done.returncode == 0 and calls is not None and errors is not None and int(errors[1]) == 0
    found = dict(
        outcome="clean" if clean else "errors", calls=int(calls[1]) if calls else 0, errors=int(errors[1]) if errors else None
    )
    return {**found, "seconds": round(time.monotonic() - start), **({} if clean else {"said": said[-2000:]})}


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--json", type=Path, default=Path("sanitizer.json"))
    ask.add_argument("--tools", nargs="*", choices=TOOLS, default=TOOLS)
    ask.add_argument("--operators", nargs="*", choices=OPERATORS, default=list(OPERATORS))
    ask.add_argument("--seconds", type=float, default=540, help="no pair begins after so long")
    ask.add_argument("--inside", choices=OPERATORS, help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.inside:
        import_module("triton")
        inside(given.inside, "cuda" if torch.cuda.is_available() else "cpu")
        return 0
    if not torch.cuda.is_available():
        sys.exit("sanitize: needs a GPU")
    about = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, source=sources())
    known = json.loads(given.json.read_text()) if given.json.exists() else {}
    known = known if all(known.get(key) == value for key, value in about.items()) else {**about, "pairs": {}}
    start = time.monotonic()
    for tool in given.tools:
        for name in given.operators:
            left = given.seconds - (time.monotonic() - start)
            if left > 0 and known["pairs"].get(f"{tool} {name}", {}).get("outcome") != "clean":
                known["pairs"][f"{tool} {name}"] = found = check(tool, name, max(60, left))
                given.json.write_text(json.dumps(known, indent=1) + "\n")
                print(tool, name, found["outcome"], f"{found['seconds']} s", flush=True)
    outcomes = [
        known["pairs"].get(f"{tool} {name}", {}).get("outcome", "not run") for tool in given.tools for name in given.operators
    ]
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
    return int(set(outcomes) != {"clean"})


if __name__ == "__main__":
    sys.exit(main())
