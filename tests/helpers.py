"""What the tests share: operators found by name, inputs in red zones, poisoned outputs, bounds on errors, spies."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import signal
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.op import memory, torch_private
from sonde.op.cache import forget_calls
from sonde.points._search.reference import searching_in

OPERATORS = [
    "grid.sample_sum",
    "grid.sample_dot",
    "grid.grid_sample",
    "grid.deformable_aggregation",
    "grid.ms_deform_attn",
    "points.knn",
    "points.radius_neighbors",
    "points.knn_aggregate",
    "points.radius_aggregate",
]  # a new operator adds its name; the rest is derived from its folder

HAS_GPU = torch.cuda.is_available()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Target:
    impl: str

    @property
    def device(self) -> str:
        return "cuda" if self.impl == "triton" and HAS_GPU else "cpu"

    @property
    def interpreted(self) -> bool:
        return self.impl == "triton" and self.device == "cpu"


@dataclass(frozen=True)
class Operator:
    path: str
    public: Callable
    op: Callable  # what operator() returned
    definition: Callable
    registered: Callable  # the schema's arguments from the public ones
    cases: ModuleType

    @staticmethod
    def find(path: str) -> Operator:
        name = path.rsplit(".", 1)[-1]
        api, reference, cases = (import_module(f"sonde.{path}.{file}") for file in ("api", "reference", "cases"))
        same = getattr(api, "arguments", lambda *args: args)
        return Operator(path, getattr(api, name), getattr(api, f"_{name}"), getattr(reference, name), same, cases)

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def arguments(self) -> list[str]:
        return [name for name in inspect.signature(self.public).parameters if name != "impl"]

    @property
    def function(self) -> Callable:
        """The public one; options that it takes by keyword only come last here; of several results the first has a gradient."""
        known = inspect.signature(self.public).parameters.values()
        plain = sum(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in known)
        options = [p.name for p in known if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name != "impl"]
        optional = [p.default is not inspect.Parameter.empty for p in known if p.name != "impl"]
        least = len(optional) - sum(optional) if self.lists else len(optional)

        def call(*args, impl="auto"):
            if not least <= len(args) <= len(optional):
                raise TypeError(f"{self.name}: {least} to {len(optional)} arguments expected, got {len(args)}")
            out = self.public(*args[:plain], **dict(zip(options, args[plain:])), impl=impl)
            return out if isinstance(out, Tensor) else torch.where(out[0] < torch.inf, out[0], 0)  # distances, where there are any

        return call if options or self.lists else self.public

    @property
    def atomic(self) -> bool:
        """Whether its Triton kernels add by atomics where that is allowed."""
        return not self.lists

    @property
    def lists(self) -> bool:
        """Whether it lists neighbours and takes an index and a batch of them."""
        return self.path.startswith("points.")

    @property
    def reference(self) -> Callable:
        return self.call("reference")

    def backward_arguments(self, given: Sequence, impl: str, needs: Sequence[bool] | None = None, grad: bool = False) -> tuple:
        """Of the registered backward operator, for arguments of the public function."""
        args = self.registered(*given)
        outs = tuple_of(self.op.forward_op(*args, impl, True))
        schema = self.op.backward_op._schema
        named = [a.name for a in schema.arguments]
        graded = [int(n[4:]) for n in named if n.startswith("grad") and n[4:].isdigit()]
        saved = [outs[int(n[6:])].detach() for n in named if n.startswith("result")]
        needs = [True] * len(floats(given)) if needs is None else list(needs)
        needs += [False] * (len(schema.returns) - len(needs))
        grads = [g.requires_grad_(grad) for g in cotangents([outs[i].detach() for i in graded])]
        return (*grads, *args, *saved, needs, impl, True)

    @property
    def has_images(self) -> bool:
        """Whether its first argument is an image, which may be channels-last."""
        return self.arguments[0] in ("images", "input")

    @property
    def keeps_layout(self) -> bool:
        """Whether a channels-last input gives a channels-last result."""
        return getattr(self.cases, "KEEPS_LAYOUT", False)

    @property
    def broadcasts(self) -> bool:
        """Whether a batch of one serves any other."""
        return getattr(self.cases, "BROADCASTS", False)

    def kernels(self, impl: str) -> ModuleType:
        return import_module(f"sonde.{self.path}.{ {'triton': 'gpu', 'numba': 'cpu'}[impl] }")

    def make(self, case: str | None = None, **options) -> tuple:
        sizes = self.cases.SMALL[case] if case else {}
        letters = getattr(self.cases, "LETTERS", {})
        return self.cases.make(**{letters.get(k, k): v for k, v in {**sizes, **options}.items()})

    def call(self, target: Target | str) -> Callable:
        impl = target if isinstance(target, str) else target.impl
        return lambda *args: self.function(*args, impl=impl)


def cases() -> list[tuple[str, str]]:
    return [(path, case) for path in OPERATORS for case in import_module(f"sonde.{path}.cases").SMALL]


def bench_case(operator: Operator) -> str:
    """A real workload of middle size."""
    known = operator.cases.BENCH
    return next((case for case in ("pixelsplat_infer", "ddetr_dec") if case in known), next(iter(known)))


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
    """The same memory, asking for gradients."""
    return [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def cotangents(outs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.device, o.dtype) for o in outs]


def value_and_grads(function: Callable, args: Sequence, grads: Sequence[Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and the gradients of every floating-point argument (zeros where it is not used)."""
    args = leaves(args)
    outs = [o for o in tuple_of(function(*args)) if o.requires_grad]
    wanted = [args[i] for i in floats(args)]
    if not outs:
        return list(tuple_of(function(*args))), [torch.zeros_like(a) for a in wanted]
    grads = cotangents(outs) if grads is None else [g.to(o.dtype) for g, o in zip(grads, outs)]
    found = torch.autograd.grad(outs, wanted, grads, allow_unused=True)
    return [o.detach() for o in outs], [torch.zeros_like(a) if g is None else g for a, g in zip(wanted, found)]


