"""Do models close what was opened? Quotes and brackets of a text, by the distance from the opening sign.

*By probability*: at every place where the text closes one, each model is asked three things: how probable the right
sign was, whether it was the most probable of the closing signs (which one it is was decided at the opening, far back),
and whether it was the most probable of all tokens (that takes knowing when, too).

*On samples*: from places of the text where one has been open for 50, 100, 200 or 400 tokens, each model writes on by a
fair draw. How often what is open gets closed by its own sign within so many tokens is held against how often the text
itself closes it there.

Cases are printed with every figure. A string in three quotes is closed by the first of the three that end it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elman.config import SamplingConfig
from elman.engine import stepper
from elman.errors import TextError, UserError
from elman.generation import generate_batch
from elman.inspection.labels import Scanner, texts_of
from elman.inspection.predictions import first_tokens, load_plain, predictions
from elman.inspection.recording import Ids
from elman.judge import SplitName, find_subject
from elman.models.file import Bundle
from elman.text.tokenizers import Tokenizer

DISTANCES = (50, 100, 200, 400)
"""Tokens since the opening from which models write on."""
WITHIN = 100
"""Tokens that they write, and within which a sign counts as closed."""
FEW_CASES = 10
"""A share of fewer cases is marked: little can be judged by it."""

_EDGES = (1, 10, 25, *DISTANCES)
"""The closings of a text are counted between these distances, and beyond the last."""
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_SIGNS = {"quotes": "'\"”»", "brackets": ")]}"}
_NEAREST_QUOTE = 2  # the second of three signs closes nothing
_CONTEXT = 600
"""Tokens that a model has read before it writes on."""
_ROWS_AT_ONCE = 64


class Opened(NamedTuple):
    """Quotes or a bracket that a text has opened."""

    group: str
    sign: str
    """What will close it: one sign, or three quotes."""
    position: int
    """In tokens, of the last sign that opened it."""


class Closed(NamedTuple):
    """A sign that closes, the first where there are three."""

    opened: Opened
    position: int
    is_alone: bool
    """Whether the sign, or each of three, is a token of its own."""

    @property
    def distance(self) -> int:
        """Tokens since the opening."""
        return self.position - self.opened.position


class _Follower:
    """Follows what is open along the tokens of a text."""

    def __init__(self) -> None:
        self.position = -1
        """Of the last token."""
        self._begin()

    def _begin(self) -> None:
        self._scanner = Scanner()
        self._quote: Opened | None = None
        self._brackets: list[Opened] = []
        self._last: deque[str] = deque(maxlen=3)

    @property
    def innermost(self) -> Opened | None:
        """What was opened last and is still open."""
        return self._quote or (self._brackets[-1] if self._brackets else None)

    def holds(self, opened: Opened) -> bool:
        """Whether it is still open."""
        return opened == self._quote or opened in self._brackets

    def read(self, text: str | None) -> list[Closed]:
        """Move on by the text of a token, none at the border of a document: what it closes."""
        self.position += 1
        if text is None:
            self._begin()
            return []
        self._last.append(text.strip())
        return [closed for character in text if (closed := self._read(character)) is not None]

    def _read(self, character: str) -> Closed | None:
        scanner = self._scanner
        quote, depth, in_comment = scanner.quote, scanner.depth, scanner.in_comment
        scanner.read(character)
        if quote:
            return None if scanner.quote else self._end_quote(character)
        if scanner.quote:
            self._quote = Opened("quotes", scanner.quote, self.position)
        elif in_comment:
            pass
        elif scanner.depth > depth:
            self._brackets.append(Opened("brackets", _PAIRS[character], self.position))
        elif scanner.depth < depth and character in _PAIRS.values() and self._brackets:
            opened = self._brackets.pop()
            if opened.sign == character:
                return Closed(opened, self.position, self._last[-1] == character)
        elif not scanner.depth:
            self._brackets = []
        return None

    def _end_quote(self, character: str) -> Closed | None:
        opened, self._quote = self._quote, None
        if opened is None or character != opened.sign[0]:
            return None  # the end of a line or of a paragraph has ended them
        length = len(opened.sign)
        first = self.position - length + 1
        if first - opened.position < _NEAREST_QUOTE:
            return None
        return Closed(opened, first, list(self._last)[-length:] == [character] * length)


@dataclass(frozen=True)
class Judged:
    """What a model makes of some closings."""

    probability: float
    """Of the right sign, in the mean."""
    which: float
    """Share of the cases in which the right sign was the most probable of the closing ones."""
    top: float
    """Share of the cases in which it was the most probable of all tokens."""


@dataclass(frozen=True)
class AtDistance:
    """The closings of one group whose opening lies about as far back."""

    nearest: int
    farthest: int | None
    """None: no matter how far."""
    cases: int
    models: Mapping[str, Judged]

    @property
    def words(self) -> str:
        """The distances, for people."""
        return f"{self.nearest:,} and more" if self.farthest is None else f"{self.nearest:,} to {self.farthest:,}"


@dataclass(frozen=True)
class WrittenOn:
    """Places at which the innermost sign had been open for so many tokens, and how often it is closed soon after."""

    distance: int
    cases: int
    text: float | None
    """The share in which the text itself closes it; none where there is no such place."""
    models: Mapping[str, float | None]
    """The share in which a model does that writes on from there."""


@dataclass(frozen=True)
class Group:
    """Quotes, or brackets."""

    name: str
    majority: float
    """Share of the most common sign: what one reaches in ``which`` who has forgotten the opening."""
    by_distance: tuple[AtDistance, ...]
    written_on: tuple[WrittenOn, ...]
    """Empty where no model was asked to write."""

    @property
    def is_open_long(self) -> bool:
        """Whether there is any place that a model was asked to write on from."""
        return any(one.cases for one in self.written_on)


@dataclass(frozen=True)
class Closings:
    """What was found."""

    corpus: str
    split: str
    tokens: int
    models: Mapping[str, str]
    """The kind of each by its name."""
    within: int
    """Tokens that models went on for."""
    groups: tuple[Group, ...]
    notices: tuple[str, ...] = ()
    """What a reader of the figures should know about the text."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self)


