"""Public ``PointIndex``: points sorted once for many searches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....op import checks, plan
from ....op.checks import in_memory
from ....op.plan import Impl
from ....op.register import operator
from ....op.torch_private import outside_of_transforms, unwrapped, version
from ..checks import implementation, offsets, plain
from ..hash import point_hash
from . import reference

NAME = "PointIndex.build"
REMEDY = "build it again with PointIndex.build(points)"


def _check(points: Tensor, point_offsets: Tensor | None) -> dict[str, int]:
    n = checks.shapes("point_index", points=(points, "B N D"))
    if point_offsets is not None and point_offsets.ndim != 1:
        raise ValueError(f"point_index: point_offsets must be a vector; got {list(point_offsets.shape)}")
    return n


def _fake(points: Tensor, point_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    n = _check(points, point_offsets)
    segments = 1 if point_offsets is None else point_offsets.shape[0] - 1
    boxes = points.new_empty(n["B"], reference.nodes(n["N"], segments), 2, n["D"])
    return points.new_empty(n["B"], n["N"], dtype=torch.int32), points.new_empty(points.shape), boxes


_point_index = operator(
    "point_index(Tensor points, Tensor? point_offsets) -> (Tensor, Tensor, Tensor)",
    package=__package__,
    reference=reference.point_index,
    check=_check,
    fake=_fake,
    differentiable=(),
    unbatched=("point_offsets",),
    no_grad=(0, 1, 2),
)


def build(points: Tensor, point_offsets: Tensor | None, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    """The index of canonical points ``[B, N, D]``."""
    return _point_index(points, point_offsets, impl=impl)


class Memory:
    """Identifies the memory of points: storage, address, strides and version counter. Keeps nothing alive."""

    def __init__(self, points: Tensor):
        self.storage = weakref.ref(points.untyped_storage())  # once it is freed, its address may be reused
        self.state = self.now(points)

    @staticmethod
    def now(points: Tensor) -> tuple:
        return points.data_ptr(), points.stride(), version(points)

    def holds(self, points: Tensor) -> bool:
        """Whether `points`, of the same shape and dtype, are the same memory and were not written to since."""
        return self.storage() is points.untyped_storage() and self.state == self.now(points)

    def __deepcopy__(self, _memo: dict) -> Memory:
        return self

    def __reduce__(self) -> tuple:
        return _unknown_memory, ()


def _unknown_memory() -> Memory:
    """The memory of an unpickled index: matches no points, which have certainly moved."""
    return Memory(torch.empty(0, device="cpu"))


def _seen(points: Tensor) -> tuple[Tensor | None, set[int]]:
    """The plain tensor behind `points`, or None if it is traced or mapped, and the ``torch.vmap`` levels that map it."""
    levels: set[int] = set()
    if torch.compiler.is_compiling():
        return None, levels
    points, levels = unwrapped(points)
    known = not levels and type(points) in (Tensor, torch.nn.Parameter) and in_memory(points)
    return points if known else None, levels


def _planned() -> bool:
    """Whether only a plan is being recorded, so that nothing may be launched."""
    return not torch.compiler.is_compiling() and plan.recording()


def _hash_of(points: Tensor, impl: str) -> Tensor:
    """The hash ``[B]`` of the caller's points."""
    seen = _seen(points)[0]
    if seen is None:
        return point_hash(_rows(points), impl=impl)
    return outside_of_transforms(lambda x: point_hash(_rows(x), impl=impl), seen)  # it is only compared, so must not be wrapped


def _rows(points: Tensor) -> Tensor:
    return points if points.ndim == 3 else points.unsqueeze(0)


