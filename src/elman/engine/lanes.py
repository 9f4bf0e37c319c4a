"""What generated steps are made of: sixteen numbers at a time, products with packed matrices, and a barrier.

Every operation here has one meaning to the last bit, whatever the compiler does with it: a product and a sum are joined
only where ``fma`` says so, and no sum is reordered. Arrays have one dimension and places in them are numbers; nothing
is checked. Only generated files call this module, because it brings in Numba.

A product adds column after column of a packed matrix (:mod:`elman.engine.packing`) to all rows of a block at once, so
that the order of each row's sum is that of the columns: with one vector or with many, in one thread or in many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

# Numba brings llvmlite, which has no types. The kernels below have none either: Numba finds those of their arguments.
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model

from elman.engine.packing import BLOCK, LANES

__all__ = [
    "absolute", "add", "div", "exp", "gather", "keep_first", "load", "load_first", "log", "log_sigmoid", "maximum",
    "meet", "minimum", "mul", "neg", "product", "product_of_bytes", "quantise", "relu", "sigmoid", "splat", "spread",
    "sqrt", "store", "store_first", "sub", "tanh", "total",
]  # fmt: skip

_VECTORS = BLOCK // LANES
_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_NUMBERS = ir.VectorType(_F32, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)
_TURNS_BEFORE_YIELDING = 4000
_LINE, _AHEAD = 64, 2048
"""Bytes of a line of the cache, and how far ahead a matrix is asked for: alone, it comes at half the speed."""


# Its own types would ask for the argument that Numba gives.
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba_intrinsic


class Lanes(types.Type):
    """Sixteen float32 numbers, in one or more vector registers."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _NUMBERS)


# An @intrinsic takes the types of its arguments and gives a signature, and a function that writes LLVM instructions.


