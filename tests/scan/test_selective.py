"""The selective scan in all its forms against a loop in NumPy, finite differences and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import elman.scan.linear
from elman.scan.selective import selective_scan

BACKENDS = ("sequential", "parallel", "compiled")
LENGTHS = [1, 2, 3, 513]


def drawn(rows=2, steps=5, channels=3, states=2, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    x, dt, A = normal(rows, steps, channels), normal(rows, steps, channels).abs(), -3 * normal(channels, states).abs()
    B, C = normal(rows, steps, states), normal(rows, steps, states)
    return [x, dt, A, B, C, normal(channels), normal(rows, channels, states)]


def results_and_gradients(given, backend):
    """Outputs, last state, and the gradients of a loss in which every number of both has a part of its own."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    y, h = selective_scan(*leaves, backend)
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)
    return [y, h, *torch.autograd.grad((y.tanh() * weights).sum() + h.square().sum(), leaves)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", LENGTHS)
def test_it_is_the_recurrence(backend, steps):
    given = drawn(steps=steps, channels=130)  # more than a kernel takes at once
    x, dt, A, B, C, D, h = (tensor.numpy() for tensor in given)
    expected = []
    for t in range(steps):
        h = np.exp(dt[:, t, :, None] * A) * h + (dt * x)[:, t, :, None] * B[:, t, None, :]
        expected.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
    y, last = selective_scan(*given, backend)
    np.testing.assert_allclose(y.numpy(), np.stack(expected, 1), rtol=0, atol=1e-11)
    np.testing.assert_allclose(last.numpy(), h, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("from_zero", [False, True])
def test_outputs_state_and_gradients_of_every_form_are_those_of_the_loop(dtype, tolerance, steps, from_zero):
    given = drawn(steps=steps, channels=130, dtype=dtype)
    if from_zero:
        given[-1].zero_()
    expected = results_and_gradients(given, "sequential")
    for backend in ("parallel", "compiled"):
        for found, one in zip(results_and_gradients(given, backend), expected, strict=True):
            assert found.dtype == dtype
            assert (found - one).abs().max() <= tolerance * one.abs().max()


@pytest.mark.global_rng
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_of_first_and_second_order_are_those_of_finite_differences(steps):
    leaves = [tensor.requires_grad_() for tensor in drawn(steps=steps)]
    assert torch.autograd.gradcheck(lambda *given: selective_scan(*given, "compiled"), leaves)
    assert torch.autograd.gradgradcheck(lambda *given: selective_scan(*given, "compiled"), leaves)


@pytest.mark.parametrize("result", [0, 1], ids=["outputs", "last state"])
def test_a_loss_of_one_result_alone_has_its_gradient(result):
    found, expected = (
        torch.autograd.grad(
            selective_scan(*leaves, backend)[result].sum(),  # the gradient of a sum is one number seen many times
            leaves,
            allow_unused=True,  # the last state needs neither C nor D
            materialize_grads=True,
        )
        for backend in ("compiled", "sequential")
        for leaves in ([tensor.requires_grad_() for tensor in drawn()],)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_views_are_read_as_they_are_seen_and_left_alone():
    given = drawn(channels=4, states=4)
    wide = torch.cat([given[3], given[4]], dim=-1)
    views = [*given[:3], *wide.chunk(2, dim=-1), *given[5:]]
    before = [tensor.clone() for tensor in views]
    found = results_and_gradients(views, "compiled")
    assert all(map(torch.equal, found, results_and_gradients(given, "compiled")))
    assert all(map(torch.equal, views, before))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_number_of_threads_changes_no_bit(rows, monkeypatch):
    given = drawn(rows=rows, channels=300)
    alone = results_and_gradients(given, "compiled")
    monkeypatch.setattr(elman.scan.linear, "_MIN_NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, results_and_gradients(given, "compiled"), alone))


def decays(exponents):
    """What remains of a state of one after a step, by the compiled kernel."""
    one = torch.ones(1, 1, 1)
    rates = exponents.view(-1, 1)
    many = one.expand(1, 1, len(rates))
    y, _ = selective_scan(0 * many, many, rates, one, one, 0 * many[0, 0], many.view(1, -1, 1), "compiled")
    return y.flatten()


def test_the_exponential_of_the_kernel_is_right_to_the_last_digit_of_float32():
    exponents = -torch.linspace(0, 87, 100_001)
    expected = exponents.double().exp()
    assert ((decays(exponents) - expected).abs() <= 1.2e-7 * expected).all()
    assert decays(torch.tensor([-0.0])).item() == 1.0
    far = decays(torch.tensor([-87.5, -1e4, -torch.inf]))
    assert ((far >= 0) & (far < 2e-38)).all()
    assert decays(torch.tensor([torch.nan])).isnan()


def test_other_devices_and_dtypes_take_whole_tensors():
    given = [tensor.to("meta") for tensor in drawn(steps=7)]
    y, h = selective_scan(*given)
    assert (y.shape, h.shape) == ((2, 7, 3), (2, 3, 2))
    given = [tensor.bfloat16() for tensor in drawn(steps=7)]
    assert {result.dtype for result in selective_scan(*given)} == {torch.bfloat16}
