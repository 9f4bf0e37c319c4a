"""Choosing: every setting against Hugging Face's own classes, the draw against its distribution, the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman.choosing import Chooser, Filters, Rules, choose, probabilities
from elman.choosing import filtered as weights
from elman.config import SamplingConfig
from elman.errors import ConfigError, ElmanError, UserError
from elman.settings import resolve
from elman.text.tokenizers import ByteTokenizer, CharTokenizer

LETTERS = CharTokenizer("abcdefghij")  # 12 tokens, the boundary 0, <unk> 1
UNKNOWN = LETTERS.unknown_id
BYTES = ByteTokenizer()


def chooser(tokens=(), seed=0, tokenizer=LETTERS, num_given=None, **settings) -> Chooser:
    rules = Rules(SamplingConfig(**({"temperature": 1.0} | settings)), tokenizer)
    return Chooser(rules, seed=seed, tokens=tokens, num_given=num_given)


def adjusted(scores, tokens=(), **settings) -> np.ndarray:
    row = np.array(scores, np.float64)
    chooser(tokens, **settings).adjust(row)
    return row


def filtered(scores_BV, filters):
    weights_BV = weights(scores_BV, filters)
    return weights_BV / weights_BV.sum(axis=1, keepdims=True)


# The oracle: transformers.


@pytest.fixture(scope="module")
def theirs():
    from transformers.generation import logits_process

    return logits_process


def kept_by(warper, scores_BV: np.ndarray, dtype) -> np.ndarray:
    scores = warper(torch.zeros(len(scores_BV), 1, dtype=torch.int64), torch.tensor(scores_BV, dtype=dtype))
    return scores.softmax(-1).double().numpy()


def keeps_the_first(scores_V, kept_V) -> bool:
    """Whether nothing that was dropped equals something kept that comes later."""
    equals = [kept_V[scores_V == score] > 0 for score in set(scores_V.tolist())]
    return all((np.diff(kept.astype(int)) <= 0).all() for kept in equals)


WARPERS = {
    "temperature": ("TemperatureLogitsWarper", st.sampled_from([0.05, 0.7, 1.0, 3.5])),
    "top_k": ("TopKLogitsWarper", st.integers(1, 40)),
    "top_p": ("TopPLogitsWarper", st.sampled_from([1e-6, 0.125, 0.5, 0.75, 0.9, 0.999])),
    "min_p": ("MinPLogitsWarper", st.sampled_from([1e-4, 0.05, 0.3, 1.0])),
    "typical_p": ("TypicalLogitsWarper", st.sampled_from([0.03, 0.2, 0.5, 0.9, 0.999])),
    "epsilon_cutoff": ("EpsilonLogitsWarper", st.sampled_from([1e-4, 0.02, 0.3, 0.9])),
    "eta_cutoff": ("EtaLogitsWarper", st.sampled_from([1e-4, 0.02, 0.3, 0.9])),
}


def random_scores(seed, rows, size, has_ties) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(scale=2.5, size=(rows, size))
    # In float32 already, so that both precisions see the same numbers.
    return (scores.round() if has_ties else scores).astype(np.float32)


shapes = {"rows": st.integers(1, 3), "size": st.integers(1, 33), "seed": st.integers(0, 2**32)}


@pytest.mark.parametrize("name", WARPERS)
@given(data=st.data(), **shapes)
def test_every_filter_is_that_of_transformers(theirs, name, data, rows, size, seed):
    warper, values = WARPERS[name]
    value = data.draw(values)
    has_ties = data.draw(st.booleans())
    scores = random_scores(seed, rows, size, has_ties)
    found = filtered(scores.astype(np.float64), Filters(**{name: value}))
    expected = kept_by(getattr(theirs, warper)(value), scores, torch.float64)
    if name == "top_p" and has_ties:  # how many of equals are kept is defined, not which: ours are the first
        assert [keeps_the_first(row, kept) for row, kept in zip(scores, found, strict=True)] == [True] * rows
        found, expected = np.sort(found), np.sort(expected)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    if not has_ties:  # rounding decides between equals
        np.testing.assert_allclose(found, kept_by(getattr(theirs, warper)(value), scores, torch.float32), atol=2e-6)


@given(data=st.data(), **shapes)
def test_all_filters_in_their_order_are_those_of_transformers(theirs, data, rows, size, seed):
    settings = {name: data.draw(st.none() | values) for name, (_, values) in WARPERS.items()}
    settings = {name: value for name, value in settings.items() if value is not None}
    scores = random_scores(seed, rows, size, has_ties=False)
    chain = theirs.LogitsProcessorList(getattr(theirs, WARPERS[name][0])(value) for name, value in settings.items())
    found = filtered(scores.astype(np.float64), Filters(**settings))
    np.testing.assert_allclose(found, kept_by(chain, scores, torch.float64), atol=1e-12)


histories = st.lists(st.integers(2, 11), max_size=25)


@given(tokens=histories, seed=st.integers(0, 2**32), penalty=st.sampled_from([0.3, 1.0, 1.2, 5.0]))
def test_the_repetition_penalty_counts_prompt_and_text(theirs, tokens, seed, penalty):
    scores = random_scores(seed, 1, 12, has_ties=True)
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([tokens], dtype=torch.int64), torch.tensor(scores, dtype=torch.float64)
    )
    expected[0, UNKNOWN] = -math.inf
    np.testing.assert_allclose(adjusted(scores[0], tokens, repetition_penalty=penalty), expected[0], rtol=1e-15)


@given(tokens=histories, size=st.integers(1, 5))
def test_no_n_gram_comes_twice(theirs, tokens, size):
    ids = torch.tensor([tokens], dtype=torch.int64)
    expected = theirs.NoRepeatNGramLogitsProcessor(size)(ids, torch.zeros(1, 12, dtype=torch.float64))[0]
    expected[UNKNOWN] = -math.inf
    assert adjusted(np.zeros(12), tokens, no_repeat_ngram_size=size).tolist() == expected.tolist()


words = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=4, unique=True)


@given(tokens=st.lists(st.integers(2, 4), max_size=6), words=words)
def test_bad_words_are_never_completed(theirs, tokens, words):
    ids = [LETTERS.encode(word).tolist() for word in words]
    history = torch.tensor([tokens], dtype=torch.int64)
    expected = theirs.NoBadWordsLogitsProcessor(ids)(history, torch.zeros(1, 12))[0]
    expected[UNKNOWN] = -math.inf
    assert adjusted(np.zeros(12), tokens, bad_words=words).tolist() == expected.tolist()


@given(tokens=st.lists(st.integers(2, 4), max_size=6), words=words, seed=st.integers(0, 99))
def test_biases_are_added_where_a_text_would_be_completed(theirs, tokens, words, seed):
    biases = np.random.default_rng(seed).integers(-8, 8, len(words)).astype(float)
    listed = [[LETTERS.encode(word).tolist(), bias] for word, bias in zip(words, biases.tolist(), strict=True)]
    history = torch.tensor([tokens], dtype=torch.int64)
    expected = theirs.SequenceBiasLogitsProcessor(listed)(history, torch.zeros(1, 12))[0]
    expected[UNKNOWN] = -math.inf
    bias = [f"{word}={bias}" for word, bias in zip(words, biases, strict=True)]
    assert adjusted(np.zeros(12), tokens, logit_bias=bias).tolist() == expected.tolist()


@pytest.mark.parametrize("drawn", [0, 1, 2, 3])
def test_a_text_does_not_end_before_its_smallest_length(theirs, drawn):
    tokens = [5, 6, *[7] * drawn]
    row = chooser(tokens[:2], min_new_tokens=2)
    for token in tokens[2:]:
        row.append(token)
    scores = np.zeros(12)
    row.adjust(scores)
    processor = theirs.MinNewTokensLengthLogitsProcessor(2, 2, 0)
    expected = processor(torch.tensor([tokens]), torch.zeros(1, 12))[0]
    assert (scores[0] == -math.inf) == (expected[0] == -math.inf) == (drawn < 2)


def test_tokens_can_be_suppressed(theirs):
    expected = theirs.SuppressTokensLogitsProcessor([3, 0])(None, torch.zeros(1, 12))[0]
    expected[UNKNOWN] = -math.inf
    assert adjusted(np.zeros(12), suppress_tokens=(3, 0)).tolist() == expected.tolist()


@given(
    given_tokens=histories,
    drawn=histories,
    seed=st.integers(0, 99),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
)
def test_frequency_and_presence_penalties_count_what_was_drawn(given_tokens, drawn, seed, frequency, presence):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, as the documentation of OpenAI's API defines it."""
    scores = random_scores(seed, 1, 12, has_ties=True)[0].astype(np.float64)
    expected = scores.copy()
    for token in range(12):
        count = drawn.count(token)
        expected[token] -= count * frequency + (count > 0) * presence
    expected[UNKNOWN] = -math.inf
    settings = {"frequency_penalty": frequency, "presence_penalty": presence, "num_given": len(given_tokens)}
    found = adjusted(scores, [*given_tokens, *drawn], **settings)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@given(data=st.data(), tokens=histories, seed=st.integers(0, 2**32))