# ---- bounds -------------------------------------------------------------------------------------------------------------


def accumulator(args: Sequence) -> torch.dtype:
    return torch.float64 if any(a.dtype == torch.float64 for a in args if isinstance(a, Tensor)) else torch.float32


def exact(operator: Operator, args: Sequence) -> list:
    """float64 arguments for the reference, with the pixel positions that the accumulation dtype rounds them to.

    Positions are computed with every operation rounded, so that they have the same bits in every implementation;
    a coordinate that rounds across a pixel's edge is then nobody's error.
    """
    wide = accumulator(args)
    made = [a.detach().double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    named = dict(zip(operator.arguments, args))
    if "samples" in named and wide is not torch.float64:
        H, W = named["images"].shape[2:]
        parts = [_same_position(u, size) for u, size in zip(named["samples"].detach().to(wide).unbind(-1), (W, H))]
        made[operator.arguments.index("samples")] = torch.stack(parts, -1)
    if "grid" in named and wide is not torch.float64:
        align = named["align_corners"]
        parts = [
            _same_position(u, n, align) for u, n in zip(named["grid"].detach().to(wide).unbind(-1), named["input"].shape[:1:-1])
        ]
        made[operator.arguments.index("grid")] = torch.stack(parts, -1)
    return made


def _same_position(u: Tensor, size: int, align: bool = False) -> Tensor:
    """The float64 coordinate of the pixel position that float32 finds for `u`, in the same cell."""

    def position(u: Tensor) -> Tensor:
        return (u + 1) / 2 * (size - 1) if align else ((u + 1) * size - 1) / 2

    if size - align <= 0:
        return u.double()
    x = position(u).double()
    u = 2 * x / (size - 1) - 1 if align else (2 * x + 1) / size - 1
    for _ in range(64):
        below = position(u).floor() < x.floor()  # false for NaN
        u = torch.where(below, torch.nextafter(u, torch.full_like(u, torch.inf)), u)
    return u


def error(got: Tensor, want: Tensor) -> float:
    return (got.double() - want).norm().item()


def assert_exact(what: str, got: Tensor, want: Tensor, lossy: Tensor, slack: float = 0.0) -> None:
    """Within the bar of `got`'s dtype; `want` is float64, `lossy` the reference run with the same arguments."""
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert got.dtype == lossy.dtype, f"{what}: {got.dtype}, expected {lossy.dtype}"
    scale, found, of_reference = want.norm().item(), error(got, want), error(lossy, want)
    bound = {
        torch.float64: 1e-12 * scale,
        torch.float32: 2e-6 * scale,
    }.get(got.dtype, 1.1 * of_reference + 2e-6 * scale)
    bound += slack
    assert found <= bound, (  # also false for NaN
        f"{what}: error {found:.3g} in norm, allowed {bound:.3g} "
        f"(norm {scale:.3g}, the reference in {got.dtype} loses {of_reference:.3g})"
    )


def assert_agrees(
    operator: Operator, target: Target, args: Sequence, note: str = "", given: Sequence | None = None, slack: bool = False
):
    """Values and all gradients of `args` against the float64 reference; `given` are the same values in another layout.

    `slack` allows for the cancellation that a result of very few elements can suffer.
    """
    lossy, lossy_grads = value_and_grads(operator.reference, args)
    grads = [redzone(g) for g in cotangents(lossy)]
    narrow = torch.promote_types(args[0].dtype, args[1].dtype) if operator.lists else torch.float64
    with searching_in(torch.float32 if narrow != torch.float64 else None):  # and the same neighbours
        want, want_grads = value_and_grads(operator.reference, exact(operator, args), grads)
    got, got_grads = value_and_grads(operator.call(target), args if given is None else given, grads)
    names = ["value"] * len(want) + [f"gradient of {operator.arguments[i]}" for i in floats(args)]
    for what, a, b, c in zip(names, [*got, *got_grads], [*want, *want_grads], [*lossy, *lossy_grads], strict=True):
        extra = (
            128 * torch.finfo(accumulator(args)).eps * b.numel() ** 0.5 + torch.finfo(a.dtype).eps * b.norm().item()
            if slack or what.endswith(" sigma")  # one number, of all rows' sums
            else 0.0
        )
        if operator.lists and args[0].dtype != torch.float64:
            extra += 1.1 * error(c, b) * (a.dtype == torch.float64)  # distances are as exact as coordinates, whatever else is wide
        assert_exact(f"{note} {what}".strip(), a, b, c, extra)
    return got, got_grads


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    def bits(t: Tensor) -> Tensor:
        return t.contiguous().flatten().view(torch.uint8)

    return all(x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


# ---- layouts ------------------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "channels_last", "reversed", "sliced", "misaligned", "expanded", "padded_rows")


def restride(t: Tensor, layout: str) -> Tensor:
    """The values of `t` in another memory layout (``expanded``: those of its first row, in every row)."""
    if layout == "channels_last" and t.ndim == 4:
        return t.contiguous(memory_format=torch.channels_last)
    if layout == "reversed":
        return t.permute(*range(t.ndim)[::-1]).contiguous().permute(*range(t.ndim)[::-1])
    if layout == "sliced":
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), torch.nan, dtype=t.dtype, device=t.device)
        return wide[..., 1::2].copy_(t)
    if layout == "misaligned":
        flat = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
        return flat[1:].view(t.shape).copy_(t)
    if layout == "expanded":
        return t[:1].expand(t.shape) if t.shape[0] else t
    if layout == "padded_rows" and t.ndim > 1:
        wide = torch.full((*t.shape[:-2], t.shape[-2] + 1, t.shape[-1] + 3), torch.nan, dtype=t.dtype, device=t.device)
        return wide[..., 1:, 2 : 2 + t.shape[-1]].copy_(t)
    return t.contiguous()


