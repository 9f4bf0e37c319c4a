"""Tokenizers: text to ids and back, at the level of characters, bytes, words or byte pairs (BPE).

All share one interface and one boundary token, are trained on the training part alone, are saved as plain JSON inside
the model file, and give the same ids wherever a text that arrives in pieces is cut.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from elman.config import TokenizerConfig
from elman.errors import ConfigError, ElmanError, ModelFileError, TextError, UserError, nearest
from elman.text.sources import Piece, utf8

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

BOUNDARY = "<|endoftext|>"
"""The token before every document: the first token of a text is predicted from it."""
UNKNOWN = "<unk>"
"""The token of characters or words that are not in the vocabulary."""
END_OF_LINE = "<eos>"
"""The token of a line's end at word level."""

Unknown: TypeAlias = Literal["error", "token", "skip"]
"""What `encode` does with text that the vocabulary lacks: refuse it, read it as `<unk>`, or leave it out."""
Ids: TypeAlias = npt.NDArray[np.int64]

_DEFAULT_BPE_SIZE = 8192
_MAX_WORD_LENGTH = 1 << 24
_BATCH = 1 << 16
_MAX_VOCABULARY_SIZE = 1 << 24


class Decoder(ABC):
    """Turns ids into text one at a time; a piece of text never ends inside a character."""

    @abstractmethod
    def feed(self, token: int) -> str:
        """Take one id and return the text that is now complete, possibly none."""

    def flush(self) -> str:
        """Return what is still held back, at the end of the ids."""
        return ""


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

    def encode_pieces(self, pieces: Iterable[Piece], *, unknown: Unknown = "token") -> Iterator[Ids]:
        """Ids of documents that arrive in pieces, a boundary before each document, the same wherever pieces are cut."""
        for batch in _batched(self._recut(pieces)):
            yield self._encode(batch, unknown)

    def _encode(self, pieces: Sequence[Piece], unknown: Unknown) -> Ids:
        ids = self._ids(pieces)
        if not ids.size or ids.min() >= 0:
            return ids
        if unknown == "token" and self.unknown_id is not None:
            return np.where(ids < 0, self.unknown_id, ids)
        if unknown == "skip":
            return ids[ids >= 0]
        missing = self.unknown_characters("".join(piece.text for piece in pieces))
        shown = ", ".join(map(repr, missing[:10])) + (" ..." if len(missing) > 10 else "")
        raise TextError(
            f"the vocabulary of {self.size} lacks {len(missing)} {'words' if self.level == 'word' else 'characters'} "
            f"of the text: {shown}; --unknown skip leaves them out, --unknown token reads them as {UNKNOWN}"
        )

    def _with_boundaries(self, ids: Ids, pieces: Sequence[Piece], lengths: Sequence[int]) -> Ids:
        """Put the boundary into the ids of joined pieces; `lengths` says how many of them each piece has."""
        starts = accumulate(lengths, initial=0)
        where = [start for start, piece in zip(starts, pieces, strict=False) if piece.starts_document]
        return np.insert(ids, where, self.boundary_id) if where else ids

    def unknown_characters(self, text: str) -> list[str]:
        """The characters, or words at word level, that the vocabulary lacks, each once, sorted."""
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


def _recut(pieces: Iterable[Piece], complete: Callable[[str], int]) -> Iterator[Piece]:
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

    def decoder(self) -> Decoder:
        return _TextDecoder(self.vocabulary)

    def to_dict(self) -> dict[str, Any]:
        return {"level": "char", "characters": "".join(self.vocabulary[2:])}


_NUM_CODE_POINTS = 0x110000


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


class _ByteDecoder(Decoder):
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
        self.vocabulary = _readable(self._entries)

    def _ids(self, pieces: Sequence[Piece]) -> Ids:
        encoded = [utf8(piece.text) for piece in pieces]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int64)
        return self._with_boundaries(ids, pieces, list(map(len, encoded)))

    def decoder(self) -> Decoder:
        return _ByteDecoder(self._entries)

    def to_dict(self) -> dict[str, Any]:
        return {"level": "byte"}


def _readable(entries: Iterable[bytes | str]) -> tuple[str, ...]:
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
    _special = (BOUNDARY, UNKNOWN, END_OF_LINE)

    def __init__(self, words: Iterable[str]) -> None:
        self.vocabulary = (*self._special, *words)
        self._id_of_word = {word: i for i, word in enumerate(self.vocabulary) if word not in (BOUNDARY, END_OF_LINE)}

    @classmethod
    def train(cls, config: TokenizerConfig, pieces: Iterable[Piece]) -> WordTokenizer:
        """Take the words of a text that occur `min_count` times, the most frequent ones up to `max_size`."""
        counts: Counter[str] = Counter()
        for piece in _recut(pieces, _whole_words):
            counts.update(piece.text.split())
        kept = [(-n, word) for word, n in counts.items() if n >= config.min_count and word not in cls._special]
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
        return _recut(pieces, _whole_words)

    def unknown_characters(self, text: str) -> list[str]:
        return sorted(set(text.split()) - self._id_of_word.keys())

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


