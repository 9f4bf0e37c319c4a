"""The random masks of dropout, as a value that is handed in.

A model without noise is deterministic; there is no training mode to forget. Masks are drawn from a generator of their
own, keyed by seed, update and place in the model, for all rows of the global batch; a process takes its own rows.
So the same masks come whether a batch is computed at once, in pieces, by several processes, or again after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    seed: int
    update: int
    num_rows: int
    first_row: int = 0

    def dropout(self, x_BTI: Tensor, share: float, place: str) -> Tensor:
        """Zero a share of the units and scale the rest by 1 / (1 - share) (Srivastava et al. 2014).

        Paper: https://jmlr.org/papers/v15/srivastava14a.html
        """
        if share == 0.0:
            return x_BTI
        kept = self.uniform(x_BTI.shape, place, x_BTI.device) >= share
        return x_BTI * (kept.to(x_BTI.dtype) / (1.0 - share))

    def uniform(self, shape: Sequence[int], place: str, device: torch.device) -> Tensor:
        """Numbers in [0, 1) for the rows at hand, the first dimension of ``shape``."""
        generator = torch.Generator(device=device).manual_seed(derived_seed(self.seed, self.update, place))
        drawn = torch.rand((self.num_rows, *shape[1:]), generator=generator, device=device, dtype=torch.float32)
        return drawn[self.first_row : self.first_row + shape[0]]
