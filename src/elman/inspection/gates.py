"""Gates that stand open or shut, and memories beyond their tanh: where on its way a gradient is lost.

Shape letters: T time, U units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from numpy import integer
from numpy.typing import NDArray
from torch import Tensor

from elman.inspection.watching import watch, watchable
from elman.models.contract import LanguageModel
from elman.models.stack import Layer, RecurrentStack

Ids: TypeAlias = NDArray[integer[Any]]

_WATCHED_TOKENS = 1000
_LOW, _HIGH, _STEEP = 0.1, 0.9, 0.95
"""A gate outside of these passes less than a tenth of its gradient; so does a tanh beyond the last."""
_STUCK = 0.95
"""Share of the tokens at which a unit is saturated from which on it is stuck."""
_LEFT = 0.01
"""Of a memory, what counts as kept."""
_TANH_OF = "tanh({})"


@dataclass(frozen=True)
class Saturation:
    """How often the units of a gate, or of a tanh, are so far from the middle that they pass no gradient."""

    name: str
    range: Literal["0 to 1", "-1 to 1"]
    low: float
    """Share of units and tokens below 0.1, or below -0.95."""
    high: float
    """The same above 0.9, or above 0.95."""
    mean: float
    stuck: int
    """Units that are so at more than 95 of 100 tokens."""
    units: int


@dataclass(frozen=True)
class Memory:
    """What forget gates would keep of a memory that is read through a tanh, as an LSTM's is, in all layers together."""

    units: int
    steps: int
    keeping: int
    """Units whose forget gate alone, its geometric mean over the tokens, leaves a hundredth over so many steps."""
    saturated: float
    """Share of these and of the tokens at which the tanh that they are read through is beyond 0.95 on either side."""


def intermediates(network: LanguageModel, tokens: Ids) -> dict[str, Tensor]:
    """What a network computes over the beginning of a text, by name, (T, U); ``tanh(0.c)`` of what it reads so."""
    state = network.initial_state(1)
    inside = {*state.tensors, *network.named_step(torch.full((1,), network.boundary_id), state).named}
    names = [name for name in watchable(network) if name in inside]
    squashed = set()
    if isinstance(network, RecurrentStack):
        for index, layer in enumerate(network.layers):
            squashed |= {f"{index}.{part}" for part in cast(Layer, layer).cell.through_tanh}
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for piece in watch(network, tokens[: _WATCHED_TOKENS + 1], names):
        for name, values_TU in piece.values.items():
            seen[name].append(values_TU)
    values = {name: torch.cat(pieces) for name, pieces in seen.items()}
    squashed &= values.keys()
    return {name: values_TU for name, values_TU in values.items() if name not in squashed} | {
        _TANH_OF.format(name): values[name].tanh() for name in sorted(squashed)
    }


def memory(seen: Mapping[str, Tensor], steps: int) -> Memory | None:
    """What forget gates would keep over so many steps, and how much of it is beyond its tanh.

    Args:
        seen: by name, (T, U): gates, and ``tanh(...)`` of what they keep.
        steps: over which a hundredth or more is to be left.
    """
    keeps, saturated = [], []
    for name, gate_TU in seen.items():
        read_TU = seen.get(_TANH_OF.format(f"{name.removesuffix('forget_gate')}c"))
        if read_TU is not None:
            keeps.append(gate_TU.log().mean(0) * steps >= math.log(_LEFT))
            saturated.append((read_TU.abs() > _STEEP).double().mean(0))
    if not keeps:
        return None
    keeps_U = torch.cat(keeps)
    share = torch.cat(saturated)[keeps_U].mean().item() if keeps_U.any() else 0.0
    return Memory(len(keeps_U), steps, int(keeps_U.sum()), share)


def saturation(seen: Mapping[str, Tensor]) -> tuple[Saturation, ...]:
    """How often what lies between 0 and 1, or between -1 and 1, is near an end; by name, (T, U)."""
    found = []
    for name, values_TU in seen.items():
        least, most = values_TU.min().item(), values_TU.max().item()
        is_tanh = name.startswith(_TANH_OF[: _TANH_OF.index("{")])
        if not is_tanh and (least < -1 or most > 1 or least == most):
            continue  # it is no gate, or its range is not known
        is_gate = not is_tanh and least >= 0
        low, high = (_LOW, _HIGH) if is_gate else (-_STEEP, _STEEP)
        is_low, is_high = values_TU < low, values_TU > high
        found.append(
            Saturation(
                name=name,
                range="0 to 1" if is_gate else "-1 to 1",
                low=is_low.double().mean().item(),
                high=is_high.double().mean().item(),
                mean=values_TU.mean().item(),
                stuck=int(((is_low | is_high).double().mean(0) > _STUCK).sum()),
                units=values_TU.shape[1],
            )
        )
    return tuple(found)
