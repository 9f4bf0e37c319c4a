"""The selective scan of Mamba: a linear recurrence of outer products, none of which is kept for all times.

Each of D channels has N numbers of state. Written with whole tensors, factors, addends and states of all times are
B x T x D x N numbers each, and moving them through memory takes nearly all of the time; the compiled kernel keeps the
N states of a few channels in the processor's cache and reads and writes B x T x D numbers.

Shape letters: B rows, T time, D channels, N states of a channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elman.scan.linear import (
    Array,
    Backend,
    backend_for,
    compiled,
    cuts,
    differentiable_gradient,
    linear_recurrence,
    num_threads_for,
    run_in_threads,
)

_BLOCK = 128
"""Channels that a kernel takes at once: enough for long loops, few enough that their states stay in the cache."""


def selective_scan(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    A_DN: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_D: Tensor,
    h0_BDN: Tensor,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs of all steps, and the last state; gradients of any order for all arguments.

        h_t = exp(dt_t A) * h_{t-1} + (dt_t x_t) B_t^T        y_t = h_t C_t + D * x_t

    Args:
        x_BTD: inputs.
        dt_BTD: step sizes, none below zero.
        A_DN: rates, none above zero: what is exponentiated must not be positive.
        B_BTN: what the input is written to.
        C_BTN: what the output is read with.
        D_D: what passes by the state.
        h0_BDN: the state before the first step.
        backend: ``compiled`` is a kernel for the CPU, in float32 and float64; ``sequential`` and ``parallel`` are those
            of :func:`elman.scan.linear.linear_recurrence` on whole tensors. None: as there.

    Returns:
        y (B, T, D), and h (B, D, N) after the last step.
    """
    inputs = (x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, D_D, h0_BDN)
    backend = backend or backend_for(x_BTD)
    if backend != "compiled":
        return _with_whole_tensors(*inputs, backend=backend)
    y_BTD, h_BDN = _Compiled.apply(*inputs)
    return y_BTD, h_BDN


def _with_whole_tensors(*inputs: Tensor, backend: Backend | None = None) -> tuple[Tensor, Tensor]:
    """The same by operations on tensors, from the arguments in their order."""
    x_BTD, dt_BTD, A_DN, B_BTN, C_BTN, D_D, h0_BDN = inputs
    factor_BTDN = (dt_BTD.unsqueeze(-1) * A_DN).exp()
    addend_BTDN = (dt_BTD * x_BTD).unsqueeze(-1) * B_BTN.unsqueeze(2)
    h_BTH, last_BH = linear_recurrence(factor_BTDN.flatten(2), addend_BTDN.flatten(2), h0_BDN.flatten(1), backend)
    h_BTDN = h_BTH.unflatten(2, A_DN.shape)
    return (h_BTDN * C_BTN.unsqueeze(2)).sum(-1) + D_D * x_BTD, last_BH.unflatten(1, A_DN.shape)


