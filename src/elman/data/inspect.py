"""Look at a prepared corpus before any training: what it holds, what a model will be asked, what would go wrong.

Everything is counted on the tokens that training reads, decoded again, in bounded memory; only 8 bytes for each longer
line, each document and some million places of the text go to temporary files, so that duplicates are found among all
of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from elman.config import DataConfig, TrainingConfig
from elman.data.duplicates import WindowStream, code_points
from elman.data.pairs import Pairs
from elman.data.prepare import Dataset, Split
from elman.data.streams import Streams, fit_layout
from elman.data.texts import texts_of
from elman.text.sources import utf8
from elman.text.tokenizers import Tokenizer

_CHUNK = 1 << 18
_NUM_CODE_POINTS = 0x110000
_MIN_LINE = 20
_SPAN = 50
_MAX_SPANS = 1 << 22
"""Runs of characters that are kept of the training part, at most about."""
_TOKENS_SHOWN = 16
_SEGMENTS_SHOWN = 3
_digest = partial(blake2b, digest_size=8)


@dataclass(frozen=True)
class PartReport:
    """Counts of one part; what is said of lines is said of those with at least 20 characters."""

    documents: int
    characters: int
    bytes: int
    tokens: int
    """Targets: one for each token of the text and for each border between documents."""
    unknown: int
    """Tokens that are ``<unk>``."""
    lines: int
    """Lines of any length."""
    longest_line: int
    """In characters."""
    duplicate_lines: float
    """Share of the lines that stand in this part already, further up."""
    duplicate_documents: float
    """The same of documents."""
    lines_in_train: float | None
    """Share of a held-out part's lines that stand in the training part too; None for the training part."""
    spans_in_train: float | None
    """The same of its runs of 50 characters, wherever they begin; of a large corpus, of an even sample of them."""


@dataclass(frozen=True)
class Pair:
    """Inputs of one stream, and the tokens asked for: the same text, one token on; or a source and its target."""

    inputs: str
    targets: str


