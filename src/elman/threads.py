"""How PyTorch's threads work: settings of the whole process, lent for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


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


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Take numbers below the smallest normal one (float32: 1.2e-38) for zero, and let the process go on as it did.

    A processor computes with such denormal numbers many times more slowly, and a gradient that vanishes through time
    ends in them. The setting is the calling thread's; threads that PyTorch starts inherit it, those it has already
    started keep theirs. Where a processor has no such mode, nothing happens.
    """
    before = bool(torch.tensor(_SMALLEST_NORMAL) / 2 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
