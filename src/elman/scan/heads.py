"""What runs over all steps of a segment in cells that are cut into heads: two matrix memories and the sLSTM.

A matrix memory is read and written by keys. Within a chunk of steps all of it is products of matrices; from chunk to
chunk the state is carried exactly, so that any length gives what one step after the other gives.

Shape letters: B rows, N heads, T time, S time of what is read (also T long), D width of a head, G four gates (4 D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK = 64
"""Steps of a chunk: the work within one grows with its length, the number of chunks falls."""


def mlstm_scan(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, i_BNT: Tensor, log_f_BNT: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The memory of the mLSTM (:class:`elman.cells.mlstm.MLSTM`); gradients of any order.

    Args:
        q_BNTD: queries.
        k_BNTD: keys, divided by sqrt(D).
        v_BNTD: values.
        i_BNT: logarithm of the input gate.
        log_f_BNT: logarithm of the forget gate.
        state: C (B, N, D, D), n (B, N, D) and m (B, N, 1).

    Returns:
        What the queries read (B, N, T, D), and the state after the last step.
    """
    outputs = []
    for q, k, v, i, log_f in _chunks(q_BNTD, k_BNTD, v_BNTD, i_BNT, log_f_BNT):
        output, state = _mlstm_chunk(q, k, v, i, log_f, *state)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def _mlstm_chunk(
    q_BNTD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, i_BNS: Tensor, log_f_BNT: Tensor,
    C_BNDD: Tensor, n_BND: Tensor, m_BN1: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    # With b_t the sum of log f up to t: at t step s is worth exp(b_t - b_s + i_s - m_t), the state exp(b_t + m - m_t).
    b_BNT = log_f_BNT.cumsum(-1)
    written_BNS = i_BNS - b_BNT
    m_BNT = (b_BNT + torch.maximum(written_BNS.cummax(-1).values, m_BN1)).clamp(min=0.0)
    worth_BNTS = _causal((b_BNT - m_BNT).unsqueeze(-1) + written_BNS.unsqueeze(-2)).exp()
    kept_BNT1 = (b_BNT + m_BN1 - m_BNT).exp().unsqueeze(-1)
    scores_BNTS = q_BNTD @ k_BNSD.mT * worth_BNTS
    read_BNTD = scores_BNTS @ v_BNSD + kept_BNT1 * (q_BNTD @ C_BNDD.mT)
    weight_BNT1 = scores_BNTS.sum(-1, keepdim=True) + kept_BNT1 * (q_BNTD @ n_BND.unsqueeze(-1))
    output_BNTD = read_BNTD / torch.maximum(weight_BNT1.abs(), (-m_BNT).exp().unsqueeze(-1))
    k_BNSD, kept_BN11 = worth_BNTS[:, :, -1].unsqueeze(-1) * k_BNSD, kept_BNT1[:, :, -1:]
    C_BNDD = kept_BN11 * C_BNDD + v_BNSD.mT @ k_BNSD
    return output_BNTD, (C_BNDD, kept_BN11.squeeze(-1) * n_BND + k_BNSD.sum(2), m_BNT[:, :, -1:])


def delta_scan(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, log_alpha_BNT: Tensor, beta_BNT: Tensor, S_BNDD: Tensor
) -> tuple[Tensor, Tensor]:
    """The memory of the gated DeltaNet (:class:`elman.cells.gated_deltanet.GatedDeltaNet`); gradients of any order.

    Args:
        q_BNTD: queries.
        k_BNTD: keys, of length one.
        v_BNTD: values.
        log_alpha_BNT: logarithm of the share that is kept of the memory.
        beta_BNT: the share of what is written under a key that is replaced.
        S_BNDD: the memory before the first step.

    Returns:
        What the queries read (B, N, T, D), and the memory after the last step.
    """
    outputs = []
    for q, k, v, log_alpha, beta in _chunks(q_BNTD, k_BNTD, v_BNTD, log_alpha_BNT, beta_BNT):
        output, S_BNDD = _delta_chunk(q, k, v, log_alpha, beta, S_BNDD)
        outputs.append(output)
    return torch.cat(outputs, dim=2), S_BNDD


def _delta_chunk(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, log_alpha_BNT: Tensor, beta_BNT: Tensor, S_BNDD: Tensor
) -> tuple[Tensor, Tensor]:
    # S_t = a_t S_{t-1} + u_t k_t^T with u_t = beta_t (v_t - a_t S_{t-1} k_t), which holds the earlier u_s of the chunk:
    # all u together solve a triangular system (the UT transform of Yang et al. 2024, https://arxiv.org/abs/2406.06484).
    b_BNT, beta_BNT1 = log_alpha_BNT.cumsum(-1), beta_BNT.unsqueeze(-1)
    kept_BNTS = _causal(b_BNT.unsqueeze(-1) - b_BNT.unsqueeze(-2)).exp()
    kept_BNT1 = b_BNT.exp().unsqueeze(-1)
    system_BNTS = (beta_BNT1 * k_BNTD) @ k_BNTD.mT * kept_BNTS
    target_BNTD = beta_BNT1 * (v_BNTD - kept_BNT1 * (k_BNTD @ S_BNDD.mT))
    # Only what is below the diagonal is looked at; the diagonal counts as ones.
    u_BNTD = torch.linalg.solve_triangular(system_BNTS, target_BNTD, upper=False, unitriangular=True)
    output_BNTD = (q_BNTD @ k_BNTD.mT * kept_BNTS) @ u_BNTD + kept_BNT1 * (q_BNTD @ S_BNDD.mT)
    u_BNTD = kept_BNTS[:, :, -1].unsqueeze(-1) * u_BNTD
    return output_BNTD, kept_BNT1[:, :, -1:] * S_BNDD + u_BNTD.mT @ k_BNTD


def _chunks(*parts: Tensor) -> zip[tuple[Tensor, ...]]:
    """Pieces of consecutive steps of all parts, each (B, N, T, ...)."""
    return zip(*(part.split(_CHUNK, dim=2) for part in parts), strict=True)


def _causal(exponents_BNTS: Tensor) -> Tensor:
    """Minus infinity where s comes after t."""
    num_steps = exponents_BNTS.shape[-1]
    later_TS = torch.ones(num_steps, num_steps, dtype=torch.bool, device=exponents_BNTS.device).triu(1)
    return exponents_BNTS.masked_fill(later_TS, float("-inf"))


def slstm_scan(
    x_NTBG: Tensor, weight_NGD: Tensor, state: tuple[Tensor, ...], exponential_forgetting: bool
) -> tuple[Tensor, ...]:
    """The recurrence of the sLSTM (:class:`elman.cells.slstm.SLSTM`); gradients of any order.

    Args:
        x_NTBG: what the gates get from the input; input, forget, candidate and output gate side by side.
        weight_NGD: what they get from h, as matrices.
        state: h, c, n and m, each (N, B, D).
        exponential_forgetting: the forget gate is an exponential, not a sigmoid.

    Returns:
        h after each step (N, T, B, D), and c, n and m after the last.
    """
    results: tuple[Tensor, ...] = _SLSTM.apply(exponential_forgetting, x_NTBG, weight_NGD, *state)
    return results


class _SLSTM(torch.autograd.Function):
    """The loop over time without a graph, and its gradient.

    With dh, dc, dn and dm the gradients that reach the state after step t, and k = log F + m_{t-1}:

        dc <- dc + dh o / n                 dk = dc f' c_{t-1} + dn f' n_{t-1}
        dn <- dn - dh o c / n^2             di = dc i' z + dn i'

    and what is left of dm, dm - dk - di, goes to the larger of k and i. All that does not hold one of the four is
    computed for all steps at once; the weights get their gradient by one product at the end.
    """

    @staticmethod
    def forward(ctx: Any, exponential: bool, x_NTBG: Tensor, weight_NGD: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        raw_NTBG = torch.empty_like(x_NTBG, memory_format=torch.contiguous_format)
        states = tuple(raw_NTBG.new_empty(*x_NTBG.shape[:3], part.shape[-1]) for part in state)
        h, c, n, m = state
        for x, raw, *after in zip(x_NTBG.unbind(1), raw_NTBG.unbind(1), *(s.unbind(1) for s in states), strict=True):
            torch.baddbmm(x, h, weight_NGD.mT, out=raw)
            i, f, z, o = raw.chunk(4, dim=-1)
            k = (f if exponential else functional.logsigmoid(f)).add(m)
            h_next, c_next, n_next, m_next = after
            torch.maximum(k, i, out=m_next)
            input_gate, forget_gate = (i - m_next).exp_(), k.sub_(m_next).exp_()
            torch.addcmul(input_gate * z.tanh(), forget_gate, c, out=c_next)
            torch.addcmul(input_gate, forget_gate, n, out=n_next)
            torch.div(c_next, n_next, out=h_next).mul_(o.sigmoid())
            h, c, n, m = after
        ctx.exponential = exponential
        ctx.save_for_backward(x_NTBG, weight_NGD, *state, raw_NTBG, *states)
        return states[0], *(part[:, -1].clone() for part in states[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NTBG, weight_NGD, h0, c0, n0, m0, raw_NTBG, h, c, n, m = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            given = (x_NTBG, weight_NGD, h0, c0, n0, m0)
            return None, *_gradient_of_loop(ctx.exponential, given, ctx.needs_input_grad[1:], gradients)
        h_before, c_before, n_before, m_before = (
            torch.cat([first.unsqueeze(1), part[:, :-1]], dim=1)
            for first, part in zip((h0, c0, n0, m0), (h, c, n, m), strict=True)
        )
        i, f, z, o = raw_NTBG.chunk(4, dim=-1)
        k = (f if ctx.exponential else functional.logsigmoid(f)) + m_before
        input_gate, forget_gate, z, o, mean = (i - m).exp(), (k - m).exp(), z.tanh(), o.sigmoid(), c / n
        # Where the two are equal each gets half of the gradient of their maximum, as in torch.maximum.
        k_is_larger = (k > i).to(i) + 0.5 * (k == i)
        of_h_NTBD, of_c, of_n, of_m = gradients
        of_step = [
            of_h_NTBD,
            o / n,
            mean,
            forget_gate,
            forget_gate * c_before,
            forget_gate * n_before,
            input_gate,
            input_gate * z,
            k_is_larger,
            torch.ones_like(f) if ctx.exponential else (-f).sigmoid(),
            input_gate * (1 - z * z),
            mean * o * (1 - o),
        ]
        of_raw_NTBG = torch.empty_like(raw_NTBG)
        of_h, of_c, of_n = torch.zeros_like(h0), of_c.clone(), of_n.clone()
        for of_raw, *parts in reversed(list(zip(of_raw_NTBG.unbind(1), *(p.unbind(1) for p in of_step), strict=True))):
            more_h, o_by_n, mean, forget_gate, fc, fn, input_gate, iz, k_is_larger, slope_f, slope_z, slope_o = parts
            of_i, of_f, of_z, of_o = of_raw.chunk(4, dim=-1)
            of_h = of_h + more_h
            of_mean = of_h * o_by_n
            of_c.add_(of_mean)
            of_n.addcmul_(of_mean, mean, value=-1)
            torch.mul(of_h, slope_o, out=of_o)
            torch.mul(of_c, slope_z, out=of_z)
            of_k = (of_c * fc).addcmul_(of_n, fn)
            torch.mul(of_c, iz, out=of_i).addcmul_(of_n, input_gate)
            of_m = of_m - of_k - of_i
            to_k = of_m * k_is_larger
            of_i.add_(of_m).sub_(to_k)
            of_m = of_k.add_(to_k)
            torch.mul(of_m, slope_f, out=of_f)
            of_c.mul_(forget_gate)
            of_n.mul_(forget_gate)
            of_h = of_raw @ weight_NGD
        of_weight_NGD = of_raw_NTBG.flatten(1, 2).mT @ h_before.flatten(1, 2)
        return None, of_raw_NTBG, of_weight_NGD, of_h, of_c, of_n, of_m


def _gradient_of_loop(
    exponential: bool, given: tuple[Tensor, ...], needed: tuple[bool, ...], gradients: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """The gradient of :class:`_SLSTM`, in operations that have gradients of their own."""
    results = _slstm_loop(exponential, *given)
    wanted = [tensor for tensor, is_needed in zip(given, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(results, wanted, gradients, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


def _slstm_loop(
    exponential: bool, x_NTBG: Tensor, weight_NGD: Tensor, h: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, ...]:
    outputs = []
    for x in x_NTBG.unbind(1):
        i, f, z, o = torch.baddbmm(x, h, weight_NGD.mT).chunk(4, dim=-1)
        k = (f if exponential else functional.logsigmoid(f)) + m
        m = torch.maximum(k, i)
        input_gate, forget_gate = (i - m).exp(), (k - m).exp()
        c = forget_gate * c + input_gate * z.tanh()
        n = forget_gate * n + input_gate
        h = o.sigmoid() * c / n
        outputs.append(h)
    return torch.stack(outputs, dim=1), c, n, m
