"""The one table of operators: what commands, tests, release builds and benchmarks know about each.

Importing it loads no family: an entry's methods import what they need. An operator with an entry takes part in all of them.
Its folder has the same files as the others (``CONTRIBUTING.md``); its ``cases.py`` has ``SMALL``, ``BENCH``, ``TARGETS``, ``make``,
``eager`` and ``count`` (the last two unless bench refuses it), and ``SMALL`` has at least the cases named in ``EDGES``. If the
reference needs too much memory for real cases, ``definition`` computes the same in pieces, for the checks of ``bench``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

EDGES = (
    "odd_sizes",
    "hostile",
    "one_pixel",
)  # cases that every operator has: odd sizes; extreme values; all samples in one place, or all sizes 1


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator: where it lives, and the traits by which its users treat it differently from others."""

    name: str  # as in its schema
    family: str
    folder: str = ""  # in the family, with dots; default: its name
    title: str = ""  # how users call it, below ``sonde``; default: its name
    engine: str = ""  # the family's folder that does its work, if operators share one
    converts: bool = False  # ``api.arguments`` converts the public function's arguments to the schema's

    # -- arguments, by name
    image: str = ""  # an image, which may be channels-last; always the first
    samples: str = ""  # coordinates; the float64 truth must use the same pixel positions (in pyramids' cases none round)
    views: bool = False  # images of one more dimension are several views, not volumes
    align: str = ""  # the argument that says whether ±1 are pixel centres
    searched: tuple[str, ...] = ()  # queries and points of a search; the float64 truth must use the same neighbours
    places: tuple[str, ...] = ()  # arguments that are positions or widths, not values; the last holds the positions of the data
    exponents: tuple[str, ...] = ()  # arguments that must not be positive
    factors: tuple[str, int] | None = None  # an argument that multiplies the terms of a sum, and the summed dimension in it
    summed: tuple[str, ...] = ()  # one number for many rows: its gradient is a long sum, which may cancel
    # The dimension of each argument that counts queries. Queries are independent, so a truth is computed in slices of them.
    queries: Mapping[str, int] = field(default_factory=dict)
    result: int = 0  # the same dimension of the result

    # -- results
    results: tuple[str, ...] = ("out",)
    graded: str = "out"  # the one with a gradient, if any
    returns_more: bool = False  # with some option it returns a tuple with more than that
    keeps_layout: bool = False  # a channels-last input gives a channels-last result
    any_rank: bool = False  # it takes tensors with any number of leading dimensions
    alone: bool = False  # it has a single tensor, so no other tensor fixes its sizes
    linear: bool = False  # its gradients do not depend on its arguments
    by_torch: bool = False  # on CPUs torch computes it, with threads that a forked process lacks
    rounded: bool = False  # in half precision, factors are rounded before they are multiplied, as matrix units require
    broadcasts: bool = False  # a batch of one is shared by all rows of the other argument
    sees_everything: bool = False  # no point is too far away to count
    sizes_from_data: bool = False  # the results' sizes depend on values
    atomic: bool = True  # on GPUs some gradient is summed by atomics, unless determinism is asked for

    # -- sizes of cases
    letters: Mapping[str, str] = field(default_factory=dict)  # its own names for the sizes Q, C and D
    fixed: tuple[str, ...] = ()  # sizes that are static in a compiled graph
    integers: tuple[str, ...] = ()  # sizes passed as integers, not read from a tensor: constants in an export
    as_given: tuple[str, ...] = ()  # sizes that random tests leave as the case has them, since others follow from them
    least: Mapping[str, int] = field(default_factory=dict)  # the smallest value of a size, where that is not 0

    # -- cases
    typical: str = ""  # a real workload of medium size, which demo runs
    on_cpu: Mapping[str, Any] = field(default_factory=dict)  # the sizes that demo scales down on CPUs
    vanishing: tuple[str, ...] = ()  # small cases whose gradients cancel to rounding errors
    checked: int | None = None  # how many queries a benchmark checks, where all would take too long

    # -- what a default test run skips
    interpreted: bool = False  # interpreted on behalf of all operators, since Triton's interpreter takes minutes for each
    in_full: tuple[str, ...] | None = None  # small cases interpreted in every dtype and both modes, the rest in float32; None: all
    interpreted_cases: tuple[str, ...] | None = None  # small cases that are interpreted; None: all
    registered_like: str = ""  # registered in the same way as this operator, whose tests of torch's machinery cover both
    computes_like: str = ""  # runs on the same engine as this operator, whose tests of the kernels cover both

    # -- commands
    gathers: bool = False  # its forward floor is a kernel that reads the same pixels and computes nothing
    refuses: Mapping[str, str] = field(default_factory=dict)  # commands that do not apply to it, and why

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.folder or self.name)
        object.__setattr__(self, "title", self.title or self.name)

    def __repr__(self) -> str:
        return self.path

    # -- where it lives

    @property
    def path(self) -> str:
        return f"{self.family}.{self.name}"

    @property
    def package(self) -> str:
        return f"{__package__}.{self.family}.{self.folder}"

    def module(self, file: str = "") -> ModuleType:
        return import_module(self.package + file)

    def kernels(self, impl: str) -> ModuleType:
        """The module that implements it: ``gpu`` or ``cpu``."""
        return self.module({"triton": ".gpu", "numba": ".cpu"}[impl])

    def shared(self, file: str) -> ModuleType | None:
        """A module of its engine; None if it has none."""
        return import_module(f"{__package__}.{self.family}.{self.engine}{file}") if self.engine else None

    # -- its functions

    @cached_property
    def public(self) -> Callable[..., Any]:
        """The function that users call."""
        found: Callable[..., Any] = attrgetter(self.title)(import_module(f"{__package__}.{self.family}"))
        return found

    @cached_property
    def op(self) -> Any:
        """The registered operator, as ``operator()`` returned it."""
        return getattr(self.module(".api"), f"_{self.name}")

    @property
    def definition(self) -> Callable[..., Any]:
        """The reference as a function of the schema's arguments."""
        found: Callable[..., Any] = getattr(self.module(".reference"), self.name)
        return found

    @cached_property
    def arguments(self) -> list[str]:
        """The public function's arguments except `impl`."""
        return [name for name in inspect.signature(self.public).parameters if name != "impl"]

    def registered(self, *args: Any) -> tuple[Any, ...]:
        """The schema's arguments, from those of the public function."""
        return tuple(self.module(".api").arguments(*args)) if self.converts else args

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The public function with all arguments by position, as cases have them; returns the result with a gradient.

        Distances of missing neighbours become 0 in place of infinity, so that results can be compared.
        """
        public, title, (plain, options) = self.public, self.title, self._parted
        least = sum(p.default is p.empty for p in inspect.signature(public).parameters.values())

        def by_position(*args: Any, impl: Any = "auto") -> Any:
            if not least <= len(args) <= plain + len(options):
                raise TypeError(f"{title}: {least} to {plain + len(options)} arguments expected, got {len(args)}")
            return public(*args[:plain], **dict(zip(options, args[plain:])), impl=impl)

        return self.of(by_position if options else public)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which returns what the public one does, reduced to one comparable result as in ``function``."""
        if len(self.results) == 1 and not self.returns_more:
            return function
        pick, masks = self.pick, bool(self.searched)

        def call(*args: Any, **options: Any) -> Any:
            out = pick(function(*args, **options))
            return out.where(out < float("inf"), 0) if masks else out

        return call

    @cached_property
    def pick(self) -> Callable[..., Any]:
        """Picks the result that has a gradient from what the public function or ``eager`` returns; all tensors if none has."""
        count, at = len(self.results), self.results.index(self.graded) if self.graded else None
        if self.returns_more:
            return lambda out: out[0] if isinstance(out, tuple) else out
        if count == 1:
            return lambda out: out
        return lambda out: tuple(out[:count]) if at is None else out[at]

    def call(self, impl: str) -> Callable[..., Any]:
        """``function`` with one implementation."""
        return partial(self.function, impl=str(impl))

    @property
    def reference(self) -> Callable[..., Any]:
        return self.call("reference")

    @property
    def defined(self) -> Callable[..., Any]:
        """The reference, called directly rather than through the registration where that gives the same result."""
        if self.searched:
            return self.reference

        def definition(*args: Any) -> Any:
            out = self.definition(*self.registered(*args))
            return out[0] if isinstance(out, tuple) and len(self.results) == 1 else out  # the others are for the backward pass

        return definition

    def written(self, args: Sequence[Any], impl: str) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The call as a user writes it, for timing: the public function with its options by keyword, and its other arguments."""
        plain, options = self._parted
        call = partial(self.public, **dict(zip(options, args[plain:])), impl=impl)
        pick = self.pick
        return (call if len(self.results) == 1 and not self.returns_more else lambda *given: pick(call(*given))), args[:plain]

    @cached_property
    def _parted(self) -> tuple[int, list[str]]:
        from .op.checks import parted

        return parted(self.public)

    def exactly(self, args: Sequence[Any]) -> AbstractContextManager[Any]:
        """A context in which a reference in a wider dtype finds the same neighbours as `args` in their own."""
        if not self.searched:
            return nullcontext()
        import torch

        from .points._search.reference import searching_in

        dtype = torch.float32
        for name in self.searched:
            dtype = torch.promote_types(dtype, args[self.arguments.index(name)].dtype)
        return searching_in(dtype)

    # -- its cases

    @property
    def cases(self) -> ModuleType:
        return self.module(".cases")

    def make(self, case: str | None = None, **options: Any) -> tuple[Any, ...]:
        """Arguments of a small case, of given sizes, or of both."""
        return tuple(self.cases.make(**self.sizes({**(self.cases.SMALL[case] if case else {}), **options})))

    def count(self, **sizes: Any) -> dict[str, int]:
        """How many elements must be moved at least once, and how many terms are summed."""
        return dict(self.cases.count(**self.sizes(sizes)))

    def sizes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """These sizes under the operator's own letters."""
        return {self.letters.get(name, name): value for name, value in given.items()}

    # -- traits that follow from others

    @property
    def has_images(self) -> bool:
        return bool(self.image)

    @property
    def sees_nowhere(self) -> bool:
        """It has no positions, so no position can be outside."""
        return not self.places

    @property
    def lists(self) -> bool:
        """True if it lists neighbours, and so accepts a `PointIndex` and ragged batches."""
        return bool(self.searched)


