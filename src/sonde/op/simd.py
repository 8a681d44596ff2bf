"""Sixteen numbers at once in Numba kernels.

LLVM's own vectoriser needs run-time checks that arrays do not overlap and leaves the end of every row to scalar code: on rows of
148 channels that is three times slower. These are LLVM vectors, which the compiler splits into the machine's registers. All lanes
run the same operations, so a sum has the same bits at every position of a row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

LANES = 16
intrinsic: Callable[..., Any] = extending.intrinsic  # it supplies the first argument, which type checkers cannot know


class Lanes(types.Type):
    def __init__(self, dtype: types.Type, count: int = LANES) -> None:
        super().__init__(f"Lanes({dtype} x {count})")
        self.dtype, self.count = dtype, count


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind: Lanes) -> None:
        super().__init__(manager, kind, ir.VectorType(manager[kind.dtype].get_value_type(), kind.count))


@intrinsic
def load(typing, x, row, column, end):
    """Lanes ``x[row, column : column + LANES]``; those from column `end` on are zero and not read."""

    def generate(context, builder, signature, args):
        pointer, align = _address(context, builder, LANES, signature.args[0], *args[:3])
        left = builder.sub(args[3], args[2])
        lanes = pointer.type.pointee
        with builder.if_else(builder.icmp_signed(">=", left, left.type(LANES)), likely=True) as (whole, part):
            with whole:
                all_lanes, whole_block = builder.load(pointer, align=align), builder.block
            with part:
                some_lanes, part_block = _load_below(builder, left, pointer, align), builder.block
        found = builder.phi(lanes)
        found.add_incoming(all_lanes, whole_block)
        found.add_incoming(some_lanes, part_block)
        return found

    return Lanes(x.dtype)(x, types.intp, types.intp, types.intp), generate


@intrinsic
def load_four(typing, x, row, column, end):
    """Four lanes ``x[row, column : column + 4]``; those from column `end` on are zero and not read."""

    def generate(context, builder, signature, args):
        pointer, align = _address(context, builder, 4, signature.args[0], *args[:3])
        return _load_below(builder, builder.sub(args[3], args[2]), pointer, align)

    return Lanes(x.dtype, 4)(x, types.intp, types.intp, types.intp), generate


@intrinsic
def prefetch(typing, x, row, column):
    """Prefetch the cache line of ``x[row, column]`` into the second level; the first level can have few misses in flight."""

    def generate(context, builder, signature, args):
        pointer, _ = _address(context, builder, LANES, signature.args[0], *args)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        begin = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(begin, [builder.bitcast(pointer, byte), number(0), number(2), number(1)])  # to read, how near, of data
        return context.get_dummy_value()

    return types.none(x, types.intp, types.intp), generate


@intrinsic
def store(typing, v, x, row, column):
    """``x[row, column : column + LANES] = v``; the row must be long enough."""

    def generate(context, builder, signature, args):
        pointer, align = _address(context, builder, v.count, signature.args[1], *args[1:])
        builder.store(args[0], pointer, align=align)
        return context.get_dummy_value()

    return types.none(v, x, types.intp, types.intp), generate


@intrinsic
def store_some(typing, v, x, row, column, end):
    """``x[row, column : column + LANES] = v``, or 4 columns if `v` has four lanes; from column `end` on nothing is written."""

    def generate(context, builder, signature, args):
        pointer, align = _address(context, builder, v.count, signature.args[1], *args[1:4])
        left = builder.sub(args[4], args[3])
        lanes = pointer.type.pointee
        with builder.if_else(builder.icmp_signed(">=", left, left.type(v.count)), likely=True) as (whole, part):
            with whole:
                builder.store(args[0], pointer, align=align)
            with part:
                inside = _below(builder, left, v.count)
                kind = ir.FunctionType(ir.VoidType(), [lanes, pointer.type, ir.IntType(32), inside.type])
                masked = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.{_suffix(lanes)}.p0")
                builder.call(masked, [args[0], pointer, ir.IntType(32)(align), inside])
        return context.get_dummy_value()

    return types.none(v, x, types.intp, types.intp, types.intp), generate


@intrinsic
def spread(typing, number):
    """One number in all lanes."""

    def generate(context, builder, signature, args):
        return _spread(builder, args[0], context.get_value_type(signature.return_type))

    return Lanes(number)(number), generate


@intrinsic
def fma(typing, a, v, w):
    """a·v + w, rounded once where the machine can; `a` is a number or lanes."""

    def generate(context, builder, signature, args):
        a, v, w = args
        if not isinstance(signature.args[0], Lanes):
            a = _spread(builder, a, v.type)
        return builder.fadd(builder.fmul(a, v, flags=("contract",)), w, flags=("contract",))

    return w(a, v, w), generate


@intrinsic
def floor(typing, v):
    def generate(context, builder, signature, args):
        return _call(builder, "llvm.floor", args[0])

    return v(v), generate


@intrinsic
def magnitude(typing, v):
    def generate(context, builder, signature, args):
        return _call(builder, "llvm.fabs", args[0])

    return v(v), generate


@intrinsic
def cast(typing, v, kind):
    """Lanes converted to a NumPy type or to the type of other lanes; integers are rounded towards zero."""

    def generate(context, builder, signature, args):
        lanes, old, new = context.get_value_type(signature.return_type), v.dtype, signature.return_type.dtype
        if old == new:
            return args[0]
        if isinstance(old, types.Integer):
            return builder.sext(args[0], lanes)
        if isinstance(new, types.Integer):
            return builder.fptosi(args[0], lanes)
        return (builder.fpext if new.bitwidth > old.bitwidth else builder.fptrunc)(args[0], lanes)

    return Lanes(kind.dtype, v.count)(v, kind), generate


@intrinsic
def where(typing, inside, a, b):
    """Lanes of `a` where `inside`, of `b` elsewhere. Either may be a number; two numbers give 32-bit lanes."""
    lanes = next((x for x in (a, b) if isinstance(x, Lanes)), Lanes(types.int32, inside.count))

    def generate(context, builder, signature, args):
        return builder.select(args[0], *(_lanes(builder, x, context.get_value_type(lanes)) for x in args[1:]))

    return lanes(inside, *(x if isinstance(x, Lanes) else lanes.dtype for x in (a, b))), generate


@intrinsic
def everywhere(typing, inside):
    """True if all lanes are."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(1), [args[0].type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.and.v{LANES}i1"), args)

    return types.boolean(inside), generate


