"""Documents of a corpus that stand in it more than once, word for word or nearly so, and the corpus without them.

A document is a set of shingles: all runs of nine characters of its text, without capitals and with one space for all
white space. Two documents are alike by the share of shingles that they have in common,

    J(A, B) = size of (A and B) / size of (A or B),

which is estimated by MinHash (Broder 1997, https://doi.org/10.1109/SEQUEN.1997.666900): the smallest value that a hash
function takes on a set is the same for A and B with probability J. Of 128 such values four at a time are compared (32
bands); documents that agree in all four anywhere are held against each other by all 128, which gives J to within 0.04
(one standard deviation at 0.8).

A document goes by in pieces and leaves 760 bytes in a temporary file: its hash values, a digest and how it begins.

Shape letters: D documents, K hash values, N characters, P pairs.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.text.sources import Corpus, Piece, Source, utf8

Hashes: TypeAlias = NDArray[np.uint64]

DEFAULT_THRESHOLD = 0.8
_SHINGLE = 9
_NUM_HASHES = 128
_NUM_BANDS = 32
_SEED = 0
_HASHES_AT_ONCE = 2048
_PAIRS_AT_ONCE = 1 << 14
_SHOWN_CHARS = 60
_BEGINS = _NUM_HASHES + 2
_ROW = _BEGINS + _SHOWN_CHARS
_HELD_OUT = ("test", "valid")
_digest = partial(blake2b, digest_size=8)


def window_hashes(symbols: NDArray[Any], size: int) -> Hashes:
    """A number for each window of so many symbols, equal for equal windows; for others equal by a rare chance only.

    Windows of two, four, eight ... symbols are put together from two halves, which may overlap.
    """
    hashes = _mixed(symbols.astype(np.uint64))
    width = 1
    while width < size:
        step = min(width, size - width)
        hashes = _mixed(hashes[:-step] * np.uint64(0x9E3779B97F4A7C15) + hashes[step:])
        width += step
    return hashes


def _mixed(numbers: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of a number (the finaliser of SplitMix64, Steele et al. 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def code_points(text: str) -> NDArray[np.uint32]:
    """The characters of a text as numbers."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


