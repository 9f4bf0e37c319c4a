"""From the bytes of one file to its text: decompressed, decoded strictly, line ends made one.

Everything passes in blocks, in bounded memory; what cannot be read is an error that names the file and the place.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

from elman.config import TextConfig
from elman.errors import MissingExtraError, TextError, UserError

BLOCK_BYTES = 1 << 18
MAX_RECORD = 1 << 26
"""Characters of a line of a structured file, at most."""
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_KINDS: Mapping[str, Literal["jsonl", "csv", "tsv", "parquet"]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
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


class Spool:
    """A temporary file with a copy of a stream, removed with this object."""

    def __init__(self, stream: IO[bytes]) -> None:
        handle, name = tempfile.mkstemp(prefix="elman-")
        self.path = Path(name)
        weakref.finalize(self, self.path.unlink, missing_ok=True)
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as copy:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
                copy.write(block)
        self.sha256 = digest.hexdigest()


@dataclass(frozen=True)
class InputFile:
    """A file to read, the name by which it is called, and the copy that stands for it if it was a stream."""

    path: Path
    name: str
    spool: Spool | None = None

    @property
    def _suffixes(self) -> tuple[str, str]:
        *_, inner, last = ["", "", *Path(self.name.lower()).suffixes]
        return (inner, last) if last in _COMPRESSIONS else (last, "")

    @property
    def kind(self) -> Literal["text", "jsonl", "csv", "tsv", "parquet"]:
        """How its documents are found, by its name."""
        return _KINDS.get(self._suffixes[0], "text")

    @property
    def compression(self) -> str:
        """The ending that tells how it is compressed, or nothing."""
        return self._suffixes[1]

    def fingerprint(self) -> list[Any]:
        """What changes whenever its bytes may have changed."""
        if self.spool is not None:
            return [self.name, self.spool.sha256]
        status = self.path.stat()
        return [str(self.path.resolve()), status.st_size, status.st_mtime_ns]


def _blocks(file: InputFile) -> Iterator[bytes]:
    """The bytes of a file, decompressed."""
    try:
        with _opened(file) as stream:
            while block := stream.read(BLOCK_BYTES):
                yield block
    except UserError:
        raise
    except Exception as error:  # each decompressor has errors of its own
        if isinstance(error, OSError) and error.strerror:
            raise TextError(f"{file.name}: {error.strerror}") from None
        raise TextError(f"{file.name} is damaged, or not a {file.compression or 'plain'} file: {error}") from None


def _opened(file: InputFile) -> Any:  # the decompressors' readers have no type in common
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


def decoded_raw(file: InputFile) -> Iterator[str]:
    """The text of a file in blocks; bytes that are no UTF-8 become lone surrogates."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for block in _blocks(file):
        yield decoder.decode(block)
    yield decoder.decode(b"", True)


def is_valid_utf8(file: InputFile) -> bool:
    """Whether all of a file is UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in _blocks(file):
            decoder.decode(block)
        decoder.decode(b"", True)
    except UnicodeDecodeError:
        return False
    return True


def decoded(file: InputFile, config: TextConfig, tally: Counter[str]) -> Iterator[str]:
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
            raise TextError(
                f"{file.name} is not {config.encoding}: {error}; convert it, or train with its --text.encoding"
            ) from None
        num_bytes += len(block)
        if at_start and text:
            at_start = False
            if text[0] == "\ufeff":
                tally["boms"] += file.kind == "text"
                text = text if config.bom == "keep" and file.kind == "text" else text[1:]
        yield text


def _refuse_wide_encodings(head: bytes, file: InputFile) -> None:
    for mark, encoding in _WIDE_BOMS:
        if head.startswith(mark):
            raise TextError(
                f"{file.name} begins with the byte order mark of {encoding.upper()}: convert it to UTF-8, or train "
                f"with --text.encoding {encoding}"
            )


def _undecodable(file: InputFile, encoding: str, offset: int, byte: int) -> str:
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
        return f"{where}; it looks like a binary file: leave it out, or train on its bytes (--tokenizer.level byte)"
    other = "cp1252" if codecs.lookup(encoding).name in _UTF8_NAMES else "utf-8"
    return (
        f"{where}; convert it, or train with its encoding (--text.encoding {other}) or bytes (--tokenizer.level byte)"
    )


def with_line_feeds(text: str, tally: Counter[str]) -> str:
    """Turn CR LF and lone CR into LF."""
    if "\r" not in text:
        return text
    pairs = text.count("\r\n")
    tally["crlf"] += pairs
    tally["cr"] += text.count("\r") - pairs
    return text.replace("\r\n", "\n").replace("\r", "\n")


def with_line_feeds_across(texts: Iterable[str], tally: Counter[str]) -> Iterator[str]:
    """The same for a text in blocks, where a CR may end one block and its LF begin the next."""
    held_back = ""
    for block in texts:
        text = held_back + block
        held_back = "\r" if text.endswith("\r") else ""
        yield with_line_feeds(text.removesuffix("\r"), tally)
    yield with_line_feeds(held_back, tally)


def lines_of(file: InputFile, config: TextConfig, tally: Counter[str]) -> Iterator[str]:
    """The lines of a structured file, without their line feeds; only LF ends a line."""
    rest = ""
    for text in decoded(file, config, tally):
        *lines, rest = (rest + text).split("\n")
        yield from lines
        if len(rest) > MAX_RECORD:
            raise TextError(
                f"{file.name} has a line of more than {MAX_RECORD:,} characters; every line must be one record"
            )
    if rest:
        yield rest
