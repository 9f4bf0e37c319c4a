"""What a comparison found: trainings, models, their order, and which of them differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, Literal, TypeAlias

from elman.comparison.entries import PASSES_IN_TRAINING, Terms
from elman.comparison.statistics import Difference, Repeated, all_pairs_confidence, difference
from elman.errors import UserError

Figure: TypeAlias = Literal["nats_per_token", "bits_per_char"]

CONFIDENCE = 0.95
FIGURES = ("nats_per_token", "perplexity", "bits_per_char", "bits_per_byte")
"""That an outcome has on the held-out part."""

_UNITS: Mapping[Figure, str] = {"nats_per_token": "nats per token", "bits_per_char": "bits per character"}


@dataclass(frozen=True)
class Outcome:
    """What became of one training."""

    seed: int
    run: str
    """Its folder."""
    figures: Mapping[str, float | None]
    """On the held-out part, by their names in ``FIGURES``."""
    tokens: int
    """Trained."""
    updates: int
    seconds: float
    """Of training alone."""
    untrained: tuple[Mapping[str, Any], ...] = ()
    """Samples from before the training."""

    def to_dict(self) -> dict[str, Any]:
        """All but the samples, ready for JSON."""
        return {name: value for name, value in vars(self).items() if name != "untrained"}


@dataclass(frozen=True)
class Contestant:
    """A model of the comparison with all of its trainings, one at least."""

    name: str
    kind: str
    is_counted: bool
    settings: Mapping[str, Any]
    """All of them, the seed apart."""
    parameters: int
    operations: int
    """For each token, forward."""
    state_bytes: int
    """Carried for one text, at its largest."""
    outcomes: tuple[Outcome, ...]
    rate: float | None = None
    """What its learning rates were multiplied by, where a sweep has chosen them."""
    sweep: Mapping[float, float] = field(default_factory=dict)
    """Nats per token on the validation part for each factor; infinite where that training failed."""

    def repeated(self, figure: Figure) -> Repeated:
        """A figure over the seeds."""
        values = tuple(math.nan if value is None else value for value in self._values(figure))
        return Repeated(values, not self.is_counted)

    def _values(self, figure: Figure) -> list[float | None]:
        return [one.figures[figure] for one in self.outcomes]

    def mean(self, name: Literal["tokens", "updates", "seconds"]) -> float:
        """Of a count over the seeds."""
        counts: list[float] = [vars(one)[name] for one in self.outcomes]
        return sum(counts) / len(counts)

    @property
    def training_operations(self) -> float:
        """Floating-point operations of one training, a mean over the seeds; none where text is counted."""
        return 0.0 if self.is_counted else PASSES_IN_TRAINING * self.operations * self.mean("tokens")

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        results = {name: self.repeated(name) for name in _UNITS if None not in self._values(name)}
        return vars(self) | {
            "settings": dict(self.settings),
            "outcomes": [one.to_dict() for one in self.outcomes],
            "sweep": {f"{rate:g}": nats if math.isfinite(nats) else None for rate, nats in self.sweep.items()},
            "training_operations": self.training_operations,
            "results": {name: repeated.to_dict() for name, repeated in results.items()},
        }


@dataclass(frozen=True)
class Verdict:
    """Two models held against each other, the better one first."""

    better: str
    worse: str
    difference: Difference
    """Of their means: the worse minus the better."""
    figure: Figure

    def __str__(self) -> str:
        found, unit = self.difference, _UNITS[self.figure]
        if found.low is None or found.high is None:
            return (
                f"{self.better} is {found.mean:.4f} {unit} below {self.worse}; one seed says nothing of the spread, so "
                "this may be chance"
            )
        interval = f"between {found.low:.4f} and {found.high:.4f}"
        if found.is_certain:
            return f"{self.better} is better than {self.worse}: by {found.mean:.4f} {unit}, {interval}"
        return (
            f"{self.better} and {self.worse} cannot be told apart: {found.mean:.4f} {unit}, {interval}, is no more "
            "than the spread over seeds explains"
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return vars(self) | {"difference": self.difference.to_dict(), "words": str(self)}


@dataclass(frozen=True)
class Comparison:
    """Models held against each other on one text, the best first."""

    corpus: str
    corpus_sha256: str
    split: str
    """The part that they are judged on: test or valid."""
    terms: Terms | None
    """What was equal; none for runs that were there before."""
    figure: Figure
    """What they are compared by."""
    contestants: tuple[Contestant, ...]
    notices: tuple[str, ...]
    """What a reader should know."""
    baselines: Mapping[str, Mapping[str, float | None]]
    """What simple means reach on the same part, by name the figures of an outcome; empty where they were not judged."""
    is_complete: bool = True
    """False where it was stopped: only what is done by then stands here."""

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every pair, those of the best first; their intervals hold all together in 95 of 100 cases."""
        confidence = all_pairs_confidence(len(self.contestants), CONFIDENCE)

        def verdict(one: Contestant, other: Contestant) -> Verdict:
            found = difference(other.repeated(self.figure), one.repeated(self.figure), confidence)
            return Verdict(one.name, other.name, found, self.figure)

        return tuple(verdict(one, other) for one, other in combinations(self.contestants, 2))

    @property
    def unit(self) -> str:
        """Of what they are compared by, for people."""
        return _UNITS[self.figure]

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return {
            "corpus": self.corpus,
            "corpus_sha256": self.corpus_sha256,
            "split": self.split,
            "terms": None if self.terms is None else self.terms.to_dict(),
            "figure": self.figure,
            "is_complete": self.is_complete,
            "contestants": [one.to_dict() for one in self.contestants],
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "baselines": {name: dict(figures) for name, figures in self.baselines.items()},
            "notices": list(self.notices),
        }


def ranked(contestants: Sequence[Contestant]) -> tuple[Figure, tuple[Contestant, ...]]:
    """What models may be compared by, and they themselves, the best first.

    Raises:
        UserError: their tokens differ, and not all give the text back.
    """
    figure = _common_figure(contestants)
    return figure, tuple(sorted(contestants, key=lambda one: one.repeated(figure).mean))


def _common_figure(contestants: Sequence[Contestant]) -> Figure:
    if len({str(one.settings["tokenizer"]) for one in contestants}) <= 1:
        return "nats_per_token"
    if all(outcome.figures["bits_per_char"] is not None for one in contestants for outcome in one.outcomes):
        return "bits_per_char"
    raise UserError(
        "the models have different tokens, and not all of these give the text back: nothing measures both; take one "
        "tokenizer, or the levels char, byte and bpe"
    )
