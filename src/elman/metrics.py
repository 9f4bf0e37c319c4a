"""What a model costs on a text: summed first, divided once; how sure the figure is, and how sure the model.

Nats are summed in float64 over every token. All else follows from the sum and from the counts of tokens, characters,
bytes and words, so that models with different tokenizers can be compared by ``bits_per_char``, ``bits_per_byte`` and
``perplexity_per_word``.

Shape letter: N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Reals: TypeAlias = NDArray[np.float64]

_NUM_BINS = 15
_NUM_RESAMPLES = 10_000
_SEED = 0
_MIN_BLOCKS = 10


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of a text and the counts to divide it by.

    Args:
        nats_total: sum of -ln p over all tokens, in nats.
        tokens: tokens predicted.
        chars: characters of the text; none where the tokens do not give the text back (``<unk>``, words).
        bytes: its bytes in UTF-8; none under the same condition.
        words: what white space parts in the text; none where nobody has counted.
    """

    nats_total: float
    tokens: int
    chars: int | None
    bytes: int | None
    words: int | None = None

    @property
    def nats_per_token(self) -> float:
        """Mean of -ln p over the tokens."""
        return self.nats_total / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp(nats_per_token)``, per token of the model's own vocabulary; infinite where that overflows."""
        return perplexity(self.nats_per_token)

    @property
    def perplexity_per_word(self) -> float | None:
        """``exp(nats_total / words)``: what a model of any tokenizer costs for each word of the text."""
        return perplexity(self.nats_total / self.words) if self.words else None

    @property
    def bits_per_char(self) -> float | None:
        """Bits per character of the text."""
        return self._bits_per(self.chars)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text in UTF-8."""
        return self._bits_per(self.bytes)

    def _bits_per(self, count: int | None) -> float | None:
        return self.nats_total / math.log(2) / count if count else None

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON: an infinite or undefined one is ``null``, with a flag beside it."""
        return finite({
            "tokens": self.tokens,
            "chars": self.chars,
            "bytes": self.bytes,
            "nats_total": self.nats_total,
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity,
            "bits_per_char": self.bits_per_char,
            "bits_per_byte": self.bits_per_byte,
            "words": self.words,
            "perplexity_per_word": self.perplexity_per_word,
        })  # fmt: skip


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures as JSON holds them: one that is not finite is ``None``, with a flag beside it that says why."""
    wild = {name: value for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)}
    flags = {f"{name}_is_{'nan' if math.isnan(value) else 'infinite'}": True for name, value in wild.items()}
    return {name: None if name in wild else value for name, value in figures.items()} | flags


def perplexity(nats_per_token: float) -> float:
    """``exp`` of the mean; infinity instead of an overflow."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Interval:
    """Between which values a mean may lie, by the block bootstrap of :func:`block_bootstrap`."""

    low: float
    """Nats per token."""
    high: float
    """Nats per token."""
    level: float
    """Share of the resampled texts whose mean lies between the two."""
    num_blocks: int
    num_resamples: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return finite(asdict(self))


def block_bootstrap(nats: Sequence[float], tokens: Sequence[int], *, level: float = 0.95) -> Interval | None:
    """How far the mean over a text would move if the text were another one of its kind.

    Neighbouring tokens are surprising together, so whole blocks of the text are drawn, with replacement and as many as
    there are (Künsch 1989, https://doi.org/10.1214/aos/1176347265, with blocks side by side); each drawn text has the
    mean ``sum of nats / sum of tokens``. The interval holds the middle of 10,000 such means, drawn with a fixed seed.
    It says nothing about other seeds of training, nor about texts of another kind.

    Args:
        nats: of each block of the text; for two models on one text, the differences.
        tokens: of each block.
        level: share of the means that the interval holds.

    Returns:
        The interval; none where there are fewer than ten blocks or a sum is not finite.
    """
    nats_N, tokens_N = np.asarray(nats, np.float64), np.asarray(tokens, np.float64)
    if len(nats_N) < _MIN_BLOCKS or not np.isfinite(nats_N).all():
        return None
    random = np.random.Generator(np.random.PCG64(_SEED))
    drawn = random.integers(len(nats_N), size=(_NUM_RESAMPLES, len(nats_N)))
    means = nats_N[drawn].sum(1) / tokens_N[drawn].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Interval(low, high, level, len(nats_N), _NUM_RESAMPLES, _SEED)


@dataclass(frozen=True)
class CalibrationBin:
    """The tokens at which the most probable guess had about one probability."""

    confidence: float
    """The mean of that probability."""
    accuracy: float
    """How often the guess was right."""
    tokens: int


@dataclass(frozen=True)
class Accuracy:
    """How often the most probable tokens were right, and whether their probabilities kept what they promised."""

    at_1: float
    """Share of the tokens that were the most probable one. Where several are equally probable, a fair draw decides."""
    at_5: float
    """Share of the tokens that were among the five most probable ones."""
    calibration: tuple[CalibrationBin, ...]
    """Fifteen bins of equal width by the probability of the best guess, the empty ones left out."""

    @property
    def expected_calibration_error(self) -> float:
        """``sum over bins of tokens / all tokens |accuracy - confidence|``.

        Paper: Guo et al. 2017, https://arxiv.org/abs/1706.04599
        """
        total = sum(one.tokens for one in self.calibration)
        return math.fsum(one.tokens * abs(one.accuracy - one.confidence) for one in self.calibration) / total

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return {
            "accuracy_at_1": self.at_1,
            "accuracy_at_5": self.at_5,
            "expected_calibration_error": self.expected_calibration_error,
            "calibration": [asdict(one) for one in self.calibration],
        }


class AccuracyTally:
    """Sums up guesses, in constant memory."""

    def __init__(self) -> None:
        self.sums = np.zeros((4, _NUM_BINS))
        """In each bin: tokens, their confidence, right at the first guess, right among the five."""

    def add(self, right_at_1_N: Reals, right_at_5_N: Reals, confidence_N: Reals) -> None:
        """Take tokens in.

        Args:
            right_at_1_N: 1 where the most probable token was right, less where several share its probability.
            right_at_5_N: the same of the five most probable.
            confidence_N: the probability of the most probable one.
        """
        bins = np.minimum((confidence_N * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        for row, values in enumerate((np.ones_like(confidence_N), confidence_N, right_at_1_N, right_at_5_N)):
            self.sums[row] += np.bincount(bins, values, minlength=_NUM_BINS)

    def result(self) -> Accuracy:
        """What was summed up; there must be a token."""
        tokens, confidence, right_at_1, right_at_5 = self.sums
        return Accuracy(
            at_1=float(right_at_1.sum() / tokens.sum()),
            at_5=float(right_at_5.sum() / tokens.sum()),
            calibration=tuple(
                CalibrationBin(float(confidence[i] / tokens[i]), float(right_at_1[i] / tokens[i]), int(tokens[i]))
                for i in np.flatnonzero(tokens)
            ),
        )
