"""Expected results of the kernels of ``sample_attention``, in plain PyTorch, with which a search compares its candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...jit.launch import from_halves
from .._device.layout import as_images
from .._epipolar.reference import dots, taps
from .gpu_configs import Problem
from .reference import sample_attention

Opt = Tensor | None


def expected(
    p: Problem, images: Tensor, values: Opt, samples: Tensor, queries: Tensor, depths: Opt, mask: Opt, *results: Opt
) -> dict[int, Tensor]:
    """The result, the log-sum-exp, and the result before rounding."""
    given = _operands(p, images, values, samples, queries, depths, mask)
    parts = [
        sample_attention(**part, views=p.V, num_octaves=p.octaves, scale=from_halves(*p.scale)) for _, part in _parts(p, given)
    ]
    out, lse, _ = (torch.cat(found, 2) for found in zip(*parts))
    return {6 + i: x for i, x in enumerate((out, lse, out)) if results[i] is not None}


def expected_gradients(p: Problem, tensors: tuple[Any, ...], **at: int) -> dict[int, Tensor]:
    """The results that the launch writes, at the positions `at`.

    Weights and gradients of scores are computed as in the kernels; the rest are derivatives of
    Σ d_scores · scores + Σ weights · (values · grad), with both held fixed.
    """
    images, values, samples, queries, depths, mask, grad, *rest = tensors
    lse, delta = (rest[1], (grad.to(p.wide) * rest[0].to(p.wide)).sum(-1)) if "delta" in at else rest[:2]
    wanted = {name: i for name, i in at.items() if tensors[i] is not None}
    given = _operands(p, images, values, samples, queries, depths, mask)
    scale, sums = from_halves(*p.scale), {}
    for name, i in wanted.items():
        like = given[name] if name in ("images", "values") else tensors[i]  # buffers of images may be flat
        sums[name] = torch.zeros(like.shape, dtype=p.wide, device=images.device)  # type: ignore[union-attr]
    if "delta" in wanted:
        sums["delta"] = delta
    for q, part in _parts(p, given):
        leaves = {k: x if x is None or k == "mask" else x.detach().requires_grad_() for k, x in part.items()}
        with torch.enable_grad():
            at_samples = leaves["samples"] if mask is None else torch.where(part["mask"][..., None], leaves["samples"], torch.nan)
            rows = leaves["queries"].repeat_interleave(p.V, 0)
            scores = dots(leaves["images"], at_samples, rows, leaves["depths"], p.octaves, p.wide)  # [B·V, h, Q, D]
            seen, live = taps(leaves["images"][:, : p.C] if values is None else leaves["values"], at_samples, p.wide)
            pulls = torch.einsum("bhqc,bcqd->bhqd", grad[:, :, q].to(p.wide).repeat_interleave(p.V, 0), seen)
        level, mean = (x[:, :, q].to(p.wide).repeat_interleave(p.V, 0)[..., None] for x in (lse, delta))
        weights = torch.where(live[:, None], (scores.detach() * scale - level).exp(), 0)
        d_scores = torch.where(live[:, None], weights * (pulls.detach() - mean) * scale, 0)
        for name, x in (("weights", weights), ("d_scores", d_scores)):
            if name in wanted:
                sums[name][:, :, q] = x
        names = [name for name in wanted if name not in ("delta", "weights", "d_scores")]
        if names:
            with torch.enable_grad():
                total = (d_scores * scores).sum() + (weights * pulls).sum()
            found = torch.autograd.grad(total, [leaves[name] for name in names], allow_unused=True)
            for name, x in zip(names, found):
                target = {"queries": sums[name][:, :, q]}.get(
                    name, sums[name] if name in ("images", "values") else sums[name][:, q]
                )
                target += 0 if x is None else x
    for name, stride in (("images", p.d_stride), ("values", p.d_v_stride)):
        if name in wanted and tensors[wanted[name]].dim() == 1:
            padded = torch.zeros_like(tensors[wanted[name]], dtype=p.wide)
            as_images(padded, sums[name].shape, stride).copy_(sums[name])
            sums[name] = padded
    return {wanted[name]: x for name, x in sums.items()}


def _operands(p: Problem, images: Tensor, values: Opt, samples: Tensor, queries: Tensor, depths: Opt, mask: Opt) -> dict[str, Opt]:
    """The operands in the reference's shapes and in the accumulation dtype."""
    channels, n = p.C + 2 * p.octaves, p.B * p.V
    images = images if images.dim() > 1 else as_images(images, (n, channels, p.H, p.W), p.stride)
    values = values if values is None or values.dim() > 1 else as_images(values, (n, p.C_v, p.H, p.W), p.v_stride)
    wide = {k: x if x is None else x.to(p.wide) for k, x in dict(samples=samples, queries=queries, depths=depths).items()}
    return dict(images=images.to(p.wide), **wide, values=None if values is None else values.to(p.wide), mask=mask)


def _parts(p: Problem, given: dict[str, Opt]) -> Iterator[tuple[slice, dict[str, Any]]]:
    """The operands, a few queries at a time to save memory."""
    step = max(1, (1 << 24) // max(1, p.B * p.V * p.D * max(p.C, p.C_v) * max(1, p.heads)))
    for first in range(0, p.Q, step):
        q = slice(first, first + step)
        part = {
            k: x if x is None or k in ("images", "values") else x[:, :, q] if k == "queries" else x[:, q] for k, x in given.items()
        }
        yield q, part
