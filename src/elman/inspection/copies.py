"""Does a model write, or recite? The longest piece of each of its texts that stands in the training text verbatim.

All pieces of the samples are kept in a suffix automaton (Blumer et al. 1985,
https://doi.org/10.1016/0304-3975(85)90157-4): one state for all pieces that end at the same places of the samples, at
most two states for each character. The training text runs through it once, whatever its length, and the automaton
says at each character how long a piece of a sample ends there.

Shape letters: S states, N characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elman.config import DataConfig, TextConfig
from elman.data.duplicates import code_points
from elman.data.texts import texts_of
from elman.errors import TextError
from elman.judge import dataset_of_run
from elman.scan.linear import compiled
from elman.text.corpora import open_corpus

Ids: TypeAlias = NDArray[np.int64]

MIN_COPIED = 50
"""Characters from which on a piece counts as copied: shorter ones are common phrases."""
_BORDER, _END = -1, -2
"""Between the documents of a text, and behind each sample: neither holds the other's."""


@dataclass(frozen=True)
class Copied:
    """How much of one text stands in another."""

    text: str
    """The longest piece that does; the first where there are several."""
    start: int
    """Where it begins in the sample, in characters."""
    longest: int
    """Its length in characters."""
    share: float
    """Share of the sample's characters that lie in a piece of 50 characters or more that stands there."""

    @property
    def is_copied(self) -> bool:
        """Whether the longest piece is more than a common phrase."""
        return self.longest >= MIN_COPIED

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {"copied": self.is_copied}


def find_copies(samples: Sequence[str], where: str | Path, *, cell: str | None = None) -> list[Copied]:
    """Hold texts against the training text of a run, or against a corpus.

    Args:
        samples: the texts.
        where: a run folder, whose training part is meant, or a corpus as ``elman train`` takes it, whose training part
            or, where it has no parts, whole text is meant.
        cell: a person's own cell, where the model of the run was trained with one.

    Raises:
        UserError: the run has no corpus any more, or there is no such text.
    """
    if (Path(where) / "run.toml").is_file():
        dataset = dataset_of_run(where, cell=cell)
        return copies_in(samples, texts_of(dataset.train.tokens, dataset.tokenizer))
    parts = open_corpus(DataConfig(corpus=(str(where),)), TextConfig()).parts
    source = parts["train"] if "train" in parts else parts["all"]

    def texts() -> Iterable[str | None]:
        for piece in source.pieces():
            if piece.starts_document:
                yield None
            yield piece.text

    return copies_in(samples, texts())


def copies_in(samples: Sequence[str], texts: Iterable[str | None]) -> list[Copied]:
    """The longest piece of each sample that stands in a text, which comes in pieces, None between documents.

    Raises:
        TextError: the text is empty.
    """
    rows = [np.append(code_points(sample).astype(np.int64), _END) for sample in samples]
    automaton = _Automaton(np.concatenate([np.empty(0, np.int64), *rows]))
    is_empty = True
    for text in texts:
        is_empty = is_empty and not text
        automaton.read(np.array([_BORDER]) if text is None else code_points(text).astype(np.int64))
    if is_empty:
        raise TextError("the text to hold samples against is empty")
    lengths = np.split(automaton.lengths(), np.cumsum([len(row) for row in rows]))
    return [_copied(sample, lengths_N[:-1]) for sample, lengths_N in zip(samples, lengths, strict=False)]


def _copied(sample: str, lengths_N: Ids) -> Copied:
    if not lengths_N.any():
        return Copied("", 0, 0, 0.0)
    end, longest = int(lengths_N.argmax()) + 1, int(lengths_N.max())
    ends = np.flatnonzero(lengths_N >= MIN_COPIED)
    covered = np.zeros(len(lengths_N) + 1, np.int64)
    np.add.at(covered, ends + 1 - lengths_N[ends], 1)
    np.add.at(covered, ends + 1, -1)
    share = float((np.cumsum(covered)[:-1] > 0).mean())
    return Copied(sample[end - longest : end], end - longest, longest, share)


class _Automaton:
    """All pieces of samples, and how long those were that a text has shown so far.

    Args:
        symbols_N: the characters of the samples, each with its end.
    """

    def __init__(self, symbols_N: Ids) -> None:
        following: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]
        self._prefixes: list[int] = []
        """The state of the samples up to and with each character."""
        last = 0
        for symbol in symbols_N.tolist():
            last = self._extend(following, last, symbol)
            self._prefixes.append(last)
        counts = [len(one) for one in following]
        self._tables = (
            np.concatenate([[0], np.cumsum(counts)]),
            np.array([symbol for one in following for symbol in sorted(one)], np.int64),
            np.array([one[symbol] for one in following for symbol in sorted(one)], np.int64),
            np.array(self._link),
            np.array(self._length),
        )
        self._best_S = np.zeros(len(following), np.int64)
        self._place = np.zeros(2, np.int64)

    def _extend(self, following: list[dict[int, int]], last: int, symbol: int) -> int:
        """Add a character behind all pieces that end with the last one."""
        new = self._add(following, {}, self._length[last] + 1)
        state = last
        while state >= 0 and symbol not in following[state]:
            following[state][symbol] = new
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
            return new
        target = following[state][symbol]
        if self._length[target] == self._length[state] + 1:
            self._link[new] = target
            return new
        # The shorter pieces of this state end at one more place now: they become a state of their own.
        shorter = self._add(following, dict(following[target]), self._length[state] + 1)
        self._link[shorter] = self._link[target]
        self._link[target] = self._link[new] = shorter
        while state >= 0 and following[state].get(symbol) == target:
            following[state][symbol] = shorter
            state = self._link[state]
        return new

    def _add(self, following: list[dict[int, int]], transitions: dict[int, int], length: int) -> int:
        following.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        return len(following) - 1

    def read(self, symbols_N: Ids) -> None:
        """Let the next piece of the text pass."""
        _kernel()(symbols_N, *self._tables, self._best_S, self._place)

    def lengths(self) -> Ids:
        """The length of the longest piece that ends at each character of the samples and stands in the text."""
        best = self._best_S.tolist()
        # What was seen of a long piece has shown the shorter ones at its end too.
        for state in sorted(range(1, len(best)), key=self._length.__getitem__, reverse=True):
            if best[state] and (link := self._link[state]):
                best[link] = max(best[link], self._length[link])
        found = []
        for state in self._prefixes:
            while state and not best[state]:
                state = self._link[state]
            found.append(best[state])
        return np.array(found, np.int64)


@cache
def _kernel() -> Callable[..., None]:
    return compiled(_pass)


def _pass(
    text: Ids, first: Ids, symbols: Ids, targets: Ids, link: Ids, length: Ids, best: Ids, place: Ids
) -> None:  # fmt: skip
    state, matched = place[0], place[1]
    for i in range(len(text)):
        while True:
            start, end = first[state], first[state + 1]
            at = start + np.searchsorted(symbols[start:end], text[i])
            if at < end and symbols[at] == text[i]:
                state = targets[at]
                matched += 1
                break
            if state == 0:
                matched = 0
                break
            state = link[state]
            matched = length[state]
        if matched > best[state]:
            best[state] = matched
    place[0], place[1] = state, matched
