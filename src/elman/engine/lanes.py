"""What compiled loops are made of: sixteen numbers at a time.

Every operation here has one meaning to the last bit, whatever the compiler does with it: a product and a sum are joined
only where ``fma`` says so, and no sum is reordered. Arrays and pointers have one dimension and places in them are
numbers; nothing is checked. Only what is compiled imports this module, because it brings in Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Numba brings llvmlite, which has no types.
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, register_model

from elman.engine.emit import (
    F32,
    I32,
    INTEGERS,
    NUMBERS,
    call,
    constant,
    first_mask,
    fused,
    in_all,
    pointer,
)
from elman.engine.packing import LANES

__all__ = [
    "absolute", "add", "at_most", "div", "equal", "exp", "gather", "keep_first", "largest", "less", "load",
    "load_first", "log", "log_sigmoid", "maximum", "minimum", "mul", "neg", "relu", "sigmoid", "splat", "spread",
    "sqrt", "store", "store_first", "sub", "tanh", "total", "where",
]  # fmt: skip

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
        super().__init__(manager, kind, NUMBERS)


# An @intrinsic takes the types of its arguments and gives a signature, and a function that writes LLVM instructions.


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


def _truth(builder: Any, relation: str, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(relation, a, b), constant(1.0), constant(0.0))


def _times_power_of_two(builder: Any, x: Any, shifted: Any) -> Any:
    """x 2^n, for n + SHIFT; in two factors, so that the results near zero and infinity come out too."""
    n = builder.sub(builder.bitcast(shifted, INTEGERS), builder.bitcast(constant(SHIFT), INTEGERS))
    half = builder.ashr(n, constant(1, INTEGERS))
    for exponent in (half, builder.sub(n, half)):
        bits = builder.shl(builder.add(exponent, constant(127, INTEGERS)), constant(23, INTEGERS))
        x = builder.fmul(x, builder.bitcast(bits, NUMBERS))
    return x


SHIFT = 1.5 * 2**23
"""Added to a small number it leaves the nearest integer in the lowest bits."""

add = _of_lanes("add", 2, lambda b, x, y: b.fadd(x, y))
sub = _of_lanes("sub", 2, lambda b, x, y: b.fsub(x, y))
mul = _of_lanes("mul", 2, lambda b, x, y: b.fmul(x, y))
div = _of_lanes("div", 2, lambda b, x, y: b.fdiv(x, y))
fma = _of_lanes("fma", 3, fused)
neg = _of_lanes("neg", 1, lambda b, x: b.fneg(x))
absolute = _of_lanes("absolute", 1, lambda b, x: call(b, "llvm.fabs.v16f32", NUMBERS, x))
sqrt = _of_lanes("sqrt", 1, lambda b, x: call(b, "llvm.sqrt.v16f32", NUMBERS, x))
# Comparisons are true where one side is no number, so that a NaN goes on.
maximum = _of_lanes("maximum", 2, lambda b, x, y: _where(b, ">", x, y, _where(b, "!=", y, y, y, x), y))
minimum = _of_lanes("minimum", 2, lambda b, x, y: _where(b, "<", x, y, _where(b, "!=", y, y, y, x), y))
# These are false where one side is no number.
equal = _of_lanes("equal", 2, lambda b, x, y: _truth(b, "==", x, y))
less = _of_lanes("less", 2, lambda b, x, y: _truth(b, "<", x, y))
at_most = _of_lanes("at_most", 2, lambda b, x, y: _truth(b, "<=", x, y))
where = _of_lanes("where", 3, lambda b, which, x, y: _where(b, "!=", which, constant(0.0), x, y))
_if_small = _of_lanes("if_small", 3, lambda b, x, y, z: _where(b, "<", x, constant(0.625), y, z))
_scaled = _of_lanes("scaled", 2, _times_power_of_two)


@intrinsic
def splat(typing: Any, number: Any) -> Any:
    """A number in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return in_all(builder, context.cast(builder, values[0], signature.args[0], types.float32))

    return lanes(number), generate


@intrinsic
def spread(typing: Any, array: Any, offset: Any) -> Any:
    """A number from memory in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return in_all(builder, builder.load(pointer(context, builder, array, values, F32)))

    return lanes(array, types.int64), generate


@intrinsic
def load(typing: Any, array: Any, offset: Any) -> Any:
    """Sixteen numbers, one after the other."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(pointer(context, builder, array, values, NUMBERS), align=4)

    return lanes(array, types.int64), generate


@intrinsic
def load_first(typing: Any, array: Any, offset: Any, count: Any) -> Any:
    """The first few lanes from memory, the others 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = pointer(context, builder, array, values[:2], NUMBERS)
        mask = first_mask(builder, values[2])
        return call(builder, "llvm.masked.load.v16f32.p0", NUMBERS, place, I32(4), mask, constant(0.0))

    return lanes(array, types.int64, types.int64), generate


@intrinsic
def gather(typing: Any, array: Any, offset: Any, stride: Any, count: Any) -> Any:
    """The first few lanes from places that lie a stride apart, the others 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        packed, offset, stride, count = values
        found = cgutils.alloca_once_value(builder, constant(0.0))
        with cgutils.for_range(builder, count) as loop:
            here = builder.add(offset, builder.mul(loop.index, stride))
            place = pointer(context, builder, array, (packed, here), F32)
            lane = builder.trunc(loop.index, I32)
            builder.store(builder.insert_element(builder.load(found), builder.load(place), lane), found)
        return builder.load(found)

    return lanes(array, types.int64, types.int64, types.int64), generate


@intrinsic
def store(typing: Any, array: Any, offset: Any, x: Any) -> Any:
    """Write sixteen numbers, one after the other."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], pointer(context, builder, array, values[:2], NUMBERS), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes), generate


@intrinsic
def store_first(typing: Any, array: Any, offset: Any, x: Any, count: Any) -> Any:
    """Write the first few lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = pointer(context, builder, array, values[:2], NUMBERS)
        mask = first_mask(builder, values[3])
        call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), values[2], place, I32(4), mask)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes, types.int64), generate


@intrinsic
def keep_first(typing: Any, x: Any, others: Any, count: Any) -> Any:
    """The first few lanes, and others behind them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.select(first_mask(builder, values[2]), values[0], values[1])

    return lanes(lanes, lanes, types.int64), generate


@intrinsic
def total(typing: Any, x: Any) -> Any:
    """The sum of all lanes, from the first to the last."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.extract_element(values[0], I32(0))
        for lane in range(1, LANES):
            found = builder.fadd(found, builder.extract_element(values[0], I32(lane)))
        return found

    return types.float32(lanes), generate


@intrinsic
def largest(typing: Any, x: Any) -> Any:
    """The largest of all lanes; a NaN where there is one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.extract_element(values[0], I32(0))
        for lane in range(1, LANES):
            other = builder.extract_element(values[0], I32(lane))
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


log = _of_lanes("log", 1, lambda b, x: call(b, "llvm.log.v16f32", NUMBERS, x))


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
