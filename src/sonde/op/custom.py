"""``sonde.operator``: an operator of the user's own, from a PyTorch reference and any faster functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from . import plan
from .annotations import Parameters, parameters
from .autograd import as_tuple
from .checks import dense, refuse_scripting
from .functions import BACKENDS, OWN, Function, Implementation, OfRegistry, Registry, first_tensor
from .layout import outline_of
from .library import Library, register
from .register import Operator
from .signature import Lengths
from .torch_private import forward_mode, is_fake

_NAME = re.compile(r"[A-Za-z]\w*::[A-Za-z]\w*")
_registered: dict[str, str] = {}  # name: where it was registered


class CustomOperator:
    """What :func:`operator` returns: call it like the original function, with an additional argument ``impl=``.

    ``op.register`` adds an implementation, ``op.register_backward`` its gradients, ``op.reference`` is the definition and
    ``op.implementations`` lists the names that ``impl=`` takes.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        about: Parameters,
        reference: Callable[..., Any],
        fake: Callable[..., Any] | None,
        batched: bool,
    ) -> None:
        self.__qualname__ = ""
        self.__wrapped__ = function
        update_wrapper(self, function)
        self.name, self.reference = name, reference
        self._about, self._fake_of, self._batched = about, fake, batched
        self._names, self._arity = about.names, len(about.names)
        self._registry = Registry(name)
        self._variants: dict[Lengths, Operator] = {}
        self._has_lists, self._as_given = bool(about.signature.lists), not about.converted
        self._as_given &= about.order == tuple(range(self._arity))  # arguments can be passed on unchanged
        self._wrap = about.result
        if about.signature.lists:
            self._library: Library = register(about.signature, self._variant)
        else:
            self._only = self._variant(())
            self._library = self._only.library
        refuse_scripting(self)

    def __call__(self, *args: Any, impl: str = "auto", **named: Any) -> Any:
        if named or len(args) != self._arity:
            args = self._bound(args, named)
        if torch.compiler.is_compiling():
            return self._traced(args, impl)
        if self._has_lists:
            flat, lengths = self._about.flat(args)
            op = self._variants.get(lengths) or self._variant(lengths)
        else:
            flat, op = args if self._as_given else tuple(self._about.ordered(args)), self._only
        out = op(*flat, impl=impl)
        return out if self._wrap is None else self._wrap(*out)

    def __repr__(self) -> str:
        return f"<operator {self.name}{inspect.signature(self)}>"

    def __reduce__(self) -> str:
        """Pickled and copied by name, like a function."""
        return self.__qualname__

    @property
    def implementations(self) -> tuple[str, ...]:
        """The names that ``impl=`` takes besides ``"auto"``, in the order in which ``"auto"`` tries them."""
        return (*self._registry.known, "reference")

    def register(
        self,
        impl: str,
        function: Callable[..., Any] | str | None = None,
        *,
        devices: str | Sequence[str] | None = None,
        deterministic: bool = False,
    ) -> Any:
        """Add an implementation; as a decorator, if no function is given.

        Args:
            impl: Its name, for ``impl=``. ``"triton"``, ``"cupy"``, ``"cuml"``, ``"numba"``, ``"scipy"`` and ``"warp"`` also say
                which package it needs, and the first five on which devices it runs; if the package is missing, it is skipped.
            function: Takes the operator's arguments in their order and returns new tensors. ``"package.module:function"`` is
                imported at the first call; ``"package.module"`` is a module with ``forward_pass`` and ``backward_pass``
                (CONTRIBUTING.md, step 7). If it has a keyword-only argument ``deterministic``, this says whether torch's
                deterministic mode is on.
            devices: The kinds of devices whose tensors it takes, such as ``"cuda"``. Any, unless the name says otherwise.
            deterministic: It gives the same bits in every run. In torch's deterministic mode nothing else is chosen.

        ``"auto"`` takes the first, in the order of registration, that takes the tensors' device.
        """
        if function is None:
            return lambda given: self.register(impl, given, devices=devices, deterministic=deterministic)
        if impl in ("auto", "reference", *self._registry.known):
            why = "is registered already" if impl in self._registry.known else "is not a name for an implementation"
            raise ValueError(f"{self.name}: impl={impl!r} {why}; choose another name")
        _accepts(f"{self.name}: the implementation {impl!r}", function, self._names)
        usual = BACKENDS.get(impl, ("", None))[1]
        where = usual if devices is None else (devices,) if isinstance(devices, str) else tuple(devices)
        known, own = self._registry.known, self._registry.known.pop(OWN, None)
        known[impl] = Implementation(impl, Function(function, deterministic), where)
        if own is not None:
            known[OWN] = own  # tried last
        self._forget()
        return function

    def register_backward(self, impl: str, function: Callable[..., Any] | str | None = None, *, deterministic: bool = False) -> Any:
        """Add the first derivative of an implementation; as a decorator, if no function is given.

        Args:
            impl: The name of a registered implementation.
            function: Takes the gradient of each result that has one, the operator's arguments, and the results that `saved` names.
                It returns one gradient per differentiable argument, in their order, or None where it is not needed; the gradient
                alone if there is one such argument; a list of gradients for a list. If it has a keyword-only argument ``needs``,
                this says which gradients are needed: ``needs.x`` is True if that of `x` is. A keyword-only ``deterministic`` says
                whether torch's deterministic mode is on. A string is imported at the first call.
            deterministic: It gives the same bits in every run.
        """
        if function is None:
            return lambda given: self.register_backward(impl, given, deterministic=deterministic)
        found = self._registry.known.get(impl)
        if found is None:
            raise ValueError(f"{self.name}: there is no implementation {impl!r} to have a gradient; register it first")
        if found.backward is not None:
            raise ValueError(f"{self.name}: the gradient of impl={impl!r} is registered already")
        about = self._about.signature
        if not about.differentiable:
            raise ValueError(f"{self.name}: nothing is differentiable, so impl={impl!r} cannot have a gradient")
        given = [*(f"grad{i}" for i in about.graded), *self._names, *(f"result{i}" for i in about.saved)]
        _accepts(f"{self.name}: the gradient of {impl!r}", function, given)
        found.backward = Function(function, deterministic)
        self._forget()
        return function

    def _bound(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position."""
        defaults, values = self._about.defaults, list(args)
        for name in self._names[len(args) :]:
            if name in named:
                values.append(named[name])
            elif name in defaults:
                values.append(defaults[name])
            else:
                break
        if len(values) != self._arity or not set(named) <= set(self._names[len(args) :]):
            inspect.signature(self.__wrapped__).bind(*args, **named)  # raises Python's own error for such a call
        return tuple(values)

    def _traced(self, args: tuple[Any, ...], impl: str) -> Any:
        """A call while torch traces: it becomes one node of the graph."""
        about = self._about
        about.check(self.name, args)
        ordered = about.ordered(args)
        tensors = [x for arg in ordered for x in (arg if isinstance(arg, (list, tuple)) else (arg,)) if isinstance(x, Tensor)]
        if not tensors:
            raise ValueError(f"{self.name}: {NO_TENSOR}")
        fixed = torch.are_deterministic_algorithms_enabled()
        impl = self._registry.choose(impl, tensors[0], fixed)
        if impl == "reference" or forward_mode(tensors):
            out = self._define(tensors[0].device.type, args)
        else:
            out = self._library.forward(*ordered, impl, fixed)
        return out if self._wrap is None else self._wrap(*out)

    def _define(self, device: str, args: Sequence[Any]) -> Any:
        """Call the definition outside of autocast, so that the result does not depend on it."""
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self.reference(*args)
        with torch.autocast(device, enabled=False):
            return self.reference(*args)

    def _variant(self, lengths: Lengths) -> Operator:
        """The operator for calls whose lists have these lengths; made by the first such call."""
        found = self._variants.get(lengths)
        if found is not None:
            return found
        about, arrange = self._about, self._about.arranging(lengths)
        schema = about.signature

        def check(*flat: Any) -> None:
            about.check(self.name, arrange(flat))
            if not any(isinstance(x, Tensor) for x in flat):
                raise ValueError(f"{self.name}: {NO_TENSOR}")
            for name, x in zip(flat_signature.names, flat):
                if isinstance(x, Tensor):
                    dense(self.name, name, x)

        def reference(*flat: Any) -> Any:
            return self._define(first_tensor(flat).device.type, arrange(flat))

        def fake(*flat: Any) -> Any:
            return self._fake(flat, arrange)

        flat_signature = schema.flat(lengths)
        library = self._library if schema.lists else None  # without lists it registers itself
        implementations = OfRegistry(self._registry, about, lengths)
        made = Operator(flat_signature, implementations, reference, check, fake, self._batched, library, schema, lengths)
        self._variants[lengths] = made
        return made

    def _fake(self, flat: Sequence[Any], arrange: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Results without values, from the reference on tensors without memory."""
        if self._fake_of is not None:
            return self._fake_of(*arrange(flat))
        first = first_tensor(flat)
        traced = any(isinstance(x, Tensor) and (is_fake(x) or x.device.type == "meta") for x in flat)
        with torch.no_grad(), plan.unrecorded():
            if traced:
                return self._define(first.device.type, arrange(flat))
            out = self._define(first.device.type, arrange([outline_of(x) if isinstance(x, Tensor) else x for x in flat]))
        made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=first.device) for x in as_tuple(out)]
        return made[0] if isinstance(out, Tensor) else tuple(made)

    def _forget(self) -> None:
        """Drop prepared calls: an implementation was added, so they may have chosen another one."""
        for each in self._variants.values():
            each.forget()


