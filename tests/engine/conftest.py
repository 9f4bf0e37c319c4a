"""Small models of every kind, wide enough that a loop has whole steps of sixteen and a rest."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from elman.config import ModelConfig
from elman.engine.trace import CannotLower, trace
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config
from elman.models.laws import small_configs
from elman.models.state import State

VOCAB_SIZE = 77


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return build_model(config, VOCAB_SIZE, seed=1, dtype=dtype)


def widened(config: ModelConfig) -> ModelConfig:
    """The same with widths five times as large."""
    sizes = ("embedding_size", "hidden_size", "feedforward_size")
    given = config.model_dump(exclude_unset=True)
    return model_config(given | {name: 5 * given[name] for name in sizes if name in given})


@cache
def traced_configs(kind: str) -> tuple[ModelConfig, ...]:
    """Small settings of a kind whose steps differ, the longest step first; none where a kind has no graph."""
    found: dict[str, ModelConfig] = {}
    lengths = {}
    for config in small_configs(kind):
        try:
            graph = trace(build(config))
        except CannotLower:
            continue
        found.setdefault(graph.key, config)
        lengths[graph.key] = len(graph.nodes)
    return tuple(found[key] for key in sorted(found, key=lambda key: -lengths[key]))


def filled_state(network: LanguageModel, num_rows: int) -> State:
    """A state that a text could have led to."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        return network.features(random_tokens(num_rows, 9, generator), network.initial_state(num_rows))[1]


def random_tokens(num_rows: int, num_steps: int, generator: torch.Generator | None = None) -> Tensor:
    generator = generator or torch.Generator().manual_seed(3)
    return torch.randint(VOCAB_SIZE, (num_rows, num_steps), generator=generator)
