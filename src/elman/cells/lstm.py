"""Long short-term memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elman.cells.base import CellState, GatedCell, GatedConfig, StatePart, Step

if TYPE_CHECKING:
    from torch import Tensor


class LSTMConfig(GatedConfig):
    """Settings of the LSTM."""

    forget_bias: float | None = 1.0
    """The forget gate's bias at the start, both vectors together; none: drawn like the others."""


class LSTM(GatedCell):
    """Long short-term memory with a forget gate.

        i, f, g, o = split(W_ih x_t + W_hh h_{t-1} + b)
        c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g)
        h_t = sigmoid(o) * tanh(c_t)

    The order of the gates is that of ``torch.nn.LSTM``. The path through c is additive: where f is open, the
    gradient of c_t with respect to c_{t-1} along it is one, whatever the matrices are.

    State: h and c, each (B, H).
    Parameters: 4 H (I + H + 1), and 4 H more with two biases.
    Initialisation: W_ih uniform within +-1/sqrt(H); each gate's block of W_hh orthogonal; b zero, the forget gate's
    1 (Gers et al. 2000), so that the memory is open at the start.
    Paper: Hochreiter and Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735; the forget gate is from
    Gers, Schmidhuber and Cummins 2000, https://doi.org/10.1162/089976600300015015.
    """

    Config = LSTMConfig
    config: LSTMConfig
    paper = "https://doi.org/10.1162/089976600300015015"
    through_tanh = ("c",)
    num_gates = 4

    def gate_biases(self) -> Mapping[int, float]:
        return {} if self.config.forget_bias is None else {1: self.config.forget_bias}

    def state(self) -> Mapping[str, StatePart]:
        return {"h": StatePart((self.hidden_size,)), "c": StatePart((self.hidden_size,))}

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        (xi, xf, xg, xo), (hi, hf, hg, ho) = self.input_and_recurrent(p, x_BI, state["h"])
        input_gate = (xi + hi).sigmoid()
        forget_gate = (xf + hf).sigmoid()
        candidate = (xg + hg).tanh()
        output_gate = (xo + ho).sigmoid()
        c = forget_gate * state["c"] + input_gate * candidate
        h = output_gate * c.tanh()
        named = {
            "input_gate": input_gate,
            "forget_gate": forget_gate,
            "candidate": candidate,
            "output_gate": output_gate,
        }
        return Step(h, {"h": h, "c": c}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        import torch

        carried = (state["h"].unsqueeze(0), state["c"].unsqueeze(0))
        h_BTH, h, c = self.fused_scan(torch.lstm, p, x_BTI, carried)
        return h_BTH, {"h": h.squeeze(0), "c": c.squeeze(0)}
