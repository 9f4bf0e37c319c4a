"""The Mogrifier LSTM against a loop in NumPy written from the paper's equations, and against the LSTM that it gates."""

from __future__ import annotations

import pytest
import torch

from elman.errors import ConfigError

from .conftest import EXACT, Drawn, NumPyLSTM, assert_both_forms_give, assert_is_torch_nn_lstm, sigmoid

SETTINGS = [
    {"mogrifier_rounds": 1},
    {"mogrifier_rounds": 2},
    {"mogrifier_rounds": 4, "mogrifier_rank": 2},
    {},
    {"mogrifier_rank": 2, "biases": "double"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_is_the_equations_of_the_paper(draw, settings):
    cell, p, x_BTI, state = draw("mogrifier_lstm", bias_init="uniform", **settings)
    given = {name: tensor.numpy() for name, tensor in p.items()}
    rounds, rank = settings.get("mogrifier_rounds", 5), settings.get("mogrifier_rank", 0)
    matrices = {
        i: given[f"round_{i}_left"] @ given[f"round_{i}_right"] if rank else given[f"round_{i}"]
        for i in range(1, rounds + 1)
    }
    lstm, h, c, expected = NumPyLSTM(p), state["h"].numpy(), state["c"].numpy(), []
    for t in range(x_BTI.shape[1]):
        x = x_BTI[:, t].numpy()
        for i in range(1, rounds + 1):
            if i % 2:
                x = 2 * sigmoid(h @ matrices[i].T) * x
            else:
                h = 2 * sigmoid(x @ matrices[i].T) * h
        h, c = lstm.step(x, h, c)
        expected.append(h)
    assert_both_forms_give(Drawn(cell, p, x_BTI, state), expected, c)


@pytest.mark.global_rng
def test_without_rounds_it_is_torch_nn_lstm(draw):
    assert_is_torch_nn_lstm(draw("mogrifier_lstm", mogrifier_rounds=0, biases="double", bias_init="uniform"))


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_with_matrices_of_zero_every_gate_is_one_and_it_is_the_lstm(draw, rounds):
    cell, p, x_BTI, state = draw("mogrifier_lstm", mogrifier_rounds=rounds)
    p = {name: torch.zeros_like(tensor) if name.startswith("round") else tensor for name, tensor in p.items()}
    lstm = draw("lstm").cell
    outputs, after = cell.scan(p, x_BTI, state)
    expected, expected_after = lstm.scan(p, x_BTI, state)
    torch.testing.assert_close(outputs, expected, **EXACT)
    torch.testing.assert_close(after["c"], expected_after["c"], **EXACT)


def test_the_values_that_the_lstm_reads_have_names(draw):
    cell, p, x_BTI, state = draw("mogrifier_lstm", mogrifier_rounds=2)
    named = cell.step(p, x_BTI[:, 0], state).named
    assert {"gated_input", "gated_state", "input_gate", "forget_gate", "candidate", "output_gate"} == set(named)
    x = 2 * (state["h"] @ p["round_1"].T).sigmoid() * x_BTI[:, 0]
    torch.testing.assert_close(named["gated_input"], x, **EXACT)
    torch.testing.assert_close(named["gated_state"], 2 * (x @ p["round_2"].T).sigmoid() * state["h"], **EXACT)


@pytest.mark.parametrize(("rank", "of_rounds"), [(0, 5 * 3 * 4), (2, 5 * 2 * (3 + 4))])
def test_the_number_of_parameters_is_the_formula_of_the_docstring(draw, rank, of_rounds):
    cell = draw("mogrifier_lstm", mogrifier_rank=rank).cell
    assert cell.num_parameters() == 4 * 4 * (3 + 4 + 1) + of_rounds
    assert cell.operations_per_step() == 2 * (4 * 4 * (3 + 4) + of_rounds)


def test_a_low_rank_is_lower_than_both_widths(draw):
    with pytest.raises(ConfigError, match=r"^model.mogrifier_rank is 3; accepted: less than .* state \(3\), or 0 for"):
        draw("mogrifier_lstm", mogrifier_rank=3)
    with pytest.raises(ConfigError, match=r"^model.mogrifier_rank 2 has no meaning without rounds"):
        draw("mogrifier_lstm", mogrifier_rank=2, mogrifier_rounds=0)
