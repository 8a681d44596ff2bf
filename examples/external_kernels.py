"""Kernels of other libraries in a model, step by step: a graph break, an operator, a gradient of its own, a shared pool.

    python examples/external_kernels.py                     # on a GPU where there is one (CuPy), else on the CPU (SciPy)
    python examples/external_kernels.py --points 100000 --queries 27000

The model interpolates features of a point cloud at other points: a search for the k nearest, and a sum weighted by exp(−d/σ), as
in PhysicsNeMo's tutorial. docs/external-kernels.md explains the steps. Every figure is measured here; for comparison, the
tutorial's own figure, from another machine, is printed too.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import sonde
from own_kernels import scipy_nearest

PUBLISHED = "PhysicsNeMo's tutorial, A100, 27,000 queries, 100,000 points, k = 7, 25 features: cuML with a shared pool 11.2 ms"


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The smallest of several runs."""
    call()
    found = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return 1e3 * min(found)


class Graphs:
    """A backend of ``torch.compile`` that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        self.count += 1
        return graph.forward


def weighted(distances: Tensor, indices: Tensor, features: Tensor) -> Tensor:
    weights = torch.softmax(-distances / 0.1, -1)
    return (weights[..., None] * features[indices]).sum(1)


@torch.compiler.disable
def eager_search(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The library called directly from a model: torch's compiler cannot look into it, so the graph breaks."""
    if queries.is_cuda:
        from own_kernels.cupy_nearest import nearest

        return nearest(queries.detach(), points.detach(), k)
    return scipy_nearest.with_a_tree(queries.detach(), points.detach(), k)


def model(search: Callable, queries: Tensor, points: Tensor, features: Tensor, k: int) -> Tensor:
    features = torch.tanh(features)  # stands for the rest of the model, so that there is a graph to break
    distances, indices = search(queries, points, k)
    return weighted(distances, indices, features)


def graphs_of(call: Callable, *args: object) -> int:
    backend = Graphs()
    torch.compile(call, backend=backend)(*args)
    torch.compiler.reset()
    return backend.count


def without_backward() -> sonde.op.custom.CustomOperator:
    """The same operator without gradients of its own: they come from the reference, which computes all distances."""

    @sonde.operator("tutorial::nearest", reference=scipy_nearest.reference, no_grad=(1,))
    def nearest(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]: ...

    nearest.register("scipy", scipy_nearest.with_a_tree)
    nearest.register("cupy", "own_kernels.cupy_nearest:nearest")
    return nearest


def pool(repeats: int) -> None:
    """Temporaries of many sizes, allocated by two libraries alternately, with a pool each and with a shared one."""
    import cupy

    sizes = [(1 << 20) * (1 + 7 * i % 61) for i in range(60)]

    def loop() -> None:
        for size in sizes:
            mine = torch.empty(size, dtype=torch.uint8, device="cuda")
            theirs = cupy.empty(size, dtype=cupy.uint8)
            del mine
            more = cupy.empty(2 * size, dtype=cupy.uint8)
            del theirs, more
            torch.empty(2 * size, dtype=torch.uint8, device="cuda")

    def clean() -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()

    def measured() -> None:
        clean()
        free = torch.cuda.mem_get_info()[0]
        first = time.perf_counter()
        loop()
        torch.cuda.synchronize()
        first = 1e3 * (time.perf_counter() - first)
        taken = free - torch.cuda.mem_get_info()[0]
        later = milliseconds(loop, "cuda", repeats)
        print(f"    first loop {first:.2f} ms, later ones {later:.2f} ms, held by both {taken / 2**20:.0f} MiB")

    print("  two pools:")
    measured()
    print("  one pool, by sonde.memory.share_pool('cupy'):")
    with sonde.memory.share_pool("cupy"):
        measured()
    clean()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int)
    parser.add_argument("--queries", type=int)
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--features", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    on_gpu, k = options.device == "cuda", options.k
    M, N = options.queries or (27_000 if on_gpu else 2_000), options.points or (100_000 if on_gpu else 4_000)
    generator = torch.Generator().manual_seed(0)
    queries = (torch.rand(M, 3, generator=generator) * 2 - 1).to(options.device)
    points, features = (torch.randn(N, c, generator=generator).to(options.device) for c in (3, options.features))
    given = queries, points, features, k
    impl = "cupy" if on_gpu else "scipy"
    print(f"{M:,} queries, {N:,} points, k = {k}, {options.features} features, {options.device}, {impl}")
    print(f"  ({PUBLISHED})")

    def timed(call: Callable) -> float:
        return milliseconds(call, options.device, options.repeats)

    def trained(search: Callable) -> Tensor:
        leaf = points.clone().requires_grad_()
        model(search, queries, leaf, features, k).square().mean().backward()
        assert leaf.grad is not None
        return leaf.grad

    print("1. the library called as it is")
    print(f"  graphs: {graphs_of(lambda: model(eager_search, *given))}; gradient of the points: none")
    print(f"  forward {timed(lambda: model(eager_search, *given)):.2f} ms")

    print("2. as an operator, with the gradient of its reference")
    plain = without_backward()
    print(f"  graphs: {graphs_of(lambda: model(plain, *given))}")
    print(f"  forward {timed(lambda: model(plain, *given)):.2f} ms")
    some = min(M, 2**27 // N)  # the reference stores all distances at once
    queries_before, queries = queries, queries[:some]
    both = timed(lambda: trained(plain)), timed(lambda: trained(scipy_nearest.nearest))
    error = (trained(plain) - trained(scipy_nearest.nearest)).norm() / trained(plain).norm()
    print(f"  with the gradient of the points, {some:,} queries: {both[0]:.2f} ms")

    print("3. with a gradient of its own")
    print(f"  forward {timed(lambda: model(scipy_nearest.nearest, *given)):.2f} ms")
    print(f"  {some:,} queries: {both[1]:.2f} ms; differs from the reference's by {error:.1e} of its norm")
    queries = queries_before
    print(f"  all queries: {timed(lambda: trained(scipy_nearest.nearest)):.2f} ms")
    print(f"  {sonde.explain(scipy_nearest.nearest, queries, points.clone().requires_grad_(), k)}".replace("\n", "\n  "))

    print("4. with a shared pool")
    if on_gpu:
        pool(options.repeats)
    else:
        print("  needs a GPU and CuPy")

    print("5. and for comparison, sonde's own search and sum in one operator")
    print(f"  forward {timed(lambda: sonde.knn_aggregate(queries, points, features, k, 0.1)):.2f} ms")

    def trained_ours() -> None:
        leaf = points.clone().requires_grad_()
        sonde.knn_aggregate(queries, leaf, features, k, 0.1).square().mean().backward()

    print(f"  with the gradient of the points {timed(trained_ours):.2f} ms")


if __name__ == "__main__":
    main()
