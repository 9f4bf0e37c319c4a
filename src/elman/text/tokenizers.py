"""Tokenizers: text to ids and back. Their interface, and those at the level of characters, bytes and words.

All share one interface and one boundary token, are trained on the training part alone, are saved as plain JSON inside
the model file, and give the same ids wherever a text that arrives in pieces is cut.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from elman.config import TokenizerConfig
from elman.errors import ConfigError, TextError
from elman.text.sources import Piece, utf8

BOUNDARY = "<|endoftext|>"
"""The token before every document: the first token of a text is predicted from it."""
UNKNOWN = "<unk>"
"""The token of characters or words that are not in the vocabulary."""
END_OF_LINE = "<eos>"
"""The token of a line's end at word level."""

Unknown: TypeAlias = Literal["error", "token", "skip"]
"""What `encode` does with text that the vocabulary lacks: refuse it, read it as `<unk>`, or leave it out."""
Ids: TypeAlias = npt.NDArray[np.int64]

MAX_VOCABULARY_SIZE = 1 << 24
"""More ids than this are refused in files that others wrote."""

_UNITS = {"char": "characters", "byte": "bytes", "word": "words", "bpe": "pieces"}
_MAX_WORD_LENGTH = 1 << 24
_BATCH = 1 << 16


class Decoder(ABC):
    """Turns ids into text one at a time; a piece of text never ends inside a character."""

    @abstractmethod
    def feed(self, token: int) -> str:
        """Take one id and return the text that is now complete, possibly none."""

    def flush(self) -> str:
        """Return what is still held back, at the end of the ids."""
        return ""


def never_seen(missing: Sequence[str]) -> str:
    """What a text holds that a vocabulary lacks, for a message."""
    units = "character or word" if len(missing) == 1 else "characters or words"
    return f"{len(missing)} {units} that the model never saw: {' '.join(map(repr, missing[:20]))}"


