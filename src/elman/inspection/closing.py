"""Does a model close what was opened? Quotes and brackets of a real text, by the distance from the opening sign.

At every place where the text closes one, the model is asked three things: how probable the right sign was, whether it
was the most probable of the closing signs (which one it is was decided at the opening, far back), and whether it was
the most probable of all tokens (that takes knowing when, too). Cases are printed with every figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elman.errors import TextError
from elman.inspection.labels import Scanner, texts_of
from elman.inspection.predictions import first_tokens, load_plain, predictions
from elman.inspection.recording import Ids
from elman.judge import SplitName, find_subject
from elman.models.file import Bundle
from elman.text.tokenizers import Tokenizer

_PAIRS = {"(": ")", "[": "]", "{": "}"}
_SIGNS = {"quotes": "'\"”»", "brackets": ")]}"}
_NEAREST_QUOTE = 2  # the second of three signs closes nothing


class Closed(NamedTuple):
    """A sign that closes, and how far back its partner is, in tokens."""

    group: str
    position: int
    sign: str
    distance: int


@dataclass(frozen=True)
class AtDistance:
    """The closings of one group whose opening lies about as far back."""

    nearest: int
    farthest: int
    cases: int
    probability: float
    """Of the right sign, in the mean."""
    which: float
    """Share of the cases in which the right sign was the most probable of the closing ones."""
    top: float
    """Share of the cases in which it was the most probable of all tokens."""


@dataclass(frozen=True)
class Group:
    """Quotes, or brackets."""

    name: str
    majority: float
    """Share of the most common sign: what one reaches in ``which`` who has forgotten the opening."""
    by_distance: tuple[AtDistance, ...]


@dataclass(frozen=True)
class Closings:
    """What was found."""

    corpus: str
    split: str
    kind: str
    tokens: int
    groups: tuple[Group, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self)


def inspect_closings(
    where: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    max_tokens: int = 200_000,
    cell: str | None = None,
) -> Closings:
    """Measure how a model of any kind closes quotes and brackets.

    Args:
        where: a run folder or a model file.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the run.
        split: which part; none: the test part, else the validation part.
        max_tokens: read so many tokens of the text at most.
        cell: a person's own cell, where the model was trained with one.

    Raises:
        TextError: nothing is closed in the text by a sign that is a token of its own.
    """
    bundle = load_plain(where, cell=cell)
    subject = find_subject(where, bundle, text, split=split, cell=cell)
    found = closings_along(bundle, first_tokens(subject.tokens.tokens, max_tokens))
    return replace(found, corpus=subject.corpus, split=subject.split)


def closings_along(bundle: Bundle, tokens: Ids) -> Closings:
    """The same for tokens, the boundary first."""
    closed = list(_closed(tokens, bundle.tokenizer))
    if not closed:
        raise TextError(
            "no quotes and no brackets are closed in this text by a sign that is a token of its own: give a text that "
            "has some, and a model whose tokens are characters or bytes"
        )
    rows = _judge(bundle, tokens, closed)
    groups = []
    for name in _SIGNS:
        own = [index for index, one in enumerate(closed) if one.group == name]
        if not own:
            continue
        _, counts = np.unique([closed[index].sign for index in own], return_counts=True)
        distances = np.array([closed[index].distance for index in own])
        by_distance = []
        for power in range(int(np.log2(distances.max())) + 1):
            at = np.flatnonzero((distances >= 2**power) & (distances < 2 ** (power + 1)))
            if len(at):
                means = rows[np.array(own)[at]].mean(0).tolist()
                by_distance.append(AtDistance(2**power, 2 ** (power + 1) - 1, len(at), *means))
        groups.append(Group(name, float(counts.max() / len(own)), tuple(by_distance)))
    return Closings("", "text", bundle.network.config.kind, len(tokens) - 1, tuple(groups))


def _closed(tokens: Ids, tokenizer: Tokenizer) -> Iterator[Closed]:
    """Every closing sign that is a token of its own and whose opening was read."""
    scanner = Scanner()
    opened_quote = 0
    opened: list[tuple[str, int]] = []
    for position, text in enumerate(texts_of(tokens, tokenizer)):
        if text is None:
            scanner, opened = Scanner(), []
            continue
        for character in text:
            quote, depth, in_comment = scanner.quote, scanner.depth, scanner.in_comment
            scanner.read(character)
            is_alone = text.strip() == character
            if scanner.quote and not quote:
                opened_quote = position
            elif quote == character and not scanner.quote:
                if is_alone and position - opened_quote >= _NEAREST_QUOTE:
                    yield Closed("quotes", position, character, position - opened_quote)
            elif quote or in_comment:
                pass
            elif scanner.depth > depth:
                opened.append((_PAIRS[character], position))
            elif scanner.depth < depth and character in _PAIRS.values() and opened:
                sign, start = opened.pop()
                if sign == character and is_alone:
                    yield Closed("brackets", position, character, position - start)
            elif not scanner.depth:
                opened = []


def _judge(bundle: Bundle, tokens: Ids, closed: Sequence[Closed]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """For each closing its probability, whether it was the first of the closing signs, and the first of all."""
    texts = [bundle.tokenizer.decoder().feed(token).strip() for token in range(bundle.tokenizer.size)]
    rivals = {
        name: np.array([token for token, text in enumerate(texts) if len(text) == 1 and text in signs])
        for name, signs in _SIGNS.items()
    }
    rows = np.zeros((len(closed), 3))
    at = 0
    for piece in predictions(bundle.network, tokens):
        log_probs_TV = piece.log_probs_TV.double().cpu().numpy()
        while at < len(closed) and closed[at].position < piece.start + len(log_probs_TV):
            log_probs_V = log_probs_TV[closed[at].position - piece.start]
            log_prob = log_probs_V[int(tokens[closed[at].position])]
            is_first = log_prob >= log_probs_V[rivals[closed[at].group]].max()
            rows[at] = np.exp(log_prob), is_first, log_prob >= log_probs_V.max()
            at += 1
    return rows
