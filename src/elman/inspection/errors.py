"""Where a model fails, and what would help; and where two models differ. For any model of the contract.

After Karpathy, Johnson and Fei-Fei 2015, https://arxiv.org/abs/1506.02078, section 4.4: an error is a token that was
given a probability below one half. Oracles take errors away one after the other; each is asked about what the ones
before it left:

- an n-gram model of any order up to n, counted on the training text, gives the token one half or more;
- the token comes after a context that stood in the last M tokens, and came then as well (M = 100, 1,000, 10,000);
- it lies in a word that occurs five times at most in the training text;
- it begins a word: what comes next was open;
- the model was near, with at least 0.4;
- the rest.

Shape letters: N tokens predicted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elman.errors import UserError
from elman.inspection.labels import texts_of
from elman.inspection.predictions import first_tokens, load_plain, surprisals
from elman.inspection.recording import Ids
from elman.inspection.selectivity import Bootstrap, block_means, interval
from elman.judge import SplitName, dataset_of_run, find_subject
from elman.models.contract import CountedModel
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import Tokenizer

_HALF, _NEAR = 0.5, 0.4
_MEMORIES = (100, 1_000, 10_000)
_MIN_CONTEXT = {"char": 6, "byte": 6, "bpe": 3, "word": 2}
_SAME_CONTEXT = {"char": 3, "byte": 3, "bpe": 1, "word": 1}
"""Tokens before two places that make them the same to who looks at them."""
_RARE = 5
_MAX_COUNTED_TOKENS = 1_000_000
_PLACES = 12
_CONTEXT = 60
_APART = 40
_SHOWN_TOKENS = 600


@dataclass(frozen=True)
class Cause:
    """What would have helped with some of the errors."""

    name: str
    words: str
    errors: int
    """Those that it takes away, of what the causes before it left."""
    share: float
    """Of all errors."""
    nats: float
    """What these tokens cost, as a share of all that the text costs."""
    alone: int
    """Those that it would take away if it were the first."""


@dataclass(frozen=True)
class Failures:
    """What was found about the errors of one model."""

    corpus: str
    split: str
    kind: str
    tokens: int
    errors: int
    nats_per_token: float
    counted_tokens: int
    """Of the training text, for the oracle n-gram; the first of them where it is longer."""
    causes: tuple[Cause, ...]
    notices: tuple[str, ...] = ()
    """What a reader of the figures should know about the text."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """A token that two models see differently."""

    position: int
    before: str
    at: str
    after: str
    first_nats: float
    second_nats: float


@dataclass(frozen=True)
class Kind:
    """Tokens of one kind, and what they cost either model."""

    name: str
    tokens: int
    first_nats: float
    """For each token, in the mean."""
    second_nats: float

    @property
    def difference(self) -> float:
        """Of the first less the second."""
        return self.first_nats - self.second_nats


@dataclass(frozen=True)
class Compared:
    """Two models, token by token."""

    corpus: str
    split: str
    tokens: int
    first: str
    second: str
    first_nats: float
    """For each token, in the mean."""
    second_nats: float
    difference_interval: tuple[float, float]
    """Of the first less the second, by bootstrap over blocks of the text, 95 %."""
    first_better: float
    """Share of the tokens that are cheaper for the first."""
    kinds: tuple[Kind, ...]
    first_ahead: tuple[Difference, ...]
    """Where the first is most ahead, one place for each token after the same few before it."""
    second_ahead: tuple[Difference, ...]
    shown_texts: tuple[str, ...]
    shown_differences: tuple[float, ...]
    """Nats of the second less those of the first, along the beginning of the text."""
    notices: tuple[str, ...] = ()
    """What a reader of the figures should know about the text."""

    @property
    def whole(self) -> Kind:
        """All tokens."""
        return Kind("all", self.tokens, self.first_nats, self.second_nats)

    @property
    def verdict(self) -> str:
        """Which is better, if either is by more than chance."""
        low, high = self.difference_interval
        if low <= 0 <= high:
            return "no difference beyond chance"
        return f"{self.first if high < 0 else self.second} is better"

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self)


def inspect_errors(
    where: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    order: int = 6,
    max_tokens: int = 100_000,
    cell: str | None = None,
) -> Failures:
    """Sort the errors of a model by what would have helped.

    Args:
        where: a run folder, whose training text the oracles count.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the run.
        split: which part; none: the test part, else the validation part.
        order: of the longest oracle n-gram.
        max_tokens: read so many tokens of the text at most.
        cell: a person's own cell, where the model was trained with one.

    Raises:
        UserError: there is no such text or training text.
    """
    bundle = load_plain(where, cell=cell)
    if not 1 <= order <= 12:
        raise UserError(f"an oracle n-gram of order {order} was asked for; accepted: 1 to 12")
    subject = find_subject(where, bundle, text, split=split, cell=cell)
    train = dataset_of_run(where, cell=cell).train.tokens
    found = errors_along(bundle, first_tokens(subject.tokens.tokens, max_tokens), train, order=order)
    return replace(found, corpus=subject.corpus, split=subject.split, notices=subject.notices)


def errors_along(bundle: Bundle, tokens: Ids, train: Ids, *, order: int = 6) -> Failures:
    """The same for tokens and those that the model was trained on, the boundary first."""
    tokenizer = bundle.tokenizer
    nats_N = surprisals(bundle.network, tokens)
    is_error_N = np.exp(-nats_N) < _HALF
    train = np.asarray(train[: _MAX_COUNTED_TOKENS + 1])
    words = _Words(_texts(tokens, tokenizer))
    tests: list[tuple[str, str, NDArray[np.bool_]]] = [
        ("n-gram", f"an n-gram of up to {order} tokens knows it", _ngrams_know(tokens, train, tokenizer, order))
    ]
    for memory in _MEMORIES:
        known_N = _repeats(tokens, memory, _MIN_CONTEXT[tokenizer.level])
        tests.append((f"memory {memory:,}", f"it came after the same context within {memory:,} tokens", known_N))
    tests += [
        ("rare word", f"its word occurs {_RARE} times at most in training", words.rare(train, tokenizer)),
        ("word start", "it begins a word", words.begins),
        ("near", f"its probability was {_NEAR} at least", np.exp(-nats_N) >= _NEAR),
        ("rest", "none of these", np.ones(len(nats_N), bool)),
    ]
    left_N = is_error_N.copy()
    causes = []
    for name, words_of_it, helps_N in tests:
        taken_N = left_N & helps_N
        left_N &= ~helps_N
        causes.append(
            Cause(
                name,
                words_of_it,
                int(taken_N.sum()),
                float(taken_N.sum() / max(1, is_error_N.sum())),
                float(nats_N[taken_N].sum() / nats_N.sum()),
                int((is_error_N & helps_N).sum()),
            )
        )
    return Failures(
        corpus="",
        split="text",
        kind=bundle.network.config.kind,
        tokens=len(nats_N),
        errors=int(is_error_N.sum()),
        nats_per_token=float(nats_N.mean(dtype=np.float64)),
        counted_tokens=len(train) - 1,
        causes=tuple(causes),
    )


def _ngrams_know(tokens: Ids, train: Ids, tokenizer: Tokenizer, order: int) -> NDArray[np.bool_]:
    """Whether the n-gram model of some order gives a token one half or more."""
    known_N = np.zeros(len(tokens) - 1, bool)
    for size in range(1, order + 1):
        config = model_config({"kind": "ngram", "order": size})
        network = build_model(config, tokenizer.size, seed=None, dtype=torch.float32, boundary_id=tokenizer.boundary_id)
        if isinstance(network, CountedModel):
            network.count(train)
        known_N |= np.exp(-surprisals(network, tokens)) >= _HALF
    return known_N


def _repeats(tokens: Ids, memory: int, context: int) -> NDArray[np.bool_]:
    """Whether a token came after the same context the last time, which was at most so many tokens ago."""
    known_N = np.zeros(len(tokens) - 1, bool)
    last_seen: dict[bytes, int] = {}
    ids = np.ascontiguousarray(tokens, np.int64)
    for end in range(context, len(ids)):
        key = ids[end - context : end].tobytes()
        before = last_seen.get(key)
        known_N[end - 1] = before is not None and end - before <= memory and ids[before] == ids[end]
        last_seen[key] = end
    return known_N


class _Words:
    """The words of a text: for each token but the first the one that it lies in, and whether it begins it.

    Args:
        texts: what each token adds to the text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        joined = "".join(texts)
        matches = list(re.finditer(r"\w+", joined))
        word_of_char = np.full(len(joined) + 1, -1)
        for number, match in enumerate(matches):
            word_of_char[match.start() : match.end()] = number
        words, begins, end = [], [], 0
        for text in texts:
            start, end = end, end + len(text)
            inside = start + np.flatnonzero(word_of_char[start:end] >= 0)
            word = matches[word_of_char[inside[0]]] if len(inside) else None
            words.append("" if word is None else word.group())
            begins.append(word is not None and word.start() == inside[0])
        self.words, self.begins = words[1:], np.array(begins[1:], bool)

    def rare(self, train: Ids, tokenizer: Tokenizer) -> NDArray[np.bool_]:
        """Whether each token lies in a word that is rare in a training text."""
        counts = Counter(re.findall(r"\w+", "".join(_texts(train, tokenizer))))
        return np.array([bool(word) and counts[word] <= _RARE for word in self.words])


