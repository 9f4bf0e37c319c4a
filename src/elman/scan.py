"""The linear recurrence ``h_t = a_t * h_{t-1} + b_t``, elementwise, in three forms that give the same numbers.

Every cell whose gates do not look at its own state is this, once the gates are computed. One multiplication and one
addition for three numbers moved: the speed is that of memory.

Shape letters: B rows, T time, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
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
    return forms[backend or _choice(b_BTH)](a_BTH, b_BTH, h0_BH)


def _choice(like_BTH: Tensor) -> Backend:
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


def _run(kernel: Callable[..., None], *tensors: Tensor) -> None:
    """Call a kernel on all rows and columns, in as many threads as PyTorch would use.

    The threads are started and ended here: a pool that outlives the call would be dead in a forked process, and
    Numba's own must not be entered by two threads. Elements are independent, so the number of threads changes no bit.
    """
    arrays = [tensor.detach().contiguous().numpy() for tensor in tensors]
    num_rows, _, width = arrays[0].shape
    num_threads = min(torch.get_num_threads(), arrays[0].size // _MIN_NUMBERS_PER_THREAD)
    if num_threads <= 1:
        kernel(*arrays, 0, num_rows, 0, width)
        return
    if num_rows >= num_threads:
        blocks = [(start, end, 0, width) for start, end in _cuts(num_rows, num_threads)]
    else:
        blocks = [(0, num_rows, start, end) for start, end in _cuts(width, num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(kernel, *arrays, *block) for block in blocks]:
            done.result()


def _cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of about equal length that cover ``range(size)``."""
    return list(pairwise(size * part // parts for part in range(parts + 1)))


@cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None]]:
    """Forward and backward, compiled at the first call and kept on disk where a folder can be written."""
    from numba import njit

    def compiled(function: Callable[..., None]) -> Callable[..., None]:
        try:
            return njit(nogil=True, cache=True)(function)
        except RuntimeError:  # neither the folder of this file nor the user's cache folder can be written
            return njit(nogil=True)(function)

    return compiled(_forward_kernel), compiled(_backward_kernel)


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
