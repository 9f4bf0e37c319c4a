"""Beam search: the most probable continuations of one text that can be found by following a few at a time.

Shape letters: K beams, V vocabulary. Works on any form of a model's step: rows of the state are selected, never looked
into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elman.engine import Stepper
from elman.errors import ElmanError

Adjust = Callable[[Sequence[tuple[int, ...]], npt.NDArray[np.float64]], None]
"""Changes log-probabilities (K, V) in place, given the tokens drawn so far of each of the K beams."""


@dataclass(frozen=True)
class Beam:
    """One continuation."""

    tokens: tuple[int, ...]
    """Without the boundary that ended it."""
    log_prob: float
    """Sum of the log-probabilities in nats of all tokens, of the boundary too where it ended the text."""
    score: float
    """log_prob / n^length_penalty for n tokens, the boundary counted."""
    finished: bool
    """Whether the boundary ended it; otherwise the length did."""


def beam_search(
    form: Stepper[Any],
    state: Any,
    logits_V: Tensor | npt.NDArray[np.floating],
    *,
    boundary_id: int,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    adjust: Adjust | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Beam]:
    """Follow the ``num_beams`` most probable continuations, token by token; the best score first.

    The rules are those of Hugging Face's ``generate``. Of the 2 K most probable one-token extensions of the K beams,
    those that end with the boundary and are among the first K become candidates, and the first K others are followed
    on. The best K candidates are kept. The search ends at ``max_new_tokens``, or once there are K candidates and the
    best beam, scored at its present length, is no better than the worst of them.

    Args:
        form: the step of any language model.
        state: after the text so far, one row, as the form has it.
        logits_V: its logits for the next token.
        boundary_id: the token that ends a text.
        num_beams: K.
        max_new_tokens: length at which texts are cut, at least 1.
        length_penalty: exponent of the length that a sum of log-probabilities is divided by: 0 compares the sums,
            1 the means; more favours longer texts.
        adjust: penalties and bans, applied to the log-probabilities of the next tokens.
        should_stop: polled before every token; once true, the beams end where they are.

    Raises:
        ElmanError: the logits hold NaN or infinity, or ``adjust`` leaves no token.
    """
    running: list[Beam] = [Beam((), 0.0, 0.0, finished=False)]
    candidates: list[Beam] = []
    logits_KV = torch.as_tensor(logits_V).unsqueeze(0)
    for length in range(1, max_new_tokens + 1):
        log_probs_KV = _log_probs(logits_KV)
        if adjust is not None:
            adjust([beam.tokens for beam in running], log_probs_KV)
        log_probs_KV += np.array([[beam.log_prob] for beam in running])
        scale = float(length) ** length_penalty
        is_last = length == max_new_tokens or should_stop()
        ended, followed = [], []
        for rank, flat in enumerate(_largest(log_probs_KV.reshape(-1), 2 * num_beams)):
            row, token = divmod(flat, log_probs_KV.shape[1])
            log_prob = float(log_probs_KV[row, token])
            finished = token == boundary_id
            tokens = running[row].tokens if finished else (*running[row].tokens, token)
            beam = Beam(tokens, log_prob, log_prob / scale, finished)
            if not (finished or is_last):
                followed.append((row, beam))
            elif rank < num_beams:
                ended.append(beam)
        candidates = sorted(candidates + ended, key=lambda beam: -beam.score)[:num_beams]
        followed = followed[:num_beams]
        if not followed:
            break
        if len(candidates) == num_beams and followed[0][1].score <= candidates[-1].score:
            break
        running = [beam for _, beam in followed]
        state = state.select([row for row, _ in followed])
        found_KV, state = form.step([beam.tokens[-1] for beam in running], state)
        logits_KV = torch.from_numpy(found_KV)
    if not candidates and max_new_tokens > 0:
        raise ElmanError("no token is left for any beam: the penalties and bans rule out all of them")
    return candidates or running


def _log_probs(logits_KV: Tensor) -> npt.NDArray[np.float64]:
    log_probs_KV: npt.NDArray[np.float64] = logits_KV.double().log_softmax(-1).cpu().numpy()
    if np.isnan(log_probs_KV).any():
        raise ElmanError("the model's logits hold NaN or infinity: its weights are damaged or training diverged")
    return log_probs_KV


def _largest(scores_N: npt.NDArray[np.float64], count: int) -> list[int]:
    """Indices of the largest scores, falling, the first of equals first; what is ruled out is not among them."""
    count = min(count, int((scores_N > -math.inf).sum()))
    if count == 0:
        return []
    smallest = np.partition(scores_N, -count)[-count]
    (indices,) = np.nonzero(scores_N >= smallest)
    order = np.argsort(-scores_N[indices], kind="stable")
    found: list[int] = indices[order[:count]].tolist()
    return found
