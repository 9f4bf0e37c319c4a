"""The scalar memory of the xLSTM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from elman.cells.base import Cell, CellState, HeadsConfig, Initial, Parameter, StatePart, Step
from elman.cells.primitives import concat, heads, layer_norm, linear, log_sigmoid, matvec, maximum, merge_heads, split

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NOTHING_YET = -1e4
"""m before the first step: any gate is more than its exponential, so that the first step is all that there is."""


class SLSTMConfig(HeadsConfig):
    """Settings of the sLSTM."""

    exponential_gate: Literal["input", "both"] = "input"
    """The input gate alone is an exponential, or the forget gate as well; if not, that is a sigmoid."""


class SLSTM(Cell):
    """Long short-term memory with an exponential input gate, whose memory is a weighted mean.

        i, f, z, o = split(W_ih x_t + R h_{t-1} + b)                R is block-diagonal: each head sees its own h
        m_t = max(log F + m_{t-1}, i)                               F = sigmoid(f), or exp(f)
        i' = exp(i - m_t),   f' = exp(log F + m_{t-1} - m_t)
        c_t = f' * c_{t-1} + i' * tanh(z)
        n_t = f' * n_{t-1} + i'
        h_t = sigmoid(o) * c_t / n_t
        y_t = scale * norm(h_t)                                     layer normalisation in each head

    m keeps the exponentials from overflowing and cancels in c / n: h is that of the equations without it. c / n is a
    mean of all candidates so far, so a new one with a large enough input gate replaces what is stored, which the
    LSTM's sigmoid cannot. m starts at -10,000, in place of minus infinity: what is before the first step counts for
    nothing, c / n after it is its candidate, and n is never less than one.

    State: h, c, n and m, each (B, H).
    Parameters: 4 H (I + H / N + 1) + H.
    Initialisation: W_ih uniform within +-1/sqrt(H), each block of R orthogonal, b zero but for the forget gate's,
    which falls in each head evenly from 5 to -7, the power law of the paper's code in the middle of a stack; scale
    1/sqrt(H), which starts a residual branch no larger than an embedding.
    Paper: Beck et al. 2024, https://arxiv.org/abs/2405.04517.
    """

    Config = SLSTMConfig
    config: SLSTMConfig
    paper = "https://arxiv.org/abs/2405.04517"

    def parameters(self) -> Mapping[str, Parameter]:
        H, N = self.hidden_size, self.config.num_heads
        return {
            "weight_ih": Parameter((4 * H, self.input_size), Initial("uniform", 1 / math.sqrt(H), parts=4)),
            "weight_hh": Parameter((4 * N, H // N, H // N), Initial("own", draw_own=_orthogonal_blocks)),
            "bias": Parameter((4 * H,), Initial("own", draw_own=self._draw_bias)),
            "norm_weight": Parameter((H,), Initial("ones", constants={0: 1 / math.sqrt(H)})),
        }

    def _draw_bias(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        import torch

        bias_4H, H, N = torch.zeros(shape, dtype=dtype), self.hidden_size, self.config.num_heads
        bias_4H[H : 2 * H] = torch.linspace(5, -7, H // N, dtype=dtype).repeat(N)
        return bias_4H

    def state(self) -> Mapping[str, StatePart]:
        size = (self.hidden_size,)
        return {"h": StatePart(size), "c": StatePart(size), "n": StatePart(size), "m": StatePart(size, _NOTHING_YET)}

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        num_heads = self.config.num_heads
        # The blocks of R stand gate by gate, head by head.
        of_state = merge_heads(matvec(p["weight_hh"], heads(concat([state["h"]] * 4), 4 * num_heads)))
        i, f, z, o = split(linear(x_BI, p["weight_ih"], p["bias"]) + of_state, 4)
        kept = (f if self._forgets_exponentially else log_sigmoid(f)) + state["m"]
        m = maximum(kept, i)
        input_gate, forget_gate = (i - m).exp(), (kept - m).exp()
        candidate, output_gate = z.tanh(), o.sigmoid()
        c = forget_gate * state["c"] + input_gate * candidate
        n = forget_gate * state["n"] + input_gate
        h = output_gate * c / n
        named = {
            "input_gate": input_gate,
            "forget_gate": forget_gate,
            "candidate": candidate,
            "output_gate": output_gate,
        }
        return Step(self._normed(p, h), {"h": h, "c": c, "n": n, "m": m}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        from elman.scan.heads import slstm_scan  # here, because it brings in torch

        num_heads = self.config.num_heads
        # To the scan, heads are matrices of a batch, and the gates of a head lie side by side.
        x_BTGND = linear(x_BTI, p["weight_ih"], p["bias"]).unflatten(-1, (4, num_heads, -1))
        x_NTBG = x_BTGND.permute(3, 1, 0, 2, 4).flatten(3)
        weight_NGD = p["weight_hh"].unflatten(0, (4, num_heads)).transpose(0, 1).flatten(1, 2)
        carried = tuple(heads(state[name], num_heads).transpose(0, 1) for name in ("h", "c", "n", "m"))
        h_NTBD, *after = slstm_scan(x_NTBG, weight_NGD, carried, self._forgets_exponentially)
        last = (merge_heads(part.transpose(0, 1)) for part in (h_NTBD[:, -1], *after))
        h_BTH = merge_heads(h_NTBD.permute(2, 1, 0, 3))
        return self._normed(p, h_BTH), dict(zip(("h", "c", "n", "m"), last, strict=True))

    @property
    def _forgets_exponentially(self) -> bool:
        return self.config.exponential_gate == "both"

    def _normed(self, p: Mapping[str, Tensor], h: Tensor) -> Tensor:
        return merge_heads(layer_norm(heads(h, self.config.num_heads))) * p["norm_weight"]


def _orthogonal_blocks(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    import torch

    return torch.stack([Initial("orthogonal").draw(shape[1:], generator, dtype) for _ in range(shape[0])])
