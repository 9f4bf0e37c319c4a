"""The fixed-window model: the paper's equations in NumPy, the window and its edge, resets, training, sampling, file."""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elman.config import SamplingConfig, StackConfig, TrainingConfig
from elman.data.prepare import tokenize_text
from elman.errors import ConfigError
from elman.evaluation import evaluate_split
from elman.generation import Sampler
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, model_class, model_config
from elman.models.noise import Noise
from elman.models.state import State
from elman.models.window import WindowModel
from elman.text.tokenizers import ByteTokenizer, CharTokenizer
from elman.training.optimizers import Optimizer
from elman.training.run import train

V, E, H, K, BOUNDARY = 9, 3, 5, 4, 7
OPTIONS = [
    {},
    {"direct_connections": True},
    {"output_projection": True},
    {"output_projection": True, "direct_connections": True},
    {"tie_weights": True, "output_projection": True},
    {"tie_weights": True, "hidden_size": E, "direct_connections": True},
]
TOKENS = torch.randint(V, (3, 11), generator=torch.Generator().manual_seed(2))


def build(dtype: torch.dtype = torch.float64, vocab_size: int = V, **settings) -> WindowModel:
    given = {"kind": "window", "window_size": K, "embedding_size": E, "hidden_size": H, **settings}
    network = build_model(model_config(given), vocab_size, seed=1, dtype=dtype, boundary_id=BOUNDARY)
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return network


def log_probs(network: WindowModel, tokens_BT, state: State | None = None, reset_BT=None) -> torch.Tensor:
    with torch.no_grad():
        state = state or network.initial_state(len(tokens_BT))
        return network.head.log_probs(network.features(tokens_BT, state, reset_BT)[0])


def by_the_paper(network: WindowModel, context: list[int]) -> np.ndarray:
    """The oracle: log p(w | the words before it) for one context, newest word first as in the paper's equations."""
    p = {name: parameter.detach().numpy() for name, parameter in network.named_parameters(remove_duplicate=False)}
    C, k, config = p["embedding"], network.config.window_size, network.config
    history = ([network.boundary_id] * k + context)[-k:]
    x = np.concatenate([C[w] for w in reversed(history)])
    # The same matrices with their blocks of columns in the paper's order.
    newest_first = np.arange(k * config.embedding_size).reshape(k, -1)[::-1].ravel()
    hidden, d = p["hidden_weight"][:, newest_first], p["hidden_bias"]
    U, b = p["head.weight"], p["head.bias"]
    if config.output_projection:
        U = U @ p["head.projection"]
    y = b + U @ np.tanh(d + hidden @ x)
    if config.direct_connections:
        y = y + p["head.direct"][:, newest_first] @ x
    return y - np.log(np.exp(y).sum())


# The equations.


