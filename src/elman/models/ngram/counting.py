"""From a text to the tables of an n-gram model: count by sorting, then smooth.

An n-gram of k tokens is a pair of numbers, its context of k - 1 tokens and the token that follows; so is a context, the
context without its oldest token and that token. Each pair becomes one integer, and sorting these integers counts them:
order after order, whatever the order and the vocabulary are, with nothing looked up by its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elman.config import NgramConfig
from elman.models.ngram.tables import Ids, Reals, Tables, assemble, uniform_tables

BACKOFF_FACTOR = 0.4
"""What stupid backoff multiplies by for each token of context given up (Brants et al. 2007)."""

_EQUAL_DISCOUNT = 0.5
"""Where counts of counts say nothing: half a count, the middle of what a discount can be."""


@dataclass(frozen=True)
class Counts:
    """All n-grams of a text. Contexts are numbered within their length, those of length 0 being one."""

    vocab_size: int
    contexts: list[Ids]
    """For lengths 1, 2 and on: parent * V + oldest token of each context, sorted."""
    ngrams: list[Ids]
    """For orders 1, 2 and on: context * V + next token of each n-gram, sorted."""
    counts: list[Ids]
    """How often each of these occurs."""
    beginnings: list[Ids]
    """For orders 1, 2 and on: the n-grams, one by one and unsorted, that a text begins with."""

    def lower(self, order: int) -> Ids:
        """For each n-gram of an order above 1, which one of the order below it is without its oldest token."""
        return np.searchsorted(self.ngrams[order - 2], self.shortened(order))

    def shortened(self, order: int) -> Ids:
        """The n-grams of an order above 1 without their oldest token, as integers of the order below."""
        contexts, tokens = np.divmod(self.ngrams[order - 1], self.vocab_size)
        return self.contexts[order - 2][contexts] // self.vocab_size * self.vocab_size + tokens

    def context_of(self, order: int) -> Ids:
        """The context of each n-gram of an order."""
        return self.ngrams[order - 1] // self.vocab_size


def build_tables(
    tokens: NDArray[np.integer],
    config: NgramConfig,
    vocab_size: int,
    *,
    reset_token: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[Tables, list[str]]:
    """Count a text and smooth the counts.

    Args:
        tokens: the text, its boundary first. The first token is context only.
        config: order and smoothing.
        vocab_size: V.
        reset_token: the boundary token, where each document is a text of its own; none: contexts reach over it.
        poll: called between the orders; what it raises ends the counting.

    Returns:
        The tables, and a line for everything that a user should know.
    """
    if len(tokens) < 2:
        return uniform_tables(vocab_size), []
    counts = count_ngrams(tokens, config.order, vocab_size, reset_token=reset_token, poll=poll)
    smooth = {"kneser_ney": _kneser_ney, "add_k": _add_k, "stupid_backoff": _stupid_backoff}[config.smoothing]
    notices: list[str] = []
    log_weights, log_probs = [], []
    for weights, probabilities in smooth(counts, config, notices):
        log_weights.append(np.log(weights))
        log_probs.append(np.log(probabilities))
    return assemble(vocab_size, counts.contexts, counts.ngrams, log_weights, log_probs), notices


def count_ngrams(
    tokens: NDArray[np.integer],
    order: int,
    vocab_size: int,
    *,
    reset_token: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Counts:
    """Count all n-grams of up to ``order`` tokens. The arguments are those of :func:`build_tables`.

    Every token but the first is predicted once, from the tokens before it. Nothing stands before a text: a context
    that would reach further back than its boundary is not counted.
    """
    text = tokens.astype(np.int64)
    last = np.arange(len(text) - 1)  # where the newest token of each context stands; the predicted one is behind it
    before = _num_before(text, order, reset_token)
    context = np.zeros(len(last), np.int64)
    counted = Counts(vocab_size, [], [], [], [])
    for size in range(1, order + 1):
        poll()
        ngrams = context * vocab_size + text[last + 1]
        found, counts = np.unique(ngrams, return_counts=True)
        counted.ngrams.append(found)
        counted.counts.append(counts)
        goes_on = before[last] >= size
        counted.beginnings.append(ngrams[~goes_on])
        if size < order:
            last, context = last[goes_on], context[goes_on]
            longer, context = np.unique(context * vocab_size + text[last - (size - 1)], return_inverse=True)
            counted.contexts.append(longer)
    return counted


def _num_before(text: Ids, order: int, reset_token: int | None) -> NDArray[np.int8]:
    """How many tokens of its text there are up to each token, itself included, counted no further than the order."""
    place = np.arange(len(text))
    if reset_token is not None:
        place -= np.maximum.accumulate(np.where(text == reset_token, place, 0))
    return np.minimum(place + 1, order).astype(np.int8)


Smoothed = Iterator[tuple[Reals, Reals]]
"""For orders 1, 2 and on: the weights of the contexts, and the probability of each n-gram."""


def _kneser_ney(counts: Counts, config: NgramConfig, notices: list[str]) -> Smoothed:
    """Interpolated modified Kneser-Ney, Chen and Goodman 1998 (https://dash.harvard.edu/handle/1/25104739).

        p(w | h) = (a(h w) - D(a(h w))) / A(h) + weight(h) p(w | h'),      A(h) = sum of a(h w) over w
        weight(h) = sum of D(a(h w)) over w / A(h)

    a(h w) is the count in the highest order. Below it is the number of different tokens seen before h w; each time a
    text begins with h w counts as one more. The lowest order is interpolated with 1 / V.
    """
    counted = _continuations(counts)
    fallen_back = []
    lower: Reals = np.array([1 / counts.vocab_size])
    for order in range(1, config.order + 1):
        a = counted[order - 1]
        discounts, is_single = _discounts(a)
        if is_single:
            fallen_back.append(f"{discounts[1]:.3g} in order {order}")
        context = counts.context_of(order)
        taken = discounts[np.minimum(a, 3)]
        total = np.bincount(context, weights=a)
        weight = np.bincount(context, weights=taken) / total
        below = lower[counts.lower(order)] if order > 1 else lower
        lower = (a - taken) / total[context] + weight[context] * below
        yield weight, lower
    if fallen_back:
        notices.append(
            "too few n-grams count 1, 2, 3 or 4 for three discounts, so one is taken from every count: "
            + ", ".join(fallen_back)
        )


def _continuations(counts: Counts) -> list[Ids]:
    """What Kneser-Ney counts, order by order."""
    counted = [counts.counts[-1]]
    for order in range(len(counts.ngrams), 1, -1):
        continued = np.concatenate([counts.shortened(order), counts.beginnings[order - 2]])
        counted.append(np.unique(continued, return_counts=True)[1])
    return counted[::-1]


def _discounts(counts: Ids) -> tuple[Reals, bool]:
    """What is taken from counts of 0, 1, 2 and more, and whether that is a single discount for want of three.

    With n_i n-grams of count i, Y = n_1 / (n_1 + 2 n_2) and D_i = i - (i + 1) Y n_(i+1) / n_i. Where one of them is not
    defined or not positive, which would leave nothing for what was not seen, it is Y for all, the discount of Kneser
    and Ney 1995; where Y is not defined either, one half.
    """
    n1, n2, n3, n4 = (int((counts == value).sum()) for value in range(1, 5))
    y = n1 / (n1 + 2 * n2) if n1 and n2 else _EQUAL_DISCOUNT
    if n1 and n2 and n3 and n4:
        discounts = np.array([0.0, y, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if (discounts[1:] > 0).all():
            return discounts, False
    return np.array([0.0, y, y, y]), True


def _add_k(counts: Counts, config: NgramConfig, notices: list[str]) -> Smoothed:
    """``p(w | h) = (c(h w) + k) / (c(h) + k V)`` for the longest context h that was seen; Lidstone's law.

    What was not seen after h has weight(h) / V, with weight(h) = k V / (c(h) + k V).
    """
    for order in range(1, config.order + 1):
        context, c = counts.context_of(order), counts.counts[order - 1]
        added = config.add_k * counts.vocab_size
        total = np.bincount(context, weights=c).astype(np.float64) + added
        yield added / total, (c + config.add_k) / total[context]


def _stupid_backoff(counts: Counts, config: NgramConfig, notices: list[str]) -> Smoothed:
    """Stupid backoff, Brants et al. 2007 (https://aclanthology.org/D07-1090/), divided by its sum.

        S(w | h) = c(h w) / c(h)            where h w was seen
                 = 0.4 S(w | h')            where it was not; S(w) = 0.4 / V for a token never seen
        p(w | h) = S(w | h) / Z(h),         Z(h) = sum of S(w | h) over w

    The scores S sum to more than one. Z(h) = 1 + 0.4 (Z(h') - sum of S(w | h') over the w seen after h).
    """
    scores_below: Reals = np.array([1 / counts.vocab_size])
    sums_below: Reals = np.array([1.0])
    for order in range(1, config.order + 1):
        context, c = counts.context_of(order), counts.counts[order - 1]
        scores = c / np.bincount(context, weights=c)[context]
        seen_below = scores_below[counts.lower(order)] if order > 1 else np.full(len(c), scores_below[0])
        parents = counts.contexts[order - 2] // counts.vocab_size if order > 1 else np.zeros(1, np.int64)
        sums = 1 + BACKOFF_FACTOR * (sums_below[parents] - np.bincount(context, weights=seen_below))
        if order == 1:
            yield BACKOFF_FACTOR / sums, scores / sums[context]
        else:
            yield BACKOFF_FACTOR * sums_below[parents] / sums, scores / sums[context]
        scores_below, sums_below = scores, sums