class PointIndex(NamedTuple):
    """A spatial index: points sorted so that neighbours are close in memory, with bounding boxes. Build it once, use it often.

    It works for every radius and every k, forward and backward, on the points it was built from; passing it changes no bit of
    a result. A call checks that shape, dtype and device are those of its points and, outside of ``torch.compile``, that the
    memory, strides and version counter are the same: after an optimiser step, build the index again. Writes that the version
    counter misses (through ``.data``, NumPy, or on inference tensors) are detected by a hash of the points' bits. On CPUs, and
    in ``radius_search``, the call then raises; on GPUs and in compiled graphs, where checking would sync, indices and counts are
    −1, and distances, sums and gradients NaN. For points mapped by ``torch.vmap``, build the index inside the mapped function.

    Example:
        >>> import torch, sonde
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
        >>> index = sonde.PointIndex.build(points)
        >>> sonde.knn(torch.tensor([[0.9, 0.0]]), points, 2, index=index).indices
        tensor([[1, 0]])
    """

    order: Tensor  # [B, N] int32
    sorted: Tensor  # [B, N, D]
    boxes: Tensor  # [B, nodes, 2, D]
    hash: Tensor  # [B] int64, of the caller's points
    offsets: Tensor | None  # [S + 1], if the points are ragged
    shape: tuple[int, ...]  # of the caller's points, like dtype and memory
    dtype: torch.dtype
    memory: Memory | None
    impl: str

    def __repr__(self) -> str:
        return f"PointIndex(shape={list(self.shape)}, dtype={self.dtype}, device={self.sorted.device}, impl={self.impl!r})"

    @staticmethod
    def build(points: Tensor, *, batch: Tensor | Sequence[int] | None = None, impl: Impl = "auto") -> PointIndex:
        """Build the index of points ``[N, D]`` or ``[B, N, D]``; for ragged points, `batch` has the offsets ``[S + 1]``."""
        batched = isinstance(points, Tensor) and points.ndim == 3
        n = checks.shapes(NAME, points=(points, "B N D" if batched else "N D"))
        if n["D"] == 0:
            raise ValueError(f"{NAME}: points must have at least one dimension; got {list(points.shape)}")
        if batch is not None and batched:
            raise ValueError(f"{NAME}: batch must be None for batched points [B, N, D]; give ragged points as [N, D]")
        segments = None if batch is None else offsets(NAME, "batch", batch, n["N"], points.device)
        chosen = implementation(NAME, impl, points, n["D"])
        dtype = torch.promote_types(points.dtype, torch.float32)
        canonical = _rows(points).detach().to(dtype).contiguous()
        made, seen = build(canonical, segments, chosen), _seen(points)[0]
        bits = points.new_zeros(canonical.shape[:1], dtype=torch.int64) if _planned() else _hash_of(points, chosen)
        memory = None if seen is None else Memory(seen)
        return PointIndex(*made, bits, segments, tuple(points.shape), points.dtype, memory, chosen)

    def checked(self, name: str, points: Tensor, dtype: torch.dtype, offsets: Tensor | None) -> PointIndex | None:
        """Raises unless the index was built from `points`; None if its dtype is not the one that the search uses."""
        if not isinstance(self, PointIndex):
            raise TypeError(f"{name}: index must be a PointIndex; got {type(self).__name__}. Use PointIndex.build(points)")
        for what, mine, theirs in (
            ("shape", list(self.shape), list(points.shape)),
            ("dtype", self.dtype, points.dtype),
            ("device", self.sorted.device, points.device),
        ):
            if mine != theirs:
                raise ValueError(
                    f"{name}: index must be that of points, of {what} {theirs}; got {mine}. Did points change? Then {REMEDY}"
                )
        segments = None if self.offsets is None else self.offsets.shape[0] - 1
        if segments != (None if offsets is None else offsets.shape[0] - 1):
            raise ValueError(f"{name}: index must be built with the same batch as is searched; {REMEDY}")
        if (
            offsets is not None
            and self.offsets is not None
            and plain(offsets)
            and offsets.device.type == "cpu"
            and not torch.equal(offsets, self.offsets)
        ):
            raise ValueError(f"{name}: index must be built with the same batch as is searched; {REMEDY}")
        seen, levels = _seen(points)
        if levels != _seen(self.sorted)[1]:
            raise ValueError(f"{name}: index must be mapped by torch.vmap where points are; build it inside of the mapped function")
        if seen is not None and self.memory is not None and not self.memory.holds(seen):
            raise ValueError(f"{name}: index must be that of these points; they were moved or written since it was built; {REMEDY}")
        return self if self.sorted.dtype == dtype else None

    def fresh(self, name: str, points: Tensor, waits: bool) -> Tensor | None:
        """Compare the hash of `points` with the one at build time: returns None if they match, raises if they do not.

        If the host cannot read it (tracing, mapping, or a GPU, unless the caller `waits` for it anyway), returns a tensor ``[B]``.
        """
        if _planned():
            return None
        now = _hash_of(points, self.impl)
        seen, then = _seen(points)[0], _seen(self.hash)[0]
        if seen is None or then is None or not (waits or seen.device.type == "cpu"):
            return now == self.hash
        if not outside_of_transforms(torch.equal, now, then):
            raise ValueError(f"{name}: index must be that of these points; they were moved or written since it was built; {REMEDY}")
        return None
