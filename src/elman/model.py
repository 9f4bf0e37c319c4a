"""A trained model in Python: load it, draw from it, judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from elman.config import SamplingConfig
from elman.data.prepare import tokenize_text
from elman.engine import AnyStepper, stepper
from elman.errors import UserError
from elman.evaluation import Evaluation, StatePolicy, evaluate_split
from elman.generation import Generated, Sampler, generate_batch
from elman.models.file import Bundle, load_model
from elman.reading import Reading, Unknown
from elman.settings import resolve
from elman.translation import Translation, translate


class Model(Bundle):
    """A trained network with its tokenizer, and what one does with it."""

    @cached_property
    def stepper(self) -> AnyStepper:
        """The fastest form of the model's step, compiled where it can be (:mod:`elman.engine`), when first used."""
        return stepper(self.network)

    def generate(
        self,
        prompt: str = "",
        *,
        start: Reading | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        unknown: Unknown = "error",
        **sampling: Any,
    ) -> Generated:
        """Draw a text.

        Args:
            prompt: how it begins, or goes on from ``start``; empty: nothing is read.
            start: a place in a text, from :meth:`read`; none: the beginning.
            seed: the same seed gives the same text.
            stop: strings that end it.
            unknown: ``skip`` leaves out characters of the prompt that the model never saw.
            sampling: the settings of :class:`elman.config.SamplingConfig` that concern one text.
        """
        if start is not None and start.bundle.network is not self.network:
            raise UserError("start is a place in a text of another model: read the text with this one")
        return Sampler(
            self,
            prompt,
            start=start,
            settings=_settings(sampling),
            seed=seed,
            stop=stop,
            unknown=unknown,
            stepper=self.stepper,
        ).run()

    def generate_batch(
        self,
        prompts: Sequence[str],
        *,
        num_samples: int = 1,
        seed: int = 0,
        stop: Sequence[str] = (),
        unknown: Unknown = "error",
        **sampling: Any,
    ) -> list[Generated]:
        """Draw ``num_samples`` texts for each prompt, all side by side, the texts of one prompt together.

        The i-th of them is the one that :meth:`generate` gives alone for its prompt and ``seed + i``, as far as the
        network computes the same for a row whatever stands beside it.
        """
        rows = [prompt for prompt in prompts for _ in range(num_samples)]
        seeds = range(seed, seed + len(rows))
        return generate_batch(
            self,
            rows,
            seeds=seeds,
            settings=_settings(sampling),
            stop=stop,
            unknown=unknown,
            stepper=self.stepper,
        )

    def translate(
        self, sources: Sequence[str], *, num_beams: int = 1, max_new_tokens: int = 300, length_penalty: float = 1.0
    ) -> list[Translation]:
        """Write the target of each source, by a model of pairs; see :func:`elman.translation.translate`."""
        return translate(
            self, sources, num_beams=num_beams, max_new_tokens=max_new_tokens, length_penalty=length_penalty
        )

    def read(self, text: str = "", *, unknown: Unknown = "error") -> Reading:
        """Read a text from its beginning: a place to draw from, branch at, save or return to."""
        return Reading.start(self).read(text, unknown=unknown)

    def load_reading(self, path: str | Path) -> Reading:
        """Take up a place that was saved by :meth:`elman.reading.Reading.save`, with this very model."""
        return Reading.load(path, self)

    def score(self, text: str, *, state_policy: StatePolicy = "carried") -> Evaluation:
        """The negative log-likelihood of a text and all figures that follow from it."""
        return evaluate_split(
            self.network, tokenize_text(text, self.tokenizer), self.tokenizer, state_policy=state_policy
        )


def load(where: str | Path, *, device: str = "cpu", cell: str | None = None) -> Model:
    """Read a model file, or the one in a run folder; see :func:`elman.models.file.load_model`."""
    bundle = load_model(where, device=device, cell=cell)
    return Model(bundle.network, bundle.tokenizer, bundle.provenance)


def _settings(sampling: Mapping[str, Any]) -> SamplingConfig:
    return resolve({"sampling": sampling}).sampling