class Tokenizer(ABC):
    """The interface of all tokenizers.

    `vocabulary` holds a readable text for each id. `unknown_id` is None where every text can be encoded. `lossless`
    tells whether decoding gives back exactly the text encoded, provided that nothing in it was unknown.
    """

    level: ClassVar[Literal["char", "byte", "word", "bpe"]]
    vocabulary: tuple[str, ...]
    boundary_id: int = 0
    unknown_id: int | None = None
    lossless: bool = True

    @property
    def size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self.vocabulary)

    @property
    def entries(self) -> Sequence[bytes | str]:
        """What each id stands for, bytes or text: by this the tokens of two tokenizers are matched."""
        return self.vocabulary

    def extended(self, other: Tokenizer) -> Tokenizer:
        """This tokenizer with the characters or words of another of its level; itself where it can encode any text."""
        return self

    @abstractmethod
    def _ids(self, pieces: Sequence[Piece]) -> Ids:
        """Ids of pieces, the boundary before each one that starts a document, -1 for what the vocabulary lacks."""

    def _recut(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        """Move cuts inside of documents to where no id depends on both sides."""
        return pieces

    def encode(self, text: str, *, unknown: Unknown = "error") -> Ids:
        """Ids of a text, int64, without a boundary; nothing inside a text is ever read as the boundary.

        Raises:
            TextError: if something is not in the vocabulary and `unknown` is "error".
        """
        return self._encode([Piece(text, starts_document=False)], unknown)

    def encode_pieces(
        self, pieces: Iterable[Piece], *, unknown: Unknown = "token", missing: set[str] | None = None
    ) -> Iterator[Ids]:
        """Ids of documents that arrive in pieces, a boundary before each document, the same wherever pieces are cut.

        Everything that is read as `<unk>` is added to `missing`.
        """
        for batch in _batched(self._recut(pieces)):
            yield self._encode(batch, unknown, missing)

    def encode_as_it_comes(self, pieces: Iterable[Piece], *, unknown: Unknown = "token") -> Iterator[Ids]:
        """The same, but whatever is certain is given out before the next piece is asked for."""
        for piece in self._recut(pieces):
            yield self._encode([piece], unknown)

    def _encode(self, pieces: Sequence[Piece], unknown: Unknown, missing: set[str] | None = None) -> Ids:
        ids = self._ids(pieces)
        if not ids.size or ids.min() >= 0:
            return ids
        if unknown == "token" and self.unknown_id is not None:
            if missing is not None:
                missing.update(*(self.unknown_characters(piece.text) for piece in pieces))
            return np.where(ids < 0, self.unknown_id, ids)
        if unknown == "skip":
            return ids[ids >= 0]
        lacking = self.unknown_characters("".join(piece.text for piece in pieces))
        shown = ", ".join(map(repr, lacking[:10])) + (" ..." if len(lacking) > 10 else "")
        units = _UNITS[self.level] if len(lacking) != 1 else _UNITS[self.level].removesuffix("s")
        as_token = "" if self.unknown_id is None else f", --unknown token reads them as {UNKNOWN}"
        raise TextError(
            f"the vocabulary of {self.size} lacks {len(lacking)} {units} of the text: {shown}; "
            f"--unknown skip leaves them out{as_token}"
        )

    def _with_boundaries(self, ids: Ids, pieces: Sequence[Piece], lengths: Sequence[int]) -> Ids:
        """Put the boundary into the ids of joined pieces; `lengths` says how many of them each piece has."""
        starts = accumulate(lengths, initial=0)
        where = [start for start, piece in zip(starts, pieces, strict=False) if piece.starts_document]
        return np.insert(ids, where, self.boundary_id) if where else ids

    def unknown_characters(self, text: str) -> list[str]:
        """The characters that the vocabulary lacks, each once, sorted; words or longer pieces where it holds such."""
        return sorted(character for character in set(text) if self._lacks(character))

    def _lacks(self, character: str) -> bool:
        return bool((self._ids([Piece(character, starts_document=False)]) < 0).any())

    @abstractmethod
    def decoder(self) -> Decoder:
        """A new incremental decoder; feeding all ids and flushing gives what `decode` gives."""

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Text of ids; the boundary and `<unk>` appear by name, bytes that are no UTF-8 as U+FFFD."""
        decoder = self.decoder()
        return "".join(map(decoder.feed, self._checked(ids))) + decoder.flush()

    def _checked(self, ids: Sequence[int] | npt.NDArray[Any]) -> list[int]:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not 0 <= array.min() <= array.max() < self.size:
            raise TextError(f"ids must lie in 0 .. {self.size - 1}, got {array.min()} .. {array.max()}")
        return array.tolist()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything needed to rebuild it with `tokenizer_from_dict`, as JSON holds it."""


def _batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group short pieces, since each call of a tokenizer costs as much as some hundred characters."""
    batch: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text)
        if num_chars >= _BATCH:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def recut(pieces: Iterable[Piece], complete: Callable[[str], int]) -> Iterator[Piece]:
    """Move the cuts between pieces of a document to places where nothing depends on what follows."""
    rest, starts = "", False
    for piece in pieces:
        if piece.starts_document:
            if rest:
                yield Piece(rest, starts)
            rest, starts = "", True
        rest += piece.text
        if end := complete(rest):
            yield Piece(rest[:end], starts)
            rest, starts = rest[end:], False
    if rest:
        yield Piece(rest, starts)


class _TextDecoder(Decoder):
    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = vocabulary

    def feed(self, token: int) -> str:
        return self.vocabulary[token]


class CharTokenizer(Tokenizer):
    """One id per Unicode code point: 0 the boundary, 1 `<unk>`, then the characters by code point."""

    level = "char"
    unknown_id = 1

    def __init__(self, characters: Iterable[str]) -> None:
        self.vocabulary = (BOUNDARY, UNKNOWN, *sorted(set(characters)))

    @classmethod
    def train(cls, config: TokenizerConfig, pieces: Iterable[Piece]) -> CharTokenizer:
        """Take the characters of a text, the most frequent ones where `max_size` asks for it."""
        counts = np.zeros(_NUM_CODE_POINTS, np.int64)
        for batch in _batched(pieces):
            found = np.bincount(_code_points("".join(piece.text for piece in batch)))
            counts[: found.size] += found
        kept = np.flatnonzero(counts >= config.min_count)
        if config.max_size is not None:
            kept = kept[np.argsort(-counts[kept], kind="stable")][: _room(config, special=2)]
        return cls(map(chr, kept.tolist()))

    @cached_property
    def _id_of_code_point(self) -> Ids:
        """One entry more than the largest code point asks for: all beyond are clipped to it."""
        code_points = _code_points("".join(self.vocabulary[2:]))
        table = np.full(int(code_points.max(initial=0)) + 2, -1, np.int64)
        table[code_points] = np.arange(2, self.size)
        return table

    def _ids(self, pieces: Sequence[Piece]) -> Ids:
        texts = [piece.text for piece in pieces]
        ids = self._id_of_code_point.take(_code_points("".join(texts)), mode="clip")
        return self._with_boundaries(ids, pieces, list(map(len, texts)))

    def extended(self, other: Tokenizer) -> CharTokenizer:
        return CharTokenizer((*self.vocabulary[2:], *other.vocabulary[2:]))

    def decoder(self) -> Decoder:
        return _TextDecoder(self.vocabulary)

    def to_dict(self) -> dict[str, Any]:
        return {"level": "char", "characters": "".join(self.vocabulary[2:])}


_NUM_CODE_POINTS = 0x110000


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


class ByteDecoder(Decoder):
    """Joins the bytes of ids to characters; an entry that is text already, a special token, stands alone."""

    def __init__(self, entries: Sequence[bytes | str]) -> None:
        self.entries = entries
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        entry = self.entries[token]
        return self.utf8.decode(entry) if isinstance(entry, bytes) else self.flush() + entry

    def flush(self) -> str:
        text = self.utf8.decode(b"", True)
        self.utf8.reset()
        return text


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte, the id being the byte's value; 256 is the boundary. Text read as raw bytes stays exact."""

    level = "byte"
    boundary_id = 256
    _entries: tuple[bytes | str, ...] = (*(bytes([value]) for value in range(256)), BOUNDARY)

    def __init__(self) -> None:
        self.vocabulary = readable(self._entries)

    @property
    def entries(self) -> Sequence[bytes | str]:
        return self._entries

    def _ids(self, pieces: Sequence[Piece]) -> Ids:
        encoded = [utf8(piece.text) for piece in pieces]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int64)
        return self._with_boundaries(ids, pieces, list(map(len, encoded)))

    def decoder(self) -> Decoder:
        return ByteDecoder(self._entries)

    def to_dict(self) -> dict[str, Any]:
        return {"level": "byte"}


