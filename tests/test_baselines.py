"""Baselines: each equals its definition, on the same text."""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
from collections import Counter

import numpy as np
import pytest
import torch

from elman.baselines import NGRAM_ORDERS, baselines
from elman.config import TokenizerConfig
from elman.data.prepare import Dataset, Split, tokenize_text
from elman.evaluation import evaluate_split
from elman.models.kinds import build_model, model_config
from elman.text.building import train_tokenizer
from elman.text.sources import Piece, StringSource
from elman.text.tokenizers import Tokenizer

TEXT = "the cat sat on the mat; the dog sat on the log.\n" * 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(), [Piece(TEXT + ",", True)])


def test_baselines_equal_their_definitions(tokenizer: Tokenizer) -> None:
    held_out = "the dog sat on the cat.\n"
    train, test = (tokenize_text(text, tokenizer) for text in (TEXT, held_out))
    dataset = Dataset(tokenizer, train, None, test, "test", "", ())
    found = baselines(dataset, test).scores
    assert found["uniform"].bits_per_char == pytest.approx(math.log2(tokenizer.size))
    counts, size = Counter(TEXT), len(TEXT) + tokenizer.size
    expected = -sum(math.log2((counts[c] + 1) / size) for c in held_out) / len(held_out)
    assert found["unigram"].bits_per_char == pytest.approx(expected)
    data = held_out.encode()
    sizes = {
        "gzip": len(gzip.compress(data, 9)),
        "bzip2": len(bz2.compress(data)),
        "xz": len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
        "zstd": len(pytest.importorskip("zstandard").ZstdCompressor(level=22).compress(data)),
    }
    for name, size in sizes.items():
        assert found[name].bits_per_byte == pytest.approx(8 * size / len(data))


def test_compressors_are_left_out_where_tokens_lose_text() -> None:
    words = train_tokenizer(TokenizerConfig(level="word"), StringSource(TEXT))
    split = tokenize_text(TEXT, words)
    found = baselines(Dataset(words, split, None, None, "test", "", ()), split).scores
    assert set(found) == {"uniform", "unigram", *(f"{order}-gram" for order in NGRAM_ORDERS)}


def test_compressors_see_the_bytes_of_a_byte_model_even_where_they_are_no_text() -> None:
    data = bytes(range(256)) * 3
    tokenizer = train_tokenizer(TokenizerConfig(level="byte"), [])
    tokens = np.array([tokenizer.boundary_id, *data])
    split = Split(tokens, len(data), len(data), 1, 0)
    found = baselines(Dataset(tokenizer, split, None, None, "test", "", ()), split).scores
    assert found["bzip2"].bits_per_byte == pytest.approx(8 * len(bz2.compress(data)) / len(data))


@pytest.mark.parametrize("policy", ["carried", "reset"])
def test_an_ngram_is_the_model_of_that_kind_counted_on_the_training_part(policy: str, tokenizer: Tokenizer) -> None:
    texts = ("the dog sat.", "a cat", "the mat; the log")
    documents = [Piece(text, True) for text in texts]
    ids = np.concatenate(list(tokenizer.encode_pieces(documents)))
    train, test = tokenize_text(TEXT, tokenizer), Split(ids, *[sum(map(len, texts))] * 2, 3, 0)
    found = baselines(Dataset(tokenizer, train, None, test, "test", "", ()), test, state_policy=policy)
    assert found.notices == ()
    for order in NGRAM_ORDERS:
        settings = model_config({"kind": "ngram", "order": order})
        network = build_model(settings, tokenizer.size, seed=None, dtype=torch.float64)
        network.count(train.tokens, reset_at_documents=policy == "reset")
        expected = evaluate_split(network, test, tokenizer, state_policy=policy).score
        assert found.scores[f"{order}-gram"].nats_total == expected.nats_total
    assert found.scores["6-gram"].nats_total < found.scores["2-gram"].nats_total < found.scores["unigram"].nats_total


def test_without_the_library_zstd_is_left_out_and_missed(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("elman.baselines.find_spec", lambda name: None)
    split = tokenize_text(TEXT, tokenizer)
    found = baselines(Dataset(tokenizer, split, None, None, "test", "", ()), split)
    assert "zstd" not in found.scores
    assert any("elman[data]" in notice for notice in found.notices)


def test_of_a_long_training_part_the_end_is_counted_and_said(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("elman.baselines._MAX_COUNTED", 50)
    split = tokenize_text(TEXT, tokenizer)
    found = baselines(Dataset(tokenizer, split, None, None, "test", "", ()), split)
    assert found.notices == (f"n-grams are counted on the last 50 tokens of {len(split.tokens)}",)
