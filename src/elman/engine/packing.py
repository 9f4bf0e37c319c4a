"""How weights lie in memory: as a generated step reads them, from front to back.

A packed matrix of O rows and I columns stands in blocks of 64 rows, the last one filled up to a multiple of sixteen:
for each column, the numbers of the block's rows side by side. In eight bits pairs of columns stand together, for each
row of the block the two beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from elman.engine.graph import Array, Graph, Shape, size_of, values_of

LANES, BLOCK = 16, 64
"""Numbers that are computed together, and rows of a block."""
MAX_CODE = 127

Form: TypeAlias = Literal["plain", "padded", "matrix", "bytes"]
"""As it is; filled up to whole blocks; packed; packed in eight bits, with a scale for each row."""


class Packed(NamedTuple):
    """What is kept of a node that depends on parameters alone, and where."""

    node: int
    form: Form
    at: int
    scales: int = 0


def round_up(size: int, to: int = LANES) -> int:
    """The next multiple."""
    return -(-size // to) * to


def packed_size(shape: Shape, in_pairs: bool = False) -> int:
    """The numbers that packed matrices take: (..., O, I)."""
    columns = round_up(shape[-1], 2) if in_pairs else shape[-1]
    return size_of(shape[:-2]) * round_up(shape[-2]) * columns


def pack(
    graph: Graph, wanted: Sequence[Packed], num_numbers: int, num_codes: int, parameters: Mapping[str, Array]
) -> tuple[Array, Array]:
    """The weights of a model as its generated step reads them: float32 numbers, and eight-bit codes."""
    numbers, codes = _aligned(num_numbers, np.float32), _aligned(num_codes, np.int8)
    with np.errstate(all="ignore"):  # weights that are no numbers give logits that are none
        values = values_of(graph, parameters, {}, [packed.node for packed in wanted])
    for (_, form, at, scales), found in zip(wanted, values, strict=True):
        value = np.asarray(found, dtype=np.float32)
        if form in ("plain", "padded"):
            numbers[at : at + value.size] = value.ravel()
            continue
        size = round_up(value.shape[-2], BLOCK)
        for number, matrix in enumerate(value.reshape(-1, *value.shape[-2:])):
            if form == "matrix":
                pack_matrix(matrix, numbers[at + number * packed_size(matrix.shape) :], 1)
            else:
                most = np.abs(matrix).max(axis=1, initial=0.0)
                scale = np.where(most > 0, most / MAX_CODE, 1.0).astype(np.float32)
                start = scales + number * size
                numbers[start : start + len(scale)] = scale
                rounded = np.rint(matrix / scale[:, None])
                pack_matrix(rounded, codes[at + number * packed_size(matrix.shape, in_pairs=True) :], 2)
    return numbers, codes


def pack_matrix(matrix_OI: Array, into: Array, per_step: int) -> None:
    """Put a matrix into its packed form, with one column at a time or with pairs of them."""
    num_rows, num_columns = matrix_OI.shape
    steps = -(-num_columns // per_step)
    whole = num_rows // BLOCK if num_columns == steps * per_step else 0
    at = whole * BLOCK * steps * per_step
    if whole:
        blocks = matrix_OI[: whole * BLOCK].reshape(whole, BLOCK, steps, per_step)
        into[:at].reshape(whole, steps, BLOCK, per_step)[:] = blocks.transpose(0, 2, 1, 3)
    for first in range(whole * BLOCK, num_rows, BLOCK):
        block = matrix_OI[first : first + BLOCK]
        height = round_up(len(block))
        filled = np.zeros((height, steps * per_step), dtype=into.dtype)
        filled[: len(block), :num_columns] = block
        size = filled.size
        into[at : at + size] = filled.reshape(height, steps, per_step).transpose(1, 0, 2).ravel()
        at += size


def _aligned(size: int, dtype: type) -> Array:
    """Zeros that start at a multiple of 64 bytes, so that no vector of them crosses a line of the cache."""
    itemsize = np.dtype(dtype).itemsize
    memory = np.zeros(size * itemsize + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size * itemsize].view(dtype)
