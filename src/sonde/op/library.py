"""What an operator is: a PyTorch reference, kernels that accelerate it, and one registration.

The only module that talks to ``torch.library``. Eager calls go straight to an ``autograd.Function``; compiled and exported
graphs hold ``sonde::<name>`` and reach the same functions through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ..jit import settings, token
from . import plan
from .cache import CallCache
from .cache import forget_calls as forget
from .kinds import Kind, Kinds, frozen, is_observed, is_pre_dispatch, like, placed, plain, resolved

__all__ = ["decide", "forget", "memory_format", "operator"]

NAMESPACE = "sonde"
KERNELS = {"triton": "gpu", "numba": "cpu"}


def operator(
    schema: str,
    *,
    package: str | None,
    reference: Callable,
    check: Callable,
    fake: Callable,
    differentiable: Sequence[str],
    channels_last: Sequence[str] = (),
    unbatched: Sequence[str] = (),
    folds: bool = True,
    forward_only: Sequence[str] = (),
    saved: Sequence[int] = (),
    no_grad: Sequence[int] = (),
) -> Callable:
    """Register ``sonde::<name>`` and ``sonde::<name>_backward``; return ``f(*args, impl)``.

    ``gpu.py`` and ``cpu.py`` of `package` have

    - ``forward(*args)``, which returns what the schema says,
    - ``backward(*grads, *args, *saved, needs, deterministic)``, which yields one gradient per true entry of `needs`,
    - ``plan(*args, needs, deterministic)``, the list of kernels that those two launch.

    Where there is something to decide, they have ``decide_forward`` and ``decide_backward`` in place of the first two. These take
    the same arguments and return a function of the positional ones, which is remembered for all calls of their kind. A kind is
    shapes, strides, dtypes, devices and alignment of tensors, and the other arguments themselves.

    Args:
        schema: torch schema; inputs may be ``Tensor?``, several outputs are ``-> (Tensor, Tensor)``.
        reference: The definition, in plain PyTorch, with the same arguments and results.
        check: Raises for bad arguments, in words for the user; what it says depends on kinds of tensors and on other values only.
        fake: Checks its arguments too and returns empty results.
        differentiable: Inputs that have a gradient; `needs` and the gradients follow their order.
        channels_last: Inputs whose gradient is channels-last where they are; every other gradient is contiguous.
        unbatched: Tensors without a batch dimension, the same for all rows of the others'.
        folds: Whether results have a batch dimension, too; without one ``torch.func.vmap`` makes a call for each row.
        forward_only: Tensors that change no result, and that the backward pass has no use for: it gets None.
        saved: Positions of the results that the backward pass wants to see.
        no_grad: Positions of the results that have no gradient.

    Every other tensor has a leading batch dimension, into which ``torch.func.vmap`` folds the mapped one.
    """
    signature, result = schema.split(" -> ")
    name, inputs = signature.rstrip(")").split("(", 1)
    declared = [declaration.split() for declaration in inputs.split(", ")]
    names = [name for _, name in declared]
    n = sum(kind.startswith("Tensor") for kind, _ in declared)
    assert all(kind.startswith("Tensor") for kind, _ in declared[:n]), "tensors come first"
    count = len(names)
    wanted = [names.index(n) for n in differentiable]
    alone = {names.index(n) for n in unbatched}
    keep_format = {names.index(n) for n in channels_last}
    dropped = {names.index(n) for n in forward_only}
    results = result.count("Tensor")
    graded = [i for i in range(results) if i not in no_grad]
    g = len(graded)
    reads_its_result = any(i in graded for i in saved)

    @lru_cache(None)
    def kernels(impl: str):
        return import_module(f"{package}.{KERNELS[impl]}")

    decisions: CallCache[Callable] = CallCache()
    known = Kinds()

    def decided(impl: str, args: Sequence, deterministic: bool, needs: tuple = ()) -> Callable:
        """What a pass over these arguments does: the backward pass if there are `needs`."""

        def anew() -> Callable:
            return placed(decide(module, args, needs, deterministic), args[0].device, deterministic)

        module = kernels(impl)
        kind = plain(args) if hasattr(module, "decide_forward") else None
        if kind is None:
            return anew()
        key = impl, needs, deterministic, token(), kind
        return decisions.get(key) or decisions.put(key, anew())

    def forward(*arguments):
        *args, impl, deterministic = frozen(arguments)
        return decided(impl, args, deterministic)(*args)

    def backward(*arguments):
        *args, needs, impl, deterministic = frozen(arguments)
        found = iter(decided(impl, args, deterministic, needs)(*args))
        out = tuple(next(found) if need else args[0].new_empty(0) for need in needs)  # fixed arity: schemas have no other
        return out[0] if len(out) == 1 else out

    def fake_backward(*args):
        inputs, needs = args[g : g + count], args[-3]
        out = tuple(
            torch.empty_like(inputs[i], memory_format=memory_format(inputs[i], i in keep_format)) if need else args[0].new_empty(0)
            for i, need in zip(wanted, needs)
        )
        return out[0] if len(out) == 1 else out

    tail = "str impl, bool deterministic"
    given = ", ".join([*(f"Tensor grad{i}" for i in graded), inputs, *(f"Tensor result{i}" for i in saved)])
    returned = ", ".join(["Tensor"] * len(wanted))
    forward_op = _define(name, f"({inputs}, {tail}) -> {result}", forward, lambda *args: fake(*args[:-2]))
    backward_op = _define(f"{name}_backward", f"({given}, bool[] needs, {tail}) -> ({returned})", backward, fake_backward)

    def vjp(grads, args, needs):
        """The gradients that are needed, by the definition itself."""
        chosen = [i for i, need in zip(wanted, needs) if need]

        def partial(*xs):
            out = _tuple(reference(*_replace(args, chosen, xs)))
            return tuple(out[i] for i in graded)

        return torch.func.vjp(partial, *[args[i] for i in chosen])[1](tuple(grads))

    def fold(info, in_dims, args, function, first: int = 0):
        """vmap by one call: the mapped dimension becomes part of the batch. `first` is where the inputs begin."""
        for i in alone:
            if in_dims[first + i] is not None:
                raise ValueError(f"{name}: {names[i]} must be the same for all rows of a batch; torch.vmap must not map it")
        if not folds:
            return _loop(info, in_dims, args, function)
        return _fold(info, in_dims, args, function, {first + i for i in alone})

    def save(ctx, kind: Kind, tensors: Sequence, output) -> None:
        ctx.kind = kind
        if dropped:
            tensors = [None if i in dropped else x for i, x in enumerate(tensors)]
        if no_grad:
            ctx.mark_non_differentiable(*[output[i] for i in no_grad])
            ctx.set_materialize_grads(g > 1)  # nobody reads zeros in place of the gradients that are not there
        kept = [_tuple(output)[i] for i in saved] if saved else ()
        ctx.save_for_backward(*tensors, *kept)

    def gradients(ctx, *grads):
        """Of one call, for whoever asks."""
        kind, found, asked = ctx.kind, ctx.saved_tensors, ctx.needs_input_grad
        if no_grad:
            grads = tuple([grads[i] for i in graded])
        if grads[0] is None:  # what was computed of the result does not depend on it
            return (None,) * (1 + n)
        args = (*grads, *found[:n], *kind.values, *found[n:]) if saved else (*grads, *found, *kind.values)
        twice = torch.is_grad_enabled()  # someone may differentiate again
        observed = is_observed()
        if not twice and not observed:
            for same, act in kind.backward.get(asked, ()):
                if same((*grads, *found)):
                    return act(*args)
        needs = tuple([asked[1 + i] for i in wanted])
        with settings.use(kind.settings):
            if twice or observed or plain(args) is None:
                if observed and not torch._C._are_functorch_transforms_active():
                    if is_pre_dispatch() and reads_its_result:
                        raise NotImplementedError(
                            f"{name}: its gradient reads its result, of which torch loses track in pre-dispatch traces; "
                            "trace the gradient with make_fx(..., pre_dispatch=False)"
                        )
                    out = _tuple(backward_op(*args, needs, kind.impl, kind.deterministic))
                else:
                    out = (Backward.apply if twice else Backward.forward)(needs, kind.impl, kind.deterministic, *args)
                return spread(lambda: [grad for grad, need in zip(out, needs) if need], needs)()
            act = spread(decided(kind.impl, args, kind.deterministic, needs), needs)
            out = act(*args)
        kind.backward[asked] = ((like((*grads, *found)), act), *kind.backward.get(asked, ())[:3])
        return out

    def spread(run: Callable, needs: Sequence[bool]) -> Callable[..., tuple]:
        """The gradients that `run` finds, each in the place of its argument of the ``autograd.Function``; the kind is the first."""
        places = [1 + i for i, need in zip(wanted, needs) if need]
        take = itemgetter(*[1 + places.index(i) if i in places else 0 for i in range(1 + n)])
        return lambda *args: take((None, *run(*args)))

    class Forward(torch.autograd.Function):
        """Where torch.func is at work."""

        @staticmethod
        def forward(kind, *tensors):
            return _run(forward_op, forward, (*tensors, *kind.values, kind.impl, kind.deterministic))

        @staticmethod
        def setup_context(ctx, inputs, output):
            kind, *tensors = inputs
            save(ctx, kind, tensors, output)

        backward = staticmethod(gradients)

        @staticmethod
        def vmap(info, in_dims, kind, *tensors):
            return fold(info, in_dims[1:], tensors, lambda *xs: Forward.apply(kind, *xs))

    class Backward(torch.autograd.Function):
        """First derivatives by kernels, whoever asks; only *their* derivative goes through the reference."""

        @staticmethod
        def forward(needs, impl, deterministic, *args):
            return _tuple(_run(backward_op, backward, (*args, needs, impl, deterministic)))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.needs, _, _, *args = inputs
            ctx.values = args[g + n : g + count]
            ctx.save_for_backward(*args[: g + n])

        @staticmethod
        def backward(ctx, *cotangents):
            given = [*ctx.saved_tensors, *ctx.values]  # what was saved is a function of these
            inner = [i for i, need in enumerate(ctx.needs_input_grad[3 : 3 + len(given)]) if need]

            def first(*xs):
                full = _replace(given, inner, xs)
                return vjp(full[:g], full[g:], ctx.needs)

            cotangents = tuple(c for c, need in zip(cotangents, ctx.needs) if need)
            found = torch.func.vjp(first, *[given[i] for i in inner])[1](cotangents)
            return None, None, None, *_replace([None] * len(given), inner, found), *[None] * len(saved)

        @staticmethod
        def vmap(info, in_dims, needs, impl, deterministic, *args):
            return fold(info, in_dims[3:], args, lambda *xs: Backward.apply(needs, impl, deterministic, *xs), g)

    class Eager(torch.autograd.Function):
        """Forward, where torch.func is not at work: its conventions cost as much as a launch."""

        @staticmethod
        def forward(ctx, kind, *tensors):
            output = kind.forward(*tensors, *kind.values)
            save(ctx, kind, tensors, output)
            return output

        backward = staticmethod(gradients)

    Forward.__name__, Backward.__name__, Eager.__name__ = name, f"{name}_backward", name
    # without binding a signature, which costs as much as a launch
    apply_eager = super(torch.autograd.Function, Eager).apply
    apply_backward = super(torch.autograd.Function, Backward).apply
    apply_level, apply_level_backward = _of_one_level(Forward), _of_one_level(Backward)

    def recorded(args: Sequence) -> bool:
        """Whether somebody may ask for gradients."""
        return torch.is_grad_enabled() and any(args[i] is not None and args[i].requires_grad for i in wanted)

    def dispatched(*arguments):
        *args, impl, deterministic = resolved(arguments)
        if _any_dual(args):  # kernels have no forward-mode derivative
            return reference(*args)
        if not recorded(args):
            return _run(forward_op, forward, (*args, impl, deterministic))
        kind = Kind(impl, deterministic, tuple(args[n:]), lambda *args: _run(forward_op, forward, (*args, impl, deterministic)))
        return (apply_level if torch._C._are_functorch_transforms_active() else apply_eager)(kind, *args[:n])

    def dispatched_backward(*arguments):
        *args, needs, impl, deterministic = arguments
        if _any_dual(args):
            raise NotImplementedError(f"{name}: a gradient has no forward-mode derivative here; use impl='reference'")
        apply = apply_level_backward if torch._C._are_functorch_transforms_active() else apply_backward
        found = apply(needs, impl, deterministic, *args)
        return found[0] if len(wanted) == 1 else found

    # graphs of torch.export train too, and torch.func works inside torch.compile
    torch.library.impl(f"{NAMESPACE}::{name}", "Autograd", dispatched)
    torch.library.impl(f"{NAMESPACE}::{name}_backward", "Autograd", dispatched_backward)
    for op, first in ((forward_op, 0), (backward_op, g)):
        torch.library.register_vmap(op, lambda info, in_dims, *args, op=op, first=first: fold(info, in_dims, args, op, first))

    def call(*args, impl: str):
        if torch.compiler.is_compiling():
            check(*args)
            impl = plan.choose(name, impl, args[0])
            deterministic = torch.are_deterministic_algorithms_enabled()
            if impl == "reference" or forward_ad._current_level >= 0:
                return reference(*args)
            return forward_op(*args, impl, deterministic)
        key, kind = known.find(impl, args)
        if kind is not None:  # nothing is asked twice of calls of one kind, and nothing goes through the dispatcher
            return apply_eager(kind, *args[:n]) if kind.recorded else kind.forward(*args)
        check(*args)
        deterministic = torch._C._get_deterministic_algorithms()
        impl, given, args = plan.choose(name, impl, args[0]), args, resolved(args)
        if plan.recording():
            plan.record(name, impl, None if impl == "reference" else kernels(impl), args, wanted, deterministic)
            return fake(*args)
        if impl == "reference" or forward_ad._current_level >= 0:
            return reference(*args)
        if torch._C._are_functorch_transforms_active() and not _functionalizing():
            return Forward.apply(Kind(impl, deterministic, args[n:], forward), *args[:n])
        if key is None or not plain(given):  # the operator that torch knows: every mode, subclass and tracer has its say
            return forward_op(*args, impl, deterministic)
        kind = Kind(impl, deterministic, args[n:], decided(impl, args, deterministic), recorded(args))
        out = apply_eager(kind, *args[:n]) if kind.recorded else kind.forward(*args)
        known.add(key, args, kind)
        return out

    call.forward_op, call.backward_op, call.reference = forward_op, backward_op, reference  # type: ignore[attr-defined]
    return call


def memory_format(x: Tensor, keep: bool) -> torch.memory_format:
    """The layout of the gradient of `x`, or of a result that looks like it: channels-last where `x` is, if it is to `keep` that."""
    if keep and not x.is_contiguous():
        for layout, rank in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if x.ndim == rank and x.is_contiguous(memory_format=layout):
                return layout
    return torch.contiguous_format


def _define(name: str, schema: str, impl: Callable, fake: Callable) -> torch._ops.OpOverload:
    qualname = f"{NAMESPACE}::{name}"
    torch.library.define(qualname, schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        torch.library.impl(qualname, key, impl)
    torch.library.register_fake(qualname, fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def decide(kernels: Any, args: Sequence, needs: Sequence[bool] = (), deterministic: bool = False) -> Callable:
    """What a pass of these kernels does to such arguments: the backward pass if there are `needs`."""
    how = dict(needs=needs, deterministic=deterministic)
    if hasattr(kernels, "decide_forward"):
        return kernels.decide_backward(*args, **how) if needs else kernels.decide_forward(*args)
    return partial(kernels.backward, **how) if needs else kernels.forward


def _run(op: torch._ops.OpOverload, function: Callable, args: Sequence[Any]):
    """Call what `op` would dispatch to below autograd: directly where nobody observes."""
    if not is_observed() and plain(args):
        return function(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _any_dual(args: Sequence[Any]) -> bool:
    """Whether a tensor carries a tangent; graphs enter forward mode without Python's noticing."""
    return any(isinstance(a, Tensor) and torch._VF._unpack_dual(a, level=0)[1] is not None for a in args)  # type: ignore[attr-defined]


