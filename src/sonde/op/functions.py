"""Implementations that are plain functions, which users register under a name."""

from __future__ import annotations

import os
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from . import plan
from .annotations import Parameters
from .implementations import Kernels, OfModule
from .plan import Determinism
from .signature import Lengths, Signature

# names that say which package an implementation needs, and on which devices it runs unless it says otherwise
BACKENDS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "triton": ("triton", ("cuda",)),
    "numba": ("numba", ("cpu",)),
    "cupy": ("cupy", ("cuda",)),
    "cuml": ("cuml", ("cuda",)),
    "warp": ("warp", None),
    "scipy": ("scipy", ("cpu",)),
}
OWN = "kernel"  # the name of the decorated function among its implementations


@dataclass(eq=False)
class Function:
    """One half of an implementation: a function, or where to import it from at the first call."""

    target: Callable[..., Any] | str
    deterministic: bool = False

    def load(self, title: str) -> Any:
        """The function; or the module, if the target names no function in it."""
        if isinstance(self.target, str):
            module, _, path = self.target.partition(":")
            found: Any = import_module(module)
            for part in path.split(".") if path else ():
                found = getattr(found, part, None)
            if path and not callable(found):
                raise TypeError(f"{title}: {self.target!r} is no function of that module")
            self.target = found
        return self.target

    @property
    def promise(self) -> Determinism:
        return Determinism.RUN_TO_RUN if self.deterministic else Determinism.NONE


@dataclass(eq=False)
class Implementation:
    """What was registered under one name."""

    name: str
    forward: Function
    devices: tuple[str, ...] | None  # None: any
    backward: Function | None = None
    installed: bool = field(init=False)  # determined at once, since torch's compiler must not trace the search for packages

    def __post_init__(self) -> None:
        package = BACKENDS.get(self.name, ("",))[0]
        self.installed = not package or _is_installed(package)

    @property
    def deterministic(self) -> bool:
        return self.forward.deterministic and (self.backward is None or self.backward.deterministic)

    def refusal(self, device: str, by_name: bool = True) -> str | None:
        """Why it cannot run on such a device, and what to do about it; None if it can. `by_name`: the user named it."""
        if not self.installed:
            package = BACKENDS[self.name][0]
            return f"needs {package}, which is not installed; install it or use impl='auto'"
        if device == "meta":
            return "needs tensors with memory, got meta tensors; use impl='auto'"
        interpreted = by_name and os.environ.get("TRITON_INTERPRET") == "1"
        if self.name == "triton" and device == "cpu" and (plan.only_compiled or interpreted):
            return None
        if self.devices is not None and device not in self.devices:
            return f"needs {' or '.join(self.devices)} tensors, got {device}; move them or use impl='auto'"
        return None


@cache
def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a stand-in module without a specification
        return True


