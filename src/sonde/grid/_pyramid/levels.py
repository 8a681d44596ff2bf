"""Descriptions of the levels of a feature pyramid: conversion and checks."""

from __future__ import annotations

import marshal
import math
import reprlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...op import checks
from ...op.cache import CallCache
from ...op.plan import Kernel
from ...op.torch_private import is_fake, is_wrapped

INTEGERS = (torch.int64, torch.int32)
LARGEST = 2**31 - 1  # largest height and width, so that kernels do not overflow
Described = tuple[Tensor | None, Tensor | None, Sequence[int]]  # tensors, or (h, w, start) of each level


class Names(NamedTuple):
    """Argument names for error messages."""

    shapes: str = "spatial_shapes"
    starts: str = "level_starts"
    counts: str = "weights"  # the argument that gives the number of levels


OF_OPERATORS = Names()
_known: CallCache[Described] = CallCache()


def described(
    name: str, spatial_shapes: Any, level_starts: Any, dims: str, sizes: Sequence[int] | None, names: Names = OF_OPERATORS
) -> Described:
    """The levels in the form of an operator's schema: numbers if the host knows them, otherwise tensors that are not read here.

    `dims` names the dimensions of the levels, ``"cams L"`` or ``"L"``; `sizes` has their sizes, taken from the weights.
    """
    try:  # bytes, because 1 == 1.0
        key = None if torch.compiler.is_compiling() else (dims, sizes, marshal.dumps((spatial_shapes, level_starts), 2))
        if sizes and False in [type(n) is int for n in sizes]:  # symbolic sizes of a trace
            key = None
    except ValueError:  # not plain numbers
        key = None
    found = _known.get(key)
    if found is not None:
        return found
    if not (_on_host(spatial_shapes) and _on_host(level_starts)):
        if isinstance(spatial_shapes, Tensor) and isinstance(level_starts, Tensor):
            return spatial_shapes, level_starts, ()
        kinds = [type(x).__name__ if _on_host(x) else f"a tensor on {x.device}" for x in (spatial_shapes, level_starts)]
        raise ValueError(
            f"{name}: {names.shapes} and {names.starts} must both be tensors or both known on the host; got {' and '.join(kinds)}. "
            f"Compute {names.starts} where {names.shapes} is, or pass {names.shapes} as a tuple of integers and {names.starts}=None"
        )
    if isinstance(spatial_shapes, Tensor) or isinstance(level_starts, Tensor):
        shapes, starts = (listed(name, n, x) for n, x in ((names.shapes, spatial_shapes), (names.starts, level_starts)))
        return described(name, shapes, starts, dims, sizes, names)
    shape, levels = _read(name, spatial_shapes, level_starts, dims, names)
    if sizes is not None and tuple(sizes) != shape and (levels or 0 not in sizes):
        expected = ", ".join(f"{letter}={size}" for letter, size in zip(dims.split(), sizes))
        wanted = f"[{', '.join(dims.split())}, 2] with {expected} (from {names.counts})"
        raise ValueError(f"{name}: {names.shapes} must be {wanted}; got {[*shape, 2]}")
    found = None, None, levels
    return _known.put(key, found) if key else found