def _call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _all(value: Any, kind: Any = _NUMBERS) -> Any:
    """A vector constant with the same in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def _splat(builder: Any, number: Any, count: int = LANES) -> Any:
    nothing = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    single = builder.insert_element(nothing, number, _I32(0))
    return builder.shuffle_vector(single, nothing, _all(0, ir.VectorType(_I32, count)))


def _place(context: Any, builder: Any, kind: Any, where: Sequence[Any], element: Any) -> Any:
    """A pointer into an array, or beyond a pointer, and an offset, as one to another type."""
    array, offset = where
    data = array if isinstance(kind, types.CPointer) else context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), element.as_pointer())


def _first(builder: Any, count: Any) -> Any:
    """A mask of the first lanes; the count is of 64 bits."""
    numbers = ir.Constant(_INTEGERS, list(range(LANES)))
    return builder.icmp_signed("<", numbers, _splat(builder, builder.trunc(count, _I32)))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _NUMBERS, a, b, c)


def _of_lanes(name: str, arity: int, write: Any) -> Any:
    """An operation that takes lanes and gives lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return write(builder, *values)

    def one(typing: Any, a: Any) -> Any:
        return lanes(lanes), generate

    def two(typing: Any, a: Any, b: Any) -> Any:
        return lanes(lanes, lanes), generate

    def three(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return lanes(lanes, lanes, lanes), generate

    typed = (one, two, three)[arity - 1]
    typed.__name__ = name
    return intrinsic(typed)


def _where(builder: Any, relation: str, a: Any, b: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_unordered(relation, a, b), x, y)


def _times_power_of_two(builder: Any, x: Any, shifted: Any) -> Any:
    """x 2^n, for n + _SHIFT; in two factors, so that the results near zero and infinity come out too."""
    n = builder.sub(builder.bitcast(shifted, _INTEGERS), builder.bitcast(_all(_SHIFT), _INTEGERS))
    half = builder.ashr(n, _all(1, _INTEGERS))
    for exponent in (half, builder.sub(n, half)):
        bits = builder.shl(builder.add(exponent, _all(127, _INTEGERS)), _all(23, _INTEGERS))
        x = builder.fmul(x, builder.bitcast(bits, _NUMBERS))
    return x


_SHIFT = 1.5 * 2**23
"""Added to a small number it leaves the nearest integer in the lowest bits."""

add = _of_lanes("add", 2, lambda b, x, y: b.fadd(x, y))
sub = _of_lanes("sub", 2, lambda b, x, y: b.fsub(x, y))
mul = _of_lanes("mul", 2, lambda b, x, y: b.fmul(x, y))
div = _of_lanes("div", 2, lambda b, x, y: b.fdiv(x, y))
fma = _of_lanes("fma", 3, _fma)
neg = _of_lanes("neg", 1, lambda b, x: b.fneg(x))
absolute = _of_lanes("absolute", 1, lambda b, x: _call(b, "llvm.fabs.v16f32", _NUMBERS, x))
sqrt = _of_lanes("sqrt", 1, lambda b, x: _call(b, "llvm.sqrt.v16f32", _NUMBERS, x))
# Comparisons are true where one side is no number, so that a NaN goes on.
maximum = _of_lanes("maximum", 2, lambda b, x, y: _where(b, ">", x, y, _where(b, "!=", y, y, y, x), y))
minimum = _of_lanes("minimum", 2, lambda b, x, y: _where(b, "<", x, y, _where(b, "!=", y, y, y, x), y))
_if_small = _of_lanes("if_small", 3, lambda b, x, y, z: _where(b, "<", x, _all(0.625), y, z))
_scaled = _of_lanes("scaled", 2, _times_power_of_two)


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """A number in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _splat(builder, context.cast(builder, values[0], signature.args[0], types.float32))

    return lanes(number), generate


@intrinsic
def spread(typing: Any, array: Any, offset: Any) -> Any:
    """A number from memory in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _splat(builder, builder.load(_place(context, builder, array, values, _F32)))

    return lanes(array, types.int64), generate


@intrinsic
def load(typing: Any, array: Any, offset: Any) -> Any:
    """Sixteen numbers, one after the other."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_place(context, builder, array, values, _NUMBERS), align=4)

    return lanes(array, types.int64), generate


@intrinsic
def load_first(typing: Any, array: Any, offset: Any, count: Any) -> Any:
    """The first few lanes from memory, the others 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _place(context, builder, array, values[:2], _NUMBERS)
        mask = _first(builder, values[2])
        return _call(builder, "llvm.masked.load.v16f32.p0", _NUMBERS, place, _I32(4), mask, _all(0.0))

    return lanes(array, types.int64, types.int64), generate


@intrinsic
def gather(typing: Any, array: Any, offset: Any, stride: Any, count: Any) -> Any:
    """The first few lanes from places that lie a stride apart, the others 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        packed, offset, stride, count = values
        found = cgutils.alloca_once_value(builder, _all(0.0))
        with cgutils.for_range(builder, count) as loop:
            here = builder.add(offset, builder.mul(loop.index, stride))
            place = _place(context, builder, array, (packed, here), _F32)
            lane = builder.trunc(loop.index, _I32)
            builder.store(builder.insert_element(builder.load(found), builder.load(place), lane), found)
        return builder.load(found)

    return lanes(array, types.int64, types.int64, types.int64), generate


@intrinsic
def store(typing: Any, array: Any, offset: Any, x: Any) -> Any:
    """Write sixteen numbers, one after the other."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], _place(context, builder, array, values[:2], _NUMBERS), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes), generate


@intrinsic
def store_first(typing: Any, array: Any, offset: Any, x: Any, count: Any) -> Any:
    """Write the first few lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _place(context, builder, array, values[:2], _NUMBERS)
        mask = _first(builder, values[3])
        _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), values[2], place, _I32(4), mask)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes, types.int64), generate


@intrinsic
def keep_first(typing: Any, x: Any, count: Any) -> Any:
    """The first few lanes, and 0 in the others."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(_first(builder, values[1]), values[0], _all(0.0))

    return lanes(lanes, types.int64), generate


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """The sum of all lanes, from the first to the last."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.extract_element(values[0], _I32(0))
        for lane in range(1, LANES):
            found = builder.fadd(found, builder.extract_element(values[0], _I32(lane)))
        return found

    return types.float32(lanes), generate


@intrinsic
def largest(typing: Any, x: Any) -> Any:
    """The largest of all lanes; a NaN where there is one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.extract_element(values[0], _I32(0))
        for lane in range(1, LANES):
            other = builder.extract_element(values[0], _I32(lane))
            other = builder.select(builder.fcmp_unordered("!=", found, found), found, other)
            found = builder.select(builder.fcmp_unordered("<", found, other), other, found)
        return found

    return types.float32(lanes), generate


# The functions of one number. The polynomials were fitted to the least largest relative error, which the tests measure.


@njit(forceinline=True)
def exp(x: Any) -> Any:
    """e^x = 2^n e^r with |r| <= log(2)/2."""
    x = minimum(maximum(x, splat(-104.0)), splat(89.0))
    shifted = fma(x, splat(1.4426950408889634), splat(12582912.0))
    n = sub(shifted, splat(12582912.0))
    r = fma(n, splat(1.42860677e-06), fma(n, splat(-0.693148612976074), x))
    p = fma(splat(0.00138146), r, splat(0.00836872))
    p = fma(fma(fma(p, r, splat(0.04166839)), r, splat(0.16666521)), r, splat(0.49999993))
    return _scaled(fma(mul(r, r), p, add(r, splat(1.0))), shifted)


log = _of_lanes("log", 1, lambda b, x: _call(b, "llvm.log.v16f32", _NUMBERS, x))


@njit(forceinline=True)
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return div(splat(1.0), add(splat(1.0), exp(neg(x))))


@njit(forceinline=True)
def tanh(x: Any) -> Any:
    """A polynomial near 0; 1 - 2 / (1 + e^2x) elsewhere, which would lose digits there."""
    z = mul(x, x)
    p = fma(splat(-0.00571704), z, splat(0.02065059))
    p = fma(fma(fma(p, z, splat(-0.0537435)), z, splat(0.13331491)), z, splat(-0.33333284))
    near = fma(mul(z, x), p, x)
    far = sub(splat(1.0), div(splat(2.0), add(splat(1.0), exp(add(x, x)))))
    return _if_small(absolute(x), near, far)


@njit(forceinline=True)
def log_sigmoid(x: Any) -> Any:
    """min(x, 0) - log(1 + u) with u = e^-|x|; the logarithm is 2 artanh(u / (2 + u))."""
    u = exp(neg(absolute(x)))
    s = div(u, add(splat(2.0), u))
    z = mul(s, s)
    p = fma(fma(fma(splat(0.28025141), z, splat(0.27999013)), z, splat(0.40021706)), z, splat(0.66666413))
    return sub(minimum(x, splat(0.0)), fma(mul(z, s), p, add(s, s)))


@njit(forceinline=True)
def relu(x: Any) -> Any:
    """max(x, 0)."""
    return maximum(x, splat(0.0))


# Products with packed matrices. A panel is a few times sixteen rows of a matrix with a few vectors: the sums stay in
# registers while the columns go by.


def _panel(num_vectors: int, num_rows: int, of_bytes: bool) -> Any:
    """A product of ``16 num_vectors`` rows of a matrix with ``num_rows`` vectors, as an operation of Numba.

    Its arguments: the array of the matrix, where the panel starts in it, the rows of its block, the number of columns
    (or pairs of them); the array of float32 numbers with biases and, for bytes, the rows' scales, and where; the array
    of vectors, where the first starts, and how far apart they are; their scales, for bytes; the array of results, where
    the first starts, how far apart they are, and how many numbers of each may be written.
    """
    parts, rows = range(num_vectors), range(num_rows)
    read_column, product = (_read_pairs, _times_pair) if of_bytes else (_read_numbers, _times_number)

    def panel(
        typing: Any, matrix: Any, at: Any, width: Any, columns: Any, numbers: Any, biases: Any, scales: Any,
        x: Any, x_at: Any, x_stride: Any, x_scales: Any, x_scales_at: Any, y: Any, y_at: Any, y_stride: Any, count: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            given = dict(zip(names, values, strict=True))

            def place(array: str, offset: Any, element: Any) -> Any:
                return _place(context, builder, signature.args[names.index(array)], (given[array], offset), element)

            def in_lanes(where: str, part: int) -> Any:
                offset = builder.add(given[where], _I64(LANES * part))
                return builder.load(place("numbers", offset, _NUMBERS), align=4)

            def of_row(where: str, stride: str, row: int) -> Any:
                return builder.add(given[where], builder.mul(given[stride], _I64(row)))

            biases = [in_lanes("biases", part) for part in parts]
            starts = [_all(0, _INTEGERS) for _ in parts] if of_bytes else biases
            sums = [[cgutils.alloca_once_value(builder, start) for start in starts] for _ in rows]
            vectors = [place("x", of_row("x_at", "x_stride", row), _I32 if of_bytes else _F32) for row in rows]
            start = place("matrix", given["at"], _I8 if of_bytes else _F32)
            with cgutils.for_range(builder, given["columns"]) as loop:
                column = [read_column(builder, start, loop.index, given["width"], part) for part in parts]
                if num_rows == 1:  # with more, the processor's own foresight is enough
                    width = builder.mul(given["width"], _I64(2 if of_bytes else 4))
                    for line in range(0, num_vectors * LANES * (2 if of_bytes else 4), _LINE):
                        ahead = builder.add(builder.mul(loop.index, width), _I64(line + _AHEAD))
                        place_ahead = builder.gep(builder.bitcast(start, _I8.as_pointer()), [ahead])
                        _call(builder, "llvm.prefetch.p0", ir.VoidType(), place_ahead, _I32(0), _I32(3), _I32(1))
                for row in rows:
                    element = _splat(builder, builder.load(builder.gep(vectors[row], [loop.index]), align=4))
                    for part in parts:
                        so_far = sums[row][part]
                        builder.store(product(builder, column[part], element, builder.load(so_far)), so_far)
            for row in rows:
                for part in parts:
                    found = builder.load(sums[row][part])
                    if of_bytes:
                        scale = builder.load(place("x_scales", builder.add(given["x_scales_at"], _I64(row)), _F32))
                        both = builder.fmul(in_lanes("scales", part), _splat(builder, scale))
                        found = _fma(builder, builder.sitofp(found, _NUMBERS), both, biases[part])
                    offset = builder.add(of_row("y_at", "y_stride", row), _I64(LANES * part))
                    mask = _first(builder, builder.sub(given["count"], _I64(LANES * part)))
                    _masked_store(builder, found, place("y", offset, _NUMBERS), mask)
            return context.get_dummy_value()

        names = ("matrix", "at", "width", "columns", "numbers", "biases", "scales", "x", "x_at", "x_stride", "x_scales",
                 "x_scales_at", "y", "y_at", "y_stride", "count")  # fmt: skip
        i = types.int64
        return types.void(matrix, i, i, i, numbers, i, i, x, i, i, x_scales, i, y, i, i, i), generate

    return intrinsic(panel)


def _read_numbers(builder: Any, start: Any, column: Any, width: Any, part: int) -> Any:
    offset = builder.add(builder.mul(column, width), _I64(LANES * part))
    return builder.load(builder.bitcast(builder.gep(start, [offset]), _NUMBERS.as_pointer()), align=4)


def _times_number(builder: Any, column: Any, number: Any, so_far: Any) -> Any:
    return _fma(builder, column, number, so_far)


_BYTE_PAIRS, _SHORT_PAIRS, _WORD_PAIRS = (ir.VectorType(kind, 2 * LANES) for kind in (_I8, _I16, _I32))


def _read_pairs(builder: Any, start: Any, pair: Any, width: Any, part: int) -> Any:
    offset = builder.add(builder.mul(pair, builder.mul(width, _I64(2))), _I64(2 * LANES * part))
    place = builder.bitcast(builder.gep(start, [offset]), _BYTE_PAIRS.as_pointer())
    return builder.sext(builder.load(place, align=1), _WORD_PAIRS)


def _times_pair(builder: Any, column: Any, pair: Any, so_far: Any) -> Any:
    """Products of 16 bits, added in pairs: one instruction on processors that have it."""
    products = builder.mul(column, builder.sext(builder.bitcast(pair, _SHORT_PAIRS), _WORD_PAIRS))
    nothing = ir.Constant(_WORD_PAIRS, ir.Undefined)
    first, second = (
        builder.shuffle_vector(products, nothing, ir.Constant(_INTEGERS, list(range(start, 2 * LANES, 2))))
        for start in (0, 1)
    )
    return builder.add(so_far, builder.add(first, second))


def _masked_store(builder: Any, value: Any, place: Any, mask: Any) -> None:
    _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), value, place, _I32(4), mask)