class WindowStream:
    """The hashes of all windows of a document whose text comes in pieces.

    Args:
        size: characters of a window.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.end = ""
        """The last characters so far, one fewer than a window has."""

    def add(self, text: str) -> Hashes:
        """The windows that end in this piece."""
        whole = self.end + text
        self.end = whole[max(0, len(whole) - self.size + 1) :]
        return window_hashes(code_points(whole), self.size) if len(whole) >= self.size else np.empty(0, np.uint64)


@cache
def _hash_functions() -> tuple[Hashes, Hashes]:
    """Factors, odd, and addends of the functions ``a x + b`` modulo 2^64."""
    random = np.random.Generator(np.random.PCG64(_SEED))
    factors, addends = random.integers(0, 2**64, size=(2, _NUM_HASHES, 1), dtype=np.uint64)
    return factors | np.uint64(1), addends


class _Sketch:
    """What is kept of one document while its pieces pass."""

    def __init__(self) -> None:
        self._digest = _digest()
        self._shingles = WindowStream(_SHINGLE)
        self._minima_K = np.full(_NUM_HASHES, np.iinfo(np.uint64).max, np.uint64)
        self._is_short = True
        self._begins = ""
        self.num_chars = 0

    def add(self, text: str) -> None:
        """Take the next piece in."""
        self.num_chars += len(text)
        self._digest.update(utf8(text))
        self._begins += text[: _SHOWN_CHARS - len(self._begins)]
        text = re.sub(r"\s+", " ", text.lower())
        shingles_N = self._shingles.add(text.removeprefix(" ") if self._shingles.end.endswith(" ") else text)
        if len(shingles_N):
            self._is_short = False
            self._take(shingles_N)

    def _take(self, shingles_N: Hashes) -> None:
        factors_K1, addends_K1 = _hash_functions()
        for start in range(0, len(shingles_N), _HASHES_AT_ONCE):
            values_KN = factors_K1 * shingles_N[start : start + _HASHES_AT_ONCE] + addends_K1
            np.minimum(self._minima_K, values_KN.min(axis=1), out=self._minima_K)

    def row(self) -> NDArray[np.uint32]:
        """The hash values, the digest of the text as it was, and its first characters, filled up with zeros."""
        if self._is_short:  # a text without a shingle is one by itself
            end = self._shingles.end
            self._take(window_hashes(code_points(end), max(1, len(end))))
        row = np.zeros(_ROW, np.uint32)
        row[:_NUM_HASHES] = self._minima_K >> np.uint64(32)
        row[_NUM_HASHES:_BEGINS] = np.frombuffer(self._digest.digest(), np.uint32)
        row[_BEGINS : _BEGINS + len(self._begins)] = code_points(self._begins)
        return row


@dataclass(frozen=True)
class Duplicates:
    """Which documents repeat another one."""

    original_D: NDArray[np.int64]
    """For each document the one that it repeats, and that stays; -1 where it stays itself."""
    similarity_D: NDArray[np.float32]
    """How alike the two are; 1 where they are equal, 0 where there is no other."""
    is_exact_D: NDArray[np.bool_]
    """Whether they are equal to the character."""
    num_chars_D: NDArray[np.int64]
    begins: dict[int, str]
    """The first characters of each document that repeats another one."""
    parts: Mapping[str, range]
    """Which of these documents belong to each part."""

    def place(self, document: int) -> tuple[str, int]:
        """The part of a document, and its number within it."""
        name = next(name for name, numbers in self.parts.items() if document in numbers)
        return name, document - self.parts[name].start


def find_duplicates(
    parts: Mapping[str, Iterable[Piece]], *, threshold: float = DEFAULT_THRESHOLD, protected: Collection[str] = ()
) -> Duplicates:
    """Find documents that are equal to an earlier one, or nearly so.

    A document goes only if one that stays is that much like it; which one stays follows from their order.

    Args:
        parts: documents in pieces, by the name of their part.
        threshold: similarity from which on two are duplicates, above 0.
        protected: parts whose documents stay whatever they are.
    """
    if not 0.0 < threshold <= 1.0:
        raise UserError(f"a similarity of {threshold:g} was asked for; accepted: above 0 and up to 1, such as 0.8")
    with tempfile.TemporaryFile(prefix="elman-") as file:
        lengths: list[int] = []
        ranges = {}
        for name, pieces in parts.items():
            start = len(lengths)
            for sketch in _sketches(pieces):
                file.write(sketch.row().tobytes())
                lengths.append(sketch.num_chars)
            ranges[name] = range(start, len(lengths))
        file.flush()
        size = len(lengths)
        found = Duplicates(
            original_D=np.full(size, -1),
            similarity_D=np.zeros(size, np.float32),
            is_exact_D=np.zeros(size, np.bool_),
            num_chars_D=np.array(lengths, np.int64),
            begins={},
            parts=ranges,
        )
        if size > 1:
            rows = np.memmap(file, np.uint32, mode="r", shape=(size, _ROW))
            _decide(found, rows[:, :_NUM_HASHES], rows[:, _NUM_HASHES:_BEGINS], threshold, protected)
            for document in np.flatnonzero(found.original_D >= 0).tolist():
                text = rows[document, _BEGINS:].tobytes().decode("utf-32-le", "surrogatepass")
                found.begins[document] = text.rstrip("\0")
        return found


def _sketches(pieces: Iterable[Piece]) -> Iterator[_Sketch]:
    sketch: _Sketch | None = None
    for piece in pieces:
        if piece.starts_document or sketch is None:
            if sketch is not None:
                yield sketch
            sketch = _Sketch()
        sketch.add(piece.text)
    if sketch is not None:
        yield sketch


def _pairs(values_DK: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Documents that agree in a band with the one before or with the first that does: (P, 2), the earlier one first."""
    num_documents = len(values_DK)
    found = []
    for band in np.split(np.arange(_NUM_HASHES), _NUM_BANDS):
        keys_D = np.zeros(num_documents, np.uint64)
        for column in band:
            keys_D = _mixed(keys_D * np.uint64(0x9E3779B97F4A7C15) + values_DK[:, column])
        order_D = np.argsort(keys_D, kind="stable")
        goes_on_D = np.concatenate([[False], keys_D[order_D[1:]] == keys_D[order_D[:-1]]])
        first_D = np.maximum.accumulate(np.where(goes_on_D, 0, np.arange(num_documents)))
        place_P = np.flatnonzero(goes_on_D)
        for earlier_P in (place_P - 1, first_D[place_P]):
            found.append(order_D[earlier_P] * num_documents + order_D[place_P])
    joined = np.unique(np.concatenate(found))
    return np.stack(np.divmod(joined, num_documents), axis=1)


def _similarities(values_DK: NDArray[np.uint32], pairs_P2: NDArray[np.int64]) -> NDArray[np.float32]:
    pieces = [pairs_P2[start : start + _PAIRS_AT_ONCE] for start in range(0, len(pairs_P2), _PAIRS_AT_ONCE)]
    found = [(values_DK[piece[:, 0]] == values_DK[piece[:, 1]]).mean(axis=1, dtype=np.float32) for piece in pieces]
    return np.concatenate([np.empty(0, np.float32), *found])


