"""Token files: ids in the smallest unsigned integer type that holds the vocabulary, little-endian, memory-mapped."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from elman.errors import ElmanError

Tokens: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


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
    """A finished token file and what it must look like."""

    path: Path
    vocabulary_size: int
    num_tokens: int
    crc32: int

    def read(self) -> Tokens:
        """Map the file into memory, read-only, after checking its length and checksum.

        Raises:
            DamagedStoreError: if it differs from what was written.
        """
        dtype = smallest_dtype(self.vocabulary_size)
        if not self.path.is_file() or self.path.stat().st_size != self.num_tokens * dtype.itemsize:
            raise DamagedStoreError(f"{self.path} should hold {self.num_tokens} tokens of {dtype.itemsize} bytes")
        if self.num_tokens == 0:
            return np.empty(0, dtype)
        tokens = np.memmap(self.path, dtype, mode="r")
        if zlib.crc32(tokens.data) != self.crc32:
            raise DamagedStoreError(f"{self.path} has been altered: its checksum differs")
        return tokens


class TokenWriter:
    """Grows a token file; made by `write_tokens`."""

    def __init__(self, path: Path, vocabulary_size: int, write: Callable[[memoryview], object]) -> None:
        self.path = path
        self.vocabulary_size = vocabulary_size
        self.num_tokens = 0
        self._write = write
        self._crc32 = 0

    def append(self, ids: npt.NDArray[np.integer]) -> None:
        """Add ids at the end.

        Raises:
            ValueError: if one lies outside of the vocabulary.
        """
        tokens = compact(ids, self.vocabulary_size)
        self._write(tokens.data)
        self._crc32 = zlib.crc32(tokens.data, self._crc32)
        self.num_tokens += tokens.size

    @property
    def store(self) -> TokenStore:
        """What has been written; to be read once the file is closed."""
        return TokenStore(self.path, self.vocabulary_size, self.num_tokens, self._crc32)


@contextmanager
def write_tokens(path: Path, vocabulary_size: int) -> Iterator[TokenWriter]:
    """Write a token file: append arrays of ids inside the `with`, take `writer.store` after it."""
    with path.open("wb", buffering=1 << 20) as stream:
        yield TokenWriter(path, vocabulary_size, stream.write)
