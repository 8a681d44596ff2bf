"""Forward and backward passes over a feature pyramid; each operator supplies its kernels as a ``Member``.

Operands are ``features``, ``shapes`` and ``starts`` of the levels, ``locations`` and ``weights``; features, locations and weights
have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...jit.kernel import Tunable
from ...jit.steps import Pass
from ...op.dtypes import accumulator
from ...op.layout import outline
from ...op.plan import Determinism
from .._device.fixed_point import add_finish
from .._scatter.marked_rows import clear_marked, round_marked, rows_of
from .gpu_levels import Layout, Levels, LevelTable, layout_of, levels_of
from .gpu_segments import Problem as Segments
from .gpu_segments import add_rows_gradient
from .levels import ReadLevels

OPERANDS = ("features", "shapes", "starts", "locations", "weights")
Given = Mapping[str, Tensor | None]


class Member(NamedTuple):
    """What one pyramid operator supplies."""

    names: tuple[str, str, str]  # of features, locations and weights, in a plan
    shape: Callable[..., tuple[int, ...]]  # (features, weights) → shape of the result
    problem: Callable[..., Any]  # (features, weights, levels, layout, accumulator, option, wanted gradients) → kernel problem
    segments: Callable[..., Segments]  # the same without gradients → problem of the deterministic gradient
    value: Tunable
    gradients: Tunable
    total: Tunable | None = None  # adds up slices, if the problem has several
    mark: Tunable | None = None  # marks the feature rows that get a gradient, if they may be few
    soft: bool = False  # if the option is set, weights are logits


def forward_pass(op: Member, *args: Any, int64: bool) -> Pass | ReadLevels:
    """The pass that takes the operands, levels as numbers and an option. Operands may be meta tensors."""
    *operands, levels, option = args
    given = dict(zip(OPERANDS, operands))
    if _levels_on_host(given):
        return ReadLevels(partial(forward_pass, op, int64=int64), args, 1)
    features, locations, weights = _tensors(given)
    wide, layout, known = accumulator(features, locations, weights), layout_of(features, int64), _levels(given, tuple(levels))
    p = Pass(features.device, wide, given)
    operands = [_features(p, layout), *_described(p, known), p.contiguous("locations"), p.contiguous("weights")]
    problem, shape = op.problem(features, weights, known, layout, wide, option, ()), op.shape(features, weights)
    out, slices = p.buffer("out", shape, features.dtype), getattr(problem, "slices", 1)
    if slices == 1:
        p.launch(op.value, problem, [*operands, out], writes=["out"])
    else:
        assert op.total is not None
        sums = p.buffer("sums", (*shape[:2], slices, shape[2]), wide)
        p.launch(op.value, problem, [*operands, sums])
        p.launch(op.total, problem, [sums, out], writes=["out"])
    return p.returns(out).returning_one()


def backward_pass(op: Member, *args: Any, int64: bool, needs: Sequence[bool], deterministic: bool) -> Pass | ReadLevels:
    """The pass that takes the gradient of the result and the arguments of the forward pass, and returns the needed gradients."""
    *operands, levels, option = args
    given = dict(zip(("grad", *OPERANDS), operands))
    if _levels_on_host(given):
        return ReadLevels(partial(backward_pass, op, int64=int64, needs=needs, deterministic=deterministic), args, 2)
    features, locations, weights = _tensors(given)
    wide, layout, known = accumulator(features, locations, weights), layout_of(features, int64), _levels(given, tuple(levels))
    p = Pass(features.device, wide, given)
    by_segments = deterministic and needs[0]
    wants = [i for i, need in enumerate(needs) if need and not (by_segments and i == 0)]  # from ``op.gradients``
    found: list[str | None] = [None] * 3
    shapes, starts = _described(p, known)
    slots = dict(shapes=shapes, starts=starts, **{name: p.contiguous(name) or name for name in ("grad", "locations", "weights")})
    for i, (name, tensor) in enumerate((("locations", locations), ("weights", weights)), 1):
        if i in wants:
            found[i] = p.buffer(f"d_{name}", tensor.shape, tensor.dtype)
    if wants:
        problem = op.problem(features, weights, known, layout, wide, option, tuple(wants))
        reads = needs[1] or needs[2]
        operands = [slots[name] for name in ("shapes", "starts", "locations", "weights")]
        marks = None
        if 0 in wants:
            marked = features.dtype != wide and op.mark is not None
            found[0] = sums = p.buffer("d_features", features.shape, wide, fill=None if marked else 0)
            if marked:
                marks = _add_marks(p, op, problem, operands[:3], features, sums)
        p.launch(
            op.gradients, problem, [slots["grad"], _features(p, layout) if reads else None, *operands, *found],
            writes=[op.names[i] for i in wants], promise=Determinism.NONE if 0 in wants else Determinism.BATCH_INVARIANT,
        )  # fmt: skip
        if found[0] is not None and features.dtype != wide:
            found[0] = _add_rounding(p, features, found[0], marks)
    if by_segments:
        found[0] = out = p.buffer("d_features", features.shape, features.dtype)
        segments = op.segments(features, weights, known, layout, wide, option)
        if op.soft and option:
            slots["weights"] = _add_softmax(p, slots["weights"], weights)
        add_rows_gradient(p, segments, slots, out, op.names[:1])
    return p.returns(*(slot for slot in found if slot is not None))


def _add_marks(p: Pass, op: Member, problem: Any, operands: Sequence[str], features: Tensor, sums: str) -> str:
    """Only rows that receive a gradient are marked, cleared and read; the rest are written as zeros."""
    assert op.mark is not None
    marks = p.buffer("marks", features.shape[:2], torch.uint8, fill=0)
    p.launch(op.mark, problem, [*operands, marks])
    p.launch(clear_marked, rows_of(features), [sums, marks])
    return marks


def _add_rounding(p: Pass, features: Tensor, sums: str, marks: str | None) -> str:
    out, dense = p.buffer("d_features", features.shape, features.dtype), outline(features.shape)
    if marks is None:
        add_finish(p, sums, dense, out, dense)
    else:
        p.launch(round_marked, rows_of(features), [sums, out, marks])
    return out


def _add_softmax(p: Pass, slot: str, weights: Tensor) -> str:
    shape, wide = (*weights.shape[:3], weights.shape[3:].numel()), p.accumulator

    def softmax(logits: Tensor) -> Tensor:
        return torch.softmax(logits.flatten(3), -1, dtype=wide)

    return p.call("torch.softmax", softmax, [slot], [("softmax", shape, wide)], promise=Determinism.RUN_TO_RUN)[0]


def _levels_on_host(given: Given) -> bool:
    """Whether levels are CPU tensors beside GPU features, as in traced graphs."""
    features, shapes, starts = given["features"], given["shapes"], given["starts"]
    return shapes is not None and (shapes.device != features.device or starts.device != features.device)  # type: ignore[union-attr]


def _tensors(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    return given["features"], given["locations"], given["weights"]  # type: ignore[return-value]


def _levels(given: Given, levels: tuple[int, ...]) -> Levels:
    features, starts = given["features"], given["starts"]
    assert features is not None
    return levels_of(len(levels) // 3 if starts is None else starts.numel(), levels, features.shape[1])


def _features(p: Pass, layout: Layout) -> str:
    return p.copy("features", Tensor.contiguous) if layout.copy else "features"


def _described(p: Pass, levels: Levels) -> tuple[str, str]:
    """Slots of the level table, twice, or of the caller's shapes and starts."""
    if levels.table:
        find = LevelTable(levels.table, p.device)
        return (p.outside("levels", find.dtype, find),) * 2
    shapes, starts = p.contiguous("shapes"), p.contiguous("starts")
    if shapes is None or starts is None:  # no levels
        return (p.buffer("levels", [0], torch.int32),) * 2
    return shapes, starts