def inspect_closings(
    runs: Sequence[str | Path],
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    max_tokens: int = 200_000,
    num_samples: int = 0,
    seed: int = 0,
    cell: str | None = None,
) -> Closings:
    """Measure how models of any kind close quotes and brackets.

    Args:
        runs: run folders or model files, one and more, with the same tokens.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the first run.
        split: which part; none: the test part, else the validation part.
        max_tokens: read so many tokens of the text at most.
        num_samples: let each model write on from so many places for each distance and group.
        seed: of what they write.
        cell: a person's own cell, where a single model was trained with one.

    Raises:
        UserError: the models have different tokens, or none was given.
        TextError: nothing is closed in the text by a sign that is a token of its own.
    """
    if not runs:
        raise UserError("no model was given: name a run folder or a model.safetensors")
    if num_samples < 0:
        raise UserError(f"{num_samples} samples were asked for; accepted: 0 and more")
    bundles = dict(zip(_names(runs), (load_plain(run, cell=cell) for run in runs), strict=True))
    first, *others = bundles.values()
    for where, other in zip(runs[1:], others, strict=True):
        if other.tokenizer.to_dict() != first.tokenizer.to_dict():
            raise UserError(
                f"{str(where)!r} has other tokens than {str(runs[0])!r}: their signs stand in different places; look "
                "at each alone"
            )
        if text is None and other.provenance.get("corpus_sha256") != first.provenance.get("corpus_sha256"):
            raise UserError(f"{str(where)!r} was trained on another text than {str(runs[0])!r}: give a TEXT")
    subject = find_subject(runs[0], first, text, split=split, cell=cell)
    tokens = first_tokens(subject.tokens.tokens, max_tokens)
    found = closings_along(bundles, tokens, num_samples=num_samples, seed=seed)
    return replace(found, corpus=subject.corpus, split=subject.split, notices=subject.notices)


