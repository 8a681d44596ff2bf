"""The operators as the tests call them: implementations, small cases, arguments that require gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.operators import OPERATORS, Operator

HAS_GPU = torch.cuda.is_available()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Target(str):
    """The name of an implementation, and the device of the tensors that it gets in this run."""

    @property
    def impl(self) -> str:
        return str(self)

    @property
    def device(self) -> str:
        return "cuda" if self == "triton" and HAS_GPU else "cpu"

    @property
    def interpreted(self) -> bool:
        return self == "triton" and self.device == "cpu"


def cases() -> list:
    """Every small case of every operator that has gradients; some are not interpreted by default."""

    def parameter(operator: Operator, case: str):
        interpreted = operator.interpreted_cases is None or case in operator.interpreted_cases
        return pytest.param(operator, case, marks=() if interpreted else pytest.mark.interpreted(False), id=f"{operator}-{case}")

    return [parameter(operator, case) for operator in OPERATORS.values() if operator.graded for case in operator.cases.SMALL]


def distinct_sizes(operator: Operator, more: int = 0, keep: Sequence[str] = ()) -> dict[str, Any]:
    """Sizes of the first SMALL case made different from each other and from 2, so that a tracer cannot take one for another."""
    sizes = next(iter(operator.cases.SMALL.values()))
    letters = [k for k, v in sizes.items() if isinstance(v, int) and k not in (*operator.fixed, *keep)]
    first = ["Q", "B", "heads", "D"]  # the interpreter loops over these, so they stay small
    order = [k for k in first if k in letters] + [k for k in letters if k not in first]
    least = 1 + max([2, *(sizes[k] for k in operator.fixed if k in sizes)])
    return {**sizes, **{k: least + i + more for i, k in enumerate(order)}}


def backward_arguments(
    operator: Operator, given: Sequence, impl: str, needs: Sequence[bool] | None = None, grad: bool = False
) -> tuple:
    """Arguments of the registered backward operator, from those of the public function."""
    args = operator.registered(*given)
    outs = tuple_of(operator.op.forward_op(*args, impl, True))
    schema = operator.op.backward_op._schema
    named = [a.name for a in schema.arguments]
    graded = [int(n[4:]) for n in named if n.startswith("grad") and n[4:].isdigit()]
    saved = [outs[int(n[6:])].detach() for n in named if n.startswith("result")]
    needs = [True] * len(floats(given)) if needs is None else list(needs)
    needs += [False] * (len(schema.returns) - len(needs))
    grads = [g.requires_grad_(grad) for g in cotangents([outs[i].detach() for i in graded])]
    return (*grads, *args, *saved, needs, impl, True)


def floats(args: Sequence) -> list[int]:
    """Positions of the tensors that have gradients."""
    return [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]


def tensors(args: Sequence) -> list[int]:
    return [i for i, a in enumerate(args) if isinstance(a, Tensor)]


def tuple_of(out) -> tuple:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def replaced(args: Sequence, where: Sequence[int], by: Sequence) -> list:
    args = list(args)
    for i, x in zip(where, by):
        args[i] = x
    return args


def leaves(args: Sequence) -> list:
    """The same memory, requiring gradients."""
    return [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def cotangents(outs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.device, o.dtype) for o in outs]


def value_and_grads(function: Callable, args: Sequence, grads: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and the gradients of every floating-point argument (zeros for unused ones)."""
    args = leaves(args)
    outs = [o for o in tuple_of(function(*args)) if o.requires_grad]
    wanted = [args[i] for i in floats(args)]
    if not outs:
        return list(tuple_of(function(*args))), [torch.zeros_like(a) for a in wanted]
    grads = cotangents(outs) if grads is None else [g.to(o.dtype) for g, o in zip(grads, outs)]
    found = torch.autograd.grad(outs, wanted, grads, allow_unused=True)
    return [o.detach() for o in outs], [torch.zeros_like(a) if g is None else g for a, g in zip(wanted, found)]


@contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
