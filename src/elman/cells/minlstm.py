"""Minimal long short-term memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from elman.cells.base import Cell, CellState, ConvolvedConfig, Initial, Parameter, Step
from elman.cells.primitives import linear, softplus, split

if TYPE_CHECKING:
    from torch import Tensor


class MinLSTM(Cell):
    """Minimal long short-term memory: two gates that do not look at the state, and sum to one.

        f = sigmoid(W_f x_t + b_f)
        i = sigmoid(W_i x_t + b_i)
        n = W_n x_t + b_n
        h_t = f / (f + i) * h_{t-1} + i / (f + i) * n

    Gates and candidate of all times are computed at once; the linear recurrence that remains takes no matrix. The
    order of the blocks is f, i, n. h is a weighted mean of the initial state and the candidates so far, which cannot
    grow beyond them, so that the plain form is safe; the paper's form in logarithms is not used. Where both gates
    close, f / (f + i) would be 0 / 0: it is computed as sigmoid(log f - log i), which is the same number.

    State: h, (B, H).
    Parameters: 3 H (I + 1).
    Initialisation: W uniform within +-3/sqrt(I), b zero. With equal gates the variance of the mean is a third of that
    of independent candidates; this W makes up for it, and the layers of a stack start with equal variance.
    Paper: Feng et al. 2024, https://arxiv.org/abs/2410.01201.
    """

    Config = ConvolvedConfig
    paper = "https://arxiv.org/abs/2410.01201"

    def parameters(self) -> Mapping[str, Parameter]:
        size, width = 3 * self.hidden_size, self.input_size
        return {
            "weight_ih": Parameter((size, width), Initial("uniform", 3 / math.sqrt(width))),
            "bias": Parameter((size,), Initial("zeros")),
        }

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        forget_gate, candidate = self._of_input(p, x_BI)
        input_gate = 1 - forget_gate
        h = forget_gate * state["h"] + input_gate * candidate
        named = {"forget_gate": forget_gate, "input_gate": input_gate, "candidate": candidate}
        return Step(h, {"h": h}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        from elman.scan.linear import linear_recurrence  # here, because it brings in torch

        forget_gate, candidate = self._of_input(p, x_BTI)
        h_BTH, h = linear_recurrence(forget_gate, (1 - forget_gate) * candidate, state["h"])
        return h_BTH, {"h": h}

    def _of_input(self, p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """The forget gate's share of both, and the candidate; of one time or of all."""
        xf, xi, xn = split(linear(x, p["weight_ih"], p["bias"]), 3)
        return (softplus(-xi) - softplus(-xf)).sigmoid(), xn  # softplus(-x) = -log sigmoid(x)
