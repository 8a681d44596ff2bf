"""The dense family on this CPU, in sizes that CPUs are used for: large and small matrices, one and many, training and decoding.

    PYTHONPATH=src python benchmarks/power_cpu.py

Each case is checked, timed and compared with what a user of plain PyTorch writes, as in ``sonde bench``. The records are kept as
benchmarks/results/<device>/power.json, and printed as the table of docs/notebook/power.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from sonde.cli.console import dump
from sonde.cli.environment import slug
from sonde.cli.protocol import Job, measure
from sonde.operators import OPERATORS

RESULTS = Path(__file__).parent / "results"
CASES: dict[str, list[dict[str, Any]]] = {
    "copy": [dict(B=16, M=512, N=512), dict(B=16, M=512, N=512, order=(0, 2, 1))],
    "mm": [dict(B=1, M=1024, K=1024, N=1024), dict(B=256, M=16, K=16, N=16), dict(B=1, M=64, K=100_000, N=3)],
    "sympow": [dict(B=8192, n=8, T=8), dict(B=1024, n=16, T=8), dict(B=64, n=2, T=8)],
    "sympow_mm": [
        dict(B=4, R=1024, n=8, T=8, N=64, expand="k"),
        dict(B=4, R=1024, n=8, T=8, N=64, expand="m"),
        dict(B=256, R=4, n=2, T=8, N=16, expand="k"),
        dict(B=256, R=4, n=2, T=8, N=16, expand="m"),
    ],
    "attention": [
        dict(B=1, T=1024, S=1024, d=64, heads=8, causal=True),
        dict(B=1, T=1024, S=1024, d=64, e=32, heads=8, causal=True),
        dict(B=256, T=16, S=16, d=16, e=8, heads=4),
    ],
    "power_attention": [
        dict(B=1, T=8192, d=64, heads=4),
        dict(B=1, T=2048, d=64, heads=8),
        dict(B=1, T=512, d=64, heads=8),
        dict(B=4, T=256, d=32, heads=8),
        dict(B=1, T=64, d=32, heads=4),
        dict(B=8, T=1, d=64, heads=16, begun=True, returned=True),
        dict(B=32, T=1, d=16, heads=8, begun=True, returned=True),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operators", nargs="*", help="all of them, unless given")
    chosen = parser.parse_args().operators or list(CASES)
    torch.set_num_threads(2)
    records = []
    print("| what | forward | with backward |\n| --- | ---: | ---: |")
    for name in chosen:
        for sizes in CASES[name]:
            case = ", ".join(f"{key}={value}" for key, value in sizes.items())
            found = measure(Job(OPERATORS[name], case, sizes, torch.device("cpu"), "numba"), extras=False)
            records.append(found)
            if not found["correct"]:
                parser.exit(1, f"{name} {case} is wrong: {found['wrong']}\n")
            ratios = [found["speedup"]["eager"][phase]["call_ms"] for phase in ("forward", "forward_backward")]
            print(f"| `{name}` {case} | " + " | ".join(f"{ratio:.2g}×" for ratio in ratios) + " |", flush=True)
    dump(dict(script="benchmarks/power_cpu.py", records=records), str(RESULTS / slug(records[0]["environment"]) / "power.json"))


if __name__ == "__main__":
    main()
