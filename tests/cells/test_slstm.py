"""The sLSTM against the paper's equations without a stabiliser, in NumPy, and its hand-written gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elman.scan.heads import slstm_scan

EXACT = {"rtol": 0, "atol": 1e-12}
B, N, D = 2, 2, 3
H = N * D


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


def normed(value: np.ndarray) -> np.ndarray:
    centred = value - value.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def block_diagonal(blocks: np.ndarray) -> np.ndarray:
    matrix = np.zeros((H, H))
    for head, block in enumerate(blocks):
        matrix[head * D : (head + 1) * D, head * D : (head + 1) * D] = block
    return matrix


@pytest.mark.parametrize("exponential_gate", ["input", "both"])
@pytest.mark.parametrize("from_start", [True, False])
def test_it_is_the_equations_of_the_paper_without_their_stabiliser(draw_reachable, exponential_gate, from_start):
    cell, p, x_BTI, state = draw_reachable("slstm", hidden_size=H, num_heads=N, exponential_gate=exponential_gate)
    x, W = x_BTI.numpy(), {name: tensor.numpy() for name, tensor in p.items()}
    scale = np.exp(state["m"].numpy())
    h, c, n = state["h"].numpy(), state["c"].numpy() * scale, state["n"].numpy() * scale
    if from_start:
        state = {name: torch.full((B, H), part.initial, dtype=torch.float64) for name, part in cell.state().items()}
        h, c, n = np.zeros((3, B, H))
    R = [block_diagonal(blocks) for blocks in np.split(W["weight_hh"], 4)]
    expected = []
    for t in range(x.shape[1]):
        of_input = np.split(x[:, t] @ W["weight_ih"].T + W["bias"], 4, axis=-1)
        i, f, z, o = (one + h @ matrix.T for one, matrix in zip(of_input, R, strict=True))
        f = np.exp(f) if exponential_gate == "both" else sigmoid(f)
        c = f * c + np.exp(i) * np.tanh(z)
        n = f * n + np.exp(i)
        h = sigmoid(o) * c / n
        expected.append(normed(h.reshape(B, N, D)).reshape(B, H) * W["norm_weight"])
    for scan in (cell.scan, cell.readable_scan):
        outputs, after = scan(p, x_BTI, state)
        np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), **EXACT)
        np.testing.assert_allclose(after["h"].numpy(), h, **EXACT)
        for name, part in (("c", c), ("n", n)):  # without the stabiliser they grow large
            np.testing.assert_allclose(after[name].numpy() * np.exp(after["m"].numpy()), part, rtol=1e-12, atol=1e-12)


def recurrence(num_steps: int, *, size: int = D, scale: float = 1.0, dtype: torch.dtype = torch.float64):
    """What the scan of the recurrence takes, from a state that it can reach."""
    generator = torch.Generator().manual_seed(1)
    x = scale * torch.randn(N, num_steps, B, 4 * size, generator=generator, dtype=dtype)
    weight = torch.randn(N, 4 * size, size, generator=generator, dtype=dtype)
    h, m = torch.rand(2, N, B, size, generator=generator, dtype=dtype)
    c = 2 * torch.rand(N, B, size, generator=generator, dtype=dtype) - 1
    return x, weight, h, c, 1 + h, m


@pytest.mark.global_rng
@pytest.mark.parametrize("exponential", [False, True])
def test_first_and_second_derivatives_are_those_of_finite_differences(exponential):
    leaves = [tensor.requires_grad_() for tensor in recurrence(2, size=1)]

    def scan(x, weight, *state):
        return slstm_scan(x, weight, state, exponential)

    assert torch.autograd.gradcheck(scan, leaves, eps=1e-6, atol=1e-7)
    assert torch.autograd.gradgradcheck(scan, leaves, eps=1e-6, atol=1e-6)


def test_only_what_is_asked_for_is_differentiated_twice():
    x, weight, *state = recurrence(3)
    weight.requires_grad_()
    outputs, *_ = slstm_scan(x, weight, tuple(state), False)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), weight, create_graph=True)
    assert gradient.square().sum().requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponential", [False, True])
def test_gates_of_any_size_overflow_nowhere(exponential, dtype):
    x, weight, h, c, n, m = (tensor.requires_grad_() for tensor in recurrence(70, scale=1e3, dtype=dtype))
    results = slstm_scan(x, weight, (h, c, n, m), exponential)
    gradients = torch.autograd.grad(sum(result.sum() for result in results), (x, weight, h, c, n, m))
    assert all(tensor.isfinite().all() for tensor in (*results, *gradients))
    assert results[0].abs().max() <= 1
    assert results[2].min() >= 1


def test_a_large_input_gate_replaces_what_is_stored():
    x, weight, *state = recurrence(40)
    x[:, -1, :, :D] += 60
    h, *_ = slstm_scan(x, weight, tuple(state), False)
    raw = x[:, -1] + h[:, -2] @ weight.mT
    _, _, z, o = raw.chunk(4, dim=-1)
    torch.testing.assert_close(h[:, -1], o.sigmoid() * z.tanh(), **EXACT)


def test_parameters_start_as_documented(draw):
    cell, p, _, _ = draw("slstm", input_size=50, hidden_size=64, num_heads=4)
    assert cell.num_parameters() == 4 * 64 * (50 + 16 + 1) + 64
    assert 0.99 / 8 < p["weight_ih"].abs().max() <= 1 / 8
    assert p["weight_hh"].shape == (16, 16, 16)
    eye = torch.eye(16, dtype=torch.float64).expand(16, 16, 16)
    torch.testing.assert_close(p["weight_hh"] @ p["weight_hh"].mT, eye, **EXACT)
    assert not torch.equal(p["weight_hh"][0], p["weight_hh"][1])
    i, f, z, o = p["bias"].chunk(4)
    assert not any(gate.any() for gate in (i, z, o))
    torch.testing.assert_close(f, torch.linspace(5, -7, 16, dtype=torch.float64).repeat(4), **EXACT)
    assert torch.equal(p["norm_weight"], torch.full((64,), 1 / 8, dtype=torch.float64))


def test_gates_and_candidate_have_names(draw_reachable):
    cell, p, x_BTI, state = draw_reachable("slstm", hidden_size=H, num_heads=N)
    output, after, named = cell.step(p, x_BTI[:, 0], state)
    assert set(named) == {"input_gate", "forget_gate", "candidate", "output_gate"}
    torch.testing.assert_close(after["c"], named["forget_gate"] * state["c"] + named["input_gate"] * named["candidate"])
    assert output.shape == (B, H)
