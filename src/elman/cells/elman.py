"""The vanilla recurrent network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from elman.cells.base import CellState, GatedCell, GatedConfig, Step
from elman.cells.primitives import linear

if TYPE_CHECKING:
    from torch import Tensor

    from elman.scan.loops import Given, Looped


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

        if self.is_looped(x_BTI):
            from elman.scan.loops import scan_by_hand  # here, because it brings in torch

            return scan_by_hand(self, self.with_one_bias(p), x_BTI, state)
        kernel = torch.rnn_tanh if self.config.nonlinearity == "tanh" else torch.rnn_relu
        h_BTH, h = self.fused_scan(kernel, p, x_BTI, state["h"].unsqueeze(0))
        return h_BTH, {"h": h.squeeze(0)}

    def loop(self, given: Given) -> Looped:
        """The scan, without a gradient."""
        from elman.scan.loops import Looped, transposed

        p, x_BTI, state = given
        weight_HH, h = transposed(p["weight_hh"]), state["h"]
        h_TBH = linear(x_BTI.transpose(0, 1), p["weight_ih"], p["bias"])  # the sums, each of which becomes its h
        for sums_BH in h_TBH:
            sums_BH.addmm_(h, weight_HH)
            h = sums_BH.tanh_() if self.config.nonlinearity == "tanh" else sums_BH.relu_()
        return Looped(h_TBH.transpose(0, 1), {"h": h.clone()}, (h_TBH,))

    def loop_gradients(
        self, given: Given, kept: tuple[Tensor, ...], of_outputs_BTO: Tensor, of_state: CellState
    ) -> Given:
        """The gradients of the scan's arguments."""
        import torch

        from elman.scan.loops import Given, before_each_step, of_matrix

        p, x_TBI, (h_TBH,) = given.p, given.x_BTI.transpose(0, 1), kept
        of_sums_TBH, of_h_BH = torch.empty_like(h_TBH), of_state["h"]
        for time in reversed(range(len(h_TBH))):
            of_h_BH, h_BH = of_h_BH + of_outputs_BTO[:, time], h_TBH[time]
            if self.config.nonlinearity == "tanh":
                torch.addcmul(of_h_BH, of_h_BH * h_BH, h_BH, value=-1, out=of_sums_TBH[time])
            else:
                torch.mul(of_h_BH, h_BH > 0, out=of_sums_TBH[time])
            of_h_BH = of_sums_TBH[time] @ p["weight_hh"]
        of_p = {
            "weight_ih": of_matrix(of_sums_TBH, x_TBI),
            "weight_hh": of_matrix(of_sums_TBH, before_each_step(given.state["h"], h_TBH)),
            "bias": of_sums_TBH.sum((0, 1)),
        }
        return Given(of_p, (of_sums_TBH @ p["weight_ih"]).transpose(0, 1), {"h": of_h_BH})
