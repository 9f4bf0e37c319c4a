"""Models that go on learning from the text they are judged on: dynamic evaluation and the neural cache.

Both give every token its probability before they see it, and learn from it afterwards. Their figures stand beside the
plain one, never in its place. What they need to be told is chosen on another text than the one that is judged.

Shape letters: B rows, T time, C tokens before them, F features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.data.streams import Segment
from elman.evaluation import Reals, Span, segments_of, softmax_dtype
from elman.metrics import Score
from elman.models.contract import LanguageModel

SEGMENT_LENGTHS = {"char": 20, "byte": 20, "word": 5, "bpe": 5}
"""Tokens between two updates of dynamic evaluation, by level, as in the paper."""
LEARNING_RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
DECAYS = (1e-4, 1e-3, 1e-2)
CACHE_SIZES = (100, 500, 2000)
FLATNESSES = (1.0, 3.0, 10.0, 30.0)
"""Of the cache, in units of one over the mean of h . h."""
CACHE_WEIGHTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)

_EPSILON = 0.1
_STATISTICS_ROWS = 16
_STATISTICS_SEGMENTS = 100
_CACHE_BLOCK = 256
_MAX_TUNED = 5_000
"""Tokens on which one setting is tried: a step of learning after every few of them takes its time."""
_MAX_CACHE_TUNED = 10_000


@dataclass(frozen=True)
class Adapted:
    """What a model reaches that learns while it is judged, and what it was told."""

    score: Score
    settings: dict[str, float]
    """The best of those tried."""
    num_tried: int
    tuned_on: str
    """The text on which they were tried; it is not the one that is judged."""
    tuned_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return self.score.to_dict() | {
            "settings": self.settings,
            "tried": self.num_tried,
            "tuned_on": self.tuned_on,
            "tuned_tokens": self.tuned_tokens,
        }


class TuningText(NamedTuple):
    """The text on which settings are chosen."""

    name: str
    tokens: NDArray[Any]


@dataclass(frozen=True)
class DynamicSettings:
    """What dynamic evaluation needs to be told."""

    learning_rate: float
    """eta."""
    decay: float
    """lambda, towards the trained parameters; above 0."""
    segment_length: int
    """Tokens between two updates."""


def evaluate_dynamically(
    network: LanguageModel, tokens: NDArray[Any], plain: Score, *, train: NDArray[Any], tuning: TuningText, level: str
) -> Adapted:
    """Dynamic evaluation with settings that are best on another text; see :func:`dynamic_nats`.

    Args:
        network: the model; it is not changed.
        tokens: what is judged, its boundary first.
        plain: the score without it.
        train: the training text, from which the statistics of the gradient come.
        tuning: the text on which rate and decay are chosen.
        level: of the tokens; it decides the length of a segment.
    """
    length = SEGMENT_LENGTHS[level]
    statistics = gradient_statistics(network, train, length)
    grid = [DynamicSettings(rate, decay, length) for rate, decay in product(LEARNING_RATES, DECAYS)]
    tried = tuning.tokens[: _MAX_TUNED + 1]
    best = min(grid, key=lambda settings: _or_infinity(dynamic_nats(network, tried, statistics, settings)))
    nats = dynamic_nats(network, tokens, statistics, best)
    return Adapted(replace(plain, nats_total=nats), asdict(best), len(grid), tuning.name, len(tried) - 1)


def _or_infinity(nats: float) -> float:
    return math.inf if math.isnan(nats) else nats


def gradient_statistics(
    network: LanguageModel,
    tokens: NDArray[Any],
    segment_length: int,
    *,
    num_rows: int = _STATISTICS_ROWS,
    num_segments: int = _STATISTICS_SEGMENTS,
) -> list[Tensor]:
    """The root mean square of each parameter's gradient over the training text, ``sqrt(MS_g)`` of the paper.

    The text is read as ``num_rows`` streams side by side, of each the first ``num_segments`` segments; a gradient is
    that of the mean loss of one segment of all rows.
    """
    num_rows = min(num_rows, max(1, (len(tokens) - 1) // segment_length))
    borders = np.linspace(0, len(tokens) - 1, num_rows + 1).astype(int).tolist()
    spans = tuple(Span(begin, begin, end) for begin, end in pairwise(borders))
    parameters = list(network.parameters())
    squares = [torch.zeros_like(parameter) for parameter in parameters]
    count = 0
    state = network.initial_state(num_rows)
    for segment, _ in segments_of(tokens, spans, segment_length, network.boundary_id):
        nats_BT, state = _nats(network, segment, state)
        gradients = _gradients(nats_BT.sum() / segment.num_targets, parameters)
        for square, gradient in zip(squares, gradients, strict=True):
            square += gradient**2
        state, count = state.detach(), count + 1
        if count == num_segments:
            break
    return [(square / count).sqrt() for square in squares]


def dynamic_nats(
    network: LanguageModel, tokens: NDArray[Any], statistics: Sequence[Tensor], settings: DynamicSettings
) -> float:
    """The nats of a text under a model that takes a step of gradient descent after every segment of it.

        theta <- theta - eta g / (S + epsilon) + lambda min(S / mean(S), 1 / lambda) (theta_0 - theta)

    g is the gradient of the mean loss of the segment just scored, S the statistics, theta_0 the trained parameters;
    epsilon is a tenth of mean(S), the mean over all parameters. The state is carried on, and no gradient through it.

    Paper: Krause, Kahembwe, Murray and Renals 2018, https://arxiv.org/abs/1709.07432

    Args:
        network: the model; a copy of it learns.
        tokens: the text, its boundary first.
        statistics: from :func:`gradient_statistics`.
        settings: rate, decay and length of a segment.
    """
    adapted = copy.deepcopy(network)
    parameters = list(adapted.parameters())
    trained = [parameter.detach().clone() for parameter in parameters]
    mean = sum(one.sum().item() for one in statistics) / sum(one.numel() for one in statistics)
    rates = [settings.learning_rate / (one + _EPSILON * mean) for one in statistics]
    pulls = [settings.decay * (one / mean).clamp(max=1 / settings.decay) for one in statistics]
    nats, state = 0.0, adapted.initial_state(1)
    whole = (Span(0, 0, len(tokens) - 1),)
    for segment, _ in segments_of(tokens, whole, settings.segment_length, network.boundary_id):
        nats_BT, state = _nats(adapted, segment, state)
        nats += nats_BT.sum(dtype=torch.float64).item()
        gradients = _gradients(nats_BT.mean(), parameters)
        with torch.no_grad():
            for theta, theta_0, gradient, rate, pull in zip(parameters, trained, gradients, rates, pulls, strict=True):
                theta.add_(pull * (theta_0 - theta) - rate * gradient)
        state = state.detach()
    return nats


def _nats(network: LanguageModel, segment: Segment, state: Any) -> tuple[Tensor, Any]:
    """The nats of each target with their graph, and the state after the segment."""
    device = network.device
    features_BTF, state = network.features(segment.tokens_BT.to(device), state)
    targets_BT, weight_BT = segment.targets_BT.to(device), segment.weight_BT.to(device)
    return network.head.nll(features_BTF, targets_BT, weight_BT, dtype=softmax_dtype(network)), state


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@dataclass(frozen=True)
class CacheSettings:
    """What the neural cache needs to be told."""

    size: int
    """How many of the last tokens it holds."""
    flatness: float
    """theta: the higher, the more the most similar features alone count."""
    weight: float
    """lambda: the share of the probability that the cache gives."""


def evaluate_with_cache(network: LanguageModel, tokens: NDArray[Any], plain: Score, *, tuning: TuningText) -> Adapted:
    """The neural cache with settings that are best on another text; see :func:`cache_nats`.

    Args:
        network: the model.
        tokens: what is judged, its boundary first.
        plain: the score without it.
        tuning: the text on which size, flatness and weight are chosen.
    """
    tuned_on = tuning.tokens[: _MAX_CACHE_TUNED + 1]
    num_targets = len(tuned_on) - 1
    unit = 1 / _mean_square(network, tuned_on)
    grid = list(product(CACHE_SIZES, (flatness * unit for flatness in FLATNESSES)))
    p_model_N = np.empty(num_targets)
    p_cache_GN = np.empty((len(grid), num_targets))
    for block in _blocks(network, tuned_on, max(CACHE_SIZES)):
        here = slice(block.start, block.start + len(block.p_model_T))
        p_model_N[here] = block.p_model_T
        for row, (size, flatness) in enumerate(grid):
            p_cache_GN[row, here] = block.p_cache(size, flatness)
    tried = {
        CacheSettings(size, flatness, weight): _mixed_nats(p_model_N, p_cache_GN[row], weight)
        for row, (size, flatness) in enumerate(grid)
        for weight in CACHE_WEIGHTS
    }
    best = min(tried, key=lambda settings: tried[settings])
    nats = cache_nats(network, tokens, best)
    return Adapted(replace(plain, nats_total=nats), asdict(best), len(tried), tuning.name, num_targets)


def cache_nats(network: LanguageModel, tokens: NDArray[Any], settings: CacheSettings) -> float:
    """The nats of a text under a model that is mixed with a cache of its own features.

        p(w) = (1 - lambda) p_model(w) + lambda p_cache(w)
        p_cache(w) = sum over i of [x_{i+1} = w] exp(theta h_t . h_i) / sum over i of exp(theta h_t . h_i)

    h are the features that the head reads, x the tokens; i runs over the last ``size`` positions before t, so that all
    that is used has been seen. At the first position the cache is empty and the model alone counts.

    Paper: Grave, Joulin and Usunier 2017, https://arxiv.org/abs/1612.04426 (its linear interpolation)
    """
    return math.fsum(
        _mixed_nats(block.p_model_T, block.p_cache(settings.size, settings.flatness), settings.weight)
        for block in _blocks(network, tokens, settings.size)
    )


def _mixed_nats(p_model_N: Reals, p_cache_N: Reals, weight: float) -> float:
    """NaN in place of the cache's probability stands where it is empty."""
    mixed_N = np.where(np.isnan(p_cache_N), p_model_N, (1 - weight) * p_model_N + weight * p_cache_N)
    with np.errstate(divide="ignore"):
        return float(-np.log(mixed_N).sum())


