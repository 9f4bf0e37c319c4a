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

        is_misread = self._is_misread(x_BTI)
        if is_misread:
            p, x_BTI, state = self._padded(p, x_BTI, state)
        carried = (state["h"].unsqueeze(0), state["c"].unsqueeze(0))
        h_BTH, h, c = self.fused_scan(torch.lstm, p, x_BTI, carried)
        if is_misread:
            h_BTH, h, c = (padded[..., : self.hidden_size] for padded in (h_BTH, h, c))
        return h_BTH, {"h": h.squeeze(0), "c": c.squeeze(0)}

    def _is_misread(self, x_BTI: Tensor) -> bool:
        """Whether oneDNN's gradient in bfloat16 would be wrong.

        From 1,024 units on, where the wider of input and state is a multiple of 32, its kernel for AMX takes the
        product that gives their gradients gate by gate, and reads the matrix of the first gate for each of the four.
        What comes out is off by more than its own size: in 3.12, which PyTorch 2.13 brings, and in the source of 3.14.
        """
        import torch

        if x_BTI.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
            return False
        is_bfloat16 = torch.get_autocast_dtype("cpu") == torch.bfloat16
        return is_bfloat16 and self.hidden_size >= 1024 and max(self.hidden_size, x_BTI.shape[-1]) % 32 == 0

    def _padded(
        self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState
    ) -> tuple[Mapping[str, Tensor], Tensor, CellState]:
        """The same with eight more of units or inputs, the wider; their weights are zero, so that they stay zero."""
        from torch.nn.functional import pad

        units, inputs = (8, 0) if x_BTI.shape[-1] <= self.hidden_size else (0, 8)
        blocks = {name: tensor.unflatten(0, (self.num_gates, self.hidden_size)) for name, tensor in p.items()}
        sides = {"weight_ih": (0, inputs, 0, units), "weight_hh": (0, units, 0, units)}
        p = {name: pad(block, sides.get(name, (0, units))).flatten(0, 1) for name, block in blocks.items()}
        return p, pad(x_BTI, (0, inputs)), {name: pad(part, (0, units)) for name, part in state.items()}
