"""The closed list of operations that a cell's ``step`` is written in.

A step uses these functions, the methods ``sigmoid tanh relu exp`` of a tensor, and the operators ``+ - * /``.
Whatever stays inside this list can be traced once and lowered to other forms (a compiled kernel, C, ONNX); a step
that uses more of torch still trains, by the readable form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def linear(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x W^T + b``: (B, I) to (B, O)."""
    from torch.nn import functional  # here, because a cell's settings must be readable without torch

    return functional.linear(x_BI, weight_OI, bias_O)


def split(x_BG: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Cut the last dimension into equal parts, in order."""
    return x_BG.chunk(parts, dim=-1)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, without overflow and exact to the last digits on both sides."""
    from torch.nn import functional

    return -functional.logsigmoid(-x)  # torch's own softplus is x above a threshold, which costs nine digits
