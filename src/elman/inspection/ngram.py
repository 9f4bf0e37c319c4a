"""How much of a text an n-gram model has seen: the sparsity that smoothing is there for, order by order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elman.errors import UserError
from elman.judge import SplitName, find_subject
from elman.models.file import Bundle, load_model
from elman.models.ngram.model import NgramModel

_TOKENS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class OfOrder:
    """The n-grams of one order: a token of the text and the order - 1 tokens before it."""

    order: int
    counted: int
    """Different ones that the model holds."""
    unseen: float
    """Share of those of the text that were never seen in training."""
    context_unseen: float
    """Share of those whose context was never seen."""
    backoff_depth: float
    """By how many tokens a model of this order shortens its context until the token was seen after it, in the mean."""


@dataclass(frozen=True)
class Sparsity:
    """What a model has seen of a text."""

    corpus: str
    split: str
    """The part of the corpus, or ``text`` for one that is not divided."""
    tokens: int
    """Predicted ones."""
    orders: tuple[OfOrder, ...]
    """From order 1 to that of the model."""
    notices: tuple[str, ...] = ()
    """What a reader of the figures should know about the text."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {"orders": [asdict(order) for order in self.orders]}


def inspect_ngram(
    where: str | Path, text: str | Path | Sequence[str | Path] | None = None, *, split: SplitName | None = None
) -> Sparsity:
    """Look up a text in an n-gram model, as one stream.

    Args:
        where: a run folder or a model file.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the run.
        split: which part; none: the test part, else the validation part.

    Raises:
        UserError: the model is no n-gram model, or there is no such text or part.
    """
    bundle = load_model(where)
    orders_of(bundle, np.zeros(1, np.int64))  # refuses another kind before a corpus is read
    subject = find_subject(where, bundle, text, split=split)
    tokens = subject.tokens.tokens
    orders = orders_of(bundle, tokens)
    return Sparsity(subject.corpus, subject.split, len(tokens) - 1, orders, subject.notices)


def orders_of(model: Bundle, tokens: NDArray[np.integer[Any]]) -> tuple[OfOrder, ...]:
    """What an n-gram model has seen of tokens, the boundary first."""
    network = model.network
    if not isinstance(network, NgramModel):
        raise UserError(f"this is model.kind {network.config.kind!r}, which counts no n-grams; accepted: ngram")
    tables, state = network.head.tables, network.initial_state(1)
    found, known = [], []
    for start in range(0, len(tokens) - 1, _TOKENS_AT_ONCE):
        piece = torch.from_numpy(tokens[start : start + _TOKENS_AT_ONCE + 1].astype(np.int64))
        contexts_BTK, state = network.features(piece[None, :-1], state)
        contexts_NK = contexts_BTK[0].numpy()
        found.append(tables.score(contexts_NK, piece[1:].numpy())[1])
        known.append((tables.paths(contexts_NK) >= 0).sum(1) - 1)
    lengths, context_lengths = (np.concatenate([np.zeros(0, np.int64), *parts]) for parts in (found, known))
    orders = []
    for order in range(1, network.config.order + 1):
        # At the start of the text there are not yet enough tokens for a whole n-gram.
        of_text, contexts = lengths[max(0, order - 2) :], context_lengths[max(0, order - 2) :]
        orders.append(
            OfOrder(
                order=order,
                counted=tables.num_ngrams(order),
                unseen=_mean(of_text < order),
                context_unseen=_mean(contexts < order - 1),
                backoff_depth=_mean(order - np.minimum(of_text, order)),
            )
        )
    return tuple(orders)


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else 0.0
