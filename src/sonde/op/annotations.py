"""Convert a function's annotations to an operator's signature, and a call's arguments to flat ones and back."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

from torch import SymFloat, SymInt, Tensor

from .signature import Lengths, Signature

VALUES: dict[Any, str] = {int: "SymInt", float: "float", bool: "bool", str: "str"}
KNOWN = "Tensor, Tensor | None, list[Tensor], int, float, bool, str, list[int] or list[float], or one of the last six | None"
RESERVED = ("impl", "needs", "deterministic")
_UNIONS = (Union, getattr(types, "UnionType", Union))


@dataclass(frozen=True)
class Parameters:
    """A function's parameters in their own order, and the operator's signature, in which tensors come before values."""

    signature: Signature
    names: tuple[str, ...]
    kinds: tuple[str, ...]  # types, as written in schemas
    defaults: dict[str, Any]
    order: tuple[int, ...]  # for each argument of the signature, its parameter
    result: Callable[..., Any] | None  # a NamedTuple of results

    def flat(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Lengths]:
        """A call's arguments as an :class:`Operator` takes them: tensors, entries of lists among them, and then values."""
        if not self.signature.lists:
            return tuple(self.ordered(args)), ()
        if not all([isinstance(args[i], (list, tuple)) for i in self.order if self.kinds[i] == "Tensor[]"]):
            self.check(self.signature.qualname, args)
        flat, lengths = self.signature.unpacked(self.ordered(args))
        return tuple(flat), lengths

    def ordered(self, args: Sequence[Any]) -> list[Any]:
        """The arguments in the signature's order, with values that can be cached: ints become floats where needed, lists tuples."""
        ordered = [args[i] for i in self.order]
        for place, convert in self.converted:
            ordered[place] = convert(ordered[place])
        return ordered

    @cached_property
    def converted(self) -> tuple[tuple[int, Callable[[Any], Any]], ...]:
        """Positions in the signature's order whose values may need a conversion, and the conversions."""
        known = {"float": _as_float, "float?": _as_float, "float[]": _as_floats, "SymInt[]": _as_tuple}
        places = [(place, known.get(self.kinds[i].replace("]?", "]"))) for place, i in enumerate(self.order)]
        return tuple((place, convert) for place, convert in places if convert is not None)

    def arranging(self, lengths: Lengths) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """A function that puts flat arguments back into the user's order, with lists as lists."""
        back = [self.order.index(i) for i in range(len(self.order))]
        in_order, lists, schema = back == sorted(back), bool(self.signature.lists), self.signature
        if not lists:
            return (lambda flat: flat) if in_order else (lambda flat: [flat[i] for i in back])

        def arrange(flat: Sequence[Any]) -> Sequence[Any]:
            packed = schema.packed(flat, lengths)
            return [packed[i] for i in back]

        return arrange

    def check(self, title: str, args: Sequence[Any]) -> None:
        """Raise for arguments, in the function's order, that do not match its annotations."""
        for name, kind, x in zip(self.names, self.kinds, args):
            if not fits(kind, x):
                hint = ""
                if isinstance(x, Tensor) and not kind.startswith("Tensor"):
                    hint = f". Use {name}.item(), which waits for the device, or annotate {name} as a Tensor"
                raise TypeError(f"{title}: {name} must be {words(kind)}; got {_found(kind, x)}{hint}")


def _as_float(x: Any) -> Any:
    return float(x) if type(x) is int else x


def _as_floats(x: Any) -> Any:
    return tuple([_as_float(entry) for entry in x]) if isinstance(x, (list, tuple)) else x


def _as_tuple(x: Any) -> Any:
    return tuple(x) if type(x) is list else x


