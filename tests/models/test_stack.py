"""The recurrent stack: its initial draw, its layers in order, tied weights and the projection."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from elman.config import TrainingConfig
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, model_class, model_config
from elman.text.tokenizers import CharTokenizer
from elman.training.optimizers import Optimizer

V, E, H = 9, 6, 8
TOKENIZER = CharTokenizer("abcdefg")
TOKENS = torch.randint(V, (3, 7), generator=torch.Generator().manual_seed(2))


def build(kind: str = "lstm", dtype: torch.dtype = torch.float64, **settings):
    given = {"kind": kind, "embedding_size": E, "hidden_size": H, **settings}
    return build_model(model_config(given), V, seed=1, dtype=dtype)


def loss(network):
    features, _ = network.features(TOKENS[:, :-1], network.initial_state(3))
    return network.head.nll(features, TOKENS[:, 1:]).mean()


@pytest.mark.global_rng
def test_the_forward_pass_is_embedding_layers_and_output():
    network = build(num_layers=2, biases="double")
    layers = torch.nn.LSTM(E, H, 2, batch_first=True, dtype=torch.float64)
    layers.load_state_dict({
        f"{name}_l{index}": tensor
        for index, layer in enumerate(network.layers)
        for name, tensor in layer.named_parameters()
    })  # fmt: skip
    with torch.no_grad():
        features, (h, c) = layers(network.embedding[TOKENS])
        logits, state = network(TOKENS, network.initial_state(3))
        torch.testing.assert_close(logits, features @ network.head.weight.T + network.head.bias, rtol=0, atol=1e-12)
        for index in range(2):
            torch.testing.assert_close(state.tensors[f"{index}.h"], h[index], rtol=0, atol=1e-12)
            torch.testing.assert_close(state.tensors[f"{index}.c"], c[index], rtol=0, atol=1e-12)


def test_more_than_nine_layers_keep_their_order():
    network = build("elman", num_layers=12)
    _, state = network.features(TOKENS, network.initial_state(3))
    x = network.embedding[TOKENS]
    for index, layer in enumerate(network.layers):
        x, parts = layer(x, layer.initial_state(3, x))
        assert torch.equal(state.tensors[f"{index}.h"], parts["h"])


def test_embedding_and_output_are_drawn_as_documented():
    network = build_model(model_config({"embedding_size": 64, "hidden_size": 16}), 400, seed=1, dtype=torch.float64)
    assert network.embedding.std().item() == pytest.approx(1 / math.sqrt(64), rel=0.03)
    assert abs(network.embedding.mean().item()) < 4 / math.sqrt(64 * 400 * 64)
    assert 0.99 / math.sqrt(16) < network.head.weight.abs().max() <= 1 / math.sqrt(16)
    assert not network.head.bias.any()
    ranged = build_model(model_config({"embedding_range": 0.1, "hidden_size": 16}), 400, seed=1, dtype=torch.float64)
    for weight in (ranged.embedding, ranged.head.weight):
        assert 0.099 < weight.abs().max() <= 0.1
        assert weight.var().item() == pytest.approx(0.1**2 / 3, rel=0.05)


def test_the_seed_decides_the_weights_and_nothing_else_does():
    def weights(seed, dtype=torch.float32):
        network = build_model(model_config({"hidden_size": 4}), V, seed=seed, dtype=dtype)
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("kind", ["elman", "lstm", "gru"])
@pytest.mark.parametrize("settings", [{"num_layers": 3}, {"biases": "double"}, {"output_projection": True},
                                      {"tie_weights": True, "output_projection": True, "num_layers": 2}])  # fmt: skip
def test_the_predicted_number_of_parameters_is_the_one_built_and_counted_by_hand(kind, settings):
    network = build(kind, **settings)
    gates = {"elman": 1, "lstm": 4, "gru": 3}[kind]
    num_biases = 2 if settings.get("biases") == "double" else 1
    cells = sum(gates * H * ((E if i == 0 else H) + H + num_biases) for i in range(settings.get("num_layers", 1)))
    width = E if "output_projection" in settings else H
    projection = E * H if "output_projection" in settings else 0
    output = projection + V + (0 if "tie_weights" in settings else V * width)
    assert network.num_parameters == V * E + cells + output
    assert model_class(network.config).predicted_num_parameters(network.config, V) == network.num_parameters


def test_a_prediction_for_a_million_layers_takes_no_time_or_memory():
    config = model_config({"kind": "lstm", "embedding_size": E, "hidden_size": H, "num_layers": 10**15})
    predicted = model_class(config).predicted_num_parameters(config, V)
    assert predicted == V * E + 4 * H * (E + H + 1) + (10**15 - 1) * 4 * H * (H + H + 1) + V * H + V


# Tied weights.


def test_tied_sizes_that_differ_are_an_error_that_names_both():
    with pytest.raises(ValidationError, match=r"embedding_size \(6\) equal to hidden_size \(8\); set them equal"):
        build(tie_weights=True)


def test_tied_weights_are_one_tensor_with_the_gradient_of_both_uses():
    tied = build(tie_weights=True, embedding_size=H)
    untied = build(embedding_size=H)
    with torch.no_grad():
        for name, parameter in tied.named_parameters():
            untied.get_parameter(name).copy_(parameter)
        untied.head.weight.copy_(tied.embedding)
    assert tied.head.weight is tied.embedding
    assert untied.num_parameters - tied.num_parameters == V * H
    for network in (tied, untied):
        loss(network).backward()
    both = untied.embedding.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.grad, both, rtol=0, atol=1e-14)
    assert untied.embedding.grad.any()
    assert untied.head.weight.grad.any()


@pytest.mark.parametrize("settings", [{"embedding_size": H}, {"output_projection": True}])
def test_a_tied_model_saves_its_matrix_once_and_stays_tied_when_loaded(settings, tmp_path):
    network = build(tie_weights=True, **settings)
    path = tmp_path / "model.safetensors"
    save_model(path, Bundle(network, TOKENIZER))
    tensors = load_file(path)
    assert [name for name, tensor in tensors.items() if tensor.shape[0] == V and tensor.dim() == 2] == ["embedding"]
    assert sum(tensor.numel() for tensor in tensors.values()) == network.num_parameters
    loaded = load_model(path).network
    assert loaded.head.weight is loaded.embedding
    assert torch.equal(loaded.embedding, network.embedding)
    with torch.no_grad():
        loaded.embedding.zero_()
    assert not loaded.head.weight.any()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_the_optimizer_sees_a_tied_matrix_once(optimizer):
    network = build(tie_weights=True, embedding_size=H)
    ours = Optimizer(network, TrainingConfig(optimizer=optimizer))
    assert [p is network.embedding for p in ours.parameters].count(True) == 1
    assert sum(p.numel() for p in ours.parameters) == network.num_parameters
    loss(network).backward()
    grouped = [p for o, _ in ours._optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, ours.parameters))


def test_a_projection_maps_the_layers_output_to_the_embeddings_width():
    network = build(tie_weights=True, output_projection=True)
    assert network.head.projection.shape == (E, H)
    features, _ = network.features(TOKENS, network.initial_state(3))
    expected = features @ network.head.projection.T @ network.embedding.T + network.head.bias
    torch.testing.assert_close(network.head.logits(features), expected, rtol=0, atol=1e-12)


def test_the_loss_weighs_each_position():
    network = build()
    features, _ = network.features(TOKENS, network.initial_state(3))
    whole = network.head.nll(features, TOKENS)
    weight = torch.zeros(3, 7, dtype=torch.float64)
    weight[1, 2:5] = 1.0
    taken = network.head.nll(features, TOKENS, weight)
    assert torch.equal(taken[1, 2:5], whole[1, 2:5])
    assert taken.count_nonzero() == 3
