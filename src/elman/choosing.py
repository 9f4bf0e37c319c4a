"""Choose the next token: penalties and bans, then filters, then the draw; in NumPy, for rows of any settings at once.

The settings, what each does and their order are those of Hugging Face's ``generate``; the presence and frequency
penalties are those of OpenAI's API. Shape letters: B rows, V vocabulary, C columns that a filter looks at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from elman.config import SamplingConfig
from elman.engine import Drawing, damaged, nothing_left
from elman.errors import UserError
from elman.models.noise import derived_seed
from elman.text.tokenizers import Tokenizer

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]
Logits: TypeAlias = npt.NDArray[np.floating[Any]]

_LARGEST = float(np.finfo(np.float64).max)
_BELOW_ONE = 1.0 - 2.0**-53


class Rules:
    """Settings made ready for a vocabulary; texts that are drawn with the same settings share them.

    Raises:
        UserError: a setting names a token or a text that the vocabulary lacks.
    """

    def __init__(self, settings: SamplingConfig, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.vocab_size, self.boundary_id = tokenizer.size, tokenizer.boundary_id
        never = list(settings.suppress_tokens)
        if tokenizer.unknown_id is not None:
            never.append(tokenizer.unknown_id)  # it stands for no text
        self.banned: list[tuple[int, ...]] = []
        for sequence in _spellings(settings.bad_words, tokenizer):
            if len(sequence) == 1:
                never.append(sequence[0])
            else:
                self.banned.append(sequence)
        self.biases = [(_sequence(what, tokenizer), bias) for what, bias in settings.logit_bias]
        named = [*never, *(token for sequence, _ in self.biases for token in sequence)]
        if outside := [token for token in named if token >= tokenizer.size]:
            raise UserError(f"token {outside[0]} is not in the vocabulary; accepted: 0 to {tokenizer.size - 1}")
        self.never = np.array(sorted(set(never)), np.int64)
        self.penalizes = (
            settings.repetition_penalty != 1 or settings.frequency_penalty != 0 or settings.presence_penalty != 0
        )
        self.filters = Filters(**settings.model_dump(include=set(Filters._fields)))
        self.drawing = self._drawing()
        """The same for compiled code, where that can do all of it."""

    def _drawing(self) -> Drawing | None:
        settings, filters = self.settings, self.filters
        known = {name: getattr(filters, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        looks_back = self.penalizes or self.banned or self.biases or settings.no_repeat_ngram_size
        if looks_back or filters != Filters(**known):
            return None
        return Drawing(self.boundary_id, tuple(self.never.tolist()), **known)


def _spellings(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences of words; BPE writes most words another way after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if tokenizer.unknown_characters(word):
            continue  # it cannot be drawn anyway
        for text in (word, " " + word) if tokenizer.level == "bpe" else (word,):
            found[tuple(tokenizer.encode(text, unknown="skip").tolist())] = None
    return [sequence for sequence in found if sequence]


def _sequence(what: str | int, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(what, int):
        return (what,)
    sequence = tuple(tokenizer.encode(what, unknown="skip").tolist())
    if tokenizer.unknown_characters(what) or not sequence:
        raise UserError(f"sampling.logit_bias: the vocabulary lacks something of {what!r}: leave it out")
    return sequence


class Chooser:
    """What is known of one text for choosing its next token: the rules, its seed, its tokens.

    Args:
        rules: how to choose.
        seed: of this text alone.
        tokens: those it begins with, without the boundary.
        num_given: how many of these were given and not drawn, which the presence and frequency penalties do not
            count; none: all.
    """

    def __init__(
        self, rules: Rules, *, seed: int = 0, tokens: Iterable[int] = (), num_given: int | None = None
    ) -> None:
        self.rules, self.seed = rules, seed
        self.tokens: list[int] = []
        given = list(tokens)
        self.num_given = len(given) if num_given is None else num_given
        self._start = len(given)
        self._slots: dict[int, int] = {}
        self._present = np.zeros(rules.vocab_size if rules.penalizes else 0, np.int64)
        self._counts = np.zeros_like(self._present)
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token in given:
            self.append(token)

    def append(self, token: int) -> None:
        """Take the token that comes next."""
        position = len(self.tokens)
        self.tokens.append(token)
        if self.rules.penalizes:
            slot = self._slots.setdefault(token, len(self._slots))
            self._present[slot] = token
            self._counts[slot] += position >= self.num_given
        size = self.rules.settings.no_repeat_ngram_size
        if 0 < size <= len(self.tokens):
            before = tuple(self.tokens[position + 1 - size : position])
            self._followers.setdefault(before, []).append(token)

    def extended(self, tokens: Sequence[int]) -> Chooser:
        """This text with tokens drawn after it, for a search that tries many."""
        longer = Chooser(self.rules, seed=self.seed, tokens=self.tokens, num_given=self.num_given)
        for token in tokens:
            longer.append(token)
        return longer

    @property
    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token: a function of the seed and the position alone."""
        return self.uniform_at(len(self.tokens))

    def uniform_at(self, position: int) -> float:
        """The same for a token further on."""
        return (derived_seed(self.seed, "draw", position) >> 10) * 2.0**-53

    @property
    def num_before_end(self) -> int:
        """The tokens that come before the boundary may."""
        return max(0, self.rules.settings.min_new_tokens - (len(self.tokens) - self._start))

    def adjust(self, scores_V: Floats) -> None:
        """Apply biases, penalties and bans, in this order and in place."""
        rules, settings = self.rules, self.rules.settings
        for (*before, last), bias in rules.biases:
            if self._ends_with(before):
                scores_V[last] += bias
        if rules.penalizes:
            present = self._present[: len(self._slots)]
            counts = self._counts[: len(self._slots)]
            scores_V[present] = penalized(scores_V[present], counts, settings)
        if rules.biases or rules.penalizes:
            np.minimum(scores_V, _LARGEST, out=scores_V)
        size = settings.no_repeat_ngram_size
        if 0 < size <= len(self.tokens):
            scores_V[self._followers.get(tuple(self.tokens[len(self.tokens) + 1 - size :]), [])] = -math.inf
        for *before, last in rules.banned:
            if self._ends_with(before):
                scores_V[last] = -math.inf
        if self.num_before_end:
            scores_V[rules.boundary_id] = -math.inf
        if rules.never.size:
            scores_V[rules.never] = -math.inf

    def _ends_with(self, tokens: list[int]) -> bool:
        return not tokens or self.tokens[-len(tokens) :] == tokens


