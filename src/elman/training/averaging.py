"""A second copy of the weights that is a mean over updates: it is judged, sampled and saved in place of the first."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from elman.config import TrainingConfig
from elman.models.contract import LanguageModel

PATIENCE = 5
"""Estimates that the best one may lie behind before ``triggered`` averaging begins."""


class Average:
    """The mean of the weights over updates.

    ``exponential``: a <- d a + (1 - d) w after every update, with d = min(averaging_decay, (1 + n) / (10 + n)) for the
    n-th, so that the first weights, which are drawn at random, are soon forgotten (Polyak and Juditsky 1992; the rising
    decay is that of TensorFlow's ``ExponentialMovingAverage``).

    ``triggered``: the plain mean of all weights from the time on at which an estimate is worse than the best of those
    more than five before it; none until then (NT-ASGD: Merity et al. 2018, https://arxiv.org/abs/1708.02182, after
    Polyak and Juditsky 1992, https://doi.org/10.1137/0330046).

    Args:
        network: the model that is trained.
        config: which mean, if any.
    """

    def __init__(self, network: LanguageModel, config: TrainingConfig) -> None:
        self._trained = network
        self._config = config
        self._mean: LanguageModel | None = None
        self._num_updates = 0
        self._estimates: list[float] = []
        if config.averaging == "exponential":
            self._begin()

    @property
    def network(self) -> LanguageModel:
        """The model to judge: the mean, or that which is trained where there is none."""
        return self._trained if self._mean is None else self._mean

    def _begin(self) -> None:
        self._mean = copy.deepcopy(self._trained)
        self._mean.requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an update."""
        if self._mean is None:
            return
        self._num_updates += 1
        share = 1 / self._num_updates
        if self._config.averaging == "exponential":
            rising = (1 + self._num_updates) / (10 + self._num_updates)
            share = 1 - min(self._config.averaging_decay, rising)
        torch._foreach_lerp_(list(self._mean.parameters()), list(self._trained.parameters()), share)

    def judged(self, nats_per_token: float) -> bool:
        """Take in an estimate. Returns whether the mean begins with it."""
        if self._config.averaging != "triggered" or self._mean is not None:
            return False
        earlier = self._estimates[:-PATIENCE] if len(self._estimates) > PATIENCE else []
        self._estimates.append(nats_per_token)
        if not earlier or not nats_per_token > min(earlier):  # never true for NaN
            return False
        self._begin()
        return True

    def tensors(self) -> dict[str, Tensor]:
        """The mean by name, for a checkpoint; nothing where there is none."""
        return {} if self._mean is None else dict(self._mean.named_parameters())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"updates": self._num_updates, "estimates": self._estimates}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what :meth:`tensors` and :meth:`to_dict` gave."""
        self._num_updates, self._estimates = values["updates"], list(values["estimates"])
        self._mean = None
        if tensors:
            self._begin()
        with torch.no_grad():
            for name, parameter in self.network.named_parameters() if tensors else ():
                parameter.copy_(tensors[name])
