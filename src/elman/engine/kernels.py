"""The kernels that generated steps call by name: products, rounding, the meeting of threads, the draw of tokens.

They are compiled by themselves, once on a machine (:mod:`elman.engine.native`); a generated step has them not inside.

A product adds column after column of a packed matrix (:mod:`elman.engine.packing`) to all rows of a block at once, so
that the order of each row's sum is that of the columns: with one vector or with many, in one thread or in many.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

# The functions below have no types: Numba finds those of their arguments.
from llvmlite import binding, ir  # type: ignore[import-untyped]  # ships no types
from numba import njit, types
from numba.core import cgutils

from elman.engine.emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    INTEGERS,
    NUMBERS,
    call,
    constant,
    first_mask,
    fused,
    in_all,
    masked_store,
    pointer,
)
from elman.engine.lanes import (
    SHIFT,
    absolute,
    intrinsic,
    lanes,
    largest,
    load,
    load_first,
    maximum,
    mul,
    splat,
    store_first,
)
from elman.engine.native import KERNELS, Kinds
from elman.engine.packing import BLOCK, LANES

_VECTORS = BLOCK // LANES
_TURNS_BEFORE_YIELDING = 4000
_LINE, _AHEAD = 64, 2048
"""Bytes of a line of the cache, and how far ahead a matrix is asked for: alone, it comes at half the speed."""


def types_of(kinds: Kinds) -> list[Any]:
    """Numba's types for kinds of arguments, as ``int64`` and ``float32*``."""
    return [types.CPointer(getattr(types, kind[:-1])) if kind.endswith("*") else getattr(types, kind) for kind in kinds]


def call_compiled(builder: Any, function: Any, arguments: Any) -> Any:
    """Call what Numba compiled: it takes places for its result and for an error, and gives whether there was one."""
    places = [cgutils.alloca_once_value(builder, I64(0)) for _ in range(2)]
    builder.call(function, [*places, *arguments])
    return builder.load(places[0])


