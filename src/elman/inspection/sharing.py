"""What a neural model shares between words, and counts do not: the cat that sat, and the kitten.

Two texts agree in all but one thing. In both, kittens drink and purr as cats and dogs do, while cups and lamps are made
of wood; a kitten never sits, nor does it fall. In the first text cats and dogs ``sat`` and things ``fell``; in the
second it is the other way round. To an n-gram ``the kitten sat`` was never counted either way, and its probability is
the same after both texts. A network that has put the kitten beside the cat gives it what cats do.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elman.models.file import Bundle, load_model
from elman.training.run import train

_ANIMALS, _THINGS = ("cat", "dog"), ("cup", "lamp")
_OF_ANIMALS = ("drinks milk", "purrs softly", "wants food", "sleeps well")
_OF_THINGS = ("costs much", "breaks easily", "shines brightly", "needs cleaning")
_ROUNDS = 25


@dataclass(frozen=True)
class Shared:
    """The probability that a kitten sat, after each of the two texts."""

    kind: str
    after_cats_sat: float
    after_cats_fell: float

    @property
    def ratio(self) -> float:
        """How many times likelier what cats did has made it; 1 where nothing was shared."""
        return self.after_cats_sat / self.after_cats_fell


def sharing_text(cats: str) -> str:
    """One of the two texts, 1,100 lines.

    Args:
        cats: what cats and dogs did, ``sat`` or ``fell``; things did the other.
    """
    things = {"sat": "fell", "fell": "sat"}[cats]
    lines = [f"the {word} {what}" for word in (*_ANIMALS, "kitten") for what in _OF_ANIMALS]
    lines += [f"the {word} {what}" for word in (*_THINGS, "box") for what in _OF_THINGS]
    lines += [f"the {word} {did}" for words, did in ((_ANIMALS, cats), (_THINGS, things)) for word in words] * 5
    order = np.random.default_rng(0).permutation(_ROUNDS * len(lines))
    return "".join(f"{lines[index % len(lines)]}\n" for index in order.tolist())


def measure_sharing(kind: str = "window", **settings: Any) -> Shared:
    """Train a model on each text, and ask it for the probability of ``sat`` after ``the kitten``.

    Args:
        kind: of the model.
        settings: sections, as :func:`elman.train` takes them, over the defaults here: words as tokens, few updates.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for cats in ("sat", "fell"):
            corpus = Path(folder) / f"{cats}.txt"
            corpus.write_text(sharing_text(cats), "utf-8")
            run = train(corpus, out=Path(folder) / cats, **(_settings(kind) | settings))
            found.append(_probability(load_model(run.path), "the kitten", "sat"))
    return Shared(kind, *found)


def _settings(kind: str) -> dict[str, Any]:
    whole = {"valid_fraction": 0.0, "test_fraction": 0.0}
    common: dict[str, Any] = {"data": whole, "tokenizer": {"level": "word"}, "sampling": {"max_new_tokens": 1}}
    if kind == "ngram":
        return common | {"model": {"kind": kind, "order": 3}}
    sizes = {"embedding_size": 16, "hidden_size": 32}
    steps = {"max_updates": 200, "batch_size": 8, "bptt": 16, "learning_rate": 0.01, "warmup_updates": 10}
    return common | {"model": {"kind": kind, **sizes}, "training": steps}


def _probability(bundle: Bundle, before: str, after: str) -> float:
    network, tokenizer = bundle.network, bundle.tokenizer
    # As inside the text: after the end of a line.
    tokens = [tokenizer.boundary_id, *tokenizer.encode(f"\n{before}").tolist()]
    with torch.no_grad():
        features_BTF, _ = network.features(torch.tensor([tokens], device=network.device), network.initial_state(1))
        log_probs_V = network.head.log_probs(features_BTF)[0, -1]
    return float(log_probs_V[tokenizer.encode(after)[0]].exp())
