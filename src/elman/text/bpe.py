"""Byte pair encoding, learned here or read from a `tokenizer.json` of Hugging Face's `tokenizers`, which does the work.

A file may hold other models and rules than ours. Whatever it holds, text that it cannot represent is counted as
`<unk>`, never dropped, and its text comes out piece by piece as it does at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elman.config import TokenizerConfig
from elman.errors import ConfigError, ElmanError, ModelFileError, TextError, UserError
from elman.text.sources import Piece, refuse_wild_name, utf8
from elman.text.tokenizers import (
    BOUNDARY,
    MAX_VOCABULARY_SIZE,
    UNKNOWN,
    ByteDecoder,
    Decoder,
    Ids,
    Tokenizer,
    readable,
    recut,
)

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as HuggingFaceTokenizer

DEFAULT_SIZE = 8192

# A long text is encoded in chunks, cut where a space follows something that is no white space, for no usual
# pre-tokenizer joins the two. Where no such place comes, the cut is at 16 times the length. The cuts follow from the
# document alone, never from the pieces in which it arrives.
_CHUNK = 1 << 14
_CUT = re.compile(r"\S(?= )")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
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


class _ContextDecoder(ByteDecoder):
    """For tokens whose text depends on whether they are the first, as ` the` or `the`, or the last.

    Args:
        entries: the bytes of tokens that stand for bytes, anything else for others.
        text_of: the text of a token, at the start or later, in two parts: what it always is, and what follows unless
            the token is the last.
    """

    def __init__(self, entries: Sequence[bytes | str], text_of: Callable[[int, bool], tuple[str, str]]) -> None:
        super().__init__(entries)
        self.text_of = text_of
        self.at_start = True
        self.held_back = ""

    def feed(self, token: int) -> str:
        entry = self.entries[token]
        said, self.held_back = self.held_back, ""
        if isinstance(entry, bytes):
            said += self.utf8.decode(entry)
        else:
            text, self.held_back = self.text_of(token, self.at_start)
            said += super().flush() + text
        self.at_start = False
        return said

    def flush(self) -> str:
        self.at_start, self.held_back = True, ""
        return super().flush()


class BPETokenizer(Tokenizer):
    """Byte pair encoding over UTF-8 bytes, trained here, or any `tokenizer.json` of Hugging Face's `tokenizers`.

    Special tokens are not recognised inside a text. The boundary is added where the file lacks it, and so is `<unk>`
    where byte pairs would leave out characters without a word. Long texts are encoded in chunks of some 16,000
    characters that end before a space. Tokens that stand for bytes are decoded as one stream of bytes. `lossless` is
    true only for byte-level BPE without a normaliser that gives a varied probe text back unchanged.
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
            _refuse_wild_ids(settings)
            settings |= {"truncation": None, "padding": None}
            settings["model"] |= {"dropout": None} if "dropout" in settings["model"] else {}
            hub = HuggingFaceTokenizer.from_str(json.dumps(settings))
            if with_unknown := _with_unknown(json.loads(hub.to_str())):
                hub = HuggingFaceTokenizer.from_str(json.dumps(with_unknown))
            hub.add_special_tokens([AddedToken(BOUNDARY, special=True, normalized=False)])
            hub.encode_special_tokens = True
            self._hub: HuggingFaceTokenizer = hub
            self._settings: dict[str, Any] = json.loads(hub.to_str())
            self._read_vocabulary()
            probe = self.decode(self.encode(_PROBE, unknown="token"))
        self.lossless = self._keeps_text and probe == _PROBE

    def _read_vocabulary(self) -> None:
        ids = self._hub.get_vocab(with_added_tokens=True)
        if len(set(ids.values())) < len(ids):
            raise ValueError("two tokens have one id")
        tokens = [""] * (max(ids.values()) + 1)
        for token, i in ids.items():
            tokens[i] = token
        self.boundary_id = ids[BOUNDARY]
        model = self._settings["model"]
        unknown = ids.get(model.get("unk_token") or "", model.get("unk_id"))
        self.unknown_id = None if _is_byte_level(self._settings) else unknown
        decoders = {step["type"] for step in _steps(self._settings["decoder"], "decoders")}
        if "CTC" in decoders:
            raise ValueError("its decoder, CTC, takes a repeated token as one, which is for speech")
        self._is_in_bytes = "ByteLevel" in decoders
        byte_of = _byte_letters()
        added = {token["id"] for token in self._settings["added_tokens"]}

        def entry(i: int, token: str) -> bytes | str:
            if i == self.boundary_id:
                return BOUNDARY
            if self._is_in_bytes:
                written = i not in added and byte_of.keys() >= set(token)
                return bytes(byte_of[letter] for letter in token) if written else token.encode()
            if "ByteFallback" in decoders and (match := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(match[1], 16)])
            return token

        self._entries = [entry(i, token) for i, token in enumerate(tokens)]
        self.vocabulary = readable(self._entries)
        self._text_of = cache(self._ask_text_of)

    @property
    def entries(self) -> Sequence[bytes | str]:
        return self._entries

    @property
    def _keeps_text(self) -> bool:
        steps = _steps(self._settings["pre_tokenizer"], "pretokenizers")
        return (
            self._is_in_bytes
            and _is_byte_level(self._settings)
            and self._settings["normalizer"] is None
            and all(step["type"] in _LOSSLESS_PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in steps)
            and not any(step.get("add_prefix_space") for step in steps)
            and not any(token["lstrip"] or token["rstrip"] for token in self._settings["added_tokens"])
        )

    @classmethod
    def train(cls, config: TokenizerConfig, pieces: Iterable[Piece]) -> BPETokenizer:
        """Learn merges inside words on an even sample of `sample_bytes`; all 256 bytes are in the vocabulary."""
        from tokenizers import Tokenizer as HuggingFaceTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers

        size = config.max_size or DEFAULT_SIZE
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
        refuse_wild_name(str(path))
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
        return recut(pieces, partial(_last_chunk_end, size=_CHUNK))

    def unknown_characters(self, text: str) -> list[str]:
        chunks = _chunks(text, _CHUNK)
        with _one_error(TextError, "the tokenizer cannot encode this text"):
            encodings: list[Encoding] = self._hub.encode_batch(chunks, add_special_tokens=False)
        return sorted(
            {
                chunk[start:end] or UNKNOWN  # nothing of the text where a normaliser has put in what is unknown
                for chunk, encoding in zip(chunks, encodings, strict=True)
                for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
                if token == self.unknown_id
            }
        )

    def decoder(self) -> Decoder:
        return ByteDecoder(self._entries) if self._is_in_bytes else _ContextDecoder(self._entries, self._text_of)

    def _ask_text_of(self, token: int, at_start: bool) -> tuple[str, str]:
        """What the library makes of a token, found by having it decode the boundary on either side, or not."""
        decode = partial(self._hub.decode, skip_special_tokens=False)
        boundary = self.boundary_id
        before = [] if at_start else [boundary]
        text_before = decode(before)
        text_after = decode([boundary, boundary]).removeprefix(decode([boundary]))
        inside = decode([*before, token, boundary]).removesuffix(text_after).removeprefix(text_before)
        as_last = decode([*before, token]).removeprefix(text_before)
        return (as_last, inside[len(as_last) :]) if inside.startswith(as_last) else (inside, "")

    def to_dict(self) -> dict[str, Any]:
        return {"level": "bpe", "tokenizer": self._settings}


