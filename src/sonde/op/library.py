"""What an operator is: a PyTorch reference, kernels that accelerate it, and one registration.

The only module that talks to ``torch.library``. Eager calls go straight to an ``autograd.Function``; compiled and exported
graphs hold ``sonde::<name>`` and reach the same functions through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import plan

NAMESPACE = "sonde"
KERNELS = {"triton": "gpu", "numba": "cpu"}
_PLAIN = {Tensor, torch.nn.Parameter, type(None), int, float, bool, str, list}


def operator(
    schema: str,
    *,
    package: str | None,
    reference: Callable,
    fake: Callable,
    differentiable: Sequence[str],
    channels_last: Sequence[str] = (),
    saved: Sequence[int] = (),
    no_grad: Sequence[int] = (),
) -> Callable:
    """Register ``sonde::<name>`` and ``sonde::<name>_backward``; return ``f(*args, impl)``.

    ``gpu.py`` and ``cpu.py`` of `package` have

    - ``forward(*args)``, which returns what the schema says,
    - ``backward(*grads, *args, *saved, needs, deterministic)``, which yields one gradient per true entry of `needs`,
    - ``plan(*args, needs, deterministic)``, the list of kernels that those two launch.

    Args:
        schema: torch schema; inputs may be ``Tensor?``, several outputs are ``-> (Tensor, Tensor)``.
        reference: The definition, in plain PyTorch, with the same arguments and results.
        fake: Checks shapes and returns empty results.
        differentiable: Inputs that have a gradient; `needs` and the gradients follow their order.
        channels_last: Inputs whose gradient is channels-last where they are; every other gradient is contiguous.
        saved: Positions of the results that the backward pass wants to see.
        no_grad: Positions of the results that have no gradient.

    Every tensor has a leading batch dimension, into which ``torch.func.vmap`` folds the mapped one.
    """
    signature, result = schema.split(" -> ")
    name, inputs = signature.rstrip(")").split("(", 1)
    names = [declaration.split()[-1] for declaration in inputs.split(", ")]
    count = len(names)
    wanted = [names.index(n) for n in differentiable]
    keep_format = {names.index(n) for n in channels_last}
    results = result.count("Tensor")
    graded = [i for i in range(results) if i not in no_grad]
    g = len(graded)

    @lru_cache(None)
    def kernels(impl: str):
        return import_module(f"{package}.{KERNELS[impl]}")

    def forward(*arguments):
        *args, impl, _deterministic = arguments
        with _device_of(args[0]):
            return kernels(impl).forward(*args)

    def backward(*arguments):
        *args, needs, impl, deterministic = arguments
        with _device_of(args[0]):
            found = iter(kernels(impl).backward(*args, needs=needs, deterministic=deterministic))
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

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(impl, deterministic, *args):
            return _run(forward_op, forward, (*args, impl, deterministic))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.impl, ctx.deterministic, *args = inputs
            out = _tuple(output)
            ctx.mark_non_differentiable(*[out[i] for i in no_grad])
            _save(ctx, [*args, *(out[i] for i in saved)])

        @staticmethod
        def backward(ctx, *grads):
            args = _saved(ctx)
            needs = [ctx.needs_input_grad[2 + i] and args[i] is not None for i in wanted]
            first = Backward.apply if torch.is_grad_enabled() else Backward.forward  # someone may differentiate again
            found = first(needs, ctx.impl, ctx.deterministic, *[grads[i] for i in graded], *args)
            out: list = [None] * count
            for i, need, grad in zip(wanted, needs, found):
                out[i] = grad if need else None
            return None, None, *out

        @staticmethod
        def vmap(info, in_dims, impl, deterministic, *args):
            return _fold(info, in_dims[2:], args, lambda *xs: Forward.apply(impl, deterministic, *xs))

    class Backward(torch.autograd.Function):
        """First derivatives by kernels, whoever asks; only *their* derivative goes through the reference."""

        @staticmethod
        def forward(needs, impl, deterministic, *args):
            return _tuple(_run(backward_op, backward, (*args, needs, impl, deterministic)))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.needs, _, _, *args = inputs
            _save(ctx, args[: g + count])

        @staticmethod
        def backward(ctx, *cotangents):
            given = _saved(ctx)  # grads and arguments; what the forward pass saved is a function of these
            inner = [i for i, need in enumerate(ctx.needs_input_grad[3 : 3 + len(given)]) if need]

            def first(*xs):
                full = _replace(given, inner, xs)
                return vjp(full[:g], full[g:], ctx.needs)

            cotangents = tuple(c for c, need in zip(cotangents, ctx.needs) if need)
            found = torch.func.vjp(first, *[given[i] for i in inner])[1](cotangents)
            return None, None, None, *_replace([None] * len(given), inner, found), *[None] * len(saved)

        @staticmethod
        def vmap(info, in_dims, needs, impl, deterministic, *args):
            return _fold(info, in_dims[3:], args, lambda *xs: Backward.apply(needs, impl, deterministic, *xs))

    Forward.__name__, Backward.__name__ = name, f"{name}_backward"
    # without binding a signature, which costs as much as a launch
    apply = super(torch.autograd.Function, Forward).apply
    apply_backward = super(torch.autograd.Function, Backward).apply

    def autograd(*arguments):
        *args, impl, deterministic = arguments
        if torch.is_grad_enabled():
            for a in args:
                if isinstance(a, Tensor) and a.requires_grad:
                    with _one_level():
                        return apply(impl, deterministic, *args)
        return _run(forward_op, forward, (*args, impl, deterministic))

    def dispatched(*arguments):
        if _any_dual(arguments):  # kernels have no forward-mode derivative
            return reference(*arguments[:-2])
        return autograd(*arguments)

    def dispatched_backward(*arguments):
        *args, needs, impl, deterministic = arguments
        if _any_dual(args):
            raise NotImplementedError(f"{name}: a gradient has no forward-mode derivative here; use impl='reference'")
        with _one_level():
            found = apply_backward(needs, impl, deterministic, *args)
        return found[0] if len(wanted) == 1 else found

    # graphs of torch.export train too, and torch.func works inside torch.compile
    torch.library.impl(f"{NAMESPACE}::{name}", "Autograd", dispatched)
    torch.library.impl(f"{NAMESPACE}::{name}_backward", "Autograd", dispatched_backward)
    for op in (forward_op, backward_op):
        torch.library.register_vmap(op, lambda info, in_dims, *args, op=op: _fold(info, in_dims, args, op))

    def call(*args, impl: str):
        impl = plan.choose(name, impl, args[0])
        deterministic = torch.are_deterministic_algorithms_enabled()
        if not torch.compiler.is_compiling() and plan.recording():
            plan.record(name, impl, None if impl == "reference" else kernels(impl), args, wanted, deterministic)
            return fake(*args)
        if impl == "reference" or forward_ad._current_level >= 0:
            return reference(*args)
        if torch.compiler.is_compiling():
            return forward_op(*args, impl, deterministic)
        if torch._C._are_functorch_transforms_active():
            return Forward.apply(impl, deterministic, *args)
        return autograd(*args, impl, deterministic)  # the dispatcher's detour through Autograd is skipped

    call.forward_op, call.backward_op, call.reference = forward_op, backward_op, reference  # type: ignore[attr-defined]
    return call


def memory_format(x: Tensor, keep: bool) -> torch.memory_format:
    """The layout of the gradient of `x`."""
    if keep and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _define(name: str, schema: str, impl: Callable, fake: Callable) -> torch._ops.OpOverload:
    qualname = f"{NAMESPACE}::{name}"
    torch.library.define(qualname, schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        torch.library.impl(qualname, key, impl)
    torch.library.register_fake(qualname, fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _run(op: torch._ops.OpOverload, function: Callable, args: Sequence[Any]):
    """Call what `op` would dispatch to below autograd: directly where nobody is watching, which saves as much as a launch costs."""
    if (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd._profiler_enabled()
        and all(type(a) in _PLAIN for a in args)
    ):
        return function(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _device_of(tensor: Tensor):
    """Launch on the tensors' device, whichever is current."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def _any_dual(args: Sequence[Any]) -> bool:
    """Whether a tensor carries a tangent; graphs enter forward mode without Python's noticing."""
    return any(isinstance(a, Tensor) and torch._VF._unpack_dual(a, level=0)[1] is not None for a in args)  # type: ignore[attr-defined]