_PYRAMID: dict[str, Any] = dict(
    family="grid",
    engine="_pyramid",
    places=("locations",),
    converts=True,
    fixed=("cams", "L"),
    integers=("H", "W"),
    in_full=("odd_sizes",),
    queries=dict(locations=1, weights=1),
    result=1,
)
_EPIPOLAR: dict[str, Any] = dict(
    family="grid",
    engine="_epipolar",
    image="images",
    samples="samples",
    places=("samples",),
    result=2,
    fixed=("octaves",),
    gathers=True,
    typical="pixelsplat_infer",
    on_cpu=dict(B=1, Q=1024),
)
_SEARCH: dict[str, Any] = dict(
    family="points",
    engine="_search",
    converts=True,
    searched=("queries", "points"),
    places=("queries", "sigma", "points"),
    queries=dict(queries=-2),
    result=-2,
    atomic=False,
    letters=dict(Q="M", C="F", D="k"),
    fixed=("dims", "k"),
    least=dict(dims=1, k=1),
    vanishing=("one_pixel",),
    in_full=("odd_sizes",),
    typical="tutorial",
    on_cpu=dict(M=1000, N=5000),
    checked=2**15,
)
_LISTS = dict(_SEARCH, graded="distances", registered_like="knn_aggregate", computes_like="knn_aggregate")
_POWER: dict[str, Any] = dict(family="power", atomic=False, by_torch=True, in_full=("odd_sizes",))