def _refuse_wild_ids(settings: object) -> None:
    """Keep a few tokens with huge ids from filling the memory, and two tokens from sharing an id."""
    model = settings.get("model") if isinstance(settings, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(settings, dict) or not isinstance(vocabulary, dict | list):
        raise ValueError("it must be an object with a 'model' that has a 'vocab'")
    ids = list(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
    added = settings.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError("its 'added_tokens' must be a list of objects")
    if not all(type(i) is int for i in (*ids, *(token.get("id") for token in added))):
        raise ValueError("the id of every token must be a whole number")
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have one id")
    ids += [token["id"] for token in added]
    if max(ids, default=0) > min(2 * len(ids) + 1024, MAX_VOCABULARY_SIZE):
        raise ValueError(f"the largest id is {max(ids)}, for {len(ids)} tokens")


def _with_unknown(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The settings with a token for unknown characters, which byte pairs leave out where there is none.

    None where nothing is missing: another model, all bytes in the vocabulary, or a token of the file's own.
    """
    model = settings["model"]
    name = model.get("unk_token")
    if model["type"] != "BPE" or _is_byte_level(settings) or (name in model["vocab"] and name != BOUNDARY):
        return None
    if model["byte_fallback"] and model["vocab"].keys() >= {f"<0x{value:02X}>" for value in range(256)}:
        return None
    name = UNKNOWN if name in (None, BOUNDARY) else name
    # Tokens beside the vocabulary would otherwise move up by one id.
    vocabulary = {token["content"]: token["id"] for token in settings["added_tokens"]} | model["vocab"]
    vocabulary.setdefault(name, max(vocabulary.values(), default=-1) + 1)
    return settings | {"model": model | {"vocab": vocabulary, "unk_token": name}}


def _is_byte_level(settings: dict[str, Any]) -> bool:
    """Whether a text is encoded by its bytes, and each of them has an id."""
    model = settings["model"]
    steps = [*_steps(settings["normalizer"], "normalizers"), *_steps(settings["pre_tokenizer"], "pretokenizers")]
    return (
        model["type"] == "BPE"
        and any(step["type"] == "ByteLevel" for step in steps)
        and not model["continuing_subword_prefix"]
        and not model["end_of_word_suffix"]
        and model["vocab"].keys() >= _byte_letters().keys()
    )


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a normaliser, pre-tokenizer or decoder, which may be a sequence of others."""
    if part is None:
        return []
    return [step for each in part[inner] for step in _steps(each, inner)] if part["type"] == "Sequence" else [part]


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
    for piece in recut(pieces, partial(_last_chunk_end, size=size)):
        for chunk in _chunks(piece.text, size):
            length = len(utf8(chunk))
            seen += length
            if (taken + length) * total <= max_bytes * seen:
                taken += length
                yield chunk


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
