"""Derivatives of operators: first ones by kernels, higher ones and forward mode by the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..jit import settings
from .calls import PreparedCall, is_observed, plain
from .torch_private import is_pre_dispatch, one_level, refusing_functionalize, transforming, unbound_apply

if TYPE_CHECKING:
    from .register import Operator


class Applied(NamedTuple):
    """The ways to apply an operator's ``autograd.Function``. Each takes a prepared call and tensors, or backward's arguments."""

    eager: Callable[..., Any]
    functional: Callable[..., Any]  # under a torch.func transform
    functional_level: Callable[..., Any]  # the same, called from inside the dispatcher
    backward: Callable[..., tuple]  # takes (needs, impl, deterministic, *grads, *arguments, *saved)
    backward_level: Callable[..., tuple]


def autograd_functions(op: Operator) -> Applied:
    backward = backward_function(op)
    save, gradients = saving(op), differentiating(op, backward)
    functional = functional_function(op, save, gradients)
    eager = eager_function(op, save, gradients)
    of_functional = refusing_functionalize(functional.apply)
    return Applied(unbound_apply(eager), of_functional, one_level(functional), unbound_apply(backward), one_level(backward))


def eager_function(op: Operator, save: Callable, gradients: Callable) -> type[torch.autograd.Function]:
    """The function of plain eager calls. It avoids torch.func's conventions, which cost as much as a launch."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call: PreparedCall, *tensors):
            output = call.forward(*tensors, *call.values)
            save(ctx, call, tensors, output)
            return output

        backward = staticmethod(gradients)

    Eager.__name__ = op.signature.name
    return Eager


def functional_function(op: Operator, save: Callable, gradients: Callable) -> type[torch.autograd.Function]:
    """The same function by the conventions of torch.func: ``setup_context`` and ``vmap``."""

    class Functional(torch.autograd.Function):
        @staticmethod
        def forward(call: PreparedCall, *tensors):
            return op.run_forward(*tensors, *call.values, call.impl, call.deterministic)

        @staticmethod
        def setup_context(ctx, inputs, output):
            call, *tensors = inputs
            save(ctx, call, tensors, output)

        backward = staticmethod(gradients)

        @staticmethod
        def vmap(info, in_dims, call, *tensors):
            return op.fold(info, in_dims[1:], tensors, lambda *xs: Functional.apply(call, *xs))

    Functional.__name__ = op.signature.name
    return Functional


def backward_function(op: Operator) -> type[torch.autograd.Function]:
    """Computes first derivatives by kernels. Its own derivative, the second one, goes through the reference."""
    g, n, count = len(op.signature.graded), op.signature.tensors, len(op.signature.names)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(needs, impl, deterministic, *args):
            return as_tuple(op.run_backward(*args, needs, impl, deterministic))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.needs, _, _, *args = inputs
            ctx.values = args[g + n : g + count]
            ctx.save_for_backward(*args[: g + n])

        @staticmethod
        def backward(ctx, *cotangents):
            given = [*ctx.saved_tensors, *ctx.values]  # saved results are functions of these, so they need no gradient
            inner = [i for i, need in enumerate(ctx.needs_input_grad[3 : 3 + len(given)]) if need]

            def first(*xs):
                full = replaced(given, inner, xs)
                return reference_vjp(op, full[:g], full[g:], ctx.needs)

            cotangents = tuple(c for c, need in zip(cotangents, ctx.needs) if need)
            found = torch.func.vjp(first, *[given[i] for i in inner])[1](cotangents)
            return None, None, None, *replaced([None] * len(given), inner, found), *[None] * len(op.signature.saved)

        @staticmethod
        def vmap(info, in_dims, needs, impl, deterministic, *args):
            return op.fold(info, in_dims[3:], args, lambda *xs: Backward.apply(needs, impl, deterministic, *xs), g)

    Backward.__name__ = f"{op.signature.name}_backward"
    return Backward


def saving(op: Operator) -> Callable[..., None]:
    """A function that saves what the backward pass of a call needs."""
    about = op.signature
    forward_only, ungraded, saved = about.forward_only, about.ungraded, about.saved

    def save(ctx, call: PreparedCall, tensors: Sequence, output) -> None:
        ctx.call = call
        if forward_only:
            tensors = [None if i in forward_only else x for i, x in enumerate(tensors)]
        if ungraded:
            ctx.mark_non_differentiable(*[output[i] for i in ungraded])
            ctx.set_materialize_grads(len(about.graded) > 1)  # with one graded result, the zeros would not be read
        kept = [as_tuple(output)[i] for i in saved] if saved else ()
        ctx.save_for_backward(*tensors, *kept)

    return save


