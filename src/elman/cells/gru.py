"""Gated recurrent unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elman.cells.base import CellState, GatedCell, GatedConfig, Step
from elman.cells.primitives import linear

if TYPE_CHECKING:
    from torch import Tensor


class GRUConfig(GatedConfig):
    """Settings of the GRU."""

    reset_after: bool = True
    """Apply the reset gate after the recurrent product, as `torch.nn.GRU`; false: before it, as Cho et al. 2014."""


class GRU(GatedCell):
    """Gated recurrent unit.

        r = sigmoid(W_r x_t + U_r h_{t-1} + b_r)
        z = sigmoid(W_z x_t + U_z h_{t-1} + b_z)
        n = tanh(W_n x_t + r * (U_n h_{t-1}) + b_n)      reset after the product (the default)
        n = tanh(W_n x_t + U_n (r * h_{t-1}) + b_n)      reset before it
        h_t = (1 - z) * n + z * h_{t-1}

    The default is the form of ``torch.nn.GRU`` and of cuDNN, which keeps the recurrent product one matrix; the form
    of the paper is ``reset_after = false``. The order of the blocks is r, z, n. Where z is near one the old state
    passes unchanged, and so does its gradient. With two biases, the second stands inside the recurrent product:
    r * (U_n h_{t-1} + b_hn).

    State: h, (B, H).
    Parameters: 3 H (I + H + 1), and 3 H more with two biases.
    Initialisation: W uniform within +-1/sqrt(H); each block of U orthogonal; b zero.
    Paper: Cho et al. 2014, https://arxiv.org/abs/1406.1078 (there z and 1 - z change places).
    """

    Config = GRUConfig
    config: GRUConfig
    paper = "https://arxiv.org/abs/1406.1078"
    num_gates = 3

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        (xr, xz, xn), (hr, hz, hn) = self.input_and_recurrent(p, x_BI, state["h"])
        reset_gate = (xr + hr).sigmoid()
        update_gate = (xz + hz).sigmoid()
        if self.config.reset_after:
            candidate = (xn + reset_gate * hn).tanh()
        else:
            weight_n, bias_n = p["weight_hh"][-self.hidden_size :], p.get("bias_hh")
            bias_n = None if bias_n is None else bias_n[-self.hidden_size :]
            candidate = (xn + linear(reset_gate * state["h"], weight_n, bias_n)).tanh()
        h = (1 - update_gate) * candidate + update_gate * state["h"]
        named = {"reset_gate": reset_gate, "update_gate": update_gate, "candidate": candidate}
        return Step(h, {"h": h}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        import torch

        if not self.config.reset_after:
            return self.readable_scan(p, x_BTI, state)
        h_BTH, h = self.fused_scan(torch.gru, p, x_BTI, state["h"].unsqueeze(0))
        return h_BTH, {"h": h.squeeze(0)}
