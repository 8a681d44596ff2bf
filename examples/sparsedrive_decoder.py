"""A layer of a SparseDrive decoder: boxes attend to each other, sample the features of six cameras, and are refined.

    python examples/sparsedrive_decoder.py                      # on a GPU where there is one
    python examples/sparsedrive_decoder.py --compile            # one graph
    python examples/sparsedrive_decoder.py --anchors 900 --height 256 --width 704

Checkpoints fit: ``sonde.nn.DeformableFeatureAggregation`` has the parameters of the original.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import plain
import sonde.nn
from compare import parser, report

CENTRE_AND_FACES = [[0, 0, 0], [0.45, 0, 0], [-0.45, 0, 0], [0, 0.45, 0], [0, -0.45, 0], [0, 0, 0.45], [0, 0, -0.45]]


class DecoderLayer(nn.Module):
    def __init__(self, aggregation: nn.Module, channels: int) -> None:
        super().__init__()
        self.anchor_encoder = nn.Linear(11, channels)
        self.attention = nn.MultiheadAttention(channels, 8, batch_first=True)
        self.norm1 = nn.LayerNorm(channels)
        self.aggregation = aggregation  # concatenates the instances and what it samples
        self.mlp = nn.Sequential(nn.Linear(2 * channels, 4 * channels), nn.ReLU(), nn.Linear(4 * channels, channels))
        self.norm2 = nn.LayerNorm(channels)
        self.refine = nn.Linear(channels, 11)

    def forward(self, instances: Tensor, anchors: Tensor, maps: list[Tensor], cameras: dict[str, Tensor]) -> Tensor:
        embedded = self.anchor_encoder(anchors)
        query = instances + embedded
        instances = self.norm1(instances + self.attention(query, query, instances, need_weights=False)[0])
        instances = self.norm2(self.mlp(self.aggregation(instances, anchors, embedded, maps, cameras)))
        return torch.cat([instances, anchors + self.refine(instances + embedded)], -1)


def rig(cams: int, height: int, width: int) -> Tensor:
    """Projections of cameras that look outwards from the centre, all around: ``[cams, 4, 4]``."""
    focal = width / 2 / math.tan(math.radians(35))
    pixels = torch.tensor([[focal, 0, width / 2, 0], [0, focal, height / 2, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    projections = []
    for yaw in torch.arange(cams) * (2 * math.pi / cams):
        sin, cos = yaw.sin().item(), yaw.cos().item()
        right, down, ahead = [sin, -cos, 0, 0], [0, 0, -1, 1.5], [cos, sin, 0, 0]  # 1.5 m above the ground
        projections.append(pixels @ torch.tensor([right, down, ahead, [0, 0, 0, 1]]))
    return torch.stack(projections)


def boxes(count: int) -> Tensor:
    """Cars around us, (x, y, z, ln w, ln l, ln h, sin, cos, vx, vy, vz)."""
    yaw, place = torch.rand(count) * 2 * math.pi, torch.rand(count, 3) * torch.tensor([100, 100, 2]) - torch.tensor([50, 50, 0])
    size = torch.tensor([4.5, 1.9, 1.6]).log().expand(count, 3)
    return torch.cat([place, size, yaw.sin()[:, None], yaw.cos()[:, None], torch.zeros(count, 3)], -1)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--anchors", type=int, default=300)
    options.add_argument("--height", type=int, default=128)
    options.add_argument("--width", type=int, default=352)
    options.add_argument("--channels", type=int, default=256)
    args = options.parse_args(argv)

    torch.manual_seed(0)
    C, cams = args.channels, 6
    shapes = [(args.height // stride, args.width // stride) for stride in (4, 8, 16, 32)]
    maps = [torch.randn(1, cams, C, h, w, requires_grad=True) for h, w in shapes]
    wh = torch.tensor([args.width, args.height], dtype=torch.float32).expand(1, cams, 2)
    cameras = {"projection_mat": rig(cams, args.height, args.width)[None], "image_wh": wh}
    anchors = boxes(args.anchors)[None].requires_grad_()
    instances = torch.randn(1, args.anchors, C, requires_grad=True)

    sizes = dict(embed_dims=C, num_groups=8, num_levels=4, num_cams=cams, use_camera_embed=True, residual_mode="cat")
    sizes["kps_generator"] = dict(num_learnable_pts=6, fix_scale=CENTRE_AND_FACES)
    layer = DecoderLayer(sonde.nn.DeformableFeatureAggregation(**sizes), C)
    nn.init.normal_(layer.aggregation.weights_fc.weight, std=0.05)  # zero before training
    twin = DecoderLayer(plain.DeformableFeatureAggregation(**sizes), C)
    levels = " ".join(f"{h}x{w}" for h, w in shapes)
    report(f"SparseDrive decoder layer, {cams} cameras, levels {levels}", layer, twin, (instances, anchors, maps, cameras), args)


if __name__ == "__main__":
    main()