def _panels(num_vectors: int, of_bytes: bool) -> Any:
    """The same for any number of vectors."""
    six, four, two, one = (_panel(num_vectors, num_rows, of_bytes) for num_rows in (6, 4, 2, 1))

    @njit
    def panels(  # type: ignore[no-untyped-def]
        matrix, at, width, columns, numbers, biases, scales, x, x_at, x_stride, x_scales, y, y_at, y_stride, count, rows
    ):
        row = 0
        while row < rows:
            from_x, to_y, left = x_at + row * x_stride, y_at + row * y_stride, rows - row
            if left >= 6:
                six(matrix, at, width, columns, numbers, biases, scales, x, from_x, x_stride, x_scales, row,
                    y, to_y, y_stride, count)  # fmt: skip
                row += 6
            elif left >= 4:
                four(matrix, at, width, columns, numbers, biases, scales, x, from_x, x_stride, x_scales, row,
                     y, to_y, y_stride, count)  # fmt: skip
                row += 4
            elif left >= 2:
                two(matrix, at, width, columns, numbers, biases, scales, x, from_x, x_stride, x_scales, row,
                    y, to_y, y_stride, count)  # fmt: skip
                row += 2
            else:
                one(matrix, at, width, columns, numbers, biases, scales, x, from_x, x_stride, x_scales, row,
                    y, to_y, y_stride, count)  # fmt: skip
                row += 1

    return panels


