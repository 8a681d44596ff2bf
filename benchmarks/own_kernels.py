"""Host time of an eager call of a user's operator, compared with Sonde's own and with ``torch.library.custom_op``.

    python benchmarks/own_kernels.py [--device cuda] [--json FILE]

Three tensors of four elements, one result, a gradient of each; the "kernel" is one addition of torch's. Sonde's own operator is
registered like all of ours, by ``sonde.op.register.operator``, with a package of kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

import sonde
from sonde.op import register


def reference(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x + y


def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.add(x, y)


def gradients(grad: Tensor, x: Tensor, y: Tensor, z: Tensor, *, needs):
    return grad, grad, torch.zeros_like(z) if needs.z else None


def own() -> Callable[..., Tensor]:
    """An operator registered like ours: a package with ``forward_pass`` and ``backward_pass``."""

    def backward_pass(*args, needs, deterministic):
        def run(grad, x, y, z):
            return [g for g, need in zip((grad, grad, torch.zeros_like(z) if needs[2] else None), needs) if need]

        return SimpleNamespace(bind=lambda: run)

    for name in ("own_kernels_host", "own_kernels_host.cpu", "own_kernels_host.gpu"):
        sys.modules[name] = module = ModuleType(name)
        module.forward_pass = lambda *args: SimpleNamespace(bind=lambda: function)  # type: ignore[attr-defined]
        module.backward_pass = backward_pass  # type: ignore[attr-defined]
    op = register.operator(
        "own_kernels_host(Tensor x, Tensor y, Tensor z) -> Tensor",
        package="own_kernels_host",
        reference=reference,
        check=lambda *args: None,
        fake=lambda x, y, z: torch.empty_like(x),
        differentiable=("x", "y", "z"),
    )
    return lambda *args: op(*args, impl="auto")


def custom_op() -> Callable[..., Tensor]:
    @torch.library.custom_op("host_cost::custom", mutates_args=())
    def op(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.add(x, y)

    op.register_fake(lambda x, y, z: torch.empty_like(x))

    def backward(ctx, grad):
        return grad, grad, torch.zeros_like(ctx.saved_tensors[2]) if ctx.needs_input_grad[2] else None

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


def microseconds(call: Callable[[], object], device: str, count: int) -> float:
    """The smallest of several runs; each is short enough that the device's queue does not block the host."""
    found = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count)
        if device == "cuda":
            torch.cuda.synchronize()
    return 1e6 * min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json")
    options = parser.parse_args()
    users = sonde.operator("host_cost::users", function, reference=reference, backward=gradients)
    calls = {
        "the function alone": function,
        "Sonde's own operator": own(),
        "a user's operator": users,
        "a user's, by keywords": lambda x, y, z: users(x, z=z, y=y),
        "torch.library.custom_op": custom_op(),
    }
    plain = [torch.randn(4, device=options.device) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in plain]
    wanted, grad = leaves[:2], torch.ones(4, device=options.device)
    table = {}
    print(f"host time of a call in µs, {options.device}, torch {torch.__version__}")
    for name, call in calls.items():
        forward = microseconds(lambda call=call: call(*plain), options.device, 2000)
        both = microseconds(lambda call=call: torch.autograd.grad(call(*leaves), wanted, grad), options.device, 500)
        table[name] = dict(forward=forward, forward_and_backward=both)
        print(f"  {name:26} forward {forward:6.2f}   forward and backward {both:7.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(dict(device=options.device, torch=torch.__version__, microseconds=table), file, indent=1)


if __name__ == "__main__":
    main()