def check(
    name: str,
    argument: str,
    features: Tensor,
    described: Described,
    dims: str,
    counts: Sequence[int],
    names: Names = OF_OPERATORS,
) -> None:
    """Check that levels fit the rows of `features`, called `argument` in errors; of tensors, only shape, dtype and device."""
    spatial_shapes, level_starts, levels = described
    rows = features.shape[1]
    if spatial_shapes is not None or level_starts is not None:
        for which, tensor, more in ((names.shapes, spatial_shapes, ["2"]), (names.starts, level_starts, [])):
            expected, shape = ", ".join([*dims.split(), *more]), (*counts, *map(int, more))
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: {which} must be a tensor [{expected}], as the other is; got {type(tensor).__name__}")
            _integer(name, which, tensor)
            if tensor.device != features.device and tensor.device.type != "cpu":
                raise ValueError(
                    f"{name}: {which} must be on {features.device}, where {argument} is; got {tensor.device}. "
                    f"Use {which}.to({argument}.device), or integers of Python"
                )
            if tuple(tensor.shape) != shape:
                wanted = f"[{expected}] = {list(shape)} (from {names.counts})"
                raise ValueError(f"{name}: {which} must be {wanted}; got {list(tensor.shape)}")
        return
    if len(levels) != 3 * math.prod(counts):
        raise ValueError(f"{name}: levels must be (h, w, start) of {list(counts)} levels; got {reprlib.repr(levels)}")
    sizes = list(zip(levels[::3], levels[1::3]))
    for size in sizes:
        if not all(0 <= n <= LARGEST for n in size):
            raise ValueError(f"{name}: {names.shapes} must be (h, w) with sizes from 0 to 2**31 - 1; got {size}")
    total = sum(h * w for h, w in sizes)
    if total != rows:
        raise ValueError(
            f"{name}: {names.shapes} must sum to the {rows} rows of {argument}, {list(features.shape)}; "
            f"got {reprlib.repr(sizes)} with {total} pixels"
        )
    for (h, w), start in zip(sizes, levels[2::3]):
        if not 0 <= start <= rows - h * w:
            raise ValueError(
                f"{name}: {names.starts} must leave every level inside the {rows} rows of {argument}; got a level of "
                f"{h}*{w} = {h * w} rows that starts at {start}. {names.starts}=None is the running sum"
            )
    ranges = [(start, start + h * w) for (h, w), start in zip(sizes, levels[2::3])]
    if not _ascending(ranges) and not _ascending(sorted((a, b) for a, b in ranges if a < b)):  # any order is allowed
        raise ValueError(
            f"{name}: {names.starts} must give every level rows of its own; got {reprlib.repr(list(levels[2::3]))} for the sizes "
            f"{reprlib.repr(sizes)}, which overlap. {names.starts}=None is the running sum"
        )


