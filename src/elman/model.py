"""A trained model in Python: load it, draw from it, judge it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elman.data.prepare import tokenize_text
from elman.evaluation import Evaluation, StatePolicy, evaluate_split
from elman.generation import Generated, Sampler, Unknown
from elman.models.file import Bundle, load_model
from elman.settings import resolve


class Model(Bundle):
    """A trained network with its tokenizer, and what one does with it."""

    def generate(
        self, prompt: str = "", *, seed: int = 0, stop: Sequence[str] = (), unknown: Unknown = "error", **sampling: Any
    ) -> Generated:
        """Draw a text.

        Args:
            prompt: how it begins; empty: from the boundary token alone.
            seed: the same seed gives the same text.
            stop: strings that end it.
            unknown: ``skip`` leaves out characters of the prompt that the model never saw.
            sampling: ``max_new_tokens``, ``temperature``, ``top_k``, ``top_p``.
        """
        return Sampler(
            self, prompt, settings=resolve({"sampling": sampling}).sampling, seed=seed, stop=stop, unknown=unknown
        ).run()

    def score(self, text: str, *, state_policy: StatePolicy = "carried") -> Evaluation:
        """The negative log-likelihood of a text and all figures that follow from it."""
        return evaluate_split(
            self.network, tokenize_text(text, self.tokenizer), self.tokenizer, state_policy=state_policy
        )


def load(where: str | Path, *, device: str = "cpu", cell: str | None = None) -> Model:
    """Read a model file, or the one in a run folder; see :func:`elman.models.file.load_model`."""
    bundle = load_model(where, device=device, cell=cell)
    return Model(bundle.network, bundle.tokenizer, bundle.provenance)
