"""Judge a model on a text: every token once, sums in float64, the state carried from the start to the end.

Shape letters: B rows, T time.

``carried`` reads the text as one stream. ``reset`` starts every document from the initial state, documents being the
rows of a batch. ``num_streams > 1`` is an estimate: the text is cut into parallel streams whose states start empty;
it is quicker, slightly pessimistic, and recorded.
"""

from __future__ import annotations

import bz2
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from elman.data.pairs import Pairs
from elman.data.streams import Segment, Streams
from elman.errors import UserError
from elman.metrics import Score

if TYPE_CHECKING:
    from elman.data.prepare import Dataset, Split
    from elman.models.contract import LanguageModel
    from elman.text.tokenizers import Tokenizer

StatePolicy = Literal["carried", "reset"]

_TOKENS_AT_ONCE = 2**20  # of a memory-mapped text that may be larger than memory


@dataclass(frozen=True)
class Evaluation:
    """A score and how it was taken."""

    score: Score
    state_policy: StatePolicy | Literal["pairs"]
    """``pairs``: every target given its source, each example from the initial state."""
    num_streams: int
    num_documents: int
    num_unknown: int
    """Tokens that the tokenizer does not know; their presence makes figures per character undefined."""
    vocab_size: int

    def to_dict(self) -> dict[str, Any]:
        """All figures by name, ready for JSON."""
        return self.score.to_dict() | {
            "state_policy": self.state_policy,
            "num_streams": self.num_streams,
            "documents": self.num_documents,
            "unknown_tokens": self.num_unknown,
            "vocabulary": self.vocab_size,
        }


class Interrupted(Exception):
    """The caller's ``should_stop`` became true; there is no result."""


