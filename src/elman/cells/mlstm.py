"""The matrix memory of the xLSTM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from elman.cells.base import Cell, CellState, HeadsConfig, Initial, Parameter, StatePart, Step
from elman.cells.primitives import (
    heads,
    layer_norm,
    linear,
    log_sigmoid,
    matvec,
    maximum,
    merge_heads,
    outer,
    rows_times,
    split,
    total,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class MLSTM(Cell):
    """A matrix for a memory in each head, written under keys and read by queries, with exponential input gates.

        q, k, v, o = split(W_in x_t), k divided by sqrt(D)          each cut into N heads of width D
        i, f = split(W_gates x_t + b)                               a number for each head
        m_t = max(log sigmoid(f) + m_{t-1}, i, 0)
        i' = exp(i - m_t),   f' = exp(log sigmoid(f) + m_{t-1} - m_t)
        C_t = f' C_{t-1} + i' v k^T
        n_t = f' n_{t-1} + i' k
        r_t = C_t q / max(|n_t . q|, exp(-m_t))
        y_t = W_out (sigmoid(o) * scale * norm(r_t))                layer normalisation in each head

    Nothing looks at the state, so that training takes a chunk of steps at once. m keeps the exponentials from
    overflowing and cancels: r is C q / max(|n . q|, 1) of the equations without it. The 0 is ours: m never falls below
    its start, and exp(-m) cannot overflow where all gates close.

    State: C (B, N, D, D), n (B, N, D) and m (B, N, 1), for D = H / N.
    Parameters: 4 H I + 2 N (I + 1) + H (H + 1).
    Initialisation: W_in uniform within +-sqrt(3/I); W_out within +-sqrt(3)/H, which starts a residual branch no larger
    than an embedding; W_gates zero, the forget gates' biases evenly from 3 to 6 over the heads, the input gates' zero.
    Paper: Beck et al. 2024, https://arxiv.org/abs/2405.04517; the projections are those of Beck et al. 2025,
    https://arxiv.org/abs/2503.13427.
    """

    Config = HeadsConfig
    config: HeadsConfig
    paper = "https://arxiv.org/abs/2405.04517"

    def parameters(self) -> Mapping[str, Parameter]:
        H, N, I = self.hidden_size, self.config.num_heads, self.input_size  # noqa: E741
        return {
            "weight_in": Parameter((4 * H, I), Initial("uniform", math.sqrt(3 / I), parts=4)),
            "weight_gates": Parameter((2 * N, I), Initial("zeros")),
            "bias_gates": Parameter((2 * N,), Initial("own", draw_own=_gate_biases)),
            "norm_weight": Parameter((H,), Initial("ones")),
            "weight_out": Parameter((H, H), Initial("uniform", math.sqrt(3) / H)),
        }

    def state(self) -> Mapping[str, StatePart]:
        N, D = self.config.num_heads, self.hidden_size // self.config.num_heads
        return {"C": StatePart((N, D, D)), "n": StatePart((N, D)), "m": StatePart((N, 1))}

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        q, k, v, output_gate, i, log_f = self._of_input(p, x_BI)
        m = maximum(maximum(log_f + state["m"], i), 0.0)
        input_gate, forget_gate = (i - m).exp(), (log_f + state["m"] - m).exp()
        C = rows_times(state["C"], forget_gate) + outer(v, input_gate * k)
        n = forget_gate * state["n"] + input_gate * k
        weight = total(n * q)
        read = matvec(C, q) / maximum(maximum(weight, -weight), (-m).exp())
        named = {
            "query": merge_heads(q),
            "key": merge_heads(k),
            "value": merge_heads(v),
            "input_gate": merge_heads(input_gate),
            "forget_gate": merge_heads(forget_gate),
            "output_gate": output_gate,
        }
        return Step(self._output(p, output_gate, read), {"C": C, "n": n, "m": m}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        from elman.scan.heads import mlstm_scan  # here, because it brings in torch

        q, k, v, output_gate, i, log_f = self._of_input(p, x_BTI)
        q_BNTD, k_BNTD, v_BNTD = (part.transpose(1, 2) for part in (q, k, v))
        i_BNT, log_f_BNT = (part.squeeze(-1).transpose(1, 2) for part in (i, log_f))
        read_BNTD, (C, n, m) = mlstm_scan(
            q_BNTD, k_BNTD, v_BNTD, i_BNT, log_f_BNT, (state["C"], state["n"], state["m"])
        )
        return self._output(p, output_gate, read_BNTD.transpose(1, 2)), {"C": C, "n": n, "m": m}

    def _of_input(self, p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (..., N, D), the output gate (..., H), i and log sigmoid(f) (..., N, 1); of one time or of all."""
        num_heads = self.config.num_heads
        q, k, v, o = split(linear(x, p["weight_in"]), 4)
        i, f = split(linear(x, p["weight_gates"], p["bias_gates"]), 2)
        k = k / math.sqrt(self.hidden_size // num_heads)
        return (
            *(heads(part, num_heads) for part in (q, k, v)),
            o.sigmoid(),
            *(heads(part, num_heads) for part in (i, log_sigmoid(f))),
        )

    def _output(self, p: Mapping[str, Tensor], output_gate: Tensor, read: Tensor) -> Tensor:
        return linear(output_gate * (merge_heads(layer_norm(read)) * p["norm_weight"]), p["weight_out"])

    def operations_per_step(self) -> int:
        """Those of the matrices, and of writing and reading the memory: five for each of its elements."""
        return super().operations_per_step() + 5 * self.hidden_size**2 // self.config.num_heads


def _gate_biases(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    import torch

    return torch.cat([torch.zeros(shape[0] // 2, dtype=dtype), torch.linspace(3, 6, shape[0] // 2, dtype=dtype)])
