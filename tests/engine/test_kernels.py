"""Products with exact answers, for any number of rows and in blocks of any order."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from elman.engine import kernels, native
from elman.engine.packing import pack_matrix

native.kernels()  # from here on compiled code can call them


@njit
def float_product(matrix, outputs, columns, biases, x, y, rows, start, end, backwards):
    kernels.product(
        matrix, 0, outputs, columns, biases, 0, 0, x, 0, columns, matrix, y, 0, outputs, rows, start, end, backwards
    )


@njit
def byte_product(codes, outputs, columns, numbers, x, inputs, scales, y, rows, start, end, backwards, limit):
    to = inputs.size // rows
    kernels.quantise(x, 0, columns, columns, limit, inputs, to, scales, rows)
    kernels.product_of_bytes(
        codes, 0, outputs, (columns + 1) // 2, numbers, 0, numbers.size // 2, inputs, 0, to, scales, y, 0, outputs,
        rows, start, end, backwards,
    )  # fmt: skip


def packed(matrix, per_step, dtype):
    outputs, columns = matrix.shape
    into = np.zeros((outputs + 15) // 16 * 16 * (columns + per_step), dtype)
    pack_matrix(matrix, into, per_step)
    return into


SIZES = [(1, 1), (16, 3), (65, 7), (64, 16), (130, 33), (200, 130)]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 13])
@pytest.mark.parametrize(("outputs", "columns"), SIZES)
def test_products_of_whole_numbers_are_exact(outputs, columns, rows):
    rng = np.random.default_rng(outputs + rows)
    matrix, x = rng.integers(-9, 10, (outputs, columns)), rng.integers(-9, 10, (rows, columns))
    biases = np.zeros(outputs + 64, np.float32)
    biases[:outputs] = rng.integers(-9, 10, outputs)
    expected = x @ matrix.T + biases[:outputs]
    y = np.full(rows * outputs + 16, np.nan, np.float32)
    blocks = -(-outputs // 64)
    for start in range(blocks):  # in any order and by whom ever
        block = blocks - 1 - start
        float_product(
            packed(matrix, 1, np.float32), outputs, columns, biases, x.astype(np.float32).ravel(), y, rows, block,
            block + 1, 0,
        )  # fmt: skip
    np.testing.assert_array_equal(y[:-16].reshape(rows, outputs), expected)
    assert np.isnan(y[-16:]).all()  # nothing is written behind the results


@pytest.mark.parametrize("rows", [1, 2, 5, 6])
@pytest.mark.parametrize(("outputs", "columns"), SIZES)
def test_products_of_bytes_are_those_of_the_integers(outputs, columns, rows):
    rng = np.random.default_rng(outputs + rows)
    codes = rng.integers(-127, 128, (outputs, columns))
    inputs_exact = rng.integers(-200, 201, (rows, columns))
    inputs_exact[:, 0] = 200  # so that the scale is 1 where the limit is 200
    numbers = np.zeros(2 * (outputs + 64), np.float32)
    numbers[:outputs] = rng.integers(-9, 10, outputs)
    numbers[numbers.size // 2 :] = 2.0 ** rng.integers(-3, 3, outputs + 64)
    scale = numbers[numbers.size // 2 :][:outputs]
    y = np.full(rows * outputs + 16, np.nan, np.float32)
    inputs = np.zeros(rows * ((columns + 15) // 16 * 16 + 16), np.int16)
    byte_product(
        packed(codes, 2, np.int8), outputs, columns, numbers, inputs_exact.astype(np.float32).ravel(), inputs,
        np.zeros(rows, np.float32), y, rows, 0, -(-outputs // 64), 0, 200.0,
    )  # fmt: skip
    np.testing.assert_array_equal(y[:-16].reshape(rows, outputs), inputs_exact @ codes.T * scale + numbers[:outputs])
    assert np.isnan(y[-16:]).all()


@pytest.mark.parametrize(("start", "end"), [(0, 4), (1, 3), (2, 4), (2, 2)])
def test_blocks_read_from_the_last_to_the_first_give_the_same_numbers_and_no_others(start, end):
    rng = np.random.default_rng(1)
    outputs, columns = 200, 33
    matrix, x = rng.normal(size=(outputs, columns)), rng.normal(size=columns).astype(np.float32)
    codes = rng.integers(-127, 128, (outputs, columns))
    numbers = rng.normal(size=2 * (outputs + 64)).astype(np.float32)
    found = []
    for backwards in (0, 1):
        of_numbers, of_bytes = (np.full(outputs, np.nan, np.float32) for _ in range(2))
        float_product(packed(matrix, 1, np.float32), outputs, columns, numbers, x, of_numbers, 1, start, end, backwards)
        byte_product(
            packed(codes, 2, np.int8), outputs, columns, numbers, x, np.zeros(64, np.int16), np.zeros(1, np.float32),
            of_bytes, 1, start, end, backwards, 32767.0,
        )  # fmt: skip
        found.append((of_numbers, of_bytes))
        written = np.arange(outputs) // 64
        for y in found[-1]:
            np.testing.assert_array_equal(np.isfinite(y), (start <= written) & (written < end))
    np.testing.assert_array_equal(found[0], found[1])


def test_a_vector_of_zeros_and_one_with_a_nan_are_quantised():
    for value, wanted in ((0.0, 0.0), (np.nan, np.nan)):
        x, y = np.zeros(20, np.float32), np.zeros(16, np.float32)
        x[3] = value
        numbers = np.zeros(2 * 80, np.float32)
        numbers[80:] = 1.0
        inputs, scales = np.zeros(48, np.int16), np.zeros(1, np.float32)
        byte_product(packed(np.ones((16, 20)), 2, np.int8), 16, 20, numbers, x, inputs, scales, y, 1, 0, 1, 0, 32767.0)
        np.testing.assert_array_equal(y, np.full(16, wanted))