def _texts(tokens: Ids, tokenizer: Tokenizer) -> list[str]:
    return ["\n" if text is None else text for text in texts_of(tokens, tokenizer)]


def compare_models(
    first: str | Path,
    second: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    max_tokens: int = 100_000,
    seed: int = 0,
) -> Compared:
    """Hold two models against each other, token by token.

    Args:
        first: a run folder or a model file, whose corpus is read where no text is given.
        second: another one with the same tokens.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the first.
        split: which part; none: the test part, else the validation part.
        max_tokens: read so many tokens of the text at most.
        seed: of the bootstrap.

    Raises:
        UserError: the models cut a text into different tokens.
    """
    bundles = load_plain(first), load_plain(second)
    if bundles[0].tokenizer.to_dict() != bundles[1].tokenizer.to_dict():
        raise UserError(
            f"{str(first)!r} and {str(second)!r} have different tokens, so that there is nothing to compare token by "
            "token: compare bits per byte by elman eval, or train both with one tokenizer"
        )
    subject = find_subject(first, bundles[0], text, split=split)
    tokens = first_tokens(subject.tokens.tokens, max_tokens)
    found = compare_along(*bundles, tokens, seed=seed)
    return replace(
        found, corpus=subject.corpus, split=subject.split, notices=subject.notices, first=str(first), second=str(second)
    )


