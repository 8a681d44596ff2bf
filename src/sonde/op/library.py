"""The registration of an operator with torch's dispatcher. The only module that uses ``torch.library``.

Graphs of ``torch.compile`` and ``torch.export`` hold ``<namespace>::<name>`` and ``<namespace>::<name>_backward``. Their arguments
may be lists of tensors; the :class:`~sonde.op.register.Operator` behind them takes and returns flat arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .signature import Lengths, Signature
from .torch_private import CAN_SKIP_AUTOGRAD

if TYPE_CHECKING:
    from .register import Operator


class Library(NamedTuple):
    """The operators registered with torch for one of ours; each takes the schema's arguments."""

    forward: Any
    backward: Any
    forward_below: Any  # the same two, called below autograd
    backward_below: Any


def register(signature: Signature, serving: Callable[[Lengths], Operator]) -> Library:
    """Define an operator and its gradient; `serving` returns the flat operator for lists of these lengths."""
    first = len(signature.graded)  # where the arguments begin among those of the backward operator

    def forward(method: str) -> Callable[..., Any]:
        if not signature.lists:
            return getattr(serving(()), method)

        def serve(*args: Any) -> Any:
            flat, lengths = signature.unpacked(args)
            return getattr(serving(lengths), method)(*flat)

        return serve

    def backward(method: str) -> Callable[..., Any]:
        if not signature.lists:
            return getattr(serving(()), method)

        def serve(*args: Any) -> Any:
            flat, lengths = signature.unpacked(args, first)
            return signature.packed_gradients(flattened(getattr(serving(lengths), method)(*flat)), lengths)

        return serve

    def define(suffix: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        name = f"{signature.name}{suffix}"
        qualname = f"{signature.namespace}::{name}"
        torch.library.define(qualname, schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            torch.library.impl(qualname, device, run)
        torch.library.register_fake(qualname, fake)
        return getattr(getattr(torch.ops, signature.namespace), name).default

    def both(suffix: str) -> tuple[Any, Any]:
        given = define(suffix, signature.forward_schema, forward("run_kernels"), forward("run_fake"))
        name = f"_backward{suffix}"
        return given, define(name, signature.backward_schema, backward("run_backward_kernels"), backward("run_fake_backward"))

    # if autograd cannot be skipped, separate operators without an autograd rule do the work below it
    above = both("")
    found = Library(*above, *(above if CAN_SKIP_AUTOGRAD else both("_kernel")))
    # so that graphs of torch.export can be trained, and torch.func works inside torch.compile
    torch.library.impl(f"{signature.qualname}", "Autograd", forward("run_autograd"))
    torch.library.impl(f"{signature.qualname}_backward", "Autograd", backward("run_autograd_backward"))
    torch.library.register_vmap(found.forward, _vmap(signature, serving, found.forward, 0))
    torch.library.register_vmap(found.backward, _vmap(signature, serving, found.backward, first))
    return found


def flat_function(signature: Signature, function: Any, lengths: Lengths, first: int = 0) -> Any:
    """An operator of torch as a function of flat arguments, which begin at position `first`, with flat results."""
    if not signature.lists:
        return function

    def call(*args: Any) -> Any:
        out = function(*signature.packed(args, lengths, first))
        return flattened(out) if isinstance(out, (tuple, list)) else out

    return call


def flattened(out: Any) -> tuple[Any, ...]:
    """Results with the entries of lists in place of the lists."""
    results = out if isinstance(out, tuple) else (out,)
    return tuple(x for result in results for x in (result if isinstance(result, list) else [result]))


def _vmap(signature: Signature, serving: Callable[[Lengths], Operator], function: Any, first: int) -> Callable[..., Any]:
    """The rule of ``torch.vmap`` for the operator or its gradient; the operator's arguments begin at position `first`."""

    def rule(info: Any, dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        if not signature.lists:
            return serving(()).fold(info, dims, args, function, first)
        flat, lengths = signature.unpacked(args, first)
        nested = [d if isinstance(d, (list, tuple)) or not isinstance(a, list) else [d] * len(a) for a, d in zip(args, dims)]
        flat_dims, _ = signature.unpacked(nested, first)
        call = flat_function(signature, function, lengths, first)
        out, out_dims = serving(lengths).fold(info, flat_dims, flat, call, first)
        if first == 0:
            return out, out_dims
        return signature.packed_gradients(out, lengths), signature.packed_gradients(out_dims, lengths)

    return rule
