"""Mamba: the selective state space model with the block around it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from elman.cells.base import BlockConfig, Cell, CellState, Initial, Parameter, StatePart, Step
from elman.cells.primitives import (
    linear,
    matvec,
    outer,
    rows_times,
    short_convolution,
    silu,
    softplus,
    split,
    split_sizes,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STEP_SIZES = (1e-3, 1e-1)
"""Between which the first step sizes lie."""


class MambaConfig(BlockConfig):
    """Settings of the selective state space model."""

    expansion: PositiveInt = 2
    """The block is so many times as wide inside as outside."""
    state_size: PositiveInt = 16
    """Number N of states of each unit inside the block."""
    step_rank: PositiveInt | None = None
    """Rank R of the map to the step sizes; none: a sixteenth of hidden_size."""


class Mamba(Cell):
    """The selective state space model in its block, of width D = ``expansion`` H inside.

        (x, z) = W_in u_t
        x <- silu(the sum over k of w_k * x_{t-K+1+k} + b)
        (s, B, C) = W_x x                      R, N and N numbers
        dt = softplus(W_dt s + b_dt)           D numbers
        h_t = exp(dt A) * h_{t-1} + (dt x) B^T           A = -exp(A_log), (D, N)
        y = h_t C + d * x
        output = W_out (y * silu(z))

    u_t is what the layer reads; dt scales the rows of A. Nothing but the output is computed from h, so that no matrix
    stands between the state of one time and that of the next.

    State: recent, the last K - 1 values of x before the convolution, (B, K - 1, D); h, (B, D, N).
    Parameters: 3 D H + D (K + 2 R + 3 N + 3), for an input of width H.
    Initialisation: that of the paper's authors. Matrices and convolution uniform within +-1/sqrt(inputs of a sum);
    A = -(1, ..., N) in every row, d (the parameter ``D``) one; b_dt such that dt is log-uniform between 0.001 and 0.1
    where s is zero.
    Paper: Gu and Dao 2023, https://arxiv.org/abs/2312.00752.
    """

    Config = MambaConfig
    config: MambaConfig
    paper = "https://arxiv.org/abs/2312.00752"

    @property
    def inner_size(self) -> int:
        """Width D inside the block."""
        return self.config.expansion * self.hidden_size

    @property
    def step_rank(self) -> int:
        """Rank R of the map to the step sizes."""
        return self.config.step_rank or math.ceil(self.hidden_size / 16)

    def parameters(self) -> Mapping[str, Parameter]:
        D, N, R, K = self.inner_size, self.config.state_size, self.step_rank, self.config.inner_convolution_size

        def uniform(num_inputs: int) -> Initial:
            return Initial("uniform", 1 / math.sqrt(num_inputs))

        return {
            "in_proj": Parameter((2 * D, self.input_size), uniform(self.input_size)),
            "conv_weight": Parameter((D, K), uniform(K), elementwise=True),
            "conv_bias": Parameter((D,), uniform(K)),
            "x_proj": Parameter((R + 2 * N, D), uniform(D)),
            "dt_proj": Parameter((D, R), uniform(R)),
            "dt_bias": Parameter((D,), Initial("own", draw_own=_draw_step_biases)),
            "A_log": Parameter((D, N), Initial("own", draw_own=_draw_log_rates), elementwise=True),
            "D": Parameter((D,), Initial("ones")),
            "out_proj": Parameter((self.hidden_size, D), uniform(D)),
        }

    def state(self) -> Mapping[str, StatePart]:
        D = self.inner_size
        return {
            "recent": StatePart((self.config.inner_convolution_size - 1, D)),
            "h": StatePart((D, self.config.state_size)),
        }

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        x, z = split(linear(x_BI, p["in_proj"]), 2)
        x, recent = short_convolution(x, state["recent"], p["conv_weight"], p["conv_bias"])
        x = silu(x)
        dt, B, C = self._selected(p, x)
        decay = rows_times(-p["A_log"].exp(), dt).exp()
        h = decay * state["h"] + outer(dt * x, B)
        gate = silu(z)
        output = linear((matvec(h, C) + p["D"] * x) * gate, p["out_proj"])
        named = {"step_size": dt, "decay": decay, "write": B, "read": C, "gate": gate}
        return Step(output, {"recent": recent, "h": h}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        from elman.scan.linear import causal_convolution  # here, because they bring in torch
        from elman.scan.selective import selective_scan

        x, z = split(linear(x_BTI, p["in_proj"]), 2)
        x, recent = causal_convolution(x, state["recent"], p["conv_weight"], p["conv_bias"])
        x = silu(x)
        dt, B, C = self._selected(p, x)
        y, h = selective_scan(x, dt, -p["A_log"].exp(), B, C, p["D"], state["h"])
        return linear(y * silu(z), p["out_proj"]), {"recent": recent, "h": h}

    def _selected(self, p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step sizes, B and C: what the input selects; of one time or of all."""
        N = self.config.state_size
        s, B, C = split_sizes(linear(x, p["x_proj"]), (self.step_rank, N, N))
        return softplus(linear(s, p["dt_proj"], p["dt_bias"])), B, C

    def operations_per_step(self) -> int:
        """Those of the matrices, and five more for each number of h."""
        return super().operations_per_step() + 5 * self.inner_size * self.config.state_size


def _draw_log_rates(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    import torch

    return torch.arange(1, shape[1] + 1, dtype=dtype).log().expand(shape)


def _draw_step_biases(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    import torch

    low, high = map(math.log, _STEP_SIZES)
    dt = (low + (high - low) * torch.rand(shape, generator=generator, dtype=dtype)).exp()
    return dt + (-(-dt).expm1()).log()  # the inverse of softplus