def compare_along(first: Bundle, second: Bundle, tokens: Ids, *, seed: int = 0) -> Compared:
    """The same for two models of one tokenizer, and tokens, the boundary first."""
    tokenizer = first.tokenizer
    nats = [surprisals(bundle.network, tokens).astype(np.float64) for bundle in (first, second)]
    gain_N = nats[1] - nats[0]
    blocks_N = block_means(-gain_N)
    bootstrap = Bootstrap(len(blocks_N), np.random.default_rng(seed))
    texts = _texts(tokens, tokenizer)
    kinds = np.array(_kinds_of(texts))
    return Compared(
        corpus="",
        split="text",
        tokens=len(gain_N),
        first="the first",
        second="the second",
        first_nats=float(nats[0].mean()),
        second_nats=float(nats[1].mean()),
        difference_interval=interval(bootstrap.means(blocks_N)),
        first_better=float((gain_N > 0).mean()),
        kinds=tuple(
            Kind(name, int(own.sum()), float(nats[0][own].mean()), float(nats[1][own].mean()))
            for name in sorted(set(kinds.tolist()))
            for own in [kinds == name]
        ),
        first_ahead=_places(gain_N, nats, tokens, tokenizer),
        second_ahead=_places(-gain_N, nats, tokens, tokenizer),
        shown_texts=tuple(texts[1 : _SHOWN_TOKENS + 1]),
        shown_differences=tuple(gain_N[:_SHOWN_TOKENS].tolist()),
    )


def _kinds_of(texts: Sequence[str]) -> list[str]:
    """What each token but the first is."""
    words = _Words(texts)
    return [
        ("word start" if begins else "inside a word") if word else "sign" if text.strip() else "white space"
        for text, word, begins in zip(texts[1:], words.words, words.begins.tolist(), strict=True)
    ]


def _places(
    gain_N: NDArray[np.float64], nats: Sequence[NDArray[np.float64]], tokens: Ids, tokenizer: Tokenizer
) -> tuple[Difference, ...]:
    """Where the gain is greatest, no two places close together, and none with a context and a token of another."""
    chosen: dict[bytes, int] = {}
    context, ids = _SAME_CONTEXT[tokenizer.level], np.ascontiguousarray(tokens, np.int64)
    for index in np.argsort(-gain_N, kind="stable").tolist():
        if len(chosen) == _PLACES or gain_N[index] <= 0:
            break
        key = ids[max(0, index + 1 - context) : index + 2].tobytes()
        if key not in chosen and all(abs(index - other) > _APART for other in chosen.values()):
            chosen[key] = index
    found = []
    for index in chosen.values():
        position = index + 1
        cuts = ((max(0, position - _CONTEXT), position), (position, position + 1), (position + 1, position + _CONTEXT))
        before, at, after = (tokenizer.decode(tokens[start:end]) for start, end in cuts)
        found.append(Difference(position, before, at, after, float(nats[0][index]), float(nats[1][index])))
    return tuple(found)