@pytest.mark.parametrize("settings", [*OPTIONS, {"window_size": 1}, {"window_size": 30}], ids=str)
def test_it_is_the_paper_s_network(settings):
    network = build(**settings)
    found = log_probs(network, TOKENS).numpy()
    for row, tokens in enumerate(TOKENS.tolist()):
        for time in range(len(tokens)):
            expected = by_the_paper(network, tokens[: time + 1])
            np.testing.assert_allclose(found[row, time], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_the_number_of_parameters_is_the_paper_s(settings):
    network = build(**settings)
    hidden_size = settings.get("hidden_size", H)
    projected = settings.get("output_projection", False)
    width = E if projected else hidden_size
    expected = V * E + hidden_size * (K * E + 1) + V
    expected += V * width * (not settings.get("tie_weights"))
    expected += E * H * projected + V * K * E * settings.get("direct_connections", False)
    assert network.num_parameters == expected
    assert model_class(network.config) is WindowModel
    assert WindowModel.predicted_num_parameters(network.config, V) == expected


def test_the_weights_are_drawn_as_documented():
    config = model_config({"kind": "window", "window_size": 6, "embedding_size": 32, "direct_connections": True})
    network = build_model(config, 400, seed=1, dtype=torch.float64)
    assert network.embedding.std().item() == pytest.approx(1 / math.sqrt(32), rel=0.03)
    for matrix, bound in ((network.hidden_weight, math.sqrt(3 / 6)), (network.head.direct, 1 / math.sqrt(6 * 32))):
        assert 0.99 * bound < matrix.abs().max() <= bound
        assert matrix.var().item() == pytest.approx(bound**2 / 3, rel=0.05)
    assert 0.99 / math.sqrt(256) < network.head.weight.abs().max() <= 1 / math.sqrt(256)
    windows = torch.randint(400, (2000, 6), generator=torch.Generator().manual_seed(1))
    sums = network.embedding[windows].flatten(1) @ network.hidden_weight.T
    assert sums.var().item() == pytest.approx(1.0, rel=0.05)
    assert not network.hidden_bias.any()
    assert not network.head.bias.any()


# The window and its edge.


def test_the_state_is_the_last_k_tokens_and_boundaries_before_them():
    network = build()
    state = network.initial_state(3)
    assert state.tensors["tokens"].dtype == torch.int64
    assert state.tensors["tokens"].tolist() == [[BOUNDARY] * K] * 3
    assert network.features(TOKENS[:, :2], state)[1].tensors["tokens"][1].tolist() == [
        BOUNDARY, BOUNDARY, *TOKENS[1, :2].tolist()
    ]  # fmt: skip
    assert torch.equal(network.features(TOKENS, state)[1].tensors["tokens"], TOKENS[:, -K:])
    assert state.num_bytes == 3 * K * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_token_inside_the_window_counts_and_one_before_it_changes_no_bit(size, dtype):
    network = build(dtype, window_size=size, direct_connections=True)
    before = log_probs(network, TOKENS)
    for changed in range(TOKENS.shape[1]):
        others = TOKENS.clone()
        others[:, changed] = (others[:, changed] + 1) % V
        differs_T = (log_probs(network, others) != before).any(2).any(0)
        expected = [changed <= time < changed + size for time in range(TOKENS.shape[1])]
        assert differs_T.tolist() == expected


@pytest.mark.parametrize(("size", "sees_the_subject"), [(13, False), (14, True)])
def test_the_keys_are_out_of_sight_of_a_window_of_13(size, sees_the_subject):
    text = "The keys that I left on the kitchen counter yesterday afternoon next to the mail are"
    words = text.split()
    ids = {word: index for index, word in enumerate(dict.fromkeys([*words, "key", "is"]))}
    network = build(torch.float32, vocab_size=len(ids), window_size=size)
    plural = [ids[word] for word in words[:-1]]
    singular = [ids["key" if word == "keys" else word] for word in words[:-1]]
    of_plural, of_singular = (log_probs(network, torch.tensor([tokens]))[0, -1] for tokens in (plural, singular))
    assert torch.equal(of_plural, of_singular) is not sees_the_subject
    choice = [(of[ids["are"]] - of[ids["is"]]).item() for of in (of_plural, of_singular)]
    assert (choice[0] != choice[1]) is sees_the_subject


# Chunks and resets.


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_any_chunking_gives_the_same_numbers(lengths):
    network = build(direct_connections=True)
    tokens = torch.randint(V, (2, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    state, found = network.initial_state(2), []
    for piece in tokens.split(lengths, dim=1):
        logits, state = network(piece, state)
        found.append(logits)
    whole, after = network(tokens, network.initial_state(2))
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-13)
    assert torch.equal(state.tensors["tokens"], after.tensors["tokens"])


@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=2, max_size=2), st.integers(1, 12))
def test_after_a_reset_the_text_starts_there(resets, size):
    network = build(window_size=size)
    reset_BT = torch.tensor(resets)
    tokens = TOKENS[:2, 2:]
    _, before = network.features(TOKENS[:2, :2], network.initial_state(2))
    features, after = network.features(tokens, before, reset_BT)
    for row in range(2):
        starts = [0, *(time for time in range(9) if resets[row][time]), 9]
        for start, end in pairwise(starts):
            if start == end:
                continue
            fresh = bool(resets[row][start])
            state = network.initial_state(1) if fresh else before.select([row])
            expected, state = network.features(tokens[row : row + 1, start:end], state)
            torch.testing.assert_close(features[row, start:end], expected[0], rtol=0, atol=1e-13)
        assert torch.equal(after.tensors["tokens"][row], state.tensors["tokens"][0])


def test_the_state_given_is_never_changed_and_the_one_returned_holds_no_segment():
    network = build()
    state = network.initial_state(3)
    _, after = network.features(TOKENS, state)
    assert state.tensors["tokens"].tolist() == [[BOUNDARY] * K] * 3
    assert after.tensors["tokens"].untyped_storage().nbytes() == after.num_bytes


def test_the_boundary_is_the_tokenizer_s():
    tokenizer = ByteTokenizer()
    config = model_config({"kind": "window", "window_size": 2, "embedding_size": 4, "hidden_size": 4})
    network = build_model(config, tokenizer.size, seed=1, dtype=torch.float64, boundary_id=tokenizer.boundary_id)
    assert network.initial_state(1).tensors["tokens"].tolist() == [[256, 256]]


