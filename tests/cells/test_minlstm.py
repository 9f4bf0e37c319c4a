"""The minLSTM against a loop in NumPy written from the paper's equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

EXACT = {"rtol": 0, "atol": 1e-12}


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


def test_it_is_the_equations_of_the_paper(draw):
    cell, p, x_BTI, state = draw("minlstm")
    p["bias"] = torch.linspace(-1, 1, 12, dtype=torch.float64)
    W, b = (dict(zip("fih", np.split(p[name].numpy(), 3), strict=True)) for name in ("weight_ih", "bias"))
    x, h = x_BTI.numpy(), state["h"].numpy()
    expected = []
    for t in range(x.shape[1]):
        f, i = (sigmoid(x[:, t] @ W[gate].T + b[gate]) for gate in "fi")
        f, i = f / (f + i), i / (f + i)
        h = f * h + i * (x[:, t] @ W["h"].T + b["h"])
        expected.append(h)
    outputs, after = cell.scan(p, x_BTI, state)
    np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), **EXACT)
    np.testing.assert_allclose(after["h"].numpy(), h, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("f", "i"), [(-2000, -2000), (-1001, -1000), (30, -30), (30, 30), (-800, 800), (2000, 2000)])
def test_gates_that_round_to_zero_or_one_have_their_share_and_a_finite_gradient(draw, f, i, dtype):
    cell, p, _, _ = draw("minlstm", input_size=1, hidden_size=1)
    bias = torch.tensor([f, i, 0], dtype=dtype).requires_grad_()
    p = {"weight_ih": p["weight_ih"].to(dtype), "bias": bias}
    step = cell.step(p, torch.zeros(1, 1, dtype=dtype), {"h": torch.ones(1, 1, dtype=dtype)})
    log_f, log_i = (-np.logaddexp(0, -value) for value in (f, i))
    expected = np.exp(log_f - np.logaddexp(log_f, log_i))
    assert step.named["forget_gate"].item() == pytest.approx(expected, abs=1e-6 if dtype == torch.float32 else 1e-13)
    (gradient,) = torch.autograd.grad(step.output.sum(), bias)
    assert gradient.isfinite().all()


def test_gates_and_candidate_have_names(draw):
    cell, p, x_BTI, state = draw("minlstm")
    step = cell.step(p, x_BTI[:, 0], state)
    assert set(step.named) == {"forget_gate", "input_gate", "candidate"}
    f, i, n = (step.named[name] for name in ("forget_gate", "input_gate", "candidate"))
    torch.testing.assert_close(f + i, torch.ones_like(f), **EXACT)
    torch.testing.assert_close(step.output, f * state["h"] + i * n, **EXACT)
