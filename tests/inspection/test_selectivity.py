"""Search and scores against trying everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.inspection.selectivity import BLOCK, Bootstrap, Ranked, block_means, block_sums, interval, ranks, score_of


def f1(said: np.ndarray, true: np.ndarray) -> float:
    return 2 * (said & true).sum() / max(1, said.sum() + true.sum())


def ranks_by_comparison(values: np.ndarray) -> np.ndarray:
    below = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)
    return below + (equal - 1) / 2


@given(st.integers(0, 10_000))
def test_the_best_threshold_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 6, (40, 3)).astype(np.float32) / rng.integers(1, 4)
    labels = (rng.random(40) < 0.4).astype(np.float32)
    labels[:2] = 0, 1
    best = max(
        f1(sign * values[:, unit] > sign * threshold, labels > 0)
        for unit in range(3)
        for sign in (1, -1)
        for below, above in zip(np.unique(values[:, unit]), np.unique(values[:, unit])[1:], strict=False)
        for threshold in [(below + above) / 2]
    )
    chosen = Ranked(values).best(labels, is_graded=False)
    assert chosen.score == pytest.approx(best, rel=1e-6)
    sums = block_sums(values[:, chosen.unit].astype(float), labels, chosen, is_graded=False)
    assert float(score_of(sums.sum(0))) == pytest.approx(best, rel=1e-6)


@given(st.integers(0, 10_000))
def test_the_rank_correlation_with_ties(seed):
    rng = np.random.default_rng(seed)
    values, labels = rng.integers(0, 9, (50, 4)).astype(np.float32), rng.integers(0, 5, 50).astype(np.float32)
    expected = [np.corrcoef(ranks_by_comparison(column), ranks_by_comparison(labels))[0, 1] for column in values.T]
    chosen = Ranked(values).best(labels, is_graded=True)
    assert chosen.score == pytest.approx(max(map(abs, expected)), abs=1e-5)
    sums = block_sums(values[:, chosen.unit].astype(float), labels, chosen, is_graded=True)
    assert float(score_of(sums.sum(0))) == pytest.approx(chosen.score, abs=1e-5)
    assert ranks(labels) == pytest.approx(ranks_by_comparison(labels))


def test_many_units_are_searched_in_pieces():
    rng = np.random.default_rng(0)
    values, labels = rng.standard_normal((300, 300)).astype(np.float32), (rng.random(300) < 0.5).astype(np.float32)
    values[:, 257] = labels
    assert Ranked(values).best(labels, is_graded=False).unit == 257
    values[:, 257] = -labels + 0.1 * rng.standard_normal(300)
    chosen = Ranked(values).best(labels, is_graded=True)
    assert (chosen.unit, chosen.sign) == (257, -1)


def test_the_last_block_may_be_shorter():
    values = np.arange(BLOCK + 3.0)
    assert block_means(values).tolist() == [values[:BLOCK].mean(), values[BLOCK:].mean()]


def test_the_interval_is_that_of_the_mean_for_independent_blocks():
    rng = np.random.default_rng(2)
    values = rng.standard_normal(400)
    low, high = interval(Bootstrap(400, rng).means(values))
    error = values.std() / np.sqrt(400)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.2 * error)


def test_where_a_score_is_not_defined_it_is_zero():
    assert float(score_of(np.zeros(3))) == 0.0
    assert float(score_of(np.zeros(6))) == 0.0