def test_the_table_of_the_documentation_is_the_one_its_command_prints():
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("window_table", root / "tools" / "window_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in (root / "docs" / "models" / "window.md").read_text(encoding="utf-8")
    rows = [line for line in module.table().splitlines() if "window, k" in line]
    parameters = [int(line.split("|")[3].replace(",", "")) for line in rows]
    assert parameters == [256 * (k * 128 + 1) for k in module.WINDOWS]


# Dropout.


def test_dropout_falls_on_the_embeddings_and_on_the_hidden_layer():
    network = build(dropout=0.5, hidden_size=400, direct_connections=True)
    key = Noise(seed=1, update=3, num_rows=3)
    features, _ = network.features(TOKENS, network.initial_state(3), noise=key)
    before = torch.full((3, network.config.window_size), network.boundary_id)
    windows_BTK = torch.cat([before[:, 1:], TOKENS], dim=1).unfold(1, network.config.window_size, 1)
    x_BTI = network.embedding[windows_BTK].flatten(2)
    x_BTI = key.dropout(x_BTI, 0.5, "embedding")
    h_BTH = key.dropout((x_BTI @ network.hidden_weight.T + network.hidden_bias).tanh(), 0.5, "hidden")
    torch.testing.assert_close(features, torch.cat([h_BTH, x_BTI], -1), rtol=0, atol=1e-13)
    assert (features == 0).double().mean().item() == pytest.approx(0.5, abs=0.02)


# Settings.


def test_tied_sizes_that_differ_are_refused():
    with pytest.raises(ValidationError, match=r"embedding_size \(3\) equal to hidden_size \(5\)"):
        build(tie_weights=True)


def test_settings_of_another_kind_are_refused():
    config = model_config({"kind": "lstm"})
    assert isinstance(config, StackConfig)
    with pytest.raises(ConfigError, match=r"model.kind 'lstm' is not a fixed-window model"):
        WindowModel(config, V, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"model.kind 'lstm' is not a fixed-window model"):
        WindowModel.predicted_num_parameters(config, V)


# Muon, training, sampling, file.


def test_muon_takes_the_hidden_matrix_as_one_block():
    network = build(direct_connections=True)
    (matrix, blocks), *others = network.hidden_matrices()
    assert (matrix is network.hidden_weight, blocks, others) == (True, 1, [])
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    optimizer = Optimizer(network, TrainingConfig(optimizer="muon", learning_rate=1e-3, matrix_learning_rate=0.5))
    features, _ = network.features(TOKENS[:, :-1], network.initial_state(3))
    network.head.nll(features, TOKENS[:, 1:]).mean().backward()
    optimizer.step(1.0)
    moved = {name: (p.detach() - before[name]) for name, p in network.named_parameters()}
    singular = torch.linalg.svdvals(moved.pop("hidden_weight"))
    assert 0.6 * 0.5 < singular.max() < 1.3 * 0.5
    assert all(change.abs().max() < 2e-3 for change in moved.values())


@pytest.fixture(scope="module")
def periodic(tmp_path_factory):
    """A run on a text of period 6 that no window of 1 determines and one of 3 does."""
    folder = tmp_path_factory.mktemp("window")
    (folder / "text.txt").write_text("aabbab" * 200, encoding="utf-8")
    settings = {
        "tokenizer": {"level": "byte"},
        "model": {"kind": "window", "window_size": 3, "embedding_size": 8, "hidden_size": 32},
        "training": {"batch_size": 4, "bptt": 16, "max_updates": 200, "learning_rate": 0.03, "warmup_updates": 0,
                     "reset_probability": 0.1},
        "sampling": {"temperatures": [0.0], "max_new_tokens": 5},
    }  # fmt: skip
    return train(folder / "text.txt", **settings, out=folder / "run")


def test_training_falls_to_what_the_window_determines(periodic):
    losses = [record["nats"] for record in periodic.records() if record["kind"] == "update"]
    assert losses[0] == pytest.approx(math.log(257), rel=0.1)
    assert losses[-1] < 0.1


def test_a_trained_model_samples_goes_on_and_is_evaluated_from_its_file(periodic):
    bundle = load_model(periodic.path)
    assert bundle.network.boundary_id == 256
    assert bundle.network.initial_state(1).tensors["tokens"].tolist() == [[256] * 3]
    sampler = Sampler(bundle, "aabbab", settings=SamplingConfig(temperature=0.0, max_new_tokens=12), seed=1)
    assert "".join(sampler) == "aabbabaabbab"
    split = tokenize_text("aabbab" * 4, bundle.tokenizer)
    scores = [evaluate_split(bundle.network, split, bundle.tokenizer, segment_length=n).score for n in (1, 7, None)]
    assert scores[0].nats_total == pytest.approx(scores[1].nats_total, rel=1e-5)
    assert scores[0].nats_total == pytest.approx(scores[2].nats_total, rel=1e-5)


@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_the_model_file_gives_the_model_back(settings, tmp_path):
    tokenizer = CharTokenizer("abcdefg")
    network = build(torch.float32, vocab_size=tokenizer.size, **settings)
    network.boundary_id = tokenizer.boundary_id
    save_model(tmp_path / "m.safetensors", Bundle(network, tokenizer))
    loaded = load_model(tmp_path / "m.safetensors").network
    assert isinstance(loaded, WindowModel)
    assert loaded.config == network.config
    assert torch.equal(log_probs(loaded, TOKENS), log_probs(network, TOKENS))
