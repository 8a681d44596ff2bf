"""The model of PhysicsNeMo's tutorial on custom kernels: an MLP on a point cloud, interpolation to a grid, an MLP there.

    python examples/knn_projector.py                      # on a GPU where there is one; on a CPU a smaller cloud
    python examples/knn_projector.py --radius 0.1         # over all points within a radius
    python examples/knn_projector.py --points 100000 --side 30

Trained eagerly and compiled, and compared with the same model in plain PyTorch (distances in chunks, the smallest of each row).
All are checked against each other before they are timed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sonde.compat.physicsnemo import knn_weighted_feature_aggregation, radius_bounded_feature_aggregation

PAIRS = 2**26  # of a query and a point that plain PyTorch compares at a time
PUBLISHED = "cuML with a shared memory pool, forward: 11.2 ms"  # 27,000 on 100,000, k = 7, hidden = 25


class MLP(nn.Sequential):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Projector(nn.Module):
    """Learned features of points, aggregated at other points, and a learned output there."""

    def __init__(self, aggregate: Callable, reach: float, hidden: int = 25, outputs: int = 1) -> None:
        super().__init__()
        self.aggregate, self.reach = aggregate, reach  # k, or the radius
        self.proj, self.proj_out = MLP(3, hidden, hidden), MLP(hidden, hidden, outputs)

    def forward(self, p1: Tensor, p2: Tensor) -> Tensor:
        return self.proj_out(self.aggregate(p1, p2, self.proj(p2), self.reach, 0.1))


def plain_knn(p1: Tensor, p2: Tensor, p2_features: Tensor, k: int, sigma: float) -> Tensor:
    out = []
    for rows in p1.split(max(1, PAIRS // p2.shape[0])):
        distances, indices = torch.cdist(rows, p2, compute_mode="donot_use_mm_for_euclid_dist").topk(k, largest=False)
        out.append((torch.softmax(-distances / sigma, -1)[..., None] * p2_features[indices]).sum(-2))
    return torch.cat(out)


def plain_radius(p1: Tensor, p2: Tensor, p2_features: Tensor, radius: float, sigma: float) -> Tensor:
    out = []
    for rows in p1.split(max(1, PAIRS // p2.shape[0])):
        distances = torch.cdist(rows, p2, compute_mode="donot_use_mm_for_euclid_dist")
        weights = torch.softmax(torch.where(distances <= radius, -distances / sigma, -torch.inf), -1)
        out.append(weights.nan_to_num(0) @ p2_features)
    return torch.cat(out)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, p1: Tensor, p2: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(p1, p2) - target).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def milliseconds(call: Callable, repeats: int, device: str) -> float:
    """The median, without the first call, which compiles."""
    found = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found[1:])


def main(argv: Sequence[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda" if gpu else "cpu")
    options.add_argument("--points", type=int, default=100_000 if gpu else 20_000)
    options.add_argument("--side", type=int, default=30 if gpu else 16, help="of the grid of queries")
    options.add_argument("--k", type=int, default=7)
    options.add_argument("--radius", type=float, help="all points within it instead of the k nearest")
    options.add_argument("--backend", default="inductor", help="of torch.compile")
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--steps", type=int, default=20, help="of training, to see the loss fall")
    args = options.parse_args(argv)

    torch.manual_seed(42)
    axis = torch.linspace(-1, 1, args.side)
    p1, p2 = torch.cartesian_prod(axis, axis, axis).to(args.device), torch.randn(args.points, 3).to(args.device)
    target = p1.sin().prod(-1, keepdim=True)
    reach = args.k if args.radius is None else args.radius
    fused, plain = (
        (knn_weighted_feature_aggregation, plain_knn) if args.radius is None else (radius_bounded_feature_aggregation, plain_radius)
    )
    ours = Projector(fused, reach).to(args.device)
    theirs = Projector(plain, reach).to(args.device)
    theirs.load_state_dict(ours.state_dict())
    one_graph = torch.compile(copy.deepcopy(ours), fullgraph=True, backend=args.backend)
    models = {"plain PyTorch": theirs, "sonde": ours, f"sonde, one graph by {args.backend}": one_graph}

    what = f"the {reach} nearest" if args.radius is None else f"all within {reach}"
    print(f"{len(p1):,} queries on {len(p2):,} points, {what}, {args.device}")
    found = {name: gradients(model, p1, p2, target) for name, model in models.items()}
    expected = found.pop("plain PyTorch")
    for name, values in found.items():
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(values, expected))
        print(f"  {name}: {off:.1e} off plain PyTorch in value and gradients of all parameters")
    print(f"  {'':32}{'forward ms':>12}{'training step ms':>18}{'loss after ' + str(args.steps):>16}")
    for name, model in models.items():
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        with torch.no_grad():
            forward = milliseconds(lambda model=model: model(p1, p2), args.repeats, args.device)
        state = copy.deepcopy(model.state_dict())
        step = milliseconds(lambda m=model, o=optimizer: train(m, o, p1, p2, target), args.repeats, args.device)
        model.load_state_dict(state)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        loss = [float(train(model, optimizer, p1, p2, target)) for _ in range(args.steps)][-1]
        print(f"  {name:32}{forward:12.2f}{step:18.2f}{loss:16.4f}")
    print(f"  Published for 27,000 on 100,000 points on another machine, an A100: {PUBLISHED}")


def gradients(model: nn.Module, p1: Tensor, p2: Tensor, target: Tensor) -> list[Tensor]:
    out = model(p1, p2)
    return [out.detach(), *torch.autograd.grad((out - target).square().mean(), list(model.parameters()))]


if __name__ == "__main__":
    main()
