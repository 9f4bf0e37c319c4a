"""Dynamic evaluation and the neural cache against NumPy transcriptions of their papers' equations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from elman.adaptation import (
    CACHE_WEIGHTS,
    CacheSettings,
    DynamicSettings,
    TuningText,
    cache_nats,
    dynamic_nats,
    evaluate_dynamically,
    evaluate_with_cache,
    gradient_statistics,
)
from elman.config import TokenizerConfig
from elman.data.prepare import tokenize_text
from elman.evaluation import evaluate_split
from elman.metrics import Score
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config
from elman.text.building import train_tokenizer
from elman.text.sources import Piece
from elman.text.tokenizers import Tokenizer

TEXT = "the cat sat on the mat; the dog sat on the log.\n" * 6
VOCABULARY = 5
Weights = dict[str, np.ndarray]


def bigram_network() -> LanguageModel:
    """A network that sees one token: small enough to write down with its gradients."""
    settings = {"kind": "window", "window_size": 1, "embedding_size": 3, "hidden_size": 4}
    return build_model(model_config(settings), VOCABULARY, seed=4, dtype=torch.float64)


def weights_of(network: LanguageModel) -> Weights:
    return {name: parameter.detach().numpy().copy() for name, parameter in network.named_parameters()}


def loss_and_gradients(w: Weights, inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, Weights]:
    """The nats of each target, and the gradients of their mean: y = U tanh(M C[x] + d) + b."""
    x = w["embedding"][inputs]
    h = np.tanh(x @ w["hidden_weight"].T + w["hidden_bias"])
    y = h @ w["head.weight"].T + w["head.bias"]
    p = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    rows = np.arange(len(inputs))
    dy = p.copy()
    dy[rows, targets] -= 1
    dy /= len(inputs)
    da = dy @ w["head.weight"] * (1 - h**2)
    embedding = np.zeros_like(w["embedding"])
    np.add.at(embedding, inputs, da @ w["hidden_weight"])
    return -np.log(p[rows, targets]), {
        "embedding": embedding,
        "hidden_weight": da.T @ x,
        "hidden_bias": da.sum(axis=0),
        "head.weight": dy.T @ h,
        "head.bias": dy.sum(axis=0),
    }


def test_dynamic_evaluation_equals_the_equations_of_krause_et_al():
    network = bigram_network()
    random = np.random.default_rng(0)
    train, text = random.integers(VOCABULARY, size=61), random.integers(VOCABULARY, size=24)
    length, eta, decay = 4, 0.03, 0.2

    w = weights_of(network)
    squares, count = {name: np.zeros_like(value) for name, value in w.items()}, 0
    for time in range(0, 30, length):  # two rows of thirty targets
        inputs, targets = (
            np.concatenate([train[first + shift + time :][: min(length, 30 - time)] for first in (0, 30)])
            for shift in (0, 1)
        )
        for name, gradient in loss_and_gradients(w, inputs, targets)[1].items():
            squares[name] += gradient**2
        count += 1
    rms = {name: np.sqrt(value / count) for name, value in squares.items()}
    mean = sum(value.sum() for value in rms.values()) / sum(value.size for value in rms.values())

    total, trained = 0.0, {name: value.copy() for name, value in w.items()}
    for time in range(0, 23, length):
        inputs, targets = text[time:23][:length], text[time + 1 :][:length]
        nats, gradients = loss_and_gradients(w, inputs, targets)
        total += nats.sum()
        for name in w:
            pull = decay * np.minimum(rms[name] / mean, 1 / decay)
            w[name] += pull * (trained[name] - w[name]) - eta * gradients[name] / (rms[name] + 0.1 * mean)

    statistics = gradient_statistics(network, train, length, num_rows=2)
    for name, found in zip(rms, statistics, strict=True):
        np.testing.assert_allclose(found.numpy(), rms[name], rtol=1e-9)
    assert max(decay * (value / mean).max() for value in rms.values()) > 0.5  # the pull is no small correction
    before = weights_of(network)
    found = dynamic_nats(network, text, statistics, DynamicSettings(eta, decay, length))
    assert found == pytest.approx(total, rel=1e-10)
    assert all(np.array_equal(before[name], value) for name, value in weights_of(network).items())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(), [Piece(TEXT, True)])


def recurrent(tokenizer: Tokenizer, kind: str = "lstm") -> LanguageModel:
    settings = {"kind": kind, "hidden_size": 8, "embedding_size": 8}
    return build_model(model_config(settings), tokenizer.size, seed=3, dtype=torch.float64)


def test_without_a_rate_nothing_is_learned_and_the_state_is_carried(tokenizer: Tokenizer):
    network, split = recurrent(tokenizer), tokenize_text(TEXT, tokenizer)
    statistics = gradient_statistics(network, split.tokens, 5)
    plain = evaluate_split(network, split, tokenizer).score.nats_total
    for length in (1, 7):
        still = dynamic_nats(network, split.tokens, statistics, DynamicSettings(1e-300, 1e-3, length))
        assert still == pytest.approx(plain, rel=1e-12)
    learned = dynamic_nats(network, split.tokens, statistics, DynamicSettings(1e-3, 1e-4, 5))
    assert learned < plain


def cache_oracle(network: LanguageModel, tokens: np.ndarray, size: int, theta: float, weight: float) -> float:
    """Equations 2 and 3 of Grave et al., token by token."""
    with torch.no_grad():
        features, _ = network.features(torch.from_numpy(tokens[None, :-1].astype(np.int64)), network.initial_state(1))
        p_model = network.head.log_probs(features)[0].exp().numpy()
    h, total = features[0].numpy(), 0.0
    for t, target in enumerate(tokens[1:].tolist()):
        p = p_model[t, target]
        seen = range(max(0, t - size), t)
        if seen:
            similar = [math.exp(theta * float(h[t] @ h[i])) for i in seen]
            of_target = sum(s for s, i in zip(similar, seen, strict=True) if tokens[i + 1] == target)
            p = (1 - weight) * p + weight * of_target / sum(similar)
        total -= math.log(p)
    return total


@pytest.mark.parametrize("size", [1, 10, 60, 1000])
@pytest.mark.parametrize("kind", ["lstm", "window"])
def test_the_cache_equals_the_equations_of_grave_et_al(kind: str, size: int, tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setattr("elman.adaptation._CACHE_BLOCK", 32)
    network, tokens = recurrent(tokenizer, kind), tokenize_text(TEXT, tokenizer).tokens
    expected = cache_oracle(network, tokens, size, 2.0, 0.3)
    assert cache_nats(network, tokens, CacheSettings(size, 2.0, 0.3)) == pytest.approx(expected, rel=1e-10)


def test_a_cache_without_weight_is_the_model(tokenizer: Tokenizer):
    network, split = recurrent(tokenizer), tokenize_text(TEXT, tokenizer)
    plain = evaluate_split(network, split, tokenizer).score.nats_total
    assert cache_nats(network, split.tokens, CacheSettings(100, 1.0, 0.0)) == pytest.approx(plain, rel=1e-12)


def test_what_stands_in_a_text_that_repeats_itself_is_found_by_the_cache(tokenizer: Tokenizer):
    network, split = recurrent(tokenizer), tokenize_text(TEXT, tokenizer)
    plain = evaluate_split(network, split, tokenizer).score
    found = evaluate_with_cache(network, split.tokens, plain, tuning=TuningText("elsewhere", split.tokens))
    assert found.score.nats_total < 0.95 * plain.nats_total
    assert found.score.tokens == plain.tokens
    assert found.num_tried == 3 * 4 * len(CACHE_WEIGHTS)
    # The best of all that were tried, by their own words.
    chosen: Any = found.settings
    assert found.score.nats_total == pytest.approx(cache_nats(network, split.tokens, CacheSettings(**chosen)))


def test_settings_are_chosen_on_the_other_text_alone(tokenizer: Tokenizer, monkeypatch):
    network = recurrent(tokenizer)
    judged, other = (tokenize_text(text, tokenizer).tokens for text in (TEXT, TEXT[::-1]))
    tried: list[tuple[int, float, float]] = []

    def noted(network: object, tokens: np.ndarray, statistics: object, settings: DynamicSettings) -> float:
        tried.append((len(tokens), settings.learning_rate, settings.decay))
        assert len(tokens) in (len(other[:101]), len(judged))
        return abs(settings.learning_rate - 1e-4) + abs(settings.decay - 1e-3)

    monkeypatch.setattr("elman.adaptation.dynamic_nats", noted)
    monkeypatch.setattr("elman.adaptation._MAX_TUNED", 100)
    plain = Score(1.0, len(judged) - 1, None, None)
    found = evaluate_dynamically(
        network, judged, plain, train=other, tuning=TuningText("the other", other), level="char"
    )
    assert found.settings == {"learning_rate": 1e-4, "decay": 1e-3, "segment_length": 20}
    assert (found.tuned_on, found.tuned_tokens) == ("the other", 100)
    assert [size for size, _, _ in tried].count(len(judged)) == 1
    assert tried[-1] == (len(judged), 1e-4, 1e-3)
    assert found.num_tried == len(tried) - 1


def test_a_rate_that_blows_up_is_not_chosen(tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setattr("elman.adaptation.LEARNING_RATES", (1e300, 1e-5))
    network, split = recurrent(tokenizer), tokenize_text(TEXT, tokenizer)
    plain = evaluate_split(network, split, tokenizer).score
    tuning = TuningText("elsewhere", split.tokens)
    found = evaluate_dynamically(network, split.tokens, plain, train=split.tokens, tuning=tuning, level="word")
    assert found.settings["learning_rate"] == 1e-5
    assert math.isfinite(found.score.nats_total)
