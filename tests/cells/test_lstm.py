"""The LSTM against torch.nn.LSTM and a loop in NumPy written from the paper's equations."""

from __future__ import annotations

import pytest
import torch

from .conftest import EXACT, Drawn, NumPyLSTM, assert_both_forms_give, assert_is_torch_nn_lstm


@pytest.mark.global_rng
def test_it_is_torch_nn_lstm(draw):
    assert_is_torch_nn_lstm(draw("lstm", biases="double", bias_init="uniform", forget_bias=None))


def test_it_is_the_equations_of_the_paper(draw):
    cell, p, x_BTI, state = draw("lstm", bias_init="uniform")
    lstm, h, c, expected = NumPyLSTM(p), state["h"].numpy(), state["c"].numpy(), []
    for x_BI in x_BTI.unbind(1):
        h, c = lstm.step(x_BI.numpy(), h, c)
        expected.append(h)
    assert_both_forms_give(Drawn(cell, p, x_BTI, state), expected, c)


def test_the_gates_have_names(draw):
    cell, p, x_BTI, state = draw("lstm")
    step = cell.step(p, x_BTI[:, 0], state)
    gates = step.named
    assert set(gates) == {"input_gate", "forget_gate", "candidate", "output_gate"}
    c = gates["forget_gate"] * state["c"] + gates["input_gate"] * gates["candidate"]
    torch.testing.assert_close(step.state["c"], c, **EXACT)
    torch.testing.assert_close(step.output, gates["output_gate"] * c.tanh(), **EXACT)


@pytest.mark.parametrize("biases", ["single", "double"])
@pytest.mark.parametrize("bias_init", ["zeros", "uniform"])
@pytest.mark.parametrize("forget_bias", [1.0, 2.5])
def test_the_forget_gate_starts_at_its_bias_however_many_vectors_there_are(draw, biases, bias_init, forget_bias):
    p = draw("lstm", biases=biases, bias_init=bias_init, forget_bias=forget_bias).p
    vectors = [tensor for name, tensor in p.items() if name.startswith("bias")]
    _, f, g, _ = sum(vectors).chunk(4)
    assert torch.equal(f, torch.full_like(f, forget_bias))
    assert torch.equal(g, torch.zeros_like(g)) == (bias_init == "zeros")


def test_the_forget_bias_is_one_unless_another_is_asked_for(draw):
    assert draw("lstm").p["bias"][4:8].tolist() == [1.0] * 4
    assert draw("lstm", forget_bias=None).p["bias"].tolist() == [0.0] * 16


def test_an_open_forget_gate_carries_memory_and_gradient_unchanged(draw):
    cell, p, _, state = draw("lstm")
    p = {name: torch.zeros_like(tensor) for name, tensor in p.items()}
    p["bias"][4:8] = 1e3  # f = 1 exactly; i = o = 1/2, g = 0
    c = state["c"].clone().requires_grad_()
    x_BTI = torch.zeros(2, 50, 3, dtype=torch.float64)
    _, after = cell.scan(p, x_BTI, {"h": state["h"], "c": c})
    assert torch.equal(after["c"], c)
    (gradient,) = torch.autograd.grad(after["c"].sum(), c)
    assert torch.equal(gradient, torch.ones_like(c))
