"""Each primitive against PyTorch's module or NumPy."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from elman.cells import primitives

EXACT = {"rtol": 0, "atol": 1e-12}
X = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ENDS = torch.tensor([-1000.0, -50.0, -1e-9, 0.0, 1e-9, 50.0, 1000.0], dtype=torch.float64)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_every_function_of_the_list_is_tested_here():
    functions = {
        value for value in vars(primitives).values() if getattr(value, "__module__", "") == primitives.__name__
    }
    used = {name for test in globals().values() if callable(test) for name in _names_in(test)}
    assert {function.__name__ for function in functions} - used == set()


def _names_in(function: Callable[..., object]) -> tuple[str, ...]:
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def test_linear():
    weight, bias = drawn(5, 12), drawn(5)
    np.testing.assert_allclose(primitives.linear(X, weight), X.numpy() @ weight.numpy().T, **EXACT)
    expected = X.numpy() @ weight.numpy().T + bias.numpy()
    np.testing.assert_allclose(primitives.linear(X, weight, bias), expected, **EXACT)


def test_parts_of_the_last_dimension():
    for ours, theirs in zip(primitives.split(X, 4), np.split(X.numpy(), 4, axis=-1), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(primitives.split_sizes(X, (2, 7, 3)), np.split(X.numpy(), [2, 9], axis=-1), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert torch.equal(primitives.concat(primitives.split_sizes(X, (2, 7, 3))), X)
    np.testing.assert_array_equal(primitives.heads(X, 4), X.numpy().reshape(3, 4, 3))
    assert torch.equal(primitives.merge_heads(primitives.heads(X, 4)), X)


def test_products_of_vectors_and_matrices():
    x, y, matrix = drawn(3, 2, 4), drawn(3, 2, 5), drawn(3, 2, 4, 5)
    np.testing.assert_allclose(primitives.outer(x, y), np.einsum("bnd,bnm->bndm", x, y), **EXACT)
    np.testing.assert_allclose(primitives.rows_times(matrix, x), np.einsum("bndm,bnd->bndm", matrix, x), **EXACT)
    np.testing.assert_allclose(primitives.matvec(matrix, y), np.einsum("bndm,bnm->bnd", matrix, y), **EXACT)
    np.testing.assert_allclose(primitives.total(x), x.numpy().sum(-1, keepdims=True), **EXACT)


def test_functions_of_one_number():
    for x in (X, ENDS):
        np.testing.assert_allclose(primitives.softplus(x), np.logaddexp(0, x.numpy()), rtol=1e-15)
        np.testing.assert_allclose(primitives.log_sigmoid(x), -np.logaddexp(0, -x.numpy()), rtol=1e-15)
        torch.testing.assert_close(primitives.silu(x), nn.SiLU()(x), **EXACT)
        torch.testing.assert_close(primitives.gelu(x), nn.GELU(approximate="tanh")(x), **EXACT)
        torch.testing.assert_close(primitives.sqrt(x.square()), x.abs(), **EXACT)
        np.testing.assert_array_equal(primitives.maximum(x, 0.25), np.maximum(x.numpy(), 0.25))
        assert torch.equal(primitives.maximum(x, -x), x.abs())


@pytest.mark.parametrize("name", ["softplus", "log_sigmoid", "silu", "gelu"])
def test_gradients_are_finite_however_large_the_number(name):
    x = ENDS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(getattr(primitives, name)(x).sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("scaled", [False, True])
def test_norms(scaled):
    rms, layer = nn.RMSNorm(12, eps=1e-6, dtype=torch.float64), nn.LayerNorm(12, dtype=torch.float64)
    weight, bias = (drawn(12), drawn(12) + 1) if scaled else (None, None)
    if scaled:
        rms.weight.data, layer.weight.data, layer.bias.data = weight, weight, bias
    torch.testing.assert_close(primitives.rms_norm(X, weight), rms(X), **EXACT)
    torch.testing.assert_close(primitives.layer_norm(X, weight, bias), layer(X), **EXACT)
    x = X.numpy()
    root = np.sqrt((x**2).mean(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(primitives.rms_norm(X, epsilon=0.5), x / root, **EXACT)
    deviation = np.sqrt(x.var(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(
        primitives.layer_norm(X, epsilon=0.5), (x - x.mean(-1, keepdims=True)) / deviation, **EXACT
    )


@pytest.mark.parametrize("width", [2, 4])
def test_short_convolution_is_a_step_of_a_grouped_convolution(width):
    x_BTI, weight_IK, bias_I = drawn(3, 7, 5), drawn(5, width), drawn(5)
    before_BKI = drawn(3, width - 1, 5) - 1
    inputs_BIT = torch.cat([before_BKI, x_BTI], dim=1).mT
    for bias in (None, bias_I):
        expected_BIT = functional.conv1d(inputs_BIT, weight_IK.unsqueeze(1), bias, groups=5)
        carried_BKI = before_BKI
        for time, x_BI in enumerate(x_BTI.unbind(1)):
            y_BI, carried_BKI = primitives.short_convolution(x_BI, carried_BKI, weight_IK, bias)
            torch.testing.assert_close(y_BI, expected_BIT[..., time], **EXACT)
        assert torch.equal(carried_BKI, x_BTI[:, 8 - width :])