@dataclass(frozen=True)
class CorpusReport:
    """What `inspect_corpus` found."""

    name: str
    sha256: str
    level: str
    vocabulary: tuple[str, ...]
    """The readable text of each token."""
    parts: dict[str, PartReport]
    """Of train, and of valid and test where there are such."""
    most_frequent: tuple[tuple[str, int], ...]
    """Tokens of the training part and how often they occur there, the most frequent first."""
    least_frequent: tuple[tuple[str, int], ...]
    """Those that occur at all, the rarest first."""
    num_unused: int
    """Tokens of the vocabulary that the training part never asks for."""
    batch_size: int
    """Streams that training will use, or pairs in a batch; fewer than asked for where the text is short."""
    bptt: int | None
    """Tokens per segment that training will use; None for pairs, which are read whole."""
    segments_per_epoch: int
    pairs: tuple[Pair, ...]
    """The beginnings of the first segments of the first stream; of a corpus of pairs, sources and their targets."""
    notices: tuple[str, ...]
    """What was done to the text when it was read."""
    warnings: tuple[str, ...]
    """What would go wrong, and what to do."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return asdict(self)


def inspect_corpus(
    dataset: Dataset, data: DataConfig, training: TrainingConfig, *, num_shown: int = 10
) -> CorpusReport:
    """Examine a corpus as training would read it.

    Args:
        dataset: the prepared corpus.
        data: the settings it was prepared with.
        training: batch_size, bptt and trim decide the layout of the streams.
        num_shown: length of the lists of frequent and of rare tokens.
    """
    tokenizer, train = dataset.tokenizer, dataset.train
    splits = {"train": train, "valid": dataset.valid, "test": dataset.test}
    with tempfile.TemporaryDirectory(prefix="elman-", ignore_cleanup_errors=True) as folder:
        one_in = max(1, train.num_chars // _MAX_SPANS)
        surveys = {
            name: _Survey(split, tokenizer, folder, one_in) for name, split in splits.items() if split is not None
        }
        parts = {name: survey.report(None if name == "train" else surveys["train"]) for name, survey in surveys.items()}
    counts = _token_counts(train, tokenizer.size)
    order = np.argsort(-counts, kind="stable")
    used = order[counts[order] > 0]

    def named(ids: NDArray[np.int64]) -> tuple[tuple[str, int], ...]:
        return tuple((tokenizer.vocabulary[i], int(counts[i])) for i in ids[:num_shown])

    streams = _layout(train, tokenizer, data, training)
    return CorpusReport(
        name=dataset.corpus_name,
        sha256=dataset.sha256,
        level=tokenizer.level,
        vocabulary=tokenizer.vocabulary,
        parts=parts,
        most_frequent=named(used),
        least_frequent=named(used[::-1]),
        num_unused=tokenizer.size - len(used),
        batch_size=streams.batch_size,
        bptt=streams.bptt if isinstance(streams, Streams) else None,
        segments_per_epoch=streams.num_segments,
        pairs=tuple(_pairs(streams, tokenizer)),
        notices=dataset.notices,
        warnings=(
            *_warnings_of_layout(parts, data, training, streams),
            *_warnings_of_vocabulary(parts["train"], tokenizer, counts),
            *_warnings_of_text(surveys["train"].characters, surveys["train"].num_mojibake, parts["train"]),
            *_warnings_of_held_out(parts),
        ),
    )


class _Survey:
    """One pass over the text of a split."""

    def __init__(self, split: Split, tokenizer: Tokenizer, folder: str, one_in: int) -> None:
        self._split = split
        self._one_in = one_in
        self._folder = folder
        self.characters = np.zeros(_NUM_CODE_POINTS, np.int64)
        """How often each code point occurs."""
        self.num_mojibake = self.num_lines = self.longest_line = self._length = 0
        self._line, self._document, self._spans = _digest(), _digest(), WindowStream(_SPAN)
        with (
            self._temporary() as self._lines_file,
            self._temporary() as self._documents_file,
            self._temporary() as self._spans_file,
        ):
            for text in texts_of(split.tokens, tokenizer):
                if text is None:
                    self._end_document()
                else:
                    self._add(text)
            self._end_document()
            files = (self._lines_file, self._documents_file, self._spans_file)
            self.lines, self.documents, self.spans = map(_sorted_numbers, files)

    def _temporary(self) -> IO[bytes]:
        return tempfile.NamedTemporaryFile(dir=self._folder, delete=False)

    def _add(self, text: str) -> None:
        self.characters += np.bincount(code_points(text), minlength=_NUM_CODE_POINTS)
        hashes = self._spans.add(text)
        # Chosen by their hash, so that every part keeps the same ones.
        self._spans_file.write(hashes[hashes % np.uint64(self._one_in) == 0].tobytes())
        self.num_mojibake += text.count("â€") + text.count("Ã©")
        self._document.update(utf8(text))
        first, *others = text.split("\n")
        self._extend_line(first)
        for line in others:
            self._end_line()
            self._extend_line(line)

    def _extend_line(self, text: str) -> None:
        self._line.update(utf8(text))
        self._length += len(text)

    def _end_line(self) -> None:
        self.num_lines += 1
        self.longest_line = max(self.longest_line, self._length)
        if self._length >= _MIN_LINE:
            self._lines_file.write(self._line.digest())
        self._line, self._length = _digest(), 0

    def _end_document(self) -> None:
        if self._length:
            self._end_line()
        self._documents_file.write(self._document.digest())
        self._document, self._spans = _digest(), WindowStream(_SPAN)

    def report(self, train: _Survey | None) -> PartReport:
        """The counts, compared with the training part where this is not it."""
        split = self._split
        return PartReport(
            documents=split.num_documents,
            characters=split.num_chars,
            bytes=split.num_bytes,
            tokens=len(split.tokens) - 1,
            unknown=split.num_unknown,
            lines=self.num_lines,
            longest_line=self.longest_line,
            duplicate_lines=_share_repeated(self.lines),
            duplicate_documents=_share_repeated(self.documents),
            lines_in_train=None if train is None else _share_contained(self.lines, train.lines),
            spans_in_train=None if train is None else _share_contained(self.spans, train.spans),
        )


def _sorted_numbers(file: IO[bytes]) -> NDArray[np.uint64]:
    """The digests in a file, sorted in place there: the pages belong to the file and count against no memory limit."""
    file.flush()
    if not file.tell():
        return np.empty(0, np.uint64)
    numbers = np.memmap(file.name, np.uint64, mode="r+")
    numbers.sort()
    return numbers


def _share_repeated(numbers: NDArray[np.uint64]) -> float:
    pieces = (numbers[start : start + _CHUNK + 1] for start in range(0, len(numbers), _CHUNK))
    return sum(int((piece[1:] == piece[:-1]).sum()) for piece in pieces) / max(1, len(numbers))


def _share_contained(numbers: NDArray[np.uint64], among: NDArray[np.uint64]) -> float:
    if not len(among):
        return 0.0
    num_found = 0
    for start in range(0, len(numbers), _CHUNK):
        piece = numbers[start : start + _CHUNK]
        places = np.minimum(np.searchsorted(among, piece), len(among) - 1)
        num_found += int((among[places] == piece).sum())
    return num_found / max(1, len(numbers))


def _token_counts(split: Split, vocabulary_size: int) -> NDArray[np.int64]:
    """How often each token is a target."""
    counts = np.zeros(vocabulary_size, np.int64)
    for start in range(1, len(split.tokens), _CHUNK):
        counts += np.bincount(split.tokens[start : start + _CHUNK], minlength=vocabulary_size)
    return counts


def _layout(train: Split, tokenizer: Tokenizer, data: DataConfig, training: TrainingConfig) -> Streams | Pairs:
    if data.pairs:
        return Pairs(train.tokens, min(training.batch_size, train.num_documents // 2), tokenizer.boundary_id)
    batch_size, bptt = fit_layout(len(train.tokens) - 1, training.batch_size, training.bptt)
    reset_token = tokenizer.boundary_id if data.reset_at_documents else None
    return Streams(train.tokens, batch_size, bptt, training.trim, reset_token)


def _pairs(streams: Streams | Pairs, tokenizer: Tokenizer) -> Iterator[Pair]:
    between = " " if tokenizer.level == "word" else ""
    if isinstance(streams, Pairs):
        for example in range(min(_SEGMENTS_SHOWN, streams.num_examples)):
            both = (streams.source(example), streams.target(example))
            yield Pair(*(between.join(tokenizer.vocabulary[i] for i in ids[:_TOKENS_SHOWN]) for ids in both))
        return
    for index in range(min(_SEGMENTS_SHOWN, streams.num_segments)):
        segment = streams.segment(index)
        num_shown = min(_TOKENS_SHOWN, int(segment.weight_BT[0].sum()))
        inputs, targets = (
            between.join(tokenizer.vocabulary[i] for i in tokens_BT[0, :num_shown].tolist())
            for tokens_BT in (segment.tokens_BT, segment.targets_BT)
        )
        yield Pair(inputs, targets)


def _warnings_of_layout(
    parts: dict[str, PartReport], data: DataConfig, training: TrainingConfig, used: Streams | Pairs
) -> Iterator[str]:
    train = parts["train"]
    if isinstance(used, Pairs):
        if used.batch_size < training.batch_size:
            yield f"the training part has {used.num_examples:,} pairs, fewer than batch_size {training.batch_size}"
    elif (used.batch_size, used.bptt) != (training.batch_size, training.bptt):
        yield (
            f"the training part has {train.tokens:,} tokens, fewer than batch_size {training.batch_size} x bptt "
            f"{training.bptt}: training will shrink them to {used.batch_size} x {used.bptt}; give more text"
        )
    if data.reset_at_documents and train.documents == 1:
        yield "data.reset_at_documents has no effect: the training part is one document; see text.document_separator"
    if train.longest_line > 100_000 or (train.lines == 1 and train.longest_line > 10_000):
        yield (f"a line of {train.longest_line:,} characters: if there were paragraphs, their line ends are lost")


def _warnings_of_vocabulary(train: PartReport, tokenizer: Tokenizer, counts: NDArray[np.int64]) -> Iterator[str]:
    num_used, num_once = int((counts > 0).sum()), int((counts == 1).sum())
    unit = {"char": "characters", "word": "words"}.get(tokenizer.level, "tokens")
    if train.tokens < 10 * num_used:
        yield (
            f"{num_used:,} different {unit} in a text of {train.tokens:,}: most are too rare to learn; "
            "give more text or a smaller unit (--tokenizer.level)"
        )
    if num_once > max(3, num_used // 10) and tokenizer.level in ("char", "word"):
        yield f"{num_once:,} of {num_used:,} {unit} occur once; --tokenizer.min_count 2 makes them <unk>"
    if train.unknown:
        yield (
            f"{train.unknown / train.tokens:.1%} of the training {unit} are <unk>, by max_size, min_count or in the "
            "text itself: perplexity is that of the reduced text, and bits per character cannot be given"
        )


def _warnings_of_text(characters: NDArray[np.int64], num_mojibake: int, train: PartReport) -> Iterator[str]:
    total = max(1, int(characters.sum()))
    num_nul, num_returns, num_replaced = (int(characters[code]) for code in (0, 0x0D, 0xFFFD))
    num_control = int(characters[:32].sum() + characters[127:160].sum() - characters[[0x09, 0x0A, 0x0D]].sum())
    if (num_control + num_replaced) / total > 0.05:
        share = (num_control + num_replaced) / total
        yield f"{share:.1%} of the characters are no text: this looks like a binary file, or one in another encoding"
    elif num_nul:
        yield f"{num_nul:,} NUL characters: perhaps the text is UTF-16; see --text.encoding"
    elif num_control:
        yield f"{num_control:,} control characters beside tab and line end; the model will write them too"
    if num_returns:
        yield f"{num_returns:,} carriage returns are left in the text; --text.newlines lf turns them into line ends"
    if num_replaced:
        yield f"{num_replaced:,} replacement characters U+FFFD: the text was decoded wrongly before it came here"
    if num_mojibake:
        yield f"{num_mojibake:,} times 'â€' or 'Ã©': UTF-8 that was read as another encoding before it came here"
    if train.duplicate_documents > 0.01:
        yield f"{train.duplicate_documents:.1%} of the training documents are repeated: they are learned by heart"
    if train.duplicate_lines > 0.1:
        yield f"{train.duplicate_lines:.1%} of the training lines of {_MIN_LINE} characters or more are repeated"


def _warnings_of_held_out(parts: dict[str, PartReport]) -> Iterator[str]:
    if "valid" not in parts:
        yield "there is no validation part: nothing will tell when the model begins to learn the text by heart"
    for name in ("valid", "test"):
        if (part := parts.get(name)) is None:
            continue
        if part.tokens < 1000:
            yield f"the {name} part has {part.tokens:,} tokens: its figures will be rough"
        if part.unknown > 0.01 * part.tokens:
            yield f"{part.unknown / part.tokens:.1%} of the {name} part is <unk>: the training part lacks what it holds"
        if part.lines_in_train is not None and part.lines_in_train > 0.05:
            yield (
                f"{part.lines_in_train:.1%} of the {name} lines stand in the training part too: its figures will be "
                "too good; remove duplicates, or hold out other files"
            )
        elif part.spans_in_train is not None and part.spans_in_train > 0.05:
            yield (
                f"{part.spans_in_train:.1%} of the runs of {_SPAN} characters of the {name} part stand in the training "
                "part too: its figures will be too good; `elman data prepare --dedup` removes documents that are alike"
            )
