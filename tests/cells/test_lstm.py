"""The LSTM against torch.nn.LSTM and a loop in NumPy written from the paper's equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

EXACT = {"rtol": 0, "atol": 1e-12}


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


@pytest.mark.global_rng
def test_it_is_torch_nn_lstm(draw):
    cell, p, x_BTI, state = draw("lstm", biases="double", bias_init="uniform", forget_bias=None)
    theirs = torch.nn.LSTM(3, 4, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict({f"{name}_l0": tensor for name, tensor in p.items()})
    outputs, (h, c) = theirs(x_BTI, (state["h"].unsqueeze(0), state["c"].unsqueeze(0)))
    for scan in (cell.scan, cell.readable_scan):
        ours, after = scan(p, x_BTI, state)
        torch.testing.assert_close(ours, outputs, **EXACT)
        torch.testing.assert_close(after["h"], h[0], **EXACT)
        torch.testing.assert_close(after["c"], c[0], **EXACT)


def test_it_is_the_equations_of_the_paper(draw):
    cell, p, x_BTI, state = draw("lstm", bias_init="uniform")
    W, U, b = ({gate: block.numpy() for gate, block in zip("ifgo", t.chunk(4), strict=True)} for t in p.values())
    x, h, c = x_BTI.numpy(), state["h"].numpy(), state["c"].numpy()
    expected = []
    for t in range(x.shape[1]):
        i, f, g, o = (x[:, t] @ W[gate].T + h @ U[gate].T + b[gate] for gate in "ifgo")
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        expected.append(h)
    outputs, after = cell.scan(p, x_BTI, state)
    np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(after["c"].numpy(), c, rtol=0, atol=1e-12)


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
