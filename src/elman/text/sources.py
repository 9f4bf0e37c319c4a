"""From a corpus specification to documents: files, folders, globs, standard input, compressed and structured files.

A source can be read again and again, each time piece by piece in bounded memory, and reports what it changed. Text is
decoded strictly; what cannot be read is an error that names the file and the place.
"""

from __future__ import annotations

import codecs
import csv
import glob
import hashlib
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from elman.config import DataConfig, TextConfig
from elman.errors import ConfigError, MissingExtraError, TextError, nearest
from elman.text.decoding import (
    MAX_RECORD,
    InputFile,
    Spool,
    decoded,
    decoded_raw,
    is_valid_utf8,
    lines_of,
    with_line_feeds,
    with_line_feeds_across,
)

_MAX_PIECE = 1 << 20
_DEFAULT_FIELD = "text"
_PART = re.compile(
    r"(?:[^.]+\.)?(train|valid|test)\.(?:txt|tokens|raw|jsonl|ndjson|csv|tsv|parquet)(?:\.(?:gz|bz2|xz|zst))?"
)


class Piece(NamedTuple):
    """At most some million characters of one document, never empty."""

    text: str
    starts_document: bool


class Source(ABC):
    """Documents that can be passed over any number of times."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """All documents in order, each in one or more pieces; empty documents are left out."""

    def __iter__(self) -> Iterator[Piece]:
        return self.pieces()

    def report(self) -> list[str]:
        """What the last full pass changed or left out, one sentence each."""
        return []

    def fingerprint(self) -> str | None:
        """A string that changes whenever the text may have changed; None where that cannot be known."""
        return None


class StringSource(Source):
    """One document held in memory."""

    def __init__(self, text: str) -> None:
        self.text = text

    def pieces(self) -> Iterator[Piece]:
        return without_empty(as_pieces((self.text,)), Counter())

    def fingerprint(self) -> str:
        return hashlib.sha256(utf8(self.text)).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """A name and its sources: `{"all": source}`, or `train` and, where given, `valid` and `test`."""

    name: str
    parts: Mapping[str, Source]


def utf8(text: str) -> bytes:
    """UTF-8 of a text; bytes that were read raw, as lone surrogates, come out as they were."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise TextError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X}, which is no character"
        ) from None


def refuse_wild_name(path: str) -> None:
    """Refuse the name of a file that is no text: neither settings nor results that hold it could be saved.

    Raises:
        TextError: if the name is not UTF-8.
    """
    if _shown(path) != path:
        raise TextError(f"the name of {_shown(path)} is not UTF-8; rename it")