def _decide(
    found: Duplicates,
    values_DK: NDArray[np.uint32],
    digests_D2: NDArray[np.uint32],
    threshold: float,
    protected: Collection[str],
) -> None:
    """Go through the documents in order; one goes where it is like one that stays."""
    digests_D = np.ascontiguousarray(digests_D2).view(np.uint64)[:, 0]
    pairs_P2 = _pairs(values_DK)
    similar_P = _similarities(values_DK, pairs_P2)
    pairs_P2, similar_P = pairs_P2[similar_P >= threshold], similar_P[similar_P >= threshold]
    # Of the earlier documents that one is like, an equal one counts first, then the most similar.
    differs_P = digests_D[pairs_P2[:, 0]] != digests_D[pairs_P2[:, 1]]
    for place in np.lexsort((-similar_P, differs_P, pairs_P2[:, 1])).tolist():
        earlier, later = pairs_P2[place].tolist()
        if found.original_D[later] >= 0 or found.place(later)[0] in protected:
            continue
        similarity = float(similar_P[place])
        if found.original_D[earlier] >= 0:  # it has gone: what it repeats may be like this one too
            earlier = int(found.original_D[earlier])
            similarity = float((values_DK[earlier] == values_DK[later]).mean())
        if similarity >= threshold:
            found.original_D[later] = earlier
            found.similarity_D[later] = similarity
            found.is_exact_D[later] = digests_D[earlier] == digests_D[later]


@dataclass(frozen=True)
class Repeated:
    """A document that was left out, and the one that it repeats."""

    part: str
    document: int
    """Its number within its part, from 0."""
    of_part: str
    of_document: int
    similarity: float
    exact: bool
    """Whether the two are equal to the character."""
    begins: str
    """Its first characters."""


@dataclass(frozen=True)
class PartCounts:
    """What became of one part."""

    documents: int
    """Before."""
    chars: int
    exact: int
    """Documents left out that are equal to one that stays."""
    near: int
    """Documents left out that are nearly equal to one that stays."""
    chars_left_out: int
    """Of both."""


@dataclass(frozen=True)
class Deduplicated:
    """A corpus without duplicates, and what went."""

    corpus: Corpus
    threshold: float
    parts: Mapping[str, PartCounts]
    repeated: tuple[Repeated, ...]
    """In the order of the corpus, held-out parts first."""

    def to_dict(self) -> dict[str, Any]:
        """What went, by name, ready for JSON."""
        return {
            "threshold": self.threshold,
            "parts": {name: asdict(part) for name, part in self.parts.items()},
            "repeated": [asdict(one) for one in self.repeated],
        }


def without_duplicates(corpus: Corpus, threshold: float = DEFAULT_THRESHOLD) -> Deduplicated:
    """Leave the documents out that repeat others.

    Where a corpus comes with held-out parts, these stay as they are, so that figures on them can be compared: what
    repeats one of their documents goes from the training part. Otherwise the first of several that are alike stays.

    Args:
        corpus: the documents.
        threshold: similarity from which on two documents are duplicates; 1: only those with the same shingles.
    """
    names = sorted(corpus.parts, key=lambda name: name not in _HELD_OUT)
    found = find_duplicates(
        {name: corpus.parts[name].pieces() for name in names}, threshold=threshold, protected=_HELD_OUT
    )
    goes_D, counts = found.original_D >= 0, {}
    for name, numbers in found.parts.items():
        here = slice(numbers.start, numbers.stop)
        exact = int(found.is_exact_D[here].sum())
        counts[name] = PartCounts(
            documents=len(numbers),
            chars=int(found.num_chars_D[here].sum()),
            exact=exact,
            near=int(goes_D[here].sum()) - exact,
            chars_left_out=int(found.num_chars_D[here][goes_D[here]].sum()),
        )
    repeated = tuple(
        Repeated(
            *found.place(document),
            *found.place(int(found.original_D[document])),
            similarity=round(float(found.similarity_D[document]), 3),
            exact=bool(found.is_exact_D[document]),
            begins=found.begins[document],
        )
        for document in np.flatnonzero(goes_D).tolist()
    )
    left = {
        name: _Without(source, goes_D[found.parts[name].start : found.parts[name].stop], counts[name])
        for name, source in corpus.parts.items()
    }
    return Deduplicated(Corpus(corpus.name, left), threshold, counts, repeated)


class _Without(Source):
    """A source without some of its documents."""

    def __init__(self, source: Source, goes_D: NDArray[np.bool_], counts: PartCounts) -> None:
        self._source, self._goes_D, self._counts = source, goes_D, counts

    def pieces(self) -> Iterator[Piece]:
        number = -1
        for piece in self._source.pieces():
            number += piece.starts_document
            if not self._goes_D[number]:
                yield piece

    def report(self) -> list[str]:
        counts, said = self._counts, self._source.report()
        if counts.exact or counts.near:
            said.append(
                f"{counts.exact:,} of {counts.documents:,} documents left out that are equal to others, and "
                f"{counts.near:,} that are nearly so"
            )
        elif counts.documents == 1:
            said.append("the text is one document, which repeats no other: --text.document_separator cuts it up")
        return said
