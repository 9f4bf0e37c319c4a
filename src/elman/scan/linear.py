"""What runs over all steps of a segment at once: the linear recurrence, and the short convolution.

The linear recurrence ``h_t = a_t * h_{t-1} + b_t`` comes in three forms that give the same numbers. Every cell whose
gates do not look at its own state is this, once the gates are computed. One multiplication and one addition for three
numbers moved: the speed is that of memory.

Shape letters: B rows, T time, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Backend: TypeAlias = Literal["sequential", "parallel", "compiled"]
Array: TypeAlias = NDArray[np.floating[Any]]

_COMPILED_DTYPES = (torch.float32, torch.float64)
_MIN_NUMBERS_PER_THREAD = 1 << 17
"""Starting a thread takes as long as a few ten thousand numbers."""


def linear_recurrence(
    a_BTH: Tensor, b_BTH: Tensor, h0_BH: Tensor, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """All states of the recurrence, and the last one; gradients of any order for all three arguments.

    Args:
        a_BTH: factors.
        b_BTH: addends.
        h0_BH: the state before the first step.
        backend: ``sequential`` is the definition, a loop over time in PyTorch. ``parallel`` joins steps in pairs, again
            and again: of the order of log T operations on whole tensors, for devices on which launching T small ones
            would take most of the time. ``compiled`` is a kernel for the CPU, in float32 and float64. None: sequential
            for a single step, else compiled where it can be, else parallel.

    Returns:
        h (B, T, H), and its last step (B, H).
    """
    forms = {"sequential": _sequential, "parallel": _parallel, "compiled": _compiled}
    a_BTH, b_BTH = a_BTH.to(h0_BH.dtype), b_BTH.to(h0_BH.dtype)  # products under autocast have half the bits
    return forms[backend or backend_for(b_BTH)](a_BTH, b_BTH, h0_BH)


def causal_convolution(
    x_BTI: Tensor, before_BKI: Tensor, weight_IK: Tensor, bias_I: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All steps of :func:`elman.cells.primitives.short_convolution`: outputs (B, T, I), and the inputs to carry on."""
    width, num_steps = weight_IK.shape[1], x_BTI.shape[1]
    if backend_for(x_BTI) == "compiled":
        bias_I = weight_IK.new_zeros(len(weight_IK)) if bias_I is None else bias_I
        y_BTI = _CompiledConvolution.apply(x_BTI, before_BKI, weight_IK, bias_I)
    else:
        y_BTI = _convolution(x_BTI, before_BKI, weight_IK, bias_I)
    ended_by = x_BTI[:, -min(width - 1, num_steps) :]
    return y_BTI, torch.cat([before_BKI, ended_by], dim=1)[:, ended_by.shape[1] :].clone()


def backend_for(like_BTH: Tensor) -> Backend:
    """The quickest form for tensors of this length, dtype and device."""
    if like_BTH.shape[1] == 1:
        return "sequential"
    return "compiled" if like_BTH.device.type == "cpu" and like_BTH.dtype in _COMPILED_DTYPES else "parallel"


def _sequential(a_BTH: Tensor, b_BTH: Tensor, h_BH: Tensor) -> tuple[Tensor, Tensor]:
    states = []
    for a_BH, b_BH in zip(a_BTH.unbind(1), b_BTH.unbind(1), strict=True):
        h_BH = a_BH * h_BH + b_BH
        states.append(h_BH)
    return torch.stack(states, dim=1), h_BH


def _parallel(a_BTH: Tensor, b_BTH: Tensor, h0_BH: Tensor) -> tuple[Tensor, Tensor]:
    h_BTH = _in_pairs(a_BTH, b_BTH, h0_BH.unsqueeze(1))
    return h_BTH, h_BTH[:, -1]


