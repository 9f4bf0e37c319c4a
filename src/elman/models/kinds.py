"""The one list of model kinds: which settings a kind takes, and which class builds it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from elman.cells import cell_names, find_cell, is_own_cell
from elman.config import ModelConfig, StackConfig
from elman.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

    from elman.models.contract import LanguageModel


def kind_names() -> tuple[str, ...]:
    """Every kind that Elman brings, sorted. A cell's name means the recurrent stack of it."""
    return cell_names()


@cache
def model_config_class(kind: str) -> type[ModelConfig]:
    """The settings of a kind: those of the stack together with those of its cell.

    Raises:
        ConfigError: no such kind.
    """
    if not is_own_cell(kind) and kind not in kind_names():
        raise ConfigError(f"unknown model.kind {kind!r}{nearest(kind, kind_names())}, or ./file.py:Class")
    cell = find_cell(kind)
    return type(f"{cell.__name__}Stack", (StackConfig, cell.Config), {"__module__": __name__})


def model_config(settings: Mapping[str, Any]) -> ModelConfig:
    """Settings checked by the class of their kind. Raises pydantic's ValidationError or ConfigError."""
    kind = settings.get("kind", "lstm")
    if not isinstance(kind, str):
        raise ConfigError(f"model.kind is {kind!r}; accepted: one of {', '.join(kind_names())}")
    return model_config_class(kind)(**settings)


def model_class(config: ModelConfig) -> type[LanguageModel]:
    """The class that builds models of these settings."""
    from elman.models.stack import RecurrentStack

    return RecurrentStack


def build_model(
    config: ModelConfig, vocab_size: int, *, seed: int | None, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> LanguageModel:
    """A new model with its initial weights, or with zeros for ``seed=None``, to be filled from a file.

    The weights are drawn on the CPU, so that a seed gives the same model on every device.
    """
    import torch

    from elman.models.noise import derived_seed

    model = model_class(config)(config, vocab_size, dtype=dtype)
    if seed is not None:
        model.reset_parameters(torch.Generator().manual_seed(derived_seed(seed, "initial weights")))
    return model.to(device)