def operation(name: str, kinds: Sequence[Any], gives: Any, write: Callable[[Any, Any], Any]) -> Any:
    """An operation on pointers and numbers; arrays may stand for pointers.

    Args:
        name: of the operation.
        kinds: of its arguments.
        gives: the type of its result.
        write: takes LLVM's builder and the arguments; writes the instructions and gives the result.
    """

    def typed(typing: Any, *given: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            passed = [
                context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(signature.args, values, strict=True)
            ]
            result = write(builder, passed)
            return context.get_dummy_value() if gives is types.void else result

        taken = [kind if isinstance(kind, types.Array) else wanted for kind, wanted in zip(given, kinds, strict=True)]
        return gives(*taken), generate

    names = ["typing", *(f"a{number}" for number in range(len(kinds)))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Numba reads it
    typed.__name__ = name
    return intrinsic(typed)


def _by_name(name: str) -> Any:
    """The operation that calls a kernel."""

    def write(builder: Any, values: Any) -> Any:
        place = I64.as_pointer()
        kind = ir.FunctionType(I32, [place, place, *(value.type for value in values)])
        return call_compiled(builder, cgutils.get_or_insert_function(builder.module, kind, f"elman_{name}"), values)

    return operation(name, types_of(KERNELS[name]), types.void, write)


product, product_of_bytes, quantise, meet, draw = map(
    _by_name, ("product", "product_of_bytes", "quantise", "meet", "draw")
)


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
                return pointer(context, builder, signature.args[names.index(array)], (given[array], offset), element)

            def in_lanes(where: str, part: int) -> Any:
                offset = builder.add(given[where], I64(LANES * part))
                return builder.load(place("numbers", offset, NUMBERS), align=4)

            def of_row(where: str, stride: str, row: int) -> Any:
                return builder.add(given[where], builder.mul(given[stride], I64(row)))

            biases = [in_lanes("biases", part) for part in parts]
            starts = [constant(0, INTEGERS) for _ in parts] if of_bytes else biases
            sums = [[cgutils.alloca_once_value(builder, start) for start in starts] for _ in rows]
            vectors = [place("x", of_row("x_at", "x_stride", row), I32 if of_bytes else F32) for row in rows]
            start = place("matrix", given["at"], I8 if of_bytes else F32)
            with cgutils.for_range(builder, given["columns"]) as loop:
                column = [read_column(builder, start, loop.index, given["width"], part) for part in parts]
                if num_rows == 1:  # with more, the processor's own foresight is enough
                    width = builder.mul(given["width"], I64(2 if of_bytes else 4))
                    for line in range(0, num_vectors * LANES * (2 if of_bytes else 4), _LINE):
                        ahead = builder.add(builder.mul(loop.index, width), I64(line + _AHEAD))
                        place_ahead = builder.gep(builder.bitcast(start, I8.as_pointer()), [ahead])
                        call(builder, "llvm.prefetch.p0", ir.VoidType(), place_ahead, I32(0), I32(3), I32(1))
                for row in rows:
                    element = in_all(builder, builder.load(builder.gep(vectors[row], [loop.index]), align=4))
                    for part in parts:
                        so_far = sums[row][part]
                        builder.store(product(builder, column[part], element, builder.load(so_far)), so_far)
            for row in rows:
                for part in parts:
                    found = builder.load(sums[row][part])
                    if of_bytes:
                        scale = builder.load(place("x_scales", builder.add(given["x_scales_at"], I64(row)), F32))
                        both = builder.fmul(in_lanes("scales", part), in_all(builder, scale))
                        found = fused(builder, builder.sitofp(found, NUMBERS), both, biases[part])
                    offset = builder.add(of_row("y_at", "y_stride", row), I64(LANES * part))
                    mask = first_mask(builder, builder.sub(given["count"], I64(LANES * part)))
                    masked_store(builder, found, place("y", offset, NUMBERS), mask)
            return context.get_dummy_value()

        names = ("matrix", "at", "width", "columns", "numbers", "biases", "scales", "x", "x_at", "x_stride", "x_scales",
                 "x_scales_at", "y", "y_at", "y_stride", "count")  # fmt: skip
        i = types.int64
        return types.void(matrix, i, i, i, numbers, i, i, x, i, i, x_scales, i, y, i, i, i), generate

    return intrinsic(panel)


def _read_numbers(builder: Any, start: Any, column: Any, width: Any, part: int) -> Any:
    offset = builder.add(builder.mul(column, width), I64(LANES * part))
    return builder.load(builder.bitcast(builder.gep(start, [offset]), NUMBERS.as_pointer()), align=4)


def _times_number(builder: Any, column: Any, number: Any, so_far: Any) -> Any:
    return fused(builder, column, number, so_far)


_BYTE_PAIRS, _SHORT_PAIRS, _WORD_PAIRS = (ir.VectorType(kind, 2 * LANES) for kind in (I8, I16, I32))


def _read_pairs(builder: Any, start: Any, pair: Any, width: Any, part: int) -> Any:
    offset = builder.add(builder.mul(pair, builder.mul(width, I64(2))), I64(2 * LANES * part))
    place = builder.bitcast(builder.gep(start, [offset]), _BYTE_PAIRS.as_pointer())
    return builder.sext(builder.load(place, align=1), _WORD_PAIRS)


def _times_pair(builder: Any, column: Any, pair: Any, so_far: Any) -> Any:
    """Products of 16 bits, added in pairs: one instruction on processors that have it."""
    products = builder.mul(column, builder.sext(builder.bitcast(pair, _SHORT_PAIRS), _WORD_PAIRS))
    nothing = ir.Constant(_WORD_PAIRS, ir.Undefined)
    first, second = (
        builder.shuffle_vector(products, nothing, ir.Constant(INTEGERS, list(range(start, 2 * LANES, 2))))
        for start in (0, 1)
    )
    return builder.add(so_far, builder.add(first, second))


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
        start, end, backwards,
    ):  # fmt: skip
        for number in range(start, end):
            block = start + end - 1 - number if backwards else number
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


def _product_of_numbers(  # type: ignore[no-untyped-def]
    matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales, y, y_at, y_stride, rows,
    start, end, backwards,
):  # fmt: skip
    _blocks_of_numbers(matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales,
                       y, y_at, y_stride, rows, start, end, backwards)  # fmt: skip


def _product_of_bytes(  # type: ignore[no-untyped-def]
    matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales, y, y_at, y_stride, rows,
    start, end, backwards,
):  # fmt: skip
    _blocks_of_bytes(matrix, at, outputs, columns, numbers, biases, scales, x, x_at, x_stride, x_scales,
                     y, y_at, y_stride, rows, start, end, backwards)  # fmt: skip


@intrinsic
def _store_rounded(typing: Any, array: Any, offset: Any, x: Any) -> Any:
    """Write the nearest integers as 16 bits."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        shifted = builder.bitcast(builder.fadd(values[2], constant(SHIFT)), INTEGERS)
        kind = ir.VectorType(I16, LANES)
        builder.store(builder.trunc(shifted, kind), pointer(context, builder, array, values[:2], kind), align=2)
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
        return builder.atomic_rmw("add", pointer(context, builder, array, values[:2], I64), values[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def _read_atomically(typing: Any, array: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(pointer(context, builder, array, values, I64), "seq_cst", 8)

    return types.int64(array, types.int64), generate


@intrinsic
def _let_others_run(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if sys.platform != "win32":
            call(builder, "sched_yield", I32)
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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "product": _product_of_numbers,
    "product_of_bytes": _product_of_bytes,
    "quantise": _quantise,
    "meet": _meet,
}