def test_everything_together_is_the_chain_of_transformers(theirs, data, tokens, seed):
    filters = {name: data.draw(st.none() | values) for name, (_, values) in WARPERS.items()}
    filters = {name: value for name, value in filters.items() if value is not None}
    scores = random_scores(seed, 1, 12, has_ties=False)
    chain = theirs.LogitsProcessorList(
        [
            theirs.SequenceBiasLogitsProcessor([[[5], 2.5], [[4, 3], -1.5]]),
            theirs.RepetitionPenaltyLogitsProcessor(1.3),
            theirs.NoRepeatNGramLogitsProcessor(3),
            theirs.NoBadWordsLogitsProcessor([[6, 7], [8]]),
            theirs.MinNewTokensLengthLogitsProcessor(len(tokens), 1, 0),
            theirs.SuppressTokensLogitsProcessor([UNKNOWN, 9]),
            *(getattr(theirs, WARPERS[name][0])(value) for name, value in filters.items()),
        ]
    )
    ids = torch.tensor([tokens], dtype=torch.int64)
    expected = chain(ids, torch.tensor(scores, dtype=torch.float64)).softmax(-1)
    row = chooser(
        tokens,
        **filters,
        logit_bias={5: 2.5, "cb": -1.5},
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
        bad_words=("ef", "g"),
        min_new_tokens=1,
        suppress_tokens=(9,),
    )
    np.testing.assert_allclose(probabilities(scores, [row]), expected, atol=1e-12)


