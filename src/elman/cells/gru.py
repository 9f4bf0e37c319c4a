"""Gated recurrent unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elman.cells.base import CellState, GatedCell, GatedConfig, Step
from elman.cells.primitives import linear

if TYPE_CHECKING:
    from torch import Tensor

    from elman.scan.loops import Given, Looped


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
        if self.is_looped(x_BTI):
            from elman.scan.loops import scan_by_hand  # here, because it brings in torch

            return scan_by_hand(self, p, x_BTI, state)
        h_BTH, h = self.fused_scan(torch.gru, p, x_BTI, state["h"].unsqueeze(0))
        return h_BTH, {"h": h.squeeze(0)}

    def loop(self, given: Given) -> Looped:
        """The scan, without a gradient."""
        import torch

        from elman.scan.loops import Looped, transposed

        p, x_BTI, state = given
        weight_HG, bias_G, h = transposed(p["weight_hh"]), p.get("bias_hh"), state["h"]
        of_gates, of_candidate = slice(2 * self.hidden_size), slice(2 * self.hidden_size, None)
        # The sums; each step turns its own into the gates r, z and the candidate n, in place.
        named_TBG = linear(x_BTI.transpose(0, 1), p["weight_ih"], p["bias"] if bias_G is None else p["bias_ih"])
        of_state_BG = torch.empty_like(named_TBG[0])
        h_TBH, product_TBH = (h.new_empty(len(named_TBG), *h.shape) for _ in range(2))
        for time, named_BG in enumerate(named_TBG):
            torch.mm(h, weight_HG, out=of_state_BG)
            if bias_G is not None:
                of_state_BG += bias_G
            r, z = named_BG[:, of_gates].add_(of_state_BG[:, of_gates]).sigmoid_().chunk(2, dim=-1)
            product_BH = product_TBH[time].copy_(of_state_BG[:, of_candidate])
            n = named_BG[:, of_candidate].addcmul_(r, product_BH).tanh_()
            h = torch.lerp(n, h, z, out=h_TBH[time])
        return Looped(h_TBH.transpose(0, 1), {"h": h.clone()}, (named_TBG, product_TBH, h_TBH))

    def loop_gradients(
        self, given: Given, kept: tuple[Tensor, ...], of_outputs_BTO: Tensor, of_state: CellState
    ) -> Given:
        """The gradients of the scan's arguments."""
        import torch

        from elman.scan.loops import Given, before_each_step, of_matrix

        p, x_TBI = given.p, given.x_BTI.transpose(0, 1)
        named_TBG, product_TBH, h_TBH = kept
        before_TBH, of_h_BH = before_each_step(given.state["h"], h_TBH), of_state["h"]
        # Of the sums inside r and z, and in the place of n of the product that r multiplies; and of the sum inside n.
        of_TBG, of_n_TBH = torch.empty_like(named_TBG), torch.empty_like(h_TBH)
        for time in reversed(range(len(h_TBH))):
            r, z, n = named_TBG[time].chunk(3, dim=-1)
            of_r, of_z, of_product = of_TBG[time].chunk(3, dim=-1)
            of_h_BH = of_h_BH + of_outputs_BTO[:, time]
            passed_BH = of_h_BH * z
            of_n_BH = torch.mul(of_h_BH - passed_BH, 1 - n.square(), out=of_n_TBH[time])
            torch.mul((before_TBH[time] - n).mul_(passed_BH), 1 - z, out=of_z)
            torch.mul(of_n_BH, r, out=of_product)
            torch.mul(of_product * product_TBH[time], 1 - r, out=of_r)
            of_h_BH = passed_BH.addmm_(of_TBG[time], p["weight_hh"])
        of_p = {"weight_hh": of_matrix(of_TBG, before_TBH)}
        if "bias_hh" in p:
            of_p["bias_hh"] = of_TBG.sum((0, 1))
        of_TBG[..., 2 * self.hidden_size :] = of_n_TBH  # now of the sums alone
        of_p["weight_ih"] = of_matrix(of_TBG, x_TBI)
        of_p["bias" if "bias" in p else "bias_ih"] = of_TBG.sum((0, 1))
        return Given(of_p, (of_TBG @ p["weight_ih"]).transpose(0, 1), {"h": of_h_BH})
