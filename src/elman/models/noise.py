"""The random masks of dropout, as a value that is handed in.

A model without noise is deterministic; there is no training mode to forget. Masks are drawn from a generator of their
own, keyed by seed, update and place in the model, for all rows of the global batch; a process takes its own rows.
So the same masks come whether a batch is computed at once, in pieces, by several processes, or again after a resume.

Shape letters: B rows, T time, I width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def derived_seed(*key: int | str) -> int:
    """A 63-bit seed from a key, equal in every process and unrelated between keys."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Noise:
    """The key of one update's masks.

    Args:
        seed: of the run.
        update: number of the optimiser update.
        num_rows: rows of the global batch.
        first_row: the global number of the first row at hand.
        num_steps: of the whole segment, where it is read in pieces; none: what is read at once is the whole.
        first_step: the number of the first step at hand.
        masks: those drawn for the whole segment, by place.
        sparse_rows: whoever takes the gradient can do with one of the embedding that holds the rows read alone.
        num_skipped: batches skipped at this update. Masks stay what they are; what stands for the whole vocabulary is
            drawn anew, because it may be why the loss was no longer believed.
    """

    seed: int
    update: int
    num_rows: int
    first_row: int = 0
    num_steps: int | None = None
    first_step: int = 0
    masks: dict[str, Tensor] = field(default_factory=dict, compare=False)
    sparse_rows: bool = False
    num_skipped: int = 0

    def of_rows(self, first: int) -> Noise:
        """For rows further on: those at hand from this one on."""
        return replace(self, first_row=self.first_row + first)

    def dropout(self, x_BTI: Tensor, share: float, place: str, *, locked: bool = False) -> Tensor:
        """Zero a share of the units and scale the rest by 1 / (1 - share) (Srivastava et al. 2014).

        Papers: https://jmlr.org/papers/v15/srivastava14a.html; with ``locked``, one mask of a row for all times of the
        segment: Gal and Ghahramani 2016, https://arxiv.org/abs/1512.05287 (variational dropout).
        """
        if share == 0.0:
            return x_BTI
        if locked:
            dropped = self.uniform((len(x_BTI), 1, *x_BTI.shape[2:]), place, x_BTI.device) < share
        else:
            dropped = self.chosen(x_BTI.shape, share, place, x_BTI.device)
        return x_BTI * dropped.logical_not().to(x_BTI.dtype).div_(1.0 - share)

    def chosen(self, shape: Sequence[int], share: float, place: str, device: torch.device) -> Tensor:
        """True at a share of all places, anew for each row and time, the first two dimensions of ``shape``."""
        if self.num_steps is None:
            return self._chosen(shape, share, place, device)
        if place not in self.masks:
            self.masks[place] = self._chosen((shape[0], self.num_steps, *shape[2:]), share, place, device)
        return self.masks[place][:, self.first_step : self.first_step + shape[1]]

    def _chosen(self, shape: Sequence[int], share: float, place: str, device: torch.device) -> Tensor:
        """The same for a whole segment.

        16 random bits decide each place; drawn four times 16 at once, they cost a quarter of the 32 of :meth:`uniform`.
        The share is thereby rounded down to a multiple of 1 / 65536.
        """
        size = math.prod((self.num_rows, *shape[1:]))
        words = torch.zeros((size + 3) // 4, dtype=torch.int64, device=device)
        words.random_(-(2**63), None, generator=self._generator(place, device))
        drawn = words.view(torch.int16)[:size].view(self.num_rows, *shape[1:])
        return drawn[self.first_row : self.first_row + shape[0]] < math.floor(share * 2**16) - 2**15

    def drop_words(self, x_BTI: Tensor, tokens_BT: Tensor, vocab_size: int, share: float) -> Tensor:
        """Zero the embeddings of a share of the vocabulary, wherever they stand, and scale the rest.

        Paper: Gal and Ghahramani 2016, https://arxiv.org/abs/1512.05287; here a word is dropped from all rows alike, as
        in Merity et al. 2018, https://arxiv.org/abs/1708.02182.
        """
        if share == 0.0:
            return x_BTI
        kept_V = self.common((vocab_size,), "words", x_BTI.device) >= share
        return x_BTI * (kept_V[tokens_BT].to(x_BTI.dtype) / (1.0 - share)).unsqueeze(-1)

    def drop_weights(self, matrix: Tensor, share: float, place: str) -> Tensor:
        """Zero a share of the elements of a matrix, and scale the rest; one mask for all rows and times of the batch.

        Papers: Wan et al. 2013, https://proceedings.mlr.press/v28/wan13.html (DropConnect); on the recurrent matrices:
        Merity et al. 2018, https://arxiv.org/abs/1708.02182.
        """
        if share == 0.0:
            return matrix
        kept = self.common(matrix.shape, place, matrix.device) >= share
        return matrix * (kept.to(matrix.dtype) / (1.0 - share))

    def uniform(self, shape: Sequence[int], place: str, device: torch.device) -> Tensor:
        """Numbers in [0, 1) for the rows at hand, the first dimension of ``shape``."""
        drawn = self.common((self.num_rows, *shape[1:]), place, device)
        return drawn[self.first_row : self.first_row + shape[0]]

    def common(self, shape: Sequence[int], place: str, device: torch.device) -> Tensor:
        """Numbers in [0, 1) that all rows share."""
        return torch.rand(tuple(shape), generator=self._generator(place, device), device=device, dtype=torch.float32)

    def _generator(self, place: str, device: torch.device) -> torch.Generator:
        return torch.Generator(device=device).manual_seed(derived_seed(self.seed, self.update, place))
