"""What a model has learned of its tokens: the neighbours of each in the embedding, and a map of them.

Shape letters: V vocabulary, E embedding, N tokens shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import TextError, UserError
from elman.inspection.states import participation_ratio, principal_axes
from elman.models.file import Bundle, load_model
from elman.text.tokenizers import Tokenizer

_SHOWN = 300
_NUM_NEIGHBOURS = 8
_NUM_WORDS = 24
_VOWELS = frozenset("aeiouyäöüáéíóúàèìòùâêîôû")


@dataclass(frozen=True)
class Neighbours:
    """A token and those whose embeddings point the same way."""

    token: str
    nearest: tuple[tuple[str, float], ...]
    """With the cosines, the nearest first."""


@dataclass(frozen=True)
class Point:
    """A token on the map."""

    token: str
    what: str
    """vowel, consonant, capital, digit, space, sign, or word where it is longer."""
    x: float
    y: float


@dataclass(frozen=True)
class Embeddings:
    """What was found."""

    kind: str
    level: str
    vocabulary: int
    embedding_size: int
    effective_dimension: float
    """The participation ratio of the embeddings of the tokens on the map."""
    explained: tuple[float, float]
    """Shares of their variance along the two axes of the map."""
    neighbours: tuple[Neighbours, ...]
    points: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self)


def inspect_embeddings(where: str | Path, words: Sequence[str] = (), *, cell: str | None = None) -> Embeddings:
    """Look at the embedding of a model.

    Args:
        where: a run folder or a model file.
        words: tokens whose neighbours are asked for; none: the first of the vocabulary.
        cell: a person's own cell, where the model was trained with one.

    Raises:
        UserError: the model has no embedding, or no such token.
    """
    return look_at_embeddings(load_model(where, cell=cell), words)


def look_at_embeddings(bundle: Bundle, words: Sequence[str] = ()) -> Embeddings:
    """The same for a model; see :func:`inspect_embeddings`."""
    tokenizer = bundle.tokenizer
    vectors_VE = _embedding(bundle)
    unit_VE = vectors_VE / np.maximum(np.linalg.norm(vectors_VE, axis=1, keepdims=True), 1e-12)
    special = {tokenizer.boundary_id, tokenizer.unknown_id}
    ordinary = np.array([token for token in range(tokenizer.size) if token not in special])
    asked = [_token_of(word, tokenizer) for word in words] or ordinary[:_NUM_WORDS].tolist()
    shown_N = np.array(list(dict.fromkeys([*asked, *ordinary.tolist()]))[:_SHOWN])
    centred_NE = vectors_VE[shown_N] - vectors_VE[shown_N].mean(0)
    map_N2 = principal_axes(centred_NE)
    total = float((centred_NE**2).sum()) or 1.0
    along = (map_N2**2).sum(0) / total
    return Embeddings(
        kind=bundle.network.config.kind,
        level=tokenizer.level,
        vocabulary=tokenizer.size,
        embedding_size=vectors_VE.shape[1],
        effective_dimension=participation_ratio(vectors_VE[shown_N]),
        explained=(float(along[0]), float(along[1])),
        neighbours=tuple(_neighbours(token, unit_VE, ordinary, tokenizer) for token in asked),
        points=tuple(
            Point(tokenizer.vocabulary[token], _what(tokenizer.vocabulary[token]), float(x), float(y))
            for token, (x, y) in zip(shown_N.tolist(), map_N2, strict=True)
        ),
    )


def _embedding(bundle: Bundle) -> NDArray[np.float64]:
    network = bundle.network
    for component in network.components():
        weight = component.parameters.get("weight")
        if component.name == "embedding" and weight is not None and len(weight) == network.vocab_size:
            vectors: NDArray[np.float64] = weight.detach().double().cpu().numpy()
            return vectors
    raise UserError(
        f"model.kind {network.config.kind!r} has no embedding of its vocabulary: give a recurrent or a window model"
    )


def _token_of(word: str, tokenizer: Tokenizer) -> int:
    tokens = tokenizer.encode(word, unknown="token")
    if len(tokens) != 1 or tokens[0] == tokenizer.unknown_id:
        raise TextError(f"{word!r} is no token of this model, whose level is {tokenizer.level}: give single ones")
    return int(tokens[0])


def _neighbours(
    token: int, unit_VE: NDArray[np.float64], ordinary: NDArray[np.int64], tokenizer: Tokenizer
) -> Neighbours:
    cosines = unit_VE[ordinary] @ unit_VE[token]
    order = [index for index in np.argsort(-cosines, kind="stable").tolist() if ordinary[index] != token]
    nearest = tuple((tokenizer.vocabulary[ordinary[i]], float(cosines[i])) for i in order[:_NUM_NEIGHBOURS])
    return Neighbours(tokenizer.vocabulary[token], nearest)


def _what(token: str) -> str:
    text = token.strip()
    if not text:
        return "space"
    if len(text) > 1:
        return "word"
    if text.isdigit():
        return "digit"
    if not text.isalpha():
        return "sign"
    if text.isupper():
        return "capital"
    return "vowel" if text in _VOWELS else "consonant"
