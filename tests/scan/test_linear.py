"""The linear recurrence in all its forms against loops in NumPy, closed forms and finite differences; convolutions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import elman.scan.linear
from elman.cells.primitives import short_convolution
from elman.scan.linear import causal_convolution, linear_recurrence

BACKENDS = ("sequential", "parallel", "compiled")
EXACT = {"rtol": 0, "atol": 1e-12}


def drawn(rows=3, steps=6, width=5, dtype=torch.float64, seed=1):
    """Factors between -1 and 1, a tenth of them zero, addends and a first state."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(rows, steps, width, generator=generator, dtype=dtype) * 2 - 1
    a[torch.rand(a.shape, generator=generator) < 0.1] = 0.0
    b = torch.randn(rows, steps, width, generator=generator, dtype=dtype)
    return a, b, torch.randn(rows, width, generator=generator, dtype=dtype)


def gradients(tensors, backend, weights):
    """Of a loss in which every state and the last one have a part of their own."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    h, last = linear_recurrence(*leaves, backend)
    return torch.autograd.grad((h.tanh() * weights).sum() + last.square().sum(), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 8, 64, 513])
def test_it_is_the_recurrence(backend, steps):
    a, b, h0 = drawn(steps=steps)
    state, expected = h0.numpy(), []
    for t in range(steps):
        state = a.numpy()[:, t] * state + b.numpy()[:, t]
        expected.append(state)
    h, last = linear_recurrence(a, b, h0, backend)
    np.testing.assert_allclose(h.numpy(), np.stack(expected, 1), **EXACT)
    np.testing.assert_allclose(last.numpy(), state, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_one_factor_it_is_a_geometric_series(backend):
    a = torch.full((1, 40, 1), 0.5, dtype=torch.float64)
    h, last = linear_recurrence(a, torch.ones_like(a), a.new_tensor([[3.0]]), backend)
    powers = 0.5 ** torch.arange(1, 41, dtype=torch.float64)
    assert torch.equal(h.flatten(), 3 * powers + 2 * (1 - powers))
    assert torch.equal(last.flatten(), h[0, -1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_nothing_given_is_changed(backend, dtype):
    given = drawn(dtype=dtype)
    before = [tensor.clone() for tensor in given]
    assert {result.dtype for result in linear_recurrence(*given, backend)} == {dtype}
    assert all(map(torch.equal, given, before))


@pytest.mark.global_rng
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_gradients_of_first_and_second_order_are_those_of_finite_differences(backend, steps):
    leaves = [tensor.requires_grad_() for tensor in drawn(rows=2, steps=steps, width=2)]
    assert torch.autograd.gradcheck(lambda *given: linear_recurrence(*given, backend), leaves)
    assert torch.autograd.gradgradcheck(lambda *given: linear_recurrence(*given, backend), leaves)


@pytest.mark.parametrize("backend", ["parallel", "compiled"])
@pytest.mark.parametrize("steps", [1, 2, 3, 513])
def test_gradients_of_every_form_are_those_of_the_loop(backend, steps):
    given = drawn(steps=steps)
    weights = torch.linspace(0.5, 1.5, given[0].numel(), dtype=torch.float64).view_as(given[0])
    for found, expected in zip(
        gradients(given, backend, weights), gradients(given, "sequential", weights), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("result", [0, 1], ids=["states", "last"])
def test_a_loss_of_one_result_alone_has_its_gradient(result):
    found, expected = (
        torch.autograd.grad(
            linear_recurrence(*leaves, backend)[result].sum(),  # the gradient of a sum is one number seen many times
            leaves,
        )
        for backend in ("compiled", "sequential")
        for leaves in ([tensor.requires_grad_() for tensor in drawn()],)
    )
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_read_as_they_are_seen(backend):
    a, b, h0 = drawn()
    wide = torch.cat([a, b], dim=-1)
    first, second = wide.chunk(2, dim=-1)
    late = torch.stack([h0, h0], dim=-1)[..., 0]
    assert not first.is_contiguous()
    for found, expected in zip(
        linear_recurrence(first, second, late, backend), linear_recurrence(a, b, h0, backend), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_number_of_threads_changes_no_bit(rows, monkeypatch):
    given = drawn(rows=rows, steps=9, width=8)
    weights = torch.ones_like(given[0])
    alone = (*linear_recurrence(*given, "compiled"), *gradients(given, "compiled", weights))
    monkeypatch.setattr(elman.scan.linear, "_MIN_NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    together = (*linear_recurrence(*given, "compiled"), *gradients(given, "compiled", weights))
    assert all(map(torch.equal, together, alone))


def test_several_threads_may_call_at_once(monkeypatch):
    monkeypatch.setattr(elman.scan.linear, "_MIN_NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    inputs = [drawn(seed=seed) for seed in range(16)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda given: linear_recurrence(*given, "compiled")[0], inputs))
    for h, given in zip(found, inputs, strict=True):
        assert torch.equal(h, linear_recurrence(*given, "compiled")[0])


def test_without_a_folder_for_its_cache_the_kernel_still_runs(monkeypatch):
    from numba.core import caching

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    forward, _ = elman.scan.linear._kernels.__wrapped__()
    a, b, h0 = drawn()
    h = np.zeros(a.shape)
    forward(a.numpy(), b.numpy(), h0.numpy(), h, 0, 3, 0, 5)
    torch.testing.assert_close(torch.from_numpy(h), linear_recurrence(a, b, h0, "sequential")[0], **EXACT)


@pytest.mark.parametrize(
    ("steps", "dtype", "device", "chosen"),
    [
        (1, torch.float32, "cpu", "_sequential"),
        (2, torch.float32, "cpu", "_compiled"),
        (513, torch.float64, "cpu", "_compiled"),
        (2, torch.bfloat16, "cpu", "_parallel"),
        (2, torch.float32, "meta", "_parallel"),
    ],
)
def test_without_a_wish_the_form_follows_from_length_dtype_and_device(steps, dtype, device, chosen, monkeypatch):
    for name in ("_sequential", "_parallel", "_compiled"):
        monkeypatch.setattr(elman.scan.linear, name, lambda *given, name=name: (name, given))
    like = torch.zeros(2, steps, 3, dtype=dtype, device=device)
    assert linear_recurrence(like, like, like[:, 0])[0] == chosen


# The short convolution.


def convolved(steps, dtype=torch.float64, rows=3):
    """An input, the inputs before it, weights and biases of a convolution of four inputs."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((rows, steps, 5), (rows, 3, 5), (5, 4), (5,))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def convolution_gradients(given, convolution):
    """Outputs, what is carried on, and the gradients of a loss of both."""
    y, carried = convolution(*given)
    return y, carried, *torch.autograd.grad(y.sin().sum() + carried.cos().sum(), given)


