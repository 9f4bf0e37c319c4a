"""Surprisal of texts: token by token as they arrive, line by line, or of many texts side by side.

Surprisal is ``-ln p(token | all before)``, in nats. A stream is read in constant memory, whatever its length: the state
of the model is all that is kept of what was read. Shape letters: B rows, T time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elman.errors import TextError, UserError
from elman.models.contract import LanguageModel
from elman.models.file import Bundle
from elman.models.state import State
from elman.text.sources import Piece
from elman.text.tokenizers import Unknown

_TOKENS_AT_ONCE = 1024
_TEXTS_AT_ONCE = 32


@dataclass(frozen=True)
class TokenScore:
    """One token of a text."""

    position: int
    """Tokens before it."""
    text: str
    """What it adds to the text; empty where it ends inside a character, and for the boundary between documents."""
    nats: float
    """Its surprisal."""
    ends_document: bool = False
    """Whether it is the boundary."""


@dataclass(frozen=True)
class LineScore:
    """One line, or what stood after the last line end."""

    number: int
    """From 1."""
    text: str
    """As the model saw it, without its line end."""
    tokens: int
    """The line end counts, where there is one, and the end of a document."""
    nats: float
    """Of all its tokens together."""
    highest: float
    """Of the most surprising one."""

    @property
    def nats_per_token(self) -> float:
        """The mean over its tokens."""
        return self.nats / self.tokens


@dataclass(frozen=True)
class TextScore:
    """One text that was read from the beginning, or after a prompt."""

    text: str
    tokens: int
    chars: int
    nats: float
    """Minus its log-probability: of all tokens, and of the boundary after them where the end was asked for."""

    @property
    def nats_per_token(self) -> float:
        """The mean over its tokens."""
        return self.nats / self.tokens


@dataclass(frozen=True)
class Place:
    """A surprising token with the text around it."""

    score: TokenScore
    before: str
    after: str


def score_stream(bundle: Bundle, pieces: Iterable[Piece], *, unknown: Unknown = "token") -> Iterator[TokenScore]:
    """Score a text that arrives in pieces, each token as soon as it is certain.

    Characters and bytes are scored with the piece that they came in; a word or a BPE token may wait for the next one,
    which could be part of it.

    Args:
        bundle: the model.
        pieces: of any length, cut anywhere; the boundary stands between documents, and is scored there.
        unknown: what to do with text that the vocabulary lacks; where it has no ``<unk>``, ``token`` is an error.
    """
    tokenizer, network = bundle.tokenizer, bundle.network
    boundary = tokenizer.boundary_id
    decoder = tokenizer.decoder()
    state, before, position = network.initial_state(1), boundary, 0
    is_start = True
    for ids in tokenizer.encode_as_it_comes(pieces, unknown=unknown):
        if is_start and len(ids):  # the boundary before the first document is given
            ids, is_start = ids[int(ids[0] == boundary) :], False
        for start in range(0, len(ids), _TOKENS_AT_ONCE):
            targets = ids[start : start + _TOKENS_AT_ONCE].tolist()
            nats, state = _nats(network, [[before, *targets[:-1]]], [targets], state)
            for token, surprisal in zip(targets, nats[0], strict=True):
                ends = token == boundary
                yield TokenScore(position, decoder.flush() if ends else decoder.feed(token), surprisal, ends)
                position += 1
            before = targets[-1]


def _nats(
    network: LanguageModel, tokens: list[list[int]], targets: list[list[int]], state: State
) -> tuple[list[list[float]], State]:
    """The surprisal of each target, and the state after the tokens."""
    device = network.device
    # In float64 sums do not depend on how many are added; MPS has none.
    dtype = network.dtype if device.type == "mps" else torch.float64
    with torch.no_grad():
        features_BTF, state = network.features(torch.tensor(tokens, device=device), state)
        nats_BT: Tensor = network.head.nll(features_BTF, torch.tensor(targets, device=device), dtype=dtype)
    return nats_BT.tolist(), state


def by_line(tokens: Iterable[TokenScore]) -> Iterator[LineScore]:
    """Put tokens together to lines; a line is given out with the token that ends it."""
    number, parts, nats, highest, count = 1, [], 0.0, 0.0, 0
    for token in tokens:
        parts.append(token.text)
        nats, highest, count = nats + token.nats, max(highest, token.nats), count + 1
        if "\n" in token.text or token.ends_document:
            yield LineScore(number, "".join(parts).removesuffix("\n"), count, nats, highest)
            number, parts, nats, highest, count = number + 1, [], 0.0, 0.0, 0
    if count:
        yield LineScore(number, "".join(parts), count, nats, highest)


class RunningQuantile:
    """A quantile of the last so many numbers.

    Args:
        share: which quantile, between 0 and 1.
        size: how many numbers count.
    """

    def __init__(self, share: float, size: int = 10_000) -> None:
        if not 0.0 < share < 1.0:
            raise UserError(f"a quantile of {share:g} was asked for; accepted: between 0 and 1, such as 0.99")
        self._share, self._size = share, size
        self._by_age: deque[float] = deque()
        self._by_value: list[float] = []

    def add(self, value: float) -> None:
        """Take one more number in, and drop the oldest where there are enough."""
        self._by_age.append(value)
        insort(self._by_value, value)
        if len(self._by_age) > self._size:
            del self._by_value[bisect_left(self._by_value, self._by_age.popleft())]

    @property
    def value(self) -> float:
        """The smallest number that at least the share of all do not exceed; infinite while there is none."""
        if not self._by_value:
            return math.inf
        return self._by_value[math.ceil(self._share * len(self._by_value)) - 1]


def most_surprising(tokens: Iterable[TokenScore], count: int, context: int = 40) -> list[Place]:
    """The places of the highest surprisal, the highest first, in one pass and bounded memory.

    Args:
        tokens: of a text.
        count: how many places.
        context: characters of the text shown on either side.
    """
    # A token waits until the text behind it is there; so many tokens hold the context on both sides.
    found: list[tuple[float, int, Place]] = []
    window: deque[TokenScore] = deque(maxlen=2 * context + 1)

    def consider(middle: int) -> None:
        score = window[middle]
        if not count:
            return
        if len(found) == count and score.nats <= found[0][0]:
            return
        around = list(window)
        before = "".join(t.text for t in around[:middle])[-context:]
        after = "".join(t.text for t in around[middle + 1 :])[:context]
        entry = (score.nats, -score.position, Place(score, before, after))
        (heapq.heappushpop if len(found) == count else heapq.heappush)(found, entry)

    for token in tokens:
        window.append(token)
        if len(window) > context:
            consider(len(window) - 1 - context)
    for middle in range(max(0, len(window) - context), len(window)):
        consider(middle)
    return [place for _, _, place in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def score_texts(
    bundle: Bundle, texts: Sequence[str], *, prompt: str = "", ends: bool = False, unknown: Unknown = "error"
) -> list[TextScore]:
    """Score texts of any lengths side by side, each from the beginning or after the prompt.

    Args:
        bundle: the model.
        texts: each a text of its own.
        prompt: what stands before each of them, given and not scored, and tokenized apart from them.
        ends: also ask that the text ends there: the boundary after it is scored as a token.
        unknown: what to do with text that the vocabulary lacks.

    Raises:
        TextError: a text is empty, or holds what the vocabulary lacks.
    """
    tokenizer, network = bundle.tokenizer, bundle.network
    end = [tokenizer.boundary_id] if ends else []
    given = [tokenizer.boundary_id, *tokenizer.encode(prompt, unknown=unknown).tolist()]
    targets = [[*tokenizer.encode(text, unknown=unknown).tolist(), *end] for text in texts]
    for index, ids in enumerate(targets):
        if not ids:
            raise TextError(f"text {index + 1} is empty: there is not one token to score")
    initial = network.initial_state(1)
    start = _read(network, given[:-1], initial)
    scores: list[TextScore | None] = [None] * len(texts)
    # Texts of about one length together, so that little is padded.
    order = sorted(range(len(texts)), key=lambda index: len(targets[index]))
    for first in range(0, len(order), _TEXTS_AT_ONCE):
        rows = order[first : first + _TEXTS_AT_ONCE]
        for index, nats in zip(rows, _side_by_side(network, given[-1], [targets[r] for r in rows], start), strict=True):
            text = texts[index]
            scores[index] = TextScore(text, len(targets[index]), len(text), nats)
    return [score for score in scores if score is not None]


def _read(network: LanguageModel, tokens: list[int], state: State) -> State:
    with torch.no_grad():
        for start in range(0, len(tokens), _TOKENS_AT_ONCE):
            piece_BT = torch.tensor([tokens[start : start + _TOKENS_AT_ONCE]], device=network.device)
            _, state = network.features(piece_BT, state)
    return state


def _side_by_side(network: LanguageModel, last: int, rows: list[list[int]], start: State) -> list[float]:
    """The nats of each row of targets, all from one state and one token before them."""
    longest = max(map(len, rows))
    padded = np.zeros((len(rows), longest + 1), np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row) + 1] = [last, *row]
    totals = [0.0] * len(rows)
    state = start.select([0] * len(rows))
    for begin in range(0, longest, _TOKENS_AT_ONCE):
        piece = padded[:, begin : begin + _TOKENS_AT_ONCE + 1]
        nats, state = _nats(network, piece[:, :-1].tolist(), piece[:, 1:].tolist(), state)
        for index, row in enumerate(rows):
            totals[index] += math.fsum(nats[index][: max(0, len(row) - begin)])
    return totals
