"""Figures: summed first, divided once, and honest where one does not exist."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.metrics import AccuracyTally, Score, block_bootstrap, perplexity


@given(st.integers(1, 100_000), st.integers(1, 10**9))
def test_a_uniform_model_has_its_vocabulary_as_perplexity(vocabulary, tokens):
    score = Score(tokens * math.log(vocabulary), tokens, tokens, tokens)
    assert score.perplexity == pytest.approx(vocabulary, rel=1e-12)
    assert score.bits_per_char == pytest.approx(math.log2(vocabulary), rel=1e-12, abs=1e-12)


def test_each_figure_divides_by_its_own_count():
    score = Score(nats_total=60 * math.log(2), tokens=12, chars=20, bytes=30)
    assert score.nats_per_token == pytest.approx(5 * math.log(2))
    assert score.perplexity == pytest.approx(32.0)
    assert score.bits_per_char == pytest.approx(3.0)
    assert score.bits_per_byte == pytest.approx(2.0)


def test_the_sum_decides_and_not_the_mean_of_means():
    parts = [Score(10.0, 10, 10, 10), Score(2.0, 1, 1, 1)]
    whole = Score(12.0, 11, 11, 11)
    assert whole.nats_per_token == 12 / 11
    assert whole.nats_per_token != sum(part.nats_per_token for part in parts) / 2


@pytest.mark.parametrize("chars", [None, 0])
def test_without_a_text_there_are_no_bits_per_character(chars):
    score = Score(5.0, 3, chars, chars)
    assert score.bits_per_char is None
    assert score.bits_per_byte is None
    assert score.to_dict()["bits_per_char"] is None


def test_a_perplexity_that_overflows_is_infinite_and_flagged():
    assert perplexity(1000.0) == math.inf
    assert perplexity(709.0) < math.inf
    figures = Score(2000.0, 2, 2, 2).to_dict()
    assert figures["perplexity"] is None
    assert figures["perplexity_is_infinite"] is True
    assert figures["nats_per_token"] == 1000.0
    assert [key for key in figures if key.endswith(("_is_infinite", "_is_nan"))] == ["perplexity_is_infinite"]


@pytest.mark.parametrize(("total", "flag"), [(math.inf, "is_infinite"), (math.nan, "is_nan")])
def test_a_total_that_is_not_finite_is_null_with_a_flag(total, flag):
    figures = Score(total, 2, 2, 2).to_dict()
    for name in ("nats_total", "nats_per_token", "perplexity", "bits_per_char", "bits_per_byte"):
        assert figures[name] is None
        assert figures[f"{name}_{flag}"] is True


@given(st.floats(0, 1e6), st.integers(1, 10**6))
def test_the_figures_are_valid_json(total, tokens):
    figures = Score(total, tokens, tokens, None).to_dict()
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert list(figures)[:8] == [
        "tokens", "chars", "bytes", "nats_total", "nats_per_token", "perplexity", "bits_per_char", "bits_per_byte",
    ]  # fmt: skip


def test_words_make_tokenizers_comparable():
    by_char, by_word = Score(30.0, 60, 60, 60, words=10), Score(30.0, 12, None, None, words=10)
    assert by_char.perplexity_per_word == by_word.perplexity_per_word == pytest.approx(math.exp(3.0))
    assert by_char.perplexity != by_word.perplexity
    assert Score(30.0, 12, None, None).to_dict()["perplexity_per_word"] is None


def correlated_blocks(random: np.random.Generator, num_blocks: int) -> np.ndarray:
    """The nats of blocks of 100 tokens that are surprising together: one common part for each block."""
    return (2 + random.normal(0, 0.5, (num_blocks, 1)) + random.normal(0, 1, (num_blocks, 100))).sum(axis=1)


def test_the_interval_is_that_of_the_mean_over_blocks_and_covers_the_truth_as_often_as_it_says():
    random, num_blocks = np.random.default_rng(5), 100
    expected_width = 2 * 1.96 * math.sqrt((0.5**2 + 1 / 100) / num_blocks)
    covered, widths = 0, []
    for _ in range(40):
        found = block_bootstrap(correlated_blocks(random, num_blocks), [100] * num_blocks)
        widths.append(found.high - found.low)
        covered += found.low <= 2 <= found.high
    assert np.mean(widths) == pytest.approx(expected_width, rel=0.05)
    assert covered >= 34  # 38 of 40 are expected; less than 34 has a chance of one in 700


def test_the_interval_repeats_and_needs_blocks():
    nats = correlated_blocks(np.random.default_rng(1), 20)
    first = block_bootstrap(nats, [100] * 20)
    assert first == block_bootstrap(nats, [100] * 20)
    assert (first.num_blocks, first.num_resamples, first.seed, first.level) == (20, 10_000, 0, 0.95)
    wider = block_bootstrap(nats, [100] * 20, level=0.99)
    assert wider.low < first.low < first.high < wider.high
    assert block_bootstrap(nats[:9], [100] * 9) is None
    assert block_bootstrap([*nats[:19], math.inf], [100] * 20) is None


def test_blocks_of_unequal_length_weigh_by_their_tokens():
    # Every block has the same mean, so that every draw has it too, whatever the lengths.
    tokens = list(range(10, 30))
    found = block_bootstrap([1.5 * count for count in tokens], tokens)
    assert (found.low, found.high) == (pytest.approx(1.5), pytest.approx(1.5))


def test_calibration_equals_a_plain_count():
    random = np.random.default_rng(3)
    confidence = random.random(2000)
    right = (random.random(2000) < confidence**2).astype(float)  # too sure everywhere
    tally = AccuracyTally()
    for start in range(0, 2000, 300):
        here = slice(start, start + 300)
        tally.add(right[here], np.maximum(right[here], 0.5), confidence[here])
    found = tally.result()
    assert found.at_1 == pytest.approx(right.mean())
    assert found.at_5 == pytest.approx(np.maximum(right, 0.5).mean())
    error = 0.0
    for low in range(15):
        inside = (confidence >= low / 15) & (confidence < (low + 1) / 15)
        error += inside.sum() / 2000 * abs(right[inside].mean() - confidence[inside].mean())
    assert found.expected_calibration_error == pytest.approx(error)
    assert found.expected_calibration_error > 0.1
    assert sum(one.tokens for one in found.calibration) == 2000
    assert json.loads(json.dumps(found.to_dict()))["calibration"][0].keys() == {"confidence", "accuracy", "tokens"}


def test_a_model_that_is_right_as_often_as_it_says_is_calibrated():
    tally = AccuracyTally()
    tally.add(np.array([1.0, 1.0, 1.0, 0.0]), np.ones(4), np.full(4, 0.75))
    tally.add(np.array([1.0]), np.ones(1), np.ones(1))  # certain and right: the last bin holds 1 too
    assert tally.result().expected_calibration_error == 0.0
    assert [one.tokens for one in tally.result().calibration] == [4, 1]
