"""The operators that the commands know; the next one joins with one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType

from ..op.checks import by_position, parted


@dataclass(frozen=True)
class Operator:
    """One operator: where it lives, and which dimension of its arguments and of its result counts the queries.

    Queries do not see each other, so the float64 reference may be asked in slices of them.
    """

    name: str
    family: str
    queries: Mapping[str, int] = field(hash=False)
    result: int

    @property
    def package(self) -> str:
        return f"{__package__.rpartition('.')[0]}.{self.family}.{self.name}"

    def module(self, file: str = "") -> ModuleType:
        return import_module(self.package + file)

    @property
    def function(self) -> Callable:
        """The public one; what it takes by keyword only comes by position here too, as the cases have it."""
        return by_position(getattr(self.module(), self.name))

    def written(self, args: Sequence, impl: str) -> tuple[Callable, Sequence]:
        """The same call as a user writes it, to be timed: the public function, options by keyword, and the rest."""
        function = getattr(self.module(), self.name)
        plain, options = parted(function)
        return partial(function, **dict(zip(options, args[plain:])), impl=impl), args[:plain]

    @property
    def reference(self) -> Callable:
        if self.family == "points":  # where the definition returns more than the function
            return partial(self.function, impl="reference")
        definition = getattr(self.module(".reference"), self.name)
        return lambda *args: definition(*self.registered(args))

    def exactly(self, dtype) -> AbstractContextManager:
        """In which a truth of wide numbers is that of arguments in `dtype`: the same neighbours, if the operator has any."""
        return getattr(self.cases, "exactly", lambda dtype: nullcontext())(dtype)

    def registered(self, args: Sequence) -> tuple:
        """The arguments of the schema, where the public function's are not the same."""
        arguments = getattr(self.module(".api"), "arguments", None)
        return tuple(args) if arguments is None else arguments(*args)

    @property
    def cases(self) -> ModuleType:
        return self.module(".cases")

    @property
    def arguments(self) -> list[str]:
        return [name for name in inspect.signature(getattr(self.module(), self.name)).parameters if name != "impl"]


_ALL = (
    Operator("sample_sum", "grid", queries=dict(samples=1, weights=2), result=2),
    Operator("sample_dot", "grid", queries=dict(samples=1, queries=2, depths=1), result=2),
    Operator("grid_sample", "grid", queries=dict(grid=1), result=2),
    Operator("deformable_aggregation", "grid", queries=dict(locations=1, weights=1), result=1),
    Operator("ms_deform_attn", "grid", queries=dict(locations=1, weights=1), result=1),
    Operator("knn_aggregate", "points", queries=dict(queries=0), result=0),
    Operator("radius_aggregate", "points", queries=dict(queries=0), result=0),
)
OPERATORS = {operator.name: operator for operator in _ALL}
