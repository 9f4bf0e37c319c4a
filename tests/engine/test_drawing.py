"""Compiled drawing is the one in NumPy, token for token; a text at once is the text step by step."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numba import njit

from elman.choosing import Chooser, Rules, choose, filtered
from elman.config import SamplingConfig
from elman.engine import Drawing, Engine, draw_rows, drawing
from elman.errors import ElmanError, UserError
from elman.text.tokenizers import CharTokenizer

from .conftest import VOCAB_SIZE, build, traced_configs, widened

TOKENIZER = CharTokenizer([chr(300 + i) for i in range(VOCAB_SIZE - 2)])
BOUNDARY = TOKENIZER.boundary_id


@cache
def engine_of(kind="lstm", num_threads=1, precision="float32") -> Engine:
    network = build(widened(traced_configs(kind)[-1]))
    for parameter in network.parameters():
        parameter.data.mul_(3)  # far from uniform
    return Engine(network, num_threads=num_threads, precision=precision)


def test_the_exponential_is_right_to_the_last_digits():
    @njit
    def run(x, y):
        for i in range(x.size):
            y[i] = drawing.exp(x[i])

    x = np.concatenate([-(10.0 ** np.linspace(-18, 2.84, 20_000)), np.linspace(-700, 0, 20_000)])
    y = np.empty_like(x)
    run(x, y)
    np.testing.assert_allclose(y, np.exp(x), rtol=5e-16)
    ends = np.array([0.0, -0.0, -math.inf, -800.0, -745.0])
    run(ends, y[:5])
    np.testing.assert_array_equal(y[:4], [1.0, 1.0, 0.0, 0.0])
    assert 0 < y[4] < 1e-320


SETTINGS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 5e-324, 0.3, 0.8, 1.0, 2.5, 1e300])},
    optional={
        "top_k": st.integers(0, 90),
        "top_p": st.sampled_from([1e-17, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        "suppress_tokens": st.lists(st.integers(0, VOCAB_SIZE - 2), max_size=9),
        "min_new_tokens": st.integers(0, 2),
    },
)


@given(
    settings=SETTINGS,
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([0.0, 0.5, 3.0, 60.0]),
    rows=st.integers(1, 4),
)
@example(settings={"temperature": 1.0, "top_p": 1e-17}, seed=0, scale=0.0, rows=2)
def test_tokens_are_those_of_numpy(settings, seed, scale, rows):
    rng = np.random.default_rng(seed)
    logits_BV = rng.normal(scale=scale, size=(rows, VOCAB_SIZE)).astype(np.float32)
    if seed % 2:
        logits_BV = logits_BV.round()  # with ties
    logits_BV[:, rng.integers(0, VOCAB_SIZE, 3)] = -math.inf
    rules = Rules(SamplingConfig(**settings), TOKENIZER)
    choosers = [Chooser(rules, seed=seed + row) for row in range(rows)]
    expected = choose(logits_BV, choosers)
    uniforms_B = np.array([chooser.uniform for chooser in choosers])
    may_end_B = [not chooser.num_before_end for chooser in choosers]
    assert draw_rows(logits_BV, rules.drawing, uniforms_B, may_end_B) == expected


@given(
    settings=SETTINGS.filter(lambda settings: settings["temperature"]),
    seed=st.integers(0, 2**32),
    size=st.integers(1, 40),
)
def test_every_token_is_drawn_as_often_as_its_weight_says(settings, seed, size):
    """Between neighbouring cumulative weights lies one token, and on both sides of each border the right one."""
    rng = np.random.default_rng(seed)
    logits_BV = rng.normal(scale=2.0, size=(1, size)).astype(np.float32)
    known = {name: settings[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in settings}
    rules = Rules(SamplingConfig(**known), TOKENIZER)
    (weights_V,) = filtered(logits_BV.astype(np.float64), rules.filters)
    cumulative_V = weights_V.cumsum() / weights_V.sum()
    kept = np.flatnonzero(weights_V)
    gap = np.diff(cumulative_V[kept], prepend=0.0).min() / 4
    if gap < 1e-12:
        return  # its borders cannot be told apart
    how = Drawing(0, **known)
    for below, token in zip([0.0, *cumulative_V[kept][:-1]], kept.tolist(), strict=True):
        for uniform in (below + gap, cumulative_V[token] - gap):
            assert draw_rows(logits_BV, how, np.array([uniform]), [True]) == [token]


def test_the_largest_number_below_one_draws_a_token():
    logits_BV = np.zeros((1, VOCAB_SIZE), np.float32)
    assert draw_rows(logits_BV, Drawing(0), np.array([1 - 2.0**-53]), [True]) == [VOCAB_SIZE - 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(bad):
    logits_BV = np.zeros((2, VOCAB_SIZE), np.float32)
    logits_BV[1, 70] = bad
    with pytest.raises(ElmanError, match="NaN or infinity"):
        draw_rows(logits_BV, Drawing(0), np.zeros(2), [True, True])
    with pytest.raises(ElmanError, match="NaN or infinity"):
        draw_rows(np.full((1, VOCAB_SIZE), -math.inf, np.float32), Drawing(0), np.zeros(1), [True])


def test_a_row_without_a_token_is_an_error():
    how = Drawing(0, never=tuple(range(1, VOCAB_SIZE)))
    logits_BV = np.zeros((1, VOCAB_SIZE), np.float32)
    assert draw_rows(logits_BV, how, np.zeros(1), [True]) == [0]
    with pytest.raises(UserError, match="no token is left"):
        draw_rows(logits_BV, how, np.zeros(1), [False])


# A text at once.

MANY = [
    ("lstm", 1, "float32"),
    ("lstm", 2, "float32"),
    ("lstm", 3, "float32"),
    ("lstm", 2, "int8"),
    ("window", 1, "float32"),
    ("window", 2, "float32"),
    ("mamba", 2, "float32"),
]


def step_by_step(engine, logits_V, state, how, uniforms_T, num_before_end=0):
    """What the loop has to give: the tokens, and what comes after them."""
    tokens = []
    for position, uniform in enumerate(uniforms_T):
        may_end = position >= num_before_end
        (token,) = draw_rows(logits_V[None], how, np.array([uniform]), [may_end])
        tokens.append(token)
        if token == how.boundary_id:
            break
        logits_BV, state = engine.step([token], state)
        logits_V = logits_BV[0]
    return tokens, logits_V, state


@pytest.mark.parametrize(("kind", "num_threads", "precision"), MANY)
@pytest.mark.parametrize("how", [Drawing(-1, temperature=0.0), Drawing(3), Drawing(3, (5, 6), 0.9, 20, 0.9, 0.01)])
def test_a_text_at_once_has_the_bits_of_the_text_step_by_step(kind, num_threads, precision, how):
    alone, together = engine_of(kind, 1, precision), engine_of(kind, num_threads, precision)
    logits_BV, start = alone.step([1], alone.initial_state(1))
    uniforms_T = np.random.default_rng(2).random(60)
    tokens, logits_V, state = step_by_step(alone, logits_BV[0], start, how, uniforms_T, 7)
    drawn = together.draw(logits_BV[0], start, how, uniforms_T, num_before_end=7)
    assert drawn.tokens == tokens
    assert drawn.error is None
    np.testing.assert_array_equal(drawn.logits_V, logits_V)
    np.testing.assert_array_equal(drawn.state.numbers, state.numbers)
    np.testing.assert_array_equal(drawn.state.ints, state.ints)
    read = [token for token in tokens if token != how.boundary_id]
    again_V, again = together.read(read, start)
    np.testing.assert_array_equal(again_V, logits_V)
    np.testing.assert_array_equal(again.numbers, state.numbers)


def test_the_boundary_ends_a_text_and_is_not_read():
    engine = engine_of()
    logits_V = np.zeros(VOCAB_SIZE, np.float32)
    logits_V[9] = 100.0
    start = engine.initial_state(1)
    drawn = engine.draw(logits_V, start, Drawing(9), np.full(5, 0.5))
    assert drawn.tokens == [9]
    np.testing.assert_array_equal(drawn.logits_V, logits_V)
    np.testing.assert_array_equal(drawn.state.numbers, start.numbers)
    assert len(engine.draw(logits_V, start, Drawing(9), np.full(5, 0.5), num_before_end=2).tokens) >= 2


def test_what_was_drawn_before_an_error_is_there():
    engine = engine_of()
    logits_V = np.zeros(VOCAB_SIZE, np.float32)
    drawn = engine.draw(logits_V * math.nan, engine.initial_state(1), Drawing(0), np.zeros(3))
    assert drawn.tokens == []
    assert "NaN or infinity" in str(drawn.error)
    how = Drawing(VOCAB_SIZE - 1, never=tuple(range(VOCAB_SIZE - 1)))
    drawn = engine.draw(logits_V, engine.initial_state(1), how, np.zeros(3), num_before_end=1)
    assert drawn.tokens == []
    assert "no token is left" in str(drawn.error)


def test_no_tokens_leave_everything_as_it_is():
    engine = engine_of()
    logits_BV, state = engine.step([1], engine.initial_state(1))
    drawn = engine.draw(logits_BV[0], state, Drawing(0), np.zeros(0))
    assert drawn.tokens == []
    np.testing.assert_array_equal(drawn.logits_V, logits_BV[0])
    np.testing.assert_array_equal(drawn.state.numbers, state.numbers)


def test_the_callers_arrays_stay_as_they_are():
    engine = engine_of("window")
    logits_BV, state = engine.step([1], engine.initial_state(1))
    kept = logits_BV.copy(), state.numbers.copy(), state.ints.copy()
    engine.draw(logits_BV[0], state, Drawing(0), np.full(8, 0.3))
    for before, after in zip(kept, (logits_BV, state.numbers, state.ints), strict=True):
        np.testing.assert_array_equal(before, after)


def test_wrong_tokens_and_states_are_refused():
    engine = engine_of("window")
    state = engine.initial_state(1)
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine.read([1, VOCAB_SIZE, 2], state)
    with pytest.raises(UserError, match="no token to read"):
        engine.read([], state)
    with pytest.raises(UserError, match="2 texts: give those of one"):
        engine.read([1], engine.initial_state(2))
    for wrong_logits in (np.zeros(VOCAB_SIZE - 1), np.zeros((1, VOCAB_SIZE))):
        with pytest.raises(UserError, match="logits of the shape"):
            engine.draw(wrong_logits, state, Drawing(0), np.zeros(2))
    for how in (Drawing(-2), Drawing(VOCAB_SIZE), Drawing(0, (-1,)), Drawing(0, (3, VOCAB_SIZE))):
        with pytest.raises(UserError, match="outside the vocabulary; accepted: 0 to 76"):
            draw_rows(np.zeros((1, VOCAB_SIZE)), how, np.zeros(1), [True])
    wrong = type(state)(state.numbers, state.ints + 1000)
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine.draw(np.zeros(VOCAB_SIZE, np.float32), wrong, Drawing(-1), np.zeros(2))
