"""A text that a person and a model write in turns: look at what may come next, choose, type, draw, take back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elman.choosing import Chooser, Rules, probabilities
from elman.config import SamplingConfig
from elman.errors import UserError
from elman.generation import FinishReason, Sampler
from elman.models.noise import derived_seed
from elman.reading import Reading, Unknown
from elman.settings import resolve

OF_WHOLE_TEXTS = ("max_new_tokens", "min_new_tokens", "num_beams", "length_penalty")
"""Settings of drawing that have no meaning where a text is written in turns."""


@dataclass(frozen=True)
class Option:
    """A token that may come next."""

    token: int
    text: str
    """As the vocabulary shows it."""
    probability: float
    """With the present settings."""
    ends_text: bool


class Draft:
    """A text in the making. Every step is a place in the text, so that all of them can be taken back.

    Args:
        start: where the text stands.
        settings: of drawing.
        seed: the same seed and steps give the same text; drawing anew after taking back gives another.
    """

    def __init__(self, start: Reading, settings: SamplingConfig | None = None, *, seed: int = 0) -> None:
        self._places = [start]
        self._rules = Rules(settings or SamplingConfig(), start.bundle.tokenizer)
        self._seed, self._num_draws = seed, 0

    @property
    def place(self) -> Reading:
        """Where the text stands now."""
        return self._places[-1]

    @property
    def text(self) -> str:
        """All of it."""
        return self.place.text

    @property
    def settings(self) -> SamplingConfig:
        """How tokens are drawn at present."""
        return self._rules.settings

    def options(self, count: int = 9) -> list[Option]:
        """The most probable next tokens, the best first; none that the settings rule out."""
        place = self.place
        chooser = Chooser(self._rules, tokens=place.tokens, num_given=place.num_given)
        (probability_V,) = probabilities(place.logits_V[None], [chooser])
        tokenizer = place.bundle.tokenizer
        return [
            Option(token, tokenizer.vocabulary[token], float(probability_V[token]), token == tokenizer.boundary_id)
            for token in np.argsort(-probability_V, kind="stable")[: max(count, 0)].tolist()
            if probability_V[token] > 0
        ]

    def choose(self, number: int) -> None:
        """Take the option of this number, 1 the most probable."""
        options = self.options(number)
        if not 1 <= number <= len(options):
            there = len(self.options(len(self.place.logits_V)))
            raise UserError(f"there is no option {number}: give 1 to {there}")
        if options[-1].ends_text:
            raise UserError(f"option {number} is the end of the text: save or quit, or choose another")
        self._places.append(self.place.take([options[-1].token]))

    def write(self, text: str, *, unknown: Unknown = "error") -> None:
        """Put text of your own at the end."""
        self._places.append(self.place.read(text, unknown=unknown))

    def draw(self, num_tokens: int = 1) -> FinishReason:
        """Let the model go on for so many tokens at most, and say what ended them."""
        settings = resolve_sampling(self.settings, {"max_new_tokens": num_tokens, "min_new_tokens": 0})
        self._num_draws += 1
        seed = derived_seed(self._seed, "draft", self._num_draws)
        sampler = Sampler(self.place.bundle, start=self.place, settings=settings, seed=seed)
        reason = sampler.run().finish_reason
        if sampler.end is not None and sampler.end is not self.place:
            self._places.append(sampler.end)
        return reason

    def undo(self) -> None:
        """Take back the last step."""
        if len(self._places) == 1:
            raise UserError("there is no step to take back")
        self._places.pop()

    def change(self, name: str, value: Any) -> None:
        """Change a setting of drawing. Raises ConfigError or UserError, and changes nothing, if it is not accepted."""
        if name in OF_WHOLE_TEXTS:
            raise UserError(f"{name} has no meaning here: each draw says how far it goes")
        self._rules = Rules(resolve_sampling(self.settings, {name: value}), self.place.bundle.tokenizer)

    def save(self, path: str | Path) -> None:
        """Save the place in the text; see :meth:`elman.reading.Reading.save`."""
        self.place.save(path)


def resolve_sampling(settings: SamplingConfig, changes: dict[str, Any]) -> SamplingConfig:
    """The settings with some changed, checked."""
    return resolve({"sampling": settings.model_dump() | changes}).sampling
