"""Minimal gated recurrent unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from elman.cells.base import Cell, CellState, ConvolvedConfig, Initial, Parameter, Step
from elman.cells.primitives import linear, split

if TYPE_CHECKING:
    from torch import Tensor


class MinGRU(Cell):
    """Minimal gated recurrent unit: a GRU whose gate and candidate do not look at the state.

        z = sigmoid(W_z x_t + b_z)
        n = W_n x_t + b_n
        h_t = (1 - z) * h_{t-1} + z * n

    Gate and candidate of all times are computed at once; the linear recurrence that remains takes no matrix. The
    order of the blocks is z, n. h is a weighted mean of the initial state and the candidates so far: it cannot grow
    beyond them, nor can any gradient through it, so that this plain form is safe in float32. The paper's form in
    logarithms, which needs positive candidates and a positive initial state, is not used.

    State: h, (B, H).
    Parameters: 2 H (I + 1).
    Initialisation: W uniform within +-3/sqrt(I), b zero. With z = 1/2 the variance of the mean is a third of that of
    independent candidates; this W makes up for it, and the layers of a stack start with equal variance.
    Paper: Feng et al. 2024, https://arxiv.org/abs/2410.01201.
    """

    Config = ConvolvedConfig
    paper = "https://arxiv.org/abs/2410.01201"

    def parameters(self) -> Mapping[str, Parameter]:
        size, width = 2 * self.hidden_size, self.input_size
        return {
            "weight_ih": Parameter((size, width), Initial("uniform", 3 / math.sqrt(width))),
            "bias": Parameter((size,), Initial("zeros")),
        }

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        update_gate, candidate = self._of_input(p, x_BI)
        h = (1 - update_gate) * state["h"] + update_gate * candidate
        return Step(h, {"h": h}, {"update_gate": update_gate, "candidate": candidate})

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        from elman.scan.linear import linear_recurrence  # here, because it brings in torch

        update_gate, candidate = self._of_input(p, x_BTI)
        h_BTH, h = linear_recurrence(1 - update_gate, update_gate * candidate, state["h"])
        return h_BTH, {"h": h}

    def _of_input(self, p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Update gate and candidate, of one time or of all."""
        xz, xn = split(linear(x, p["weight_ih"], p["bias"]), 2)
        return xz.sigmoid(), xn
