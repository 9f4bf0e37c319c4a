"""How many threads PyTorch uses: a setting of the whole process, lent for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Use this many threads, and give the process its own number back."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
