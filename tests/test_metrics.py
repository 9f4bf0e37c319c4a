"""Figures: summed first, divided once, and honest where one does not exist."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.metrics import Score, perplexity


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
