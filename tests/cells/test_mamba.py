"""Mamba against the paper's equations in NumPy, and against transformers with the same weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from elman.models.kinds import build_model, model_config
from elman.models.state import State

EXACT = {"rtol": 0, "atol": 1e-12}


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-value))


@pytest.mark.parametrize("form", ["scan", "readable_scan"])
def test_it_is_the_equations_of_the_paper(draw, form):
    cell, p, x_BTI, state = draw("mamba", state_size=3, step_rank=2, expansion=3)
    w = {name: tensor.numpy() for name, tensor in p.items()}
    A = -np.exp(w["A_log"])
    outputs = np.zeros((2, 6, 4))
    for row in range(2):  # one text at a time, one number at a time where the paper has indices
        values, h = list(state["recent"][row].numpy()), state["h"][row].numpy()
        for t in range(6):
            x, z = np.split(w["in_proj"] @ x_BTI[row, t].numpy(), 2)
            values.append(x)
            x = np.array([w["conv_weight"][d] @ [v[d] for v in values[-4:]] for d in range(12)]) + w["conv_bias"]
            x = x * sigmoid(x)
            s, B, C = np.split(w["x_proj"] @ x, [2, 5])
            dt = np.log1p(np.exp(w["dt_proj"] @ s + w["dt_bias"]))
            h = np.array(
                [[np.exp(dt[d] * A[d, n]) * h[d, n] + dt[d] * B[n] * x[d] for n in range(3)] for d in range(12)]
            )
            outputs[row, t] = w["out_proj"] @ ((h @ C + w["D"] * x) * z * sigmoid(z))
        found, after = getattr(cell, form)(p, x_BTI, state)
        np.testing.assert_allclose(after["h"][row].numpy(), h, **EXACT)
        np.testing.assert_allclose(after["recent"][row].numpy(), np.stack(values[-3:]), **EXACT)
    np.testing.assert_allclose(found.numpy(), outputs, **EXACT)


# The oracle: transformers. Its plain form computes in float32 wherever it says so, which is undone here.


@pytest.fixture
def pair(monkeypatch):
    """A model of ours and one of transformers, with the same weights, in float64."""
    from transformers import MambaConfig, MambaForCausalLM

    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    ours = build_model(
        model_config({
            "kind": "mamba", "num_layers": 2, "hidden_size": 6, "embedding_size": 6, "state_size": 3, "step_rank": 2,
            "tie_weights": True,
        }),
        11, seed=1, dtype=torch.float64,
    )  # fmt: skip
    settings = MambaConfig(
        vocab_size=11, num_hidden_layers=2, hidden_size=6, state_size=3, time_step_rank=2, residual_in_fp32=False
    )
    with torch.random.fork_rng(devices=[]):
        theirs = MambaForCausalLM(settings).double().eval()
    theirs.backbone.norm_f = nn.RMSNorm(6, eps=1e-6, dtype=torch.float64)
    weights = {"backbone.embeddings.weight": ours.embedding, "backbone.norm_f.weight": ours.norm.weight}
    for index, layer in enumerate(ours.layers):
        prefix = f"backbone.layers.{index}"
        theirs.backbone.layers[index].norm = nn.RMSNorm(6, eps=1e-6, dtype=torch.float64)
        weights[f"{prefix}.norm.weight"] = layer.norm.weight
        for name, parameter in layer.cell_parameters.items():
            their_name = {
                "conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "dt_bias": "dt_proj.bias", "A_log": "A_log",
                "D": "D",
            }.get(name, f"{name}.weight")  # fmt: skip
            weights[f"{prefix}.mixer.{their_name}"] = parameter
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[name].view_as(parameter))
    assert set(weights) == {name for name, _ in theirs.named_parameters()}
    return ours, theirs, weights


TOKENS = torch.tensor([[1, 5, 2, 2, 9, 0, 4], [3, 3, 10, 7, 8, 1, 6]])


def test_outputs_and_gradients_of_a_whole_model_are_those_of_transformers(pair):
    ours, theirs, weights = pair
    logits, _ = ours(TOKENS, ours.initial_state(2))
    expected = theirs(TOKENS, use_cache=False).logits
    torch.testing.assert_close(logits, expected, **EXACT)
    loss_weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
    (logits.sin() * loss_weights).sum().backward()
    (expected.sin() * loss_weights).sum().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(weights[name].grad.view_as(parameter), parameter.grad, **EXACT)


@pytest.mark.parametrize("num_first", [1, 2, 5])
def test_after_any_beginning_it_goes_on_step_by_step_as_with_the_cache_of_transformers(pair, num_first):
    ours, theirs, _ = pair
    with torch.no_grad():
        _, state = ours(TOKENS[:, :num_first], ours.initial_state(2))
        cache = theirs(TOKENS[:, :num_first], use_cache=True).cache
        for t in range(num_first, TOKENS.shape[1]):
            features, state = ours.step(TOKENS[:, t], state)
            theirs_now = theirs(TOKENS[:, t : t + 1], cache=cache, use_cache=True)
            torch.testing.assert_close(ours.head.logits(features), theirs_now.logits[:, 0], **EXACT)
            assert isinstance(state, State)


# What it is by itself.


def test_it_starts_as_its_authors_start_it(draw):
    cell, p, _, _ = draw("mamba", hidden_size=64, seed=3)
    assert cell.step_rank == 4
    torch.testing.assert_close(p["A_log"].exp(), torch.arange(1, 17, dtype=torch.float64).expand(128, 16))
    steps = nn.functional.softplus(p["dt_bias"])
    assert 1e-3 <= steps.min() < 2e-3
    assert 5e-2 < steps.max() <= 1e-1
    assert abs(steps.log().mean() - math.log(1e-2)) < 0.4  # log-uniform
    assert torch.equal(p["D"], torch.ones(128, dtype=torch.float64))


def test_a_step_of_size_zero_leaves_the_state_and_a_long_one_forgets_it(draw):
    cell, p, x_BTI, state = draw("mamba")
    p["dt_proj"].zero_()
    p["dt_bias"].fill_(-1e3)
    _, after = cell.scan(p, x_BTI, state)
    assert torch.equal(after["h"], state["h"])
    p["dt_bias"].fill_(1e3)
    _, after = cell.scan(p, x_BTI, state)
    _, from_zero = cell.scan(p, x_BTI, {**state, "h": torch.zeros_like(state["h"])})
    assert torch.equal(after["h"], from_zero["h"])


def test_intermediates_have_names(draw):
    cell, p, x_BTI, state = draw("mamba")
    named = cell.step(p, x_BTI[:, 0], state).named
    assert set(named) == {"step_size", "decay", "write", "read", "gate"}
    torch.testing.assert_close(named["decay"], (named["step_size"].unsqueeze(-1) * -p["A_log"].exp()).exp(), **EXACT)


def test_the_number_of_parameters_is_that_of_its_page(draw):
    cell, _, _, _ = draw("mamba", hidden_size=32, input_size=32)
    H, D, K, R, N = 32, 64, 4, 2, 16
    assert cell.num_parameters() == 3 * D * H + D * (K + 2 * R + 3 * N + 3)


def test_a_convolution_of_one_input_is_refused():
    with pytest.raises(ValidationError, match="inner_convolution_size"):
        model_config({"kind": "mamba", "inner_convolution_size": 1})