# Distributions.

anything = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 5e-324, 1e-300, 1e-3, 1.0, 1e6, 1.7e308]),
        "top_k": st.integers(0, 14),
        "top_p": st.floats(1e-9, 1.0),
        "min_p": st.floats(0, 1.0),
        "typical_p": st.floats(1e-9, 1.0),
        "epsilon_cutoff": st.floats(0, 1.0, exclude_max=True),
        "eta_cutoff": st.floats(0, 1.0, exclude_max=True),
        "repetition_penalty": st.sampled_from([1e-300, 0.5, 1.0, 2.0, 1e300]),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 11), st.floats(-1e308, 1e308), max_size=2),
    }
)


@given(
    logits=st.lists(st.floats(-(2.0**127), 2.0**127, width=32) | st.just(-math.inf), min_size=12, max_size=12),
    tokens=histories,
    settings=anything,
)
def test_whatever_is_given_it_is_a_distribution_over_what_is_allowed(logits, tokens, settings):
    if max(logits[:UNKNOWN] + logits[UNKNOWN + 1 :]) == -math.inf:
        return
    row = chooser(tokens, num_given=0, **settings)
    found = probabilities(np.array([logits], np.float32), [row])[0]
    assert found.dtype == np.float64
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(1.0, abs=1e-12)
    assert found[UNKNOWN] == 0
    assert not found[np.isneginf(logits)].any()
    assert found[choose(np.array([logits], np.float32), [row])[0]] > 0


