"""The real-gated linear recurrent unit, with the recurrent block of Griffin around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from elman.cells.base import BlockConfig, Cell, CellState, Initial, Parameter, StatePart, Step
from elman.cells.primitives import (
    gelu,
    heads,
    linear,
    log_sigmoid,
    matvec,
    maximum,
    merge_heads,
    short_convolution,
    split,
    sqrt,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SHARPNESS = 8.0
"""The paper's c: where the gate is open, a is this power of sigmoid(Lambda)."""
_MOST_DECAY = 0.999
"""The largest share of its state that a unit first keeps in a step, with an open gate."""
_SMALLEST_SQUARE = 1e-30
"""For 1 - a^2: its root has a finite gradient, and adds a part in 10^15 of an input, which changes no state."""


class RGLRUConfig(BlockConfig):
    """Settings of the real-gated linear recurrent unit."""

    feedforward_size: NonNegativeInt = 688
    """Width of a gated feed-forward network (SwiGLU) after each cell, commonly 8/3 of hidden_size; 0: none."""
    num_gate_blocks: PositiveInt = 8
    """The gates' matrices have so many blocks on the diagonal, and zeros beside them; 1: whole matrices."""
    least_decay: Annotated[float, Field(gt=0.0, lt=_MOST_DECAY)] = 0.1
    """With an open gate a unit first keeps this share of its state in a step, or more, up to 0.999; the paper: 0.9."""

    @model_validator(mode="after")
    def _blocks_divide_the_width(self) -> Self:
        if self.hidden_size % self.num_gate_blocks:
            raise ValueError(
                f"num_gate_blocks {self.num_gate_blocks} does not divide hidden_size {self.hidden_size}: "
                "give a divisor, or 1 for whole matrices"
            )
        return self


class RGLRU(Cell):
    """The real-gated linear recurrent unit in the recurrent block of Griffin.

        (x, z) = W_in u_t
        x <- the sum over k of w_k * x_{t-K+1+k} + b
        r = sigmoid(W_r x + b_r)
        i = sigmoid(W_i x + b_i)
        a = sigmoid(Lambda)^(8 r)
        h_t = a * h_{t-1} + sqrt(1 - a^2) * (i * x)
        output = W_out (h_t * gelu(z))

    u_t is what the layer reads; W_r and W_i are block-diagonal. The square root gives h the variance of i * x, however
    slow the decay. It stands at every time, as in the paper; the authors' code takes the first input of a text whole,
    but a state does not know its age.

    1 - a^2 is computed as 2 t / (1 + t) with t = tanh(-log a), which has all its digits where a is nearly 1. It is kept
    above 1e-30, because at 0 the gradient of the root is infinite.

    State: recent, the last K - 1 values of x before the convolution, (B, K - 1, H); h, (B, H).
    Parameters: 3 H^2 + 2 H^2 / blocks + H (K + 4), for an input of width H.
    Initialisation: matrices N(0, 1/inputs), the convolution uniform within +-sqrt(3/K), which keep the variance;
    biases zero; Lambda such that an open gate's a is uniform between ``least_decay`` and 0.999. With the paper's 0.9
    every unit starts as a mean of its last ten inputs or more, and takes hundreds of updates to learn to see the last.
    Paper: De et al. 2024, https://arxiv.org/abs/2402.19427.
    """

    Config = RGLRUConfig
    config: RGLRUConfig
    paper = "https://arxiv.org/abs/2402.19427"

    def parameters(self) -> Mapping[str, Parameter]:
        H, K, blocks = self.hidden_size, self.config.inner_convolution_size, self.config.num_gate_blocks

        def normal(num_inputs: int) -> Initial:
            return Initial("normal", 1 / math.sqrt(num_inputs))

        gate = Parameter((blocks, H // blocks, H // blocks), normal(H // blocks))
        return {
            "in_proj": Parameter((2 * H, self.input_size), normal(self.input_size)),
            "conv_weight": Parameter((H, K), Initial("uniform", math.sqrt(3 / K)), elementwise=True),
            "conv_bias": Parameter((H,), Initial("zeros")),
            "recurrence_gate_weight": gate,
            "recurrence_gate_bias": Parameter((H,), Initial("zeros")),
            "input_gate_weight": gate,
            "input_gate_bias": Parameter((H,), Initial("zeros")),
            "Lambda": Parameter((H,), Initial("own", draw_own=self._draw_lambda)),
            "out_proj": Parameter((H, H), normal(H)),
        }

    def _draw_lambda(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        import torch

        low, high = self.config.least_decay, _MOST_DECAY
        log_a = (low + (high - low) * torch.rand(shape, generator=generator, dtype=dtype)).log() / _SHARPNESS
        return log_a - (-log_a.expm1()).log()  # the inverse of sigmoid

    def state(self) -> Mapping[str, StatePart]:
        return {
            "recent": StatePart((self.config.inner_convolution_size - 1, self.hidden_size)),
            "h": StatePart((self.hidden_size,)),
        }

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        x, z = split(linear(x_BI, p["in_proj"]), 2)
        x, recent = short_convolution(x, state["recent"], p["conv_weight"], p["conv_bias"])
        recurrence_gate, input_gate = self._gates(p, x, matvec)
        decay, scale = _decay(recurrence_gate, p["Lambda"])
        h = decay * state["h"] + scale * (input_gate * x)
        gate = gelu(z)
        named = {"recurrence_gate": recurrence_gate, "input_gate": input_gate, "decay": decay, "gate": gate}
        return Step(linear(h * gate, p["out_proj"]), {"recent": recent, "h": h}, named)

    def scan(self, p: Mapping[str, Tensor], x_BTI: Tensor, state: CellState) -> tuple[Tensor, CellState]:
        import torch

        from elman.scan.linear import causal_convolution, linear_recurrence

        x, z = split(linear(x_BTI, p["in_proj"]), 2)
        x, recent = causal_convolution(x, state["recent"], p["conv_weight"], p["conv_bias"])
        recurrence_gate, input_gate = self._gates(p, x, partial(torch.einsum, "noi,...ni->...no"))
        decay, scale = _decay(recurrence_gate, p["Lambda"])
        h_BTH, h = linear_recurrence(decay, scale * (input_gate * x), state["h"])
        return linear(h_BTH * gelu(z), p["out_proj"]), {"recent": recent, "h": h}

    def _gates(
        self, p: Mapping[str, Tensor], x: Tensor, product: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, ...]:
        """r and i, of one time or of all; ``product`` multiplies the blocks (N, D, D) and vectors (..., N, D)."""
        of_blocks = heads(x, self.config.num_gate_blocks)
        return tuple(
            (merge_heads(product(p[f"{gate}_gate_weight"], of_blocks)) + p[f"{gate}_gate_bias"]).sigmoid()
            for gate in ("recurrence", "input")
        )


def _decay(recurrence_gate: Tensor, Lambda: Tensor) -> tuple[Tensor, Tensor]:
    """a and sqrt(1 - a^2); of one time or of all."""
    rate = recurrence_gate * (-_SHARPNESS * log_sigmoid(Lambda))
    t = rate.tanh()
    return (-rate).exp(), sqrt(maximum(2 * t / (1 + t), _SMALLEST_SQUARE))