def _ascending(ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether each range ends before the next one begins. Of a running sum this is known even if sizes are symbolic."""
    return all(end <= start for (_, end), (start, _) in pairwise(ranges))


def check_maps(name: str, **groups: Any) -> None:
    """Check maps ``[B, cams, C, H, W]``, one per level, of one or several groups of cameras, given as argument name = maps."""
    for argument, maps in groups.items():
        if not isinstance(maps, (list, tuple)) or not maps:
            raise TypeError(
                f"{name}: {argument} must be a list of tensors [B, cams, C, H, W], one for each level; got {checks.kind(maps)}"
            )
    operands: dict[str, tuple[Any, str]] = {}
    for g, (argument, maps) in enumerate(groups.items()):
        own = "" if len(groups) == 1 else f"{g}_"  # numbers of cameras and sizes may differ between groups
        operands.update({f"{argument}[{i}]": (x, f"B cams{own[:-1]} C H{own}{i} W{own}{i}") for i, x in enumerate(maps)})
    checks.shapes(name, **operands)
    (first, (like, _)), *others = operands.items()
    for argument, (x, _) in others:
        if x.dtype != like.dtype:
            raise TypeError(
                f"{name}: {argument} must be {like.dtype}, as {first} is; got {x.dtype}. Use {argument}.to({first}.dtype)"
            )
    levels = {argument: len(maps) for argument, maps in groups.items()}
    if len(set(levels.values())) > 1:
        counts = ", ".join(f"{count} in {argument}" for argument, count in levels.items())
        raise ValueError(f"{name}: every group of cameras must have the same number of levels; got {counts}")


def feature_maps_format(name: str, maps: Any, argument: str = "maps") -> tuple[Tensor, tuple, tuple]:
    check_maps(name, **{argument: maps})
    features = torch.cat([x.flatten(3).transpose(2, 3) for x in maps], 2).flatten(1, 2)
    shapes = tuple((x.shape[3], x.shape[4]) for x in maps)
    starts, start = [], 0
    for _ in range(maps[0].shape[1]):
        camera = []
        for h, w in shapes:
            camera.append(start)
            start += h * w
        starts.append(tuple(camera))
    return features, (shapes,) * len(starts), tuple(starts)


def numbers(described: Described) -> Sequence[int]:
    """(h, w, start) of each level, on the host; read from tensors, unchecked, if levels are tensors."""
    spatial_shapes, level_starts, levels = described
    if spatial_shapes is None or level_starts is None:
        return levels
    return torch.cat([spatial_shapes.long(), level_starts.long()[..., None]], -1).flatten().tolist()


class ReadLevels:
    """A pass whose levels are tensors on the host, as in traced graphs: each call reads them.

    `record` makes the pass once levels are numbers, from arguments ``(…, None, None, …, levels, option)``; the two None are
    shapes and starts, at position `at`.
    """

    def __init__(self, record: Callable[..., Any], args: Sequence[Any], at: int) -> None:
        self.record, self.args, self.at = record, args, at

    def bind(self) -> Callable[..., Any]:
        known: CallCache[Callable] = CallCache()
        record, at = self.record, self.at  # not self, which would keep the first call's tensors alive

        def run(*args: Any) -> Any:
            levels = tuple(numbers((args[at], args[at + 1], ())))
            args = _with_numbers(args, at, levels)
            return (known.get(levels) or known.put(levels, record(*args).bind()))(*args)

        return run

    def plan(self, phase: Literal["forward", "backward"]) -> list[Kernel]:
        shapes, starts = self.args[self.at : self.at + 2]
        unknown = shapes.is_meta or is_fake(shapes)
        levels = (0, 0, 0) * starts.numel() if unknown else tuple(numbers((shapes, starts, ())))
        return self.record(*_with_numbers(self.args, self.at, levels)).plan(phase)


def _with_numbers(args: Sequence[Any], at: int, levels: tuple[int, ...]) -> tuple:
    return *args[:at], None, None, *args[at + 2 : -2], levels, args[-1]


def _on_host(x: Any) -> bool:
    """Whether values can be read without a device sync or a graph break."""
    if not isinstance(x, Tensor):
        return True
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return False
    return type(x) in (Tensor, torch.nn.Parameter) and not is_wrapped(x)


def listed(name: str, argument: str, x: Any) -> Any:
    """`x` as nested lists, if it is an integer tensor."""
    if not isinstance(x, Tensor):
        return x
    _integer(name, argument, x)
    return x.tolist()


def _read(name: str, spatial_shapes: Any, level_starts: Any, dims: str, names: Names) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the levels, and (h, w, start) of each."""
    shape, sizes = _integers(name, names.shapes, spatial_shapes, f"{dims} 2")
    h, w = sizes[::2], sizes[1::2]
    if level_starts is None:
        starts = [0] * len(h)
        for i in range(1, len(h)):
            starts[i] = starts[i - 1] + h[i - 1] * w[i - 1]
    else:
        of_starts, starts = _integers(name, names.starts, level_starts, dims)
        if of_starts != shape[:-1]:
            expected = f"[{', '.join(dims.split())}] = {list(shape[:-1])} (from {names.shapes})"
            raise ValueError(f"{name}: {names.starts} must be {expected}; got {list(of_starts)}")
    return shape[:-1], tuple([number for level in zip(h, w, starts) for number in level])


def _integers(name: str, argument: str, value: Any, pattern: str) -> tuple[tuple[int, ...], list[int]]:
    """The shape of nested sequences of integers, and the integers, flat."""
    letters = pattern.split()
    kind = f"{name}: {argument} must be integers [{', '.join(letters)}], in nested tuples or an int64 tensor"
    sizes, numbers = [], [value]
    for letter in letters:
        if not all(isinstance(x, (list, tuple)) for x in numbers):
            raise TypeError(f"{kind}; got {reprlib.repr(value)}")
        lengths = [len(x) for x in numbers] or [2 if letter == "2" else 0]
        if min(lengths) != max(lengths) or (letter == "2" and lengths[0] != 2):
            raise ValueError(f"{kind}; got {reprlib.repr(value)}")
        sizes.append(lengths[0])
        numbers = [y for x in numbers for y in x]
    if not all(isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool) for x in numbers):
        raise TypeError(f"{kind}; got {reprlib.repr(value)}")
    return tuple(sizes), numbers


def _integer(name: str, argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in INTEGERS:
        raise TypeError(
            f"{name}: {argument} must be an int64 or int32 tensor, or integers of Python; got {tensor.dtype}. Use {argument}.long()"
        )
