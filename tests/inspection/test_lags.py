"""Gradients by lag against the gradient of one long computation, for every kind; the additive way in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from elman.errors import UserError
from elman.inspection.lags import Flow, flow
from elman.inspection.watching import Places, places
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, kind_names, model_config
from elman.models.laws import small_configs
from elman.models.state import State

LAGS = 23
"""One piece on the way back, and a rest."""


def chosen_places(network: LanguageModel, length: int = LAGS, count: int = 3) -> Places:
    tokens = np.concatenate([[0], np.random.default_rng(1).integers(1, network.vocab_size, 90)])
    return places(network, tokens, count, length)


def names_of_matrices(network: LanguageModel) -> list[str]:
    wanted = {id(matrix) for matrix, _ in network.hidden_matrices()}
    return [name for name, parameter in network.named_parameters() if id(parameter) in wanted]


WITH_GRADIENT = [kind for kind in kind_names() if kind not in ("ngram", "window")]


@pytest.mark.parametrize("kind", WITH_GRADIENT)
def test_every_lag_is_what_one_long_computation_gives(kind):
    network = build_model(small_configs(kind)[0], 5, seed=1, dtype=torch.float64)
    chosen = chosen_places(network)
    found = flow(network, chosen, names_of_matrices(network))
    assert found.norm.shape == (LAGS + 1, 3)
    for lag in (1, 2, 3, 20, 21, LAGS):
        with torch.no_grad():
            _, state = (
                network.features(chosen.tokens_BT[:, : LAGS - lag], chosen.state) if lag < LAGS else (0, chosen.state)
            )
        leaf = state.map(lambda tensor: tensor.clone().requires_grad_(tensor.is_floating_point()))
        features_BTF, _ = network.features(chosen.tokens_BT[:, LAGS - lag :], leaf)
        loss = network.head.nll(features_BTF[:, -1:], chosen.targets_B[:, None]).sum()
        parts = {name: tensor for name, tensor in leaf.tensors.items() if tensor.is_floating_point()}
        gradients = torch.autograd.grad(loss, list(parts.values()), materialize_grads=True)
        for name, gradient in zip(parts, gradients, strict=True):
            torch.testing.assert_close(found.parts[name][lag], gradient.flatten(1).norm(dim=1), rtol=1e-7, atol=1e-12)
        whole = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1).norm(dim=1)
        torch.testing.assert_close(found.norm[lag], whole, rtol=1e-7, atol=1e-12)
    assert any(matrix.whole > 0 for matrix in found.matrices.values())
    for matrix in found.matrices.values():
        assert matrix.error < 1e-10
        is_used = matrix.whole > 0  # the encoder of a text without a source is not
        assert matrix.share_K.sum().item() == pytest.approx(float(is_used), abs=1e-9)
        assert matrix.norm_K.shape == (LAGS,)


@pytest.mark.parametrize(("w", "derivative"), [(0.9, 0.28632), (1.0, 50.0), (1.1, 5335.95)])
def test_the_scalar_network_over_fifty_steps(linear_network, w, derivative):
    network = linear_network([[w]])
    tokens_BT = torch.ones(1, 50, dtype=torch.int64)
    place = Places((0,), tokens_BT, torch.ones(1, dtype=torch.int64), network.initial_state(1))
    found = flow(network, place, ["layers.0.W"])
    of_loss_by_h = found.norm[0].item()
    matrix = found.matrices["layers.0.W"]
    assert matrix.norm_K.sum().item() / of_loss_by_h == pytest.approx(derivative, rel=1e-5)
    # Every use adds w^k of the later steps times the h it meets, w^(49 - k): all the same.
    torch.testing.assert_close(matrix.norm_K / of_loss_by_h, torch.full((50,), w**49, dtype=torch.float64))
    torch.testing.assert_close(matrix.share_K, torch.full((50,), 0.02, dtype=torch.float64))
    expected = of_loss_by_h * w ** torch.arange(51, dtype=torch.float64)
    torch.testing.assert_close(found.norm[:, 0], expected)


def test_a_linear_network_in_closed_form(linear_network):
    matrix = torch.tensor([[0.5, 0.8, 0.0], [-0.3, 0.9, 0.2], [0.1, 0.0, 1.05]], dtype=torch.float64)
    network = linear_network(matrix.tolist())
    chosen = chosen_places(network, 60, 1)
    found = flow(network, chosen)
    features_BTF, _ = network.features(chosen.tokens_BT, chosen.state)
    logits = network.head.logits(features_BTF[:, -1])[0]
    at_loss = (logits.softmax(0) - functional.one_hot(chosen.targets_B[0], 3)) @ network.head.weight
    for lag in (0, 1, 7, 60):
        expected = (torch.linalg.matrix_power(matrix.T, lag) @ at_loss).norm().item()
        assert found.norm[lag].item() == pytest.approx(expected, rel=1e-9)


def lstm_flow(num_layers: int) -> tuple[LanguageModel, Places, Flow]:
    config = model_config({"kind": "lstm", "hidden_size": 4, "embedding_size": 3, "num_layers": num_layers})
    network = build_model(config, 5, seed=1, dtype=torch.float64)
    chosen = chosen_places(network)
    return network, chosen, flow(network, chosen)


def test_the_additive_way_of_an_lstm_is_the_product_of_its_forget_gates():
    network, chosen, found = lstm_flow(1)
    states, moments = [chosen.state], []
    with torch.no_grad():
        for token_B in chosen.tokens_BT.unbind(1):
            moments.append(network.named_step(token_B, states[-1]))
            states.append(moments[-1].state)
    before_last = states[-2].map(lambda tensor: tensor.clone().requires_grad_())
    features_BF, _ = network.step(chosen.tokens_BT[:, -1], before_last)
    loss = network.head.nll(features_BF[:, None], chosen.targets_B[:, None]).sum()
    by_h, by_c = torch.autograd.grad(loss, [before_last.tensors["0.h"], before_last.tensors["0.c"]])
    for lag in range(2, LAGS + 1):
        # The state so many steps before the loss is the one before this token; c alone leads on.
        named, c = moments[LAGS - lag].named, moments[LAGS - lag].state.tensors["0.c"]
        by_c = named["0.forget_gate"] * (by_c + by_h * named["0.output_gate"] * (1 - c.tanh() ** 2))
        by_h = torch.zeros_like(by_h)
        torch.testing.assert_close(found.additive[lag], by_c.norm(dim=1))
    assert torch.equal(found.additive[1], found.norm[1])
    assert not found.rest[:2].any()
    assert (found.rest[2:] > 0).all()
    assert (found.norm <= found.additive + found.rest + 1e-15).all()


def test_a_vanilla_network_has_no_additive_way_and_a_mingru_no_other():
    for kind, is_additive in (("elman", False), ("mingru", True)):
        settings = {"kind": kind, "hidden_size": 4, "embedding_size": 4}
        settings |= (
            {"residual": False, "norm": "none", "convolution_size": 0, "feedforward_size": 0} if is_additive else {}
        )
        network = build_model(model_config(settings), 5, seed=1, dtype=torch.float64)
        found = flow(network, chosen_places(network))
        gone = found.rest if is_additive else found.additive
        assert not gone[2:].any()
        assert found.norm[2:].all()


def test_lower_layers_have_an_additive_way_too():
    _, _, found = lstm_flow(2)
    assert (found.additive[2:] > 0).all()


def test_rows_are_taken_together_and_apart(monkeypatch):
    _, _, together = lstm_flow(1)
    monkeypatch.setattr("elman.inspection.lags._NUMBERS_AT_ONCE", 1)
    network, chosen, _ = lstm_flow(1)
    apart = flow(network, chosen, names_of_matrices(network))
    torch.testing.assert_close(apart.norm, together.norm)
    torch.testing.assert_close(apart.additive, together.additive)
    assert all(matrix.error < 1e-10 for matrix in apart.matrices.values())


def test_nothing_is_left_behind():
    network, chosen, _ = lstm_flow(1)
    before = chosen.state.map(torch.clone)
    flow(network, chosen, names_of_matrices(network))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())
    assert isinstance(chosen.state, State)
    assert all(torch.equal(chosen.state.tensors[name], tensor) for name, tensor in before.tensors.items())


@pytest.mark.parametrize("kind", ["ngram", "window"])
def test_tokens_have_no_gradient(kind):
    network = build_model(model_config({"kind": kind}), 5, seed=1, dtype=torch.float64)
    with pytest.raises(UserError, match="tokens alone"):
        flow(network, chosen_places(network))


def test_a_length_whose_square_is_no_number_is_seen():
    config = model_config({"kind": "elman", "hidden_size": 6, "embedding_size": 6})
    network = build_model(config, 5, seed=1, dtype=torch.float64)
    network.get_parameter("embedding").data.zero_()
    network.get_parameter("layers.0.weight_hh").data.mul_(0.15)
    found = flow(network, places(network, np.ones(302, dtype=np.int64), 1, 300), ["layers.0.weight_ih"])
    assert 0.15**250 > 0 == (0.15**250) ** 2
    assert (found.norm[251] / found.norm[1]).item() == pytest.approx(0.15**250, rel=1e-6)
    assert found.norm[300].item() > 0
