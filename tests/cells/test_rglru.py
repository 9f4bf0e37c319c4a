"""The RG-LRU against the paper's equations in NumPy, and its block against transformers with the same weights."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from elman.cells.rglru import _decay
from elman.models.kinds import model_config

EXACT = {"rtol": 0, "atol": 1e-12}


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


def block_diagonal(blocks: np.ndarray) -> np.ndarray:
    num_blocks, size, _ = blocks.shape
    whole = np.zeros((num_blocks * size, num_blocks * size))
    for index, block in enumerate(blocks):
        whole[index * size : (index + 1) * size, index * size : (index + 1) * size] = block
    return whole


@pytest.mark.parametrize("num_gate_blocks", [1, 2, 4])
@pytest.mark.parametrize("form", ["scan", "readable_scan"])
def test_it_is_the_equations_of_the_paper(draw, num_gate_blocks, form):
    cell, p, x_BTI, state = draw("rglru", num_gate_blocks=num_gate_blocks)
    for name in ("conv_bias", "recurrence_gate_bias", "input_gate_bias"):
        p[name] = torch.linspace(-1, 1, 4, dtype=torch.float64)
    w = {name: tensor.numpy() for name, tensor in p.items()}
    W_r, W_i = (block_diagonal(w[f"{gate}_gate_weight"]) for gate in ("recurrence", "input"))
    values = np.concatenate([state["recent"].numpy(), np.zeros((2, 6, 4))], axis=1)
    h, expected = state["h"].numpy(), []
    for t in range(6):
        x, z = np.split(x_BTI[:, t].numpy() @ w["in_proj"].T, 2, axis=-1)
        values[:, t + 3] = x
        x = (values[:, t : t + 4] * w["conv_weight"].T).sum(1) + w["conv_bias"]
        r = sigmoid(x @ W_r.T + w["recurrence_gate_bias"])
        i = sigmoid(x @ W_i.T + w["input_gate_bias"])
        a = sigmoid(w["Lambda"]) ** (8 * r)
        h = a * h + np.sqrt(1 - a**2) * (i * x)
        gelu = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        expected.append((h * gelu) @ w["out_proj"].T)
    outputs, after = getattr(cell, form)(p, x_BTI, state)
    np.testing.assert_allclose(outputs.numpy(), np.stack(expected, 1), **EXACT)
    np.testing.assert_allclose(after["h"].numpy(), h, **EXACT)
    np.testing.assert_allclose(after["recent"].numpy(), values[:, -3:], **EXACT)


def test_outputs_and_gradients_of_the_block_are_those_of_transformers(draw):
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    cell, p, x_BTI, state = draw("rglru", hidden_size=8, input_size=8, num_gate_blocks=2)
    settings = RecurrentGemmaConfig(hidden_size=8, lru_width=8, num_attention_heads=2, conv1d_width=4)
    with torch.random.fork_rng(devices=[]):
        block = RecurrentGemmaRecurrentBlock(settings, 0).double()
    block.rg_lru._rnn_scan = partial(block.rg_lru._rnn_scan, acc_dtype=torch.float64)  # float32 otherwise
    leaves = {name: tensor.requires_grad_() for name, tensor in p.items()}
    of_x, of_z = p["in_proj"].chunk(2)
    zero = torch.zeros_like(p["conv_bias"])
    theirs = {
        "linear_x.weight": of_x, "linear_x.bias": zero, "linear_y.weight": of_z,
        "linear_y.bias": zero, "linear_out.weight": p["out_proj"], "linear_out.bias": zero,
        "conv_1d.weight": p["conv_weight"].unsqueeze(1), "conv_1d.bias": p["conv_bias"],
        "rg_lru.recurrent_param": -p["Lambda"],  # theirs is softplus of it, ours -log sigmoid
        "rg_lru.recurrent_gate_weight": p["recurrence_gate_weight"].mT,
        "rg_lru.recurrent_gate_bias": p["recurrence_gate_bias"].view(2, 4),
        "rg_lru.input_gate_weight": p["input_gate_weight"].mT,
        "rg_lru.input_gate_bias": p["input_gate_bias"].view(2, 4),
    }  # fmt: skip
    assert set(theirs) == {name for name, _ in block.named_parameters()}
    positions = torch.arange(1, 7).expand(2, 6)  # position 0 would be a reset, with the first input taken whole
    # Theirs starts from zeros alone, and so does this.
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    expected, _ = torch.func.functional_call(block, theirs, (x_BTI, positions, None, False))
    outputs, _ = cell.scan(leaves, x_BTI, zeros)
    torch.testing.assert_close(outputs, expected, **EXACT)
    for found, one in zip(
        torch.autograd.grad(outputs.sin().sum(), leaves.values()),
        torch.autograd.grad(expected.sin().sum(), leaves.values()),
        strict=True,
    ):
        torch.testing.assert_close(found, one, **EXACT)


@pytest.mark.parametrize("least", [0.1, 0.9])
def test_the_decays_of_open_gates_start_uniformly(draw, least):
    _, p, _, _ = draw("rglru", hidden_size=512, num_gate_blocks=8, least_decay=least)
    decays, span = p["Lambda"].sigmoid() ** 8, 0.999 - least
    assert least <= decays.min() < least + 0.02 * span
    assert 0.999 - 0.02 * span < decays.max() <= 0.999
    assert abs(decays.mean() - (least + 0.999) / 2) < 0.05 * span


def test_the_scale_of_the_input_is_right_however_near_the_decay_is_to_one():
    Lambda = torch.linspace(-5, 40, 200)
    for gate in (1.0, 1e-3, 1e-6):
        _, scale = _decay(torch.full_like(Lambda, gate), Lambda)
        log_a = 8 * np.float64(np.float32(gate)) * -np.log1p(np.exp(-Lambda.double().numpy()))
        np.testing.assert_allclose(scale.numpy(), np.sqrt(-np.expm1(2 * log_a)), rtol=2e-6)


def test_the_variance_of_the_state_is_that_of_its_inputs(draw):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    for Lambda in (0.0, 3.0):
        decay, scale = _decay(torch.ones(1, dtype=torch.float64), torch.tensor([Lambda], dtype=torch.float64))
        h, states = torch.zeros(1, dtype=torch.float64), []
        for x in inputs:
            h = decay * h + scale * x
            states.append(h)
        assert 0.7 < torch.cat(states).var() < 1.3


@pytest.mark.parametrize("closed_by", ["gate", "Lambda"])
@pytest.mark.parametrize("form", ["scan", "readable_scan"])
def test_a_closed_gate_carries_the_state_and_every_gradient_stays_finite(draw, closed_by, form):
    cell, p, x_BTI, state = draw("rglru", num_gate_blocks=2)
    p = {name: tensor.float() for name, tensor in p.items()}
    p["recurrence_gate_bias" if closed_by == "gate" else "Lambda"].fill_(-200.0 if closed_by == "gate" else 200.0)
    leaves = {name: tensor.requires_grad_() for name, tensor in p.items()}
    state = {name: tensor.float() for name, tensor in state.items()}
    outputs, after = getattr(cell, form)(leaves, x_BTI.float(), state)
    assert torch.equal(after["h"], state["h"])
    for gradient in torch.autograd.grad(outputs.sum(), leaves.values()):
        assert gradient.isfinite().all()


def test_intermediates_have_names(draw):
    cell, p, x_BTI, state = draw("rglru", num_gate_blocks=2)
    assert set(cell.step(p, x_BTI[:, 0], state).named) == {"recurrence_gate", "input_gate", "decay", "gate"}


def test_the_number_of_parameters_is_that_of_its_page(draw):
    cell, _, _, _ = draw("rglru", hidden_size=32, input_size=32, num_gate_blocks=4)
    assert cell.num_parameters() == 3 * 32**2 + 2 * 32**2 // 4 + 32 * (4 + 4)


def test_blocks_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValidationError, match="num_gate_blocks 8 does not divide hidden_size 100"):
        model_config({"kind": "rglru", "hidden_size": 100})