def _in_pairs(a_BTH: Tensor, b_BTH: Tensor, h0_B1H: Tensor) -> Tensor:
    """Two steps are one step of the same kind: solve for every second state, then fill in those between.

    Blelloch 1990, https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf. There are no logarithms and no divisions: nothing
    overflows that does not in the loop, and factors may be zero or negative.
    """
    num_steps = a_BTH.shape[1]
    if num_steps == 1:
        return a_BTH * h0_B1H + b_BTH
    paired = num_steps - num_steps % 2
    a_first, a_second = a_BTH[:, 0:paired:2], a_BTH[:, 1::2]
    b_first, b_second = b_BTH[:, 0:paired:2], b_BTH[:, 1::2]
    h_second = _in_pairs(a_second * a_first, a_second * b_first + b_second, h0_B1H)
    before = torch.cat([h0_B1H, h_second], dim=1)
    h_first = a_first * before[:, : paired // 2] + b_first
    h_BTH = torch.stack([h_first, h_second], dim=2).flatten(1, 2)
    if paired == num_steps:
        return h_BTH
    return torch.cat([h_BTH, a_BTH[:, -1:] * before[:, -1:] + b_BTH[:, -1:]], dim=1)


def _compiled(a_BTH: Tensor, b_BTH: Tensor, h0_BH: Tensor) -> tuple[Tensor, Tensor]:
    h_BTH, last_BH = _Compiled.apply(a_BTH, b_BTH, h0_BH)
    return h_BTH, last_BH


class _Compiled(torch.autograd.Function):
    """The kernel and its gradient: the same recurrence, run backwards in time.

    With g_t the gradient that reaches h_t from its own use and from all later states, t from 1 to T:

        g_t = dh_t + a_{t+1} g_{t+1}        da_t = g_t h_{t-1}        db_t = g_t        dh_0 = a_1 g_1
    """

    @staticmethod
    def forward(ctx: Any, a_BTH: Tensor, b_BTH: Tensor, h0_BH: Tensor) -> tuple[Tensor, Tensor]:
        h_BTH = torch.empty_like(b_BTH, memory_format=torch.contiguous_format)
        _run(_kernels()[0], a_BTH, b_BTH, h0_BH, h_BTH)
        ctx.save_for_backward(a_BTH, h0_BH, h_BTH)
        ctx.set_materialize_grads(False)
        return h_BTH, h_BTH[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        a_BTH, h0_BH, h_BTH = ctx.saved_tensors
        of_h_BTH, of_last_BH = gradients
        if of_h_BTH is None:
            of_h_BTH = torch.zeros_like(h_BTH)
        if of_last_BH is None:
            of_last_BH = torch.zeros_like(h0_BH)
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return _differentiable_gradient(a_BTH, h0_BH, h_BTH, of_h_BTH, of_last_BH)
        of_a_BTH, of_b_BTH = (torch.empty_like(h_BTH) for _ in range(2))
        of_h0_BH = torch.empty_like(of_last_BH, memory_format=torch.contiguous_format)
        results = (of_a_BTH, of_b_BTH, of_h0_BH)
        _run(_kernels()[1], a_BTH, h0_BH, h_BTH, of_h_BTH, of_last_BH, *results)
        return results


def _differentiable_gradient(
    a_BTH: Tensor, h0_BH: Tensor, h_BTH: Tensor, of_h_BTH: Tensor, of_last_BH: Tensor
) -> tuple[Tensor, ...]:
    """The gradient of :class:`_Compiled`, in operations that have gradients of their own."""
    next_a_BTH = torch.cat([a_BTH[:, 1:], torch.ones_like(a_BTH[:, :1])], dim=1)
    g_BTH = _compiled(next_a_BTH.flip(1), of_h_BTH.flip(1), of_last_BH)[0].flip(1)
    previous_h_BTH = torch.cat([h0_BH.unsqueeze(1), h_BTH[:, :-1]], dim=1)
    return g_BTH * previous_h_BTH, g_BTH, a_BTH[:, 0] * g_BTH[:, 0]


def _convolution(x_BTI: Tensor, before_BKI: Tensor, weight_IK: Tensor, bias_I: Tensor | None) -> Tensor:
    width, num_steps = weight_IK.shape[1], x_BTI.shape[1]
    window_BTI = torch.cat([before_BKI, x_BTI], dim=1)
    y_BTI = window_BTI[:, width - 1 :] * weight_IK[:, -1]
    for k in range(width - 1):
        y_BTI = torch.addcmul(y_BTI, window_BTI[:, k : k + num_steps], weight_IK[:, k])
    return y_BTI if bias_I is None else y_BTI + bias_I


class _CompiledConvolution(torch.autograd.Function):
    """The short convolution in one pass over memory, and its gradient in another."""

    @staticmethod
    def forward(ctx: Any, x_BTI: Tensor, before_BKI: Tensor, weight_IK: Tensor, bias_I: Tensor) -> Tensor:
        x_BTI = x_BTI.contiguous()
        y_BTI = torch.empty_like(x_BTI)
        _run(_convolution_kernels()[0], x_BTI, before_BKI, weight_IK.T, bias_I, y_BTI)
        ctx.save_for_backward(x_BTI, before_BKI, weight_IK, bias_I)
        return y_BTI

    @staticmethod
    def backward(ctx: Any, of_y_BTI: Tensor) -> tuple[Tensor | None, ...]:
        x_BTI, before_BKI, weight_IK, bias_I = inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return differentiable_gradient(_convolution, inputs, of_y_BTI)
        of_x_BTI, of_before_BKI = torch.zeros_like(x_BTI), before_BKI.new_zeros(before_BKI.shape)
        of_weight_BKI, of_bias_BI = (x_BTI.new_zeros(len(x_BTI), *shape) for shape in (weight_IK.T.shape, bias_I.shape))
        results = (of_x_BTI, of_before_BKI, of_weight_BKI, of_bias_BI)
        _run(_convolution_kernels()[1], x_BTI, before_BKI, weight_IK.T, of_y_BTI, *results)
        return of_x_BTI, of_before_BKI, of_weight_BKI.sum(0).T, of_bias_BI.sum(0)


def differentiable_gradient(
    form: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], of_results: Tensor | Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradient of a kernel for all of its inputs, through a form of it whose operations have gradients again."""
    # Views, because the inputs themselves may depend on each other.
    views = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(form(*views), views, of_results, create_graph=True)


def _run(kernel: Callable[..., None], *tensors: Tensor) -> None:
    """Call a kernel on all rows and columns. Elements are independent, so the number of threads changes no bit."""
    num_rows, _, width = tensors[0].shape
    num_threads = num_threads_for(tensors[0].numel())
    if num_rows >= num_threads:
        blocks = [(*rows, 0, width) for rows in cuts(num_rows, num_threads)]
    else:
        blocks = [(0, num_rows, *columns) for columns in cuts(width, num_threads)]
    run_in_threads(kernel, tensors, blocks)


def run_in_threads(kernel: Callable[..., None], tensors: Sequence[Tensor], blocks: Sequence[tuple[int, ...]]) -> None:
    """Call a kernel on contiguous arrays once for each block, with the numbers of the block as last arguments.

    The threads are started and ended here: a pool that outlives the call would be dead in a forked process, and
    Numba's own must not be entered by two threads.
    """
    arrays = [tensor.detach().contiguous().numpy() for tensor in tensors]
    if len(blocks) == 1:
        kernel(*arrays, *blocks[0])
        return
    with ThreadPoolExecutor(len(blocks)) as pool:
        for done in [pool.submit(kernel, *arrays, *block) for block in blocks]:
            done.result()


def num_threads_for(num_numbers: int) -> int:
    """As many threads as PyTorch would use, but none for so few numbers that starting it takes longer."""
    return max(1, min(torch.get_num_threads(), num_numbers // _MIN_NUMBERS_PER_THREAD))


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of about equal length that cover ``range(size)``."""
    return list(pairwise(size * part // parts for part in range(parts + 1)))


@cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None]]:
    """Forward and backward."""
    return compiled(_forward_kernel), compiled(_backward_kernel)


@cache
def _convolution_kernels() -> tuple[Callable[..., None], Callable[..., None]]:
    """Forward and backward."""
    return compiled(_forward_convolution), compiled(_backward_convolution)


def compiled(kernel: Callable[..., None], freedoms: Set[str] = frozenset()) -> Callable[..., None]:
    """A kernel that Numba compiles at its first call, and keeps on disk where a folder can be written.

    Args:
        kernel: a function of arrays and numbers.
        freedoms: how the compiler may change roundings: ``reassoc`` lets it sum in another order, ``contract`` lets it
            round a product and a sum once.
    """
    from numba import njit

    try:
        return njit(nogil=True, fastmath=set(freedoms), cache=True)(kernel)
    except RuntimeError:  # neither the folder of its file nor the user's cache folder can be written
        return njit(nogil=True, fastmath=set(freedoms))(kernel)


# The inner loops count from zero over slices: a start that Numba cannot know to be positive would have to be checked in
# each turn, and keep the loop from using vector instructions.


def _forward_kernel(
    a: Array, b: Array, h0: Array, h: Array, row_start: int, row_end: int, start: int, end: int
) -> None:
    for row in range(row_start, row_end):
        previous_h = h0[row, start:end]
        for t in range(a.shape[1]):
            a_t, b_t, h_t = a[row, t, start:end], b[row, t, start:end], h[row, t, start:end]
            for j in range(h_t.size):
                h_t[j] = a_t[j] * previous_h[j] + b_t[j]
            previous_h = h_t


def _backward_kernel(
    a: Array, h0: Array, h: Array, of_h: Array, of_last: Array, of_a: Array, of_b: Array, of_h0: Array,
    row_start: int, row_end: int, start: int, end: int,
) -> None:  # fmt: skip
    last = a.shape[1] - 1
    for row in range(row_start, row_end):
        for j in range(start, end):
            of_b[row, last, j] = of_h[row, last, j] + of_last[row, j]
        for t in range(last, 0, -1):
            a_t, g_t, of_a_t = a[row, t, start:end], of_b[row, t, start:end], of_a[row, t, start:end]
            previous_h, of_previous_h = h[row, t - 1, start:end], of_h[row, t - 1, start:end]
            previous_g = of_b[row, t - 1, start:end]
            for j in range(g_t.size):
                of_a_t[j] = g_t[j] * previous_h[j]
                previous_g[j] = of_previous_h[j] + a_t[j] * g_t[j]
        for j in range(start, end):
            of_a[row, 0, j] = of_b[row, 0, j] * h0[row, j]
            of_h0[row, j] = a[row, 0, j] * of_b[row, 0, j]


def _forward_convolution(
    x: Array, before: Array, weight: Array, bias: Array, y: Array, row_start: int, row_end: int, start: int, end: int
) -> None:
    carried = len(weight) - 1
    for row in range(row_start, row_end):
        for t in range(x.shape[1]):
            y_t = y[row, t, start:end]
            y_t[:] = bias[start:end]
            for k in range(len(weight)):
                time = t - carried + k
                x_k = x[row, time, start:end] if time >= 0 else before[row, time + carried, start:end]
                weight_k = weight[k, start:end]
                for j in range(y_t.size):
                    y_t[j] += weight_k[j] * x_k[j]


def _backward_convolution(
    x: Array, before: Array, weight: Array, of_y: Array,
    of_x: Array, of_before: Array, of_weight: Array, of_bias: Array,
    row_start: int, row_end: int, start: int, end: int,
) -> None:  # fmt: skip
    carried = len(weight) - 1
    for row in range(row_start, row_end):
        of_bias_row = of_bias[row, start:end]
        for t in range(x.shape[1]):
            of_y_t = of_y[row, t, start:end]
            for j in range(of_y_t.size):
                of_bias_row[j] += of_y_t[j]
            for k in range(len(weight)):
                time = t - carried + k
                if time >= 0:
                    x_k, of_x_k = x[row, time, start:end], of_x[row, time, start:end]
                else:
                    x_k, of_x_k = before[row, time + carried, start:end], of_before[row, time + carried, start:end]
                weight_k, of_weight_k = weight[k, start:end], of_weight[row, k, start:end]
                for j in range(of_y_t.size):
                    of_x_k[j] += of_y_t[j] * weight_k[j]
                    of_weight_k[j] += of_y_t[j] * x_k[j]
