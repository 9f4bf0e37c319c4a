"""The closed list of operations that a cell's ``step`` is written in.

A step uses these functions, the methods ``sigmoid tanh relu exp`` of a tensor, and the operators ``+ - * /``.
Whatever stays inside this list can be traced once and lowered to other forms (a compiled kernel, C, ONNX); a step
that uses more of torch still trains, by the readable form.

Shape letters: B rows, I input, O output, G gates side by side, K width of a convolution, N heads, D and M sizes of a
vector; an ellipsis stands for whatever the two arguments share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def linear(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x W^T + b``: (B, I) to (B, O), in the dtype of x also where the product itself is taken in half the bits."""
    from torch.nn import functional  # here, because a cell's settings must be readable without torch

    return functional.linear(x_BI, weight_OI, bias_O).to(x_BI.dtype)


def split(x_BG: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Cut the last dimension into equal parts, in order."""
    return x_BG.chunk(parts, dim=-1)


def split_sizes(x_BG: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Cut the last dimension into parts of these sizes, in order."""
    return x_BG.split(list(sizes), dim=-1)


def concat(parts: Sequence[Tensor]) -> Tensor:
    """Put tensors side by side along the last dimension."""
    import torch

    return torch.cat(list(parts), dim=-1)


def heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut the last dimension into N heads: (..., N D) to (..., N, D)."""
    return x.unflatten(-1, (num_heads, -1))


def merge_heads(x: Tensor) -> Tensor:
    """The reverse of :func:`heads`: (..., N, D) to (..., N D)."""
    return x.flatten(-2)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """``x y^T``: (..., D) and (..., M) to (..., D, M)."""
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def rows_times(matrix: Tensor, scale: Tensor) -> Tensor:
    """Multiply each row of a matrix by a number: (..., D, M) and (..., D) to (..., D, M)."""
    return matrix * scale.unsqueeze(-1)


def matvec(matrix: Tensor, x: Tensor) -> Tensor:
    """``A x``: (..., D, M) and (..., M) to (..., D)."""
    return (matrix * x.unsqueeze(-2)).sum(-1)


def total(x: Tensor) -> Tensor:
    """The sum over the last dimension, which is kept with size 1."""
    return x.sum(-1, keepdim=True)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, without overflow and exact to the last digits on both sides."""
    from torch.nn import functional

    return functional.softplus(x, threshold=40.0)  # x itself above the threshold; that of 20 would cost nine digits


def log_sigmoid(x: Tensor) -> Tensor:
    """``log(sigmoid(x))``, without overflow."""
    from torch.nn import functional

    return functional.logsigmoid(x)


def silu(x: Tensor) -> Tensor:
    """``x sigmoid(x)``."""
    from torch.nn import functional

    return functional.silu(x)


def gelu(x: Tensor) -> Tensor:
    """``x P(X <= x)`` for X normal, in the common approximation by tanh (Hendrycks and Gimpel 2016)."""
    from torch.nn import functional

    return functional.gelu(x, approximate="tanh")


def sqrt(x: Tensor) -> Tensor:
    """The square root of numbers that are not negative."""
    return x.sqrt()


def maximum(x: Tensor, y: Tensor | float) -> Tensor:
    """The larger of two numbers, element by element."""
    import torch

    return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp(min=y)


def rms_norm(x: Tensor, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension (Zhang and Sennrich 2019)."""
    from torch.nn import functional

    return functional.rms_norm(x, x.shape[-1:], weight, epsilon)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` over the last dimension (Ba et al. 2016)."""
    from torch.nn import functional

    return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def short_convolution(
    x_BI: Tensor, before_BKI: Tensor, weight_IK: Tensor, bias_I: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A weighted sum, unit by unit, of this input and the K - 1 before it.

        y = sum over k of weight[:, k] * x_{t-K+1+k} + bias

    Args:
        x_BI: the input x_t.
        before_BKI: the K - 1 inputs before it, the oldest first.
        weight_IK: the newest input's weight last.
        bias_I: none: 0.

    Returns:
        y (B, I), and the K - 1 inputs to carry on.
    """
    import torch

    window_BKI = torch.cat([before_BKI, x_BI.unsqueeze(1)], dim=1)
    y_BI = (window_BKI * weight_IK.T).sum(1)
    return (y_BI if bias_I is None else y_BI + bias_I), window_BKI[:, 1:]
