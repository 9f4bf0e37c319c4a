"""The recurrent stack: embedding, dropout, layers of one cell, output.

Shape letters: B rows, T time, E embedding, I layer input, H hidden, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from elman.cells import find_cell
from elman.cells.base import Cell, check_declarations
from elman.config import CellConfig, ModelConfig, StackConfig
from elman.errors import ConfigError
from elman.models.contract import Component, LanguageModel
from elman.models.heads import LinearHead, draw_embedding
from elman.models.noise import Noise
from elman.models.state import State


def _cells(config: StackConfig, num_layers: int) -> list[Cell]:
    """The cell of each layer, from the first."""
    cells: list[Cell] = []
    for _ in range(num_layers):
        input_size = cells[-1].output_size if cells else config.embedding_size
        # The settings of a stack are those of its cell too (elman.models.kinds puts the two together).
        cells.append(find_cell(config.kind)(cast(CellConfig, config), input_size))
    return cells


class Layer(nn.Module):
    """One cell and the parameters that it declares."""

    def __init__(self, cell: Cell, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell = cell
        check_declarations(cell)
        for name, declared in cell.parameters().items():
            try:
                self.register_parameter(name, nn.Parameter(torch.zeros(declared.shape, dtype=dtype)))
            except (KeyError, TypeError) as error:
                raise ConfigError(
                    f"the parameter {name!r} of {type(cell).__name__} needs another name; accepted: a string without "
                    "dots that is no attribute of a PyTorch module, such as W"
                ) from error

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw each parameter from the distribution that the cell declares."""
        for name, declared in self.cell.parameters().items():
            parameter = self.get_parameter(name)
            parameter.data.copy_(declared.initial.draw(declared.shape, generator, parameter.dtype))

    def initial_state(self, batch_size: int, like: Tensor) -> Mapping[str, Tensor]:
        """The parts of this layer's state before the first token, with dtype and device of ``like``."""
        return {
            name: like.new_full((batch_size, *part.shape), part.initial) for name, part in self.cell.state().items()
        }

    def forward(self, x_BTI: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Read a segment: outputs (B, T, H) and the state after it."""
        return self.cell.scan(dict(self.named_parameters()), x_BTI, state)


class RecurrentStack(LanguageModel):
    """Embedding, dropout, ``num_layers`` layers of one recurrent cell, output.

    Dropout (with noise only) falls on the embedding's output, between the layers and on the last layer's output, as
    in Zaremba et al. 2014 (https://arxiv.org/abs/1409.2329): never on the recurrent path.

    Initialisation: embedding N(0, 1/E) or uniform within +-``embedding_range``; each layer as its cell declares.
    """

    config: StackConfig
    head: LinearHead

    def __init__(self, config: ModelConfig, vocab_size: int, *, dtype: torch.dtype, boundary_id: int = 0) -> None:
        if not isinstance(config, StackConfig):
            raise ConfigError(f"model.kind {config.kind!r} is not a recurrent stack")
        super().__init__(config, vocab_size, dtype=dtype, boundary_id=boundary_id)
        cells = _cells(config, config.num_layers)
        self.embedding = nn.Parameter(torch.zeros(vocab_size, config.embedding_size, dtype=dtype))
        self.layers = nn.ModuleList(Layer(cell, dtype) for cell in cells)
        self.head = LinearHead(config, cells[-1].output_size, self.embedding)

    def _layers(self) -> Iterator[Layer]:
        return (cast(Layer, layer) for layer in self.layers)

    def reset_parameters(self, generator: torch.Generator) -> None:
        draw_embedding(self.embedding, self.config, generator)
        for layer in self._layers():
            layer.reset_parameters(generator)
        self.head.reset_parameters(generator)

    def initial_state(self, batch_size: int) -> State:
        return State({
            f"{index}.{part}": tensor
            for index, layer in enumerate(self._layers())
            for part, tensor in layer.initial_state(batch_size, self.embedding).items()
        })  # fmt: skip

    def features(
        self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        x_BTI = self._drop(functional.embedding(tokens_BT, self.embedding), noise, "embedding")
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self._layers()):
            before = _of_layer(index, state)
            x_BTI, parts = _scan_with_resets(layer, x_BTI, before, reset_BT)
            x_BTI = self._drop(x_BTI, noise, f"layer {index}")
            tensors |= {f"{index}.{name}": tensor for name, tensor in parts.items()}
        return x_BTI, State(tensors)

    def step(self, token_B: Tensor, state: State) -> tuple[Tensor, State]:
        x_BI = self.embedding[token_B]
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self._layers()):
            x_BI, parts, _ = layer.cell.step(dict(layer.named_parameters()), x_BI, _of_layer(index, state))
            tensors |= {f"{index}.{name}": tensor for name, tensor in parts.items()}
        return x_BI, State(tensors)

    def components(self) -> list[Component]:
        layers = [
            Component(
                name=f"layer {index + 1}",
                what=self.config.kind,
                parameters=dict(layer.named_parameters()),
                operations=layer.cell.operations_per_step(),
                state=tuple(f"{index}.{part}" for part in layer.cell.state()),
            )
            for index, layer in enumerate(self._layers())
        ]
        return [Component("embedding", "look-up", {"weight": self.embedding}), *layers, self.head.component()]

    def hidden_matrices(self) -> list[tuple[nn.Parameter, int]]:
        # A matrix is cut as it is drawn: W_hh gate by gate, W_ih as one map.
        return [
            (layer.get_parameter(name), declared.initial.parts)
            for layer in self._layers()
            for name, declared in layer.cell.parameters().items()
            if len(declared.shape) == 2
        ]

    def _drop(self, x_BTI: Tensor, noise: Noise | None, place: str) -> Tensor:
        return x_BTI if noise is None else noise.dropout(x_BTI, self.config.dropout, place)

    @staticmethod
    def predicted_num_parameters(config: ModelConfig, vocab_size: int) -> int:
        if not isinstance(config, StackConfig):
            raise ConfigError(f"model.kind {config.kind!r} is not a recurrent stack")
        # From the second on all layers are alike, and a damaged file may claim any number of them.
        cells = _cells(config, min(config.num_layers, 2))
        layers = cells[0].num_parameters() + (config.num_layers - 1) * cells[-1].num_parameters()
        output = LinearHead.predicted_num_parameters(config, cells[-1].output_size, vocab_size)
        return vocab_size * config.embedding_size + layers + output


def _of_layer(index: int, state: State) -> dict[str, Tensor]:
    """The parts of one layer's state, by their own names."""
    prefix = f"{index}."
    return {name[len(prefix) :]: tensor for name, tensor in state.tensors.items() if name.startswith(prefix)}


def _scan_with_resets(
    layer: Layer, x_BTI: Tensor, parts: Mapping[str, Tensor], reset_BT: Tensor | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Scan a segment in the pieces between the times at which some row is reset."""
    if reset_BT is None or not reset_BT.any():
        return layer(x_BTI, parts)
    num_steps = x_BTI.shape[1]
    resets = reset_BT.any(0).nonzero().flatten().tolist()
    borders = sorted({0, *resets, num_steps})
    initial = State(layer.initial_state(x_BTI.shape[0], x_BTI))
    outputs = []
    for start, end in pairwise(borders):
        if start in resets:
            parts = State(parts).reset(reset_BT[:, start], initial).tensors
        output_BTH, parts = layer(x_BTI[:, start:end], parts)
        outputs.append(output_BTH)
    return torch.cat(outputs, dim=1), parts
