"""The QRNN against PyTorch's masked convolution with a loop in NumPy, and against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

EXACT = {"rtol": 0, "atol": 1e-12}
POOLINGS = {"f": 2, "fo": 3, "ifo": 4}


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("window", [1, 2, 4])
def test_it_is_the_equations_of_the_paper(draw, pooling, window):
    cell, p, x_BTI, state = draw("qrnn", qrnn_pooling=pooling, qrnn_window=window)
    p["bias"] = torch.linspace(-1, 1, len(p["bias"]), dtype=torch.float64)
    earlier_BKI = state["earlier_inputs"].view(2, window - 1, 3) if window > 1 else x_BTI[:, :0]
    # The convolution of PyTorch has its window last.
    kernel = p["weight"].view(-1, window, 3).transpose(1, 2)
    sums = torch.conv1d(torch.cat([earlier_BKI, x_BTI], dim=1).mT, kernel, p["bias"]).mT.numpy()
    z, f, *others = np.split(sums, POOLINGS[pooling], axis=-1)
    z, f = np.tanh(z), sigmoid(f)
    o = sigmoid(others[0]) if others else np.ones_like(f)
    i = sigmoid(others[1]) if pooling == "ifo" else 1 - f
    c, expected = state["c"].numpy(), []
    for t in range(x_BTI.shape[1]):
        c = f[:, t] * c + i[:, t] * z[:, t]
        expected.append(o[:, t] * c)
    for scan in (cell.scan, cell.readable_scan):
        outputs, after = scan(p, x_BTI, state)
        np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), **EXACT)
        np.testing.assert_allclose(after["c"].numpy(), c, **EXACT)
        if window > 1:
            assert torch.equal(after["earlier_inputs"], x_BTI[:, 7 - window :].flatten(1))


def test_a_segment_shorter_than_the_window_carries_older_inputs_on(draw):
    cell, p, x_BTI, state = draw("qrnn", qrnn_window=4)
    for scan in (cell.scan, cell.readable_scan):
        _, after = scan(p, x_BTI[:, :1], state)
        assert torch.equal(after["earlier_inputs"], torch.cat([state["earlier_inputs"][:, 3:], x_BTI[:, 0]], dim=1))


def test_with_gates_of_one_half_it_is_a_geometric_series(draw):
    cell, p, x_BTI, state = draw("qrnn", qrnn_pooling="f")
    p["weight"] = torch.zeros_like(p["weight"])
    p["bias"][:4] = 0.5
    outputs, _ = cell.scan(p, x_BTI, state)
    left = torch.tensor([0.5**t for t in range(1, 7)], dtype=torch.float64).view(1, 6, 1)
    torch.testing.assert_close(outputs, left * state["c"].unsqueeze(1) + (1 - left) * math.tanh(0.5), **EXACT)


def test_with_gates_open_it_counts_as_only_an_input_gate_of_its_own_allows(draw):
    cell, p, x_BTI, state = draw("qrnn", qrnn_pooling="ifo")
    p = {name: torch.zeros_like(tensor) for name, tensor in p.items()}
    p["bias"] += 1e3  # z = f = o = i = 1 exactly
    outputs, _ = cell.scan(p, x_BTI, {**state, "c": torch.zeros_like(state["c"])})
    assert torch.equal(outputs, torch.arange(1.0, 7, dtype=torch.float64).view(1, 6, 1).expand(2, 6, 4))


def test_with_the_forget_gate_closed_it_sees_its_window_and_nothing_before(draw):
    cell, p, x_BTI, state = draw("qrnn", qrnn_window=3)
    p["bias"][4:8] = -1e3  # f = 0 exactly
    outputs, _ = cell.scan(p, x_BTI, state)
    for back in range(6):
        other_BTI = x_BTI.clone()
        other_BTI[:, 5 - back] += 1
        assert torch.equal(cell.scan(p, other_BTI, state)[0][:, 5], outputs[:, 5]) == (back >= 3)


def test_an_open_forget_gate_carries_memory_and_gradient_unchanged(draw):
    cell, p, x_BTI, state = draw("qrnn")
    p["bias"][4:8] = 1e3  # f = 1 exactly
    c = state["c"].clone().requires_grad_()
    _, after = cell.scan(p, x_BTI.repeat(1, 10, 1), {**state, "c": c})
    assert torch.equal(after["c"], c)
    (gradient,) = torch.autograd.grad(after["c"].sum(), c)
    assert torch.equal(gradient, torch.ones_like(c))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gates_and_candidate_have_names(draw, pooling):
    cell, p, x_BTI, state = draw("qrnn", qrnn_pooling=pooling)
    output, after, named = cell.step(p, x_BTI[:, 0], state)
    assert set(named) == {"candidate", "forget_gate", "input_gate"} | ({"output_gate"} if "o" in pooling else set())
    c = named["forget_gate"] * state["c"] + named["input_gate"] * named["candidate"]
    torch.testing.assert_close(after["c"], c, **EXACT)
    torch.testing.assert_close(output, named.get("output_gate", 1) * c, **EXACT)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("window", [1, 3])
def test_it_has_the_size_and_the_draw_of_its_docstring(draw, pooling, window):
    cell, p, _, state = draw("qrnn", input_size=50, hidden_size=64, qrnn_pooling=pooling, qrnn_window=window)
    blocks = POOLINGS[pooling]
    assert cell.num_parameters() == blocks * 64 * (window * 50 + 1)
    assert cell.operations_per_step() == 2 * blocks * 64 * window * 50
    assert {name: tensor.shape[1] for name, tensor in state.items()} == (
        {"c": 64} if window == 1 else {"c": 64, "earlier_inputs": (window - 1) * 50}
    )
    assert 0.99 * math.sqrt(3 / (50 * window)) < p["weight"].abs().max() <= math.sqrt(3 / (50 * window))
    assert not p["bias"].any()
