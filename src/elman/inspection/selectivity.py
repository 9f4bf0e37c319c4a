"""How well a unit tells a label: chosen on one half of a text, scored on the other, with intervals by bootstrap.

A label that is true or false is told by a threshold: the score is F1. A graded one is told by order: the score is the
rank correlation of Spearman. Neighbouring tokens are alike, so what is resampled is blocks of them, never single ones.

Shape letters: K tokens that were kept, U units, N blocks, S sums of a block, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Tokens of a block."""
_UNITS_AT_ONCE = 128
_RESAMPLES = 1000

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Chosen:
    """A unit and how to read it."""

    unit: int
    sign: int
    """1 where high values tell the label, -1 where low ones do."""
    threshold: float
    """Beyond which the label is taken for true; of no meaning for a graded one."""
    score: float
    """On the half that it was chosen on."""


class Ranked:
    """The values of units over a text, put in order once for the search after any number of labels."""

    def __init__(self, values_KU: Floats) -> None:
        self._order_KU = np.argsort(values_KU, axis=0, kind="stable").astype(np.int32)
        self._sorted_KU = np.take_along_axis(values_KU, self._order_KU, axis=0)

    def best(self, labels_K: Floats, *, is_graded: bool) -> Chosen:
        """The unit that tells a label best."""
        search = self._best_order if is_graded else self._best_threshold
        found = []
        for start in range(0, self._order_KU.shape[1], _UNITS_AT_ONCE):
            columns = slice(start, start + _UNITS_AT_ONCE)
            one = search(labels_K, self._order_KU[:, columns], self._sorted_KU[:, columns])
            found.append(Chosen(start + one.unit, one.sign, one.threshold, one.score))
        return max(found, key=lambda chosen: chosen.score)

    @staticmethod
    def _best_threshold(labels_K: Floats, order_KU: NDArray[np.int32], sorted_KU: Floats) -> Chosen:
        below_KU = labels_K.astype(np.float32)[order_KU].cumsum(axis=0)[:-1]  # labels at or below each cut
        num_true = float(labels_K.sum())
        predicted = np.arange(1, len(labels_K), dtype=np.float32)[:, None]
        is_cut_KU = sorted_KU[1:] > sorted_KU[:-1]
        best = Chosen(0, 1, 0.0, -1.0)
        for sign, hits_KU, marked in ((1, num_true - below_KU, len(labels_K) - predicted), (-1, below_KU, predicted)):
            f1_KU = np.where(is_cut_KU, 2 * hits_KU / (num_true + marked), -1.0)
            cut, unit = np.unravel_index(int(f1_KU.argmax()), f1_KU.shape)
            if f1_KU[cut, unit] > best.score:
                threshold = (float(sorted_KU[cut, unit]) + float(sorted_KU[cut + 1, unit])) / 2
                best = Chosen(int(unit), sign, threshold, float(f1_KU[cut, unit]))
        return best

    @staticmethod
    def _best_order(labels_K: Floats, order_KU: NDArray[np.int32], sorted_KU: Floats) -> Chosen:
        ranks_KU = np.zeros_like(sorted_KU, dtype=np.float32)
        np.put_along_axis(ranks_KU, order_KU, _ranks_of_sorted(sorted_KU), axis=0)
        correlations_U = _standard(ranks_KU).T @ _standard(ranks(labels_K)) / len(labels_K)
        unit = int(np.abs(correlations_U).argmax())
        return Chosen(unit, 1 if correlations_U[unit] >= 0 else -1, 0.0, float(abs(correlations_U[unit])))


def ranks(values_K: Floats) -> Floats:
    """The rank of each value from 0; equal ones share the mean of theirs."""
    order_K = np.argsort(values_K, kind="stable")
    ranks_K = np.zeros(len(values_K))
    ranks_K[order_K] = _ranks_of_sorted(values_K[order_K][:, None])[:, 0]
    return ranks_K


def _ranks_of_sorted(sorted_KU: Floats) -> Floats:
    index = np.arange(len(sorted_KU), dtype=np.int64)[:, None]
    differs_KU = sorted_KU[1:] > sorted_KU[:-1]
    edge = np.ones((1, sorted_KU.shape[1]), bool)
    first_KU = np.maximum.accumulate(np.where(np.concatenate([edge, differs_KU]), index, 0), axis=0)
    ends_KU = np.where(np.concatenate([differs_KU, edge]), index, len(sorted_KU))
    last_KU = np.minimum.accumulate(ends_KU[::-1], axis=0)[::-1]
    return (first_KU + last_KU) / 2


def _standard(values: Floats) -> Floats:
    """Mean 0 and deviation 1 along the first dimension; 0 where all are equal."""
    centred = values - values.mean(0)
    deviation = np.sqrt((centred**2).mean(0))
    return centred / np.where(deviation > 0, deviation, 1.0)


def block_sums(values_K: Floats, labels_K: Floats, chosen: Chosen, *, is_graded: bool) -> NDArray[np.float64]:
    """What the score of a unit is made from, for each block: (N, S), to be summed and given to :func:`score_of`."""
    if is_graded:
        x_K, y_K = _standard(ranks(chosen.sign * values_K)), _standard(ranks(labels_K))
        sums_KS = np.stack((np.ones_like(x_K), x_K, y_K, x_K * x_K, y_K * y_K, x_K * y_K), axis=1)
    else:
        said_K, true_K = chosen.sign * (values_K - chosen.threshold) > 0, labels_K > 0
        sums_KS = np.stack((said_K & true_K, said_K, true_K), axis=1).astype(np.float64)
    return np.add.reduceat(sums_KS, np.arange(0, len(values_K), BLOCK))


def block_means(values_K: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over blocks along the first dimension; what is left at the end counts as one more."""
    starts = np.arange(0, len(values_K), BLOCK)
    sizes = np.diff(np.append(starts, len(values_K)))
    return np.add.reduceat(values_K, starts, axis=0) / sizes.reshape(-1, *[1] * (values_K.ndim - 1))


def score_of(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """F1 from three sums, the rank correlation from six, along the last dimension; 0 where it is not defined."""
    if sums.shape[-1] == 3:
        hits, said, true = np.moveaxis(sums, -1, 0)
        return 2 * hits / np.maximum(said + true, 1.0)
    count, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    spread = np.sqrt(np.maximum(count * xx - x * x, 0.0) * np.maximum(count * yy - y * y, 0.0))
    return np.where(spread > 0, (count * xy - x * y) / np.where(spread > 0, spread, 1.0), 0.0)


class Bootstrap:
    """Resamples of the blocks of one text, the same for whatever is compared on it.

    Args:
        num_blocks: N.
        rng: where they are drawn from.
    """

    def __init__(self, num_blocks: int, rng: np.random.Generator) -> None:
        self._weights_RN = rng.multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), size=_RESAMPLES) * 1.0

    def scores(self, sums_NS: NDArray[np.float64]) -> NDArray[np.float64]:
        """The score of each resample."""
        return score_of(self._weights_RN @ sums_NS)

    def means(self, values_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of each resample."""
        return self._weights_RN @ values_N / len(values_N)


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of them."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
