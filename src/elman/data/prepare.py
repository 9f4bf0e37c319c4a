"""From a corpus to tokens on disk: split, train the tokenizer on the training part, encode, keep them.

The text is read in passes, never held: one to find its length and document borders, one to train the tokenizer, one
to encode. Nothing of the held-out parts reaches the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import weakref
from array import array
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elman.config import DataConfig, TextConfig, TokenizerConfig
from elman.data.store import Tokens, TokenStore, compact, shard_path, write_tokens
from elman.errors import ConfigError, ElmanError, TextError
from elman.files import Building, clear_building
from elman.text.bpe import BPETokenizer
from elman.text.building import tokenizer_from_dict, train_tokenizer
from elman.text.corpora import cache_folder, is_named, open_corpus
from elman.text.sources import Corpus, Piece, Source, StringSource, utf8
from elman.text.tokenizers import UNKNOWN, Tokenizer, Unknown

_FORMAT = 3
"""Part of every cache key: raised when the same settings would give other tokens."""
_PARTS = ("train", "valid", "test")
_MANIFEST = "dataset.json"
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, ElmanError)
"""What reading a manifest raises that is not as it was written."""
_FREE = ("corpus", "reset_at_documents")
"""Settings of ``data`` that prepared tokens leave open."""


@dataclass(frozen=True)
class Split:
    """The tokens of one part of a corpus.

    `tokens` begins with the boundary; `tokens[1:]` are the targets. One boundary stands between documents and none at
    the end. Characters and bytes are those of the text, boundaries not among them; bytes are UTF-8. `num_unknown`
    counts the tokens that are `<unk>`, `num_unknown_kinds` the different words or characters among them: 0 in a
    training part, where nobody counts them, and where the text says `<unk>` itself.
    """

    tokens: Tokens
    num_chars: int
    num_bytes: int
    num_documents: int
    num_unknown: int
    num_unknown_kinds: int = 0


@dataclass(frozen=True)
class Dataset:
    """A tokenized corpus; `valid` and `test` are None where nothing was held out.

    `sha256` is that of the text after decoding and normalisation, all parts in order, as UTF-8. `notices` say in
    sentences what happened to the text that a user should know.
    """

    tokenizer: Tokenizer
    train: Split
    valid: Split | None
    test: Split | None
    corpus_name: str
    sha256: str
    notices: tuple[str, ...]


def prepare(
    data: DataConfig,
    text: TextConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    cache: Path | None = None,
    *,
    extends: Tokenizer | None = None,
) -> Dataset:
    """Read, split and encode a corpus, or take the result of an earlier call from the cache.

    A cut between parts that falls into a document moves to the nearest document border, unless that would halve the
    part on either side of it; then the document is cut and goes on in the next part. With `data.pairs` documents are
    sources and targets in turn, and a cut always moves to the nearest border between two examples.

    Args:
        data: which corpus and which fractions; files given as train, valid and test are used as they are.
        text: how to decode it.
        tokenizer: the settings of one to train on the training part, or a finished one.
        cache: the folder that gets `tokens/<key>`, by default `elman.text.corpora.cache_folder()`; a temporary folder
            takes its place where it cannot be written.
        extends: a tokenizer of the same level that gets what the one trained here holds beyond it.

    Raises:
        UserError: if the corpus is missing, unreadable, or empty.
    """
    if (prepared := prepared_folder(data.corpus)) is not None:
        return _of_folder(prepared, tokenizer)
    if isinstance(tokenizer, TokenizerConfig) and tokenizer.path is not None:
        tokenizer = BPETokenizer.from_file(tokenizer.path)
    corpus = open_corpus(data, text, raw=tokenizer.level == "byte")
    home = (cache or cache_folder()) / "tokens"
    clear_building(home)
    key = _cache_key(corpus, data, text, tokenizer, extends)
    if key is not None and (dataset := _load(home / key)) is not None:
        return dataset
    notices = []
    try:
        building = Building(home)
    except OSError as error:
        notices.append(f"the cache folder {home} cannot be written ({error.strerror}); tokens are not kept")
        building, key = Building(_temporary_folder()), None
    folder, is_kept = building.path, False
    try:
        _build(folder, corpus, data, text, tokenizer, notices, extends=extends)
        if key is not None and (is_kept := _move(folder, home / key)):
            folder = home / key
        dataset = _load(folder)
        if dataset is None:
            raise ElmanError(f"the tokens written to {folder} cannot be read back; is the disk damaged?")
    except BaseException as error:
        building.close()
        if isinstance(error, OSError):
            raise TextError(f"cannot write the tokens to {folder}: {error.strerror or error}") from None
        raise
    if is_kept:
        building.close()
    else:
        weakref.finalize(dataset, building.close)
    return dataset


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir())


def prepare_folder(
    out: Path,
    data: DataConfig,
    text: TextConfig,
    tokenizer: TokenizerConfig,
    *,
    shard_tokens: int | None = None,
    change: Callable[[Corpus], Corpus] = lambda corpus: corpus,
) -> Dataset:
    """Write a corpus as tokens into a folder of its own, which then is a corpus itself, here and on other machines.

    Args:
        out: the folder; it must not exist, or be empty.
        data: as for `prepare`.
        text: as there.
        tokenizer: as there.
        shard_tokens: begin a new file after so many tokens (see `elman.data.store.write_tokens`); none: a file a part.
        change: what is done to the documents first, such as `elman.data.duplicates.without_duplicates`.

    Raises:
        UserError: as `prepare`; or the folder holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} holds something: give another --out")
    if prepared_folder(data.corpus) is not None:
        raise ConfigError(f"{data.corpus[0]!r} is prepared already: give the text itself")
    asked = tokenizer if tokenizer.path is None else BPETokenizer.from_file(tokenizer.path)
    corpus = change(open_corpus(data, text, raw=tokenizer.level == "byte"))
    try:
        with Building(out.parent) as building:
            _build(building.path, corpus, data, text, asked, [], shard_tokens=shard_tokens)
            building.path.chmod(0o755)
            building.path.rename(out)
    except OSError as error:
        raise TextError(f"cannot write the tokens to {out}: {error.strerror or error}") from None
    return _of_folder(out, tokenizer)


