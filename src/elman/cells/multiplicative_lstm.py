"""Multiplicative long short-term memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from elman.cells.base import CellState, Initial, Parameter, Step
from elman.cells.lstm import LSTM, LSTMConfig
from elman.cells.primitives import linear

if TYPE_CHECKING:
    from torch import Tensor

    from elman.scan.loops import Given, Looped


class MultiplicativeLSTM(LSTM):
    """An LSTM with a recurrent matrix of its own for each input.

        m_t = (W_mx x_t) * (W_mh h_{t-1})
        i, f, g, o = split(W_ih x_t + W_hh m_t + b)
        c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g)
        h_t = sigmoid(o) * tanh(c_t)

    The way from h_{t-1} into the gates is W_hh diag(W_mx x_t) W_mh. An input that comes as a surprise can so take the
    state apart, which it could only shift in a sum.

    State: h and c, each (B, H).
    Parameters: 4 H (I + H + 1) + H (I + H), and 4 H more with two biases.
    Initialisation: W_mx uniform within +-sqrt(3/I), W_mh orthogonal, so that m has about the variance of h for inputs
    of variance one; the rest as in the LSTM.
    Paper: Krause et al. 2016, https://arxiv.org/abs/1609.07959.
    """

    Config = LSTMConfig
    paper = "https://arxiv.org/abs/1609.07959"

    def parameters(self) -> Mapping[str, Parameter]:
        size, width = self.hidden_size, self.input_size
        return {
            **super().parameters(),
            "weight_mx": Parameter((size, width), Initial("uniform", math.sqrt(3 / width))),
            "weight_mh": Parameter((size, size), Initial("orthogonal")),
        }

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        m = linear(x_BI, p["weight_mx"]) * linear(state["h"], p["weight_mh"])
        h, after, named = super().step(p, x_BI, {"h": m, "c": state["c"]})
        return Step(h, after, {"multiplied": m, **named})

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        from elman.scan.loops import scan_by_hand  # here, because it brings in torch

        return scan_by_hand(self, self.with_one_bias(p), x_BTI, state)

    def loop(self, given: Given) -> Looped:
        """The scan, without a gradient."""
        import torch

        from elman.scan.loops import LSTMSteps, transposed

        p, x_TBI, state = given.p, given.x_BTI.transpose(0, 1), given.state
        weight_HG, weight_HH = transposed(p["weight_hh"]), transposed(p["weight_mh"])
        factor_TBH = linear(x_TBI, p["weight_mx"])
        other_factor_TBH = torch.empty_like(factor_TBH)
        lstm, h = LSTMSteps(linear(x_TBI, p["weight_ih"], p["bias"]), state["c"]), state["h"]
        for time, factor_BH in enumerate(factor_TBH):
            m_BH = factor_BH * torch.mm(h, weight_HH, out=other_factor_TBH[time])
            lstm.gates_TBG[time].addmm_(m_BH, weight_HG)
            h = lstm.step(time)
        return lstm.looped((factor_TBH, other_factor_TBH, lstm.h_TBH))

    def loop_gradients(
        self, given: Given, kept: tuple[Tensor, ...], of_outputs_BTO: Tensor, of_state: CellState
    ) -> Given:
        """The gradients of the scan's arguments."""
        import torch

        from elman.scan.loops import Given, LSTMGradient, before_each_step, of_matrix

        p, x_TBI = given.p, given.x_BTI.transpose(0, 1)
        factor_TBH, other_factor_TBH, h_TBH, *of_lstm = kept
        lstm, of_m_TBH = LSTMGradient(*of_lstm), torch.empty_like(factor_TBH)
        of_h_BH, of_c_BH = of_state["h"], of_state["c"]
        for time in reversed(range(len(h_TBH))):
            of_sums_BG, of_c_BH = lstm.step(time, of_h_BH + of_outputs_BTO[:, time], of_c_BH)
            of_m_BH = torch.mm(of_sums_BG, p["weight_hh"], out=of_m_TBH[time])
            of_h_BH = (of_m_BH * factor_TBH[time]) @ p["weight_mh"]
        of_factor_TBH, of_other_factor_TBH = of_m_TBH * other_factor_TBH, of_m_TBH * factor_TBH
        of_p = {
            "weight_ih": of_matrix(lstm.of_sums_TBG, x_TBI),
            "weight_hh": of_matrix(lstm.of_sums_TBG, factor_TBH * other_factor_TBH),
            "bias": lstm.of_sums_TBG.sum((0, 1)),
            "weight_mx": of_matrix(of_factor_TBH, x_TBI),
            "weight_mh": of_matrix(of_other_factor_TBH, before_each_step(given.state["h"], h_TBH)),
        }
        of_x_TBI = lstm.of_sums_TBG @ p["weight_ih"] + of_factor_TBH @ p["weight_mx"]
        return Given(of_p, of_x_TBI.transpose(0, 1), {"h": of_h_BH, "c": of_c_BH})