def step_by_step(x, before, weight, bias):
    outputs = []
    for x_BI in x.unbind(1):
        y, before = short_convolution(x_BI, before, weight, bias)
        outputs.append(y)
    return torch.stack(outputs, 1), before


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 513])
def test_the_convolution_of_a_segment_is_that_of_its_steps_in_value_and_gradient(steps, dtype, tolerance):
    given = convolved(steps, dtype)
    for found, expected in zip(
        convolution_gradients(given, causal_convolution), convolution_gradients(given, step_by_step), strict=True
    ):
        assert found.dtype == dtype
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_convolution_without_biases_has_biases_of_zero():
    x, before, weight, bias = convolved(7)
    found, _ = causal_convolution(x, before, weight)
    assert torch.equal(found, causal_convolution(x, before, weight, torch.zeros_like(bias))[0])


@pytest.mark.global_rng
def test_gradients_of_the_convolution_of_both_orders_are_those_of_finite_differences():
    given = convolved(3, rows=1)
    assert torch.autograd.gradcheck(causal_convolution, given)
    assert torch.autograd.gradgradcheck(causal_convolution, given)


@pytest.mark.parametrize("rows", [1, 7])
def test_the_number_of_threads_changes_no_bit_of_a_convolution(rows, monkeypatch):
    given = convolved(9, rows=rows)
    alone = convolution_gradients(given, causal_convolution)
    monkeypatch.setattr(elman.scan.linear, "_MIN_NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, convolution_gradients(given, causal_convolution), alone))


def test_a_convolution_that_is_not_compiled_gives_the_same(monkeypatch):
    given = convolved(9)
    expected = convolution_gradients(given, causal_convolution)
    monkeypatch.setattr(elman.scan.linear, "backend_for", lambda like: "parallel")
    torch.testing.assert_close(convolution_gradients(given, causal_convolution), expected, **EXACT)
