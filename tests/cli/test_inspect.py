"""``inspect model``: the table adds up to the model."""

from __future__ import annotations

import math

import pytest

import elman as package
from elman.inspection.architecture import describe
from elman.models.file import Bundle
from elman.models.kinds import build_model, kind_names, model_config, model_config_class
from elman.text.tokenizers import ByteTokenizer

torch = pytest.importorskip("torch")


def bundle(**settings) -> Bundle:
    tokenizer = ByteTokenizer()
    network = build_model(model_config(settings), tokenizer.size, seed=1, dtype=torch.float32)
    return Bundle(network, tokenizer)


@pytest.mark.parametrize("kind", kind_names())
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_layers": 3, "biases": "double"},
        {"tie_weights": True},
        {"tie_weights": True, "output_projection": True},
        {"output_projection": True},
    ],
    ids=str,
)
def test_totals_are_those_of_the_model(kind, settings):
    fields = model_config_class(kind).model_fields
    equal = settings == {"tie_weights": True} or ("residual" in fields and fields["residual"].default)
    settings = {"hidden_size": 24, "embedding_size": 24 if equal else 12, **settings}
    taken = {name: value for name, value in settings.items() if name in fields}
    model = bundle(kind=kind, **taken)
    architecture = describe(model)
    assert architecture.parameters == model.network.num_parameters
    _, state = model.network.features(torch.zeros(1, 1000, dtype=torch.int64), model.network.initial_state(1))
    assert architecture.state_bytes == state.num_bytes
    assert sum(map(architecture.share, architecture.parts)) == pytest.approx(1.0)
    assert all(sum(math.prod(shape) for shape in p.shapes.values()) == p.parameters for p in architecture.parts)


def test_the_parts_of_a_stack_are_in_the_order_of_its_layers():
    parts = describe(bundle(num_layers=3, hidden_size=4)).parts
    assert [part.name for part in parts] == ["embedding", "layer 1", "layer 2", "layer 3", "output"]


def test_the_figures_of_an_lstm_by_hand():
    architecture = describe(bundle(kind="lstm", hidden_size=10, embedding_size=6))
    embedding, layer, output = architecture.parts
    assert (embedding.parameters, embedding.operations, embedding.state_bytes) == (257 * 6, 0, 0)
    assert (layer.parameters, layer.operations, layer.state_bytes) == (40 * 17, 2 * 40 * 16, 2 * 10 * 4)
    assert (output.parameters, output.operations) == (257 * 11, 2 * 257 * 10)
    assert layer.shapes == {"weight_ih": (40, 6), "weight_hh": (40, 10), "bias": (40,)}


def test_the_figures_of_a_window_by_hand():
    model = bundle(kind="window", window_size=5, hidden_size=10, embedding_size=6, direct_connections=True)
    architecture = describe(model)
    assert [part.name for part in architecture.parts] == ["embedding", "hidden", "output"]
    embedding, hidden, output = architecture.parts
    assert (embedding.parameters, embedding.operations, embedding.state_bytes) == (257 * 6, 0, 0)
    assert (hidden.parameters, hidden.operations, hidden.state_bytes) == (10 * 31, 2 * 10 * 30, 5 * 8)
    assert (output.parameters, output.operations) == (257 * (10 + 30 + 1), 2 * 257 * (10 + 30))
    assert hidden.shapes == {"weight": (10, 30), "bias": (10,)}


def test_a_tied_matrix_is_counted_once_and_multiplied_by_all_the_same():
    architecture = describe(bundle(kind="gru", hidden_size=10, embedding_size=10, tie_weights=True))
    output = architecture.parts[-1]
    assert (output.parameters, output.operations) == (257, 2 * 257 * 10)


def test_table_and_json(elman, run):
    result = elman("inspect", "model", run, "--json").json
    assert result["parameters"] == package.load(run).network.num_parameters
    table = elman("inspect", "model", run / "model.safetensors").out
    assert f"{result['parameters']:,}" in table
    assert "48x12" in table
    assert "embedding" in table
