"""The recurrent stack: embedding, dropout, layers of one cell, output.

Shape letters: B rows, T time, E embedding, I layer input, H hidden, F features, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from elman.cells import find_cell
from elman.cells.base import Cell, Initial
from elman.config import CellConfig, ModelConfig, StackConfig
from elman.errors import ConfigError
from elman.models.contract import Head, LanguageModel
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
        for name, declared in cell.parameters().items():
            self.register_parameter(name, nn.Parameter(torch.zeros(declared.shape, dtype=dtype)))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw each parameter from the distribution that the cell declares."""
        for name, declared in self.cell.parameters().items():
            parameter = self.get_parameter(name)
            parameter.data.copy_(declared.initial.draw(declared.shape, generator, parameter.dtype))

    def initial_state(self, batch_size: int) -> Mapping[str, Tensor]:
        """The parts of this layer's state before the first token."""
        like = next(self.parameters())
        return {
            name: like.new_full((batch_size, *part.shape), part.initial) for name, part in self.cell.state().items()
        }

    def forward(self, x_BTI: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Read a segment: outputs (B, T, H) and the state after it."""
        return self.cell.scan(dict(self.named_parameters()), x_BTI, state)


class LinearHead(Head):
    """``logits = W f + b``; with a projection, ``logits = W (P f) + b``.

    Initialisation: W and P uniform within +-1/sqrt(width of their input), or W within +-``embedding_range``; b zero.
    """

    def __init__(self, feature_size: int, vocab_size: int, weight_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab_size, weight_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(vocab_size, dtype=dtype))
        self.projection: nn.Parameter | None = None
        if weight_size != feature_size:
            self.projection = nn.Parameter(torch.zeros(weight_size, feature_size, dtype=dtype))

    def logits(self, features_BTF: Tensor) -> Tensor:
        if self.projection is not None:
            features_BTF = functional.linear(features_BTF, self.projection)
        return functional.linear(features_BTF, self.weight, self.bias)


class RecurrentStack(LanguageModel):
    """Embedding, dropout, ``num_layers`` layers of one recurrent cell, output.

    Dropout (with noise only) falls on the embedding's output, between the layers and on the last layer's output, as
    in Zaremba et al. 2014 (https://arxiv.org/abs/1409.2329): never on the recurrent path. With ``tie_weights`` the
    output matrix is the embedding matrix itself, one tensor with the gradients of both uses (Press and Wolf 2017,
    https://arxiv.org/abs/1608.05859).

    Initialisation: embedding N(0, 1/E) or uniform within +-``embedding_range``; each layer as its cell declares.
    """

    config: StackConfig
    head: LinearHead

    def __init__(self, config: ModelConfig, vocab_size: int, *, dtype: torch.dtype) -> None:
        if not isinstance(config, StackConfig):
            raise ConfigError(f"model.kind {config.kind!r} is not a recurrent stack")
        super().__init__(config, vocab_size, dtype=dtype)
        cells = _cells(config, config.num_layers)
        feature_size = cells[-1].output_size
        self.embedding = nn.Parameter(torch.zeros(vocab_size, config.embedding_size, dtype=dtype))
        self.layers = nn.ModuleList(Layer(cell, dtype) for cell in cells)
        self.head = LinearHead(feature_size, vocab_size, _output_width(config, feature_size), dtype)
        if config.tie_weights:
            if self.head.weight.shape != self.embedding.shape:
                raise ConfigError(
                    f"tie_weights needs model.embedding_size ({config.embedding_size}) equal to the width of the "
                    f"layers' output ({feature_size}); set them equal, or set model.output_projection"
                )
            self.head.weight = self.embedding

    def _layers(self) -> Iterator[Layer]:
        return (cast(Layer, layer) for layer in self.layers)

    def reset_parameters(self, generator: torch.Generator) -> None:
        config, head = self.config, self.head
        embedding = self.embedding.data
        if config.embedding_range is None:
            embedding.normal_(0.0, 1 / math.sqrt(config.embedding_size), generator=generator)
        else:
            embedding.uniform_(-config.embedding_range, config.embedding_range, generator=generator)
        for layer in self._layers():
            layer.reset_parameters(generator)
        if head.projection is not None:
            _draw(head.projection, 1 / math.sqrt(head.projection.shape[1]), generator)
        if not config.tie_weights:
            _draw(head.weight, config.embedding_range or 1 / math.sqrt(head.weight.shape[1]), generator)
        head.bias.data.zero_()

    def initial_state(self, batch_size: int) -> State:
        return State({
            f"{index}.{part}": tensor
            for index, layer in enumerate(self._layers())
            for part, tensor in layer.initial_state(batch_size).items()
        })  # fmt: skip

    def features(
        self, tokens_BT: Tensor, state: State, reset_BT: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        x_BTI = self._drop(functional.embedding(tokens_BT, self.embedding), noise, "embedding")
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self._layers()):
            prefix = f"{index}."
            before = {name[len(prefix) :]: t for name, t in state.tensors.items() if name.startswith(prefix)}
            x_BTI, parts = _scan_with_resets(layer, x_BTI, before, reset_BT)
            x_BTI = self._drop(x_BTI, noise, f"layer {index}")
            tensors |= {prefix + name: tensor for name, tensor in parts.items()}
        return x_BTI, State(tensors)

    def _drop(self, x_BTI: Tensor, noise: Noise | None, place: str) -> Tensor:
        return x_BTI if noise is None else noise.dropout(x_BTI, self.config.dropout, place)

    @staticmethod
    def predicted_num_parameters(config: ModelConfig, vocab_size: int) -> int:
        if not isinstance(config, StackConfig):
            raise ConfigError(f"model.kind {config.kind!r} is not a recurrent stack")
        # From the second on all layers are alike, and a damaged file may claim any number of them.
        cells = _cells(config, min(config.num_layers, 2))
        layers = cells[0].num_parameters() + (config.num_layers - 1) * cells[-1].num_parameters()
        feature_size = cells[-1].output_size
        width = _output_width(config, feature_size)
        embedding = vocab_size * config.embedding_size
        projection = 0 if width == feature_size else width * feature_size
        output = projection + vocab_size + (0 if config.tie_weights else vocab_size * width)
        return embedding + layers + output


def _output_width(config: StackConfig, feature_size: int) -> int:
    return config.embedding_size if config.output_projection else feature_size


def _draw(parameter: Tensor, bound: float, generator: torch.Generator) -> None:
    parameter.data.copy_(Initial("uniform", bound).draw(tuple(parameter.shape), generator, parameter.dtype))


def _scan_with_resets(
    layer: Layer, x_BTI: Tensor, parts: Mapping[str, Tensor], reset_BT: Tensor | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Scan a segment in the pieces between the times at which some row is reset."""
    if reset_BT is None or not reset_BT.any():
        return layer(x_BTI, parts)
    num_steps = x_BTI.shape[1]
    resets = reset_BT.any(0).nonzero().flatten().tolist()
    borders = sorted({0, *resets, num_steps})
    initial = State(layer.initial_state(x_BTI.shape[0]))
    outputs = []
    for start, end in pairwise(borders):
        if start in resets:
            parts = State(parts).reset(reset_BT[:, start], initial).tensors
        output_BTH, parts = layer(x_BTI[:, start:end], parts)
        outputs.append(output_BTH)
    return torch.cat(outputs, dim=1), parts