def _functionalizing() -> bool:
    """True if the innermost transform is ``functionalize``, which has no rule for an ``autograd.Function``."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() == torch._C._functorch.TransformType.Functionalize


def _of_one_level(function: type[torch.autograd.Function]) -> Callable:
    """For where torch.func calls us through the dispatcher: it has one of its levels in hand and wants that one recorded."""
    parts = {part: staticmethod(getattr(function, part)) for part in ("forward", "setup_context", "backward")}
    level: Any = type(function.__name__, (torch.autograd.function._SingleLevelFunction,), parts)

    def apply(*args):
        with enable_single_level_autograd_function():
            return level.apply(*args)

    return apply


def _tuple(out) -> tuple:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _replace(values: Sequence, where: Sequence[int], by: Sequence) -> list:
    values = list(values)
    for i, x in zip(where, by):
        values[i] = x
    return values


def _fold(info, in_dims, args, function, alone):
    n = info.batch_size

    def folded(i, x, dim):
        if not isinstance(x, Tensor) or i in alone:
            return x
        return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    out = function(*[folded(i, x, dim) for i, (x, dim) in enumerate(zip(args, in_dims))])
    parts = tuple(x.reshape(n, x.shape[0] // n, *x.shape[1:]) for x in _tuple(out))
    return (parts, (0,) * len(parts)) if isinstance(out, (tuple, list)) else (parts[0], 0)


def _loop(info, in_dims, args, function):
    rows = [[x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims)] for i in range(info.batch_size)]
    found = [function(*row) for row in rows]
    if not isinstance(found[0], (tuple, list)):
        return torch.stack(found), 0
    parts = tuple(map(torch.stack, zip(*found)))
    return parts, (0,) * len(parts)
