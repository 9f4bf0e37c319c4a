"""A tokenizer from the settings that ask for it, or from what a model file holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from elman.config import TokenizerConfig
from elman.errors import ModelFileError, nearest
from elman.text.bpe import BPETokenizer
from elman.text.sources import Piece
from elman.text.tokenizers import MAX_VOCABULARY_SIZE, ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer


def train_tokenizer(config: TokenizerConfig, pieces: Iterable[Piece]) -> Tokenizer:
    """Build the tokenizer that the settings ask for.

    Args:
        config: its settings.
        pieces: the training part. For bpe it is passed over twice: an iterator is first read into memory.
    """
    match config.level:
        case "char":
            return CharTokenizer.train(config, pieces)
        case "byte":
            return ByteTokenizer()
        case "word":
            return WordTokenizer.train(config, pieces)
        case "bpe":
            if config.path is not None:
                return BPETokenizer.from_file(config.path)
            return BPETokenizer.train(config, list(pieces) if isinstance(pieces, Iterator) else pieces)


def tokenizer_from_dict(data: object) -> Tokenizer:
    """Rebuild a tokenizer from the result of `to_dict`, which may come from an untrusted file.

    Raises:
        ModelFileError: if anything about it is not as `to_dict` writes it.
    """
    if not isinstance(data, dict):
        raise ModelFileError(f"the tokenizer must be an object, not {type(data).__name__}")
    builders: dict[str, tuple[str | None, Callable[[Any], Tokenizer]]] = {
        "char": ("characters", _char_from),
        "byte": (None, lambda _: ByteTokenizer()),
        "word": ("words", _word_from),
        "bpe": ("tokenizer", _bpe_from),
    }
    level = data.get("level")
    if not isinstance(level, str) or level not in builders:
        raise ModelFileError(f"unknown level {str(level)[:40]!r} of the tokenizer{nearest(str(level)[:40], builders)}")
    key, build = builders[level]
    if data.keys() != {"level", key} - {None}:
        raise ModelFileError(f"a {level} tokenizer must hold 'level'{f' and {key!r}' if key else ''} and nothing else")
    return build(data.get(key))


def _char_from(characters: object) -> CharTokenizer:
    if not isinstance(characters, str) or any(a >= b for a, b in pairwise(characters)):
        raise ModelFileError("the tokenizer's 'characters' must be a string of different characters by code point")
    if not _is_unicode(characters):
        raise ModelFileError("the tokenizer's 'characters' hold a lone surrogate")
    return CharTokenizer(characters)


def _word_from(words: object) -> WordTokenizer:
    if not isinstance(words, list) or len(words) > MAX_VOCABULARY_SIZE or not all(isinstance(w, str) for w in words):
        raise ModelFileError("the tokenizer's 'words' must be a list of strings")
    if len({*words, *WordTokenizer.special}) < len(words) + 3:
        raise ModelFileError("the tokenizer's 'words' must differ from one another and from the special tokens")
    if not all(word.split() == [word] and _is_unicode(word) for word in words):
        raise ModelFileError("the tokenizer's 'words' must be text without white space")
    return WordTokenizer(words)


def _bpe_from(settings: object) -> BPETokenizer:
    if not isinstance(settings, dict):
        raise ModelFileError("the tokenizer's 'tokenizer' must be an object")
    try:
        serialized = json.dumps(settings)
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelFileError(f"the tokenizer's 'tokenizer' is no JSON: {error}") from None
    return BPETokenizer(serialized)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
