"""What an update lowers: the cost of the targets, and what the settings of ``training`` add to it or put in its place.

Shape letters: B rows, T time, F features, N tokens drawn as negatives.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from elman.baselines import token_counts
from elman.config import EmbeddingConfig, ModelConfig, TrainingConfig
from elman.errors import ConfigError, TrainingError
from elman.models.contract import LanguageModel
from elman.models.heads import OutputHead
from elman.models.losses import Costs, Negatives, Objective, Proposal, unigram_chances
from elman.models.noise import Noise


def proposal_of(config: TrainingConfig, tokens: NDArray[Any], vocab_size: int) -> Proposal | None:
    """What negatives are drawn from, by how often each token occurs in a text; none where all tokens count.

    Raises:
        ConfigError: there are to be as many as tokens in the vocabulary, or more.
    """
    if not config.num_negatives:
        return None
    if config.num_negatives >= vocab_size:
        raise ConfigError(
            f"training.num_negatives {config.num_negatives} stands for a vocabulary of {vocab_size} tokens; accepted: "
            "fewer than that. Leave it out: the exact loss takes less"
        )
    return Proposal(unigram_chances(torch.from_numpy(token_counts(tokens, vocab_size))))


def training_costs(
    network: LanguageModel,
    features_BTF: Tensor,
    targets_BT: Tensor,
    weight_BT: Tensor,
    config: TrainingConfig,
    noise: Noise,
    dtype: torch.dtype | None = None,
    proposal: Proposal | None = None,
) -> Costs:
    """What the targets cost, summed over positions: what is lowered, and nats; with ``num_negatives`` an estimate.

    Args:
        network: the model.
        features_BTF: what its head reads.
        targets_BT: what is predicted.
        weight_BT: of each position.
        config: the settings.
        noise: the key of what is drawn.
        dtype: that the softmax is taken in.
        proposal: draws the negatives; needed with ``num_negatives``.
    """
    head = network.head
    if not isinstance(head, OutputHead):
        raise TrainingError(f"model.kind {network.config.kind!r} has no output that can be trained")
    negatives = None
    if config.num_negatives:
        if proposal is None:
            raise TrainingError("training.num_negatives draws tokens, and nothing says how likely each is")
        # Drawn on the CPU: in float64, and the same on every device.
        place = f"negatives.{noise.num_skipped}" if noise.num_skipped else "negatives"
        drawn_N = noise.common((config.num_negatives,), place, torch.device("cpu"))
        negatives = Negatives(*(tensor.to(features_BTF.device) for tensor in proposal.draw(drawn_N)))
    objective = Objective(config.label_smoothing, negatives, noise.sparse_rows, dtype)
    costs = head.training_costs(features_BTF, targets_BT, weight_BT, objective)
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
