"""What compiled loops are made of: functions to a relative error of 1e-6."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from elman.engine import lanes

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


def test_comparisons_are_those_of_numpy_and_false_for_what_is_no_number():
    ends = np.array([-np.inf, -1.0, -0.0, 0.0, 1e-45, 1.0, np.inf, np.nan], np.float32)
    x, y = (side.ravel() for side in np.meshgrid(ends, ends))
    for name, exact in (("equal", np.equal), ("less", np.less), ("at_most", np.less_equal)):
        compare = getattr(lanes, name)

        @njit
        def run(x, y, z, which, compare=compare):
            for i in range(0, x.size, 16):
                a, b = lanes.load(x, i), lanes.load(y, i)
                lanes.store(z, i, compare(a, b))
                lanes.store(which, i, lanes.where(compare(a, b), a, b))

        z, which = np.empty_like(x), np.empty_like(x)
        run(x, y, z, which)
        np.testing.assert_array_equal(z, exact(x, y), err_msg=name)
        np.testing.assert_array_equal(which, np.where(exact(x, y), x, y), err_msg=name)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "log_sigmoid", "relu"])
def test_nan_goes_through(name):
    x = np.full(16, np.nan, np.float32)
    assert np.isnan(applied(getattr(lanes, name), x)).all()