def _mean_square(network: LanguageModel, tokens: NDArray[Any]) -> float:
    squares = [block.squares_T for block in _blocks(network, tokens, 1)]
    return max(float(np.concatenate(squares).mean()), 1e-30)


@dataclass(frozen=True)
class _Block:
    """Some positions of a text, and how much their features are like those before them."""

    start: int
    """Number of the first position."""
    p_model_T: Reals
    """What the model alone gives the target."""
    squares_T: Reals
    """h . h of each position."""
    scores_TC: Reals
    """h_t . h_i for the positions before the block and in it."""
    is_target_TC: NDArray[np.bool_]
    """Whether the token after i is the target of t."""
    distances_TC: NDArray[np.int64]
    """t - i; those of 1 and more have been seen."""

    def p_cache(self, size: int, flatness: float) -> Reals:
        """What the cache gives the target of each position; NaN where it is empty."""
        seen_TC = (self.distances_TC >= 1) & (self.distances_TC <= size)
        scores_TC = np.where(seen_TC, flatness * self.scores_TC, -np.inf)
        is_empty_T = ~seen_TC.any(axis=1)
        highest_T1 = np.where(is_empty_T, 0.0, scores_TC.max(axis=1))[:, None]
        weights_TC = np.exp(scores_TC - highest_T1)
        total_T = np.where(is_empty_T, np.nan, weights_TC.sum(axis=1))
        found: Reals = (weights_TC * self.is_target_TC).sum(axis=1) / total_T
        return found


