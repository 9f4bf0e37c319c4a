"""What generated steps are made of: functions to a relative error of 1e-6, products with exact answers."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from elman.engine import lanes
from elman.engine.packing import pack_matrix

FUNCTIONS = {
    "exp": (np.exp, lanes.exp, (-86.0, 88.0)),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lanes.sigmoid, (-86.0, 100.0)),
    "tanh": (np.tanh, lanes.tanh, (-100.0, 100.0)),
    "log_sigmoid": (lambda x: -np.logaddexp(0, -x), lanes.log_sigmoid, (-100.0, 86.0)),
    "log": (np.log, lanes.log, (1e-30, 1e30)),
    "sqrt": (np.sqrt, lanes.sqrt, (0.0, 1e30)),
}


def applied(function, x):
    @njit
    def run(x, y):
        for i in range(0, x.size, 16):
            lanes.store(y, i, function(lanes.load(x, i)))

    y = np.empty_like(x)
    run(x, y)
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_number_are_right_to_the_last_digits(name):
    exact, function, (low, high) = FUNCTIONS[name]
    rng = np.random.default_rng(1)
    near = 10.0 ** rng.uniform(-12, 1.9, 1 << 15) * rng.choice([-1, 1], 1 << 15)
    x = np.concatenate([rng.uniform(low, high, 1 << 16), near[(near > low) & (near < high)]]).astype(np.float32)
    x = np.sort(x[: x.size // 16 * 16])
    expected = exact(x.astype(np.float64))
    error = np.abs(applied(function, x) - expected) / np.maximum(np.abs(expected), 1e-37)
    assert error.max() <= 1e-6, f"{name} at {x[error.argmax()]}: {error.max()}"


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("exp", [np.inf, -np.inf, 0.0, 200.0, -200.0, -100.0], [np.inf, 0.0, 1.0, np.inf, 0.0, 3.783506e-44]),
        ("sigmoid", [np.inf, -np.inf, 0.0, 200.0, -200.0], [1.0, 0.0, 0.5, 1.0, 0.0]),
        ("tanh", [np.inf, -np.inf, 0.0, 30.0, -30.0], [1.0, -1.0, 0.0, 1.0, -1.0]),
        ("log_sigmoid", [np.inf, 0.0, 200.0, -200.0], [0.0, -0.6931472, 0.0, -200.0]),
    ],
)
def test_functions_at_their_ends(name, given, wanted):
    x = np.zeros(16, np.float32)
    x[: len(given)] = given
    found = applied(FUNCTIONS[name][1], x)[: len(given)]
    np.testing.assert_allclose(found, np.float32(wanted), rtol=1e-6, atol=2e-45)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "log_sigmoid", "relu"])
def test_nan_goes_through(name):
    x = np.full(16, np.nan, np.float32)
    assert np.isnan(applied(getattr(lanes, name), x)).all()


@njit
def float_product(matrix, outputs, columns, biases, x, y, rows, start, end):
    lanes.product(matrix, 0, outputs, columns, biases, 0, 0, x, 0, columns, matrix, y, 0, outputs, rows, start, end)


@njit
def byte_product(codes, outputs, columns, numbers, x, inputs, scales, y, rows, start, end, limit):
    to = inputs.size // rows
    lanes.quantise(x, 0, columns, columns, limit, inputs, to, scales, rows)
    lanes.product_of_bytes(
        codes, 0, outputs, (columns + 1) // 2, numbers, 0, numbers.size // 2, inputs, 0, to, scales, y, 0, outputs,
        rows, start, end,
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
            block + 1,
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
        np.zeros(rows, np.float32), y, rows, 0, -(-outputs // 64), 200.0,
    )  # fmt: skip
    np.testing.assert_array_equal(y[:-16].reshape(rows, outputs), inputs_exact @ codes.T * scale + numbers[:outputs])
    assert np.isnan(y[-16:]).all()


def test_a_vector_of_zeros_and_one_with_a_nan_are_quantised():
    for value, wanted in ((0.0, 0.0), (np.nan, np.nan)):
        x, y = np.zeros(20, np.float32), np.zeros(16, np.float32)
        x[3] = value
        numbers = np.zeros(2 * 80, np.float32)
        numbers[80:] = 1.0
        inputs, scales = np.zeros(48, np.int16), np.zeros(1, np.float32)
        byte_product(packed(np.ones((16, 20)), 2, np.int8), 16, 20, numbers, x, inputs, scales, y, 1, 0, 1, 32767.0)
        np.testing.assert_array_equal(y, np.full(16, wanted))
