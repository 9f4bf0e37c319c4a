"""The gated DeltaNet against the paper's equations in NumPy, and against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from elman.scan.heads import delta_scan

EXACT = {"rtol": 0, "atol": 1e-12}
B, N, D = 2, 2, 4


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


def memory(num_steps: int, *, seed: int = 1, dtype: torch.dtype = torch.float64):
    """Queries, keys of length one, values, log alpha and beta of a segment, for the scan of the memory alone."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, N, num_steps, D, generator=generator, dtype=dtype) for _ in range(3))
    a, b = (torch.randn(B, N, num_steps, generator=generator, dtype=dtype) for _ in range(2))
    return q, k / k.norm(dim=-1, keepdim=True), v, torch.nn.functional.logsigmoid(a + 2), b.sigmoid()


def test_it_is_the_equations_of_the_paper(draw_reachable):
    cell, p, x_BTI, state = draw_reachable("gated_deltanet", hidden_size=N * D, num_heads=N)
    x, W = x_BTI.numpy(), {name: tensor.numpy() for name, tensor in p.items()}
    S, eye, expected = state["S"].numpy(), np.eye(D), []
    for t in range(x.shape[1]):
        qkvg = x[:, t] @ W["weight_in"].T
        q, k, v, g = (part.reshape(B, N, D) for part in np.split(qkvg * sigmoid(qkvg), 4, axis=-1))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        a, b = np.split(x[:, t] @ W["weight_gates"].T, 2, axis=-1)
        alpha = np.exp(-np.exp(W["log_rate"]) * np.log1p(np.exp(a + W["step_bias"])))[..., None, None]
        beta = sigmoid(b)[..., None, None]
        S = S @ (alpha * (eye - beta * k[..., :, None] * k[..., None, :])) + beta * v[..., :, None] * k[..., None, :]
        read = np.einsum("bndm,bnm->bnd", S, q)
        read = read / np.sqrt((read**2).mean(-1, keepdims=True) + 1e-6) * W["norm_weight"].reshape(N, D)
        expected.append((read * g).reshape(B, -1) @ W["weight_out"].T)
    for scan in (cell.scan, cell.readable_scan):
        outputs, after = scan(p, x_BTI, state)
        np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), **EXACT)
        np.testing.assert_allclose(after["S"].numpy(), S, **EXACT)


@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("num_steps", [1, 150])
def test_it_reads_what_transformers_reads(form, num_steps):
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    q, k, v, log_alpha, beta = memory(num_steps, dtype=torch.float32)
    S = torch.randn(B, N, D, D, generator=torch.Generator().manual_seed(2))
    time_first = [part.transpose(1, 2) for part in (q * math.sqrt(D), k, v, log_alpha, beta)]
    expected, last = getattr(theirs, form)(*time_first, initial_state=S.mT, output_final_state=True)
    outputs, our_last = delta_scan(q, k, v, log_alpha, beta, S)
    torch.testing.assert_close(outputs.transpose(1, 2), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(our_last, last.mT, rtol=0, atol=2e-5)


def test_a_value_takes_the_place_of_what_its_key_held_and_of_nothing_else():
    keys = torch.eye(D, dtype=torch.float64)[[0, 1, 0]]
    values = torch.arange(3.0 * D, dtype=torch.float64).view(3, D) + 1
    ones = torch.ones(1, 1, 3, dtype=torch.float64)
    empty = torch.zeros(1, 1, D, D, dtype=torch.float64)
    _, S = delta_scan(keys[None, None], keys[None, None], values[None, None], 0 * ones, ones, empty)
    held = (S[0, 0] @ torch.eye(D, dtype=torch.float64)).T
    assert torch.equal(held, torch.stack([values[2], values[1], 0 * values[0], 0 * values[0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_alpha", [0.0, -1e-30, -1e4])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_gates_of_any_size_overflow_nowhere(log_alpha, beta, dtype):
    q, k, v, zeros, _ = memory(150, dtype=dtype)
    S = torch.ones(B, N, D, D, dtype=dtype)
    gates = [torch.full_like(zeros, value) for value in (log_alpha, beta)]
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, *gates, S)]
    outputs, after = delta_scan(*leaves)
    gradients = torch.autograd.grad(outputs.sum() + after.sum(), leaves)
    assert all(tensor.isfinite().all() for tensor in (outputs, after, *gradients))


def test_nothing_is_read_where_the_input_says_nothing(draw_reachable):
    cell, p, x_BTI, state = draw_reachable("gated_deltanet", hidden_size=N * D, num_heads=N)
    x_BTI = torch.zeros_like(x_BTI, requires_grad=True)
    outputs, _ = cell.scan(p, x_BTI, state)  # q and k are zero: no direction
    (gradient,) = torch.autograd.grad(outputs.sum(), x_BTI)
    assert not outputs.any()
    assert gradient.isfinite().all()


def test_parameters_start_as_documented(draw):
    cell, p, _, _ = draw("gated_deltanet", input_size=50, hidden_size=512, num_heads=128)
    H, heads = 512, 128
    assert cell.num_parameters() == 4 * H * 50 + 2 * heads * (50 + 1) + H * (H + 1)
    assert cell.operations_per_step() == 2 * (4 * H * 50 + 2 * heads * 50 + H * H) + 7 * heads * 4 * 4
    of_input = math.sqrt(3 / 50)
    for name, bound in (("weight_in", of_input), ("weight_gates", of_input), ("weight_out", math.sqrt(3) / H)):
        assert 0.99 * bound < p[name].abs().max() <= bound
    rate, step = p["log_rate"].exp(), torch.nn.functional.softplus(p["step_bias"])
    assert 1 <= rate.min() < 1.5
    assert 15.5 < rate.max() <= 16
    assert 0.999e-3 <= step.min() < 1.2e-3
    assert 0.08 < step.max() <= 0.1001


def test_gates_and_vectors_have_names(draw_reachable):
    cell, p, x_BTI, state = draw_reachable("gated_deltanet", hidden_size=N * D, num_heads=N)
    named = cell.step(p, x_BTI[:, 0], state).named
    sizes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    vectors = dict.fromkeys(("query", "key", "value", "output_gate"), (B, N * D))
    assert sizes == vectors | dict.fromkeys(("alpha", "beta"), (B, N))
