"""The vanilla RNN against torch.nn.RNN, a loop in NumPy, and closed forms of its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .conftest import EXACT, assert_gradients_are_those_of


@pytest.mark.global_rng
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_it_is_torch_nn_rnn(draw, nonlinearity):
    cell, p, x_BTI, state = draw("elman", biases="double", bias_init="uniform", nonlinearity=nonlinearity)
    theirs = torch.nn.RNN(3, 4, batch_first=True, nonlinearity=nonlinearity, dtype=torch.float64)
    theirs.load_state_dict({f"{name}_l0": tensor for name, tensor in p.items()})
    outputs, last = theirs(x_BTI, state["h"].unsqueeze(0))
    for scan in (cell.scan, cell.readable_scan):
        ours, after = scan(p, x_BTI, state)
        torch.testing.assert_close(ours, outputs, **EXACT)
        torch.testing.assert_close(after["h"], last[0], **EXACT)


@pytest.mark.usefixtures("looped")
@pytest.mark.global_rng
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_its_gradients_are_those_of_torch_nn_rnn(draw, nonlinearity):
    theirs = torch.nn.RNN(3, 4, batch_first=True, nonlinearity=nonlinearity, dtype=torch.float64)
    drawn = draw("elman", biases="double", bias_init="uniform", nonlinearity=nonlinearity)
    assert_gradients_are_those_of(theirs, drawn)


@pytest.mark.parametrize(
    ("nonlinearity", "function"), [("tanh", np.tanh), ("relu", lambda value: np.maximum(value, 0.0))]
)
def test_it_is_the_equation(draw, nonlinearity, function):
    cell, p, x_BTI, state = draw("elman", bias_init="uniform", nonlinearity=nonlinearity)
    W, U, b, x, h = (t.numpy() for t in (p["weight_ih"], p["weight_hh"], p["bias"], x_BTI, state["h"]))
    expected = []
    for t in range(x.shape[1]):
        h = function(np.einsum("hi,bi->bh", W, x[:, t]) + np.einsum("hk,bk->bh", U, h) + b)
        expected.append(h)
    outputs, after = cell.scan(p, x_BTI, state)
    np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(after["h"].numpy(), h, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("weight", "h_50", "gradient"),
    [(0.9, 0.00515377520732012, 0.28632084485111), (1.0, 1.0, 50.0), (1.1, 117.39085287969571, 5335.947858167987)],
)
def test_a_gradient_vanishes_and_explodes_as_the_power_of_the_weight(draw, weight, h_50, gradient):
    # With a ReLU, no input and a positive state, h_50 = w^50 h_0 and dh_50/dw = 50 w^49 h_0.
    cell, *_ = draw("elman", input_size=1, hidden_size=1, nonlinearity="relu")
    p = {
        "weight_ih": torch.zeros(1, 1, dtype=torch.float64),
        "weight_hh": torch.tensor([[weight]], dtype=torch.float64, requires_grad=True),
        "bias": torch.zeros(1, dtype=torch.float64),
    }
    h_0 = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    for scan in (cell.scan, cell.readable_scan):
        outputs, _ = scan(p, torch.zeros(1, 50, 1, dtype=torch.float64), {"h": h_0})
        by_weight, by_state = torch.autograd.grad(outputs[0, -1, 0], (p["weight_hh"], h_0))
        assert outputs[0, -1, 0].item() == pytest.approx(h_50, rel=1e-12)
        assert by_weight.item() == pytest.approx(gradient, rel=1e-12)
        assert by_state.item() == pytest.approx(weight**50, rel=1e-12)


def test_the_preactivation_has_a_name(draw):
    cell, p, x_BTI, state = draw("elman")
    step = cell.step(p, x_BTI[:, 0], state)
    torch.testing.assert_close(step.named["preactivation"].tanh(), step.output, **EXACT)
