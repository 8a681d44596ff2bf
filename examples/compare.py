"""What the examples print: shapes, times, and how far a layer is from its twin in plain PyTorch."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="with torch.compile, by default of Inductor"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def report(title: str, layer: nn.Module, plain: nn.Module, inputs: Sequence, args: argparse.Namespace) -> None:
    """Load the layer's state into its twin; print how their results differ and how long they take."""
    plain.load_state_dict(layer.state_dict())
    layer, plain, inputs = layer.to(args.device), plain.to(args.device), tree_map_only(Tensor, lambda x: x.to(args.device), inputs)
    fast = torch.compile(layer, fullgraph=True, backend=args.compile) if args.compile else layer
    exact = [copy.deepcopy(x).double() for x in (layer, plain)]

    print(f"{title}, {args.device}, {'one graph by ' + args.compile if args.compile else 'eagerly'}")
    print(f"  {list(inputs[0].shape)} -> {list(fast(*inputs).shape)}")
    for name, (forward, both) in _times({"sonde": fast, "plain": plain}, inputs, args.repeats).items():
        print(f"  {name}: forward {1e3 * forward:.1f} ms, with backward {1e3 * both:.1f} ms")
    values, gradients = _difference(fast, plain, inputs)
    print(f"  difference: values {values:.1e}, gradients {gradients:.1e} (relative)")
    values, gradients = _difference(*exact, inputs)
    print(f"  eagerly, in float64: values {values:.1e}, gradients {gradients:.1e}")


def _difference(layer: nn.Module, plain: nn.Module, inputs: Sequence) -> tuple[float, float]:
    """Relative differences, in norm: of the values, and of all gradients together."""
    dtype = next(plain.parameters()).dtype
    inputs = tree_map_only(Tensor, lambda x: x.detach().to(dtype).requires_grad_(x.requires_grad), inputs)
    (got, *got_grads), (want, *want_grads) = (_results(twin, inputs) for twin in (layer, plain))

    def norm(tensors: Sequence[Tensor]) -> float:
        return sum(x.double().square().sum().item() for x in tensors) ** 0.5

    off = norm([a - b for a, b in zip(got_grads, want_grads)])
    return norm([got - want]) / norm([want]), off / norm(want_grads)


def _results(layer: nn.Module, inputs: Sequence) -> list[Tensor]:
    out = layer(*inputs)
    return [out, *_grads(out, layer, inputs)]


def _grads(out: Tensor, layer: nn.Module, inputs: Sequence) -> Sequence[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    leaves = [x for x in (*tree_leaves(inputs), *layer.parameters()) if isinstance(x, Tensor) and x.requires_grad]
    return torch.autograd.grad(out, leaves, weight)


def _times(layers: dict[str, nn.Module], inputs: Sequence, repeats: int) -> dict[str, tuple[float, float]]:
    """Medians of the forward pass, and of forward and backward, in seconds; the layers alternate."""
    found: dict[str, list] = {name: [] for name in layers}
    for _ in range(repeats + 1):
        for name, layer in layers.items():
            start = _now()
            out = layer(*inputs)
            middle = _now()
            _grads(out, layer, inputs)
            found[name].append((middle - start, _now() - start))
    median = statistics.median
    return {name: (median(x for x, _ in times[1:]), median(x for _, x in times[1:])) for name, times in found.items()}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
