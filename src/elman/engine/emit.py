"""LLVM instructions that several compiled operations write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from elman.engine.packing import LANES

F32, F64 = ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
NUMBERS = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(I32, LANES)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call a function by its name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def constant(value: Any, kind: Any = NUMBERS) -> Any:
    """A vector constant with the same in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def in_all(builder: Any, number: Any, count: int = LANES) -> Any:
    """A number in every lane."""
    nothing = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    single = builder.insert_element(nothing, number, I32(0))
    return builder.shuffle_vector(single, nothing, constant(0, ir.VectorType(I32, count)))


def pointer(context: Any, builder: Any, kind: Any, where: Sequence[Any], element: Any) -> Any:
    """A pointer into an array, or beyond a pointer, and an offset, as one to another type."""
    array, offset = where
    data = array if isinstance(kind, types.CPointer) else context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), element.as_pointer())


def first_mask(builder: Any, count: Any) -> Any:
    """A mask of the first lanes; the count is of 64 bits."""
    numbers = ir.Constant(INTEGERS, list(range(LANES)))
    return builder.icmp_signed("<", numbers, in_all(builder, builder.trunc(count, I32)))


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c with one rounding."""
    return call(builder, "llvm.fma.v16f32", NUMBERS, a, b, c)


def masked_store(builder: Any, value: Any, place: Any, mask: Any) -> None:
    """Write the lanes that a mask has."""
    call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), value, place, I32(4), mask)
