"""Hash every result and gradient of every small case, so that two versions of the code can be compared bit by bit.

    python benchmarks/bits.py --out before.json        # in the old tree
    python benchmarks/bits.py --out after.json --against before.json

Runs on Numba, and on Triton if there is a GPU or ``TRITON_INTERPRET=1`` is set. It uses only public functions and ``cases.py``,
so it can be copied into an older tree.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

OPERATORS = {
    "grid": ("sample_sum", "sample_dot", "sample_attention", "grid_sample", "deformable_aggregation", "ms_deform_attn"),
    "points": ("knn", "radius_neighbors", "radius_search", "knn_aggregate", "radius_aggregate"),
    "power": ("copy", "mm", "sympow", "sympow_mm", "attention", "power_attention"),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    text = f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()} "
    return hashlib.sha256(text.encode() + data.numpy().tobytes()).hexdigest()[:16]


def call(function, args, impl: str):
    """Call with the arguments of a case, in which keyword-only options come last."""
    known = [p for p in inspect.signature(function).parameters.values() if p.name != "impl"]
    plain = sum(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in known)
    options = [p.name for p in known[plain:]]
    return function(*args[:plain], **dict(zip(options, args[plain:])), impl=impl)


def hashes(function, args, impl: str) -> list[str]:
    args = tree_map_only(Tensor, lambda a: a.detach().requires_grad_() if a.is_floating_point() else a, args)
    outs = tree_leaves(call(function, args, impl))
    found = [digest(o) for o in outs]
    graded = [o for o in outs if o.requires_grad]
    if graded:
        g = torch.Generator().manual_seed(1)
        grads = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o) for o in graded]
        leaves = [a for a in tree_leaves(args) if isinstance(a, Tensor) and a.requires_grad]
        found += ["-" if d is None else digest(d) for d in torch.autograd.grad(graded, leaves, grads, allow_unused=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the JSON to write")
    parser.add_argument("--against", help="an earlier one: say what differs, and fail if anything does")
    parser.add_argument("--impl", action="append", choices=("numba", "triton"), help="both by default")
    options = parser.parse_args()
    made = {}
    for family, names in OPERATORS.items():
        for name in names:
            if find_spec(f"sonde.{family}") is None or find_spec(f"sonde.{family}.{name}") is None:
                continue  # an older tree
            function = getattr(import_module(f"sonde.{family}"), name)
            cases = import_module(f"sonde.{family}.{name}.cases")
            for case, sizes in cases.SMALL.items():
                for dtype in DTYPES:
                    for deterministic in (False, True):
                        for impl in options.impl or ("numba", "triton"):
                            torch.use_deterministic_algorithms(deterministic)
                            device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
                            args = cases.make(**sizes, dtype=dtype)
                            args = tree_map_only(Tensor, lambda a, device=device: a.to(device), args)
                            key = f"{name} {case} {str(dtype).removeprefix('torch.')} {impl}{' deterministic' * deterministic}"
                            made[key] = hashes(function, args, impl)
            print(f"{name}: {len(made)} so far", file=sys.stderr, flush=True)
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump(made, file, indent=0)
    if options.against:
        with open(options.against, encoding="utf-8") as file:
            before = json.load(file)
        other = [key for key in made if made[key] != before.get(key)]
        print(f"{len(made)} calls, {len(other)} differ", *other[:20], sep="\n  ")
        raise SystemExit(bool(other))


if __name__ == "__main__":
    main()
