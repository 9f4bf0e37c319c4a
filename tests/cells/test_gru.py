"""The GRU against torch.nn.GRU and loops in NumPy: with the reset after the product, and before it as in the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .conftest import EXACT, assert_gradients_are_those_of


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


@pytest.mark.global_rng
def test_the_default_is_torch_nn_gru(draw):
    cell, p, x_BTI, state = draw("gru", biases="double", bias_init="uniform")
    theirs = torch.nn.GRU(3, 4, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict({f"{name}_l0": tensor for name, tensor in p.items()})
    outputs, last = theirs(x_BTI, state["h"].unsqueeze(0))
    for scan in (cell.scan, cell.readable_scan):
        ours, after = scan(p, x_BTI, state)
        torch.testing.assert_close(ours, outputs, **EXACT)
        torch.testing.assert_close(after["h"], last[0], **EXACT)


@pytest.mark.usefixtures("looped")
@pytest.mark.global_rng
def test_its_gradients_are_those_of_torch_nn_gru(draw):
    theirs = torch.nn.GRU(3, 4, batch_first=True, dtype=torch.float64)
    assert_gradients_are_those_of(theirs, draw("gru", biases="double", bias_init="uniform"))


@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("biases", ["single", "double"])
def test_it_is_the_equations(draw, reset_after, biases):
    cell, p, x_BTI, state = draw("gru", reset_after=reset_after, biases=biases, bias_init="uniform")
    W, U = ({gate: block.numpy() for gate, block in zip("rzn", p[name].chunk(3), strict=True)}
            for name in ("weight_ih", "weight_hh"))  # fmt: skip
    b = dict(zip("rzn", p["bias" if biases == "single" else "bias_ih"].numpy().reshape(3, 4), strict=True))
    second = p["bias_hh"].numpy().reshape(3, 4) if biases == "double" else np.zeros((3, 4))
    d = dict(zip("rzn", second, strict=True))
    x, h = x_BTI.numpy(), state["h"].numpy()
    expected = []
    for t in range(x.shape[1]):
        r = sigmoid(x[:, t] @ W["r"].T + h @ U["r"].T + b["r"] + d["r"])
        z = sigmoid(x[:, t] @ W["z"].T + h @ U["z"].T + b["z"] + d["z"])
        recurrent = r * (h @ U["n"].T + d["n"]) if reset_after else (r * h) @ U["n"].T + d["n"]
        n = np.tanh(x[:, t] @ W["n"].T + recurrent + b["n"])
        h = (1 - z) * n + z * h
        expected.append(h)
    outputs, after = cell.scan(p, x_BTI, state)
    np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(after["h"].numpy(), h, rtol=0, atol=1e-12)


def test_the_two_forms_differ_only_where_the_reset_gate_closes(draw):
    after, p, x_BTI, state = draw("gru", reset_after=True)
    before = draw("gru", reset_after=False).cell
    assert not torch.allclose(after.scan(p, x_BTI, state)[0], before.scan(p, x_BTI, state)[0])
    p = p | {"bias": p["bias"].clone()}
    p["bias"][:4] = 1e3  # r = 1 exactly
    torch.testing.assert_close(after.scan(p, x_BTI, state)[0], before.scan(p, x_BTI, state)[0], **EXACT)


def test_the_gates_have_names(draw):
    cell, p, x_BTI, state = draw("gru")
    step = cell.step(p, x_BTI[:, 0], state)
    z, n = step.named["update_gate"], step.named["candidate"]
    assert set(step.named) == {"reset_gate", "update_gate", "candidate"}
    torch.testing.assert_close(step.output, (1 - z) * n + z * state["h"], **EXACT)
