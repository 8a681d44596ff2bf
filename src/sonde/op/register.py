"""An operator: a PyTorch reference, and kernels that compute the same faster. Ours and users' own are instances of one class.

A warm eager call goes straight to a prepared launch, through an ``autograd.Function`` if gradients may be needed. Compiled and
exported graphs hold an operator of torch (``library.py``) and reach the same functions through torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..jit import token
from . import plan
from .autograd import as_tuple, autograd_functions
from .cache import CallCache
from .calls import PreparedCall, PreparedCalls, frozen, is_observed, placed, plain, resolved
from .implementations import Implementations, OfPackage
from .implementations import decide as decide
from .layout import memory_format
from .library import Library, flat_function, register
from .signature import Lengths, Signature
from .torch_private import below_autograd, deterministic, forward_mode, functionalizing, has_tangent, transforming


class Operator:
    """A registered operator; call it with its flat arguments and ``impl=``."""

    def __init__(
        self,
        signature: Signature,  # flat, without lists
        implementations: Implementations,
        reference: Callable,
        check: Callable,
        fake: Callable,
        folds: bool,
        library: Library | None = None,  # registered here unless given
        schema: Signature | None = None,  # the library's signature, if it has lists of tensors
        lengths: Lengths = (),  # the lengths of these lists
    ) -> None:
        self.signature, self.implementations = signature, implementations
        self.reference, self.check, self.fake, self.folds = reference, check, fake, folds
        self.passes: CallCache[Callable] = CallCache()  # prepared passes, also those of calls through the dispatcher
        self.calls = PreparedCalls()
        schema, first = schema or signature, len(signature.graded)
        self.library = known = library or register(schema, lambda lengths: self)
        self.forward_op = flat_function(schema, known.forward, lengths)
        self.backward_op = flat_function(schema, known.backward, lengths, first)
        self._forward_below = flat_function(schema, known.forward_below, lengths)
        self._backward_below = flat_function(schema, known.backward_below, lengths, first)
        self.apply = autograd_functions(self)
        self._apply_eager, self._tensors = self.apply.eager, signature.tensors

    def __call__(self, *args, impl: str):
        if torch.compiler.is_compiling():
            return self._traced(args, impl)
        key, call = self.calls.find(impl, args)
        if call is not None:  # a warm call: it skips checks and the dispatcher
            return self._apply_eager(call, *args[: self._tensors]) if call.recorded else call.forward(*args)
        self.check(*args)
        n, fixed = self.signature.tensors, deterministic()
        impl, given, args = self.implementations.choose(impl, args), args, resolved(args)
        if plan.recording():
            plan.record(self.signature.title, impl, self._plan(impl, args, fixed))
            return self.fake(*args)
        if impl == "reference" or forward_mode(args):
            return self.reference(*args)
        if transforming() and not functionalizing():
            return self.apply.functional(PreparedCall(impl, fixed, args[n:], self.run_kernels), *args[:n])
        if key is None or not plain(given):  # through torch's dispatcher, so that modes, subclasses and tracers see the operator
            return self.forward_op(*args, impl, fixed)
        call = PreparedCall(impl, fixed, args[n:], self.prepare(impl, args, fixed), self._recorded(args))
        out = self._apply_eager(call, *args[:n]) if call.recorded else call.forward(*args)
        self.calls.add(key, args, call)
        return out

    def forget(self) -> None:
        """Drop prepared calls and passes, because an implementation was added."""
        self.passes.clear()
        self.calls.clear()

    def prepare(self, impl: str, args: Sequence, fixed: bool, needs: tuple = ()) -> Callable:
        """The prepared pass for such arguments, backward if there are `needs`; `fixed` asks for the same bits in every run."""
        kernels = self.implementations.kernels(impl)

        def anew() -> Callable:
            device = next(x.device for x in args if isinstance(x, Tensor))
            return placed(kernels.decide(args, needs, fixed), device, fixed and kernels.own)

        key = plain(args) if kernels.keeps else None
        if key is None:
            return anew()
        key = impl, needs, fixed, token(), key
        return self.passes.get(key) or self.passes.put(key, anew())

    def _plan(self, impl: str, args: Sequence, fixed: bool) -> list[plan.Kernel]:
        """The kernels of a call, and of the gradients that its arguments require."""
        if impl == "reference":
            return [plan.of_reference(args)]
        grad = torch.is_grad_enabled()
        needs = [grad and isinstance(args[i], Tensor) and args[i].requires_grad for i in self.signature.differentiable]
        with torch.no_grad():
            return self.implementations.kernels(impl).plan(self, args, needs, fixed)

    def run_forward(self, *args):
        """Call the function below autograd: directly, or through torch's dispatcher if the call is observed."""
        return _run(self._forward_below, self.run_kernels, args)

    def run_backward(self, *args):
        return _run(self._backward_below, self.run_backward_kernels, args)

    def fold(self, info, in_dims, args, function: Callable, first: int = 0):
        """vmap as one call, with the mapped dimension folded into the batch. The inputs begin at position `first`."""
        about = self.signature
        for i in about.unbatched:
            if in_dims[first + i] is not None:
                raise ValueError(
                    f"{about.title}: {about.names[i]} must be the same for all rows of a batch; torch.vmap must not map it"
                )
        if info.batch_size == 0:
            return _shaped(self.fold, info, in_dims, args, function, first)
        if not self.folds:
            return _loop(info, in_dims, args, function)
        return _fold(info, in_dims, args, function, {first + i for i in about.unbatched})

    def _traced(self, args: tuple, impl: str):
        self.check(*args)
        impl = self.implementations.choose(impl, args)
        if impl == "reference" or forward_mode(args):
            return self.reference(*args)
        return self.forward_op(*args, impl, torch.are_deterministic_algorithms_enabled())

    def _recorded(self, args: Sequence) -> bool:
        """True if a gradient may be needed."""
        return torch.is_grad_enabled() and any(args[i] is not None and args[i].requires_grad for i in self.signature.differentiable)

    # registered with torch.library

    def run_kernels(self, *arguments):
        *args, impl, fixed = frozen(arguments)
        return self.prepare(impl, args, fixed)(*args)

    def run_backward_kernels(self, *arguments):
        *args, needs, impl, fixed = frozen(arguments)
        found = iter(self.prepare(impl, args, fixed, needs)(*args))
        if not self.implementations.kernels(impl).own:  # a bias, say, may get the result's gradient itself
            given = [args[len(self.signature.graded) + i] for i, need in zip(self.signature.differentiable, needs) if need]
            found = iter([as_promised(x, like, args) for x, like in zip(found, given)])
        out = tuple(next(found) if need else args[0].new_empty(0) for need in needs)  # schemas have a fixed number of results
        return out[0] if len(out) == 1 else out

    def run_fake(self, *args):
        return self.fake(*args[:-2])

    def run_fake_backward(self, *args):
        about, needs = self.signature, args[-3]
        inputs = args[len(about.graded) : len(about.graded) + len(about.names)]
        out = tuple(
            torch.empty_like(inputs[i], memory_format=memory_format(inputs[i], i in about.channels_last))
            if need
            else args[0].new_empty(0)
            for i, need in zip(about.differentiable, needs)
        )
        return out[0] if len(out) == 1 else out

    def run_autograd(self, *arguments):
        *args, impl, fixed = resolved(arguments)
        if any(map(has_tangent, args)):  # forward mode goes through the reference
            return self.reference(*args)
        if not self._recorded(args):
            return self.run_forward(*args, impl, fixed)
        n = self.signature.tensors
        call = PreparedCall(impl, fixed, tuple(args[n:]), lambda *args: self.run_forward(*args, impl, fixed))
        return (self.apply.functional_level if transforming() else self._apply_eager)(call, *args[:n])

    def run_autograd_backward(self, *arguments):
        *args, needs, impl, fixed = arguments
        if any(map(has_tangent, args)):
            raise NotImplementedError(
                f"{self.signature.title}: a gradient has no forward-mode derivative here; use impl='reference'"
            )
        found = (self.apply.backward_level if transforming() else self.apply.backward)(needs, impl, fixed, *args)
        return found[0] if len(self.signature.differentiable) == 1 else found


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
) -> Operator:
    """Register ``sonde::<name>`` and ``sonde::<name>_backward``; return ``f(*args, impl)``.

    ``gpu.py`` and ``cpu.py`` of `package` have

    - ``forward_pass(*args)``, the :class:`~sonde.jit.Pass` that computes what the schema returns,
    - ``backward_pass(*grads, *args, *saved, needs, deterministic)``, the one that computes a gradient per true entry of `needs`.

    A pass is reused for all calls with the same shapes, strides, dtypes, devices and alignment of tensors, and the same values.
    If sizes depend on the data, a file has ``forward`` and ``backward`` instead, which run immediately, and ``plan(*args, needs,
    deterministic)``, which lists the kernels that those two launch.

    Args:
        schema: torch schema; inputs may be ``Tensor?``, several outputs are ``-> (Tensor, Tensor)``.
        reference: The definition, in plain PyTorch, with the same arguments and results.
        check: Raises for bad arguments, in words for the user. It may depend on shapes, dtypes, devices and the other arguments.
        fake: Checks its arguments too, and returns empty results.
        differentiable: Inputs that have a gradient; `needs` and the gradients follow their order.
        channels_last: Inputs whose gradient is channels-last if they are; every other gradient is contiguous.
        unbatched: Tensors without a batch dimension, shared by all rows. Every other tensor has a leading batch dimension, into
            which ``torch.func.vmap`` folds the mapped one.
        folds: Whether results have a batch dimension, too; if not, ``torch.func.vmap`` makes one call per row.
        forward_only: Tensors that change no result and that the backward pass does not need: it gets None for them.
        saved: Positions of the results that the backward pass reads.
        no_grad: Positions of the results that have no gradient.
    """
    signature = Signature.parse(schema, differentiable, channels_last, unbatched, forward_only, saved, no_grad)
    return Operator(signature, OfPackage(signature.name, package), reference, check, fake, folds)


