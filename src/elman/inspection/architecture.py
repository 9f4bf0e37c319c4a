"""What a model is made of: its layers with shapes, parameters, state and operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elman.errors import UserError
from elman.models.file import Bundle
from elman.models.stack import Layer, RecurrentStack


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
    """Carried for each text."""
    operations: int
    """Floating-point operations for each token: two for each element of each matrix that is multiplied by."""


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
    def operations(self) -> int:
        """Floating-point operations for each token."""
        return sum(part.operations for part in self.parts)

    def share(self, part: Part) -> float:
        """The part's share of the parameters, 0 to 1."""
        return part.parameters / self.parameters

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {
            "parts": [asdict(part) | {"share": self.share(part)} for part in self.parts],
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "operations": self.operations,
        }


def describe(model: Bundle) -> Architecture:
    """Take a model apart.

    Raises:
        UserError: the model is no stack of recurrent layers.
    """
    network = model.network
    if not isinstance(network, RecurrentStack):
        raise UserError(f"model.kind {network.config.kind!r} has no layers to list")
    state = network.initial_state(1).tensors
    parts = [_part("embedding", "look-up", {"weight": tuple(network.embedding.shape)})]
    for index, layer in enumerate(module for module in network.layers if isinstance(module, Layer)):
        parts.append(
            Part(
                name=f"layer {index + 1}",
                what=network.config.kind,
                shapes={name: tuple(parameter.shape) for name, parameter in layer.named_parameters()},
                parameters=sum(parameter.numel() for parameter in layer.parameters()),
                state_bytes=sum(t.numel() * t.element_size() for k, t in state.items() if k.startswith(f"{index}.")),
                operations=layer.cell.operations_per_step(),
            )
        )
    head = {name: tuple(parameter.shape) for name, parameter in network.head.named_parameters()}
    multiplied = 2 * sum(math.prod(shape) for shape in head.values() if len(shape) == 2)
    if network.config.tie_weights:
        del head["weight"]
    parts.append(_part("output", "linear, tied" if network.config.tie_weights else "linear", head, multiplied))
    dtype = str(network.dtype).removeprefix("torch.")
    return Architecture(network.config.kind, dtype, network.vocab_size, tuple(parts))


def _part(name: str, what: str, shapes: Mapping[str, tuple[int, ...]], operations: int = 0) -> Part:
    return Part(name, what, shapes, sum(map(math.prod, shapes.values())), 0, operations)
