"""Quasi-recurrent network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from elman.cells.base import Cell, CellState, FeedForwardConfig, Initial, Parameter, StatePart, Step
from elman.cells.primitives import concat, linear, split, split_sizes

if TYPE_CHECKING:
    from torch import Tensor


class QRNNConfig(FeedForwardConfig):
    """Settings of the quasi-recurrent network."""

    qrnn_window: PositiveInt = 2
    """Number of inputs k that gates and candidate are computed from, the newest and those before it."""
    qrnn_pooling: Literal["f", "fo", "ifo"] = "fo"
    """The gates: forget alone; forget and output; or input, forget and output, each on its own."""


class QRNN(Cell):
    """A network whose gates are convolutions over the input, and whose recurrence is a gated mean.

        z_t = tanh(W_z [x_{t-k+1} ... x_t] + b_z)
        f_t, o_t, i_t = sigmoid of the same with W_f, W_o, W_i
        c_t = f_t * c_{t-1} + (1 - f_t) * z_t                 pooling f and fo; i_t * z_t with ifo
        h_t = o_t * c_t                                       c_t with f

    The convolution sees no later input. Gates and candidate of all times are one matrix product; the linear recurrence
    that remains takes no matrix. Before a text stand inputs of zero. The order of the blocks is z, f, o, i.

    State: c, (B, H), and the last k - 1 inputs side by side, (B, (k - 1) I), the oldest first.
    Parameters: G H (k I + 1), with G = 2, 3 or 4 blocks for f, fo, ifo.
    Initialisation: W uniform within +-sqrt(3/(k I)), so that the sums have variance one; b zero.
    Paper: Bradbury et al. 2017, https://arxiv.org/abs/1611.01576.
    """

    Config = QRNNConfig
    config: QRNNConfig
    paper = "https://arxiv.org/abs/1611.01576"

    @property
    def _num_blocks(self) -> int:
        return 1 + len(self.config.qrnn_pooling)

    @property
    def _num_carried(self) -> int:
        return (self.config.qrnn_window - 1) * self.input_size

    def parameters(self) -> Mapping[str, Parameter]:
        size, width = self._num_blocks * self.hidden_size, self.config.qrnn_window * self.input_size
        return {
            "weight": Parameter((size, width), Initial("uniform", math.sqrt(3 / width), self._num_blocks)),
            "bias": Parameter((size,), Initial("zeros")),
        }

    def state(self) -> Mapping[str, StatePart]:
        carried = {"earlier_inputs": StatePart((self._num_carried,))} if self._num_carried else {}
        return {"c": StatePart((self.hidden_size,)), **carried}

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        carried: dict[str, Tensor] = {}
        if self._num_carried:
            x_BI = concat([state["earlier_inputs"], x_BI])
            carried["earlier_inputs"] = split_sizes(x_BI, (self.input_size, self._num_carried))[1]
        named = self._of_window(p, x_BI)
        c = named["forget_gate"] * state["c"] + named["input_gate"] * named["candidate"]
        h = named["output_gate"] * c if "output_gate" in named else c
        return Step(h, {"c": c, **carried}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        import torch

        from elman.scan.linear import linear_recurrence

        carried: dict[str, Tensor] = {}
        if self._num_carried:
            num_steps, window = x_BTI.shape[1], self.config.qrnn_window
            inputs = torch.cat([state["earlier_inputs"].unflatten(-1, (window - 1, -1)), x_BTI], dim=1)
            x_BTI = torch.cat([inputs[:, k : k + num_steps] for k in range(window)], dim=-1)
            carried["earlier_inputs"] = inputs[:, num_steps:].flatten(1)
        named = self._of_window(p, x_BTI)
        c_BTH, c = linear_recurrence(named["forget_gate"], named["input_gate"] * named["candidate"], state["c"])
        h_BTH = named["output_gate"] * c_BTH if "output_gate" in named else c_BTH
        return h_BTH, {"c": c, **carried}

    def _of_window(self, p: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        """Candidate and gates, of one time or of all."""
        candidate, forget_gate, *others = split(linear(x, p["weight"], p["bias"]), self._num_blocks)
        named = {"candidate": candidate.tanh(), "forget_gate": forget_gate.sigmoid()}
        named |= {name: gate.sigmoid() for name, gate in zip(("output_gate", "input_gate"), others, strict=False)}
        return {"input_gate": 1 - named["forget_gate"], **named}
