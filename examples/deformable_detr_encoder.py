"""A layer of Deformable DETR's encoder: every pixel of a feature pyramid attends to a few points on every level.

    python examples/deformable_detr_encoder.py                  # on a GPU where there is one
    python examples/deformable_detr_encoder.py --compile        # one graph
    python examples/deformable_detr_encoder.py --height 800 --width 1066

Checkpoints fit: ``sonde.nn.MSDeformAttn`` has the parameters of the original.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import plain
import sonde.nn
from compare import parser, report


class EncoderLayer(nn.Module):
    def __init__(self, attention: nn.Module, channels: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = attention
        self.norm1 = nn.LayerNorm(channels)
        self.linear1, self.linear2 = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.norm2 = nn.LayerNorm(channels)

    def forward(self, pixels: Tensor, position: Tensor, reference_points: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
        pixels = self.norm1(pixels + self.self_attn(pixels + position, reference_points, pixels, shapes))
        return self.norm2(pixels + self.linear2(self.linear1(pixels).relu()))


def centres(shapes: Sequence[tuple[int, int]]) -> Tensor:
    """The centres of all pixels, (x, y) in [0, 1], ``[S, 2]``."""
    grids = [torch.meshgrid((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w, indexing="ij") for h, w in shapes]
    return torch.cat([torch.stack([x, y], -1).flatten(0, 1) for y, x in grids])


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--height", type=int, default=320)
    options.add_argument("--width", type=int, default=480)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--channels", type=int, default=256)
    args = options.parse_args(argv)

    torch.manual_seed(0)
    B, C = args.batch, args.channels
    shapes = [(-(-args.height // stride), -(-args.width // stride)) for stride in (8, 16, 32, 64)]
    S = sum(h * w for h, w in shapes)
    pixels, position = torch.randn(B, S, C, requires_grad=True), torch.randn(B, S, C)
    reference_points = centres(shapes)[None, :, None].expand(B, S, len(shapes), 2)

    layer = EncoderLayer(sonde.nn.MSDeformAttn(C), C, 4 * C)
    for projection in (layer.self_attn.sampling_offsets, layer.self_attn.attention_weights):
        nn.init.normal_(projection.weight, std=0.05)  # zero before training
    twin = EncoderLayer(plain.MSDeformAttn(C), C, 4 * C)
    levels = " ".join(f"{h}x{w}" for h, w in shapes)
    report(f"Deformable DETR encoder layer, levels {levels}", layer, twin, (pixels, position, reference_points, shapes), args)


if __name__ == "__main__":
    main()