def _names(runs: Sequence[str | Path]) -> list[str]:
    """A short name for each, and the whole of it where two would have the same."""
    paths = [Path(run).resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise UserError("a model is given twice: give each once")
    short = [(path.parent if path.name == "model.safetensors" else path).name for path in paths]
    return [name if short.count(name) == 1 else str(run) for name, run in zip(short, runs, strict=True)]


def closings_along(models: Mapping[str, Bundle], tokens: Ids, *, num_samples: int = 0, seed: int = 0) -> Closings:
    """The same for models by name, one at least, and tokens, the boundary first."""
    tokenizer = next(iter(models.values())).tokenizer
    closed = list(_closed(tokens, tokenizer))
    if not closed:
        signs = " ".join(sign for signs in _SIGNS.values() for sign in signs)
        raise TextError(
            f"no quotes and no brackets are closed in this text by a sign that is a token of its own (looked for: "
            f"{signs}): give a text that has some, and a model whose tokens are characters or bytes"
        )
    rows = {name: _judge(bundle, tokens, closed) for name, bundle in models.items()}
    written = _written_on(models, tokens, num_samples, seed) if num_samples else {}
    groups = []
    for name in _SIGNS:
        own = np.array([one.opened.group == name for one in closed])
        if not own.any():
            continue
        _, counts = np.unique([one.opened.sign[0] for one in closed if one.opened.group == name], return_counts=True)
        distances = np.where(own, [one.distance for one in closed], 0)
        by_distance = []
        for nearest, beyond in pairwise((*_EDGES, np.inf)):
            at = (distances >= nearest) & (distances < beyond)
            if at.any():
                farthest = None if beyond == np.inf else int(beyond) - 1
                judged = {model: Judged(*its[at].mean(0).tolist()) for model, its in rows.items()}
                by_distance.append(AtDistance(int(nearest), farthest, int(at.sum()), judged))
        groups.append(Group(name, float(counts.max() / own.sum()), tuple(by_distance), written.get(name, ())))
    kinds = {name: bundle.network.config.kind for name, bundle in models.items()}
    return Closings("", "text", len(tokens) - 1, kinds, WITHIN, tuple(groups))


def _closed(tokens: Ids, tokenizer: Tokenizer) -> Iterator[Closed]:
    """Every closing sign that is a token of its own and whose opening was read."""
    follower = _Follower()
    for text in texts_of(tokens, tokenizer):
        yield from (one for one in follower.read(text) if one.is_alone)


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
            is_first = log_prob >= log_probs_V[rivals[closed[at].opened.group]].max()
            rows[at] = np.exp(log_prob), is_first, log_prob >= log_probs_V.max()
            at += 1
    return rows


def _written_on(
    models: Mapping[str, Bundle], tokens: Ids, num_samples: int, seed: int
) -> dict[str, tuple[WrittenOn, ...]]:
    """What models do where something has been open for each distance, by its group, at places spread over the text."""
    tokenizer = next(iter(models.values())).tokenizer
    positions: dict[tuple[str, int], list[int]] = {(name, distance): [] for name in _SIGNS for distance in DISTANCES}
    for follower in _places(tokens, tokenizer):
        if (opened := follower.innermost) is not None:
            positions.get((opened.group, follower.position - opened.position), []).append(follower.position)
    chosen = {which: _spread_out(found, num_samples) for which, found in positions.items()}
    needed = {position for found in chosen.values() for position in found}
    followers = {
        follower.position: copy.deepcopy(follower)
        for follower in _places(tokens, tokenizer)
        if follower.position in needed
    }
    forms = {name: stepper(bundle.network) for name, bundle in models.items()}
    rows: dict[str, list[WrittenOn]] = {name: [] for name in _SIGNS}
    for (group, distance), places in chosen.items():
        here = [followers[place] for place in places]
        prompts = [tokenizer.decode(_context(tokens, place, tokenizer)) for place in places]
        drawn = {name: _drawn(bundle, prompts, seed, forms[name]) for name, bundle in models.items()}
        given = _share_closed(here, [tokens[place + 1 : place + 1 + WITHIN] for place in places], tokenizer)
        shares = {name: _share_closed(here, texts, tokenizer) for name, texts in drawn.items()}
        rows[group].append(WrittenOn(distance, len(places), given, shares))
    return {name: tuple(own) for name, own in rows.items()}


def _places(tokens: Ids, tokenizer: Tokenizer) -> Iterator[_Follower]:
    """A follower at each place of a text from which it goes on for long enough; it is the same one, and moves on."""
    follower = _Follower()
    for text in texts_of(tokens[: max(0, len(tokens) - WITHIN)], tokenizer):
        follower.read(text)
        yield follower


def _spread_out(positions: Sequence[int], count: int) -> list[int]:
    """Some of them, evenly spread; all where there are fewer."""
    if len(positions) <= count:
        return list(positions)
    return [positions[index] for index in np.linspace(0, len(positions) - 1, count).astype(int)]


def _context(tokens: Ids, position: int, tokenizer: Tokenizer) -> Ids:
    """The tokens up to a place, from the start of its document or from so many before."""
    read = tokens[max(0, position + 1 - _CONTEXT) : position + 1]
    borders = np.flatnonzero(read == tokenizer.boundary_id)
    return read[borders[-1] + 1 :] if len(borders) else read


def _drawn(bundle: Bundle, prompts: Sequence[str], seed: int, form: Any) -> list[Ids]:
    settings = SamplingConfig(max_new_tokens=WITHIN, temperature=1.0, top_p=1.0)
    texts = []
    for start in range(0, len(prompts), _ROWS_AT_ONCE):
        rows = prompts[start : start + _ROWS_AT_ONCE]
        seeds = range(seed + start, seed + start + len(rows))
        texts += generate_batch(bundle, rows, seeds=seeds, settings=settings, unknown="skip", stepper=form)
    return [np.array(text.tokens, np.int64) for text in texts]


def _share_closed(places: Sequence[_Follower], texts: Sequence[Ids], tokenizer: Tokenizer) -> float | None:
    """The share of places at which a text that goes on from there closes what is innermost; none of no places."""
    closes = [_closes(place, texts_of(text, tokenizer)) for place, text in zip(places, texts, strict=True)]
    return float(np.mean(closes)) if closes else None


def _closes(place: _Follower, texts: Iterable[str | None]) -> bool:
    """Whether a text closes what is innermost at a place, by its own sign."""
    follower, target = copy.deepcopy(place), place.innermost
    for text in texts:
        if any(one.opened == target for one in follower.read(text)):
            return True
        if target is None or not follower.holds(target):
            return False
    return False
