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
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from elman.config import DataConfig, TextConfig
from elman.errors import ConfigError, MissingExtraError, TextError, UserError, nearest

_BLOCK_BYTES = 1 << 18
_MAX_PIECE = 1 << 20
_MAX_RECORD = 1 << 26
_DEFAULT_FIELD = "text"
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_KINDS: Mapping[str, Literal["jsonl", "csv", "tsv", "parquet"]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_PART = re.compile(
    r"(?:[^.]+\.)?(train|valid|test)\.(?:txt|tokens|raw|jsonl|ndjson|csv|tsv|parquet)(?:\.(?:gz|bz2|xz|zst))?"
)
_UTF8_NAMES = ("utf-8", "utf-8-sig")
_WIDE_BOMS = (  # the four-byte ones first, for UTF-32 LE begins as UTF-16 LE does
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_BINARY = (
    (b"\x1f\x8b", "gzip data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ", "xz data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"PK\x03\x04", "a zip archive or office document"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
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
    except LookupError:
        raise ConfigError(
            f"text.encoding {text.encoding!r} is unknown{nearest(text.encoding, _COMMON_ENCODINGS)}, ..."
        ) from None
    if not data.corpus or data.corpus.count("-") > 1:
        raise ConfigError("data.corpus must name at least one file, and '-' at most once")
    name = data.corpus[0] + (f" and {len(data.corpus) - 1} more" if len(data.corpus) > 1 else "")
    try:
        parts, notes = _given_parts(data.corpus)
        if not parts:
            parts = {"all": [file for spec in data.corpus for file in _find(spec, names)]}
    except (OSError, RuntimeError) as error:  # the latter from ~name of nobody
        raise TextError(f"cannot open {name[:200]!r}: {getattr(error, 'strerror', None) or error}") from None
    files = [file for part in parts.values() for file in part]
    if data.field is not None and all(file.kind == "text" for file in files):
        raise ConfigError(
            f"data.field {data.field!r} has no meaning for plain text, only for .jsonl, .csv and .parquet"
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


class _Spool:
    """A temporary file with a copy of a stream, removed with this object."""

    def __init__(self, stream: IO[bytes]) -> None:
        handle, name = tempfile.mkstemp(prefix="elman-")
        self.path = Path(name)
        weakref.finalize(self, self.path.unlink, missing_ok=True)
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as copy:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                copy.write(block)
        self.sha256 = digest.hexdigest()


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    spool: _Spool | None = None

    @property
    def _suffixes(self) -> tuple[str, str]:
        *_, inner, last = ["", "", *Path(self.name.lower()).suffixes]
        return (inner, last) if last in _COMPRESSIONS else (last, "")

    @property
    def kind(self) -> Literal["text", "jsonl", "csv", "tsv", "parquet"]:
        return _KINDS.get(self._suffixes[0], "text")

    @property
    def compression(self) -> str:
        return self._suffixes[1]

    def fingerprint(self) -> list[Any]:
        if self.spool is not None:
            return [self.name, self.spool.sha256]
        status = self.path.stat()
        return [str(self.path.resolve()), status.st_size, status.st_mtime_ns]


def _find(spec: str, names: Iterable[str]) -> list[_File]:
    """The files that one word of the specification stands for."""
    if spec == "-":
        if sys.stdin is None:
            raise TextError("there is no standard input to read")
        return [_spooled(sys.stdin.buffer, "standard input")]
    path = Path(spec).expanduser()
    if path.is_dir():
        return _files_below(path)
    if path.is_file():
        return [_File(path, spec)]
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
        return [_File(Path(name), name) for name in found]
    siblings = [sibling.name for sibling in islice(path.parent.iterdir(), 1000)] if path.parent.is_dir() else []
    match = get_close_matches(path.name, [*siblings, *names], n=1)
    raise TextError(
        f"no file, folder or corpus {spec!r}{f'; did you mean {match[0]!r}?' if match else ''}; "
        "`elman data list` shows the corpora that have a name"
    )


def _spooled(stream: IO[bytes], name: str) -> _File:
    spool = _Spool(stream)
    return _File(spool.path, name, spool)


def _files_below(folder: Path) -> list[_File]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file()]
    if not found:
        raise TextError(f"the folder {folder} holds no files; hidden ones are left out")
    return [_File(path, str(path)) for path in sorted(found, key=lambda path: path.relative_to(folder).as_posix())]


def _given_parts(specs: tuple[str, ...]) -> tuple[dict[str, list[_File]], list[str]]:
    """The parts of a folder that holds a training file and others, and a remark on what else it holds."""
    folder = Path(specs[0]).expanduser()
    if len(specs) > 1 or not folder.is_dir():
        return {}, []
    parts: dict[str, list[_File]] = {}
    others = []
    for path in sorted(folder.iterdir()):
        match = _PART.fullmatch(path.name)
        if match and path.is_file():
            parts.setdefault(match[1], []).append(_File(path, str(path)))
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
        notes.append(f"left out of {folder}: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}")
    return {part: parts[part] for part in order}, notes


class _FileSource(Source):
    """The documents of some files."""

    def __init__(self, files: list[_File], data: DataConfig, text: TextConfig, raw: bool, notes: list[str]) -> None:
        self.files = files
        self.field = data.field or _DEFAULT_FIELD
        self.config = text
        self.raw = raw and codecs.lookup(text.encoding).name == "utf-8"
        self.notes = notes
        self._report: list[str] = []

    def fingerprint(self) -> str:
        return json.dumps([self.field, self.raw, *(file.fingerprint() for file in self.files)])

    def report(self) -> list[str]:
        return [*self.notes, *self._report]

    def pieces(self) -> Iterator[Piece]:
        tally: Counter[str] = Counter()
        for file in self.files:
            yield from without_empty(self._documents(file, tally), tally)
        self._report = self._remarks(tally)

    def _documents(self, file: _File, tally: Counter[str]) -> Iterator[Piece]:
        """Pieces of one file's documents; they may be empty."""
        if file.kind == "text":
            if self.raw and not _is_utf8(file):
                tally["raw files"] += 1
                texts = _decoded_raw(file)
            else:
                texts = _decoded(file, self.config, tally)
                if self.config.newlines == "lf":
                    texts = _with_line_feeds_across(texts, tally)
            separator = self.config.document_separator
            yield from as_pieces(texts) if separator is None else separated(texts, separator, tally)
            return
        rows = {"jsonl": self._json_rows, "csv": self._csv_rows, "tsv": self._csv_rows, "parquet": self._parquet_rows}
        for where, value in rows[file.kind](file, tally):
            if value is None:
                tally["missing"] += 1
                continue
            if not isinstance(value, str):
                raise TextError(
                    f"{where}: {self.field!r} holds {type(value).__name__}, not text; choose with --data.field"
                )
            if not value.isascii():
                _refuse_surrogates(value, where)
            document = _with_line_feeds(value, tally) if self.config.newlines == "lf" else value
            yield from as_pieces((document,)) if len(document) > _MAX_PIECE else (Piece(document, True),)

    def _json_rows(self, file: _File, tally: Counter[str]) -> Iterator[tuple[str, Any]]:
        for number, line in enumerate(_lines(file, self.config, tally), 1):
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
                    f"{where} holds a JSON {type(row).__name__}; every line must be an object with {self.field!r}"
                )
            if self.field not in row:
                raise TextError(self._no_field(where, row))
            yield where, row[self.field]

    def _csv_rows(self, file: _File, tally: Counter[str]) -> Iterator[tuple[str, Any]]:
        lines = (line + "\n" for line in _lines(file, self.config, tally))
        reader = csv.reader(lines, delimiter="\t" if file.kind == "tsv" else ",", strict=True)
        rows = _csv_batches(reader, file)
        header = next(rows, None)
        if header is None:
            return
        if self.field not in header:
            raise TextError(self._no_field(f"{file.name}, line 1", header))
        column = header.index(self.field)
        for row in rows:
            if len(row) != len(header):
                raise TextError(
                    f"{file.name}, line {reader.line_num}: a row of {len(row)} columns, the header has {len(header)}"
                )
            yield file.name, row[column]

    def _parquet_rows(self, file: _File, tally: Counter[str]) -> Iterator[tuple[str, Any]]:
        try:
            import pyarrow  # type: ignore[import-untyped]
            from pyarrow import parquet
        except ImportError:
            raise MissingExtraError("pyarrow", "data", f"reading {file.name}") from None
        if file.compression:
            raise TextError(f"{file.name}: parquet compresses by itself; decompress the file first")
        try:
            with parquet.ParquetFile(file.path) as table:
                names = table.schema_arrow.names
                if self.field not in names:
                    raise TextError(self._no_field(file.name, names))
                for batch in table.iter_batches(batch_size=256, columns=[self.field], use_threads=False):
                    yield from ((file.name, value) for value in batch.column(0).to_pylist())
        except (pyarrow.ArrowException, OSError) as error:
            raise TextError(f"{file.name} cannot be read as parquet: {str(error).splitlines()[0]}") from None

    def _no_field(self, where: str, available: Iterable[str]) -> str:
        return f"{where} has no field {self.field!r}{nearest(self.field, available)}; choose with --data.field"

    def _remarks(self, tally: Counter[str]) -> list[str]:
        marks = {"strip": "removed", "keep": "kept as a character"}[self.config.bom]
        remarks = {
            "boms": f"{tally['boms']} byte order mark(s) {marks}",
            "crlf": f"{tally['crlf']} CR LF turned into LF",
            "cr": f"{tally['cr']} lone CR turned into LF",
            "raw files": f"{tally['raw files']} file(s) are not UTF-8: bytes read as they are, line ends included",
            "missing": f"{tally['missing']} row(s) without a text left out",
            "empty": f"{tally['empty']} empty document(s) left out",
        }
        said = [sentence for what, sentence in remarks.items() if tally[what]]
        separator = self.config.document_separator
        if separator is not None and not tally["separators"]:
            said.append(f"text.document_separator {separator!r} does not occur")
        if tally["nul"] * 5 > tally["bytes"]:
            said.append(
                f"{tally['nul']} of {tally['bytes']} bytes are NUL; if the text is UTF-16, "
                "give --text.encoding utf-16-le"
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


def _blocks(file: _File) -> Iterator[bytes]:
    """The bytes of a file, decompressed."""
    try:
        with _opened(file) as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except UserError:
        raise
    except Exception as error:  # each decompressor has errors of its own
        if isinstance(error, OSError) and error.strerror:
            raise TextError(f"{file.name}: {error.strerror}") from None
        raise TextError(f"{file.name} is damaged, or not a {file.compression or 'plain'} file: {error}") from None


def _opened(file: _File) -> Any:  # the decompressors' readers have no type in common
    match file.compression:
        case ".gz":
            import gzip

            return gzip.open(file.path)
        case ".bz2":
            import bz2

            return bz2.open(file.path)
        case ".xz":
            import lzma

            return lzma.open(file.path)
        case ".zst":
            try:
                import zstandard
            except ImportError:
                raise MissingExtraError("zstandard", "data", f"reading {file.name}") from None
            if not _zstd_is_whole(file.path):
                raise EOFError("the data end inside a frame")
            return zstandard.ZstdDecompressor().stream_reader(file.path.open("rb"), read_across_frames=True)
    return file.path.open("rb")


def _zstd_is_whole(path: Path) -> bool:
    """Whether the last zstd frame is complete, which the library's reader does not tell; reads block headers only."""
    import zstandard

    size = path.stat().st_size
    with path.open("rb") as stream:
        while (start := stream.tell()) < size:
            head = stream.read(18)
            if head[1:4] == b"\x2a\x4d\x18":
                stream.seek(start + 8 + int.from_bytes(head[4:8], "little"))
                continue
            stream.seek(start + zstandard.frame_header_size(head))
            is_last = False
            while not is_last:
                block = stream.read(3)
                if len(block) < 3:
                    return False
                header = int.from_bytes(block, "little")
                is_last = bool(header & 1)
                stream.seek(1 if header >> 1 & 3 == 1 else header >> 3, os.SEEK_CUR)
            stream.seek(4 * zstandard.get_frame_parameters(head).has_checksum, os.SEEK_CUR)
        return stream.tell() == size


def _decoded_raw(file: _File) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for block in _blocks(file):
        yield decoder.decode(block)
    yield decoder.decode(b"", True)


def _is_utf8(file: _File) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in _blocks(file):
            decoder.decode(block)
        decoder.decode(b"", True)
    except UnicodeDecodeError:
        return False
    return True


def _decoded(file: _File, config: TextConfig, tally: Counter[str]) -> Iterator[str]:
    """The text of a file in blocks, decoded strictly, its byte order mark removed where that is asked for."""
    decoder = codecs.getincrementaldecoder(config.encoding)()
    is_utf8 = codecs.lookup(config.encoding).name in _UTF8_NAMES
    num_bytes = 0
    at_start = True
    for block in chain(_blocks(file), (b"",)):
        if is_utf8:
            if num_bytes == 0:
                _refuse_wide_encodings(block, file)
            tally["nul"] += block.count(0)
            tally["bytes"] += len(block)
        held_back = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, not block)
        except UnicodeDecodeError as error:
            offset = num_bytes - held_back + error.start
            raise TextError(_undecodable(file, config.encoding, offset, error.object[error.start])) from None
        except UnicodeError as error:
            raise TextError(f"{file.name} is not {config.encoding}: {error}; choose with --text.encoding") from None
        num_bytes += len(block)
        if at_start and text:
            at_start = False
            if text[0] == "\ufeff":
                tally["boms"] += file.kind == "text"
                text = text if config.bom == "keep" and file.kind == "text" else text[1:]
        yield text


def _refuse_wide_encodings(head: bytes, file: _File) -> None:
    for mark, encoding in _WIDE_BOMS:
        if head.startswith(mark):
            raise TextError(
                f"{file.name} begins with the byte order mark of {encoding.upper()}; give --text.encoding {encoding}"
            )


def _undecodable(file: _File, encoding: str, offset: int, byte: int) -> str:
    """What is said of a byte that does not fit the encoding; the file is read again to find its line."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    head, seen = b"", 0
    line_feeds = returns = 0
    for block in _blocks(file):
        head = head or block[:8192]
        before = decoder.decode(block[: offset - seen])
        line_feeds += before.count("\n")
        returns += before.count("\r")
        seen += len(block)
        if seen > offset:
            break
    for magic, what in _BINARY:
        if head.startswith(magic):
            return f"{file.name} looks like {what}, not text; name the text files alone, as by 'folder/**/*.txt'"
    where = f"{file.name}: byte {byte:#04x} at offset {offset}, line {1 + (line_feeds or returns)}, is not {encoding}"
    if b"\0" in head:
        return f"{where}; it looks like a binary file: leave it out, or model its bytes (--tokenizer.level byte)"
    other = "cp1252" if codecs.lookup(encoding).name in _UTF8_NAMES else "utf-8"
    return f"{where}; give its encoding (--text.encoding {other}), or model its bytes (--tokenizer.level byte)"


def _with_line_feeds(text: str, tally: Counter[str]) -> str:
    """Turn CR LF and lone CR into LF."""
    if "\r" not in text:
        return text
    pairs = text.count("\r\n")
    tally["crlf"] += pairs
    tally["cr"] += text.count("\r") - pairs
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _with_line_feeds_across(texts: Iterable[str], tally: Counter[str]) -> Iterator[str]:
    """The same for a text in blocks, where a CR may end one block and its LF begin the next."""
    held_back = ""
    for block in texts:
        text = held_back + block
        held_back = "\r" if text.endswith("\r") else ""
        yield _with_line_feeds(text.removesuffix("\r"), tally)
    yield _with_line_feeds(held_back, tally)


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


def _lines(file: _File, config: TextConfig, tally: Counter[str]) -> Iterator[str]:
    """The lines of a structured file, without their line feeds; only LF ends a line."""
    rest = ""
    for text in _decoded(file, config, tally):
        *lines, rest = (rest + text).split("\n")
        yield from lines
        if len(rest) > _MAX_RECORD:
            raise TextError(
                f"{file.name} has a line of more than {_MAX_RECORD:,} characters; every line must be one record"
            )
    if rest:
        yield rest


def _csv_batches(reader: Any, file: _File) -> Iterator[list[str]]:
    """Rows of a CSV reader, blank ones left out; the module's limit on a field is lifted only while rows are read."""
    while True:
        limit = csv.field_size_limit(_MAX_RECORD)
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
