"""What simple means reach on a held-out text: the yardsticks beside every figure."""

from __future__ import annotations

import bz2
import lzma
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from elman.data.prepare import Dataset, Split
from elman.errors import ElmanError
from elman.evaluation import StatePolicy, evaluate_split
from elman.metrics import Score
from elman.models.contract import CountedModel
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import Tokenizer

NGRAM_ORDERS = (2, 3, 6)
_MAX_COUNTED = 20_000_000
"""Tokens that n-grams are counted on at most: counting sorts them all in memory."""
_TOKENS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Baselines:
    """Scores by name, and what a reader of them should know."""

    scores: dict[str, Score]
    notices: tuple[str, ...]


def baselines(dataset: Dataset, split: Split, *, state_policy: StatePolicy = "carried") -> Baselines:
    """Judge simple means on a text.

    ``uniform``: every token of the vocabulary, the boundary counted, has probability 1 / V. ``unigram``: token
    frequencies of the training part, each count raised by one (Laplace). ``2-gram``, ``3-gram`` and ``6-gram``: counted
    on the training part, with interpolated modified Kneser-Ney smoothing. ``gzip``, ``bzip2``, ``xz`` and ``zstd`` at
    their strongest setting: the size of the held-out text compressed by itself. Compressors are left out where tokens
    do not give the text back, and zstd where the library is not installed.

    Args:
        dataset: what the model was trained on.
        split: the text.
        state_policy: whether the context of an n-gram reaches over the borders of documents.
    """
    tokenizer, num_targets = dataset.tokenizer, len(split.tokens) - 1
    loses_text = not tokenizer.lossless or split.num_unknown > 0
    counts = token_counts(dataset.train.tokens[1:], tokenizer.size) + 1.0
    unigram = -np.log(counts / counts.sum())
    nats = {
        "uniform": num_targets * math.log(tokenizer.size),
        "unigram": float(token_counts(split.tokens[1:], tokenizer.size) @ unigram),
    }
    notices = []
    train = dataset.train.tokens[-_MAX_COUNTED:]
    if len(train) < len(dataset.train.tokens):
        notices.append(f"n-grams are counted on the last {len(train):,} tokens of {len(dataset.train.tokens):,}")
    for order in NGRAM_ORDERS:
        nats[f"{order}-gram"] = _ngram_nats(order, train, split, tokenizer, state_policy)
    if not loses_text:
        if find_spec("zstandard") is None:
            notices.append("zstd is left out: it needs pip install 'elman[data]'")
        sizes = _compressed_sizes(split, tokenizer)
        nats |= {name: 8 * size * math.log(2) for name, size in sizes.items()}
    chars, num_bytes = (None, None) if loses_text else (split.num_chars, split.num_bytes)
    scores = {name: Score(total, num_targets, chars, num_bytes) for name, total in nats.items()}
    return Baselines(scores, tuple(notices))


def _ngram_nats(
    order: int, train: NDArray[Any], split: Split, tokenizer: Tokenizer, state_policy: StatePolicy
) -> float:
    config = model_config({"kind": "ngram", "order": order})
    model = build_model(config, tokenizer.size, seed=None, dtype=torch.float64, boundary_id=tokenizer.boundary_id)
    if not isinstance(model, CountedModel):
        raise ElmanError("an n-gram model is counted")
    model.count(train, reset_at_documents=state_policy == "reset")
    return evaluate_split(model, split, tokenizer, state_policy=state_policy).score.nats_total


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def _compressed_sizes(split: Split, tokenizer: Tokenizer) -> dict[str, int]:
    """Bytes that general compressors at their strongest make of a text, which passes through them piece by piece."""
    compressors: dict[str, _Compressor] = {
        "gzip": zlib.compressobj(9, wbits=31),  # 31: with the header and trailer of a .gz file
        "bzip2": bz2.BZ2Compressor(9),
        "xz": lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME),
    }
    if find_spec("zstandard") is not None:
        import zstandard

        # Told the size, it takes the window that fits.
        compressors["zstd"] = zstandard.ZstdCompressor(level=zstandard.MAX_COMPRESSION_LEVEL).compressobj(
            size=split.num_bytes
        )
    sizes = dict.fromkeys(compressors, 0)
    for data in _text_bytes(split.tokens[1:], tokenizer):
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(data))
    return {name: size + len(compressors[name].flush()) for name, size in sizes.items()}


def _text_bytes(targets: NDArray[Any], tokenizer: Tokenizer) -> Iterator[bytes]:
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


def token_counts(tokens: NDArray[Any], vocab_size: int) -> NDArray[np.float64]:
    """How often each token occurs, (V,), counted in bounded memory."""
    counts = np.zeros(vocab_size)
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        counts += np.bincount(tokens[start : start + _TOKENS_AT_ONCE].astype(np.int64), minlength=vocab_size)
    return counts
