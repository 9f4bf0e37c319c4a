"""Compiled drawing: the next token of a row of scores, and a text token after token without a word of Python between.

It knows the settings that look at one row of scores alone, as :mod:`elman.choosing` defines them in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# The compiled functions below have no types: Numba finds those of their arguments.
from llvmlite import ir  # type: ignore[import-untyped]  # ships no types
from numba import njit, types

from elman.engine.emit import F64, I16, I32, I64
from elman.engine.kernels import call_compiled, draw, meet, operation, types_of
from elman.engine.lanes import intrinsic, lanes, largest, load, load_first, maximum, splat, store, store_first
from elman.engine.native import BELOW_ONE, DAMAGED, NOTHING_LEFT, STEP
from elman.engine.packing import BLOCK, LANES

_LOG2_E = 1.4426950408889634
_LN_2, _REST_OF_LN_2 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""Their sum is ln 2; the first has few digits, so that small multiples of it are exact."""
_SMALLEST = -746.0
"""e^x is zero from here down."""


@intrinsic
def onward(typing: Any, start: Any, offset: Any) -> Any:
    """A pointer to a later place."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.gep(values[0], [values[1]])

    return start(start, types.int64), generate


@intrinsic
def _power_of_two(typing: Any, n: Any) -> Any:
    """2^n in float64, for n from -1022 to 1023."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(values[0], I64(1023)), I64(52)), F64)

    return types.float64(types.int64), generate


