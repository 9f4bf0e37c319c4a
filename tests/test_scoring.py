"""Surprisal of texts as they arrive, by line, and side by side, against the network's own log-probabilities."""

from __future__ import annotations

import math
import random
import statistics
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elman.config import TokenizerConfig
from elman.errors import TextError, UserError
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.scoring import (
    RunningQuantile,
    TokenScore,
    by_line,
    most_surprising,
    score_stream,
    score_texts,
)
from elman.text.bpe import BPETokenizer
from elman.text.sources import Piece
from elman.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer

TEXT = "the cat sat on the mat\nand the dog sat by the cat\n\nthé end of it"


def bundle(tokenizer: Tokenizer, kind: str = "lstm") -> Bundle:
    config = model_config({"kind": kind, "embedding_size": 6, "hidden_size": 8})
    network = build_model(config, tokenizer.size, seed=3, dtype=torch.float64, boundary_id=tokenizer.boundary_id)
    return Bundle(network, tokenizer, {})


def tokenizers() -> dict[str, Tokenizer]:
    pieces = [Piece(TEXT, starts_document=True)]
    return {
        "char": CharTokenizer(TEXT),
        "byte": ByteTokenizer(),
        "word": WordTokenizer.train(TokenizerConfig(level="word"), pieces),
        "bpe": BPETokenizer.train(TokenizerConfig(level="bpe", max_size=270), pieces),
    }


BUNDLES = {level: bundle(tokenizer) for level, tokenizer in tokenizers().items()}


def surprisals(model: Bundle, ids: list[int]) -> list[float]:
    """The definition, one token after the other."""
    state, before, nats = model.network.initial_state(1), model.tokenizer.boundary_id, []
    with torch.no_grad():
        for token in ids:
            logits_BTV, state = model.network(torch.tensor([[before]]), state)
            nats.append(-logits_BTV[0, 0].log_softmax(0)[token].item())
            before = token
    return nats


def cut(text: str, places: list[int]) -> list[Piece]:
    borders = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    parts = [text[a:b] for a, b in pairwise(borders)]
    return [Piece(part, starts_document=False) for part in parts if part]


@pytest.mark.parametrize("level", BUNDLES)
@settings(max_examples=15, deadline=None)
@given(places=st.lists(st.integers(0, 100), max_size=8))
def test_a_text_costs_the_same_wherever_it_is_cut(level, places):
    model = BUNDLES[level]
    found = list(score_stream(model, cut(TEXT, places)))
    expected = surprisals(model, model.tokenizer.encode(TEXT).tolist())
    assert [token.nats for token in found] == pytest.approx(expected, abs=1e-10)
    assert [token.position for token in found] == list(range(len(expected)))
    assert "".join(token.text for token in found) == model.tokenizer.decode(model.tokenizer.encode(TEXT))


def test_a_token_is_given_out_before_the_next_piece_is_asked_for():
    asked = []

    def pieces():
        for part in ("the ", "ca", "t"):
            asked.append(part)
            yield Piece(part, starts_document=False)

    stream = score_stream(BUNDLES["char"], pieces())
    for _ in range(4):
        next(stream)
    assert asked == ["the "]
    words = score_stream(BUNDLES["word"], pieces())
    asked.clear()
    assert next(words).text == "the"
    assert asked == ["the "]
    assert [token.text for token in words] == [" cat"]  # a word that goes on in the next piece is one word


def test_the_boundary_between_documents_is_scored_and_the_first_is_given():
    model = BUNDLES["char"]
    pieces = [Piece("the cat", starts_document=True), Piece("sat", starts_document=True)]
    found = list(score_stream(model, pieces))
    ids = [*model.tokenizer.encode("the cat").tolist(), 0, *model.tokenizer.encode("sat").tolist()]
    assert [token.nats for token in found] == pytest.approx(surprisals(model, ids), abs=1e-10)
    assert [token.ends_document for token in found] == [False] * 7 + [True] + [False] * 3
    assert [line.text for line in by_line(found)] == ["the cat", "sat"]


def test_unknown_text_is_a_token_where_there_is_one_for_it():
    found = list(score_stream(BUNDLES["char"], [Piece("c#t", starts_document=False)]))
    assert [token.text for token in found] == ["c", "<unk>", "t"]
    with pytest.raises(TextError, match="lacks 1 character of"):
        list(score_stream(BUNDLES["char"], [Piece("#", starts_document=False)], unknown="error"))