def readable(entries: Iterable[bytes | str]) -> tuple[str, ...]:
    """The vocabulary of tokens that stand for bytes or for text."""
    return tuple(e.decode("utf-8", "backslashreplace") if isinstance(e, bytes) else e for e in entries)


class _WordDecoder(Decoder):
    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = vocabulary
        self.after_word = False

    def feed(self, token: int) -> str:
        word = self.vocabulary[token]
        space = " " if self.after_word else ""
        self.after_word = word not in (BOUNDARY, END_OF_LINE)
        if word == END_OF_LINE:
            return "\n"
        return space + word if self.after_word else word


class WordTokenizer(Tokenizer):
    """Words between white space, and `<eos>` for every line feed.

    The ids: 0 the boundary, 1 `<unk>`, 2 `<eos>`, then the words by falling count and, among equals, by code points.
    A literal `<unk>` in a text is the token `<unk>`; a literal `<eos>` or `<|endoftext|>` is an unknown word. A last
    line without a line feed gets no `<eos>`, so that a prompt can end inside a line. Decoding gives the text with the
    white space of each line normalised: none at its ends, one space between words.
    """

    level = "word"
    unknown_id = 1
    lossless = False
    special = (BOUNDARY, UNKNOWN, END_OF_LINE)

    def __init__(self, words: Iterable[str]) -> None:
        self.vocabulary = (*self.special, *words)
        self._id_of_word = {word: i for i, word in enumerate(self.vocabulary) if word not in (BOUNDARY, END_OF_LINE)}

    @classmethod
    def train(cls, config: TokenizerConfig, pieces: Iterable[Piece]) -> WordTokenizer:
        """Take the words of a text that occur `min_count` times, the most frequent ones up to `max_size`."""
        counts: Counter[str] = Counter()
        for piece in recut(pieces, _whole_words):
            counts.update(piece.text.split())
        kept = [(-n, word) for word, n in counts.items() if n >= config.min_count and word not in cls.special]
        return cls(word for _, word in sorted(kept)[: _room(config, special=3)])

    def _ids(self, pieces: Sequence[Piece]) -> Ids:
        find = self._id_of_word.get
        ids: list[int] = []
        for piece in pieces:
            if piece.starts_document:
                ids.append(self.boundary_id)
            *lines, last = piece.text.split("\n")
            for line in lines:
                ids.extend([find(word, -1) for word in line.split()])
                ids.append(2)
            ids.extend([find(word, -1) for word in last.split()])
        return np.array(ids, np.int64)

    def _recut(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        return recut(pieces, _whole_words)

    def unknown_characters(self, text: str) -> list[str]:
        return sorted(set(text.split()) - self._id_of_word.keys())

    def extended(self, other: Tokenizer) -> WordTokenizer:
        known = set(self.vocabulary)
        return WordTokenizer((*self.vocabulary[3:], *(word for word in other.vocabulary[3:] if word not in known)))

    def decoder(self) -> Decoder:
        return _WordDecoder(self.vocabulary)

    def to_dict(self) -> dict[str, Any]:
        return {"level": "word", "words": list(self.vocabulary[3:])}


def _whole_words(text: str) -> int:
    """Length of the part of a text that ends with its last white space."""
    if not text or text[-1].isspace():
        return len(text)
    last_word = len(text.rsplit(None, 1)[-1])
    if last_word > _MAX_WORD_LENGTH:
        raise TextError(
            f"a word of more than {_MAX_WORD_LENGTH:,} characters, so this text has no white space between words; "
            "use --tokenizer.level char, byte or bpe"
        )
    return len(text) - last_word


def _room(config: TokenizerConfig, special: int) -> int | None:
    """How many characters or words fit beside the special tokens; None: any number."""
    if config.max_size is None:
        return None
    if config.max_size <= special:
        raise ConfigError(
            f"tokenizer.max_size {config.max_size} leaves no room beside the {special} special tokens of level "
            f"{config.level!r}; give at least {special + 1}"
        )
    return config.max_size - special
