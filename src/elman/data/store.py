"""Token files: ids in the smallest unsigned integer type that holds the vocabulary, little-endian, memory-mapped.

A sequence lies in one file or in several, its shards. Either way it is read as one array whose memory is the files'
own: the shards are mapped one behind the other, and nothing of them is copied.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
import numpy.typing as npt

from elman.errors import ElmanError

Tokens: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

SHARD_UNIT = 1 << 16
"""A shard holds a multiple of so many tokens, so that its end is the end of a page of memory on every machine."""
_CHUNK = 1 << 20


class DamagedStoreError(ElmanError):
    """A token file is not what was written."""


def smallest_dtype(vocabulary_size: int) -> np.dtype[np.unsignedinteger]:
    """The type that ids 0 .. vocabulary_size - 1 are stored in."""
    return np.dtype("u1" if vocabulary_size <= 1 << 8 else "<u2" if vocabulary_size <= 1 << 16 else "<u4")


def compact(ids: npt.NDArray[np.integer], vocabulary_size: int) -> Tokens:
    """Ids in their smallest type.

    Raises:
        ValueError: if one lies outside of the vocabulary.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary_size:
        raise ValueError(f"ids {ids.min()} .. {ids.max()} do not fit a vocabulary of {vocabulary_size}")
    return ids.astype(smallest_dtype(vocabulary_size))


@dataclass(frozen=True)
class TokenStore:
    """A finished token sequence on disk and what it must look like."""

    path: Path
    """Of the file; shards have a number before the ending, ``train-00000.bin`` for ``train.bin``."""
    vocabulary_size: int
    num_tokens: int
    crc32: tuple[int, ...]
    """Of each file."""
    shard_tokens: int | None = None
    """In each shard but the last, a multiple of `SHARD_UNIT`; none: one file holds them all."""

    def read(self) -> Tokens:
        """Map the files into memory, read-only, after checking their lengths and checksums.

        Raises:
            DamagedStoreError: if they differ from what was written.
        """
        dtype = smallest_dtype(self.vocabulary_size)
        counts = [self.num_tokens]
        if self.shard_tokens is not None:
            counts = [min(self.shard_tokens, self.num_tokens - i * self.shard_tokens) for i in range(len(self.crc32))]
        if len(counts) != len(self.crc32) or sum(counts) != self.num_tokens or min(counts) < 0:
            raise DamagedStoreError(f"{self.path}: {len(self.crc32)} checksums do not fit {self.num_tokens} tokens")
        paths = [self.path if self.shard_tokens is None else shard_path(self.path, i) for i in range(len(counts))]
        for path, count, crc32 in zip(paths, counts, self.crc32, strict=True):
            if not path.is_file() or path.stat().st_size != count * dtype.itemsize:
                raise DamagedStoreError(f"{path} should hold {count} tokens of {dtype.itemsize} bytes")
            if _crc32_of(path) != crc32:
                raise DamagedStoreError(f"{path} has been altered: its checksum differs")
        if self.num_tokens == 0:
            return np.empty(0, dtype)
        if len(paths) == 1:
            return np.memmap(paths[0], dtype, mode="r")
        return _mapped(paths, dtype, self.num_tokens)


def shard_path(path: Path, number: int) -> Path:
    """The file of a shard, counted from 0."""
    return path.with_name(f"{path.stem}-{number:05d}{path.suffix}")


def _crc32_of(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:  # read, not mapped: what is looked at once should not count as held
        while chunk := file.read(_CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _mapped(paths: Sequence[Path], dtype: np.dtype[np.unsignedinteger], num_tokens: int) -> Tokens:
    """Several files as one array: a range of addresses is reserved, and each file is mapped to its place in it."""
    if sys.platform == "win32":
        raise ElmanError("a corpus of several shards is mapped as Linux and macOS can: prepare it without a shard size")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    num_bytes = num_tokens * dtype.itemsize

    def map_to(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
        found = libc.mmap(address, size, protection, mmap.MAP_PRIVATE | flags, descriptor, 0)
        if found == ctypes.c_void_p(-1).value:
            raise ElmanError(f"{num_bytes:,} bytes of {paths[0].parent} cannot be mapped (error {ctypes.get_errno()})")
        return int(found)

    start = map_to(None, num_bytes, _NOTHING, mmap.MAP_ANON, -1)
    buffer = (ctypes.c_char * num_bytes).from_address(start)
    weakref.finalize(buffer, libc.munmap, start, num_bytes).atexit = False  # arrays may be in use until the very end
    place = start
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file:
            map_to(place, size, mmap.PROT_READ, _AT_THIS_PLACE, file.fileno())
        place += size
    tokens = np.frombuffer(memoryview(buffer), dtype)
    tokens.flags.writeable = False
    return tokens


_NOTHING, _AT_THIS_PLACE = 0x0, 0x10  # PROT_NONE and MAP_FIXED of Linux and macOS, which Python does not name


class TokenWriter:
    """Grows a token sequence on disk; made by `write_tokens`."""

    def __init__(self, path: Path, vocabulary_size: int, shard_tokens: int | None) -> None:
        self.path = path
        self.vocabulary_size = vocabulary_size
        self.shard_tokens = shard_tokens
        self.num_tokens = 0
        self._crc32: list[int] = []
        self._room = 0
        self._file: IO[bytes] | None = None
        self._begin_file()

    def _begin_file(self) -> None:
        self.close()
        path = self.path if self.shard_tokens is None else shard_path(self.path, len(self._crc32))
        self._file = path.open("wb", buffering=_CHUNK)
        self._crc32.append(0)
        self._room = sys.maxsize if self.shard_tokens is None else self.shard_tokens

    def append(self, ids: npt.NDArray[np.integer]) -> None:
        """Add ids at the end.

        Raises:
            ValueError: if one lies outside of the vocabulary.
        """
        tokens = compact(ids, self.vocabulary_size)
        while tokens.size:
            if not self._room:
                self._begin_file()
            piece, tokens = tokens[: self._room], tokens[self._room :]
            self._file_at_hand.write(piece.data)
            self._crc32[-1] = zlib.crc32(piece.data, self._crc32[-1])
            self.num_tokens += piece.size
            self._room -= piece.size

    @property
    def _file_at_hand(self) -> IO[bytes]:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        return self._file

    def close(self) -> None:
        """Write out what is still in memory."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def store(self) -> TokenStore:
        """What has been written; to be read once the file is closed."""
        return TokenStore(self.path, self.vocabulary_size, self.num_tokens, tuple(self._crc32), self.shard_tokens)


@contextmanager
def write_tokens(path: Path, vocabulary_size: int, shard_tokens: int | None = None) -> Iterator[TokenWriter]:
    """Write a token sequence: append arrays of ids inside the `with`, take `writer.store` after it.

    Args:
        path: of the file; shards are named after it.
        vocabulary_size: what the ids lie below.
        shard_tokens: begin a new file after so many, rounded up to a multiple of `SHARD_UNIT`; none: one file.
    """
    rounded = None if shard_tokens is None else -(-shard_tokens // SHARD_UNIT) * SHARD_UNIT
    writer = TokenWriter(path, vocabulary_size, rounded)
    try:
        yield writer
    finally:
        writer.close()
