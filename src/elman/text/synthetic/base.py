"""Texts made by a program, byte-identical on every machine, with a known entropy rate or known answers.

Nothing here draws from Python's or numpy's generators, whose streams may change, and no floating-point number
decides a character: `Bits` is SplitMix64 on unsigned 64-bit integers, and every chance is a whole number of parts of
a whole number.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError

VERSION = 1
"""Raised whenever a generator would give another text for the same parameters."""

CHUNK = 1 << 18
"""Random numbers are drawn for this many characters or words at once; this is part of what defines the texts."""

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]


class Bits:
    """SplitMix64 (Steele, Lea and Flood 2014): number i is a mix of ``key + i * gamma``, modulo 2**64.

    The key is the first eight bytes, read little-endian, of the SHA-256 of ``name:seed``, so that generators of the
    same seed are unrelated.
    """

    _GAMMA = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self, name: str, seed: int) -> None:
        self._key = np.frombuffer(hashlib.sha256(f"{name}:{seed}".encode()).digest()[:8], "<u8").astype(np.uint64)
        self._drawn = 0

    def words(self, count: int) -> UInt64:
        """The next ``count`` numbers of 64 bits."""
        index = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        z = self._key + index * self._GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def below(self, bound: int, *shape: int) -> Int64:
        """Whole numbers from 0 to bound - 1, uniform to bound / 2**32 (exactly so where bound is a power of two)."""
        high = self.words(math.prod(shape)) >> np.uint64(32)
        return ((high * np.uint64(bound)) >> np.uint64(32)).astype(np.int64).reshape(shape)

    def endless(self, num_bits: int) -> Iterator[int]:
        """Uniform numbers of so many bits, without end."""
        while True:
            yield from (self.words(CHUNK) >> np.uint64(64 - num_bits)).tolist()

    def choose(self, count: int, among: int, rows: int) -> Int64:
        """In each row ``count`` different numbers below ``among``, in random order."""
        keys = self.words(rows * among).reshape(rows, among)
        return np.argsort(keys, axis=1, kind="stable")[:, :count].astype(np.int64)


@dataclass(frozen=True)
class KnownAnswer:
    """What the best possible model reaches on a generator's text."""

    entropy_bits_per_char: float
    """Entropy rate: the bits per character that no model can beat on average, answers included."""
    optimum: str
    """The same in words: what is determined by the past, and what is chance."""


class Span(NamedTuple):
    """Characters of a text that an ideal reader knows in advance: ``text[start:end]``."""

    start: int
    end: int


def setting(default: int, lowest: int, highest: int) -> Any:
    """A whole-number parameter of a generator, with its range."""
    return field(default=default, metadata={"range": (lowest, highest)})


def size_setting() -> Any:
    """The parameter of those generators whose text is cut after so many characters."""
    return setting(500_000, 1, 10**10)


@dataclass(frozen=True, kw_only=True)
class Generator(ABC):
    """A text, given wholly by its name and whole-number parameters.

    Raises:
        UserError: a parameter out of its range.
    """

    name: ClassVar[str]
    has_answers: ClassVar[bool] = False
    """Whether some characters are determined by what stands before them, in the sense of `answers`."""
    seed: int = setting(0, 0, 2**63 - 1)

    def __post_init__(self) -> None:
        for parameter in fields(self):
            lowest, highest = parameter.metadata["range"]
            value = getattr(self, parameter.name)
            if not lowest <= value <= highest:
                raise UserError(f"synthetic:{self.name}: {parameter.name} is {value}; accepted: {lowest} to {highest}")

    @abstractmethod
    def chunks(self) -> Iterator[str]:
        """The text in consecutive pieces of a few megabytes at most."""

    @abstractmethod
    def known(self) -> KnownAnswer:
        """The optimum of this text, from the parameters alone."""

    def text(self) -> str:
        """The whole text."""
        return "".join(self.chunks())

    def answers(self, text: str) -> list[Span]:
        """The characters of a text in this format that are answers; none for a text of chance alone."""
        return []

    def score(self, text: str) -> tuple[int, int]:
        """How many answers of a text, which a model may have written, are right, and how many there are."""
        return 0, 0

    @property
    def specification(self) -> str:
        """Name and all parameters, such as ``markov,seed=0,size=500000,order=2,symbols=4``."""
        return ",".join([self.name, *(f"{p.name}={getattr(self, p.name)}" for p in fields(self))])

    def bits(self) -> Bits:
        """The source of everything that is drawn for the text, from its beginning."""
        return Bits(self.name, self.seed)