def parameters(
    name: str,
    function: Callable[..., Any],
    differentiable: Sequence[str] | None,
    saved: Sequence[int],
    no_grad: Sequence[int],
    unbatched: Sequence[str],
) -> Parameters:
    """Read the annotations of `function`; `name` is ``"namespace::name"``."""
    namespace, short = name.split("::")
    given = list(inspect.signature(function).parameters.values())
    try:
        hints = typing.get_type_hints(function)
    except NameError as problem:
        raise TypeError(
            f"{name}: an annotation cannot be read: {problem}. Import that name where the function is defined"
        ) from None
    kinds = [_kind(name, p, hints) for p in given]
    tensors = [i for i, kind in enumerate(kinds) if kind.startswith("Tensor")]
    if not tensors:
        raise TypeError(f"{name}: needs at least one argument annotated as a Tensor")
    tensors.sort(key=lambda i: ("Tensor", "Tensor[]", "Tensor?").index(kinds[i]))  # tensors that cannot be None come first
    order = [*tensors, *(i for i, kind in enumerate(kinds) if not kind.startswith("Tensor"))]
    count, result = _results(name, hints.get("return", inspect.Parameter.empty))
    for what, positions in (("saved", saved), ("no_grad", no_grad)):
        if not set(positions) <= set(range(count)):
            raise ValueError(f"{name}: {what} must be positions of its {count} results; got {tuple(positions)}")
    names = [p.name for p in given]
    for what, these in (("differentiable", differentiable or ()), ("unbatched", unbatched)):
        if not set(these) <= {names[i] for i in tensors}:
            raise ValueError(f"{name}: {what} must name tensor arguments; got {', '.join(map(repr, these))}")
    if len(set(no_grad)) == count:
        differentiable = ()
    elif differentiable is None:
        differentiable = [names[i] for i in tensors]
    schema = ", ".join(f"{kinds[i]} {names[i]}" for i in order)
    returned = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    graded = sorted(differentiable, key=lambda x: order.index(names.index(x)))
    signature = Signature.parse(
        f"{short}({schema}) -> {returned}", graded, (), unbatched, (), sorted(saved), sorted(no_grad), namespace
    )
    defaults = {p.name: p.default for p in given if p.default is not p.empty}
    return Parameters(signature, tuple(names), tuple(kinds), defaults, tuple(order), result)


def _kind(name: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> str:
    if parameter.name in RESERVED:
        raise TypeError(f"{name}: an argument cannot be called {parameter.name}, which is a keyword of every operator")
    if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
        raise TypeError(f"{name}: {parameter} must be an ordinary parameter, neither *{parameter.name} nor keyword-only")
    if parameter.name not in hints:
        raise TypeError(f"{name}: {parameter.name} has no annotation; annotate it as {KNOWN}")
    found = kind_of(hints[parameter.name])
    if found is None:
        raise TypeError(f"{name}: {parameter.name} is annotated as {hints[parameter.name]}; it must be {KNOWN}")
    return found


def kind_of(annotation: Any) -> str | None:
    """The type in a schema; None if schemas have no such type."""
    if annotation is Tensor:
        return "Tensor"
    if annotation in VALUES:
        return VALUES[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _UNIONS and len(args) == 2 and type(None) in args:
        inside = kind_of(args[0] if args[1] is type(None) else args[1])
        return None if inside is None or inside == "Tensor[]" or inside.endswith("?") else f"{inside}?"
    if origin in (list, Sequence) and args[0] in (Tensor, int, float):
        return f"{kind_of(args[0])}[]"
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis and args[0] in (int, float):
        return f"{kind_of(args[0])}[]"
    return None


def _results(name: str, annotation: Any) -> tuple[int, Callable[..., Any] | None]:
    """The number of results, and the NamedTuple that holds them, if there is one."""
    if annotation is Tensor:
        return 1, None
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and args and all(a is Tensor for a in args):
        return len(args), None
    fields = getattr(annotation, "_fields", ())
    if fields and all(typing.get_type_hints(annotation).get(field) is Tensor for field in fields):
        return len(fields), annotation
    said = "has no annotation" if annotation is inspect.Parameter.empty else f"is annotated as {annotation}"
    raise TypeError(f"{name}: its result {said}; it must be Tensor, tuple[Tensor, …] or a NamedTuple of Tensors")


def fits(kind: str, x: Any) -> bool:
    """True if an argument matches a schema's type. An int is accepted for a float."""
    if kind.endswith("?"):
        return x is None or fits(kind[:-1], x)
    if kind.endswith("[]"):
        return isinstance(x, (list, tuple)) and all(fits(kind[:-2], entry) for entry in x)
    if kind in ("SymInt", "float"):
        numbers: tuple[type, ...] = (int, SymInt) if kind == "SymInt" else (int, float, SymFloat, SymInt)
        return isinstance(x, numbers) and not isinstance(x, bool)
    return isinstance(x, {"Tensor": Tensor, "bool": bool, "str": str}[kind])


def _found(kind: str, x: Any) -> str:
    """What was passed instead, by type, and by value if it is short; of a list, the first entry that does not match."""
    if isinstance(x, (list, tuple)) and "[]" in kind:
        one = kind[: kind.index("[]")]
        return f"{type(x).__name__} with {_found(one, next(entry for entry in x if not fits(one, entry)))}"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (bool, int, float, str)) else type(x).__name__


def words(kind: str) -> str:
    """A schema's type as users write it."""
    if kind.endswith("?"):
        return f"{words(kind[:-1])} or None"
    if kind.endswith("[]"):
        return f"a list of {words(kind[:-2]).split(' ', 1)[1]}s"
    return {"Tensor": "a Tensor", "SymInt": "an integer", "float": "a number", "bool": "True or False", "str": "a string"}[kind]
