"""From one long token sequence to the segments that are trained: streams side by side, each contiguous.

Shape letters: B rows (streams), T time.

The targets of a text are its tokens from the second on; the input of a target is the token before it. The targets
are cut into B contiguous streams. Segment i + 1 of a stream begins where segment i ended, so a state that is carried
on has read all that came before. In the default layout the streams differ in length by one token at most and every
target is trained exactly once an epoch; where the last segment has no target for a shorter stream, its weight is 0.
With ``trim``, tokens that do not divide evenly are dropped and the first token of a stream is never a target, as in
PyTorch's word-level example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.errors import UserError


@dataclass(frozen=True)
class Segment:
    """One piece of every stream, the unit of truncated back-propagation."""

    tokens_BT: Tensor
    """Inputs, int64."""
    targets_BT: Tensor
    """The tokens that follow, int64."""
    weight_BT: Tensor
    """1, and 0 where a stream has no target any more."""
    reset_BT: Tensor | None
    """Where the state is put back before the token is read; none where documents do not reset it."""
    num_targets: int
    """Targets of weight 1."""
    starts_anew: bool
    """The state of every row is initial before this segment, and its rows may be others than before."""

    def cut(self, rows: slice = slice(None), times: slice = slice(None)) -> Segment:
        """Some of its rows, at some of its times."""
        weight_BT = self.weight_BT[rows, times]
        return replace(
            self,
            tokens_BT=self.tokens_BT[rows, times],
            targets_BT=self.targets_BT[rows, times],
            weight_BT=weight_BT,
            reset_BT=None if self.reset_BT is None else self.reset_BT[rows, times],
            num_targets=int(weight_BT.sum()),
        )

    def part(self, number: int, num_parts: int) -> Segment:
        """One of several parts of the rows, as equal as can be.

        Where there are fewer rows than parts, a part without any gets the first row at weight 0: every process has
        something to read, and nothing counts twice.
        """
        if num_parts == 1:
            return self
        rows = share_of(len(self.tokens_BT), number, num_parts)
        if rows.start == rows.stop:
            row = self.cut(slice(1))
            return replace(row, weight_BT=torch.zeros_like(row.weight_BT), num_targets=0)
        return self.cut(rows)


@dataclass(frozen=True)
class Streams:
    """A token sequence laid out as B streams of segments.

    Args:
        tokens: the sequence, its boundary token first; may be memory-mapped.
        batch_size: number of streams B.
        bptt: tokens per segment T.
        trim: drop what does not divide evenly.
        reset_token: the boundary token, where it resets the state; none: state is carried through documents.
        random_seed: cuts every epoch anew into as many segments of random lengths, around bptt; none: all have bptt.
    """

    tokens: NDArray[np.unsignedinteger] | NDArray[np.int64]
    batch_size: int
    bptt: int
    trim: bool = False
    reset_token: int | None = None
    random_seed: int | None = None

    def __post_init__(self) -> None:
        if self.num_targets < 1:
            raise UserError(
                f"{len(self.tokens)} tokens give no target for {self.batch_size} streams; "
                "give a longer text or a smaller batch_size"
            )

    @property
    def _lengths(self) -> NDArray[np.int64]:
        """Targets of each stream."""
        if self.trim:
            return np.full(self.batch_size, len(self.tokens) // self.batch_size - 1)
        shortest, longer = divmod(len(self.tokens) - 1, self.batch_size)
        return shortest + (np.arange(self.batch_size) < longer)

    @property
    def _starts(self) -> NDArray[np.int64]:
        """Position of the first input of each stream."""
        # Under trim a stream's last token is no input of its own and no target of the next stream.
        return np.concatenate(([0], np.cumsum(self._lengths + self.trim)[:-1]))

    @property
    def num_targets(self) -> int:
        """Targets trained in one epoch."""
        return int(self._lengths.sum())

    @property
    def num_segments(self) -> int:
        """Segments of one epoch, the last and shorter one counted."""
        return -(-int(self._lengths.max()) // self.bptt)

    def _borders(self, index: int) -> tuple[int, int]:
        """Where a segment begins and ends in its streams."""
        epoch, within = divmod(index, self.num_segments)
        longest = int(self._lengths.max())
        if self.random_seed is None:
            return within * self.bptt, min((within + 1) * self.bptt, longest)
        borders = random_borders(self.random_seed, epoch, self.num_segments, longest, self.bptt)
        return int(borders[within]), int(borders[within + 1])

    def segment(self, index: int) -> Segment:
        """The segment of this number, counted from 0 on through all epochs, which are alike."""
        lengths = self._lengths
        start, end = self._borders(index)
        length = end - start
        counts_B1 = (lengths - start).clip(0, length)[:, None]
        times = np.arange(length + 1)
        # Past its end a stream reads its last token over and over, and what it reads there becomes 0.
        read = self.tokens[self._starts[:, None] + start + np.minimum(times, counts_B1)].astype(np.int64)
        is_there = times[:-1] < counts_B1
        inputs, targets = read[:, :-1] * is_there, read[:, 1:] * is_there
        return Segment(
            tokens_BT=torch.from_numpy(inputs),
            targets_BT=torch.from_numpy(targets),
            weight_BT=torch.from_numpy(is_there.astype(np.float32)),
            reset_BT=None if self.reset_token is None else torch.from_numpy(inputs == self.reset_token),
            num_targets=int(is_there.sum()),
            starts_anew=start == 0,
        )

    def __iter__(self) -> Iterator[Segment]:
        """One epoch."""
        return (self.segment(index) for index in range(self.num_segments))


def share_of(total: int, number: int, num_parts: int) -> slice:
    """Which of ``total`` things belong to one of several parts, as equal as can be and in order."""
    return slice(total * number // num_parts, total * (number + 1) // num_parts)


@lru_cache(maxsize=2)
def random_borders(seed: int, epoch: int, num_segments: int, length: int, bptt: int) -> NDArray[np.int64]:
    """Where the segments of an epoch begin and where the last ends: (num_segments + 1).

    The lengths are as in Merity et al. 2018 (https://arxiv.org/abs/1708.02182): normal around bptt with a deviation of
    5, or around half of bptt at a chance of 5%, and never below 5; then all are stretched alike to fill the epoch.
    """
    random = np.random.default_rng((seed, epoch))
    middle = np.where(random.random(num_segments) < 0.05, bptt / 2, bptt)
    drawn = np.maximum(random.normal(middle, 5.0), min(5.0, bptt)).cumsum()
    # One token for each segment, so that none is empty; the rest by the drawn lengths.
    shared = np.rint((length - num_segments) * drawn / drawn[-1]).astype(np.int64)
    return np.concatenate(([0], shared + np.arange(1, num_segments + 1)))


def fit_layout(num_targets: int, batch_size: int, bptt: int) -> tuple[int, int]:
    """Shrink the layout to a text too small for it: fewer streams first, so that each holds a whole segment.

    Returns:
        The number of streams and the segment length that are used; those asked for where the text is large enough.
    """
    batch_size = max(1, min(batch_size, num_targets // bptt))
    return batch_size, min(bptt, num_targets)


def check_targets(segment: Segment) -> None:
    """Make sure that a segment asks for the next token, and not for the one just read.

    Raises:
        ValueError: a target is not the input that follows it; a model would learn to copy.
    """
    both = (segment.weight_BT[:, :-1] * segment.weight_BT[:, 1:]).bool()
    differs = (segment.targets_BT[:, :-1] != segment.tokens_BT[:, 1:]) & both
    if differs.any():
        row, time = differs.nonzero()[0].tolist()
        raise ValueError(
            f"target {segment.targets_BT[row, time].item()} of stream {row} at time {time} is not the next input "
            f"({segment.tokens_BT[row, time + 1].item()}): targets must be the inputs shifted by one"
        )