@pytest.mark.parametrize("level", BUNDLES)
def test_lines_sum_up_their_tokens(level):
    tokens = list(score_stream(BUNDLES[level], [Piece(TEXT, starts_document=False)]))
    lines = list(by_line(tokens))
    if level != "bpe":  # whose tokens may hold a line end amid other text
        assert [line.text for line in lines] == TEXT.split("\n")
    assert sum(line.tokens for line in lines) == len(tokens)
    assert math.fsum(line.nats for line in lines) == pytest.approx(math.fsum(t.nats for t in tokens))
    assert max(line.highest for line in lines) == max(t.nats for t in tokens)
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    assert all(line.nats_per_token == line.nats / line.tokens for line in lines)


def test_memory_does_not_grow_with_the_text():
    def peak(num_pieces: int) -> int:
        pieces = (Piece("the cat sat on the mat\n" * 20, starts_document=False) for _ in range(num_pieces))
        tracemalloc.start()
        assert len(most_surprising(score_stream(BUNDLES["char"], pieces), 3)) == 3
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(2)
    assert peak(60) < peak(4) + 50_000  # 60 pieces are 27,600 tokens, each an object of over 100 bytes


def scored(nats: list[float]) -> list[TokenScore]:
    return [TokenScore(i, chr(97 + i % 26), value) for i, value in enumerate(nats)]


@settings(max_examples=60, deadline=None)
@given(nats=st.lists(st.integers(0, 9), max_size=40), count=st.integers(0, 6), context=st.integers(1, 7))
def test_the_most_surprising_places_are_those_of_a_sort(nats, count, context):
    tokens = scored([float(value) for value in nats])
    places = most_surprising(iter(tokens), count, context)
    expected = sorted(tokens, key=lambda token: (-token.nats, token.position))[:count]
    assert [place.score for place in places] == expected
    text = "".join(token.text for token in tokens)
    for place in places:
        at = place.score.position
        assert place.before == text[max(0, at - context) : at]
        assert place.after == text[at + 1 : at + 1 + context]


def test_the_running_quantile_is_that_of_the_last_numbers():
    quantile, draw, numbers = RunningQuantile(0.9, size=50), random.Random(1), []
    assert quantile.value == math.inf
    for _ in range(200):
        numbers.append(round(draw.random(), 2))  # with ties
        quantile.add(numbers[-1])
        last = sorted(numbers[-50:])
        assert quantile.value == last[math.ceil(0.9 * len(last)) - 1]
    assert statistics.mean(value <= quantile.value for value in numbers[-50:]) >= 0.9
    for share in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(UserError, match="between 0 and 1"):
            RunningQuantile(share)


@pytest.mark.parametrize("level", ["char", "word"])
@pytest.mark.parametrize("ends", [False, True])
def test_texts_side_by_side_cost_what_each_costs_alone(level, ends):
    model = BUNDLES[level]
    texts = ["the cat", "the", "sat on the mat and the dog", "it", "the cat"] * 20  # more than one batch
    found = score_texts(model, texts, prompt="and the", ends=ends)
    given_ids = model.tokenizer.encode("and the").tolist()
    for text, result in zip(texts, found, strict=True):
        ids = model.tokenizer.encode(text).tolist() + [model.tokenizer.boundary_id] * ends
        expected = math.fsum(surprisals(model, given_ids + ids)[len(given_ids) :])
        assert result.nats == pytest.approx(expected, abs=1e-9)
        assert (result.text, result.tokens, result.chars) == (text, len(ids), len(text))


def test_a_text_longer_than_what_is_read_at_once():
    model = BUNDLES["char"]
    long = "the cat sat on " * 150
    (short_score, long_score) = score_texts(model, ["the", long])
    assert long_score.nats == pytest.approx(math.fsum(surprisals(model, model.tokenizer.encode(long).tolist())))
    assert short_score.nats == pytest.approx(math.fsum(surprisals(model, model.tokenizer.encode("the").tolist())))


def test_a_text_of_nothing_is_refused_by_its_number():
    with pytest.raises(TextError, match="text 2 is empty"):
        score_texts(BUNDLES["char"], ["the", ""])
    assert score_texts(BUNDLES["char"], []) == []
    assert np.isfinite(score_texts(BUNDLES["char"], [""], ends=True)[0].nats)