def _one_level():
    """Where torch.func calls us through the dispatcher, it has one of its levels in hand and wants that one recorded."""
    return enable_single_level_autograd_function() if torch._C._are_functorch_transforms_active() else nullcontext()


def _tuple(out) -> tuple:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _replace(values: Sequence, where: Sequence[int], by: Sequence) -> list:
    values = list(values)
    for i, x in zip(where, by):
        values[i] = x
    return values


def _save(ctx, args: Sequence[Any]) -> None:
    ctx.save_for_backward(*[a for a in args if isinstance(a, Tensor)])
    ctx.plain = [(not isinstance(a, Tensor), None if isinstance(a, Tensor) else a) for a in args]


def _saved(ctx) -> list:
    tensors = iter(ctx.saved_tensors)
    return [value if is_plain else next(tensors) for is_plain, value in ctx.plain]


def _fold(info, in_dims, args, function):
    """vmap by one call: the mapped dimension becomes part of the batch."""
    n = info.batch_size

    def folded(x, dim):
        if not isinstance(x, Tensor):
            return x
        return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    out = function(*[folded(x, dim) for x, dim in zip(args, in_dims)])
    parts = tuple(x.reshape(n, x.shape[0] // n, *x.shape[1:]) for x in _tuple(out))
    return (parts, (0,) * len(parts)) if isinstance(out, (tuple, list)) else (parts[0], 0)