class Registry:
    """All implementations of a user's operator, in the order in which they were registered."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.known: dict[str, Implementation] = {}

    def choose(self, impl: str, tensor: Tensor, fixed: bool) -> str:
        """``"auto"`` picks the first that takes the device and, in deterministic mode, promises the same bits in every run."""
        device = tensor.device.type
        if impl == "reference":
            return impl
        if torch.onnx.is_in_onnx_export():
            if impl == "auto":
                return "reference"  # plain tensor operations, which ONNX supports
            raise ValueError(f"{self.title}: impl={impl!r} has no translation to ONNX; export with impl='auto'")
        if impl == "auto":
            for name, each in self.known.items():
                if each.refusal(device, by_name=False) is None and (each.deterministic or not fixed):
                    return name
            return "reference"
        found = self.known.get(impl)
        if found is None:
            names = ", ".join(map(repr, ("auto", *self.known, "reference")))
            raise ValueError(f"{self.title}: impl={impl!r} must be one of {names}")
        reason = found.refusal(device)
        if reason is not None:
            raise ValueError(f"{self.title}: impl={impl!r} {reason}")
        if fixed and not found.deterministic:
            text = (
                f"{self.title}: impl={impl!r} does not promise the same bits in every run, which "
                "torch.use_deterministic_algorithms(True) asks for. Register it with deterministic=True if it gives them, "
                "or use impl='auto' or impl='reference'"
            )
            if not torch.is_deterministic_algorithms_warn_only_enabled():
                raise RuntimeError(text)
            warnings.warn(text, stacklevel=4)
        return impl


class OfRegistry:
    """The implementations of an operator for calls whose lists have certain lengths."""

    def __init__(self, registry: Registry, about: Parameters, lengths: Lengths) -> None:
        self.registry, self.about, self.lengths = registry, about, lengths
        self.flat = about.signature.flat(lengths)

    def choose(self, impl: str, args: Sequence[Any]) -> str:
        return self.registry.choose(impl, first_tensor(args), torch.are_deterministic_algorithms_enabled())

    def differentiates(self, impl: str) -> bool:
        each = self.registry.known[impl]
        return each.backward is not None or is_module(each.forward)

    def kernels(self, impl: str) -> Kernels:
        each = self.registry.known[impl]
        if is_module(each.forward):
            return OfModule(each.forward.load(self.registry.title))
        return OfFunctions(each, self.registry.title, self.about, self.flat, self.lengths)


def is_module(function: Function) -> bool:
    """True for ``"package.module"``, which has ``forward_pass`` and ``backward_pass`` as our own kernels do."""
    return (isinstance(function.target, str) and ":" not in function.target) or isinstance(function.target, type(os))


class OfFunctions:
    """A function for the forward pass and perhaps one for the gradients, called with arguments in the user's order."""

    keeps, own = True, False

    def __init__(self, each: Implementation, title: str, about: Parameters, flat: Signature, lengths: Lengths) -> None:
        self.each, self.title, self.about, self.flat, self.lengths = each, title, about, flat, lengths

    def decide(self, args: Sequence[Any], needs: Sequence[bool], deterministic: bool) -> Callable[..., Any]:
        arrange = self.about.arranging(self.lengths)
        title, schema = f"{self.title}: impl={self.each.name!r}", self.about.signature
        if not needs:
            function = self.each.forward.load(self.title)
            how = _keywords(function, deterministic=deterministic)
            check = _checked(title, schema.result.count("Tensor"))
            return _calling(function, how, args, arrange, check, first_tensor(args).device.type)
        assert self.each.backward is not None
        function = self.each.backward.load(self.title)
        how = _keywords(function, needs=_needs(self.about, schema, self.lengths, needs), deterministic=deterministic)
        collect = _gradients(f"{title}: its backward pass", self.about, self.lengths, needs)
        g, n = len(self.flat.graded), len(self.flat.names)

        def arrange_all(args: Sequence[Any]) -> Sequence[Any]:
            return (*args[:g], *arrange(args[g : g + n]), *args[g + n :])

        in_order = arrange(args) is args
        return _calling(function, how, args, arrange if in_order else arrange_all, collect, args[0].device.type)

    def plan(self, op: Any, args: Sequence[Any], needs: Sequence[bool], deterministic: bool) -> list[plan.Kernel]:
        """The kernels, without accumulators and workspace, which only the function knows."""
        results = getattr(self.about.result, "_fields", None) or [
            f"out{i or ''}" for i in range(self.about.signature.result.count("Tensor"))
        ]
        name, promise = f"{self.flat.name} ({self.each.name})", self.each.forward.promise
        found = [plan.Kernel(name, tuple(results), None, promise, None)]
        if any(needs):
            names = tuple(f"d_{self.flat.names[i]}" for i, need in zip(self.flat.differentiable, needs) if need)
            back = self.each.backward
            if back is None:
                found.append(plan.Kernel("PyTorch (the reference)", names, None, Determinism.NONE, None, "backward"))
            else:
                found.append(plan.Kernel(name, names, None, back.promise, None, "backward"))
        return found


def first_tensor(args: Sequence[Any]) -> Tensor:
    """The first tensor that is not None; its device decides."""
    return next(x for x in args if isinstance(x, Tensor))


def _calling(
    function: Callable[..., Any],
    how: dict[str, Any],
    args: Sequence[Any],
    arrange: Callable[[Sequence[Any]], Sequence[Any]],
    check: Callable[[Any], Any],
    device: str,
) -> Callable[..., Any]:
    """A function that calls the user's with arguments like these, outside of autocast and with tensors detached from the graph.

    An operator ignores autocast: the dtypes of its results follow from its arguments alone. DLPack and CUDA's array interface
    refuse tensors that require gradients, even where nothing is recorded.
    """
    attached = tuple([i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad])
    under_autocast = torch.is_autocast_enabled

    def run(*args: Any) -> Any:
        if under_autocast(device):
            with torch.autocast(device, enabled=False):
                return run(*args)
        if attached:
            free = list(args)
            for i in attached:
                free[i] = free[i].data  # like detach(), but faster
            return check(function(*arrange(free), **how))
        return check(function(*arrange(args), **how))

    return run