def redzone(t: Any, pad: int = 64) -> Any:
    """The same values and strides in the middle of a NaN buffer, so that a stray read poisons the result."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
    buffer = torch.full((span + 2 * pad,), torch.nan, dtype=t.dtype, device=t.device)
    if span:
        buffer[pad : pad + span] = t.as_strided((span,), (1,))  # gaps and all, since elements may share memory
    return buffer.as_strided(t.shape, t.stride(), pad)


@contextmanager
def poisoned(pad: int = 64) -> Iterator[None]:
    """Uninitialised memory is NaN (or an absurd integer) and fenced: reading it shows in results, writing past it is an error."""
    fences = []

    def fence(t: Tensor) -> Tensor:
        if t.device.type == "meta" or t.layout is not torch.strided or type(t) is not Tensor:
            return t
        bad = (
            torch.nan
            if t.is_floating_point() or t.is_complex()
            else (True if t.dtype is torch.bool else torch.iinfo(t.dtype).max // 2)
        )
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
        buffer = torch.full((span + 2 * pad,), bad, dtype=t.dtype, device=t.device)
        fences.append((buffer, span, bad))
        return buffer.as_strided(t.shape, t.stride(), pad)

    forget_calls()  # what was decided has found its functions
    reused, memory.CAN_COUNT_OWNERS = memory.CAN_COUNT_OWNERS, False
    owners: list[tuple] = [(torch, n) for n in ("empty", "empty_like", "empty_strided")]
    owners += [(Tensor, n) for n in ("new_empty", "new_empty_strided")]
    owners += [(torch_private, n) for n in ("_empty_strided_cpu", "_empty_strided_cuda") if getattr(torch_private, n)]
    before = [(owner, n, n in vars(owner), getattr(owner, n)) for owner, n in owners]
    for owner, n, _, real in before:
        setattr(owner, n, lambda *a, _real=real, **k: fence(_real(*a, **k)))
    try:
        yield
    finally:
        for owner, n, own, real in before:
            if own:
                setattr(owner, n, real)
            else:
                delattr(owner, n)
        memory.CAN_COUNT_OWNERS = reused
        forget_calls()
    for buffer, span, bad in fences:
        edges = torch.cat([buffer[:pad], buffer[pad + span :]])
        intact = edges.isnan() if bad != bad else edges == bad
        assert intact.all(), f"wrote outside a tensor of {span} elements"


# ---- spies --------------------------------------------------------------------------------------------------------------


def spy(monkeypatch, operator: Operator, impl: str) -> list[tuple[str, dict]]:
    """Record every call of the kernels' launchers: ``("forward" | "backward", keywords)``."""
    calls: list[tuple[str, dict]] = []

    def note(phase: str, run: Callable, *args, **keywords):
        calls.append((phase, keywords))
        return run(*args)

    _around(monkeypatch, operator.kernels(impl), note)
    return calls


