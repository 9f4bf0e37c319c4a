"""What an update lowers: the cost of the targets, and what the settings of ``training`` add to it or put in its place.

Shape letters: B rows, T time, F features, N tokens drawn as negatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elman.config import EmbeddingConfig, ModelConfig, TrainingConfig
from elman.errors import TrainingError
from elman.models.contract import LanguageModel
from elman.models.heads import OutputHead
from elman.models.losses import Costs, Objective, log_uniform_negatives
from elman.models.noise import Noise


def training_costs(
    network: LanguageModel,
    features_BTF: Tensor,
    targets_BT: Tensor,
    weight_BT: Tensor,
    config: TrainingConfig,
    noise: Noise,
    dtype: torch.dtype | None = None,
) -> Costs:
    """What the targets cost, summed over positions: what is lowered, and nats; with ``num_negatives`` an estimate.

    Args:
        network: the model.
        features_BTF: what its head reads.
        targets_BT: what is predicted.
        weight_BT: of each position.
        config: the settings.
        noise: draws the negatives.
        dtype: that the softmax is taken in.
    """
    head = network.head
    if not isinstance(head, OutputHead):
        raise TrainingError(f"model.kind {network.config.kind!r} has no output that can be trained")
    objective = Objective(config.label_smoothing, sparse_rows=noise.sparse_rows)
    if config.num_negatives:
        drawn_N = noise.common((config.num_negatives,), "negatives", features_BTF.device)
        negatives = log_uniform_negatives(drawn_N.to(network.dtype), network.vocab_size)
        objective = Objective(negatives=negatives, sparse_rows=noise.sparse_rows)
    costs = head.training_costs(features_BTF, targets_BT, weight_BT, objective, dtype)
    return Costs(costs.objective.sum(), costs.nats.sum())


def penalty(config: ModelConfig, features_BTF: Tensor, weight_BT: Tensor, training: TrainingConfig) -> Tensor:
    """The penalties on what the head reads, summed over positions.

    Args:
        config: of the model.
        features_BTF: what its head reads.
        weight_BT: of each position.
        training: the factors of the penalties.
    """
    kept = 1.0 - (config.dropout_before_output if isinstance(config, EmbeddingConfig) else 0.0)
    size = training.activation_penalty * activation_size(features_BTF, weight_BT)
    return size + training.temporal_penalty * kept * activation_change(features_BTF, weight_BT)


def activation_size(features_BTF: Tensor, weight_BT: Tensor) -> Tensor:
    """The mean square of what the head reads, summed over positions (activation regularisation).

    Paper: Merity et al. 2017, https://arxiv.org/abs/1708.01009, where it is called AR.
    """
    return (features_BTF.square().mean(-1) * weight_BT).sum()


def activation_change(features_BTF: Tensor, weight_BT: Tensor) -> Tensor:
    """The mean square of its change from one time to the next, summed (temporal activation regularisation).

    The paper takes the last layer's output before dropout. Here it is what dropout has left of it, by a mask that does
    not change in time: times the share that is kept, its mean over masks is the same.
    Paper: Merity et al. 2017, https://arxiv.org/abs/1708.01009, where it is called TAR.
    """
    change_BTF = features_BTF[:, 1:] - features_BTF[:, :-1]
    return (change_BTF.square().mean(-1) * weight_BT[:, 1:] * weight_BT[:, :-1]).sum()