@intrinsic
def pairs(typing, x, first, at):
    """``x[first + at]`` and ``x[first + at + 1]`` of all lanes, both by one load per lane.

    Gather instructions are slower on every machine whose microcode was patched against data leaks.
    """

    def generate(context, builder, signature, args):
        start = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        bits, size = signature.args[0].dtype.bitwidth, ir.IntType(32)
        both = ir.Constant(ir.VectorType(ir.IntType(2 * bits), LANES), ir.Undefined)
        for i in map(size, range(LANES)):
            here = builder.gep(start, [builder.sext(builder.extract_element(args[2], i), args[1].type)])
            pair = builder.load(builder.bitcast(here, both.type.element.as_pointer()), align=bits // 8)
            both = builder.insert_element(both, pair, i)
        flat = builder.bitcast(both, ir.VectorType(start.type.pointee, 2 * LANES))
        halves = _shuffled(builder, [flat, ir.Constant(flat.type, ir.Undefined)], _TURNS)
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(Lanes(x.dtype), 2)(x, types.intp, at), generate


@intrinsic
def unzip(typing, v, w):
    """Split the lanes of `v`, followed by those of `w`, into the first, third, … and the second, fourth, …."""

    def generate(context, builder, signature, args):
        return context.make_tuple(builder, signature.return_type, _shuffled(builder, args, _TURNS))

    return types.UniTuple(v, 2)(v, w), generate


@intrinsic
def zipped(typing, v, w):
    """Interleave the lanes of `v` and `w`; returns the first half and the second half."""

    def generate(context, builder, signature, args):
        order = [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
        return context.make_tuple(builder, signature.return_type, _shuffled(builder, args, (order[:LANES], order[LANES:])))

    return types.UniTuple(v, 2)(v, w), generate


@intrinsic
def total(typing, v):
    """Sum over the lanes, by halves."""

    def generate(context, builder, signature, args):
        lanes = args[0].type
        kind = ir.FunctionType(lanes.element, [lanes.element, lanes])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.{_suffix(lanes)}")
        return builder.call(reduce, [lanes.element(-0.0), args[0]], fastmath=("reassoc",))

    return v.dtype(v), generate


@intrinsic
def totals(typing, a, b, c, d):
    """Four lanes: the sum over the lanes of each argument, by halves."""

    def generate(context, builder, signature, args):
        def halves(v, w, count):  # adds the two halves of each group of `count` lanes; `w` may be None
            lanes = range(v.type.count if w is None else 2 * v.type.count)
            w = ir.Constant(v.type, ir.Undefined) if w is None else w
            orders = [i for i in lanes if i % count < count // 2], [i for i in lanes if i % count >= count // 2]
            return builder.fadd(*(builder.shuffle_vector(v, w, _order(order)) for order in orders))

        v, w, x, y = args
        fours = halves(halves(v, w, 16), halves(x, y, 16), 8)
        return halves(halves(fours, None, 4), None, 2)

    return Lanes(a.dtype, 4)(a, b, c, d), generate


# ---- operators of lanes with lanes or with a number, which is converted to their type; every result is rounded ------------------


class _Alike(AbstractTemplate):
    def generic(self, args, kws):
        lanes = [a for a in args if isinstance(a, Lanes)]
        if lanes:
            kinds = [a if isinstance(a, Lanes) else lanes[0].dtype for a in args]
            return signature(self.result(lanes[0]), *kinds)

    def result(self, lanes: Lanes) -> Lanes:
        return lanes


class _Truth(_Alike):
    def result(self, lanes: Lanes) -> Lanes:
        return Lanes(types.boolean, lanes.count)


def _operator(function: Callable, template: type, real: str, whole: str, sign: str | None = None) -> None:
    """Lower an operator to LLVM's instruction `real` for floats or `whole` for integers, or to the comparison `sign`."""

    def generate(context, builder, signature, args):
        lanes = next(kind for kind in signature.args if isinstance(kind, Lanes))
        floating = isinstance(lanes.dtype, types.Float)
        a, b = (_lanes(builder, x, context.get_value_type(lanes)) for x in args)
        if sign:
            return (builder.fcmp_ordered if floating else builder.icmp_signed)(sign, a, b)
        return getattr(builder, real if floating else whole)(a, b)

    infer_global(function)(type("_Of", (template,), {"key": function}))
    for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(function, *kinds)(generate)


_operator(operator.add, _Alike, "fadd", "add")
_operator(operator.sub, _Alike, "fsub", "sub")
_operator(operator.mul, _Alike, "fmul", "mul")
_operator(operator.truediv, _Alike, "fdiv", "sdiv")
_operator(operator.and_, _Alike, "", "and_")
_operator(operator.or_, _Alike, "", "or_")
_operator(operator.xor, _Alike, "", "xor")
for _function, _sign in ((operator.lt, "<"), (operator.le, "<="), (operator.gt, ">"), (operator.ge, ">="), (operator.eq, "==")):
    _operator(_function, _Truth, "", "", _sign)


_NAMES = {"float": "f32", "double": "f64"}
_TURNS = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))


def _shuffled(builder, lanes, orders):
    return [builder.shuffle_vector(*lanes, _order(order)) for order in orders]


def _order(lanes):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))