def _around(monkeypatch, module: ModuleType, around: Callable) -> None:
    """Passes of this module go through ``around(phase, run, *args, **keywords)``."""
    forget_calls()
    recorded = hasattr(module, "forward_pass")
    for phase in ("forward", "backward"):
        real = getattr(module, f"{phase}_pass" if recorded else phase)

        def record(*args, _phase=phase, _real=real, **keywords):
            made = _real(*args, **keywords)
            run = made.bind()
            made.bind = lambda: lambda *args: around(_phase, run, *args, **keywords)
            return made

        def act(*args, _phase=phase, _real=real, **keywords):
            return around(_phase, partial(_real, **keywords), *args, **keywords)

        monkeypatch.setattr(module, f"{phase}_pass" if recorded else phase, record if recorded else act)


class Allocations(TorchDispatchMode):
    """Bytes of every new storage that a function makes on its way, and the most that lived at one time."""

    def __init__(self):
        super().__init__()
        self.sizes: list[tuple[str, int]] = []
        self.now = self.peak = self.returned = 0

    def __enter__(self):
        gc.freeze()  # what lives already need not be searched again and again
        return super().__enter__()

    def __exit__(self, *problem):
        gc.unfreeze()
        return super().__exit__(*problem)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tuple_of(out):
            if isinstance(t, Tensor) and "set_" not in str(func) and t.untyped_storage().data_ptr() not in seen:
                storage = t.untyped_storage()
                gc.collect()  # the interpreter leaves its arguments to the collector
                self.sizes.append((str(func), storage.nbytes()))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, storage.nbytes())
        return out

    def freed(self, size: int) -> None:
        self.now -= size


def allocations(monkeypatch, operator: Operator, impl: str) -> list[Allocations]:
    """What the kernels' launchers allocate, call by call."""
    found: list[Allocations] = []

    def watch(phase: str, run: Callable, *args, **keywords):
        with Allocations() as mode:
            out = run(*args)
            out = out if isinstance(out, Tensor) else tuple(out)
        mode.returned = sum(t.nbytes for t in tuple_of(out))
        found.append(mode)
        return out

    _around(monkeypatch, operator.kernels(impl), watch)
    for device in ("cpu", "cuda"):  # no mode sees what these do
        monkeypatch.setattr(torch_private, f"_empty_strided_{device}", None)
    monkeypatch.setattr(memory, "CAN_COUNT_OWNERS", False)  # nor memory that is used again
    return found


