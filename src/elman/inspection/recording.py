"""The values of units over a text: all of them where they fit into memory, else evenly spaced blocks of the text.

The text is read as one stream, whatever its length. Its second half is for scoring what was chosen on the first.

Shape letters: K tokens that were kept, U units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import TextError, UserError, nearest
from elman.inspection.selectivity import BLOCK
from elman.inspection.watching import watch
from elman.models.contract import LanguageModel
from elman.models.state import State

Ids = NDArray[np.integer[Any]]
Values = NDArray[np.float32]

_MIN_BLOCKS = 16
_MAX_KEPT_NUMBERS = 1 << 25


@dataclass(frozen=True)
class Plan:
    """Which blocks of a text are kept."""

    num_tokens: int
    """Read: whole blocks."""
    kept_blocks: NDArray[np.int64]
    middle_block: int
    """The first of the second half."""

    @property
    def num_kept(self) -> int:
        """Tokens that are kept, K."""
        return len(self.kept_blocks) * BLOCK

    @property
    def middle(self) -> int:
        """The first token of the second half."""
        return self.middle_block * BLOCK

    @property
    def middle_row(self) -> int:
        """The first kept token of the second half, among the kept ones."""
        return int((self.kept_blocks < self.middle_block).sum()) * BLOCK

    @property
    def num_held_out_blocks(self) -> int:
        """Kept blocks of the second half."""
        return int((self.kept_blocks >= self.middle_block).sum())

    @property
    def positions(self) -> NDArray[np.int64]:
        """Where in the text the kept tokens stand, (K,)."""
        return (self.kept_blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()


def plan_for(num_tokens: int, num_units: int) -> Plan:
    """What to keep of a text, the memory for so many units being limited.

    Raises:
        TextError: the text is too short.
    """
    num_blocks = num_tokens // BLOCK
    if num_blocks < _MIN_BLOCKS:
        raise TextError(
            f"the text has {num_tokens:,} tokens: to see what units do along it takes {_MIN_BLOCKS * BLOCK:,} and more"
        )
    room = max(_MIN_BLOCKS, _MAX_KEPT_NUMBERS // (num_units * BLOCK))
    kept = np.unique(np.linspace(0, num_blocks - 1, min(num_blocks, room)).astype(np.int64))
    return Plan(num_blocks * BLOCK, kept, num_blocks // 2)


def read_in_words(given: int, read: int) -> str:
    """How many tokens of those that were given were read."""
    return f"{read:,} tokens" if read == given else f"{read:,} of {given:,} tokens, whole blocks of {BLOCK}"


@dataclass(frozen=True)
class Recording:
    """What was seen of a network while it read a text."""

    values: Mapping[str, Values]
    """Of each part, at the kept tokens: (K, U)."""
    state: State
    """Before the second half."""


def record(network: LanguageModel, tokens: Ids, parts: Sequence[str], plan: Plan) -> Recording:
    """Read the tokens of a plan, and one more that is only predicted."""
    kept: dict[str, list[Values]] = {part: [] for part in parts}
    state, blocks = network.initial_state(1), set(plan.kept_blocks.tolist())
    for index, piece in enumerate(watch(network, tokens[: plan.num_tokens + 1], parts, tokens_at_once=BLOCK)):
        if index in blocks:
            for part, values in kept.items():
                values.append(piece.values[part].float().cpu().numpy())
        if index == plan.middle_block - 1:
            state = piece.state
    return Recording({part: np.concatenate(values) for part, values in kept.items()}, state)


def unit_of(specification: str, sizes: Mapping[str, int]) -> tuple[str, int]:
    """Part and number of a unit that a person names by ``PART:NUMBER``.

    Raises:
        UserError: there is no such unit.
    """
    part, _, number = specification.rpartition(":")
    if part not in sizes:
        raise UserError(
            f"{specification[:100]!r} names no unit: this model has no {part[:100]!r}"
            f"{nearest(part[:100], sizes)}; give PART:NUMBER, such as {next(iter(sizes))}:0"
        )
    if not re.fullmatch("[0-9]{1,9}", number) or int(number) >= sizes[part]:
        raise UserError(f"{specification[:100]!r} names no unit: {part} has the units 0 to {sizes[part] - 1}")
    return part, int(number)
