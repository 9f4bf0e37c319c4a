"""Whether a difference between two models is larger than what chance makes of the same model.

Repetitions with other seeds spread. Two models differ if the interval of Welch's test, which does not take their
spreads for equal (Welch 1947, https://doi.org/10.1093/biomet/34.1-2.28), leaves zero out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True)
class Repeated:
    """One figure, measured with several seeds."""

    values: tuple[float, ...]
    has_chance: bool = True
    """Whether a seed changes anything: a count is the same each time, and one value of it says all."""

    @property
    def mean(self) -> float:
        """Of all values."""
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds; none where one value says nothing of the spread."""
        if not self.has_chance:
            return 0.0
        return stdev(self.values) if len(self.values) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return {"mean": self.mean, "deviation": self.deviation, "values": list(self.values)}


@dataclass(frozen=True)
class Difference:
    """By how much the mean of one is above that of the other, with an interval where the spreads are known."""

    mean: float
    low: float | None
    high: float | None
    confidence: float

    @property
    def is_certain(self) -> bool | None:
        """Whether the interval leaves zero out; none where there is no interval."""
        return None if self.low is None or self.high is None else self.low > 0 or self.high < 0

    @property
    def half_width(self) -> float | None:
        """Of the interval: what the mean has to exceed to be certain; none where there is no interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return vars(self) | {"is_certain": self.is_certain}


def difference(one: Repeated, other: Repeated, confidence: float) -> Difference:
    """The mean of one minus that of the other, with Welch's interval.

    Args:
        one: a figure.
        other: the same figure of another model.
        confidence: of the interval, such as 0.95.
    """
    mean = one.mean - other.mean
    # The variance of each mean, and the degrees of freedom that it is known with.
    parts = []
    for repeated in (one, other):
        deviation = repeated.deviation
        if deviation is None:
            return Difference(mean, None, None, confidence)
        if repeated.has_chance:
            parts.append((deviation**2 / len(repeated.values), len(repeated.values) - 1))
    variance = math.fsum(part for part, _ in parts)
    if variance == 0.0:
        return Difference(mean, mean, mean, confidence)
    # Divided before it is squared: squares of small variances would vanish.
    degrees = 1.0 / math.fsum((part / variance) ** 2 / freedom for part, freedom in parts)
    half = student_quantile(0.5 + confidence / 2, degrees) * math.sqrt(variance)
    return Difference(mean, mean - half, mean + half, confidence)


def student_quantile(probability: float, degrees: float) -> float:
    """The value that Student's t stays below with this probability, of 0.5 and more.

    With t = sqrt(d) tan(a) the density becomes that of cos(a)^(d - 1), whose integral is smooth and short.
    """
    whole = math.exp(math.lgamma(degrees / 2) - math.lgamma((degrees + 1) / 2)) * math.sqrt(math.pi)
    # With many degrees of freedom the density is a narrow peak, which the nodes must not miss.
    low, high = 0.0, math.pi / 2 if degrees < 50 else math.atan(50 / math.sqrt(degrees))
    for _ in range(100):
        angle = (low + high) / 2
        points = angle / 2 * (_NODES + 1)
        below = 0.5 + angle / 2 * float(_WEIGHTS @ np.cos(points) ** (degrees - 1)) / whole
        low, high = (angle, high) if below < probability else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def all_pairs_confidence(num_models: int, confidence: float) -> float:
    """The confidence of each pair with which all pairs together have the one asked for (Bonferroni)."""
    num_pairs = max(1, num_models * (num_models - 1) // 2)
    return 1.0 - (1.0 - confidence) / num_pairs


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The k of cost = c size^k, fitted by least squares on logarithms: 0 is constant, 1 linear, 2 quadratic."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])
