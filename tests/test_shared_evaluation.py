"""Processes that share an evaluation get, each of them, what one process gets alone: every figure, every token once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from elman.config import TokenizerConfig
from elman.data.pairs import Pairs
from elman.data.prepare import Split
from elman.evaluation import Evaluation, Window, evaluate_pairs, evaluate_split
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config
from elman.text.building import train_tokenizer
from elman.text.sources import Piece
from elman.text.tokenizers import Tokenizer
from elman.translation import judge_pairs

T = TypeVar("T")

DOCUMENTS = [f"{'the cat sat on the mat; ' * (i % 4)}the dog {i * i % 7} sat on log {i % 5}.\n" for i in range(23)]
PAIRS = [(f"{i % 5}{i % 3}a", f"{i * 7 % 11}" * (1 + i % 3)) for i in range(26)]


class Member:
    """A thread that stands for a process: it adds up together with the others, as ``torch.distributed`` does."""

    def __init__(self, rank: int, size: int, said: list[tuple[float, ...]], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._said, self._barrier = rank, size, said, barrier

    def sum(self, *values: float) -> tuple[float, ...]:
        self._said[self.rank] = values
        self._barrier.wait(timeout=60)
        added = tuple(map(math.fsum, zip(*self._said, strict=True)))
        self._barrier.wait(timeout=60)
        return added


def together(size: int, work: Callable[[Member], T]) -> list[T]:
    """What each of several members gets."""
    said, barrier = [()] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [Member(rank, size, said, barrier) for rank in range(size)]))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(), [Piece("".join(DOCUMENTS) + "0123456789abc", True)])


@pytest.fixture(scope="module")
def network(tokenizer: Tokenizer) -> LanguageModel:
    config = model_config({"kind": "lstm", "hidden_size": 14, "embedding_size": 10, "num_layers": 2})
    network = build_model(config, tokenizer.size, seed=3, dtype=torch.float64)
    for parameter in network.parameters():
        parameter.data.mul_(2.0)
    return network


@pytest.fixture(scope="module")
def split(tokenizer: Tokenizer) -> Split:
    ids = [np.append(tokenizer.boundary_id, tokenizer.encode(text)) for text in DOCUMENTS]
    num_chars = sum(map(len, DOCUMENTS))
    return Split(np.concatenate(ids), num_chars, num_chars, len(DOCUMENTS), 0)


def check_equal(found: Evaluation, expected: Evaluation) -> None:
    assert found.score.tokens == expected.score.tokens
    assert found.score.nats_total == pytest.approx(expected.score.nats_total, rel=1e-12)
    assert (found.num_unknown, found.score.chars) == (expected.num_unknown, expected.score.chars)
    assert found.block_tokens == expected.block_tokens
    assert found.block_nats == pytest.approx(expected.block_nats, rel=1e-12)
    assert found.interval is not None
    assert expected.interval is not None
    assert found.interval.to_dict() == pytest.approx(expected.interval.to_dict(), rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 4, 50])
@pytest.mark.parametrize(
    "how",
    [{"state_policy": "reset"}, {"state_policy": "reset", "window": Window(9, 4)}, {"window": Window(16, 5)}],
    ids=["documents", "windows of documents", "windows"],
)
def test_documents_and_windows_cost_the_same_whoever_reads_them(
    how: dict[str, Any], rows: int, size: int, network: LanguageModel, tokenizer: Tokenizer, split: Split
) -> None:
    num_targets = len(split.tokens) - 1
    alone = np.empty(num_targets)
    expected = evaluate_split(network, split, tokenizer, with_accuracy=True, surprisal=alone, **how)
    nats = [np.full(num_targets, np.nan) for _ in range(size)]
    found = together(
        size,
        lambda member: evaluate_split(
            network,
            split,
            tokenizer,
            num_streams=rows,
            segment_length=20,
            with_accuracy=True,
            surprisal=nats[member.rank],
            team=member,
            **how,
        ),
    )
    assert expected.accuracy is not None
    assert 0.02 < expected.accuracy.at_1 < 0.98
    for one, its_nats in zip(found, nats, strict=True):
        check_equal(one, expected)
        assert one.accuracy is not None
        (figures, bins), (its, its_bins) = ((a.to_dict(), a.calibration) for a in (expected.accuracy, one.accuracy))
        for name in ("accuracy_at_1", "accuracy_at_5", "expected_calibration_error"):
            assert its[name] == pytest.approx(figures[name], rel=1e-12)
        assert [b.tokens for b in its_bins] == [b.tokens for b in bins]
        np.testing.assert_allclose(its_nats, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_streams_side_by_side_cost_the_same_whoever_reads_them(
    size: int, network: LanguageModel, tokenizer: Tokenizer, split: Split
) -> None:
    expected = evaluate_split(network, split, tokenizer, num_streams=5)
    for one in together(size, lambda member: evaluate_split(network, split, tokenizer, num_streams=5, team=member)):
        check_equal(one, expected)


@pytest.fixture(scope="module")
def pairs(tokenizer: Tokenizer) -> Split:
    ids = [np.append(tokenizer.boundary_id, tokenizer.encode(text)) for pair in PAIRS for text in pair]
    num_chars = sum(map(len, (text for pair in PAIRS for text in pair)))
    return Split(np.concatenate(ids), num_chars, num_chars, len(ids), 0)


def test_the_interval_of_pairs_is_drawn_from_examples(
    network: LanguageModel, tokenizer: Tokenizer, pairs: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = Pairs(pairs.tokens, 4, tokenizer.boundary_id)
    nats = []
    for example in range(examples.num_examples):
        source, target = examples.source(example), examples.target(example)
        read = [tokenizer.boundary_id, *source, tokenizer.boundary_id, *target, tokenizer.boundary_id]
        with torch.no_grad():
            logits_BTV, _ = network(torch.tensor([read[:-1]]), network.initial_state(1))
        cost_T = -logits_BTV[0].log_softmax(-1)[range(len(read) - 1), read[1:]]
        nats.append(cost_T[len(source) + 1 :].sum().item())
    lengths = [len(target) + 1 for _, target in PAIRS]
    found = evaluate_pairs(network, pairs, tokenizer, num_rows=3)
    assert found.block_nats == pytest.approx(nats, rel=1e-12)
    assert list(found.block_tokens) == lengths
    interval = found.interval
    assert interval is not None
    assert interval.low < found.score.nats_per_token < interval.high
    # Where there are more examples than blocks, a block is as many neighbours as the others, one more or less.
    monkeypatch.setattr("elman.evaluation._MAX_BLOCKS", 4)
    few = evaluate_pairs(network, pairs, tokenizer)
    blocks = [[i for i in range(26) if i * 4 // 26 == block] for block in range(4)]
    assert few.block_nats == pytest.approx([sum(nats[i] for i in block) for block in blocks], rel=1e-12)
    assert list(few.block_tokens) == [sum(lengths[i] for i in block) for block in blocks]
    assert few.interval is None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [1, 4, 50])
def test_pairs_cost_the_same_whoever_reads_them(
    rows: int, size: int, network: LanguageModel, tokenizer: Tokenizer, pairs: Split
) -> None:
    expected = evaluate_pairs(network, pairs, tokenizer)
    written = judge_pairs(network, tokenizer, Pairs(pairs.tokens, 64, tokenizer.boundary_id))
    found = together(size, lambda member: evaluate_pairs(network, pairs, tokenizer, num_rows=rows, team=member))
    for one in found:
        check_equal(one, expected)
    examples = Pairs(pairs.tokens, rows, tokenizer.boundary_id)
    examples.batches()  # drawn once, before threads share it
    for report in together(size, lambda member: judge_pairs(network, tokenizer, examples, team=member)):
        assert report.overall.examples == 26
        assert vars(report.overall) == pytest.approx(vars(written.overall), rel=1e-12)
        assert [group[:2] for group in report.by_target_length] == [group[:2] for group in written.by_target_length]