def penalized(scores: Floats, counts: Ids, settings: SamplingConfig) -> Floats:
    """Scores of tokens that occurred before, each drawn ``counts`` times.

    s <- s / r if s > 0 else s r, with the repetition penalty r (Keskar et al. 2019, https://arxiv.org/abs/1909.05858);
    then s <- s - count * frequency_penalty - (count > 0) * presence_penalty.
    """
    repetition = settings.repetition_penalty
    with np.errstate(over="ignore"):
        scores = np.where(scores < 0, scores * repetition, scores / repetition)
    return scores - counts * settings.frequency_penalty - (counts > 0) * settings.presence_penalty


class Filters(NamedTuple):
    """The settings that act on the distribution."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0


def choose(logits_BV: Logits, choosers: Sequence[Chooser]) -> list[int]:
    """The next token of each row, which does not depend on other rows. The choosers are told of none.

    Raises:
        ElmanError: the logits hold NaN or positive infinity, or nothing finite.
        UserError: penalties and bans rule out every token of a row.
    """
    cumulative_BV = _weights(logits_BV, choosers).cumsum(axis=1)
    uniform_B, total_B = np.array([chooser.uniform for chooser in choosers]), cumulative_BV[:, -1]
    # A number next to 1 times the total may be rounded up to it.
    threshold_B1 = np.minimum(uniform_B * total_B, _BELOW_ONE * total_B)[:, None]
    chosen: list[int] = (cumulative_BV <= threshold_B1).sum(axis=1).tolist()
    return chosen


def probabilities(logits_BV: Logits, choosers: Sequence[Chooser]) -> Floats:
    """The distributions that the next tokens are drawn from: positive where kept, each summing to one.

    Raises:
        ElmanError: the logits hold NaN or positive infinity, or nothing finite.
        UserError: penalties and bans rule out every token of a row.
    """
    weights_BV = _weights(logits_BV, choosers)
    return weights_BV / weights_BV.sum(axis=1, keepdims=True)


def _weights(logits_BV: Logits, choosers: Sequence[Chooser]) -> Floats:
    if not logits_BV.max() < math.inf:
        raise damaged()
    scores_BV = logits_BV.astype(np.float64)
    groups: dict[Filters, list[int]] = {}
    for row, chooser in enumerate(choosers):
        chooser.adjust(scores_BV[row])
        groups.setdefault(chooser.rules.filters, []).append(row)
    if -math.inf in scores_BV.max(axis=1).tolist():
        if (logits_BV.max(axis=1) == -math.inf).any():
            raise damaged()
        raise nothing_left()
    if len(groups) == 1:
        return filtered(scores_BV, *groups)
    for filters, rows in groups.items():
        scores_BV[rows] = filtered(scores_BV[rows], filters)
    return scores_BV


def filtered(scores_BV: Floats, filters: Filters) -> Floats:
    """From scores to weights, which are the probabilities but for a factor, by all filters in their order.

    The largest score is subtracted before the division by the temperature, so that any positive one works.
    Temperature 0 puts all on the largest score, the first of equals.
    """
    if filters.temperature == 0:
        weights_BV = np.zeros_like(scores_BV)
        weights_BV[np.arange(len(scores_BV)), scores_BV.argmax(axis=1)] = 1.0
        return weights_BV
    with np.errstate(over="ignore"):
        weights_BV = scores_BV - scores_BV.max(axis=1, keepdims=True)
        weights_BV /= filters.temperature
    np.exp(weights_BV, out=weights_BV)
    if filters.top_k:
        keep_top_k(weights_BV, filters.top_k)
    if filters.top_p < 1:
        keep_top_p(weights_BV, filters.top_p)
    if filters.min_p:
        keep_min_p(weights_BV, filters.min_p)
    if filters.typical_p < 1:
        keep_typical(weights_BV, filters.typical_p)
    if filters.epsilon_cutoff:
        keep_above(weights_BV, filters.epsilon_cutoff)
    if filters.eta_cutoff:
        eta = filters.eta_cutoff
        _, entropy_B1 = surprisal_and_entropy(weights_BV)
        keep_above(weights_BV, np.minimum(eta, math.sqrt(eta) * np.exp(-entropy_B1)))
    return weights_BV


# A filter sets to zero the weights that it does not keep. Weights are probabilities up to a factor; some token of each
# row is always kept.


def keep_top_k(weights_BV: Floats, top_k: int) -> None:
    """Keep the k largest and what equals the smallest of them."""
    if top_k < weights_BV.shape[1]:
        kth_B1 = np.partition(weights_BV, -top_k, axis=1)[:, -top_k, None]
        weights_BV[weights_BV < kth_B1] = 0.0


def keep_top_p(weights_BV: Floats, top_p: float) -> None:
    """Drop the least probable tokens, as many as have together a probability of at most 1 - p.

    Paper: Holtzman et al. 2020, https://arxiv.org/abs/1904.09751
    """
    total_B1 = weights_BV.sum(axis=1, keepdims=True)
    dropped_B1 = (1 - top_p) * total_B1
    # Whatever is below the mean of all that may go, goes: only the rest has to be sorted. Of equals, the last go first.
    least_B1 = np.minimum(dropped_B1 / weights_BV.shape[1], _BELOW_ONE * weights_BV.max(axis=1, keepdims=True))
    columns = np.flatnonzero((weights_BV > least_B1).any(axis=0))[::-1]
    weights_BC = weights_BV[:, columns]
    order_BC = weights_BC.argsort(axis=1, kind="stable")
    rows_B1 = np.arange(len(weights_BV))[:, None]
    ordered_BC = weights_BC[rows_B1, order_BC]
    before_B1 = total_B1 - weights_BC.sum(axis=1, keepdims=True)
    goes_BC = before_B1 + ordered_BC.cumsum(axis=1) <= dropped_B1
    goes_BC[:, -1] = False
    ordered_BC[goes_BC] = 0.0
    weights_BV[:] = 0.0
    weights_BV[rows_B1, columns[order_BC]] = ordered_BC


def keep_min_p(weights_BV: Floats, min_p: float) -> None:
    """Keep what is at least p times as probable as the most probable token.

    Paper: Nguyen et al. 2025, https://arxiv.org/abs/2407.01082
    """
    weights_BV[weights_BV < min_p * weights_BV.max(axis=1, keepdims=True)] = 0.0


def keep_typical(weights_BV: Floats, typical_p: float) -> None:
    """Keep the tokens whose surprisal is nearest to the entropy, until they reach the probability; and their equals.

    Paper: Meister et al. 2023, https://arxiv.org/abs/2202.00666
    """
    columns = np.flatnonzero(weights_BV.any(axis=0))
    weights_BC = weights_BV[:, columns]
    surprisal_BC, entropy_B1 = surprisal_and_entropy(weights_BC)
    distance_BC = np.abs(surprisal_BC - entropy_B1)
    order_BC = distance_BC.argsort(axis=1, kind="stable")
    rows_B1 = np.arange(len(weights_BV))[:, None]
    reached_BC = weights_BC[rows_B1, order_BC].cumsum(axis=1)
    is_before_BC = reached_BC < typical_p * reached_BC[:, -1:]
    last_B1 = is_before_BC.sum(axis=1, keepdims=True)
    weights_BV[:, columns] *= distance_BC <= distance_BC[rows_B1, order_BC[rows_B1, last_B1]]


def keep_above(weights_BV: Floats, threshold: float | Floats) -> None:
    """Keep what is at least as probable as the threshold, and the most probable token in any case.

    Epsilon and eta sampling: Hewitt, Manning and Liang 2022, https://arxiv.org/abs/2210.15191
    """
    is_below_BV = weights_BV < threshold * weights_BV.sum(axis=1, keepdims=True)
    weights_BV[is_below_BV & (weights_BV < weights_BV.max(axis=1, keepdims=True))] = 0.0


def surprisal_and_entropy(weights_BV: Floats) -> tuple[Floats, Floats]:
    """In nats: -log p of each token, infinite where p is 0, and its mean (B, 1)."""
    probabilities_BV = weights_BV / weights_BV.sum(axis=1, keepdims=True)
    is_kept_BV = probabilities_BV > 0
    surprisal_BV = -np.log(probabilities_BV, where=is_kept_BV, out=np.full_like(probabilities_BV, -math.inf))
    means = np.multiply(probabilities_BV, surprisal_BV, where=is_kept_BV, out=np.zeros_like(probabilities_BV))
    return surprisal_BV, means.sum(axis=1, keepdims=True)
