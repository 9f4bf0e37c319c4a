"""Hold units of a network at a value while it reads, and see what becomes of its predictions.

All interventions on one text are rows of one batch, the first of which is left alone. A unit of a cell's state is held
after every step, in what is carried on and, where the output of the cell is that part of the state, in the output too;
a unit of the features just before the prediction. The network itself is not touched: a copy is.

Shape letters: R rows (interventions), T time, V vocabulary, L sets of tokens, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.cells.base import Cell, CellState, Parameter, StatePart, Step
from elman.errors import UserError
from elman.inspection.watching import watchable
from elman.models.contract import LanguageModel
from elman.models.stack import Layer, RecurrentStack
from elman.models.state import State

FEATURES = "features"
"""The part that every network has: what its head reads."""
_LEAST = 1e-6
"""Probabilities nearer to 0 or 1 are taken for this: float32 holds no better ones."""


@dataclass(frozen=True)
class Hold:
    """One unit that is held at a value."""

    part: str
    """Of the state, such as ``0.c``, or ``features``."""
    unit: int
    value: float


@dataclass(frozen=True)
class Consequences:
    """What each intervention did to the prediction of each token; row 0 is the network left alone."""

    log_odds_TRL: NDArray[np.float32]
    """Of each set of tokens, ln p - ln (1 - p), in nats."""
    distance_TR: NDArray[np.float32]
    """Total variation between the prediction and that of row 0: 0 where they agree, 1 where they exclude each other."""
    nats_TR: NDArray[np.float32]
    """What the token that came cost."""


def held_parts(network: LanguageModel) -> dict[str, int]:
    """The parts whose units can be held, with their numbers of units.

    They are the parts of the states of the cells; of a network that has none of fixed size, a window or a Transformer,
    the features.

    Raises:
        UserError: the network counts, and has no units.
    """
    sizes = watchable(network)
    parts: list[str] = []
    if isinstance(network, RecurrentStack):
        for index, layer in enumerate(network.layers):
            parts += [f"{index}.{part}" for part in cast(Layer, layer).cell.state()]
    if FEATURES not in sizes:
        raise UserError(
            f"model.kind {network.config.kind!r} counts, and has no units to look at: give a model of another kind, "
            "such as lstm"
        )
    return {part: sizes[part] for part in parts if part in sizes} or {FEATURES: sizes[FEATURES]}


def intervene(
    network: LanguageModel,
    tokens: NDArray[np.integer[Any]],
    state: State,
    holds: Sequence[Hold],
    governed_LV: NDArray[np.bool_],
) -> Consequences:
    """Read a text once for each intervention, side by side.

    Args:
        network: is not changed.
        tokens: all but the last are read, all but the first are predicted.
        state: before the first of them, one row.
        holds: the interventions.
        governed_LV: sets of tokens whose odds are of interest.
    """
    twin = _with_held(network, holds)
    at_features = [(row, hold) for row, hold in enumerate(holds, 1) if hold.part == FEATURES]
    sets_VL = torch.from_numpy(governed_LV.T.copy()).to(network.device, network.dtype)
    rows_R = torch.zeros(len(holds) + 1, dtype=torch.int64)
    state = state.select(rows_R)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    ids = torch.from_numpy(tokens.astype(np.int64)).to(network.device)
    with torch.no_grad():
        for token, target in pairwise(ids):
            features_RF, state = twin.step(token.expand(len(rows_R)), state)
            if at_features:
                features_RF = features_RF.clone()
                for row, hold in at_features:
                    features_RF[row, hold.unit] = hold.value
            log_probs_RV = network.head.log_probs(features_RF.unsqueeze(1))[:, 0]
            p_RV = log_probs_RV.exp()
            distance_R = (p_RV - p_RV[:1]).abs().sum(-1) / 2
            log_odds_RL = (p_RV @ sets_VL).clamp(_LEAST, 1 - _LEAST).logit()
            seen.append((log_odds_RL, distance_R, -log_probs_RV[:, target]))
    log_odds, distance, nats = (torch.stack(one).float().cpu().numpy() for one in zip(*seen, strict=True))
    return Consequences(log_odds, distance, nats)


def _with_held(network: LanguageModel, holds: Sequence[Hold]) -> LanguageModel:
    """A copy of the network in which row i + 1 of a batch has the i-th unit held."""
    of_state = [(row, hold) for row, hold in enumerate(holds, 1) if hold.part != FEATURES]
    if not of_state or not isinstance(network, RecurrentStack):
        return network
    twin = copy.deepcopy(network)
    initial = network.initial_state(1).tensors
    for index, layer in enumerate(cast("Sequence[Layer]", list(twin.layers))):
        held: dict[str, tuple[Tensor, Tensor]] = {}
        for part in layer.cell.state():
            name = f"{index}.{part}"
            rows = [(row, hold) for row, hold in of_state if hold.part == name]
            if not rows:
                continue
            values = initial[name].new_zeros(len(holds) + 1, initial[name].numel())
            is_held = torch.zeros_like(values, dtype=torch.bool)
            for row, hold in rows:
                values[row, hold.unit], is_held[row, hold.unit] = hold.value, True
            shape = (len(values), *initial[name].shape[1:])
            held[part] = is_held.view(shape), values.view(shape)
        layer.cell = _HeldCell(layer.cell, held)
    return twin


class _HeldCell(Cell):
    """A cell with some units of its state held, other ones in each row.

    Args:
        cell: the cell.
        held: for some parts of the state, where and at which value, as large as the batch.
    """

    def __init__(self, cell: Cell, held: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__(cell.config, cell.input_size)
        self._cell, self._held = cell, held

    @property
    def output_size(self) -> int:
        return self._cell.output_size

    def parameters(self) -> Mapping[str, Parameter]:
        return self._cell.parameters()

    def state(self) -> Mapping[str, StatePart]:
        return self._cell.state()

    def step(self, p: Mapping[str, Tensor], x_BI: Tensor, state: CellState) -> Step:
        output, after, named = self._cell.step(p, x_BI, state)
        parts = dict(after)
        for name, (is_held, values) in self._held.items():
            parts[name] = torch.where(is_held, values, after[name])
            if output is after[name]:
                output = parts[name]
        return Step(output, parts, named)
