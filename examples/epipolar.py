"""A matcher that learns depth from two views, without true depths for training: attention along epipolar lines.

    python examples/epipolar.py                          # about a minute on two cores
    python examples/epipolar.py --picture matcher.png    # draws what it has learnt, on an unseen scene

Each step renders a new textured height field into two noisy cameras. Every pixel of one view attends to samples along its epipolar
line in the other. The loss compares the sum of the colours there, weighted by attention, with the pixel's own colours. They can
only match if attention peaks where both views see the same point, so the matcher learns to find its depth. The attention is
``sonde.sample_attention``; it is timed against ``F.grid_sample`` and a softmax.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sonde
from sonde.cli.timing import peak_mib
from sonde.nn import EpipolarSamples, epipolar_samples, pixel_centres

NEAR, FAR = 1.5, 6.0
NOISE = 0.1  # of the cameras: a single pixel's colours are not enough to find a match
INK, PALE, ORANGE, BLUE = "#333333", "#e2e2e2", "#d1652b", "#1b6ca8"


class Views(NamedTuple):
    """Two views of a scene; a row of the batch is one view, with its epipolar lines in the other."""

    colours: Tensor  # [2, 3, H, W]
    depths: Tensor  # [2, H·W], the truth that the matcher should find
    lines: EpipolarSamples  # of each view's pixels in the other view, [2, 1, H·W, D, …]


class Waves:
    """A sum of random plane waves over (x, y): a texture, or the relief of a height field."""

    def __init__(self, count: int, shortest: float, longest: float, channels: int) -> None:
        angle = 2 * math.pi * torch.rand(count)
        wavelength = shortest * (longest / shortest) ** torch.rand(count)
        self.wave = 2 * math.pi / wavelength * torch.stack([angle.cos(), angle.sin()])  # [2, count]
        self.phase = 2 * math.pi * torch.rand(count)
        self.weight = torch.randn(count, channels) / count**0.5

    def __call__(self, xy: Tensor) -> Tensor:
        """``[…, 2]`` → ``[…, channels]``, of about unit variance."""
        return 2**0.5 * torch.sin(xy @ self.wave + self.phase) @ self.weight


def cameras() -> tuple[Tensor, Tensor]:
    """Intrinsics and poses of two cameras that look along z, half a unit apart, turned slightly towards each other: ``[2, …]``."""
    intrinsics = torch.tensor([[1.0, 0, 0.5], [0, 4 / 3, 0.5], [0, 0, 1]]).expand(2, 3, 3)
    poses = torch.eye(4).repeat(2, 1, 1)
    for pose, side in zip(poses, (-1, 1)):
        angle = 0.06 * side
        pose[0, 0] = pose[2, 2] = math.cos(angle)
        pose[0, 2], pose[2, 0] = -math.sin(angle), math.sin(angle)
        pose[:3, 3] = torch.tensor([0.25, 0.05, 0.0]) * side
    return intrinsics, poses


def render(height: int, width: int, num_samples: int) -> Views:
    """A random height field z(x, y) with a random texture, seen by both cameras."""
    intrinsics, poses = cameras()
    relief, texture = Waves(4, 2.5, 5.0, 1), Waves(60, 0.12, 1.5, 3)
    points = pixel_centres(height, width).expand(2, -1, -1)
    places = torch.cat([(points + 1) / 2, torch.ones_like(points[..., :1])], -1)
    rays = places @ torch.linalg.inv(intrinsics).mT @ poses[:, :3, :3].mT  # z = 1 in the camera
    centres = poses[:, None, :3, 3]
    low, high = torch.full(points.shape[:2], NEAR), torch.full(points.shape[:2], FAR)
    for _ in range(24):  # bisection: the ray begins before the surface and ends behind it
        depths = (low + high) / 2
        at = centres + depths[..., None] * rays
        before = at[..., 2] < 3 + 0.35 * relief(at[..., :2])[..., 0].clamp(-3, 3)
        low, high = torch.where(before, depths, low), torch.where(before, high, depths)
    colours = torch.sigmoid(1.5 * texture(at[..., :2])) + NOISE * torch.randn(*at.shape)
    lines = epipolar_samples(points, intrinsics, poses, intrinsics.flip(0)[:, None], poses.flip(0)[:, None], NEAR, FAR, num_samples)
    return Views(colours.mT.unflatten(2, (height, width)).contiguous(), depths, lines)


class Matcher(nn.Module):
    """Features that are similar for two pixels that see the same point."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, channels), (channels, channels), (channels, channels)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GELU()]
        self.encoder = nn.Sequential(*layers, nn.Conv2d(channels, channels, 1))
        self.sharpness = nn.Parameter(torch.tensor(2.0))

    def forward(self, colours: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``[2, 1, H·W, C]``, and the other view's features, to be sampled: ``[2, 1, C, H, W]``."""
        features = F.normalize(self.encoder(colours), dim=1)
        queries = self.sharpness.exp() * features.flatten(2).mT[:, None]
        return queries, features.flip(0)[:, None]


def eager_attention(images: Tensor, samples: Tensor, queries: Tensor, *, values: Tensor, scale: float, mask: Tensor) -> Tensor:
    """What a user of plain PyTorch writes instead of ``sonde.sample_attention``: every sample of every channel, in memory."""
    keys, seen = (F.grid_sample(x[:, 0], samples[:, 0], align_corners=False) for x in (images, values))  # [2, C, Q, D]
    logits = scale * torch.einsum("bhqc,bcqd->bhqd", queries, keys)
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    weights = torch.where(mask, weights, 0)  # a query without any sample gets 0, not NaN
    return torch.einsum("bhqd,bcqd->bhqc", weights, seen)


def loss_of(matcher: Matcher, views: Views, attend: Callable[..., Tensor]) -> Tensor:
    """Mean difference between the colours around each pixel and those that it attends to."""
    patches = F.unfold(views.colours, 3, padding=1).unflatten(2, views.colours.shape[2:])  # [2, 27, H, W]
    queries, images = matcher(views.colours)
    samples, _, mask = views.lines
    found = attend(images, samples, queries, values=patches.flip(0)[:, None], scale=1.0, mask=mask)  # [2, 1, Q, 27]
    wrong = (found[:, 0] - patches.flatten(2).mT).abs().mean(-1)
    seen = mask[:, 0, :, 0]
    return torch.where(seen, wrong, 0).sum() / seen.sum()


@torch.no_grad()
def attention(matcher: Matcher, views: Views) -> Tensor:
    """The attention weights, which ``sample_attention`` does not return, ``[2, Q, D]``."""
    queries, images = matcher(views.colours)
    samples, _, mask = views.lines
    logits = sonde.sample_dot(images[:, 0], samples[:, 0], queries)[:, 0]
    return torch.where(mask[:, 0], logits.softmax(-1), 0)


def matched(matcher: Matcher, views: Views) -> tuple[float, float, float]:
    """For pixels whose point the other view sees: the share that attends most to a sample within one step of the true depth, the
    share of attention there, and that share by chance."""
    depths, seen = views.lines.depths[:, 0], views.lines.mask[:, 0, :, 0]
    weights = attention(matcher, views)
    nearest = (1 / depths - 1 / views.depths[..., None]).abs().argmin(-1, keepdim=True)
    right = (torch.arange(depths.shape[-1]) - nearest).abs() <= 1
    clear = seen & (views.depths > depths[..., 0]) & (views.depths < depths[..., -1])
    peaks = right.gather(-1, weights.argmax(-1, keepdim=True))[..., 0]
    share = torch.where(right, weights, 0).sum(-1)
    return peaks[clear].float().mean().item(), share[clear].mean().item(), right[clear].float().mean().item()


def compare(matcher: Matcher, views: Views, repeats: int) -> None:
    """Time and memory of a training step's forward and backward pass, ours and eager alternating."""

    def step(attend: Callable[..., Tensor]) -> list[Tensor]:
        loss = loss_of(matcher, views, attend)
        return [loss.detach(), *torch.autograd.grad(loss, list(matcher.parameters()))]

    contenders = {"sonde": sonde.sample_attention, "eager PyTorch": eager_attention}
    found = {name: step(attend) for name, attend in contenders.items()}  # the first calls compile
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, attend in contenders.items():
            start = time.perf_counter()
            step(attend)
            took[name].append(1e3 * (time.perf_counter() - start))
    print(f"  {'':20}{'loss':>10}{'ms':>9}{'MiB':>9}")
    for name, attend in contenders.items():
        memory = peak_mib(partial(step, attend), torch.device("cpu"))
        print(f"  {name:20}{found[name][0]:10.5f}{statistics.median(took[name]):9.1f}{memory:9.1f}")
    off, norm = 0.0, 0.0
    for a, b in zip(found["sonde"], found["eager PyTorch"]):
        off, norm = off + (a - b).square().sum().item(), norm + b.square().sum().item()
    print(f"  difference of loss and gradients: {math.sqrt(off / norm):.1e} (relative)")


def draw(file: str, matcher: Matcher, views: Views, peaks: float) -> None:
    """The first view, and what three of its pixels and one of its rows attend to in the second."""
    from matplotlib.figure import Figure

    height, width = views.colours.shape[2:]
    weights, depths, samples = attention(matcher, views)[0], views.lines.depths[0, 0], views.lines.samples[0, 0]
    truth, seen = views.depths[0], views.lines.mask[0, 0, :, 0]
    row = height // 2
    chosen = [row * width + round(share * width) for share in (0.3, 0.55, 0.8)]
    figure = Figure(figsize=(12, 7), layout="constrained", facecolor="white")
    (first, second, curves), (true, found, along) = figure.subplots(2, 3)

    for axes, view, title in (
        (first, 0, "View 1: three pixels of a row"),
        (second, 1, "View 2: their epipolar lines, by attention"),
    ):
        axes.imshow(views.colours[view].permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest", alpha=0.75)
        axes.set_title(title, loc="left")
    first.axhline(row, color="white", linewidth=0.8)
    for q, colour in zip(chosen, (ORANGE, BLUE, INK)):
        first.plot(q % width, q // width, "o", color=colour, markeredgecolor="white", markersize=8)
        x, y = ((samples[q, :, i] + 1) * size / 2 - 0.5 for i, size in ((0, width), (1, height)))
        second.scatter(
            x.numpy(),
            y.numpy(),
            s=(4 + 120 * weights[q] / weights[q].max()).numpy(),
            color=colour,
            edgecolors="white",
            linewidths=0.4,
        )
        curves.plot(depths[q].numpy(), weights[q].numpy(), ".-", color=colour)
        curves.axvline(truth[q].item(), color=colour, linestyle="--", linewidth=1)
    curves.set_title("Attention by depth; dashed: the true depth", loc="left")
    curves.set_xlabel("depth")
    curves.set_xlim(NEAR, FAR)

    best = depths.gather(1, weights.argmax(1, keepdim=True))[:, 0]
    for axes, values, title in (
        (true, truth, "True depth"),
        (found, torch.where(seen, best, torch.nan), f"Depth of the largest weight, {peaks:.0%} right"),
    ):
        shades = dict(vmin=truth.min().item(), vmax=truth.max().item(), cmap="viridis_r", interpolation="nearest")
        image = axes.imshow(values.view(height, width).numpy(), **shades)
        axes.set_title(title, loc="left")
    figure.colorbar(image, ax=found, shrink=0.7, pad=0.02)

    of_row = slice(row * width, (row + 1) * width)
    lines = torch.linspace(1 / NEAR, 1 / FAR, 200)[:, None, None]  # the picture's rows, evenly spaced in 1/depth
    off, nearest = (1 / depths[of_row] - lines).abs().min(-1)
    shade = weights[of_row].gather(1, nearest.T).T
    sampled = seen[of_row] & (off < (1 / depths[of_row]).diff().abs().amax(-1))
    along.set_facecolor(PALE)
    across = (-0.5, width - 0.5, 1 / FAR, 1 / NEAR)
    along.imshow(
        torch.where(sampled, shade, torch.nan).numpy(),
        cmap="Greys",
        vmin=0,
        extent=across,
        aspect="auto",
        interpolation="nearest",
    )
    along.plot(range(width), (1 / truth[of_row]).numpy(), color=ORANGE, linewidth=1.5, label="true depth")
    along.set_title("Attention of the row's pixels, by depth", loc="left")
    along.set_xlabel("column of view 1")
    along.set_ylabel("depth")
    ticks = [depth for depth in (1.5, 2, 3, 4, 6) if NEAR <= depth <= FAR]
    along.set_yticks([1 / depth for depth in ticks], ticks)
    along.legend(loc="lower left")
    for axes in (first, second, true, found):
        axes.set_axis_off()
    figure.savefig(file, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--height", type=int, default=48)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--samples", type=int, default=32, help="along each epipolar line")
    options.add_argument("--channels", type=int, default=32)
    options.add_argument("--repeats", type=int, default=10, help="of the timing")
    options.add_argument("--picture", metavar="FILE", help="draw what was learnt (.png, .svg, .pdf); needs matplotlib")
    args = options.parse_args(argv)

    torch.manual_seed(0)
    matcher = Matcher(args.channels)
    unseen = render(args.height, args.width, args.samples)
    optimizer = torch.optim.Adam(matcher.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    print(
        f"Two views of {args.width} × {args.height} pixels, {args.samples} samples on each epipolar line, {args.channels} channels"
    )
    compare(matcher, unseen, args.repeats)

    start = time.perf_counter()
    for step in range(args.steps + 1):
        if step % max(1, args.steps // 5) == 0:
            peaks, share, chance = matched(matcher, unseen)
            passed = time.perf_counter() - start
            print(f"  step {step}, {passed:.0f} s: attention peaks at the true depth in {peaks:.0%} of the pixels,", end=" ")
            print(f"{share:.0%} of it is there ({chance:.0%} by chance)")
        if step < args.steps:
            optimizer.zero_grad()
            loss_of(matcher, render(args.height, args.width, args.samples), sonde.sample_attention).backward()
            optimizer.step()
            schedule.step()
    if args.picture:
        draw(args.picture, matcher, unseen, peaks)
        print(f"  picture: {args.picture}")


if __name__ == "__main__":
    main()
