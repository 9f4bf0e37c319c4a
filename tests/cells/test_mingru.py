"""The minGRU against a loop in NumPy written from the paper's equations."""

from __future__ import annotations

import numpy as np
import torch

EXACT = {"rtol": 0, "atol": 1e-12}


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


def test_it_is_the_equations_of_the_paper(draw):
    cell, p, x_BTI, state = draw("mingru")
    p["bias"] = torch.linspace(-1, 1, 8, dtype=torch.float64)
    (W_z, W_h), (b_z, b_h) = np.split(p["weight_ih"].numpy(), 2), np.split(p["bias"].numpy(), 2)
    x, h = x_BTI.numpy(), state["h"].numpy()
    expected = []
    for t in range(x.shape[1]):
        z = sigmoid(x[:, t] @ W_z.T + b_z)
        h = (1 - z) * h + z * (x[:, t] @ W_h.T + b_h)
        expected.append(h)
    outputs, after = cell.scan(p, x_BTI, state)
    np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), **EXACT)
    np.testing.assert_allclose(after["h"].numpy(), h, **EXACT)


def test_gate_and_candidate_have_names(draw):
    cell, p, x_BTI, state = draw("mingru")
    step = cell.step(p, x_BTI[:, 0], state)
    assert set(step.named) == {"update_gate", "candidate"}
    z, n = step.named["update_gate"], step.named["candidate"]
    torch.testing.assert_close(step.output, (1 - z) * state["h"] + z * n, **EXACT)


def test_a_closed_gate_carries_memory_and_gradient_unchanged(draw):
    cell, p, _, state = draw("mingru")
    p["bias"][:4] = -1e3  # z = 0 exactly
    h = state["h"].clone().requires_grad_()
    _, after = cell.scan(p, torch.zeros(2, 50, 3, dtype=torch.float64), {"h": h})
    assert torch.equal(after["h"], h)
    (gradient,) = torch.autograd.grad(after["h"].sum(), h)
    assert torch.equal(gradient, torch.ones_like(h))