def _shown(path: str) -> str:
    """The name of a file, its bytes that are no UTF-8 as ``\\xff``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def open_files(data: DataConfig, text: TextConfig, *, raw: bool = False, names: Iterable[str] = ()) -> Corpus:
    """Find the files that `data.corpus` names; nothing is read yet, but standard input is copied to a temporary file.

    A folder is all its files at any depth, by path, hidden ones left out; one that holds a `train.txt` and a
    `valid.txt` or `test.txt` gives the parts as they are (also `wiki.train.tokens`, `train.jsonl.gz` and the like).

    Args:
        data: what to open, and the field of structured files.
        text: how to decode it.
        raw: read plain files that are not valid UTF-8 as bytes, unchanged, for the byte tokenizer.
        names: what else could have been meant where there is no such file.

    Raises:
        UserError: if something is missing or does not fit together; TextError for a text.
    """
    try:
        b" ".decode(text.encoding, "replace")  # refuses codecs that give no text, too
    except (LookupError, ValueError):
        raise ConfigError(
            f"text.encoding {text.encoding!r} is unknown or gives no text"
            f"{nearest(text.encoding, _COMMON_ENCODINGS)}, ..."
        ) from None
    if not data.corpus or data.corpus.count("-") > 1:
        raise ConfigError("data.corpus must name at least one file, and '-' at most once")
    for spec in data.corpus:
        if not spec:
            raise ConfigError("a name in data.corpus is empty; accepted: files, folders, globs and '-'")
        refuse_wild_name(spec)
    name = data.corpus[0] + (f" and {len(data.corpus) - 1} more" if len(data.corpus) > 1 else "")
    try:
        parts, notes = _given_parts(data.corpus)
        if not parts:
            parts = {"all": [file for spec in data.corpus for file in _find(spec, names)]}
    except (OSError, RuntimeError) as error:  # the latter from ~name of nobody
        raise TextError(f"cannot open {name[:200]!r}: {getattr(error, 'strerror', None) or error}") from None
    files = [file for part in parts.values() for file in part]
    for file in files:
        refuse_wild_name(file.name)
    if data.field is not None and all(file.kind == "text" for file in files):
        raise ConfigError(
            f"data.field {data.field!r} has no meaning for plain text, only for .jsonl, .csv and .parquet"
        )
    if (data.source_field or data.target_field) and all(file.kind == "text" for file in files):
        raise ConfigError(
            "data.source_field and data.target_field have no meaning for plain text, whose lines are a source, a tab "
            "and a target; only for .jsonl, .csv, .tsv and .parquet"
        )
    if text.document_separator is not None and all(file.kind != "text" for file in files):
        raise ConfigError("text.document_separator has no meaning for .jsonl, .csv and .parquet: a row is a document")
    return Corpus(name, {part: _FileSource(found, data, text, raw, notes) for part, found in parts.items()})


_COMMON_ENCODINGS = (
    "utf-8",
    "utf-16",
    "utf-32",
    "cp1252",
    "latin-1",
    "cp1251",
    "koi8-r",
    "gb18030",
    "big5",
    "shift_jis",
)


def _find(spec: str, names: Iterable[str]) -> list[InputFile]:
    """The files that one word of the specification stands for."""
    if spec == "-":
        if sys.stdin is None:
            raise TextError("there is no standard input to read")
        return [_spooled(sys.stdin.buffer, "standard input")]
    path = Path(spec).expanduser()
    if path.is_dir():
        return _files_below(path)
    if path.is_file():
        return [InputFile(path, spec)]
    if path.is_fifo():
        with path.open("rb") as stream:
            return [_spooled(stream, spec)]
    if path.exists():
        raise TextError(f"{spec} is neither a file nor a folder")
    if glob.has_magic(spec):
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207, a pattern may begin anywhere
        found = sorted(name for name in matches if Path(name).is_file())
        if not found:
            raise TextError(f"no file matches {spec!r}; '**' matches folders at any depth")
        return [InputFile(Path(name), name) for name in found]
    siblings = [sibling.name for sibling in islice(path.parent.iterdir(), 1000)] if path.parent.is_dir() else []
    match = get_close_matches(path.name, [*siblings, *names], n=1)
    raise TextError(
        f"no file, folder or corpus {spec!r}{f'; did you mean {match[0]!r}?' if match else ''}; "
        "`elman data list` shows the corpora that have a name"
    )


def _spooled(stream: IO[bytes], name: str) -> InputFile:
    spool = Spool(stream)
    return InputFile(spool.path, name, spool)


def _files_below(folder: Path) -> list[InputFile]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file()]
    if not found:
        raise TextError(f"the folder {folder} holds no files; hidden ones are left out")
    return [InputFile(path, str(path)) for path in sorted(found, key=lambda path: path.relative_to(folder).as_posix())]


def _given_parts(specs: tuple[str, ...]) -> tuple[dict[str, list[InputFile]], list[str]]:
    """The parts of a folder that holds a training file and others, and a remark on what else it holds."""
    folder = Path(specs[0]).expanduser()
    if len(specs) > 1 or not folder.is_dir():
        return {}, []
    parts: dict[str, list[InputFile]] = {}
    others = []
    for path in sorted(folder.iterdir()):
        match = _PART.fullmatch(path.name)
        if match and path.is_file():
            parts.setdefault(match[1], []).append(InputFile(path, str(path)))
        elif not path.name.startswith("."):
            others.append(path.name)
    if "train" not in parts or len(parts) == 1:
        return {}, []
    for files in parts.values():
        if len(files) > 1:
            raise TextError(f"{files[0].name} and {files[1].name} are both given for one part; keep one of them")
    order = [part for part in ("train", "valid", "test") if part in parts]
    notes = [f"{folder} gives {', '.join(order)}, which are used as they are"]
    if others:
        notes.append(f"left out of {folder}: {', '.join(map(_shown, others[:5]))}{' ...' if len(others) > 5 else ''}")
    return {part: parts[part] for part in order}, notes


class _FileSource(Source):
    """The documents of some files."""

    def __init__(self, files: list[InputFile], data: DataConfig, text: TextConfig, raw: bool, notes: list[str]) -> None:
        self.files = files
        self.has_pairs = data.pairs
        self.fields: tuple[str, ...] = (data.field or _DEFAULT_FIELD,)
        self.settings_of_fields: tuple[str, ...] = ("data.field",)
        self.needs_header = True
        if data.pairs:
            self.fields = (data.source_field or "source", data.target_field or "target")
            self.settings_of_fields = ("data.source_field", "data.target_field")
            self.needs_header = bool(data.source_field or data.target_field)
        self.config = text
        self.raw = raw and codecs.lookup(text.encoding).name == "utf-8"
        self.notes = notes
        self._report: list[str] = []

    def fingerprint(self) -> str:
        how = [self.fields, self.has_pairs, self.needs_header, self.raw]
        return json.dumps([*how, *(file.fingerprint() for file in self.files)])

    def report(self) -> list[str]:
        return [*self.notes, *self._report]

    def pieces(self) -> Iterator[Piece]:
        tally: Counter[str] = Counter()
        for file in self.files:
            yield from without_empty(self._documents(file, tally), tally)
        self._report = self._remarks(tally)

    def _documents(self, file: InputFile, tally: Counter[str]) -> Iterator[Piece]:
        """Pieces of one file's documents; they may be empty."""
        if file.kind == "text" and not self.has_pairs:
            if self.raw and not is_valid_utf8(file):
                tally["raw files"] += 1
                texts = decoded_raw(file)
            else:
                texts = decoded(file, self.config, tally)
                if self.config.newlines == "lf":
                    texts = with_line_feeds_across(texts, tally)
            separator = self.config.document_separator
            yield from as_pieces(texts) if separator is None else separated(texts, separator, tally)
            return
        rows = {
            "text": self._tab_rows,
            "jsonl": self._json_rows,
            "csv": self._csv_rows,
            "tsv": self._csv_rows,
            "parquet": self._parquet_rows,
        }
        for where, values in rows[file.kind](file, tally):
            if None in values:
                tally["missing"] += 1
                continue
            documents = [self._document(where, *each, tally) for each in zip(self.fields, values, strict=True)]
            # One half of a pair cannot be left out alone, and white space may give no token.
            if self.has_pairs and not all(document.strip() for document in documents):
                tally["half pairs"] += 1
                continue
            for document in documents:
                yield from as_pieces((document,)) if len(document) > _MAX_PIECE else (Piece(document, True),)

    def _document(self, where: str, field: str, value: Any, tally: Counter[str]) -> str:
        if not isinstance(value, str):
            setting = self.settings_of_fields[self.fields.index(field)]
            raise TextError(f"{where}: {field!r} holds {type(value).__name__}, not text; choose with --{setting}")
        if not value.isascii():
            _refuse_surrogates(value, where)
        return with_line_feeds(value, tally) if self.config.newlines == "lf" else value

    def _tab_rows(self, file: InputFile, tally: Counter[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Source and target of each line of plain text, parted by a tab; what follows a second tab is left out."""
        for number, line in enumerate(lines_of(file, self.config, tally), 1):
            if not line.strip():
                continue
            source, tab, rest = line.rstrip("\r\n").partition("\t")
            if not tab:
                raise TextError(
                    f"{file.name}, line {number} has no tab; with data.pairs each line is a source, a tab and a target"
                )
            yield file.name, (source, rest.partition("\t")[0])

    def _json_rows(self, file: InputFile, tally: Counter[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for number, line in enumerate(lines_of(file, self.config, tally), 1):
            if not line.strip():
                continue
            where = f"{file.name}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise TextError(f"{where} is not valid JSON: {error.msg} at column {error.colno}") from None
            except (ValueError, RecursionError) as error:
                raise TextError(f"{where} is not usable JSON: {error}") from None
            if not isinstance(row, dict):
                raise TextError(
                    f"{where} holds a JSON {type(row).__name__}; every line must be an object with "
                    f"{' and '.join(map(repr, self.fields))}"
                )
            self._need_fields(where, row)
            yield where, tuple(row[field] for field in self.fields)

    def _csv_rows(self, file: InputFile, tally: Counter[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        lines = (line + "\n" for line in lines_of(file, self.config, tally))
        reader = csv.reader(lines, delimiter="\t" if file.kind == "tsv" else ",", strict=True)
        rows = _csv_batches(reader, file)
        header = next(rows, None)
        if header is None:
            return
        columns = [0, 1]
        if self.needs_header or any(field in header for field in self.fields):
            self._need_fields(f"{file.name}, line 1", header)
            columns = [header.index(field) for field in self.fields]
        else:
            if len(header) < 2:
                raise TextError(f"{file.name}, line 1: one column; data.pairs needs two, a source and a target")
            tally["files without a header"] += 1
            rows = chain((header,), rows)
        for row in rows:
            if len(row) != len(header):
                raise TextError(
                    f"{file.name}, line {reader.line_num}: a row of {len(row)} columns, line 1 has {len(header)}"
                )
            yield file.name, tuple(row[column] for column in columns)

    def _parquet_rows(self, file: InputFile, tally: Counter[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        try:
            import pyarrow  # type: ignore[import-untyped]  # ships no types
            from pyarrow import parquet
        except ImportError:
            raise MissingExtraError("pyarrow", "data", f"reading {file.name}") from None
        if file.compression:
            raise TextError(f"{file.name}: parquet compresses by itself; decompress the file first")
        try:
            with parquet.ParquetFile(file.path) as table:
                self._need_fields(file.name, table.schema_arrow.names)
                for batch in table.iter_batches(batch_size=256, columns=list(self.fields), use_threads=False):
                    values = (batch.column(field).to_pylist() for field in self.fields)
                    yield from ((file.name, row) for row in zip(*values, strict=True))
        except (pyarrow.ArrowException, OSError) as error:
            raise TextError(f"{file.name} cannot be read as parquet: {str(error).splitlines()[0]}") from None

    def _need_fields(self, where: str, available: Iterable[str]) -> None:
        for field, setting in zip(self.fields, self.settings_of_fields, strict=True):
            if field not in available:
                raise TextError(f"{where} has no field {field!r}{nearest(field, available)}; choose with --{setting}")

    def _remarks(self, tally: Counter[str]) -> list[str]:
        marks = {"strip": "removed", "keep": "kept as a character"}[self.config.bom]
        remarks = {
            "boms": f"{tally['boms']} byte order mark(s) {marks}",
            "crlf": f"{tally['crlf']} CR LF turned into LF",
            "cr": f"{tally['cr']} lone CR turned into LF",
            "raw files": f"{tally['raw files']} file(s) are not UTF-8: bytes read as they are, line ends included",
            "missing": f"{tally['missing']} row(s) without a text left out",
            "half pairs": f"{tally['half pairs']} pair(s) with an empty source or target left out",
            "files without a header": (
                f"{tally['files without a header']} file(s) have no header with source and target: the first column "
                "is the source, the second the target"
            ),
            "empty": f"{tally['empty']} empty document(s) left out",
        }
        said = [sentence for what, sentence in remarks.items() if tally[what]]
        separator = self.config.document_separator
        if separator is not None and not tally["separators"]:
            said.append(f"text.document_separator {separator!r} does not occur")
        if tally["nul"] * 5 > tally["bytes"]:
            said.append(
                f"{tally['nul']} of {tally['bytes']} bytes are NUL; if the text is UTF-16, "
                "convert it, or train with --text.encoding utf-16-le"
            )
        return said


def without_empty(pieces: Iterable[Piece], tally: Counter[str]) -> Iterator[Piece]:
    """Leave out pieces without text, and count the documents that have none at all as `empty`."""
    starts = False
    for piece in pieces:
        tally["empty"] += piece.starts_document and starts
        starts |= piece.starts_document
        if piece.text:
            yield Piece(piece.text, starts)
            starts = False
    tally["empty"] += starts


def as_pieces(texts: Iterable[str]) -> Iterator[Piece]:
    """The texts of one document as pieces that are not too long."""
    starts = True
    for text in texts:
        for start in range(0, len(text), _MAX_PIECE):
            yield Piece(text[start : start + _MAX_PIECE], starts)
            starts = False
    if starts:
        yield Piece("", True)


def separated(texts: Iterable[str], separator: str, tally: Counter[str]) -> Iterator[Piece]:
    """Cut a text into documents at each separator, which may lie across two blocks."""
    rest, starts = "", True
    keep = len(separator) - 1
    for text in texts:
        *complete, rest = (rest + text).split(separator)
        for document in complete:
            yield Piece(document, starts)
            starts = True
        tally["separators"] += len(complete)
        if len(rest) > keep:
            cut = len(rest) - keep
            yield Piece(rest[:cut], starts)
            rest, starts = rest[cut:], False
    yield Piece(rest, starts)


def _csv_batches(reader: Any, file: InputFile) -> Iterator[list[str]]:
    """Rows of a CSV reader, blank ones left out; the module's limit on a field is lifted only while rows are read."""
    while True:
        limit = csv.field_size_limit(MAX_RECORD)
        try:
            rows = list(islice(reader, 64))
        except csv.Error as error:
            raise TextError(f"{file.name}, line {reader.line_num} is not valid CSV: {error}") from None
        finally:
            csv.field_size_limit(limit)
        if not rows:
            return
        yield from filter(None, rows)


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"{where}: the lone surrogate U+{ord(text[error.start]):04X} is no character; remove it"
        ) from None
