"""What a model is made of: its layers with shapes, parameters, state and operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from elman.models.contract import LanguageModel
from elman.models.file import Bundle
from elman.models.state import State, grows

_TOKENS_AT_ONCE = 512


@dataclass(frozen=True)
class Part:
    """One part of a model. A matrix that two parts share counts as the first one's."""

    name: str
    what: str
    shapes: Mapping[str, tuple[int, ...]]
    """Of its parameters, by name."""
    parameters: int
    """Trained numbers."""
    state_bytes: int
    """Carried for each text; of a part that grows, at its largest."""
    operations: int
    """Floating-point operations for each token: two for each element of each matrix that is multiplied by."""
    entries: int
    """N-grams that it holds instead of parameters."""
    stored_bytes: int
    """Memory of these."""


@dataclass(frozen=True)
class Architecture:
    """A model, part by part."""

    kind: str
    dtype: str
    vocabulary: int
    parts: tuple[Part, ...]

    @property
    def parameters(self) -> int:
        """Trained numbers of the whole."""
        return sum(part.parameters for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """The whole past of one text, in bytes."""
        return sum(part.state_bytes for part in self.parts)

    @property
    def entries(self) -> int:
        """N-grams of the whole."""
        return sum(part.entries for part in self.parts)

    @property
    def stored_bytes(self) -> int:
        """Memory of all entries."""
        return sum(part.stored_bytes for part in self.parts)

    @property
    def operations(self) -> int:
        """Floating-point operations for each token."""
        return sum(part.operations for part in self.parts)

    def share(self, part: Part) -> float:
        """The part's share of the parameters, 0 to 1; of the memory where a model has none but entries."""
        if self.parameters:
            return part.parameters / self.parameters
        return part.stored_bytes / max(1, self.stored_bytes)

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {
            "parts": [asdict(part) | {"share": self.share(part)} for part in self.parts],
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "operations": self.operations,
            "entries": self.entries,
            "stored_bytes": self.stored_bytes,
        }


def describe(model: Bundle) -> Architecture:
    """Take a model apart."""
    network = model.network
    state = _largest_state(network).tensors
    parts: list[Part] = []
    counted: set[nn.Parameter] = set()
    for component in network.components():
        own = {name: parameter for name, parameter in component.parameters.items() if parameter not in counted}
        counted.update(own.values())
        parts.append(
            Part(
                name=component.name,
                what=component.what,
                shapes={name: tuple(parameter.shape) for name, parameter in own.items()},
                parameters=sum(parameter.numel() for parameter in own.values()),
                state_bytes=sum(state[name].numel() * state[name].element_size() for name in component.state),
                operations=component.operations,
                entries=component.entries,
                stored_bytes=component.stored_bytes,
            )
        )
    dtype = str(network.dtype).removeprefix("torch.")
    return Architecture(network.config.kind, dtype, network.vocab_size, tuple(parts))


def _largest_state(network: LanguageModel) -> State:
    """The state of one row; what grows with the text has been read on until it grows no more."""
    state = network.initial_state(1)
    if not any(grows(tensor) for tensor in state.tensors.values()):
        return state
    tokens_BT = torch.full((1, _TOKENS_AT_ONCE), network.boundary_id, device=network.device)
    size = -1
    with torch.no_grad():
        while state.num_bytes > size:
            size = state.num_bytes
            _, state = network.features(tokens_BT, state)
    return state
