"""Repetition against a plain transcription, and the verdict on constructed cases of each cause."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elman.errors import TextError, UserError
from elman.inspection.repetition import diagnose_model, distinct_ngrams, entropy_along, repetition
from elman.models.contract import CountedModel
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer

texts = st.lists(st.integers(0, 2), min_size=8, max_size=60)


@settings(max_examples=80, deadline=None)
@given(tokens=texts, n=st.integers(1, 4))
def test_every_figure_is_that_of_its_definition(tokens, n):
    found = repetition(np.array(tokens), n)
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    covered, lags = set(), []
    for i, gram in enumerate(grams):
        if gram in grams[:i]:
            covered |= set(range(i, i + n))
            lags.append(i - max(j for j in range(i) if grams[j] == gram))
    assert found.repeated == pytest.approx(len(covered) / len(tokens))
    assert found.period == (max(sorted(set(lags)), key=lags.count) if lags else None)
    for size, share in zip((1, 2, 3, 4), found.distinct, strict=True):
        all_grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        assert share == pytest.approx(len(set(all_grams)) / len(all_grams)) == distinct_ngrams(np.array(tokens), size)


def test_a_loop_is_found_where_it_sets_in_and_with_its_period():
    rng = random.Random(1)
    start = [rng.randrange(30) for _ in range(200)]
    loop = [rng.randrange(30) for _ in range(17)]
    found = repetition(np.array(start + loop * 20), 8)
    assert found.period == 17
    assert found.begins == 217  # the second round is the first that repeats
    assert repetition(np.array(start), 8).begins is None
    assert repetition(np.array(loop * 3 + start), 8).begins is None  # it has got out of it
    with pytest.raises(TextError, match="takes 16 and more"):
        repetition(np.arange(15), 8)


def prose(num_words: int) -> str:
    """Words of a made-up language: varied, and full of short habits."""
    rng = random.Random(3)
    words = [
        "".join(rng.choice("aeiou" if i % 2 else "bdklmnprst") for i in range(rng.randint(2, 7))) for _ in range(300)
    ]
    weights = [1 / (rank + 1) for rank in range(300)]
    return " ".join(rng.choices(words, weights, k=num_words))


def counted(text: str, order: int) -> Bundle:
    tokenizer = CharTokenizer(prose(3000) + text)
    config = model_config({"kind": "ngram", "order": order})
    network = build_model(config, tokenizer.size, seed=1, dtype=torch.float64, boundary_id=0)
    assert isinstance(network, CountedModel)
    network.count(tokens_of(text, tokenizer))
    return Bundle(network, tokenizer, {})


def tokens_of(text: str, tokenizer: CharTokenizer) -> np.ndarray:
    return np.concatenate([[0], tokenizer.encode(text)])


VARIED = prose(3000)
PARAGRAPH = prose(60)


@pytest.mark.parametrize(
    ("learned", "order", "corpus", "verdict"),
    [
        (VARIED, 4, VARIED, "decoding"),
        (PARAGRAPH * 60, 8, PARAGRAPH * 60, "data"),
        ("banana bread " * 400, 8, VARIED, "training"),
    ],
    ids=["decoding", "data", "training"],
)
def test_the_cause_is_found(learned, order, corpus, verdict):
    model = counted(learned, order)
    found = diagnose_model(model, tokens_of(corpus, model.tokenizer), num_tokens=400, num_samples=3)
    assert found.verdict == verdict
    assert found.words.startswith(verdict)
    greedy, *_, fair = found.drawn
    assert (greedy.temperature, fair.temperature) == (0.0, 1.0)
    assert found.copied.is_copied == (verdict == "data")
    for one in found.drawn:
        assert one.copied.text in corpus
        assert len(one.copied.text) == one.copied.longest <= found.copied.longest
    if verdict == "decoding":
        assert greedy.repetition.repeated > 0.8
        assert fair.repetition.repeated < 0.1
        assert greedy.repetition.period is not None
        loop = greedy.example[-greedy.repetition.period :]
        assert greedy.example.endswith(loop * 2)


def test_nothing_is_blamed_where_nothing_loops():
    # A long text in which four characters decide the next one, and none comes back: drawn greedily it is told again.
    text = "".join(chr(97 + i % 20) + chr(97 + i // 20 % 20) + chr(97 + (i * 7) % 13) for i in range(400))
    model = counted(text, 12)
    found = diagnose_model(model, tokens_of(text, model.tokenizer), num_tokens=300, num_samples=2)
    assert max(drawn.repetition.repeated for drawn in found.drawn) < 0.2
    assert found.verdict == "none"


def test_entropy_is_that_of_the_model_at_each_quarter():
    model = counted(VARIED, 3)
    text = model.tokenizer.encode(VARIED[:80])
    state, before, entropies = model.network.initial_state(1), 0, []
    for token in text.tolist():
        logits_BTV, state = model.network(torch.tensor([[before]]), state)
        p = logits_BTV[0, 0].softmax(0)
        entropies.append(-(p * p.log()).sum().item())
        before = token
    expected = [math.fsum(entropies[i : i + 20]) / 20 for i in range(0, 80, 20)]
    assert entropy_along(model, [text]) == pytest.approx(expected, rel=1e-9)


def test_what_is_too_short_is_refused():
    model = counted(VARIED, 3)
    for settings_, words in (
        ({"num_tokens": 10, "num_samples": 1}, "accepted: 80 and more"),
        ({"num_tokens": 400, "num_samples": 0}, "accepted: 1 and more"),
        ({"num_tokens": 10**6, "num_samples": 1}, "too few to hold"),
    ):
        with pytest.raises(UserError, match=words):
            diagnose_model(model, tokens_of(VARIED, model.tokenizer), **settings_)