def _call(builder, name, v):
    kind = ir.FunctionType(v.type, [v.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"{name}.{_suffix(v.type)}"), [v])


def _lanes(builder, x, lanes):
    return x if isinstance(x.type, ir.VectorType) else _spread(builder, x, lanes)


def _address(context, builder, count, array_type, array, row, column):
    """The address of the first lane, and its alignment."""
    x = context.make_array(array_type)(context, builder, array)
    width = cgutils.unpack_tuple(builder, x.shape)[1]
    lanes = ir.VectorType(x.data.type.pointee, count)
    first = builder.gep(x.data, [builder.add(builder.mul(row, width), column)])
    return builder.bitcast(first, lanes.as_pointer()), array_type.dtype.bitwidth // 8


def _load_below(builder, left, pointer, align):
    """Load the first `left` lanes; the others are zero."""
    lanes = pointer.type.pointee
    inside = _below(builder, left, lanes.count)
    kind = ir.FunctionType(lanes, [pointer.type, ir.IntType(32), inside.type, lanes])
    masked = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{_suffix(lanes)}.p0")
    return builder.call(masked, [pointer, ir.IntType(32)(align), inside, ir.Constant(lanes, None)])


def _below(builder, left, count):
    """A mask of the first `left` lanes."""
    long = ir.VectorType(left.type, count)
    return builder.icmp_signed("<", ir.Constant(long, list(range(count))), _spread(builder, left, long))


def _spread(builder, number, lanes):
    nothing = ir.Constant(lanes, ir.Undefined)
    one = builder.insert_element(nothing, number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), lanes.count), [0] * lanes.count))


def _suffix(lanes) -> str:
    return f"v{lanes.count}{_NAMES.get(str(lanes.element), lanes.element)}"
