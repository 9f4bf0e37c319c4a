"""Where a neural model meets its vocabulary: how the embedding is drawn, and the linear output that may be tied to it.

Shape letters: B rows, T time, E embedding, F features, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from elman.cells.base import Initial
from elman.config import EmbeddingConfig
from elman.errors import ConfigError
from elman.models.contract import Component, Head


def draw_uniform(parameter: Tensor, bound: float, generator: torch.Generator) -> None:
    """Fill a parameter uniformly within +-``bound``."""
    parameter.data.copy_(Initial("uniform", bound).draw(tuple(parameter.shape), generator, parameter.dtype))


def draw_embedding(embedding_VE: Tensor, config: EmbeddingConfig, generator: torch.Generator) -> None:
    """Fill an embedding: N(0, 1/E), or uniform within +-``embedding_range``."""
    if config.embedding_range is None:
        embedding_VE.data.normal_(0.0, 1 / math.sqrt(config.embedding_size), generator=generator)
    else:
        embedding_VE.data.uniform_(-config.embedding_range, config.embedding_range, generator=generator)


class LinearHead(Head):
    """``logits = W f + b``; with a projection, ``logits = W (P f) + b``.

    With ``tie_weights`` W is the embedding matrix itself, one tensor with the gradients of both uses (Press and Wolf
    2017, https://arxiv.org/abs/1608.05859).

    Initialisation: W and P uniform within +-1/sqrt(width of their input), or W within +-``embedding_range``; b zero.

    Args:
        config: settings of the model.
        feature_size: width F.
        embedding_VE: the model's embedding.
    """

    def __init__(self, config: EmbeddingConfig, feature_size: int, embedding_VE: nn.Parameter) -> None:
        super().__init__()
        self.config = config
        vocab_size, dtype = len(embedding_VE), embedding_VE.dtype
        width = _width(config, feature_size)
        if config.tie_weights and width != config.embedding_size:
            raise ConfigError(
                f"tie_weights needs model.embedding_size ({config.embedding_size}) equal to the width of the "
                f"layers' output ({feature_size}); set them equal, or set model.output_projection"
            )
        new = nn.Parameter(torch.zeros(vocab_size, width, dtype=dtype))
        self.weight = embedding_VE if config.tie_weights else new
        self.bias = nn.Parameter(torch.zeros(vocab_size, dtype=dtype))
        self.projection: nn.Parameter | None = None
        if config.output_projection:
            self.projection = nn.Parameter(torch.zeros(width, feature_size, dtype=dtype))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all but a tied W anew."""
        if self.projection is not None:
            draw_uniform(self.projection, 1 / math.sqrt(self.projection.shape[1]), generator)
        if not self.config.tie_weights:
            draw_uniform(self.weight, self.config.embedding_range or 1 / math.sqrt(self.weight.shape[1]), generator)
        self.bias.data.zero_()

    def logits(self, features_BTF: Tensor) -> Tensor:
        if self.projection is not None:
            features_BTF = functional.linear(features_BTF, self.projection)
        return functional.linear(features_BTF, self.weight, self.bias)

    def component(self) -> Component:
        """The head as a part of its model."""
        parameters = dict(self.named_parameters())
        operations = 2 * sum(parameter.numel() for parameter in parameters.values() if parameter.dim() == 2)
        return Component("output", "linear, tied" if self.config.tie_weights else "linear", parameters, operations)

    @staticmethod
    def predicted_num_parameters(config: EmbeddingConfig, feature_size: int, vocab_size: int) -> int:
        """Number of trained numbers, from the settings alone; a tied W belongs to the embedding."""
        width = _width(config, feature_size)
        projection = width * feature_size if config.output_projection else 0
        return projection + vocab_size + (0 if config.tie_weights else vocab_size * width)


def _width(config: EmbeddingConfig, feature_size: int) -> int:
    return config.embedding_size if config.output_projection else feature_size