def _blocks(of_bytes: bool) -> Any:
    """The same for whole matrices, block by block."""
    sixteen, whole_block = _panels(1, of_bytes), _panels(_VECTORS, of_bytes)
    per_step = 2 if of_bytes else 1
    # Without wide registers the sums of several vectors with a whole block have no room in them.
    is_wide = binding.get_host_cpu_features().get("avx512f", False)

    @njit
    def blocks(  # type: ignore[no-untyped-def]
        matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales, y, y_at, y_stride, rows,
        start, end,
    ):  # fmt: skip
        for block in range(start, end):
            first = block * BLOCK
            left = outputs - first
            width = BLOCK if left >= BLOCK else (left + LANES - 1) // LANES * LANES
            here = at + first * columns * per_step
            if left >= BLOCK and (is_wide or rows == 1):
                whole_block(matrix, here, width, columns, numbers, biases + first, scales + first, x, x_at, x_stride,
                            x_scales, y, y_at + first, y_stride, BLOCK, rows)  # fmt: skip
            else:
                for part in range(0, width, LANES):
                    sixteen(matrix, here + part * per_step, width, columns, numbers, biases + first + part,
                            scales + first + part, x, x_at, x_stride, x_scales, y, y_at + first + part, y_stride,
                            left - part, rows)  # fmt: skip

    return blocks