def as_promised(grad: Tensor, like: Tensor, args: Sequence) -> Tensor:
    """A gradient as graphs expect it: contiguous, of the argument's dtype, and in memory of its own.

    A user's kernel may return another tensor, such as the result's own gradient for a bias. Eager autograd takes it as it is.
    """
    found = grad.to(like.dtype).contiguous()
    start = found.data_ptr()
    shared = found.numel() > 0 and any(isinstance(arg, Tensor) and arg.data_ptr() == start for arg in args)
    return found.clone() if shared else found


def _run(op: Callable, function: Callable, args: Sequence):
    if not is_observed() and plain(args):
        return function(*args)
    with below_autograd():
        return op(*args)


def _shaped(fold, info, in_dims, args, function, first):
    """vmap over no rows: the results' shapes are those of one row of zeros."""
    shapes = [None if dim is None else (*x.shape[:dim], 1, *x.shape[dim + 1 :]) for x, dim in zip(args, in_dims)]
    rows = [x if shape is None else x.new_zeros(shape) for x, shape in zip(args, shapes)]
    found, dims = fold(info._replace(batch_size=1), in_dims, rows, function, first)
    return tuple(x[:0] for x in found) if isinstance(found, tuple) else found[:0], dims


def _fold(info, in_dims, args, function, alone):
    n = info.batch_size

    def folded(i, x, dim):
        if not isinstance(x, Tensor) or i in alone:
            return x
        return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    out = function(*[folded(i, x, dim) for i, (x, dim) in enumerate(zip(args, in_dims))])
    parts = tuple(x.reshape(n, x.shape[0] // n, *x.shape[1:]) for x in as_tuple(out))
    return (parts, (0,) * len(parts)) if isinstance(out, (tuple, list)) else (parts[0], 0)


def _loop(info, in_dims, args, function):
    rows = [[x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims)] for i in range(info.batch_size)]
    found = [function(*row) for row in rows]
    if not isinstance(found[0], (tuple, list)):
        return torch.stack(found), 0
    parts = tuple(map(torch.stack, zip(*found)))
    return parts, (0,) * len(parts)
