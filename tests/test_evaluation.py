"""Evaluation: every token once, however the text is cut; known answers; baselines."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from elman.config import TokenizerConfig
from elman.data.prepare import Split, tokenize_text
from elman.errors import UserError
from elman.evaluation import Interrupted, Window, evaluate_split
from elman.metrics import Score, perplexity
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, kind_names, model_config, model_config_class
from elman.text.building import train_tokenizer
from elman.text.sources import Piece
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


def test_only_some_logits_are_made_at_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    network, split = model(tokenizer), tokenize_text(TEXT, tokenizer)
    expected = evaluate_split(network, split, tokenizer, num_streams=3).score.nats_total
    monkeypatch.setattr("elman.evaluation._MAX_LOGITS", 12 * tokenizer.size)
    seen: list[int] = []
    nll = network.head.nll

    def noted(features: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        seen.append(features.shape[0] * features.shape[1])
        return nll(features, *others, **options)

    monkeypatch.setattr(network.head, "nll", noted)
    found = evaluate_split(network, split, tokenizer, num_streams=3).score.nats_total
    assert found == pytest.approx(expected, rel=1e-12)
    assert max(seen) == 12
    assert sum(seen) >= len(TEXT)


@pytest.mark.parametrize(("size", "stride"), [(8, 3), (8, 8), (5, 1), (10_000, 1)])
@pytest.mark.parametrize("policy", ["carried", "reset"])
def test_windows_score_every_token_once_given_what_the_window_holds(
    size: int, stride: int, policy: str, tokenizer: Tokenizer
) -> None:
    network, split = model(tokenizer), documents_split(tokenizer)
    tokens = split.tokens
    borders = [0, len(tokens) - 1]
    if policy == "reset":
        borders = [*np.flatnonzero(tokens == tokenizer.boundary_id).tolist(), len(tokens) - 1]
    expected = 0.0
    for begin, end in pairwise(borders):
        scored, last = begin, min(begin + size, end)
        while scored < end:
            first = max(begin, last - size)
            read = step_by_step(network, tokens[first : last + 1])
            given = step_by_step(network, tokens[first : scored + 1]) if scored > first else 0.0
            expected += read - given
            scored, last = last, min(last + stride, end)
    for rows in (1, 4):
        result = evaluate_split(
            network, split, tokenizer, state_policy=policy, window=Window(size, stride), num_streams=rows
        )
        assert result.score.nats_total == pytest.approx(expected, rel=1e-11)
        assert result.score.tokens == len(tokens) - 1
    assert result.state_policy == ("reset" if policy == "reset" else "window")
    assert (result.to_dict()["window"], result.to_dict()["stride"]) == (size, stride)


def test_a_window_larger_than_the_text_changes_nothing_and_a_smaller_one_costs_history(tokenizer: Tokenizer) -> None:
    network, split = model(tokenizer), tokenize_text(TEXT, tokenizer)
    carried = evaluate_split(network, split, tokenizer).score.nats_total
    whole = evaluate_split(network, split, tokenizer, window=Window(10_000, 5_000)).score.nats_total
    assert whole == pytest.approx(carried, rel=1e-12)
    assert evaluate_split(network, split, tokenizer, window=Window(4, 4)).score.nats_total != pytest.approx(carried)


@pytest.mark.parametrize(
    ("size", "stride", "accepted"),
    [(4, 5, "a stride of 1 to the window"), (4, 0, "a stride of 1 to the window"), (0, 0, "one token or more")],
)
def test_a_window_that_would_leave_tokens_out_is_refused(size: int, stride: int, accepted: str) -> None:
    with pytest.raises(UserError, match=f"accepted: {accepted}"):
        Window(size, stride)


@pytest.mark.parametrize("how", [{}, {"state_policy": "reset", "num_streams": 3}, {"window": Window(8, 2)},
                                 {"num_streams": 5}, {"segment_length": 3}])  # fmt: skip
def test_surprisal_stands_where_its_token_stands(how: dict[str, Any], tokenizer: Tokenizer) -> None:
    network, split = model(tokenizer), documents_split(tokenizer)
    nats = np.full(len(split.tokens) - 1, np.nan)
    result = evaluate_split(network, split, tokenizer, surprisal=nats, **how)
    assert nats.sum() == pytest.approx(result.score.nats_total, rel=1e-12)
    if "window" not in how and how.get("num_streams") != 5:
        reset_at = tokenizer.boundary_id if "state_policy" in how else None
        for position in (0, 7, 30, len(nats) - 1):
            up_to = [step_by_step(network, split.tokens[: position + more], reset_at) for more in (1, 2)]
            assert nats[position] == pytest.approx(up_to[1] - up_to[0], abs=1e-9)


def test_blocks_divide_the_text_evenly_and_hold_all_of_it(tokenizer: Tokenizer) -> None:
    network, split = model(tokenizer), tokenize_text(TEXT * 3, tokenizer)
    nats = np.empty(len(split.tokens) - 1)
    result = evaluate_split(network, split, tokenizer, surprisal=nats, segment_length=50)
    num_blocks = len(nats) // 32
    assert len(result.block_nats) == num_blocks < 100
    assert max(result.block_tokens) - min(result.block_tokens) <= 1
    starts = np.concatenate([[0], np.cumsum(result.block_tokens)])
    for block, (start, end) in enumerate(pairwise(starts.tolist())):
        assert result.block_nats[block] == pytest.approx(nats[start:end].sum())
    assert result.interval is not None
    assert result.interval.low < result.score.nats_per_token < result.interval.high
    assert evaluate_split(network, tokenize_text("the cat", tokenizer), tokenizer).interval is None


def test_accuracy_equals_a_count_of_the_most_probable_tokens(tokenizer: Tokenizer) -> None:
    network, split = model(tokenizer), tokenize_text(TEXT, tokenizer)
    tokens = torch.from_numpy(split.tokens.astype(np.int64))
    with torch.no_grad():
        log_probs = network(tokens[None, :-1], network.initial_state(1)).logits_BTV[0].log_softmax(-1)
    first, five = log_probs.topk(1).indices, log_probs.topk(5).indices
    plain = evaluate_split(network, split, tokenizer)
    for length in (None, 7):
        found = evaluate_split(network, split, tokenizer, with_accuracy=True, segment_length=length)
        assert found.accuracy is not None
        assert found.accuracy.at_1 == pytest.approx((first == tokens[1:, None]).any(1).double().mean().item())
        assert found.accuracy.at_5 == pytest.approx((five == tokens[1:, None]).any(1).double().mean().item())
        mean = sum(one.confidence * one.tokens for one in found.accuracy.calibration) / len(tokens[1:])
        assert mean == pytest.approx(log_probs.amax(-1).exp().mean().item())
        assert found.score.nats_total == pytest.approx(plain.score.nats_total, rel=1e-12)
    assert plain.accuracy is None
    assert "accuracy_at_1" not in plain.to_dict()


def test_among_equals_a_fair_draw_decides(tokenizer: Tokenizer) -> None:
    network = model(tokenizer)
    for parameter in network.head.parameters():
        parameter.data.zero_()
    found = evaluate_split(network, tokenize_text(TEXT, tokenizer), tokenizer, with_accuracy=True).accuracy
    assert found is not None
    assert found.at_1 == pytest.approx(1 / tokenizer.size)
    assert found.at_5 == pytest.approx(5 / tokenizer.size)
    assert found.expected_calibration_error == pytest.approx(0.0, abs=1e-12)


def test_a_model_that_says_unknown_also_has_to_say_which(tokenizer: Tokenizer) -> None:
    words = train_tokenizer(TokenizerConfig(level="word", max_size=8), [Piece(TEXT, True)])
    network = build_model(model_config({"kind": "lstm"}), words.size, seed=1, dtype=torch.float64)
    text = "the zebra sat on the okapi and the zebra"
    split = tokenize_text(text, words)
    result = evaluate_split(network, split, words)
    unknown = int((split.tokens == words.unknown_id).sum())
    assert result.num_unknown == unknown >= 3
    kinds = {word for word in text.split() if word not in words.vocabulary}
    assert result.num_unknown_kinds == len(kinds)
    more = unknown * math.log(len(kinds))
    assert result.adjusted_perplexity == pytest.approx(math.exp((result.score.nats_total + more) / result.score.tokens))
    assert result.adjusted_perplexity > result.score.perplexity
    assert result.to_dict()["unknown_rate"] == pytest.approx(unknown / 9)
    known = evaluate_split(network, tokenize_text("the the", words), words)
    assert known.adjusted_perplexity == known.score.perplexity


def test_how_many_unknown_words_there_were_cannot_be_known_once_they_are_unk(tokenizer: Tokenizer) -> None:
    words = train_tokenizer(TokenizerConfig(level="word"), [Piece(TEXT, True)])
    network = build_model(model_config({"kind": "elman"}), words.size, seed=1, dtype=torch.float64)
    result = evaluate_split(network, tokenize_text("the <unk> sat", words), words)
    assert (result.num_unknown, result.adjusted_perplexity) == (1, None)
    assert result.to_dict()["adjusted_perplexity"] is None
