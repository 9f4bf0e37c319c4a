"""The vanilla recurrent network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from elman.cells.base import CellState, GatedCell, GatedConfig, Step

if TYPE_CHECKING:
    from torch import Tensor


class ElmanConfig(GatedConfig):
    """Settings of the vanilla RNN."""

    nonlinearity: Literal["tanh", "relu"] = "tanh"
    """The function of the sum."""


class Elman(GatedCell):
    """The simple recurrent network.

        h_t = tanh(W_ih x_t + W_hh h_{t-1} + b)          or relu

    The gradient from h_t to h_{t-k} is a product of k matrices diag(tanh') W_hh: it shrinks or grows exponentially
    with k (Bengio, Simard and Frasconi 1994), which the gated cells avoid.

    State: h, (B, H).
    Parameters: H (I + H + 1), and H more with two biases.
    Initialisation: W_ih uniform within +-1/sqrt(H); W_hh orthogonal, all singular values one; b zero.
    Paper: Elman 1990, https://doi.org/10.1207/s15516709cog1402_1.
    """

    Config = ElmanConfig
    config: ElmanConfig
    paper = "https://doi.org/10.1207/s15516709cog1402_1"
    num_gates = 1

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        (of_input,), (of_state,) = self.input_and_recurrent(p, x_BI, state["h"])
        preactivation = of_input + of_state
        h = preactivation.tanh() if self.config.nonlinearity == "tanh" else preactivation.relu()
        return Step(h, {"h": h}, {"preactivation": preactivation})

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        import torch

        kernel = torch.rnn_tanh if self.config.nonlinearity == "tanh" else torch.rnn_relu
        h_BTH, h = self.fused_scan(kernel, p, x_BTI, state["h"].unsqueeze(0))
        return h_BTH, {"h": h.squeeze(0)}
