"""Where a neural model meets its vocabulary: how the embedding is drawn and read, and the outputs there are.

Shape letters: B rows, T time, R positions one below the other, E embedding, F features, V vocabulary, K softmaxes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from elman.cells.base import Initial
from elman.config import EmbeddingConfig
from elman.errors import ConfigError
from elman.models.contract import Component, Head
from elman.models.losses import (
    Costs,
    LinearCost,
    MixtureCost,
    Objective,
    Positions,
    in_pieces,
    mixture_log_probs,
    sampled_costs,
)
from elman.models.noise import Noise

_SHRINK = 4
"""Each cluster of rarer words has vectors so many times shorter than the one before."""
_WORTH_SPARSE = 4
"""A gradient of rows alone pays where a matrix has so many times more rows than are read."""


def draw_uniform(parameter: Tensor, bound: float, generator: torch.Generator) -> None:
    """Fill a parameter uniformly within +-``bound``."""
    parameter.data.copy_(Initial("uniform", bound).draw(tuple(parameter.shape), generator, parameter.dtype))


def draw_embedding(embedding_VE: Tensor, config: EmbeddingConfig, generator: torch.Generator) -> None:
    """Fill an embedding: N(0, 1/E), or uniform within +-``embedding_range``."""
    if config.embedding_range is None:
        embedding_VE.data.normal_(0.0, 1 / math.sqrt(config.embedding_size), generator=generator)
    else:
        embedding_VE.data.uniform_(-config.embedding_range, config.embedding_range, generator=generator)


def look_up(ids: Tensor, matrix: Tensor, *, sparse: bool) -> Tensor:
    """The rows of a matrix with these numbers.

    Args:
        ids: int64, any shape.
        matrix: a parameter.
        sparse: whoever takes the gradient can do with one that holds the rows read alone; it does where that pays.
    """
    return functional.embedding(ids, matrix, sparse=sparse and len(matrix) >= _WORTH_SPARSE * ids.numel())


def embed(tokens_BT: Tensor, embedding_VE: nn.Parameter, config: EmbeddingConfig, noise: Noise | None) -> Tensor:
    """The embeddings of tokens, (B, T, E)."""
    # A tied matrix has a dense gradient from its other use anyway.
    return look_up(tokens_BT, embedding_VE, sparse=noise is not None and noise.sparse_rows and not config.tie_weights)


class OutputHead(Head):
    """The last part of a model with an embedding: a distribution over the vocabulary from features.

    Args:
        config: settings of the model.
        feature_size: width F.
        embedding_VE: the model's embedding.
    """

    def __init__(self, config: EmbeddingConfig, feature_size: int, embedding_VE: nn.Parameter) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all but a tied matrix anew."""

    @property
    @abstractmethod
    def what(self) -> str:
        """What it is, in a few words."""

    @property
    def num_products(self) -> int:
        """Multiplications for each token: one for each element of each matrix."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.dim() == 2)

    def component(self) -> Component:
        """The head as a part of its model."""
        return Component("output", self.what, dict(self.named_parameters()), 2 * self.num_products)

    @abstractmethod
    def costs(self, positions: Positions, objective: Objective) -> Costs:
        """What each position costs times its weight."""

    def training_costs(
        self, features_BTF: Tensor, targets_BT: Tensor, weight_BT: Tensor, objective: Objective
    ) -> Costs:
        """What training lowers and what the targets cost, each (B, T), times the weight of each position.

        Args:
            features_BTF: what the head reads.
            targets_BT: what is predicted.
            weight_BT: of each position; has no gradient.
            objective: what is lowered.
        """
        positions = Positions(features_BTF.flatten(0, 1), targets_BT.flatten(), weight_BT.flatten())
        costs = self.costs(positions, objective)
        return Costs(*(costs_R.view_as(targets_BT) for costs_R in costs))

    def nll(
        self,
        features_BTF: Tensor,
        targets_BT: Tensor,
        weight_BT: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        weight_BT = features_BTF.new_ones(targets_BT.shape) if weight_BT is None else weight_BT
        return self.training_costs(features_BTF, targets_BT, weight_BT, Objective(dtype=dtype)).objective


class LinearHead(OutputHead):
    """``logits = W f + b``; with a projection, ``logits = W (P f) + b``, where W P has the rank of P's width.

    With ``tie_weights`` W is the embedding matrix itself, one tensor with the gradients of both uses (Press and Wolf
    2017, https://arxiv.org/abs/1608.05859).

    Initialisation: W and P uniform within +-1/sqrt(width of their input), or W within +-``embedding_range``; b zero.
    """

    def __init__(self, config: EmbeddingConfig, feature_size: int, embedding_VE: nn.Parameter) -> None:
        super().__init__(config, feature_size, embedding_VE)
        width = _width(config, feature_size)
        if config.tie_weights and width != config.embedding_size:
            raise ConfigError(
                f"tie_weights needs model.embedding_size ({config.embedding_size}) equal to the width of the "
                f"layers' output ({feature_size}); set them equal, or set model.output_projection"
            )
        if width > feature_size and not config.tie_weights:
            of = f"true, the width of the embedding ({width})," if config.output_projection is True else str(width)
            raise ConfigError(
                f"model.output_projection {of} is wider than the layers' output ({feature_size}), which costs and "
                f"gives nothing; accepted: up to {feature_size}, or model.tie_weights with it"
            )
        self.weight = _output_matrix(config, width, embedding_VE)
        self.bias = nn.Parameter(embedding_VE.new_zeros(len(embedding_VE)))
        self.projection: nn.Parameter | None = None
        if config.output_projection:
            self.projection = nn.Parameter(embedding_VE.new_zeros(width, feature_size))

    def reset_parameters(self, generator: torch.Generator) -> None:
        if self.projection is not None:
            draw_uniform(self.projection, 1 / math.sqrt(self.projection.shape[1]), generator)
        _draw_output_matrix(self.weight, self.config, generator)
        self.bias.data.zero_()

    def parts(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the vocabulary's matrix is multiplied by, and that matrix."""
        if self.projection is not None:
            features = functional.linear(features, self.projection)
        return features, self.weight

    def logits(self, features_BTF: Tensor) -> Tensor:
        return functional.linear(*self.parts(features_BTF), self.bias)

    def costs(self, positions: Positions, objective: Objective) -> Costs:
        x_RF, matrix_VF = self.parts(positions.x_RF)
        positions = positions._replace(x_RF=x_RF)
        if objective.negatives is None:
            cost = LinearCost(objective.label_smoothing, objective.dtype)
            return in_pieces(cost, positions, (matrix_VF, self.bias))
        sparse, ids_N = objective.sparse_rows and not self.config.tie_weights, objective.negatives.ids_N
        of_targets, of_negatives = (
            (look_up(ids, matrix_VF, sparse=sparse), self.bias[ids]) for ids in (positions.targets_R, ids_N)
        )
        return sampled_costs(positions, *of_targets, objective.negatives, *of_negatives)

    @property
    def what(self) -> str:
        return "linear, tied" if self.config.tie_weights else "linear"

    @staticmethod
    def predicted_num_parameters(config: EmbeddingConfig, feature_size: int, vocab_size: int) -> int:
        """Number of trained numbers, from the settings alone; a tied W belongs to the embedding."""
        width = _width(config, feature_size)
        projection = width * feature_size if config.output_projection else 0
        return projection + vocab_size + (0 if config.tie_weights else vocab_size * width)


class AdaptiveHead(OutputHead):
    """The adaptive softmax: frequent tokens at full width, the rarer ones in clusters, each behind one output.

        p(w) = softmax(W f + b)_w                                     w among the first
        p(w) = softmax(W f + b)_{cluster i} * softmax(U_i P_i f)_w    w in cluster i

    ``output_cutoffs`` are the token ids at which clusters begin; token ids of words are ranks by frequency. P_i maps to
    a width of F / 4^i, i from 1. The whole distribution is normalised; in training a cluster is computed only for the
    positions whose target is in it.

    Initialisation: every matrix uniform within +-1/sqrt(width of its input), or W and U_i within +-``embedding_range``;
    b zero.
    Paper: Grave et al. 2017, https://arxiv.org/abs/1609.04309.
    """

    def __init__(self, config: EmbeddingConfig, feature_size: int, embedding_VE: nn.Parameter) -> None:
        super().__init__(config, feature_size, embedding_VE)
        self._borders = _borders(config, len(embedding_VE))
        first, clusters = self._borders[0], list(pairwise(self._borders))
        self.weight = nn.Parameter(embedding_VE.new_zeros(first + len(clusters), feature_size))
        self.bias = nn.Parameter(embedding_VE.new_zeros(first + len(clusters)))
        widths = [_cluster_width(feature_size, index) for index in range(len(clusters))]
        self.projections = nn.ParameterList(embedding_VE.new_zeros(width, feature_size) for width in widths)
        self.clusters = nn.ParameterList(
            embedding_VE.new_zeros(end - start, width) for (start, end), width in zip(clusters, widths, strict=True)
        )

    def reset_parameters(self, generator: torch.Generator) -> None:
        for projection in self.projections:
            draw_uniform(projection, 1 / math.sqrt(projection.shape[1]), generator)
        for matrix in (self.weight, *self.clusters):
            _draw_output_matrix(matrix, self.config, generator)
        self.bias.data.zero_()

    def logits(self, features_BTF: Tensor) -> Tensor:
        first, num_clusters = self._borders[0], len(self.clusters)
        of_first, *of_clusters = (
            functional.linear(features_BTF, self.weight, self.bias)
            .log_softmax(-1)
            .split([first, *[1] * num_clusters], dim=-1)
        )
        inside = [
            of_cluster + functional.linear(functional.linear(features_BTF, projection), matrix).log_softmax(-1)
            for of_cluster, projection, matrix in zip(of_clusters, self.projections, self.clusters, strict=True)
        ]
        return torch.cat([of_first, *inside], dim=-1)

    def log_probs(self, features_BTF: Tensor) -> Tensor:
        return self.logits(features_BTF)  # they are normalised

    def costs(self, positions: Positions, objective: Objective) -> Costs:
        cost, first, targets_R = LinearCost(dtype=objective.dtype), self._borders[0], positions.targets_R
        # Cluster 0 holds the tokens between the first two borders, ...; the first tokens themselves are in cluster -1.
        cluster_R = torch.bucketize(targets_R, targets_R.new_tensor(self._borders), right=True) - 1
        shown_R = torch.where(cluster_R < 0, targets_R, first + cluster_R)
        shown = positions._replace(targets_R=shown_R)
        objective_R, nats_R = in_pieces(cost, shown, (self.weight, self.bias))
        for index, (projection, matrix) in enumerate(zip(self.projections, self.clusters, strict=True)):
            (rows,) = (cluster_R == index).nonzero(as_tuple=True)
            if len(rows):
                x_RF, inside_R, weight_R = positions.rows(rows)
                x_RF, inside_R = functional.linear(x_RF, projection), inside_R - self._borders[index]
                inside = in_pieces(cost, Positions(x_RF, inside_R, weight_R), (matrix,))
                objective_R = objective_R.index_add(0, rows, inside.objective)
                nats_R = nats_R.index_add(0, rows, inside.nats)
        return Costs(objective_R, nats_R)

    @property
    def what(self) -> str:
        return f"adaptive softmax, {len(self.clusters)} clusters"

    @staticmethod
    def predicted_num_parameters(config: EmbeddingConfig, feature_size: int, vocab_size: int) -> int:
        """Number of trained numbers, from the settings alone."""
        first, *_ = borders = _borders(config, vocab_size)
        clusters = list(pairwise(borders))
        total = (first + len(clusters)) * (feature_size + 1)
        for index, (start, end) in enumerate(clusters):
            total += _cluster_width(feature_size, index) * (feature_size + end - start)
        return total


class MixtureHead(OutputHead):
    """A mixture of softmaxes, whose log-probabilities are no linear map of few numbers.

        h_k = tanh(Q_k f + q_k);   pi = softmax(P f);   p = sum over k of pi_k softmax(W h_k + b)

    h_k is as wide as the embedding; with ``tie_weights`` W is the embedding matrix.

    Initialisation: W, P and Q uniform within +-1/sqrt(width of their input), or W within +-``embedding_range``; biases
    zero.
    Paper: Yang et al. 2018, https://arxiv.org/abs/1711.03953.
    """

    def __init__(self, config: EmbeddingConfig, feature_size: int, embedding_VE: nn.Parameter) -> None:
        super().__init__(config, feature_size, embedding_VE)
        latent_size = config.num_mixtures * config.embedding_size
        self.weight = _output_matrix(config, config.embedding_size, embedding_VE)
        self.bias = nn.Parameter(embedding_VE.new_zeros(len(embedding_VE)))
        self.prior = nn.Parameter(embedding_VE.new_zeros(config.num_mixtures, feature_size))
        self.latent = nn.Parameter(embedding_VE.new_zeros(latent_size, feature_size))
        self.latent_bias = nn.Parameter(embedding_VE.new_zeros(latent_size))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for matrix in (self.prior, self.latent):
            draw_uniform(matrix, 1 / math.sqrt(matrix.shape[1]), generator)
        _draw_output_matrix(self.weight, self.config, generator)
        self.latent_bias.data.zero_()
        self.bias.data.zero_()

    @property
    def _parameters_in_order(self) -> tuple[Tensor, ...]:
        return self.prior, self.latent, self.latent_bias, self.weight, self.bias

    def logits(self, features_BTF: Tensor) -> Tensor:
        return mixture_log_probs(features_BTF, self._parameters_in_order)

    def log_probs(self, features_BTF: Tensor) -> Tensor:
        return self.logits(features_BTF)  # they are normalised

    def costs(self, positions: Positions, objective: Objective) -> Costs:
        cost = MixtureCost(objective.label_smoothing, objective.dtype)
        return in_pieces(cost, positions, self._parameters_in_order)

    @property
    def what(self) -> str:
        return f"mixture of {self.config.num_mixtures} softmaxes{', tied' if self.config.tie_weights else ''}"

    @property
    def num_products(self) -> int:
        return self.prior.numel() + self.latent.numel() + self.config.num_mixtures * self.weight.numel()

    @staticmethod
    def predicted_num_parameters(config: EmbeddingConfig, feature_size: int, vocab_size: int) -> int:
        """Number of trained numbers, from the settings alone; a tied W belongs to the embedding."""
        latent_size = config.num_mixtures * config.embedding_size
        output = vocab_size * ((0 if config.tie_weights else config.embedding_size) + 1)
        return (config.num_mixtures + latent_size) * feature_size + latent_size + output


_HEADS: dict[str, type[LinearHead | AdaptiveHead | MixtureHead]] = {
    "linear": LinearHead,
    "adaptive": AdaptiveHead,
    "mixture": MixtureHead,
}


def make_head(config: EmbeddingConfig, feature_size: int, embedding_VE: nn.Parameter) -> OutputHead:
    """The output that the settings ask for."""
    return _HEADS[config.output](config, feature_size, embedding_VE)


def predicted_num_parameters(config: EmbeddingConfig, feature_size: int, vocab_size: int) -> int:
    """Number of trained numbers of the output that the settings ask for."""
    return _HEADS[config.output].predicted_num_parameters(config, feature_size, vocab_size)


def _width(config: EmbeddingConfig, feature_size: int) -> int:
    """Of what the vocabulary's matrix is multiplied by."""
    if config.output_projection is True:
        return config.embedding_size
    return config.output_projection or feature_size


def _output_matrix(config: EmbeddingConfig, width: int, embedding_VE: nn.Parameter) -> nn.Parameter:
    return embedding_VE if config.tie_weights else nn.Parameter(embedding_VE.new_zeros(len(embedding_VE), width))


def _draw_output_matrix(matrix: Tensor, config: EmbeddingConfig, generator: torch.Generator) -> None:
    if not config.tie_weights:
        draw_uniform(matrix, config.embedding_range or 1 / math.sqrt(matrix.shape[1]), generator)


def _borders(config: EmbeddingConfig, vocab_size: int) -> list[int]:
    """Where the clusters begin, and the end of the last."""
    cutoffs = [cutoff for cutoff in config.output_cutoffs if cutoff < vocab_size]
    return [*cutoffs, vocab_size]


def _cluster_width(feature_size: int, index: int) -> int:
    return max(1, feature_size // _SHRINK ** (index + 1))
