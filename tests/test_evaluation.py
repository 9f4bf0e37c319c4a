"""Evaluation: every token once, however the text is cut; known answers; baselines."""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
from collections import Counter

import numpy as np
import pytest
import torch

from elman.config import TokenizerConfig
from elman.data.prepare import Dataset, Split, tokenize_text
from elman.evaluation import Interrupted, baselines, evaluate_split
from elman.metrics import Score, perplexity
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, kind_names, model_config, model_config_class
from elman.text.building import train_tokenizer
from elman.text.sources import Piece, StringSource
from elman.text.tokenizers import Tokenizer

TEXT = "the cat sat on the mat; the dog sat on the log.\n" * 5
DOCUMENTS = ["a cat", "the dog sat on the log, and the cat sat on a mat", "", "mat", "on the mat sat the dog"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(), [Piece(TEXT + ",", True)])


def model(tokenizer: Tokenizer, kind: str = "lstm", dtype: torch.dtype = torch.float64) -> LanguageModel:
    """A small model with large weights, so that history matters."""
    settings = {"hidden_size": 16, "embedding_size": 16, "num_layers": 2, "dropout": 0.5}
    known = model_config_class(kind).model_fields
    settings = {name: value for name, value in settings.items() if name in known}
    network = build_model(model_config({"kind": kind, **settings}), tokenizer.size, seed=3, dtype=dtype)
    for parameter in network.parameters():
        parameter.data.mul_(1.5)  # not more: a chaotic network makes whole nats of the last digit
    return network


def documents_split(tokenizer: Tokenizer) -> Split:
    """Several documents with a boundary before each."""
    ids = [np.append(tokenizer.boundary_id, tokenizer.encode(text)) for text in DOCUMENTS if text]
    texts = [text for text in DOCUMENTS if text]
    return Split(np.concatenate(ids), sum(map(len, texts)), sum(map(len, texts)), len(texts), 0)


def step_by_step(network: LanguageModel, tokens: np.ndarray, reset_at: int | None = None) -> float:
    """The oracle: one token at a time, softmax in plain Python floats."""
    total, state = 0.0, network.initial_state(1)
    with torch.no_grad():
        for token, target in zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True):
            if token == reset_at:
                state = network.initial_state(1)
            logits, state = network(torch.tensor([[token]]), state)
            row = logits[0, 0].tolist()
            largest = max(row)
            total += largest + math.log(math.fsum(math.exp(x - largest) for x in row)) - row[target]
    return total


@pytest.mark.parametrize("kind", kind_names())
def test_equals_a_loop_over_single_tokens_whatever_the_segment_length(kind: str, tokenizer: Tokenizer) -> None:
    network, split = model(tokenizer, kind), tokenize_text(TEXT, tokenizer)
    expected = step_by_step(network, split.tokens)
    for length in (1, 7, 16, 100, 10_000, None):
        result = evaluate_split(network, split, tokenizer, segment_length=length)
        assert result.score.nats_total == pytest.approx(expected, rel=1e-12)
        assert result.score.tokens == len(TEXT) == result.score.chars
    in_float32 = model(tokenizer, kind, torch.float32)
    in_float32.load_state_dict(network.state_dict())
    single = evaluate_split(in_float32, split, tokenizer, segment_length=13)
    assert single.score.nats_total == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 50])
def test_under_reset_documents_are_rows_and_the_batch_changes_nothing(num_rows: int, tokenizer: Tokenizer) -> None:
    network, split = model(tokenizer), documents_split(tokenizer)
    expected = step_by_step(network, split.tokens, reset_at=tokenizer.boundary_id)
    for length in (1, 4, None):
        result = evaluate_split(
            network, split, tokenizer, state_policy="reset", num_streams=num_rows, segment_length=length
        )
        assert result.score.nats_total == pytest.approx(expected, rel=1e-12)
        assert result.score.tokens == len(split.tokens) - 1
    carried = evaluate_split(network, split, tokenizer)
    assert carried.score.nats_total == pytest.approx(step_by_step(network, split.tokens), rel=1e-12)
    assert carried.score.nats_total != pytest.approx(expected, rel=1e-6)
    assert carried.score.tokens == result.score.tokens


