"""The gated DeltaNet: a matrix memory that forgets, and replaces what it holds under a key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from elman.cells.base import Cell, CellState, HeadsConfig, Initial, Parameter, StatePart, Step
from elman.cells.primitives import (
    heads,
    linear,
    matvec,
    merge_heads,
    outer,
    rms_norm,
    rows_times,
    silu,
    softplus,
    split,
    sqrt,
    total,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LEAST_STEP, _MOST_STEP = 1e-3, 0.1
_LEAST_RATE, _MOST_RATE = 1.0, 16.0
_EPSILON = 1e-6


class GatedDeltaNet(Cell):
    """A matrix for a memory in each head, in which a new value takes the place of what its key reads.

        q, k, v, g = split(W_in x_t), silu(q), silu(k), silu(v)     each cut into N heads of width D
        q <- q / |q|,   k <- k / |k|
        a, b = split(W_gates x_t)                                   a number for each head
        alpha = exp(-A softplus(a + d)),   beta = sigmoid(b)
        S_t = alpha S_{t-1} (I - beta k k^T) + beta v k^T
        y_t = W_out (scale * norm(S_t q) * silu(g))                 by the root mean square in each head

    S_t k is a mean of v and of what the memory had under k, alpha S_{t-1} k, with shares beta and 1 - beta; what is
    kept under other keys only fades by alpha. Nothing looks at the state, so that training takes a chunk of steps at
    once. The paper's short convolutions of q, k and v are one here, that of the stack before the cell.

    State: S, (B, N, D, D), for D = H / N.
    Parameters: 4 H I + 2 N (I + 1) + H (H + 1).
    Initialisation: W_in and W_gates uniform within +-sqrt(3/I); W_out within +-sqrt(3)/H, which starts a residual
    branch no larger than an embedding; as in Mamba-2, A uniform from 1 to 16, and softplus(d) from 0.001 to 0.1 with
    a uniform logarithm.
    Paper: Yang, Kautz and Hatamizadeh 2024, https://arxiv.org/abs/2412.06464.
    """

    Config = HeadsConfig
    config: HeadsConfig
    paper = "https://arxiv.org/abs/2412.06464"

    def parameters(self) -> Mapping[str, Parameter]:
        H, N, I = self.hidden_size, self.config.num_heads, self.input_size  # noqa: E741
        return {
            "weight_in": Parameter((4 * H, I), Initial("uniform", math.sqrt(3 / I), parts=4)),
            "weight_gates": Parameter((2 * N, I), Initial("uniform", math.sqrt(3 / I))),
            "log_rate": Parameter((N,), Initial("own", draw_own=_log_rates)),
            "step_bias": Parameter((N,), Initial("own", draw_own=_step_biases)),
            "norm_weight": Parameter((H,), Initial("ones")),
            "weight_out": Parameter((H, H), Initial("uniform", math.sqrt(3) / H)),
        }

    def state(self) -> Mapping[str, StatePart]:
        N, D = self.config.num_heads, self.hidden_size // self.config.num_heads
        return {"S": StatePart((N, D, D))}

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        q, k, v, output_gate, log_alpha, beta = self._of_input(p, x_BI)
        alpha = log_alpha.exp()
        kept = rows_times(state["S"], alpha)
        S = kept + outer(beta * (v - matvec(kept, k)), k)
        named = {
            "query": merge_heads(q),
            "key": merge_heads(k),
            "value": merge_heads(v),
            "alpha": merge_heads(alpha),
            "beta": merge_heads(beta),
            "output_gate": output_gate,
        }
        return Step(self._output(p, output_gate, matvec(S, q)), {"S": S}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        from elman.scan.heads import delta_scan  # here, because it brings in torch

        q, k, v, output_gate, log_alpha, beta = self._of_input(p, x_BTI)
        q_BNTD, k_BNTD, v_BNTD = (part.transpose(1, 2) for part in (q, k, v))
        log_alpha_BNT, beta_BNT = (part.squeeze(-1).transpose(1, 2) for part in (log_alpha, beta))
        read_BNTD, S = delta_scan(q_BNTD, k_BNTD, v_BNTD, log_alpha_BNT, beta_BNT, state["S"])
        return self._output(p, output_gate, read_BNTD.transpose(1, 2)), {"S": S}

    def _of_input(self, p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (..., N, D), the output gate (..., H), log alpha and beta (..., N, 1); of one time or of all."""
        num_heads = self.config.num_heads
        q, k, v, g = split(silu(linear(x, p["weight_in"])), 4)
        a, b = split(linear(x, p["weight_gates"]), 2)
        log_alpha = -(p["log_rate"].exp() * softplus(a + p["step_bias"]))
        q, k, v, log_alpha, beta = (heads(part, num_heads) for part in (q, k, v, log_alpha, b.sigmoid()))
        return _unit(q), _unit(k), v, g, log_alpha, beta

    def _output(self, p: Mapping[str, Tensor], output_gate: Tensor, read: Tensor) -> Tensor:
        return linear(output_gate * (merge_heads(rms_norm(read)) * p["norm_weight"]), p["weight_out"])

    def operations_per_step(self) -> int:
        """Those of the matrices, and of reading twice and writing the memory: seven for each of its elements."""
        return super().operations_per_step() + 7 * self.hidden_size**2 // self.config.num_heads


def _unit(x: Tensor) -> Tensor:
    """A vector of length one in the direction of x; near zero a shorter one."""
    return x / sqrt(total(x * x) + _EPSILON)


def _log_rates(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    import torch

    uniform = torch.rand(shape, generator=generator, dtype=dtype)
    return (_LEAST_RATE + uniform * (_MOST_RATE - _LEAST_RATE)).log()


def _step_biases(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    import torch

    uniform = torch.rand(shape, generator=generator, dtype=dtype)
    step = _LEAST_STEP * (_MOST_STEP / _LEAST_STEP) ** uniform
    return step.expm1().log()  # the inverse of softplus