_blocks_of_numbers, _blocks_of_bytes = _blocks(of_bytes=False), _blocks(of_bytes=True)


def _product(  # type: ignore[no-untyped-def]
    matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales, y, y_at, y_stride, rows,
    start, end,
):  # fmt: skip
    _blocks_of_numbers(matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales,
                       y, y_at, y_stride, rows, start, end)  # fmt: skip


def _product_of_bytes(  # type: ignore[no-untyped-def]
    matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales, y, y_at, y_stride, rows,
    start, end,
):  # fmt: skip
    _blocks_of_bytes(matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales,
                     y, y_at, y_stride, rows, start, end)  # fmt: skip


@intrinsic
def _store_rounded(typing: Any, array: Any, offset: Any, x: Any) -> Any:
    """Write the nearest integers as 16 bits."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        shifted = builder.bitcast(builder.fadd(values[2], _all(_SHIFT)), _INTEGERS)
        kind = ir.VectorType(_I16, LANES)
        builder.store(builder.trunc(shifted, kind), _place(context, builder, array, values[:2], kind), align=2)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes), generate


def _quantise(x, x_at, x_stride, size, limit, codes, stride, scales, rows):  # type: ignore[no-untyped-def]
    whole = size // LANES * LANES
    for row in range(rows):
        start = x_at + row * x_stride
        most = absolute(load_first(x, start + whole, size - whole))
        for i in range(0, whole, LANES):
            most = maximum(most, absolute(load(x, start + i)))
        scale = largest(most) / limit
        store_first(scales, row, splat(scale), 1)
        factor = splat(1.0 / scale if scale > 0.0 else scale)
        for i in range(0, whole, LANES):
            _store_rounded(codes, row * stride + i, mul(load(x, start + i), factor))
        _store_rounded(codes, row * stride + whole, mul(load_first(x, start + whole, size - whole), factor))


# Threads that work on one step meet here.


@intrinsic
def _add_atomically(typing: Any, array: Any, offset: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _place(context, builder, array, values[:2], _I64), values[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def _read_atomically(typing: Any, array: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_place(context, builder, array, values, _I64), "seq_cst", 8)

    return types.int64(array, types.int64), generate


@intrinsic
def _let_others_run(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if sys.platform != "win32":
            _call(builder, "sched_yield", _I32)
        return context.get_dummy_value()

    return types.void(), generate


def _meet(arrivals, number, threads):  # type: ignore[no-untyped-def]
    if threads == 1:
        return
    seen = _add_atomically(arrivals, 0, 1) + 1
    turns = 0
    while seen < number * threads:
        turns += 1
        if turns > _TURNS_BEFORE_YIELDING:
            _let_others_run()
        seen = _read_atomically(arrivals, 0)


# These are compiled by themselves, once on a machine, and called by name: a generated step has them not inside.

_i, _numbers, _bytes, _shorts, _words = (
    types.int64, *(types.CPointer(kind) for kind in (types.float32, types.int8, types.int16, types.int64))
)  # fmt: skip
_KERNELS: dict[str, Any] = {}


def _kernel(name: str, function: Any, *arguments: Any) -> Any:
    """Compile a function of pointers and numbers; what calls it with arrays, for use in an intrinsic."""
    try:
        compiled = cfunc(types.void(*arguments), cache=True)(function)
    except RuntimeError:  # neither the folder of this file nor the user's cache folder can be written
        compiled = cfunc(types.void(*arguments))(function)
    binding.add_symbol(f"elman_{name}", compiled.address)
    _KERNELS[name] = compiled  # for as long as steps may call it

    def typed(*given: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            passed = [
                context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(signature.args, values, strict=True)
            ]
            _call(builder, f"elman_{name}", ir.VoidType(), *passed)
            return context.get_dummy_value()

        pairs = zip(given, arguments, strict=True)
        kinds = [kind if isinstance(kind, types.Array) else wanted for kind, wanted in pairs]
        return types.void(*kinds), generate

    return typed


_call_product = _kernel(
    "product", _product, _numbers, _i, _i, _i, _numbers, _i, _i, _numbers, _i, _i, _numbers,
    _numbers, _i, _i, _i, _i, _i,
)  # fmt: skip
_call_product_of_bytes = _kernel(
    "product_of_bytes", _product_of_bytes, _bytes, _i, _i, _i, _numbers, _i, _i, _shorts, _i, _i, _numbers,
    _numbers, _i, _i, _i, _i, _i,
)  # fmt: skip
_call_quantise = _kernel(
    "quantise", _quantise, _numbers, _i, _i, _i, types.float32, _shorts, _i, _numbers, _i
)  # fmt: skip
_call_meet = _kernel("meet", _meet, _words, _i, _i)


@intrinsic
def product(typing: Any, m: Any, at: Any, o: Any, i: Any, n: Any, b: Any, s: Any, x: Any, x_at: Any, x_to: Any,
            x_s: Any, y: Any, y_at: Any, y_to: Any, rows: Any, start: Any, end: Any) -> Any:  # fmt: skip
    """``y = W x + b`` for some blocks of a matrix of float32 numbers and some rows of x and y."""
    return _call_product(m, at, o, i, n, b, s, x, x_at, x_to, x_s, y, y_at, y_to, rows, start, end)


@intrinsic
def product_of_bytes(typing: Any, m: Any, at: Any, o: Any, i: Any, n: Any, b: Any, s: Any, x: Any, x_at: Any, x_to: Any,
                     x_s: Any, y: Any, y_at: Any, y_to: Any, rows: Any, start: Any, end: Any) -> Any:  # fmt: skip
    """The same for a matrix of eight bits, x as :func:`quantise` leaves it."""
    return _call_product_of_bytes(m, at, o, i, n, b, s, x, x_at, x_to, x_s, y, y_at, y_to, rows, start, end)


@intrinsic
def quantise(typing: Any, x: Any, at: Any, to: Any, size: Any, limit: Any, c: Any, c_to: Any, s: Any, r: Any) -> Any:
    """Vectors as integers up to a limit, each with the scale that gives the numbers back."""
    return _call_quantise(x, at, to, size, limit, c, c_to, s, r)


@intrinsic
def meet(typing: Any, arrivals: Any, number: Any, threads: Any) -> Any:
    """Wait until every thread has arrived at the meeting of this number, counted from 1."""
    return _call_meet(arrivals, number, threads)