def evaluate_split(
    network: LanguageModel,
    split: Split,
    tokenizer: Tokenizer,
    *,
    state_policy: StatePolicy = "carried",
    num_streams: int = 1,
    max_tokens: int | None = None,
    segment_length: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Score a token sequence.

    Args:
        network: the model; it is not changed.
        split: the tokens, the boundary first, and the counts of the text.
        tokenizer: the one that made the tokens.
        state_policy: ``carried`` or ``reset`` (see the module).
        num_streams: parallel streams under ``carried``; rows of documents under ``reset``.
        max_tokens: score the first tokens only.
        segment_length: tokens read at once; the result does not depend on it.
        should_stop: polled between segments.

    Raises:
        Interrupted: ``should_stop()`` was true.
    """
    tokens = split.tokens if max_tokens is None else split.tokens[: max_tokens + 1]
    num_targets = len(tokens) - 1
    if num_targets < 1:
        raise UserError("the text is empty: there is not one token to predict")
    # A segment's logits stay below 64 MiB of float32 for each stream.
    length = segment_length or max(1, min(1024, 2**24 // network.vocab_size))
    segments: Iterator[Segment]
    if state_policy == "reset":
        segments = _document_rows(tokens, tokenizer.boundary_id, num_streams, length)
    else:
        num_streams = min(num_streams, num_targets)
        segments = iter(Streams(tokens, num_streams, length))
    nats_total, num_scored = _nats(network, segments, should_stop)
    whole = num_scored == len(split.tokens) - 1
    loses_text = not tokenizer.lossless or split.num_unknown > 0 or not whole
    return Evaluation(
        score=Score(
            nats_total=nats_total,
            tokens=num_scored,
            chars=None if loses_text else split.num_chars,
            bytes=None if loses_text else split.num_bytes,
        ),
        state_policy=state_policy,
        num_streams=num_streams,
        num_documents=split.num_documents,
        num_unknown=split.num_unknown,
        vocab_size=network.vocab_size,
    )


def evaluate_pairs(
    network: LanguageModel,
    split: Split,
    tokenizer: Tokenizer,
    *,
    reverse_source: bool = False,
    num_rows: int = 16,
    max_targets: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Score the targets of a corpus of pairs, each given its source, from the initial state.

    All figures are those of the targets alone: their tokens with the boundary that ends each, characters and bytes.

    Args:
        network: the model; it is not changed.
        split: sources and targets in turn, and the counts of the text.
        tokenizer: the one that made the tokens.
        reverse_source: read the tokens of each source in reverse order.
        num_rows: examples read at once; the result does not depend on it.
        max_targets: score the first examples only, up to so many targets.
        should_stop: polled between batches.

    Raises:
        Interrupted: ``should_stop()`` was true.
    """
    pairs = Pairs(split.tokens, num_rows, tokenizer.boundary_id, reverse_source, max_targets=max_targets)
    nats_total, num_scored = _nats(network, pairs, should_stop)
    chars, num_bytes = 0, 0
    if keeps_text := tokenizer.lossless and not split.num_unknown:
        for example in range(pairs.num_examples):
            target = tokenizer.decode(pairs.target(example))
            chars, num_bytes = chars + len(target), num_bytes + len(target.encode())
    return Evaluation(
        score=Score(nats_total, num_scored, chars if keeps_text else None, num_bytes if keeps_text else None),
        state_policy="pairs",
        num_streams=num_rows,
        num_documents=2 * pairs.num_examples,
        num_unknown=split.num_unknown,
        vocab_size=network.vocab_size,
    )


def _nats(network: LanguageModel, segments: Iterable[Segment], should_stop: Callable[[], bool]) -> tuple[float, int]:
    """The sum of nats over all segments, and the number of targets."""
    # In float64 a uniform model costs ln V to the last digit; MPS has no float64.
    softmax_dtype = network.dtype if network.device.type == "mps" else torch.float64
    nats_total, num_scored = 0.0, 0
    with torch.no_grad():
        for segment in segments:
            if should_stop():
                raise Interrupted
            if segment.starts_anew:
                state = network.initial_state(segment.tokens_BT.shape[0])
            features_BTF, state = network.features(segment.tokens_BT.to(network.device), state)
            targets_BT, weight_BT = segment.targets_BT.to(network.device), segment.weight_BT.to(network.device)
            nats_BT = network.head.nll(features_BTF, targets_BT, weight_BT, dtype=softmax_dtype)
            nats_total += nats_BT.sum(dtype=torch.float64).item()
            num_scored += segment.num_targets
    return nats_total, num_scored


def _document_rows(tokens: np.ndarray, boundary_id: int, num_rows: int, length: int) -> Iterator[Segment]:
    """Documents as rows: each starts with its boundary token and ends where the next one's would be predicted."""
    pieces = range(0, len(tokens) - 1, _TOKENS_AT_ONCE)
    starts = np.concatenate(
        [start + np.flatnonzero(tokens[:-1][start : start + _TOKENS_AT_ONCE] == boundary_id) for start in pieces]
    )
    ends = np.append(starts[1:], len(tokens) - 1)
    # Documents of like length share a batch, so that little of it is padding.
    order = np.argsort(starts - ends, kind="stable")
    for first in range(0, len(order), num_rows):
        rows = [(starts[i], ends[i]) for i in order[first : first + num_rows]]
        longest = max(end - start for start, end in rows)
        for time in range(0, longest, length):
            width = min(length, longest - time)
            padded = np.full((len(rows), width + 1), boundary_id, np.int64)
            weight = np.zeros((len(rows), width), np.float32)
            for row, (start, end) in enumerate(rows):
                piece = tokens[start + time : min(start + time + width, end) + 1]
                padded[row, : len(piece)] = piece
                weight[row, : max(0, len(piece) - 1)] = 1.0
            yield Segment(
                tokens_BT=torch.from_numpy(padded[:, :-1]),
                targets_BT=torch.from_numpy(padded[:, 1:]),
                weight_BT=torch.from_numpy(weight),
                reset_BT=None,
                num_targets=int(weight.sum()),
                starts_anew=time == 0,
            )


def baselines(dataset: Dataset, split: Split) -> dict[str, Score]:
    """What simple means reach on the same text: the yardsticks beside every figure.

    ``uniform``: every token of the vocabulary, the boundary counted, has probability 1 / V. ``unigram``: token
    frequencies of the training part, each count raised by one (Laplace). ``gzip``, ``bzip2`` and ``xz`` at their
    strongest setting: the size of the held-out text compressed by itself. Compressors are left out where tokens do
    not give the text back.
    """
    tokenizer = dataset.tokenizer
    targets = split.tokens[1:]
    counts = token_counts(dataset.train.tokens[1:], tokenizer.size) + 1.0
    unigram = -np.log(counts / counts.sum())
    loses_text = not tokenizer.lossless or split.num_unknown > 0
    chars, num_bytes = (None, None) if loses_text else (split.num_chars, split.num_bytes)
    nats = {
        "uniform": len(targets) * math.log(tokenizer.size),
        "unigram": float(token_counts(targets, tokenizer.size) @ unigram),
    }
    if not loses_text:
        nats |= {name: 8 * size * math.log(2) for name, size in _compressed_sizes(targets, tokenizer).items()}
    return {name: Score(total, len(targets), chars, num_bytes) for name, total in nats.items()}


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def _compressed_sizes(targets: np.ndarray, tokenizer: Tokenizer) -> dict[str, int]:
    """Bytes that general compressors at their strongest make of a text, which passes through them piece by piece."""
    compressors: dict[str, _Compressor] = {
        "gzip": zlib.compressobj(9, wbits=31),  # 31: with the header and trailer of a .gz file
        "bzip2": bz2.BZ2Compressor(9),
        "xz": lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME),
    }
    sizes = dict.fromkeys(compressors, 0)
    for data in _text_bytes(targets, tokenizer):
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(data))
    return {name: size + len(compressors[name].flush()) for name, size in sizes.items()}


def _text_bytes(targets: np.ndarray, tokenizer: Tokenizer) -> Iterator[bytes]:
    """The text of tokens in UTF-8, in pieces; the bytes themselves at byte level, be they valid UTF-8 or not."""
    decoder = tokenizer.decoder()
    for start in range(0, len(targets), _TOKENS_AT_ONCE):
        piece = targets[start : start + _TOKENS_AT_ONCE]
        piece = piece[piece != tokenizer.boundary_id]
        if tokenizer.level == "byte":
            yield piece.astype(np.uint8).tobytes()
        else:
            yield "".join(map(decoder.feed, piece.tolist())).encode()
    yield decoder.flush().encode()


def token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each token occurs, (V,), counted in bounded memory."""
    counts = np.zeros(vocab_size)
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        counts += np.bincount(tokens[start : start + _TOKENS_AT_ONCE].astype(np.int64), minlength=vocab_size)
    return counts