def _keywords(function: Callable[..., Any], **known: Any) -> dict[str, Any]:
    """Those of the `known` keyword arguments that the function has."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled code without a signature
        return {}
    return {p.name: known[p.name] for p in parameters if p.name in known and p.kind is p.KEYWORD_ONLY}


def _checked(title: str, count: int) -> Callable[[Any], Any]:
    """A function that returns its argument, a user's result, and raises unless it has `count` tensors."""

    def one(out: Any) -> Any:
        if type(out) is not Tensor and not isinstance(out, Tensor):
            hint = ". Use torch.from_numpy" if type(out).__module__ == "numpy" else ""
            raise TypeError(f"{title} must return a Tensor; got {type(out).__name__}{hint}")
        return out

    def several(out: Any) -> Any:
        if not isinstance(out, (tuple, list)) or len(out) != count:
            got = f"{len(out)} results" if isinstance(out, (tuple, list)) else type(out).__name__
            raise TypeError(f"{title} must return {count} Tensors; got {got}")
        return tuple([one(x) for x in out])

    return one if count == 1 else several


def _needs(about: Parameters, schema: Signature, lengths: Lengths, needs: Sequence[bool]) -> Any:
    """``needs.x`` for each differentiable argument, in the function's order; for a list, whether any entry needs its gradient."""
    packed = schema.packed_gradients(needs, lengths)
    packed = packed if isinstance(packed, tuple) else (packed,)
    of: dict[str, bool] = {
        schema.names[i]: any(x) if isinstance(x, list) else bool(x) for i, x in zip(schema.differentiable, packed)
    }
    names = [name for name in about.names if name in of]
    make: Any = namedtuple  # as Any, since type checkers want literal names
    return make("Needs", names, rename=True)(*[of[name] for name in names])


def _gradients(title: str, about: Parameters, lengths: Lengths, needs: Sequence[bool]) -> Callable[[Any], list[Tensor]]:
    """A function that picks, from a backward function's result, the gradients that are needed, in the signature's order."""
    schema = about.signature
    own = [name for name in about.names if name in {schema.names[i] for i in schema.differentiable}]  # the function's order
    length_of = dict(zip((schema.names[i] for i in schema.lists), lengths))
    order = [own.index(schema.names[i]) for i in schema.differentiable]
    packed = schema.packed_gradients(needs, lengths)
    packed = packed if isinstance(packed, tuple) else (packed,)
    count, wanted = len(own), [at for at, need in zip(order, packed) if need is True]

    def collect_simply(out: Any) -> list[Tensor]:
        if type(out) is tuple and len(out) == count:
            found = [out[at] for at in wanted]
            if all([isinstance(grad, Tensor) for grad in found]):
                return found
        return collect(out)

    def collect(out: Any) -> list[Tensor]:
        given = (out,) if len(own) == 1 and not (isinstance(out, tuple) and len(out) == 1) else out
        if not isinstance(given, (tuple, list)) or len(given) != len(own):
            got = f"{len(given)} of them" if isinstance(given, (tuple, list)) else type(given).__name__
            raise TypeError(f"{title} must return a gradient, or None, for each of {', '.join(own)}; got {got}")
        found: list[Tensor] = []
        for at, need in zip(order, packed):
            grad, name = given[at], own[at]
            if name in length_of:
                if isinstance(grad, (tuple, list)) and len(grad) != length_of[name]:
                    raise TypeError(f"{title} must return {length_of[name]} gradients for {name}; got {len(grad)}")
                entries = list(grad) if isinstance(grad, (tuple, list)) else [grad] * length_of[name]
                pairs = list(zip(entries, need))
            else:
                pairs = [(grad, need)]
            for entry, wanted in pairs:
                if wanted and not isinstance(entry, Tensor):
                    raise TypeError(f"{title} returned {type(entry).__name__} for {name}, whose gradient is needed")
                if wanted:
                    found.append(entry)
        return found

    return collect if length_of else collect_simply
