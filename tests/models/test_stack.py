"""The recurrent stack: its initial draw, its layers, what stands around their cells, tied weights, the projection."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from elman.cells import find_cell
from elman.config import TrainingConfig
from elman.errors import ConfigError
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, model_class, model_config
from elman.models.noise import Noise
from elman.settings import resolve
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
        x, parts = layer(x, layer.initial_state(3, x), None, lambda branch: branch)
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


# What stands around a cell, against modules of PyTorch.

AROUND = [
    {"residual": True},
    {"norm": "rms"},
    {"norm": "layer", "residual": True},
    {"convolution_size": 3},
    {"residual": True, "feedforward_size": 5},
    {"residual": True, "norm": "rms", "convolution_size": 4, "feedforward_size": 5},
    {"residual": True, "norm": "layer", "convolution_size": 2, "feedforward_size": 5},
]


def norm_of_torch(ours):
    """The module of PyTorch with the weights of one of ours, or nothing where there is none."""
    if ours is None:
        return lambda x: x
    if ours.bias is None:
        theirs = torch.nn.RMSNorm(len(ours.weight), eps=1e-6, dtype=torch.float64)
    else:
        theirs = torch.nn.LayerNorm(len(ours.weight), dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    return theirs


def layer_of_torch(layer, x_BTI):
    """One layer from the initial state, written with modules of PyTorch."""
    width = x_BTI.shape[-1]
    u_BTI = norm_of_torch(layer.norm)(x_BTI)
    if layer.convolution_weight is not None:
        size = layer.convolution_weight.shape[1]
        convolution = torch.nn.Conv1d(width, width, size, groups=width, padding=size - 1, dtype=torch.float64)
        convolution.weight.data = layer.convolution_weight.data.unsqueeze(1)
        convolution.bias.data = layer.convolution_bias.data
        u_BTI = convolution(u_BTI.mT)[..., : x_BTI.shape[1]].mT
    lstm = torch.nn.LSTM(width, H, batch_first=True, dtype=torch.float64)
    lstm.load_state_dict({f"{name}_l0": tensor for name, tensor in layer.cell_parameters.items()})
    y_BTH, _ = lstm(u_BTI)
    x_BTH = x_BTI + y_BTH if layer.residual else y_BTH
    if layer.feedforward is None:
        return x_BTH
    n_BTH = norm_of_torch(layer.feedforward_norm)(x_BTH)
    gate, up, down = layer.feedforward.gate, layer.feedforward.up, layer.feedforward.down
    return x_BTH + (torch.nn.SiLU()(n_BTH @ gate.T) * (n_BTH @ up.T)) @ down.T


def nudged(network):
    """The network with scales, shifts and biases that are not what they start as."""
    generator = torch.Generator().manual_seed(4)
    for parameter in network.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return network


@pytest.mark.global_rng
@pytest.mark.parametrize("settings", AROUND)
def test_what_stands_around_a_cell_is_what_pytorch_has(settings):
    network = nudged(build(num_layers=2, biases="double", embedding_size=H, **settings))
    with torch.no_grad():
        x = network.embedding[TOKENS]
        for layer in network.layers:
            x = layer_of_torch(layer, x)
        features, _ = network.features(TOKENS, network.initial_state(3))
        torch.testing.assert_close(features, norm_of_torch(network.norm)(x), rtol=0, atol=1e-12)


def test_layers_of_other_widths_may_have_norms_and_convolutions():
    network = build(num_layers=2, norm="rms", convolution_size=3)
    assert [tuple(layer.convolution_weight.shape) for layer in network.layers] == [(E, 3), (H, 3)]
    assert [len(norm.weight) for norm in (network.layers[0].norm, network.layers[1].norm, network.norm)] == [E, H, H]


@pytest.mark.parametrize("settings", AROUND)
def test_the_number_of_parameters_around_a_cell_counted_by_hand(settings):
    plain, network = (build(num_layers=3, embedding_size=H, **given) for given in ({}, settings))
    of_norm = {"none": 0, "rms": H, "layer": 2 * H}[settings.get("norm", "none")]
    inner, size = settings.get("feedforward_size", 0), settings.get("convolution_size", 0)
    of_layer = of_norm * (2 if inner else 1) + 3 * H * inner + (H * (size + 1) if size else 0)
    assert network.num_parameters - plain.num_parameters == 3 * of_layer + of_norm
    assert model_class(network.config).predicted_num_parameters(network.config, V) == network.num_parameters


def test_what_stands_around_a_cell_is_drawn_as_documented():
    settings = {"residual": True, "norm": "layer", "convolution_size": 4, "feedforward_size": 300}
    network = build(num_layers=2, embedding_size=200, hidden_size=200, **settings)
    for norm in (network.layers[0].norm, network.layers[1].feedforward_norm, network.norm):
        assert norm.weight.tolist() == [1.0] * 200
        assert norm.bias.tolist() == [0.0] * 200
    layer = network.layers[0]
    assert not layer.convolution_bias.any()
    bounds = {
        layer.convolution_weight: math.sqrt(3 / 4),
        layer.feedforward.gate: math.sqrt(3 / 200),
        layer.feedforward.up: math.sqrt(3 / 200),
        layer.feedforward.down: math.sqrt(3 / 300 / 4),  # two branches in each of two layers
    }
    for parameter, bound in bounds.items():
        assert 0.99 * bound < parameter.abs().max() <= bound
        assert parameter.var().item() == pytest.approx(bound**2 / 3, rel=0.1)


def test_muon_takes_the_linear_maps_and_leaves_what_multiplies_element_by_element():
    network = build(num_layers=1, embedding_size=H, residual=True, convolution_size=3, feedforward_size=5)
    layer = network.layers[0]
    expected = [layer.weight_ih, layer.weight_hh, layer.feedforward.gate, layer.feedforward.up, layer.feedforward.down]
    assert [id(matrix) for matrix, _ in network.hidden_matrices()] == [id(matrix) for matrix in expected]
    assert [blocks for _, blocks in network.hidden_matrices()] == [1, 4, 1, 1, 1]


@pytest.mark.parametrize(
    ("residual", "places"),
    [
        (False, ["embedding", "layer 0", "layer 1"]),
        (True, ["embedding", "layer 0", "layer 0 feedforward", "layer 1", "layer 1 feedforward"]),
    ],
)
def test_dropout_falls_on_the_embedding_and_on_each_branch(monkeypatch, residual, places):
    network = build(
        num_layers=2, embedding_size=H, dropout=0.5, residual=residual, feedforward_size=5 if residual else 0
    )
    seen = []

    def emptied(noise, x_BTI, share, place, *, locked):
        seen.append((place, share))
        return x_BTI if place == "embedding" else torch.zeros_like(x_BTI)

    monkeypatch.setattr(Noise, "dropout", emptied)
    features, _ = network.features(TOKENS, network.initial_state(3), noise=Noise(seed=1, update=1, num_rows=3))
    assert seen == [(place, 0.5) for place in places]
    # With every branch dropped the residual path alone is left.
    assert torch.equal(features, network.embedding[TOKENS] if residual else torch.zeros_like(features))


# Mixed layers.


def test_mixed_layers_have_the_parameters_and_states_of_their_cells():
    settings = {"residual": False, "norm": "none", "convolution_size": 3, "feedforward_size": 0}
    config = model_config({"layers": "lstm, mingru,gru", "embedding_size": E, "hidden_size": H, **settings})
    network = build_model(config, V, seed=1, dtype=torch.float64)
    assert network.config.kind == "stack"
    assert network.config.layers == ("lstm", "mingru", "gru")
    of_cells = {"weight_ih", "bias", "convolution_weight", "convolution_bias"}
    expected = [of_cells | {"weight_hh"}, of_cells, of_cells | {"weight_hh"}]
    assert [set(dict(layer.named_parameters())) for layer in network.layers] == expected
    assert {name: tuple(tensor.shape) for name, tensor in network.initial_state(2).tensors.items()} == {
        "0.h": (2, H), "0.c": (2, H), "0.inputs": (2, 2, E),
        "1.h": (2, H), "1.inputs": (2, 2, H),
        "2.h": (2, H), "2.inputs": (2, 2, H),
    }  # fmt: skip
    parts = [(part.name, part.what, part.state) for part in network.components()]
    assert parts == [
        ("embedding", "look-up", ()),
        ("layer 1", "lstm", ("0.h", "0.c", "0.inputs")),
        ("layer 2", "mingru", ("1.h", "1.inputs")),
        ("layer 3", "gru", ("2.h", "2.inputs")),
        ("output", "linear", ()),
    ]
    assert model_class(network.config).predicted_num_parameters(network.config, V) == network.num_parameters


@pytest.mark.parametrize("layers", ["lstm, gru,elman", ["lstm,gru", "elman"], ("lstm", "gru", "elman")])
def test_layers_are_named_by_a_list_or_with_commas(layers):
    assert model_config({"layers": layers}).layers == ("lstm", "gru", "elman")


def test_mixed_layers_run_one_after_the_other():
    network = build("stack", layers="gru,elman")
    features, state = network.features(TOKENS, network.initial_state(3))
    x = network.embedding[TOKENS]
    for index, (kind, width) in enumerate({"gru": E, "elman": H}.items()):
        cell = find_cell(kind)(network.config, width)
        x, after = cell.scan(network.layers[index].cell_parameters, x, {"h": torch.zeros(3, H, dtype=torch.float64)})
        assert torch.equal(state.tensors[f"{index}.h"], after["h"])
    assert torch.equal(features, x)


def test_settings_of_each_cell_hold_for_its_layers():
    config = model_config({"layers": "gru,lstm,elman", "reset_after": False, "nonlinearity": "relu", "forget_bias": 2})
    assert (config.reset_after, config.nonlinearity, config.forget_bias) == (False, "relu", 2.0)
    with pytest.raises(ValidationError, match="reset_after"):
        model_config({"layers": "lstm,elman", "reset_after": False})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "lstm", "residual": True},
            r"model.residual needs equal widths, but the embedding \(model.embedding_size\) gives 128 and layer 1 256: "
            "make them equal, or set model.residual false",
        ),
        ({"kind": "lstm", "feedforward_size": 8}, "feedforward_size needs residual: set residual true as well"),
        ({"kind": "lstm", "convolution_size": 1}, "convolution_size 1 would mix no inputs: give 0 for none, or 2 and"),
        ({"layers": "lstm,lsmt"}, r"model.layers names 'lsmt'; did you mean 'lstm'\? accepted: elman, "),
        ({"layers": "lstm,./mine.py:Cell"}, r"model.layers names './mine.py:Cell'; accepted: elman, "),
        (
            {"layers": "lstm", "kind": "gru"},
            "model.layers names the cell of each layer, model.kind 'gru' one for all: leave one of them out",
        ),
        ({"layers": ()}, "layers\n.*at least 1 item"),
    ],
)
def test_surroundings_and_layers_that_cannot_be_are_refused_in_one_line(settings, message):
    with pytest.raises((ConfigError, ValidationError), match=message):
        build_model(model_config(settings), V, seed=1, dtype=torch.float64)


def test_naming_the_layers_takes_back_the_kind_of_a_preset():
    model = resolve({"model": {"layers": "lstm,gru"}}, preset="cpu-1min").model
    assert (model.kind, model.layers, model.embedding_size) == ("stack", ("lstm", "gru"), 128)
    assert resolve({"model": {"kind": "gru"}}, preset="cpu-1min").model.kind == "gru"


@pytest.mark.parametrize("layers", ["mlstm,transformer", "transformer,mlstm"])
def test_the_conditions_of_every_cell_of_a_mixed_stack_hold_in_any_order(layers):
    with pytest.raises(ValidationError, match="heads of even width"):
        model_config({"layers": layers, "hidden_size": 12, "num_heads": 4})