def test_temperature_goes_to_both_ends():
    scores = np.array([[1.0, 2.0, 1.9]])
    for temperature in (0.0, 5e-324, 1e-9):
        assert filtered(scores, Filters(temperature=temperature)).tolist() == [[0.0, 1.0, 0.0]]
    np.testing.assert_allclose(filtered(scores, Filters(temperature=1e9)), 1 / 3, atol=1e-8)
    assert filtered(np.array([[2.0, 5.0, 5.0]]), Filters(temperature=0.0)).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_damaged_logits_are_an_error_in_any_row(bad):
    logits = np.zeros((2, 12), np.float32)
    for temperature in (0.0, 1.0):
        for row in (0, 1):
            damaged = logits.copy()
            damaged[row, :2] = bad
            damaged[row, 2:] = -math.inf
            with pytest.raises(ElmanError, match="logits hold NaN or infinity"):
                choose(damaged, [chooser(temperature=temperature)] * 2)


def test_ruling_out_everything_is_one_clear_line():
    with pytest.raises(UserError, match="no token is left"):
        choose(np.zeros((1, 12)), [chooser(suppress_tokens=tuple(range(12)))])


def test_the_logits_given_are_not_changed():
    logits = np.random.default_rng(0).normal(size=(2, 12))
    before = logits.copy()
    choose(logits, [chooser([2, 3], repetition_penalty=2, top_p=0.5, top_k=3, bad_words=("a",))] * 2)
    assert (logits == before).all()


# Rows.


@given(st.integers(0, 2**32), st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_rows_of_any_settings_choose_side_by_side_as_alone(seed, kinds):
    variants = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.6, "repetition_penalty": 1.5},
        {"typical_p": 0.5, "presence_penalty": 1.0},
        {"no_repeat_ngram_size": 2, "temperature": 2.0},
    ]
    logits = random_scores(seed, len(kinds), 12, has_ties=False)
    rows = [chooser([2, 3, 2], seed=i, num_given=1, **variants[kind]) for i, kind in enumerate(kinds)]
    together = probabilities(logits, rows)
    for i, row in enumerate(rows):
        assert (probabilities(logits[i : i + 1], [row])[0] == together[i]).all()
    assert choose(logits, rows) == [choose(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_a_draw_depends_on_the_seed_and_the_position_alone():
    one, other = chooser([2, 3], seed=5), chooser([7], seed=5)
    other.append(9)
    assert one.uniform == other.uniform
    assert len({chooser(range(2, 2 + n), seed=s).uniform for n in range(5) for s in range(5)}) == 25


def test_draws_follow_the_distribution():
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]]))
    tokenizer = CharTokenizer("ab")
    rows = [chooser(seed=seed, tokenizer=tokenizer) for seed in range(4000)]
    drawn = np.bincount(choose(np.repeat(logits, len(rows), axis=0), rows), minlength=4)
    expected = np.array([0.5, 0.0, 0.125, 0.125]) / 0.75  # <unk> stands for no text
    assert drawn[1] == 0
    chi_squared = ((drawn - 4000 * expected)[[0, 2, 3]] ** 2 / (4000 * expected[[0, 2, 3]])).sum()
    assert chi_squared < 13.8  # the 0.999 quantile for two degrees of freedom


@given(histories, histories)
def test_a_text_that_is_tried_is_the_text_itself(tokens, more):
    settings = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2, "min_new_tokens": 3}
    tried, itself = chooser(tokens, **settings).extended(more), chooser(tokens, **settings)
    for token in more:
        itself.append(token)
    one, other = np.ones(12), np.ones(12)
    tried.adjust(one)
    itself.adjust(other)
    assert one.tolist() == other.tolist()


