"""Settings of the whole process, lent for a while: threads, the smallest numbers, freed memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_USUAL_MMAP_THRESHOLD = 2**25
"""Bytes. By itself the C library moves its threshold from 2^17 up to this as large pieces are freed."""
_NEVER = 2**31 - 1
"""Bytes: more than nearly all pieces have, and the largest number that ``mallopt`` takes."""


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


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep what is freed for the next piece that is asked for, and give it back to the system at the end.

    An update frees all that it has computed and the next one asks for as much again. glibc hands large pieces back at
    once, and the system clears every page before it lends it anew, which can take as long as a quarter of the update.
    The process holds its peak meanwhile. With another C library nothing happens.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    mallopt, malloc_trim = getattr(libc, "mallopt", None), getattr(libc, "malloc_trim", None)
    if mallopt is None or malloc_trim is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _NEVER)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _USUAL_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2 * _USUAL_MMAP_THRESHOLD)
        malloc_trim(0)


@contextmanager
def as_in_training() -> Iterator[None]:
    """Both of these, as every training has them."""
    with denormals_flushed(), freed_memory_kept():
        yield