def prepared_folder(corpus: Sequence[str]) -> Path | None:
    """The folder of prepared tokens that a corpus is; none where it is a text."""
    if len(corpus) != 1 or not corpus[0] or is_named(corpus[0]):
        return None
    folder = Path(corpus[0]).expanduser()
    first = folder / "train.bin"
    is_prepared = (folder / _MANIFEST).is_file() and (first.is_file() or shard_path(first, 0).is_file())
    return folder if is_prepared else None


def prepared_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings by which the tokens in a folder were made, by section: what training on them cannot choose.

    Raises:
        TextError: the folder is damaged.
    """
    with _one_error(folder):
        settings = _manifest(folder)["settings"]
        return {
            "data": {name: value for name, value in settings["data"].items() if name not in _FREE},
            "text": dict(settings["text"]),
            "tokenizer": dict(settings["tokenizer"]),
        }


def _of_folder(folder: Path, tokenizer: TokenizerConfig | Tokenizer) -> Dataset:
    with _one_error(folder):
        dataset = _read(folder)
    if isinstance(tokenizer, Tokenizer) and tokenizer.to_dict() != dataset.tokenizer.to_dict():
        raise TextError(f"the prepared corpus {str(folder)!r} has other tokens than the model: give the text itself")
    return dataset


@contextmanager
def _one_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, *_DAMAGE) as error:
        raise TextError(f"the prepared corpus {str(folder)!r} is damaged: {error}") from None


def tokenize_text(
    text: Source | str, tokenizer: Tokenizer, *, unknown: Unknown = "token", name: str = "the text"
) -> Split:
    """Encode a text that no tokenizer is trained on, such as one to be evaluated.

    The tokens of a string stay in memory, those of a source go to a temporary file.

    Args:
        text: a string, or a source of pieces.
        tokenizer: of the model that is to read it.
        unknown: what becomes of what is not in the vocabulary.
        name: of the text in messages.

    Raises:
        TextError: if a source is empty, or something is not in the vocabulary and `unknown` is "error".
    """
    if isinstance(text, str):
        chunks = [np.empty(0, np.int64)] if text else [np.array([tokenizer.boundary_id])]
        counts = _encode(StringSource(text).pieces(), tokenizer, chunks.append, unknown=unknown)
        return Split(compact(np.concatenate(chunks), tokenizer.size), **counts)
    building = Building(_temporary_folder())
    try:
        with write_tokens(building.path / "text.bin", tokenizer.size) as writer:
            counts = _encode(text.pieces(), tokenizer, writer.append, unknown=unknown)
        if not counts["num_chars"]:
            raise TextError(f"{name} is empty: there is not one character to read")
        split = Split(writer.store.read(), **counts)
    except BaseException:
        building.close()
        raise
    weakref.finalize(split, building.close)
    return split


def _encode(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    append: Callable[[npt.NDArray[np.int64]], None],
    digest: hashlib._Hash | None = None,
    unknown: Unknown = "token",
    counts_kinds: bool = True,
) -> dict[str, int]:
    """Pass the ids of documents to `append`, and return the counts of a `Split`."""
    counts = dict.fromkeys(("num_chars", "num_bytes", "num_documents", "num_unknown", "num_unknown_kinds"), 0)
    missing: set[str] | None = set() if counts_kinds else None
    says_unknown = False

    def counted() -> Iterator[Piece]:
        nonlocal says_unknown
        for piece in pieces:
            says_unknown = says_unknown or (tokenizer.level == "word" and UNKNOWN in piece.text)
            encoded = utf8(piece.text)
            if digest is not None:
                digest.update(encoded)
            counts["num_chars"] += len(piece.text)
            counts["num_bytes"] += len(encoded)
            counts["num_documents"] += piece.starts_document
            yield piece

    for ids in tokenizer.encode_pieces(counted(), unknown=unknown, missing=missing):
        if tokenizer.unknown_id is not None:
            counts["num_unknown"] += int(np.count_nonzero(ids == tokenizer.unknown_id))
        append(ids)
    if missing and not says_unknown:
        counts["num_unknown_kinds"] = len(missing)
    return counts


def _build(
    folder: Path,
    corpus: Corpus,
    data: DataConfig,
    text: TextConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    notices: list[str],
    *,
    extends: Tokenizer | None = None,
    shard_tokens: int | None = None,
) -> None:
    """Write the token files of all parts and the manifest that describes them."""
    training: Source
    streams: Iterable[tuple[str, Iterable[Piece]]]
    if whole := corpus.parts.get("all"):
        num_chars, borders = _survey(whole)
        if not num_chars:
            raise TextError(f"the corpus {corpus.name!r} is empty: there is not one character to train on")
        cuts = _cuts(num_chars, borders, data)
        training = _Beginning(whole, cuts[0])
        streams = ((name, (p for _, p in group)) for name, group in groupby(_routed(whole, cuts), lambda pair: pair[0]))
    else:
        num_chars = None
        training = corpus.parts["train"]
        streams = ((name, source.pieces()) for name, source in corpus.parts.items())
    built = tokenizer if isinstance(tokenizer, Tokenizer) else train_tokenizer(tokenizer, training)
    built = built if extends is None else extends.extended(built)
    digest = hashlib.sha256()
    parts: dict[str, dict[str, Any]] = {}
    for name, pieces in streams:
        with write_tokens(folder / f"{name}.bin", built.size, shard_tokens) as writer:
            counts = _encode(pieces, built, writer.append, digest, counts_kinds=name != "train")
        store = writer.store
        about = {"num_tokens": store.num_tokens, "crc32": store.crc32, "shard_tokens": store.shard_tokens}
        parts[name] = about | counts
    if num_chars is not None and num_chars != sum(part["num_chars"] for part in parts.values()):
        raise TextError(f"the corpus {corpus.name!r} changed while it was read; try again")
    parts = {name: part for name, part in parts.items() if part["num_tokens"] > 1}
    if "train" not in parts:
        raise TextError(f"the training part of {corpus.name!r} is empty: it gives no tokens at level {built.level!r}")
    for source in corpus.parts.values():
        notices += [remark for remark in source.report() if remark not in notices]
    notices += _remarks(parts, built, tokenizer, None if num_chars is None else data.valid_fraction)
    body = json.dumps(
        {
            "corpus_name": corpus.name,
            "sha256": digest.hexdigest(),
            "notices": notices,
            "parts": parts,
            "tokenizer": built.to_dict(),
            "settings": {
                "data": data.model_dump(mode="json"),
                "text": text.model_dump(mode="json"),
                "tokenizer": (tokenizer if isinstance(tokenizer, TokenizerConfig) else _named(tokenizer)).model_dump(),
            },
        }
    )
    (folder / _MANIFEST).write_text(f"{_sha256(body)}\n{body}", encoding="utf-8")


def _named(tokenizer: Tokenizer) -> TokenizerConfig:
    """The settings of a finished tokenizer, which are its level alone."""
    return TokenizerConfig(level=tokenizer.level)


def _remarks(
    parts: Mapping[str, Mapping[str, Any]],
    built: Tokenizer,
    asked: TokenizerConfig | Tokenizer,
    valid_fraction: float | None,
) -> list[str]:
    """What the split and the tokenizer did that a user should know; the fraction is None where files were given."""
    said = []
    if "valid" not in parts:
        reasons = {None: "none was given", 0.0: "data.valid_fraction is 0"}
        said.append(f"there is no validation part: {reasons.get(valid_fraction, 'the corpus is too small for one')}")
    unit = "words" if built.level == "word" else "characters" if built.level == "char" else "tokens"
    for name, part in parts.items():
        if part["num_unknown"]:
            said.append(f"{name}: {part['num_unknown']:,} of {part['num_tokens'] - 1:,} {unit} are {UNKNOWN}")
    if isinstance(asked, TokenizerConfig) and asked.level == "bpe":
        sample, whole = min(asked.sample_bytes, parts["train"]["num_bytes"]), parts["train"]["num_bytes"]
        said.append(f"{built.size:,} tokens of bpe learned on {sample:,} of the training part's {whole:,} bytes")
    return said


def _survey(source: Source) -> tuple[int, array[int]]:
    """The number of characters, and where documents begin after the first."""
    num_chars, borders = 0, array("q")
    for piece in source.pieces():
        if piece.starts_document and num_chars:
            borders.append(num_chars)
        num_chars += len(piece.text)
    return num_chars, borders


def _cuts(num_chars: int, borders: array[int], data: DataConfig) -> tuple[int, int]:
    """Where the validation and the test part begin, in characters; training keeps one at least."""
    # Decimal fractions are meant exactly: 1 - 0.05 - 0.05 of 1000 is 900, not 899.
    valid, test = Fraction(str(data.valid_fraction)), Fraction(str(data.test_fraction))
    first = max(1, int((1 - valid - test) * num_chars))
    second = max(first, int((1 - test) * num_chars))
    sizes = (first, second - first, num_chars - second)

    if data.pairs:  # an example, a source and its target, stays whole
        examples = [*borders[1::2], num_chars]
        first, second = (min(examples, key=lambda border: abs(border - cut)) for cut in (first, second))
        return first, max(first, second)

    def at_border(cut: int, before: int, after: int) -> int:
        i = bisect(borders, cut)
        nearest = min(borders[max(0, i - 1) : i + 1], key=lambda border: abs(border - cut), default=cut)
        return nearest if 2 * abs(nearest - cut) < min(before, after) else cut

    if not sizes[1]:
        cut = at_border(first, sizes[0], sizes[2])
        return cut, cut
    return at_border(first, sizes[0], sizes[1]), at_border(second, sizes[1], sizes[2])


def _routed(source: Source, cuts: tuple[int, ...]) -> Iterator[tuple[str, Piece]]:
    """The pieces of a source and the part of each; a document that is cut begins anew in the next part."""
    position = part = 0
    for piece in source.pieces():
        text, starts = piece.text, piece.starts_document
        while text:
            while part < len(cuts) and position == cuts[part]:
                part, starts = part + 1, True
            head = text if part == len(cuts) else text[: cuts[part] - position]
            yield _PARTS[part], Piece(head, starts)
            position += len(head)
            text, starts = text[len(head) :], False


class _Beginning(Source):
    """The first characters of a source."""

    def __init__(self, source: Source, num_chars: int) -> None:
        self.source, self.num_chars = source, num_chars

    def pieces(self) -> Iterator[Piece]:
        routed = _routed(self.source, (self.num_chars,))
        return (piece for _, piece in takewhile(lambda pair: pair[0] == "train", routed))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _cache_key(
    corpus: Corpus,
    data: DataConfig,
    text: TextConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    extends: Tokenizer | None,
) -> str | None:
    """A name for the result, from all that it follows from; None where a source cannot tell whether it has changed."""
    fingerprints = {name: source.fingerprint() for name, source in corpus.parts.items()}
    if None in fingerprints.values():
        return None
    asked = tokenizer.to_dict() if isinstance(tokenizer, Tokenizer) else tokenizer.model_dump()
    split = [data.valid_fraction, data.test_fraction, data.pairs]
    everything = [_FORMAT, version("tokenizers"), corpus.name, fingerprints, split, text.model_dump(), asked]
    if extends is not None:
        everything.append(extends.to_dict())
    return _sha256(json.dumps(everything))[:32]


def _load(folder: Path) -> Dataset | None:
    """The dataset in a folder; None where there is none, or it is damaged."""
    try:
        return _read(folder)
    except (OSError, *_DAMAGE):
        return None


def _manifest(folder: Path) -> dict[str, Any]:
    checksum, body = (folder / _MANIFEST).read_text(encoding="utf-8").split("\n", 1)
    if checksum != _sha256(body):
        raise ValueError(f"{_MANIFEST} has been altered: its checksum differs")
    manifest: dict[str, Any] = json.loads(body)
    return manifest


def _read(folder: Path) -> Dataset:
    manifest = _manifest(folder)
    tokenizer = tokenizer_from_dict(manifest["tokenizer"])
    splits: dict[str, Split | None] = dict.fromkeys(_PARTS)
    for name, part in manifest["parts"].items():
        store = TokenStore(
            folder / f"{name}.bin",
            tokenizer.size,
            part.pop("num_tokens"),
            tuple(part.pop("crc32")),
            part.pop("shard_tokens"),
        )
        splits[name] = Split(store.read(), **part)
    train = splits.pop("train")
    if train is None:
        raise ValueError("it has no training part")
    return Dataset(
        tokenizer, train, **splits, corpus_name=manifest["corpus_name"], sha256=manifest["sha256"],
        notices=tuple(manifest["notices"]),
    )  # fmt: skip


def _move(folder: Path, target: Path) -> bool:
    """Give a finished folder its name in the cache, in place of a damaged one; whether a good one stands there now."""
    try:
        if target.exists() and _load(target) is None:
            shutil.rmtree(target)
        folder.rename(target)
    except OSError:
        if _load(target) is None:
            return False
        shutil.rmtree(folder, ignore_errors=True)
    return True