def test_parallel_streams_count_every_token_once(tokenizer: Tokenizer) -> None:
    network, split = model(tokenizer), tokenize_text(TEXT, tokenizer)
    targets = split.tokens[1:]
    lengths = [len(part) for part in np.array_split(targets, 7)]
    expected, start = 0.0, 0
    for length in lengths:
        expected += step_by_step(network, split.tokens[start : start + length + 1])
        start += length
    result = evaluate_split(network, split, tokenizer, num_streams=7, segment_length=5)
    assert (result.score.tokens, result.num_streams) == (len(targets), 7)
    assert result.score.nats_total == pytest.approx(expected, rel=1e-12)
    # More streams than tokens are not possible; the number used is the one recorded.
    assert evaluate_split(network, tokenize_text("cat", tokenizer), tokenizer, num_streams=7).num_streams == 3


def test_evaluation_changes_nothing_and_repeats_to_the_bit(tokenizer: Tokenizer) -> None:
    network, split = model(tokenizer, dtype=torch.float32), tokenize_text(TEXT, tokenizer)
    before = {name: p.clone() for name, p in network.named_parameters()}
    first, second = (evaluate_split(network, split, tokenizer) for _ in range(2))
    assert first == second
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in network.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_uniform_model_has_perplexity_v_exactly(dtype: torch.dtype, tokenizer: Tokenizer) -> None:
    network = model(tokenizer, dtype=dtype)
    for parameter in network.head.parameters():
        parameter.data.zero_()
    score = evaluate_split(network, tokenize_text(TEXT, tokenizer), tokenizer).score
    assert score.nats_per_token == pytest.approx(math.log(tokenizer.size), abs=1e-14)
    assert score.perplexity == pytest.approx(tokenizer.size, rel=1e-13)
    assert score.bits_per_char == pytest.approx(math.log2(tokenizer.size), abs=1e-12)


def test_bits_are_undefined_where_tokens_lose_text_and_the_rest_goes_on(tokenizer: Tokenizer) -> None:
    network = model(tokenizer)
    result = evaluate_split(network, tokenize_text("the çat sat", tokenizer, unknown="token"), tokenizer).to_dict()
    assert (result["unknown_tokens"], result["tokens"]) == (1, 11)
    assert result["bits_per_char"] is None
    assert result["nats_per_token"] > 0
    cut = evaluate_split(network, tokenize_text(TEXT, tokenizer), tokenizer, max_tokens=20).score
    assert (cut.tokens, cut.chars) == (20, None)


def test_a_perplexity_that_overflows_is_infinite() -> None:
    score = Score(nats_total=1e6, tokens=10, chars=10, bytes=10)
    assert score.perplexity == math.inf
    assert score.to_dict()["perplexity"] is None
    assert score.to_dict()["perplexity_is_infinite"] is True
    assert perplexity(math.log(7)) == pytest.approx(7)


def test_the_caller_can_stop_it(tokenizer: Tokenizer) -> None:
    with pytest.raises(Interrupted):
        evaluate_split(model(tokenizer), tokenize_text(TEXT, tokenizer), tokenizer, should_stop=lambda: True)


def test_baselines_equal_their_definitions(tokenizer: Tokenizer) -> None:
    held_out = "the dog sat on the cat.\n"
    train, test = (tokenize_text(text, tokenizer) for text in (TEXT, held_out))
    dataset = Dataset(tokenizer, train, None, test, "test", "", ())
    found = baselines(dataset, test)
    assert found["uniform"].bits_per_char == pytest.approx(math.log2(tokenizer.size))
    counts, size = Counter(TEXT), len(TEXT) + tokenizer.size
    expected = -sum(math.log2((counts[c] + 1) / size) for c in held_out) / len(held_out)
    assert found["unigram"].bits_per_char == pytest.approx(expected)
    data = held_out.encode()
    sizes = {
        "gzip": len(gzip.compress(data, 9)),
        "bzip2": len(bz2.compress(data)),
        "xz": len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
    }
    for name, size in sizes.items():
        assert found[name].bits_per_byte == pytest.approx(8 * size / len(data))


def test_compressors_are_left_out_where_tokens_lose_text() -> None:
    words = train_tokenizer(TokenizerConfig(level="word"), StringSource(TEXT))
    split = tokenize_text(TEXT, words)
    assert set(baselines(Dataset(words, split, None, None, "test", "", ()), split)) == {"uniform", "unigram"}


def test_compressors_see_the_bytes_of_a_byte_model_even_where_they_are_no_text() -> None:
    data = bytes(range(256)) * 3
    tokenizer = train_tokenizer(TokenizerConfig(level="byte"), [])
    tokens = np.array([tokenizer.boundary_id, *data])
    split = Split(tokens, len(data), len(data), 1, 0)
    found = baselines(Dataset(tokenizer, split, None, None, "test", "", ()), split)
    assert found["bzip2"].bits_per_byte == pytest.approx(8 * len(bz2.compress(data)) / len(data))