def _blocks(network: LanguageModel, tokens: NDArray[Any], size: int) -> Iterator[_Block]:
    """Read a text as one stream, and keep the features of the last positions."""
    state, start = network.initial_state(1), 0
    keys_CF, nexts_C = np.empty((0, 0)), np.empty(0, np.int64)
    whole = (Span(0, 0, len(tokens) - 1),)
    for segment, _ in segments_of(tokens, whole, _CACHE_BLOCK, network.boundary_id):
        with torch.no_grad():
            features_BTF, state = network.features(segment.tokens_BT.to(network.device), state)
            targets_BT = segment.targets_BT.to(network.device)
            nats_BT = network.head.nll(features_BTF, targets_BT, dtype=softmax_dtype(network))
        h_TF = features_BTF[0].double().cpu().numpy()
        targets_T = segment.targets_BT[0].numpy()
        keys_CF = np.concatenate([keys_CF.reshape(-1, h_TF.shape[1]), h_TF])
        nexts_C = np.concatenate([nexts_C, targets_T])
        num_before = len(keys_CF) - len(h_TF)
        yield _Block(
            start=start,
            p_model_T=np.exp(-nats_BT[0].double().cpu().numpy()),
            squares_T=(h_TF**2).sum(axis=1),
            scores_TC=h_TF @ keys_CF.T,
            is_target_TC=targets_T[:, None] == nexts_C,
            distances_TC=np.arange(num_before, len(keys_CF))[:, None] - np.arange(len(keys_CF)),
        )
        start += len(h_TF)
        keys_CF, nexts_C = keys_CF[-size:], nexts_C[-size:]