def differentiating(op: Operator, backward: type[torch.autograd.Function]) -> Callable[..., tuple]:
    """The backward pass of a call. It returns one entry per argument of the ``autograd.Function``: the call and the tensors."""
    about, n = op.signature, op.signature.tensors
    graded, ungraded, saved, differentiable = about.graded, about.ungraded, about.saved, about.differentiable

    def gradients(ctx, *grads):
        call, found, asked = ctx.call, ctx.saved_tensors, ctx.needs_input_grad
        if ungraded:
            grads = tuple([grads[i] for i in graded])
        if grads[0] is None:  # the loss does not depend on this result
            return (None,) * (1 + n)
        args = (*grads, *found[:n], *call.values, *found[n:]) if saved else (*grads, *found, *call.values)
        twice = torch.is_grad_enabled()  # the gradient may be differentiated again
        seen = is_observed()
        if not twice and not seen:
            for guard, run in call.backward.get(asked, ()):
                if guard((*grads, *found)):
                    return run(*args)
        needs = tuple([asked[1 + i] for i in differentiable])
        if not op.implementations.differentiates(call.impl):
            by_reference = reference_vjp if twice or transforming() else reference_gradients
            return spread(op, lambda *_: by_reference(op, grads, args[len(grads) :], needs), needs)()
        with settings.use(call.settings):
            if twice or seen or plain(args) is None:
                if seen and not transforming():
                    out = observed_backward(op, args, needs, call)
                else:
                    out = (backward.apply if twice else backward.forward)(needs, call.impl, call.deterministic, *args)
                return spread(op, lambda: [grad for grad, need in zip(out, needs) if need], needs)()
            run = spread(op, op.prepare(call.impl, args, call.deterministic, needs), needs)
            out = run(*args)
        call.add_backward(asked, (*grads, *found), run)
        return out

    return gradients


def observed_backward(op: Operator, args: Sequence, needs: tuple, call: PreparedCall) -> tuple:
    if is_pre_dispatch() and op.signature.backward_reads_its_result:
        raise NotImplementedError(
            f"{op.signature.title}: its gradient reads its result, of which torch loses track in pre-dispatch traces; "
            "trace the gradient with make_fx(..., pre_dispatch=False)"
        )
    return as_tuple(op.backward_op(*args, needs, call.impl, call.deterministic))


def spread(op: Operator, run: Callable, needs: Sequence[bool]) -> Callable[..., tuple]:
    """`run`, with its gradients placed at their arguments of the ``autograd.Function`` and None elsewhere."""
    places = [1 + i for i, need in zip(op.signature.differentiable, needs) if need]
    take = itemgetter(*[1 + places.index(i) if i in places else 0 for i in range(1 + op.signature.tensors)])
    return lambda *args: take((None, *run(*args)))


def reference_vjp(op: Operator, grads: Sequence, args: Sequence, needs: Sequence[bool]) -> tuple:
    """The gradients that are needed, by differentiating the reference with ``torch.func``; they can be differentiated again."""
    chosen = [i for i, need in zip(op.signature.differentiable, needs) if need]
    pairs = [(i, grad) for i, grad in zip(op.signature.graded, grads) if grad.is_floating_point() or grad.is_complex()]

    def value(*xs):
        out = as_tuple(op.reference(*replaced(args, chosen, xs)))
        return tuple(out[i] for i, _ in pairs)

    return torch.func.vjp(value, *[args[i] for i in chosen])[1](tuple(grad for _, grad in pairs))


def reference_gradients(op: Operator, grads: Sequence, args: Sequence, needs: Sequence[bool]) -> list:
    """The same by torch's autograd, with less host time than ``torch.func``; the result cannot be differentiated again."""
    chosen = [i for i, need in zip(op.signature.differentiable, needs) if need]
    with torch.enable_grad():
        leaves = [args[i].detach().requires_grad_() for i in chosen]
        out = as_tuple(op.reference(*replaced(args, chosen, leaves)))
        pairs = [(out[i], grad) for i, grad in zip(op.signature.graded, grads) if out[i].requires_grad]
        if not pairs:
            names = ", ".join(op.signature.names[i] for i in chosen)
            raise RuntimeError(
                f"{op.signature.title}: its reference is not differentiable in {names}, so it has no gradient. Write the reference "
                "with differentiable operations, register a backward pass, or leave the argument out of differentiable="
            )
        found = torch.autograd.grad([x for x, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, found)]


def as_tuple(out) -> tuple:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def replaced(values: Sequence, where: Sequence[int], by: Sequence) -> list:
    values = list(values)
    for i, x in zip(where, by):
        values[i] = x
    return values
