"""Small models of every kind, wide enough that a loop has whole steps of sixteen and a rest; cells in plain PyTorch."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from elman.cells.base import Cell, Initial, Parameter, Step
from elman.cells.primitives import linear
from elman.config import CellConfig, ModelConfig
from elman.engine.trace import CannotLower, trace
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config
from elman.models.laws import small_configs
from elman.models.stack import Layer
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


class _Written(Cell):
    """h_t = what ``form`` makes of W x_t, U h_{t-1}, and the cell's parameters."""

    form: ClassVar = None

    def parameters(self):
        size = self.hidden_size
        return {
            "W": Parameter((size, self.input_size), Initial("uniform", 0.5)),
            "U": Parameter((size, size), Initial("uniform", 0.5)),
            "heads": Parameter((2, size // 2, size // 2), Initial("uniform", 0.5)),
        }

    def step(self, p, x, state):
        h = type(self).form(linear(x, p["W"]), state["h"], p)
        return Step(h, {"h": h}, {})


COMPARING = {
    "chosen": lambda a, h, p: torch.where(a > h, a, 0.5) + a.masked_fill((h >= 0.3) & (a != h) | ~(a < 0), 0.25),
    "truths as numbers": lambda a, h, p: h + (a <= 0).to(a.dtype) - (a == a.detach()) * h + torch.where(a > h, h, a),
    "a mask of its own": lambda a, h, p: torch.where(torch.arange(a.shape[1]) % 3 == 0, a, h),
}


def network_of(form, dtype=torch.float64):
    """An LSTM's network whose first layer is of a cell with this form."""
    network = build(model_config({"kind": "lstm", "embedding_size": 6, "hidden_size": 8, "num_layers": 1}), dtype)
    cell = type("Written", (_Written,), {"form": staticmethod(form)})(CellConfig(hidden_size=8), 6)
    network.layers[0] = Layer(cell, dtype)
    network.layers[0].reset_parameters(torch.Generator().manual_seed(1))
    return network
