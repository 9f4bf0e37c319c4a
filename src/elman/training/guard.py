"""Numbers that go wrong: which updates are not to be trusted, and when to give up.

A batch whose loss or gradient is not finite, or whose loss is far above those before it, is skipped: the parameters
become those of a run that never saw it. Several in a row are no accident; then the training goes back to its last saved
state with a lower rate, and after a few such attempts it stops.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

_WINDOW = 128
"""Losses that a new one is held against."""
_MIN_DEVIATION = 0.01
"""Of the mean: losses that have come to rest do not make a spike of every small step."""
MAX_IN_A_ROW = 5
"""Skipped batches one after the other that are no accident."""
MAX_RETURNS = 3
"""Returns to the last saved state before the training stops."""
_FALL = 0.5
"""What the learning rate is multiplied by at every return."""


class Guard:
    """Remembers the last losses, and what was skipped.

    Args:
        max_deviations: standard deviations above the mean of the last 128 losses from which on a loss is a spike; none:
            only what is not finite is skipped.
    """

    def __init__(self, max_deviations: float | None) -> None:
        self._max_deviations = max_deviations
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self.num_in_a_row = 0
        self.num_returns = 0
        self.rate = 1.0
        """What the learning rate is to be multiplied by."""

    def objection(self, loss: float, grad_norm: float, *, is_fresh: bool = False) -> str:
        """Why an update is not to be trusted, or nothing where it is; it is counted in either way.

        Args:
            loss: in nats per token.
            grad_norm: before clipping.
            is_fresh: the batch was read from the initial state, or many are. Its loss is higher for that
                alone, the more so the more of the text the model knows by heart, and is held against nothing. Were it
                refused, the next batch would be read from the initial state as well, and so on.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.num_in_a_row += 1
            return f"a loss of {loss:g} nats and a gradient of norm {grad_norm:g}"
        if self._max_deviations is not None and len(self._losses) == _WINDOW and not is_fresh:
            mean = statistics.fmean(self._losses)
            deviation = max(statistics.pstdev(self._losses, mean), _MIN_DEVIATION * mean)
            if loss > mean + self._max_deviations * deviation:
                self.num_in_a_row += 1
                return f"a loss of {loss:.3f} nats, where the last {_WINDOW} were {mean:.3f} +- {deviation:.3f}"
        if not is_fresh:
            self._losses.append(loss)
        self.num_in_a_row = 0
        return ""

    @property
    def is_lost(self) -> bool:
        """Whether so many in a row were skipped that something else has to be done."""
        return self.num_in_a_row >= MAX_IN_A_ROW

    @property
    def gives_up(self) -> bool:
        """Whether returning has been tried often enough."""
        return self.num_returns >= MAX_RETURNS

    def returned_from(self, before: Guard) -> None:
        """Take over what must outlast a return to a saved state: how often there was one, and a lower rate.

        Where returning was tried often enough, the saved state is what is left, and no further trial.
        """
        self.num_returns, self.rate = before.num_returns, before.rate
        if not before.gives_up:
            self.num_returns, self.rate = before.num_returns + 1, before.rate * _FALL
        self.num_in_a_row = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "losses": list(self._losses),
            "num_in_a_row": self.num_in_a_row,
            "num_returns": self.num_returns,
            "rate": self.rate,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Put back what :meth:`to_dict` gave."""
        self._losses = deque(values["losses"], maxlen=_WINDOW)
        self.num_in_a_row, self.num_returns = values["num_in_a_row"], values["num_returns"]
        self.rate = values["rate"]