def operator(
    name: str,
    function: Callable[..., Any] | None = None,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    devices: str | Sequence[str] | None = None,
    deterministic: bool = False,
    differentiable: Sequence[str] | None = None,
    saved: Sequence[int] = (),
    no_grad: Sequence[int] = (),
    batched: bool = False,
    unbatched: Sequence[str] = (),
) -> Any:
    """Make an operator from a PyTorch reference and a faster function; as a decorator, if no function is given.

    The operator has what Sonde's own have: the first derivative by a kernel or by the reference, higher ones and forward mode by
    the reference, ``torch.vmap``, ``torch.compile(fullgraph=True)``, ``torch.export``, ``sonde.explain``, and torch's
    deterministic mode.

    Convention:
        The reference says what the operator means, in every dtype; implementations agree with it in values, shapes, strides, dtypes
        and devices, which ``sonde.testing.check_operator`` tests. They return new tensors and leave their arguments as they are.
        They see plain tensors outside of autograd and autocast, on the current device and stream.

    Args:
        name: ``"namespace::name"``, which graphs hold. Each may be registered once in a process.
        function: The fast function. Its annotations are the schema: ``Tensor``, ``Tensor | None``, ``list[Tensor]``, ``int``,
            ``float``, ``bool``, ``str``, lists of numbers, numbers ``| None``; it returns a ``Tensor``, ``tuple[Tensor, …]`` or a
            NamedTuple of tensors. It is the implementation ``"kernel"``, tried after all registered ones, unless its body
            is ``...``.
        reference: The definition, in plain PyTorch, with the same arguments.
        fake: Returns empty results; needed only if the reference cannot compute shapes without values.
        backward: The first derivative of `function`, as in :meth:`CustomOperator.register_backward`.
        devices: The kinds of devices whose tensors `function` takes, such as ``"cpu"``. Any, unless it is given.
        deterministic: `function` and `backward` give the same bits in every run.
        differentiable: Arguments with a gradient. All tensors, unless it is given.
        saved: Positions of the results that backward passes are given.
        no_grad: Positions of the results without gradient, such as indices.
        batched: Tensors and results have a leading batch dimension, and rows do not affect each other: ``torch.vmap`` makes one
            call instead of one for each row.
        unbatched: Tensors without that dimension, the same for all rows.

    Returns:
        The operator: call it like `function`, with an additional ``impl=``: ``"auto"``, a registered name or ``"reference"``.

    Example:
        >>> import numpy as np, torch, sonde
        >>> from torch import Tensor
        >>> @sonde.operator("doctest::cube", reference=lambda x: x**3, devices="cpu")
        ... def cube(x: Tensor) -> Tensor:
        ...     return torch.from_numpy(np.power(x.numpy(), 3))
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> cube(x).sum().backward()
        >>> x.grad
        tensor([ 3., 12.])
    """
    if function is None:
        given = dict(locals())
        del given["function"], given["name"]
        return lambda function: operator(name, function, **given)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"operator: the name must be like 'mylib::blur', of letters, digits and underscores; got {name!r}")
    if name.startswith(("sonde::", "aten::", "prim::", "prims::")):
        raise ValueError(f"operator: the namespace of {name!r} is taken; use one of your own")
    _not_twice(name)
    about = parameters(name, function, differentiable, saved, no_grad, unbatched)
    _accepts(f"{name}: the reference", reference, about.names)
    if fake is not None:
        _accepts(f"{name}: fake", fake, about.names)
    try:
        made = CustomOperator(name, function, about, reference, fake, batched)
    except RuntimeError as problem:
        raise ValueError(f"operator: {name!r} cannot be registered; another library has the name: {problem}") from problem
    _registered[name] = _place(function)
    if not _is_empty(function):
        made.register(OWN, function, devices=devices, deterministic=deterministic)
        if backward is not None:
            made.register_backward(OWN, backward, deterministic=deterministic)
    elif backward is not None or devices is not None or deterministic:
        raise ValueError(f"{name}: backward, devices and deterministic are about the function, whose body is empty; use register()")
    return made


NO_TENSOR = "needs at least one tensor, whose device says where to run; got none"


def _not_twice(name: str) -> None:
    for taken in (name, f"{name}_backward", name.removesuffix("_backward")):
        if taken in _registered:
            raise ValueError(
                f"operator: {name!r} is registered already, at {_registered[taken]}"
                + ("" if taken == name else f", as part of {taken!r}")
                + "; choose another name, or restart the process to define it anew"
            )


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _accepts(title: str, function: Any, names: Sequence[str]) -> None:
    """Raise unless `function` takes these by position; one that is imported later is not checked."""
    if isinstance(function, str):
        return
    if not callable(function):
        raise TypeError(f"{title} must be a function; got {type(function).__name__}")
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code may have no signature
        return
    told = {p.name: None for p in found.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name in ("needs", "deterministic")}
    try:
        found.bind(*names, **told)
    except TypeError as problem:
        raise TypeError(f"{title} must take ({', '.join(names)}); it takes {found}: {problem}") from None


def _empty() -> None: ...
def _documented() -> None:
    """Only a docstring."""


def _is_empty(function: Callable[..., Any]) -> bool:
    """True if its body is ``...``, a docstring, or nothing."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_code in (_empty.__code__.co_code, _documented.__code__.co_code)