class _Compiled(torch.autograd.Function):
    """The kernel and its gradient, which computes the states a second time and then runs backwards in time.

    With g_t the gradient that reaches h_t from its own use and from all later states, and f_t = exp(dt_t A):

        g_t = dy_t C_t^T + f_{t+1} * g_{t+1}           q_t = f_t * g_t * h_{t-1}
        dC_t = h_t^T dy_t        dB_t = g_t^T (dt_t x_t)        d(dt_t x_t) = g_t B_t
        dx_t = dt_t d(dt_t x_t) + D dy_t        d(dt_t) = x_t d(dt_t x_t) + the sum of q_t * A over states
        dh_0 = f_1 * g_1        dA and dD = the sums of dt_t q_t and dy_t x_t over rows and times
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD, h0_BDN = inputs[0], inputs[-1]
        y_BTD, last_BDN = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x_BTD, h0_BDN))
        _run(_kernels()[0], *inputs, y_BTD, last_BDN)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return y_BTD, last_BDN

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        x_BTD, _, A_DN, B_BTN, _, D_D, h0_BDN = inputs
        of_y_BTD, of_last_BDN = (
            torch.zeros_like(result) if gradient is None else gradient
            for gradient, result in zip(gradients, (x_BTD, h0_BDN), strict=True)
        )
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return differentiable_gradient(_with_whole_tensors, inputs, (of_y_BTD, of_last_BDN))
        of_x_BTD, of_dt_BTD, of_h0_BDN, of_A_BDN = (x_BTD.new_empty(t.shape) for t in (x_BTD, x_BTD, h0_BDN, h0_BDN))
        # Sums that several blocks contribute to are finished here, in an order that no number of threads changes.
        of_B_KBTN, of_C_KBTN = (x_BTD.new_empty(_num_blocks(len(A_DN)), *B_BTN.shape) for _ in range(2))
        of_D_BD = x_BTD.new_empty(len(x_BTD), len(D_D))
        results = (of_x_BTD, of_dt_BTD, of_A_BDN, of_B_KBTN, of_C_KBTN, of_D_BD, of_h0_BDN)
        _run(_kernels()[1], *inputs, of_y_BTD, of_last_BDN, *results)
        sums = (partial.sum(0) for partial in results[2:-1])
        return of_x_BTD, of_dt_BTD, *sums, of_h0_BDN


def _num_blocks(num_channels: int) -> int:
    return -(-num_channels // _BLOCK)


def _run(kernel: Callable[..., None], *tensors: Tensor) -> None:
    """Call a kernel on all rows and all blocks of channels."""
    (num_rows, num_steps, num_channels), num_states = tensors[0].shape, tensors[2].shape[1]
    num_units = num_rows * _num_blocks(num_channels)
    num_threads = min(num_units, num_threads_for(num_rows * num_steps * num_channels * num_states))
    run_in_threads(kernel, tensors, cuts(num_units, num_threads))


@cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None]]:
    """Forward and backward."""
    _let_numba_know_exp()
    freedoms = {"reassoc", "contract"}
    return compiled(_forward_kernel, freedoms), compiled(_backward_kernel, freedoms)


_LOG2_E, _HALF, _LOWEST = np.float32(np.log2(np.e)), np.float32(0.5), np.float32(-87.0)
_LN2_HIGH = np.float32(355 / 512)
"""Few digits, so that its multiples are exact."""
_LN2_LOW = np.float32(np.log(2.0) - 355 / 512)
_T0, _T2, _T3, _T4, _T5, _T6, _T7 = (np.float32(1 / divisor) for divisor in (1, 2, 6, 24, 120, 720, 5040))


def _exp(value: Any) -> Any:
    """e^value for a value that is not positive; in float32 e^-87 for all below. In kernels only."""
    raise NotImplementedError  # outside of a kernel; inside, Numba puts the overload below in its place


def _let_numba_know_exp() -> None:
    """Make :func:`_exp` arithmetic that a loop can do on many numbers at once, where the library's takes one by one.

    e^x = 2^k e^r with k whole and r within +-log(2)/2, where eight terms of the series leave an error below 1e-8; 2^k
    is the float32 with the exponent k.
    """
    from numba import types
    from numba.extending import overload

    def single(value: Any) -> Any:
        value = _LOWEST if value < _LOWEST else value
        k = np.int32(value * _LOG2_E - _HALF)
        r = value - np.float32(k) * _LN2_HIGH - np.float32(k) * _LN2_LOW
        series = _T0 + r * (_T0 + r * (_T2 + r * (_T3 + r * (_T4 + r * (_T5 + r * (_T6 + r * _T7))))))
        return series * np.int32((k + 127) << 23).view(np.float32)

    def double(value: Any) -> Any:
        return math.exp(value)

    @overload(_exp, inline="always")
    def exp(value: Any) -> Any:
        return single if value == types.float32 else double


# Inside a kernel states stand as (N, channels of the block): the long loops run over channels. Each has so few arrays
# that the compiler can show them not to overlap, which it must before it uses vector instructions.


def _forward_kernel(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array, h0: Array, y: Array, last: Array,
    first_unit: int, end_unit: int,
) -> None:  # fmt: skip
    num_steps, num_channels, num_states = x.shape[1], x.shape[2], A.shape[1]
    num_blocks = (num_channels + _BLOCK - 1) // _BLOCK
    rates, states = np.empty((num_states, _BLOCK), x.dtype), np.empty((num_states, _BLOCK), x.dtype)
    u = np.empty(_BLOCK, x.dtype)
    for unit in range(first_unit, end_unit):
        row, start = unit // num_blocks, unit % num_blocks * _BLOCK
        end = min(start + _BLOCK, num_channels)
        width = end - start
        for n in range(num_states):
            for j in range(width):
                rates[n, j], states[n, j] = A[start + j, n], h0[row, start + j, n]
        for t in range(num_steps):
            x_t, dt_t, y_t = x[row, t, start:end], dt[row, t, start:end], y[row, t, start:end]
            for j in range(width):
                u[j] = dt_t[j] * x_t[j]
                y_t[j] = D[start + j] * x_t[j]
            for n in range(num_states):
                b, c, rate, h = B[row, t, n], C[row, t, n], rates[n], states[n]
                for j in range(width):
                    h[j] = _exp(dt_t[j] * rate[j]) * h[j] + u[j] * b
                for j in range(width):
                    y_t[j] += h[j] * c
        for n in range(num_states):
            for j in range(width):
                last[row, start + j, n] = states[n, j]


def _backward_kernel(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array, h0: Array, of_y: Array, of_last: Array,
    of_x: Array, of_dt: Array, of_A: Array, of_B: Array, of_C: Array, of_D: Array, of_h0: Array,
    first_unit: int, end_unit: int,
) -> None:  # fmt: skip
    num_steps, num_channels, num_states = x.shape[1], x.shape[2], A.shape[1]
    num_blocks = (num_channels + _BLOCK - 1) // _BLOCK
    rates, of_rates = np.empty((num_states, _BLOCK), x.dtype), np.empty((num_states, _BLOCK), x.dtype)
    states = np.empty((num_steps + 1, num_states, _BLOCK), x.dtype)
    factors = np.empty((num_steps, num_states, _BLOCK), x.dtype)
    gradients = np.empty((num_states, _BLOCK), x.dtype)
    u, of_u, q = np.empty(_BLOCK, x.dtype), np.empty(_BLOCK, x.dtype), np.empty(_BLOCK, x.dtype)
    skip, of_skip = np.empty(_BLOCK, x.dtype), np.empty(_BLOCK, x.dtype)
    for unit in range(first_unit, end_unit):
        row, block = unit // num_blocks, unit % num_blocks
        start = block * _BLOCK
        end = min(start + _BLOCK, num_channels)
        width = end - start
        for n in range(num_states):
            for j in range(width):
                rates[n, j], states[0, n, j] = A[start + j, n], h0[row, start + j, n]
                of_rates[n, j], gradients[n, j] = 0, of_last[row, start + j, n]
        for j in range(width):
            skip[j], of_skip[j] = D[start + j], 0
        for t in range(num_steps):
            x_t, dt_t = x[row, t, start:end], dt[row, t, start:end]
            for j in range(width):
                u[j] = dt_t[j] * x_t[j]
            for n in range(num_states):
                b, rate, factor, previous_h, h = B[row, t, n], rates[n], factors[t, n], states[t, n], states[t + 1, n]
                for j in range(width):
                    factor[j] = _exp(dt_t[j] * rate[j])
                for j in range(width):
                    h[j] = factor[j] * previous_h[j] + u[j] * b
        for t in range(num_steps - 1, -1, -1):
            x_t, dt_t, of_y_t = x[row, t, start:end], dt[row, t, start:end], of_y[row, t, start:end]
            of_x_t, of_dt_t = of_x[row, t, start:end], of_dt[row, t, start:end]
            for j in range(width):
                u[j] = dt_t[j] * x_t[j]
            for j in range(width):
                of_u[j], of_dt_t[j] = 0, 0
            for n in range(num_states):
                b, c, g, h = B[row, t, n], C[row, t, n], gradients[n], states[t + 1, n]
                of_b = of_c = x.dtype.type(0)
                for j in range(width):
                    g_j = g[j] + of_y_t[j] * c
                    of_c += of_y_t[j] * h[j]
                    of_b += g_j * u[j]
                    of_u[j] += g_j * b
                    g[j] = g_j
                of_B[block, row, t, n], of_C[block, row, t, n] = of_b, of_c
                factor, previous_h = factors[t, n], states[t, n]
                for j in range(width):
                    g_j = factor[j] * g[j]
                    q[j] = g_j * previous_h[j]
                    g[j] = g_j
                rate, of_rate = rates[n], of_rates[n]
                for j in range(width):
                    of_dt_t[j] += q[j] * rate[j]
                    of_rate[j] += q[j] * dt_t[j]
            for j in range(width):
                of_x_t[j] = of_u[j] * dt_t[j] + of_y_t[j] * skip[j]
            for j in range(width):
                of_dt_t[j] += of_u[j] * x_t[j]
            for j in range(width):
                of_skip[j] += of_y_t[j] * x_t[j]
        of_D[row, start:end] = of_skip[:width]
        for n in range(num_states):
            for j in range(width):
                of_A[row, start + j, n], of_h0[row, start + j, n] = of_rates[n, j], gradients[n, j]
