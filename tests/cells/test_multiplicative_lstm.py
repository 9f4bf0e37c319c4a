"""The multiplicative LSTM against a loop in NumPy written from the paper's equations, and against the LSTM."""

from __future__ import annotations

import math

import pytest
import torch

from .conftest import EXACT, Drawn, NumPyLSTM, assert_both_forms_give, assert_is_torch_nn_lstm


@pytest.mark.parametrize("biases", ["single", "double"])
def test_it_is_the_equations_of_the_paper(draw, biases):
    cell, p, x_BTI, state = draw("multiplicative_lstm", bias_init="uniform", biases=biases)
    given = {name: tensor.numpy() for name, tensor in p.items()}
    lstm, h, c, expected = NumPyLSTM(p), state["h"].numpy(), state["c"].numpy(), []
    for t in range(x_BTI.shape[1]):
        x = x_BTI[:, t].numpy()
        m = (x @ given["weight_mx"].T) * (h @ given["weight_mh"].T)
        h, c = lstm.step(x, m, c)
        expected.append(h)
    assert_both_forms_give(Drawn(cell, p, x_BTI, state), expected, c)


@pytest.mark.global_rng
def test_where_the_input_leaves_h_as_it_is_it_is_torch_nn_lstm(draw):
    cell, p, x_BTI, state = draw("multiplicative_lstm", biases="double", bias_init="uniform")
    x_BTI = torch.cat([x_BTI[..., 1:], torch.ones_like(x_BTI[..., :1])], dim=-1)
    p["weight_mx"] = torch.eye(3, dtype=torch.float64)[[2] * 4]  # every row takes the input that is always one
    p["weight_mh"] = torch.eye(4, dtype=torch.float64)
    assert_is_torch_nn_lstm(Drawn(cell, p, x_BTI, state))


def test_each_input_has_a_recurrent_matrix_of_its_own(draw):
    cell, p, x_BTI, state = draw("multiplicative_lstm")
    for x_I in x_BTI[0]:
        matrix = p["weight_hh"] @ torch.diag(p["weight_mx"] @ x_I) @ p["weight_mh"]
        gates = (p["weight_ih"] @ x_I + matrix @ state["h"][0] + p["bias"]).chunk(4)
        named = cell.step(p, x_I.expand(2, 3), state).named
        torch.testing.assert_close(named["forget_gate"][0], gates[1].sigmoid(), **EXACT)
        torch.testing.assert_close(named["candidate"][0], gates[2].tanh(), **EXACT)


def test_an_input_of_zero_hides_the_state_from_the_gates(draw):
    cell, p, x_BTI, state = draw("multiplicative_lstm")
    for h in (state["h"], state["h"] + 1):
        named = cell.step(p, torch.zeros_like(x_BTI[:, 0]), {"h": h, "c": state["c"]}).named
        assert not named["multiplied"].any()
        assert torch.equal(named["output_gate"], torch.full_like(named["output_gate"], 0.5))


def test_it_has_the_size_and_the_draw_of_its_docstring(draw):
    cell, p, _, _ = draw("multiplicative_lstm", input_size=50, hidden_size=64)
    assert cell.num_parameters() == 4 * 64 * (50 + 64 + 1) + 64 * (50 + 64)
    assert cell.operations_per_step() == 2 * (4 * 64 * (50 + 64) + 64 * (50 + 64))
    assert 0.99 * math.sqrt(3 / 50) < p["weight_mx"].abs().max() <= math.sqrt(3 / 50)
    torch.testing.assert_close(p["weight_mh"] @ p["weight_mh"].T, torch.eye(64, dtype=torch.float64), **EXACT)
    assert p["bias"][64:128].tolist() == [1.0] * 64


def test_m_starts_with_about_the_variance_of_h(draw):
    cell, p, _, _ = draw("multiplicative_lstm", input_size=64, hidden_size=256)
    generator = torch.Generator().manual_seed(3)
    x_BI = torch.randn(50, 64, generator=generator, dtype=torch.float64)
    h_BH = 0.3 * torch.randn(50, 256, generator=generator, dtype=torch.float64)
    named = cell.step(p, x_BI, {"h": h_BH, "c": torch.zeros_like(h_BH)}).named
    assert named["multiplied"].var().item() == pytest.approx(h_BH.var().item(), rel=0.1)
