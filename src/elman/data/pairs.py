"""From a corpus of pairs to the batches that are trained: whole examples, each from the initial state.

Shape letters: B rows (examples), T time.

A corpus of pairs is one whose documents are sources and targets in turn: boundary, source, boundary, target, boundary,
source, ... A row of a batch is one example. What is asked for is the target and the boundary that ends it; all before
has weight 0, and so has the padding behind a shorter row, which is never the boundary. Examples whose sources are alike
in length share a batch, so that a model that changes at the second boundary does so in few columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from elman.data.streams import Segment
from elman.errors import UserError
from elman.models.noise import derived_seed

Ids: TypeAlias = NDArray[np.int64]
_TOKENS_AT_ONCE = 2**20  # of a memory-mapped text that may be larger than memory


@dataclass(frozen=True)
class Pairs:
    """The examples of a corpus of pairs in batches; its face is that of `elman.data.streams.Streams`.

    Args:
        tokens: boundary, source, boundary, target, ..., without a boundary at the end; may be memory-mapped.
        batch_size: examples in a batch; the last of an epoch may be smaller.
        boundary_id: the boundary token.
        reverse_source: read the tokens of each source in reverse order (Sutskever et al. 2014,
            https://arxiv.org/abs/1409.3215).
        seed: draws the order anew in every epoch; none: always by the length of the source.
        max_targets: only the first examples, up to so many targets, one example at least; none: all.
    """

    tokens: NDArray[np.unsignedinteger] | Ids
    batch_size: int
    boundary_id: int
    reverse_source: bool = False
    seed: int | None = None
    max_targets: int | None = None
    _drawn: dict[int, list[Ids]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The batches of the epoch that was asked for last."""

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise UserError("the text holds no pair of a source and a target: give one with data.pairs")

    @cached_property
    def _bounds(self) -> Ids:
        """Where each example has its first boundary, its second, and where it ends: (examples, 3)."""
        pieces = range(0, len(self.tokens), _TOKENS_AT_ONCE)
        found = [
            start + np.flatnonzero(self.tokens[start : start + _TOKENS_AT_ONCE] == self.boundary_id) for start in pieces
        ]
        boundaries = np.concatenate([np.empty(0, np.int64), *found])
        if len(boundaries) % 2:
            raise UserError(
                f"the text has {len(boundaries)} documents, an odd number: it is no corpus of sources and targets"
            )
        starts, turns = boundaries[::2], boundaries[1::2]
        bounds = np.stack([starts, turns, np.append(starts, len(self.tokens))[1:]], axis=1)
        if self.max_targets is not None:
            num_kept = int(np.searchsorted(np.cumsum(bounds[:, 2] - bounds[:, 1]), self.max_targets, side="right"))
            bounds = bounds[: max(1, num_kept)]
        return bounds

    @property
    def num_examples(self) -> int:
        """Pairs of a source and a target."""
        return len(self._bounds)

    @property
    def num_targets(self) -> int:
        """Targets trained in one epoch: the tokens of all target texts, and a boundary for each."""
        return int((self._bounds[:, 2] - self._bounds[:, 1]).sum())

    @property
    def num_segments(self) -> int:
        """Batches of one epoch."""
        return -(-self.num_examples // self.batch_size)

    def source(self, example: int) -> Ids:
        """The tokens of a source in the order of the text, whatever the model is to read."""
        start, turn, _ = self._bounds[example]
        return self.tokens[start + 1 : turn].astype(np.int64)

    def target(self, example: int) -> Ids:
        """The tokens of a target, without boundaries."""
        _, turn, end = self._bounds[example]
        return self.tokens[turn + 1 : end].astype(np.int64)

    def segment(self, index: int) -> Segment:
        """The batch of this number, counted from 0 on through all epochs."""
        epoch, batch = divmod(index, self.num_segments)
        return self._batch(self.batches(epoch)[batch])

    def batches(self, epoch: int = 0) -> list[Ids]:
        """The numbers of the examples in each batch of an epoch."""
        if epoch not in self._drawn:
            self._drawn.clear()
            self._drawn[epoch] = self._draw(epoch)
        return self._drawn[epoch]

    def __iter__(self) -> Iterator[Segment]:
        """The first epoch."""
        return (self.segment(index) for index in range(self.num_segments))

    def _draw(self, epoch: int) -> list[Ids]:
        cuts = range(self.batch_size, self.num_examples, self.batch_size)
        lengths = self._bounds[:, 1] - self._bounds[:, 0]
        if self.seed is None:
            return np.split(np.argsort(lengths, kind="stable"), cuts)
        random = np.random.Generator(np.random.PCG64(derived_seed(self.seed, "pairs", epoch)))
        shuffled = random.permutation(self.num_examples)
        batches = np.split(shuffled[np.argsort(lengths[shuffled], kind="stable")], cuts)
        return [batches[place] for place in random.permutation(len(batches))]

    def _batch(self, examples: Ids) -> Segment:
        rows = [(self.source(example), self.target(example)) for example in examples]
        width = max(2 + len(source) + len(target) for source, target in rows)
        inputs = np.full((len(rows), width), int(self.boundary_id == 0), np.int64)
        targets = inputs.copy()
        weight = np.zeros(inputs.shape, np.float32)
        for row, (source, target) in enumerate(rows):
            read = source[::-1] if self.reverse_source else source
            whole = np.concatenate(([self.boundary_id], read, [self.boundary_id], target, [self.boundary_id]))
            inputs[row, : len(whole) - 1], targets[row, : len(whole) - 1] = whole[:-1], whole[1:]
            weight[row, 1 + len(source) : len(whole) - 1] = 1.0
        return Segment(
            tokens_BT=torch.from_numpy(inputs),
            targets_BT=torch.from_numpy(targets),
            weight_BT=torch.from_numpy(weight),
            reset_BT=None,
            num_targets=int(weight.sum()),
            starts_anew=True,
        )