# What cannot be.

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@pytest.mark.parametrize(
    "name",
    [*Filters._fields[:1], *Filters._fields[2:], *PENALTIES, "length_penalty"],
)
def test_settings_that_are_no_number_or_out_of_range_are_refused_by_name(name):
    limits = {"length_penalty": (), "frequency_penalty": (-2.1, 2.1), "presence_penalty": (-2.1, 2.1)}
    for value in (math.nan, math.inf, -math.inf, *limits.get(name, (-0.1,))):
        with pytest.raises(ConfigError, match=f"sampling.{name}") as caught:
            resolve({"sampling": {name: value, "num_beams": 2 if name == "length_penalty" else 1}})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": -1}, "sampling.top_k"),
        ({"no_repeat_ngram_size": -1}, "sampling.no_repeat_ngram_size"),
        ({"bad_words": [""]}, "sampling.bad_words"),
        ({"suppress_tokens": [-1]}, "sampling.suppress_tokens"),
        ({"logit_bias": ["a"]}, "'a' is no TEXT=BIAS"),
        ({"logit_bias": ["a=x"]}, "sampling.logit_bias"),
        ({"logit_bias": ["a=nan"]}, "sampling.logit_bias"),
        ({"logit_bias": ["=1"]}, "sampling.logit_bias"),
        ({"logit_bias": 5}, "sampling.logit_bias"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, r"min_new_tokens \(5\) is more than max_new_tokens \(4\)"),
        ({"length_penalty": 2.0}, "length_penalty has no meaning"),
        ({"num_beams": 3, "top_k": 4}, "top_k has no meaning for num_beams 3"),
        ({"num_beams": 0}, "sampling.num_beams"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve({"sampling": settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suppress_tokens": (12,)}, "token 12 is not in the vocabulary; accepted: 0 to 11"),
        ({"logit_bias": {12: 1.0}}, "token 12 is not in the vocabulary"),
        ({"logit_bias": {"aX": 1.0}}, "the vocabulary lacks something of 'aX'"),
    ],
)
def test_what_the_vocabulary_lacks_is_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        chooser(**settings)


def test_a_bad_word_that_cannot_be_drawn_needs_no_ban():
    assert adjusted(np.zeros(12), bad_words=("aX",)).tolist() == adjusted(np.zeros(12)).tolist()


def test_biases_are_written_in_three_ways():
    listed, mapped, typed = (
        resolve({"sampling": {"logit_bias": value}}).sampling.logit_bias
        for value in ([["a", 1.5], [7, -2]], {"a": 1.5, 7: -2}, ["a=1.5", "b=c=-2"])
    )
    assert listed == mapped == (("a", 1.5), (7, -2.0))
    assert typed == (("a", 1.5), ("b=c", -2.0))
    config = resolve({"sampling": {"logit_bias": {"a": 1.5, 7: -2}, "bad_words": ["x"], "suppress_tokens": [1]}})
    assert resolve(config.to_dict()) == config


def test_a_word_in_bytes_is_banned_as_a_whole():
    text = "ü"
    first, second = BYTES.encode(text).tolist()
    scores = adjusted(np.zeros(257), [first], tokenizer=BYTES, bad_words=(text,))
    assert np.flatnonzero(np.isneginf(scores)).tolist() == [second]


@pytest.mark.parametrize("top_p", [1e-17, 1e-300, 0.2])
def test_of_equal_tokens_top_p_keeps_the_first(top_p):
    kept = filtered(np.zeros((2, 7)), Filters(top_p=top_p))
    np.testing.assert_array_equal(kept[:, 0] > 0, [True, True])
    np.testing.assert_array_equal((kept > 0).sum(axis=1), [2, 2] if top_p == 0.2 else [1, 1])


def test_the_largest_number_below_one_draws_a_token(monkeypatch):
    monkeypatch.setattr(Chooser, "uniform", 1 - 2.0**-53)
    for size in (3, 5, 6, 7, 11):  # some totals would be rounded up to
        logits = np.full((1, LETTERS.size), -math.inf)
        logits[0, :size] = 0.0
        logits[0, UNKNOWN] = -math.inf
        assert choose(logits, [chooser()]) == [size - 1]


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, True),
        ({"bad_words": ("a",), "suppress_tokens": (3,), "min_new_tokens": 2}, True),
        ({"bad_words": ("ab",)}, False),
        ({"logit_bias": {"a": 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"no_repeat_ngram_size": 3}, False),
        ({"typical_p": 0.9}, False),
        ({"epsilon_cutoff": 0.1}, False),
        ({"eta_cutoff": 0.1}, False),
    ],
)
def test_compiled_code_takes_what_looks_at_one_row_alone(settings, is_known):
    rules = Rules(SamplingConfig(**settings), LETTERS)
    assert (rules.drawing is not None) == is_known
    if rules.drawing is not None:
        assert UNKNOWN in rules.drawing.never
