"""One training step of a sharded model whose layers call Numba kernels; `test_tensors.py` runs it once per rank."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sonde


class Scene(nn.Module):
    """Parameters go into every operator unchanged, so that FSDP gathers and frees the very memory that kernels read."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.manual_seed(0)
        self.images = nn.Parameter(torch.randn(2, 6, 5, 4, generator=g))
        self.features = nn.Parameter(torch.randn(80, 4, generator=g))
        self.points = nn.Parameter(torch.rand(80, 3, generator=g))
        self.attention = sonde.nn.MSDeformAttn(8, 1, 2, 2)

    def forward(self, samples: torch.Tensor, weights: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        seen = sonde.sample_sum(self.images, samples, weights).square().mean()
        warped = sonde.grid_sample(self.images, samples).square().mean()
        near = sonde.knn_aggregate(queries, self.points, self.features, k=3).square().mean()
        wide = sonde.radius_aggregate(queries, self.points, self.features, 0.5).square().mean()
        places = torch.full((1, 12, 1, 2), 0.4)
        x = queries[:12].repeat(1, 3)[None, :, :8]
        attended = self.attention(x, places, x, torch.tensor([[3, 4]]), torch.tensor([0])).square().mean()
        return seen + warped + near + wide + attended


def step(model: Scene) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    samples = torch.rand(2, 7, 3, 2, generator=g) * 2 - 1
    weights = torch.rand(2, 2, 7, 3, generator=g)
    queries = torch.rand(20, 3, generator=g)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the second runs on memory that was freed and gathered again
        optimiser.zero_grad()
        loss = model(samples, weights, queries)
        loss.backward()
        optimiser.step()
    return loss.detach()


def full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(os.environ["RANK"]), world_size=2)
    alone, sharded = Scene(), Scene()
    fully_shard(sharded.attention, mesh=(mesh := init_device_mesh("cpu", (2,))))
    fully_shard(sharded, mesh=mesh)
    assert torch.allclose(step(alone), step(sharded))
    for (name, want), got in zip(alone.named_parameters(), sharded.parameters()):
        assert torch.allclose(want, full(got), atol=1e-6), name
    dist.barrier()  # a rank that leaves early closes connections that the other still uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
