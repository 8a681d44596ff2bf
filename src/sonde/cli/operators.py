"""The operators that the commands know; the next one joins with one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType


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
        return getattr(self.module(), self.name)

    @property
    def reference(self) -> Callable:
        return getattr(self.module(".reference"), self.name)

    @property
    def cases(self) -> ModuleType:
        return self.module(".cases")

    @property
    def arguments(self) -> list[str]:
        return [name for name in inspect.signature(self.function).parameters if name != "impl"]


_ALL = (
    Operator("sample_sum", "grid", queries=dict(samples=1, weights=2), result=2),
    Operator("sample_dot", "grid", queries=dict(samples=1, queries=2, depths=1), result=2),
    Operator("grid_sample", "grid", queries=dict(grid=1), result=2),
)
OPERATORS = {operator.name: operator for operator in _ALL}