# A long text is encoded in chunks, cut where a space follows something that is no white space, for no usual
# pre-tokenizer joins the two. Where no such place comes, the cut is at 16 times the length. The cuts follow from the
# document alone, never from the pieces in which it arrives.
_CHUNK = 1 << 14
_CUT = re.compile(r"\S(?= )")
_LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Punctuation"}
_PROBE = (
    " a  b\t\n\r\n \x00\x7f It's 1234 ÄÖß e\u0301 \u00e9 ﬁ Ａ İ ǅ Ω \u1e9b\u0323 漢字 かな 한글 ไทย العربية हिन्दी"
    " 👩\u200d👩\u200d👧 \u2028\u200b\ufeff\ufffd \U0010ffff ▁ Ġ ## </w> <unk> [UNK] \n "
)


def _chunk_ends(text: str, size: int) -> list[int]:
    ends, start = [], 0
    while len(text) - start > size:
        longest = start + 16 * size
        if match := _CUT.search(text, start + size - 1, longest + 1):
            start = match.end()
        elif len(text) > longest:
            start = longest
        else:
            break
        ends.append(start)
    return ends


def _last_chunk_end(text: str, size: int) -> int:
    return (_chunk_ends(text, size) or [0])[-1]


def _chunks(text: str, size: int) -> list[str]:
    ends = [0, *_chunk_ends(text, size), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


class _WindowDecoder(Decoder):
    """Decodes the last few ids again and again, for tokenizers whose tokens' texts depend on their neighbours."""

    window = 64

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.said = ""

    def feed(self, token: int) -> str:
        self.ids.append(token)
        text = self.decode(self.ids)
        if text.endswith("\ufffd") or not text.startswith(self.said):
            return ""
        new, self.said = text[len(self.said) :], text
        if len(self.ids) > self.window:
            self.ids = self.ids[-self.window // 2 :]
            self.said = self.decode(self.ids)
        return new

    def flush(self) -> str:
        return self.decode(self.ids)[len(self.said) :]


class BPETokenizer(Tokenizer):
    """Byte pair encoding over UTF-8 bytes, trained here, or any `tokenizer.json` of Hugging Face's `tokenizers`.

    Special tokens are not recognised inside a text. The boundary is added where the file lacks it. Long texts are
    encoded in chunks of some 16,000 characters that end before a space. `lossless` is true only for byte-level BPE
    without a normaliser that gives a varied probe text back unchanged.
    """

    level = "bpe"

    def __init__(self, serialized: str) -> None:
        """Build from the text of a `tokenizer.json`.

        Raises:
            ModelFileError: if it is not a valid one.
        """
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        with _one_error(ModelFileError, "not a usable tokenizer.json"):
            settings = json.loads(serialized)
            settings |= {"truncation": None, "padding": None}
            settings["model"] |= {"dropout": None} if "dropout" in settings["model"] else {}
            _refuse_wild_ids(settings)
            hub = HuggingFaceTokenizer.from_str(json.dumps(settings))
            hub.add_special_tokens([AddedToken(BOUNDARY, special=True, normalized=False)])
            hub.encode_special_tokens = True
            self._hub: HuggingFaceTokenizer = hub
            self._settings: dict[str, Any] = json.loads(hub.to_str())
            self._read_vocabulary()
            probe = self.decode(self.encode(_PROBE, unknown="token"))
        self.lossless = self._keeps_text and probe == _PROBE

    def _read_vocabulary(self) -> None:
        model, added = self._settings["model"], self._settings["added_tokens"]
        ids = self._hub.get_vocab(with_added_tokens=True)
        size = max(ids.values()) + 1
        tokens = [""] * size
        for token, i in ids.items():
            tokens[i] = token
        self.boundary_id = ids[BOUNDARY]
        unknown = ids.get(model.get("unk_token") or "", model.get("unk_id"))
        self.unknown_id = None if self._is_byte_level else unknown
        byte_of = _byte_letters()
        texts = {token["id"]: token["content"] for token in added}
        self._entries: list[bytes | str] = [
            BOUNDARY if i == self.boundary_id
            else texts[i].encode() if i in texts
            else bytes(byte_of[letter] for letter in token) if self._is_byte_level and byte_of.keys() >= set(token)
            else token
            for i, token in enumerate(tokens)
        ]  # fmt: skip
        self.vocabulary = _readable(self._entries)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether each id stands for fixed bytes, and all bytes have one."""
        model, decoder = self._settings["model"], self._settings["decoder"] or {}
        return (
            model["type"] == "BPE"
            and decoder.get("type") == "ByteLevel"
            and not model.get("continuing_subword_prefix")
            and not model.get("end_of_word_suffix")
            and model["vocab"].keys() >= _byte_letters().keys()
        )

    @property
    def _keeps_text(self) -> bool:
        before = self._settings["pre_tokenizer"] or {"type": "none"}
        steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
        return (
            self._is_byte_level
            and self._settings["normalizer"] is None
            and all(step["type"] in _LOSSLESS_PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in steps)
            and any(step["type"] == "ByteLevel" for step in steps)
            and not any(step.get("add_prefix_space") for step in steps)
            and not any(token["lstrip"] or token["rstrip"] for token in self._settings["added_tokens"])
        )

    @classmethod
    def train(cls, config: TokenizerConfig, pieces: Iterable[Piece]) -> BPETokenizer:
        """Learn merges inside words on an even sample of `sample_bytes`; all 256 bytes are in the vocabulary."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers

        size = config.max_size or _DEFAULT_BPE_SIZE
        if size < 257:
            raise ConfigError(f"tokenizer.max_size {size} is too small for bpe: at least 257, all bytes and {BOUNDARY}")
        hub = HuggingFaceTokenizer(models.BPE())
        hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        hub.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=2,
            special_tokens=[BOUNDARY],
            initial_alphabet=sorted(_byte_letters()),
            show_progress=False,
        )
        hub.train_from_iterator(_even_sample(pieces, config.sample_bytes), trainer)
        return cls(hub.to_str())

    @classmethod
    def from_file(cls, path: str | Path) -> BPETokenizer:
        """Read an existing `tokenizer.json`."""
        try:
            return cls(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelFileError(f"tokenizer.path {path}: {error.strerror or error}") from None
        except (ModelFileError, UnicodeDecodeError) as error:
            raise ModelFileError(f"tokenizer.path {path}: {error}") from None

    def _ids(self, pieces: Sequence[Piece]) -> Ids:
        chunks = [_chunks(piece.text, _CHUNK) for piece in pieces]
        with _one_error(TextError, "the tokenizer cannot encode this text"):
            encodings = iter(self._hub.encode_batch_fast(list(chain.from_iterable(chunks)), add_special_tokens=False))
        ids: list[int] = []
        lengths = []
        for of_piece in chunks:
            start = len(ids)
            for encoding in islice(encodings, len(of_piece)):
                ids.extend(encoding.ids)
            lengths.append(len(ids) - start)
        found = np.array(ids, np.int64)
        if (found == self.boundary_id).any():
            raise TextError(f"this tokenizer reads a literal {BOUNDARY} in a text as the boundary; remove it")
        if self.unknown_id is not None:
            found[found == self.unknown_id] = -1
        return self._with_boundaries(found, pieces, lengths)

    def _recut(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        return _recut(pieces, partial(_last_chunk_end, size=_CHUNK))

    def unknown_characters(self, text: str) -> list[str]:
        return super().unknown_characters(text) or sorted(filter(self._lacks, set(text.split())))

    def decoder(self) -> Decoder:
        if self._is_byte_level:
            return _ByteDecoder(self._entries)
        return _WindowDecoder(partial(self._hub.decode, skip_special_tokens=False))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        if self._is_byte_level:
            return super().decode(ids)
        return self._hub.decode(self._checked(ids), skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        return {"level": "bpe", "tokenizer": self._settings}


def _refuse_wild_ids(settings: dict[str, Any]) -> None:
    """Keep a few tokens with huge ids from filling the memory, and two tokens from sharing an id."""
    vocabulary = settings["model"]["vocab"]
    ids = list(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have one id")
    ids += [token["id"] for token in settings.get("added_tokens") or ()]
    if max(ids, default=0) > min(2 * len(ids) + 1024, _MAX_VOCABULARY_SIZE):
        raise ValueError(f"the largest id is {max(ids)}, for {len(ids)} tokens")


def _byte_letters() -> dict[str, int]:
    """The letter by which byte-level BPE writes each byte: printable Latin-1 for itself, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


def _even_sample(pieces: Iterable[Piece], max_bytes: int) -> Iterator[str]:
    """Chunks spread evenly over all of a text, at most `max_bytes` of UTF-8; `pieces` is passed over twice."""
    size = max(64, min(_CHUNK, max_bytes // 64))
    total = sum(len(utf8(piece.text)) for piece in pieces)
    seen = taken = 0
    for piece in _recut(pieces, partial(_last_chunk_end, size=size)):
        for chunk in _chunks(piece.text, size):
            length = len(utf8(chunk))
            seen += length
            if (taken + length) * total <= max_bytes * seen:
                taken += length
                yield chunk


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
    if not isinstance(words, list) or len(words) > _MAX_VOCABULARY_SIZE or not all(isinstance(w, str) for w in words):
        raise ModelFileError("the tokenizer's 'words' must be a list of strings")
    if len({*words, *WordTokenizer._special}) < len(words) + 3:
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
        raise ModelFileError(f"the tokenizer's 'tokenizer' is no JSON: {_one_line(error)}") from None
    return BPETokenizer(serialized)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _one_error(kind: type[UserError], what: str) -> Iterator[None]:
    """Turn whatever the library raises into one of our errors; its Rust code panics with a BaseException of its own."""
    try:
        yield
    except (ElmanError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


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
