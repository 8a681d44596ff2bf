"""GPU passes of ``sample_attention``; its kernels are in ``gpu_kernels``, sorted sums in ``_epipolar.gpu_segments``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from ...jit.launch import halves
from ...jit.steps import Pass
from ...op.dtypes import accumulator
from ...op.plan import Determinism
from .._epipolar import gpu as engine
from .._epipolar.gpu_kernels import Problem as Form
from .._epipolar.gpu_segments import add_images_gradient
from .gpu_configs import Problem
from .gpu_kernels import attend, attend_pixels, attend_queries
from .reference import scale_of

Opt = Tensor | None
FORCE_INT64 = False  # tests set it to use 64-bit offsets where 32 bits would do
PER_SAMPLE = ("samples", "queries", "depths", "mask")


def forward_pass(
    images: Tensor, samples: Tensor, queries: Tensor, depths: Opt, values: Opt, mask: Opt, views: int, octaves: int,
    scale: float | None,
) -> Pass:  # fmt: skip
    given = dict(images=images, samples=samples, queries=queries, depths=depths, values=values, mask=mask)
    p = Pass(images.device, accumulator(images, samples, queries, depths, values), given)
    problem, slots = _prepare(p, views, octaves, scale)
    dtype = (images if values is None else values).dtype
    rows = (problem.B, problem.heads, problem.Q)
    out, lse = p.buffer("out", (*rows, problem.C_v), dtype), p.buffer("lse", rows, p.accumulator)
    rounded = dtype != p.accumulator
    total = p.buffer("total", (*rows, problem.C_v if rounded else 0), p.accumulator)
    takes = [slots[name] for name in ("images", "values", *PER_SAMPLE)]
    p.launch(attend, problem, [*takes, out, lse, total if rounded else None], writes=["out"])
    return p.returns(out, lse, total)


def backward_pass(
    grad: Tensor, images: Tensor, samples: Tensor, queries: Tensor, depths: Opt, values: Opt, mask: Opt, views: int, octaves: int,
    scale: float | None, out: Tensor, lse: Tensor, total: Tensor, *, needs: Sequence[bool], deterministic: bool,
) -> Pass:  # fmt: skip
    given = dict(grad=grad, images=images, samples=samples, queries=queries, depths=depths, values=values, mask=mask)
    given |= dict(views=None, octaves=None, scale=None, out=out, lse=lse, total=total)  # placeholders: numbers have no slot
    wants = list(compress(("images", "samples", "queries", "depths", "values"), needs))
    p = Pass(images.device, accumulator(images, samples, queries, depths, values), given)
    pixels = {name: x for name, x in (("images", images), ("values", values)) if name in wants and x is not None}
    by_segments = deterministic and bool(pixels)
    problem, slots = _prepare(p, views, octaves, scale, () if by_segments else list(pixels))
    grad_slot, lse_slot = p.contiguous("grad"), p.contiguous("lse")
    total_slot = p.contiguous("out" if out.dtype == p.accumulator else "total")
    takes = [slots[name] for name in ("images", "values", *PER_SAMPLE)]

    found: dict[str, str | None] = {}
    for name in ("samples", "queries", "depths"):
        operand = given[name]
        if name in wants and operand is not None:
            found[name] = p.buffer(f"d_{name}", operand.shape, operand.dtype)
    delta = p.buffer("delta", (problem.B, problem.heads, problem.Q), p.accumulator)
    p.launch(
        attend_queries, problem._replace(d_stride=0, d_v_stride=0),
        [*takes, grad_slot, total_slot, lse_slot, found.get("queries"), delta], writes=["queries"] if "queries" in wants else [],
    )  # fmt: skip

    unread = "depths" in found and not octaves  # their gradient is zero
    touched = [name for name in ("samples", "depths") if name in found and not (name == "depths" and unread)]
    layouts = {name: engine.sums_layout(engine.layout_of(x, problem.Q * problem.D), by_segments) for name, x in pixels.items()}
    sums = {name: engine.gradient_buffer(p, name, x, layouts[name], by_segments) for name, x in pixels.items()}
    scores = weights = None
    if by_segments:
        shape = problem.B * problem.V, problem.heads, problem.Q, problem.D
        scores, weights = (p.buffer(name, shape, p.accumulator) for name in ("d_scores", "weights"))
    if touched or pixels:
        added = {} if by_segments else sums
        p.launch(
            attend_pixels, problem,
            [*takes, grad_slot, lse_slot, delta, added.get("images"), added.get("values"),
             *(found.get(name) if name in touched else None for name in ("samples", "depths")), scores, weights],
            writes=[*added, *touched], promise=Determinism.NONE if added else Determinism.BATCH_INVARIANT,
        )  # fmt: skip
    if by_segments:
        strides = {name: engine.stride_of(layouts[name], x.shape[1], p.accumulator) for name, x in pixels.items()}
        _add_by_segments(p, problem, slots, grad_slot, scores, weights, sums, strides)
    for name, x in pixels.items():
        found[name] = engine.round_gradient(p, name, x, sums[name], layouts[name])
    if unread:
        p.call("torch.zero_", Tensor.zero_, [found["depths"]], writes=["depths"])
    return p.returns(*(found[name] for name in wants))  # type: ignore[arg-type]


def _add_by_segments(
    p: Pass, problem: Problem, slots: Mapping[str, str | None], grad: str | None, scores: str | None, weights: str | None,
    sums: Mapping[str, str], strides: Mapping[str, int],
) -> None:  # fmt: skip
    """Add the gradients of images (d_scores · queries) and of values (weights · grad) in a fixed order."""
    samples = slots["samples"]
    if slots["mask"] is not None:  # masked samples get NaN coordinates
        like = p.given["samples"]
        assert like is not None
        seen = lambda x, mask: torch.where(mask[..., None], x, torch.nan)  # noqa: E731
        (samples,) = p.call("torch.where", seen, [samples, slots["mask"]], [("samples seen", like.shape, like.dtype)])
    n = problem
    form = Form(n.B * n.V, n.H, n.W, n.Q, n.D, 0, 0, 0, n.heads, n.octaves, n.wide, n.int64, True)
    of_scores = dict(samples=samples, coef=scores, rows=slots["queries"], depths=slots["depths"])
    of_weights = dict(coef=weights, rows=grad)
    if "images" in sums:
        more = of_weights if slots["values"] is None else {}
        shape = form._replace(C=n.C + 2 * n.octaves, d_stride=strides["images"])
        add_images_gradient(p, shape, of_scores, sums["images"], ["images"], views=n.V, more=more)
    if "values" in sums:
        shape = form._replace(C=n.C_v, octaves=0, d_stride=strides["values"])
        add_images_gradient(p, shape, dict(of_weights, samples=samples), sums["values"], ["values"], views=n.V)


def _prepare(
    p: Pass, views: int, octaves: int, scale: float | None, sums: Sequence[str] = ()
) -> tuple[Problem, dict[str, str | None]]:
    """The problem, and slots of the operands as kernels read them; `sums` names those whose gradient is added by atomics."""
    images, values, queries, samples = (p.given[name] for name in ("images", "values", "queries", "samples"))
    assert images is not None
    assert queries is not None
    assert samples is not None
    B, h, Q, C = queries.shape
    H, W, D = *images.shape[2:], samples.shape[2]
    slots = {name: p.contiguous(name) for name in PER_SAMPLE}
    strides, d_strides = {"values": 0}, {"images": 0, "values": 0}
    widest = 0
    for name, x in (("images", images), ("values", values)):
        slots[name] = None
        if x is not None:
            layout = engine.layout_of(x, Q * D)
            slots[name] = engine.as_read(p, name, x, layout)
            strides[name] = engine.stride_of(layout, x.shape[1], x.dtype)
            if name in sums:
                d_strides[name] = engine.stride_of(layout, x.shape[1], p.accumulator)
            widest = max(widest, x.shape[1], strides[name], engine.stride_of(layout, x.shape[1], p.accumulator))
    problem = Problem(
        B, views, H, W, Q, D, C, C if values is None else values.shape[1], strides["images"], strides["values"],
        d_strides["images"], d_strides["values"], h, octaves, slots["mask"] is not None, images.element_size(), p.accumulator,
        FORCE_INT64 or H * W * widest >= 2**31, halves(scale_of(scale, queries)),
    )  # fmt: skip
    return problem, slots