@intrinsic
def _where_equal(typing: Any, x: Any, y: Any) -> Any:
    """A number with a bit for each lane, which is 1 where two are equal."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.zext(builder.bitcast(builder.fcmp_ordered("==", *values), I16), I64)

    return types.int64(lanes, lanes), generate


@njit
def exp(x: Any) -> Any:
    """e^x for x not above 0, in float64: 2^n e^r with |r| <= log(2)/2, and e^r from its Taylor series."""
    x = x if x > _SMALLEST else _SMALLEST
    n = math.floor(x * _LOG2_E + 0.5)
    r = (x - n * _LN_2) - n * _REST_OF_LN_2
    p = (1 / 6227020800 * r + 1 / 479001600) * r + 1 / 39916800
    p = ((p * r + 1 / 3628800) * r + 1 / 362880) * r + 1 / 40320
    p = ((p * r + 1 / 5040) * r + 1 / 720) * r + 1 / 120
    p = ((p * r + 1 / 24) * r + 1 / 6) * r + 1 / 2
    p = (p * r + 1.0) * r + 1.0
    half = n >> 1
    return p * _power_of_two(half) * _power_of_two(n - half)


# From here on Numba infers the types of what kernels are given, arrays and addresses, which mypy cannot name.


@njit
def _goes_before(weights, a, b):  # type: ignore[no-untyped-def]
    """Whether a token is dropped before another: it is less probable, or as probable and later."""
    return weights[a] < weights[b] or (weights[a] == weights[b] and a > b)


@njit
def _sink(weights, heap, count, place):  # type: ignore[no-untyped-def]
    """Bring a heap into order below a place; the token that goes first is at its top."""
    token = heap[place]
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and _goes_before(weights, heap[child + 1], heap[child]):
            child += 1
        if not _goes_before(weights, heap[child], token):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = token


@njit
def _keep_top_k(weights, heap, size, top_k):  # type: ignore[no-untyped-def]
    for place in range(top_k):
        heap[place] = place
    for place in range(top_k // 2 - 1, -1, -1):
        _sink(weights, heap, top_k, place)
    for token in range(top_k, size):
        if weights[token] > weights[heap[0]]:
            heap[0] = token
            _sink(weights, heap, top_k, 0)
    smallest = weights[heap[0]]
    for token in range(size):
        if weights[token] < smallest:
            weights[token] = 0.0


@njit
def _keep_top_p(weights, heap, size, top_p):  # type: ignore[no-untyped-def]
    total = 0.0
    for token in range(size):
        total += weights[token]
    dropped = (1.0 - top_p) * total
    least = dropped / size
    count, kept = 0, 0.0
    for token in range(size):
        if weights[token] > least or weights[token] == 1.0:  # which the largest is
            heap[count] = token
            count += 1
            kept += weights[token]
        else:
            weights[token] = 0.0
    gone, summed = total - kept, 0.0
    for place in range(count // 2 - 1, -1, -1):
        _sink(weights, heap, count, place)
    while count > 1:
        token = heap[0]
        summed += weights[token]
        if gone + summed > dropped:
            break
        weights[token] = 0.0
        count -= 1
        heap[0] = heap[count]
        _sink(weights, heap, count, 0)


@njit
def _largest(scores, size):  # type: ignore[no-untyped-def]
    """Of what stands in whole blocks: four times sixteen numbers, so that no comparison waits for the one before."""
    a = load(scores, 0)
    b = load(scores, LANES)
    c = load(scores, 2 * LANES)
    d = load(scores, 3 * LANES)
    for i in range(BLOCK, size, BLOCK):
        a = maximum(a, load(scores, i))
        b = maximum(b, load(scores, i + LANES))
        c = maximum(c, load(scores, i + 2 * LANES))
        d = maximum(d, load(scores, i + 3 * LANES))
    return largest(maximum(maximum(a, b), maximum(c, d)))


@njit
def _place(scores, number):  # type: ignore[no-untyped-def]
    """The first place of a number that is there."""
    place, wanted = 0, splat(number)
    while _where_equal(load(scores, place), wanted) == 0:
        place += LANES
    while scores[place] != number:
        place += 1
    return place


def _draw(  # type: ignore[no-untyped-def]
    logits, size, scores, weights, heap, never, num_never, boundary, temperature, top_k, top_p, min_p,
    may_end, uniform, tokens, at,
):  # fmt: skip
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store(scores, i, load(logits, i))
    # Behind them stand negative infinities, up to a whole block.
    store_first(scores, whole, load_first(logits, whole, size - whole), size - whole)
    best = _largest(scores, size)
    if not -math.inf < best < math.inf:
        tokens[at] = DAMAGED
        return
    for i in range(num_never):
        scores[never[i]] = -math.inf
    if may_end == 0 and boundary >= 0:
        scores[boundary] = -math.inf
    best = _largest(scores, size)
    if best == -math.inf:
        tokens[at] = NOTHING_LEFT
        return
    if temperature == 0.0:
        tokens[at] = _place(scores, best)
        return
    for i in range(size):
        weights[i] = exp((np.float64(scores[i]) - np.float64(best)) / temperature)
    if 0 < top_k < size:
        _keep_top_k(weights, heap, size, top_k)
    if top_p < 1.0:
        _keep_top_p(weights, heap, size, top_p)
    if min_p > 0.0:
        for i in range(size):
            weights[i] = weights[i] if weights[i] >= min_p else 0.0
    total = 0.0
    for i in range(size):
        total += weights[i]
    threshold = min(uniform * total, BELOW_ONE * total)
    token, so_far = 0, weights[0]
    while so_far <= threshold:
        token += 1
        so_far += weights[token]
    tokens[at] = token


def _choose(  # type: ignore[no-untyped-def]
    logits, size, rows, scores, weights, heap, never, num_never, boundary, temperature, top_k, top_p, min_p,
    may_end, uniforms, tokens,
):  # fmt: skip
    for row in range(rows):
        draw(
            onward(logits, row * size), size, scores, weights, heap, never, num_never, boundary, temperature, top_k,
            top_p, min_p, may_end[row], uniforms[row], tokens, row,
        )  # fmt: skip


def _write_call_of_step(builder: Any, values: Any) -> Any:
    address, *arguments = values
    place = I64.as_pointer()
    kind = ir.FunctionType(I32, [place, place, *(value.type for value in arguments)])
    return call_compiled(builder, builder.inttoptr(address, kind.as_pointer()), arguments)


_call_step = operation("call_step", [types.int64, *types_of(tuple(STEP.values()))], types.int64, _write_call_of_step)


def _generate(  # type: ignore[no-untyped-def]
    step, meetings, numbers, codes, tokens, ints, num_ints, state, num_state, logits, size, work, shared, inputs,
    input_scales, arrivals, scores, weights, heap, never, num_never, boundary, temperature, top_k, top_p, min_p,
    uniforms, num_before_end, given, count, thread, threads, done,
):  # fmt: skip
    met = 0
    for t in range(count):
        meet(arrivals, met + 1, threads)
        if t >= given and thread == 0:
            draw(
                logits, size, scores, weights, heap, never, num_never, boundary, temperature, top_k, top_p, min_p,
                1 if t - given >= num_before_end else 0, uniforms[t], tokens, t,
            )  # fmt: skip
        meet(arrivals, met + 2, threads)
        met += 2
        if t >= given and (tokens[t] < 0 or tokens[t] == boundary):
            done[0] = t
            return
        here, there = t % 2, 1 - t % 2
        fault = _call_step(
            step, numbers, codes, onward(tokens, t), onward(ints, here * num_ints), onward(state, here * num_state),
            onward(ints, there * num_ints), onward(state, there * num_state), logits, work, shared, inputs,
            input_scales, arrivals, met, 1, thread, threads, here,
        )  # fmt: skip
        if fault != 0:
            done[0] = -1
            return
        met += meetings
    done[0] = count


FUNCTIONS: dict[str, Callable[..., Any]] = {"draw": _draw, "choose": _choose, "generate": _generate}