_ALL = (
    Operator("sample_sum", **_EPIPOLAR, queries=dict(samples=1, weights=2), factors=("weights", -1), interpreted=True),
    Operator(
        "sample_dot",
        **_EPIPOLAR,
        queries=dict(samples=1, queries=2, depths=1),
        factors=("queries", -1),
        in_full=("odd_sizes", "hostile"),
    ),
    Operator(
        "sample_attention",
        **_EPIPOLAR,
        views=True,
        converts=True,
        queries=dict(samples=-3, queries=2, depths=-2, mask=-2),
        vanishing=("one_of_each", "one_pixel"),  # one sample, or one value of all, so moving weights changes nothing
        in_full=("odd_sizes", "hostile"),
    ),
    Operator(
        "grid_sample",
        "grid",
        image="input",
        samples="grid",
        places=("grid",),
        align="align_corners",
        queries=dict(grid=1),
        result=2,
        keeps_layout=True,
        broadcasts=True,
        in_full=("odd_sizes", "hostile", "volume"),
        typical="random_64",
        on_cpu=dict(B=1),
    ),
    Operator(
        "deformable_aggregation",
        **_PYRAMID,
        factors=("weights", 2),  # the last dimension counts groups, which are summed apart
        typical="sparsedrive_det",
        on_cpu=dict(Q=100, levels=((32, 88), (16, 44))),
    ),
    Operator(
        "ms_deform_attn",
        **_PYRAMID,
        factors=("weights", -1),
        typical="ddetr_dec",
        on_cpu=dict(levels=((50, 84), (25, 42), (13, 21))),
    ),
    Operator("knn", **_LISTS, results=("distances", "indices"), sees_everything=True),
    Operator("radius_neighbors", **_LISTS, results=("distances", "indices", "truncated")),
    Operator(
        "radius_search",
        **_LISTS,
        results=("offsets", "indices", "distances"),
        sizes_from_data=True,
        refuses={
            command: "the lengths of its lists depend on the data, so a reference for some of the queries cannot be compared"
            for command in ("bench", "demo")
        },
    ),
    Operator("knn_aggregate", **_SEARCH, summed=("sigma",), sees_everything=True),
    Operator(
        "radius_aggregate",
        **_SEARCH,
        summed=("sigma",),
        registered_like="knn_aggregate",
        interpreted_cases=(*EDGES, "sigma_of_rows"),  # a second for each
    ),
    Operator(
        "copy",
        **_POWER,
        letters=dict(Q="M", C="N"),
        any_rank=True,
        alone=True,
        linear=True,
        queries=dict(x=-2),
        result=-2,
        typical="contiguous",
        on_cpu=dict(M=1024, N=1024),
    ),
    Operator(
        "mm",
        **_POWER,
        letters=dict(Q="M", C="K", D="N"),
        converts=True,
        queries=dict(a=-2),
        result=-2,
        typical="square_1024",
        on_cpu=dict(M=512, N=512),
    ),
    Operator(
        "sympow",
        **_POWER,
        letters=dict(Q="B", C="n", D="T"),
        fixed=("n", "T", "power"),
        as_given=("n", "T", "power"),
        least=dict(n=1, T=1, power=1),
        converts=True,
        any_rank=True,
        alone=True,
        queries=dict(x=-2),
        result=-2,
        typical="d64_p2",
        on_cpu=dict(B=2048),
    ),
    Operator(
        "sympow_mm",
        **_POWER,
        letters=dict(Q="R", C="n", D="T"),
        fixed=("n", "T", "power"),
        as_given=("n", "T", "power"),
        least=dict(n=1, T=1, power=1),
        converts=True,
        rounded=True,
        queries=dict(a=0, b=0, accumulate=0),
        result=0,
        typical="query_d64",
        on_cpu=dict(B=4),
    ),
    Operator(
        "attention",
        **_POWER,
        letters=dict(Q="T", C="d", D="S"),
        fixed=("d", "groups"),
        least=dict(heads=1, groups=1, d=1),
        as_given=("d", "groups"),
        converts=True,
        rounded=True,
        queries=dict(q=0, k=0, v=0),
        result=0,
        typical="d64_4k",
        on_cpu=dict(B=1, heads=2, T=512, S=512),
    ),
    Operator(
        "power_attention",
        **_POWER,
        letters=dict(Q="T", C="d"),
        fixed=("d", "groups"),
        least=dict(heads=1, groups=1, d=1, chunk=1),
        as_given=("d", "groups", "power"),
        converts=True,
        rounded=True,
        exponents=("log_gate",),
        vanishing=("one_pixel",),  # one key, so its weight cancels
        returns_more=True,
        queries=dict(q=0, k=0, v=0, log_gate=0, state=0),
        result=0,
        typical="d64_4k",
        on_cpu=dict(B=1, heads=1, T=3072, d=32),  # in chunks, as long sequences are
    ),
    Operator(
        "point_index",
        "points",
        folder="_search.index",
        title="PointIndex.build",
        engine="_search",
        results=("order", "sorted"),  # not the boxes, which end in unused memory that is never written
        graded="",
        atomic=False,
        letters=dict(Q="M", C="F", D="k"),
        fixed=("dims",),
        least=dict(dims=1),
        registered_like="knn_aggregate",
        typical="tutorial",
        refuses={
            command: "any order of the points is correct, so there is nothing to compare with; bench knn_aggregate times it"
            for command in ("bench", "demo")
        },
    ),
)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _ALL}
