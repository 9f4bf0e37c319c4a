"""Student's quantiles against closed forms, Welch's interval against its own special cases and by simulation."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.comparison.statistics import (
    Repeated,
    all_pairs_confidence,
    difference,
    growth_exponent,
    student_quantile,
)

CUMULATIVE = {  # of Student's t, in closed form
    1: lambda t: 0.5 + math.atan(t) / math.pi,
    2: lambda t: 0.5 + t / (2 * math.sqrt(2 + t * t)),
    3: lambda t: 0.5 + (t / math.sqrt(3) / (1 + t * t / 3) + math.atan(t / math.sqrt(3))) / math.pi,
    4: lambda t: 0.5 + 3 / 8 * t / math.sqrt(1 + t * t / 4) * (1 - t * t / (1 + t * t / 4) / 12),
}


@pytest.mark.parametrize("degrees", CUMULATIVE)
@given(probability=st.floats(0.501, 0.9995))
def test_quantiles_are_the_inverse_of_the_closed_forms(degrees, probability):
    assert CUMULATIVE[degrees](student_quantile(probability, degrees)) == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize(("degrees", "value"), [(5, 2.570582), (10, 2.228139), (30, 2.042272), (100, 1.983972)])
def test_quantiles_of_the_usual_table(degrees, value):
    assert student_quantile(0.975, degrees) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("degrees", [1e4, 1e6])
def test_with_many_degrees_of_freedom_it_is_the_normal_one(degrees):
    assert student_quantile(0.9995, degrees) == pytest.approx(NormalDist().inv_cdf(0.9995), abs=5e-3)


@given(st.floats(0.55, 0.999), st.floats(1, 60), st.floats(0.01, 30))
def test_quantiles_fall_with_the_degrees_of_freedom(probability, degrees, more):
    assert student_quantile(probability, degrees + more) < student_quantile(probability, degrees)


def test_with_equal_spreads_and_numbers_it_is_the_classical_interval():
    one, other = (1.0, 2.0, 3.0), (11.0, 12.0, 13.0)
    found = difference(Repeated(other), Repeated(one), 0.95)
    half = 2.776445 * math.sqrt(2 * 1.0 / 3)  # Student's t with 4 degrees of freedom, variance 1
    assert (found.mean, found.low, found.high) == pytest.approx((10.0, 10.0 - half, 10.0 + half), abs=1e-5)
    assert found.is_certain


def test_against_a_count_it_is_the_interval_of_one_sample():
    values = (1.0, 1.2, 1.4)
    found = difference(Repeated(values), Repeated((1.1,), has_chance=False), 0.95)
    half = 4.302653 * stdev(values) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((fmean(values) - 1.1 - half, fmean(values) - 1.1 + half), abs=1e-5)


def test_one_seed_says_nothing_of_the_spread_but_two_counts_need_none():
    lone, several = Repeated((1.0,)), Repeated((1.0, 2.0))
    assert difference(lone, several, 0.95).is_certain is None
    assert lone.deviation is None
    counts = [Repeated((value,), has_chance=False) for value in (1.0, 1.5)]
    found = difference(*counts, 0.95)
    assert (found.low, found.high, found.is_certain) == (-0.5, -0.5, True)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=5), st.lists(st.floats(-5, 5), min_size=2, max_size=5))
def test_the_interval_turns_with_the_order_and_widens_with_the_confidence(one, other):
    there, back = (difference(Repeated(tuple(a)), Repeated(tuple(b)), 0.95) for a, b in ((one, other), (other, one)))
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)
    wider = difference(Repeated(tuple(one)), Repeated(tuple(other)), 0.99)
    assert wider.low <= there.low <= there.mean <= there.high <= wider.high


def test_equal_means_are_told_apart_no_more_often_than_promised():
    rng = np.random.default_rng(1)
    certain = 0
    for _ in range(600):
        one, other = rng.normal(0, 1.0, 4), rng.normal(0, 3.0, 3)
        certain += bool(difference(Repeated(tuple(one)), Repeated(tuple(other)), 0.90).is_certain)
    assert 0.04 < certain / 600 < 0.14


def test_all_pairs_share_the_doubt():
    assert all_pairs_confidence(2, 0.95) == pytest.approx(0.95)
    assert all_pairs_confidence(4, 0.95) == pytest.approx(1 - 0.05 / 6)
    assert all_pairs_confidence(0, 0.95) == all_pairs_confidence(1, 0.95) == pytest.approx(0.95)


@given(st.floats(-2, 3), st.floats(0.01, 100))
def test_the_exponent_of_a_power_is_found(exponent, factor):
    sizes = (10, 100, 1000)
    assert growth_exponent(sizes, [factor * size**exponent for size in sizes]) == pytest.approx(exponent, abs=1e-9)
