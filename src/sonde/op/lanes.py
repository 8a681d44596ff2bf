"""Sixteen numbers at once in Numba kernels.

LLVM's own vectoriser needs run-time proofs that arrays do not overlap and leaves the end of every row to scalar code: three times
slower on rows of 148 channels. These are LLVM vectors, which every machine splits into registers of its own size. All lanes
compute alike, so a sum has the same bits wherever in a row it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.extending import models, register_model

LANES = 16
intrinsic: Callable[..., Any] = extending.intrinsic  # the first argument is Numba's own, which type checkers do not know


class Lanes(types.Type):
    def __init__(self, dtype: types.Type) -> None:
        super().__init__(f"Lanes({dtype})")
        self.dtype = dtype


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind: Lanes) -> None:
        super().__init__(manager, kind, ir.VectorType(manager[kind.dtype].get_value_type(), LANES))


@intrinsic
def load(typing, x, row, column, end):
    """Lanes ``x[row, column : column + LANES]``; those from column `end` on are not read but zero."""

    def generate(context, builder, signature, args):
        pointer, align = _address(context, builder, signature.args[0], *args[:3])
        left = builder.sub(args[3], args[2])
        lanes = pointer.type.pointee
        with builder.if_else(builder.icmp_signed(">=", left, left.type(LANES)), likely=True) as (whole, part):
            with whole:
                all_lanes, whole_block = builder.load(pointer, align=align), builder.block
            with part:
                inside = _below(builder, left)
                kind = ir.FunctionType(lanes, [pointer.type, ir.IntType(32), inside.type, lanes])
                masked = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{_suffix(lanes)}.p0")
                some_lanes = builder.call(masked, [pointer, ir.IntType(32)(align), inside, ir.Constant(lanes, None)])
                part_block = builder.block
        found = builder.phi(lanes)
        found.add_incoming(all_lanes, whole_block)
        found.add_incoming(some_lanes, part_block)
        return found

    return Lanes(x.dtype)(x, types.intp, types.intp, types.intp), generate


@intrinsic
def prefetch(typing, x, row, column):
    """Begin to bring the cache line of ``x[row, column]`` here."""

    def generate(context, builder, signature, args):
        pointer, _ = _address(context, builder, signature.args[0], *args)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        begin = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(begin, [builder.bitcast(pointer, byte), number(0), number(3), number(1)])  # to read, to stay, of data
        return context.get_dummy_value()

    return types.none(x, types.intp, types.intp), generate


@intrinsic
def store(typing, v, x, row, column):
    """``x[row, column : column + LANES] = v``; the row must be long enough."""

    def generate(context, builder, signature, args):
        pointer, align = _address(context, builder, signature.args[1], *args[1:])
        builder.store(args[0], pointer, align=align)
        return context.get_dummy_value()

    return types.none(v, x, types.intp, types.intp), generate


@intrinsic
def store_some(typing, v, x, row, column, end):
    """``x[row, column : column + LANES] = v``; those from column `end` on are not written."""

    def generate(context, builder, signature, args):
        pointer, align = _address(context, builder, signature.args[1], *args[1:4])
        left = builder.sub(args[4], args[3])
        lanes = pointer.type.pointee
        with builder.if_else(builder.icmp_signed(">=", left, left.type(LANES)), likely=True) as (whole, part):
            with whole:
                builder.store(args[0], pointer, align=align)
            with part:
                inside = _below(builder, left)
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
def total(typing, v):
    """Sum over the lanes, by halves."""

    def generate(context, builder, signature, args):
        lanes = args[0].type
        kind = ir.FunctionType(lanes.element, [lanes.element, lanes])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.{_suffix(lanes)}")
        return builder.call(reduce, [lanes.element(-0.0), args[0]], fastmath=("reassoc",))

    return v.dtype(v), generate


def _address(context, builder, array_type, array, row, column):
    """Where the lanes begin, and how that is aligned."""
    x = context.make_array(array_type)(context, builder, array)
    width = cgutils.unpack_tuple(builder, x.shape)[1]
    lanes = ir.VectorType(x.data.type.pointee, LANES)
    first = builder.gep(x.data, [builder.add(builder.mul(row, width), column)])
    return builder.bitcast(first, lanes.as_pointer()), array_type.dtype.bitwidth // 8


def _below(builder, left):
    """Which lanes come before `left`."""
    long = ir.VectorType(left.type, LANES)
    return builder.icmp_signed("<", ir.Constant(long, list(range(LANES))), _spread(builder, left, long))


def _spread(builder, number, lanes):
    nothing = ir.Constant(lanes, ir.Undefined)
    one = builder.insert_element(nothing, number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _suffix(lanes) -> str:
    return f"v{LANES}{'f32' if lanes.element == ir.FloatType() else 'f64'}"