def improve_interpreter() -> None:
    """Triton's interpreter, rounding to bfloat16 as every GPU does, and four times as fast."""
    import triton.language as tl
    from triton.runtime import interpreter

    _hasten_interpreter()

    cut, names = interpreter._convert_float, {}

    def convert(x, source, target, mode):
        """The interpreter cuts off what bfloat16 cannot hold; hardware rounds to nearest even."""
        if target.is_bf16() and (source.is_fp32() or source.is_fp64()):
            return torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()
        return cut(x, source, target, mode)

    def patch(package, builder, scope):
        """The interpreter searches the language for builtins at every call of every device function."""
        if package not in names:
            names[package] = [n for n, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        if names[package] and tl.core.is_builtin(getattr(package, names[package][0])):  # not yet patched by the caller
            for n in names[package]:
                interpreter._patch_attr(package, n, getattr(package, n), builder, scope)

    plain = interpreter.InterpreterBuilder.cast_impl

    def cast(self, source, target):
        """The interpreter takes the bits of a bfloat16 for an integer where the other side is float64."""
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float64):
            return plain(self, plain(self, source, tl.float32), tl.float64)
        if kinds == (tl.float64, tl.bfloat16):
            return interpreter.TensorHandle(convert(source.data, tl.float64, tl.bfloat16, None), tl.bfloat16)
        return plain(self, source, target)

    interpreter.InterpreterBuilder.cast_impl = cast
    interpreter._convert_float = convert
    if {"builder", "scope"} <= set(inspect.signature(interpreter._patch_builtin).parameters):
        interpreter._patch_builtin = patch


def _hasten_interpreter() -> None:
    """The same results without what it computes for nobody, or again and again: three quarters of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    core, builder, semantic = tl.core, interpreter.interpreter_builder, interpreter.interpreter_semantic
    if not builder.options.debug:  # each operation on integers is done in 64 bits too, compared, and the outcome dropped
        builder.options = replace(builder.options, sanitize_overflow=False)

    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    def known_dtype(dtype):
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = numpy_dtype(dtype)
        return numpy_dtypes[dtype.name]

    block, tensor, blocks, shapes = core.block_type.__init__, core.tensor.__init__, {}, {}

    def new_block(self, element_ty, shape):
        """Of equal shapes, one and the same is kept."""
        key = tuple([s.value if type(s) is core.constexpr else s for s in shape])
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name.removesuffix(f"{element_ty}>")
        self.element_ty, (self.shape, self.numel, name) = element_ty, blocks[key]
        self.name = f"{name}{element_ty}>"

    def new_tensor(self, handle, type):
        shape = type.shape if type.is_block() else None
        known = shapes.get(id(shape))
        if known is None or known[0] is not shape:
            tensor(self, handle, type)
            shapes[id(shape)] = shape, self.numel, self.shape  # which keeps the shape, and hence its id
        else:
            self.handle, self.type, self.dtype, (_, self.numel, self.shape) = handle, type, type.scalar, known

    broadcast = semantic.broadcast_impl_value

    def broadcast_apart(lhs, rhs):
        alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if alike else broadcast(lhs, rhs)

    call, languages = interpreter.InterpretedFunction.__call__, {}

    def call_patched(self, *args, **keywords):
        """Every call of a device function patches the language, which its caller has patched."""
        if self.fn not in languages:
            languages[self.fn] = [value for value in self.fn.__globals__.values() if value is tl or value is core]
        if any(core.is_builtin(language.load) for language in languages[self.fn]):
            return call(self, *args, **keywords)
        try:
            return self.rewrite()(*args, **keywords)
        except Exception as e:
            raise interpreter.InterpreterError(repr(e)) from e

    interpreter._get_np_dtype = known_dtype
    core.block_type.__init__, core.tensor.__init__ = new_block, new_tensor
    semantic.broadcast_impl_value = broadcast_apart
    interpreter.InterpretedFunction.__call__ = call_patched


@contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def in_child(function: Callable[[], Any], seconds: int = 60) -> Any:
    """What `function` returns in a forked process; a crash there is an error here and nothing more."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(seconds)
            try:
                out = (True, function())
            except BaseException:
                out = (False, traceback.format_exc())
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(out, pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        raw = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert not os.WIFSIGNALED(status), f"the child was ended by signal {os.WTERMSIG(status)}"
    ok, value = pickle.loads(raw)
    assert ok, value
    return value


def distinct_sizes(operator: Operator, more: int = 0, keep: Sequence[str] = ()) -> dict[str, Any]:
    """Sizes of the first SMALL case made different from each other and from 2, so that a tracer cannot take one for another."""
    sizes = next(iter(operator.cases.SMALL.values()))
    fixed = getattr(operator.cases, "FIXED", ("octaves", "cams", "L"))
    letters = [k for k, v in sizes.items() if isinstance(v, int) and k not in (*fixed, *keep)]
    first = ["Q", "B", "heads", "D"]  # what the interpreter loops over stays small
    order = [k for k in first if k in letters] + [k for k in letters if k not in first]
    least = 1 + max([2, *(sizes[k] for k in fixed if k in getattr(operator.cases, "FIXED", ()))])
    return {**sizes, **{k: least + i + more for i, k in enumerate(order)}}
