"""The mLSTM against the paper's equations without a stabiliser, in NumPy, and against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from elman.scan.heads import mlstm_scan

EXACT = {"rtol": 0, "atol": 1e-12}
B, N, D = 2, 2, 4


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


def normed(value: np.ndarray) -> np.ndarray:
    centred = value - value.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def memory(num_steps: int, *, seed: int = 1, scale: float = 1.0, dtype: torch.dtype = torch.float64):
    """Queries, keys, values and gates of a segment, for the scan of the memory alone."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, N, num_steps, D, generator=generator, dtype=dtype) for _ in range(3))
    i, f = (scale * torch.randn(B, N, num_steps, generator=generator, dtype=dtype) for _ in range(2))
    return q, k / math.sqrt(D), v, i, torch.nn.functional.logsigmoid(f)


def zero_state(dtype: torch.dtype = torch.float64):
    return tuple(torch.zeros(B, N, *shape, dtype=dtype) for shape in ((D, D), (D,), (1,)))


def test_it_is_the_equations_of_the_paper_without_their_stabiliser(draw_reachable):
    cell, p, x_BTI, state = draw_reachable("mlstm", hidden_size=N * D, num_heads=N)
    x, W = x_BTI.numpy(), {name: tensor.numpy() for name, tensor in p.items()}
    scale = np.exp(state["m"].numpy())
    C, n = state["C"].numpy() * scale[..., None], state["n"].numpy() * scale
    expected = []
    for t in range(x.shape[1]):
        q, k, v, o = (part.reshape(B, N, D) for part in np.split(x[:, t] @ W["weight_in"].T, 4, axis=-1))
        k = k / np.sqrt(D)
        i, f = np.split(x[:, t] @ W["weight_gates"].T + W["bias_gates"], 2, axis=-1)
        i, f = np.exp(i)[..., None], sigmoid(f)[..., None]
        C = f[..., None] * C + i[..., None] * v[..., :, None] * k[..., None, :]
        n = f * n + i * k
        read = np.einsum("bndm,bnm->bnd", C, q) / np.maximum(np.abs((n * q).sum(-1, keepdims=True)), 1.0)
        y = sigmoid(o).reshape(B, -1) * normed(read).reshape(B, -1) * W["norm_weight"]
        expected.append(y @ W["weight_out"].T)
    for scan in (cell.scan, cell.readable_scan):
        outputs, after = scan(p, x_BTI, state)
        np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), **EXACT)
        scale = np.exp(after["m"].numpy())
        np.testing.assert_allclose(after["C"].numpy() * scale[..., None], C, **EXACT)
        np.testing.assert_allclose(after["n"].numpy() * scale, n, **EXACT)


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_it_reads_what_transformers_reads(form):
    from transformers.models.xlstm import modeling_xlstm as theirs

    q, k, v, i, log_f = memory(128)
    f = log_f - torch.log1p(-log_f.exp())  # the sigmoid's inverse
    # theirs divides queries by sqrt(D), not keys, and keeps C^T; with m at 0 and nothing stored both start alike.
    scan, options = {
        "recurrent": (theirs.mlstm_recurrent_sequence_native, {"dtype_state": torch.float64}),
        "chunkwise": (theirs.mlstm_chunkwise_native_autograd, {"chunk_size": 32}),
    }[form]
    expected, (C, n, m) = scan(q, k * math.sqrt(D), v, i, f, return_last_states=True, eps=0.0, **options)
    outputs, (our_C, our_n, our_m) = mlstm_scan(q, k, v, i, log_f, zero_state())
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-10)
    scale = (m - our_m).exp() / math.sqrt(D)
    torch.testing.assert_close(our_n, n * scale, rtol=0, atol=1e-10)
    torch.testing.assert_close(our_C, C.mT * scale.unsqueeze(-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_of_any_size_overflow_nowhere(dtype):
    q, k, v, i, log_f = memory(150, scale=1e4, dtype=dtype)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, i, log_f)]
    outputs, after = mlstm_scan(*leaves, zero_state(dtype))
    gradients = torch.autograd.grad(outputs.sum() + after[0].sum() + after[1].sum(), leaves)
    assert all(tensor.isfinite().all() for tensor in (outputs, *after, *gradients))


def test_closed_gates_forget_everything_and_write_nothing():
    q, k, v, i, _ = memory(70, dtype=torch.float32)
    closed = torch.full_like(i, -1e3).requires_grad_()
    state = tuple(part + 1 for part in zero_state(torch.float32))
    outputs, (C, n, m) = mlstm_scan(q, k, v, closed, closed, state)
    assert not any(tensor.any() for tensor in (outputs, C, n, m))
    (gradient,) = torch.autograd.grad(outputs.sum(), closed)
    assert gradient.isfinite().all()


def test_with_open_gates_the_memory_is_the_sum_of_all_that_was_written():
    q, k, v, _, _ = memory(130)
    written = torch.zeros(B, N, 130, dtype=torch.float64)
    _, (C, n, m) = mlstm_scan(q, k, v, written, written, zero_state())
    torch.testing.assert_close(C, torch.einsum("bntd,bntm->bndm", v, k), rtol=0, atol=1e-11)
    torch.testing.assert_close(n, k.sum(2), rtol=0, atol=1e-11)
    assert not m.any()


def test_parameters_start_as_documented(draw):
    cell, p, _, _ = draw("mlstm", input_size=50, hidden_size=64, num_heads=4)
    assert cell.num_parameters() == 4 * 64 * 50 + 2 * 4 * (50 + 1) + 64 * (64 + 1)
    assert cell.operations_per_step() == 2 * (4 * 64 * 50 + 8 * 50 + 64 * 64) + 5 * 4 * 16 * 16
    for name, bound in (("weight_in", math.sqrt(3 / 50)), ("weight_out", math.sqrt(3) / 64)):
        assert 0.99 * bound < p[name].abs().max() <= bound
    assert not p["weight_gates"].any()
    assert p["bias_gates"].tolist() == [0, 0, 0, 0, 3, 4, 5, 6]
    assert torch.equal(p["norm_weight"], torch.ones(64, dtype=torch.float64))


def test_gates_and_vectors_have_names(draw_reachable):
    cell, p, x_BTI, state = draw_reachable("mlstm", hidden_size=N * D, num_heads=N)
    named = cell.step(p, x_BTI[:, 0], state).named
    sizes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    vectors = dict.fromkeys(("query", "key", "value", "output_gate"), (B, N * D))
    assert sizes == vectors | dict.fromkeys(("input_gate", "forget_gate"), (B, N))
