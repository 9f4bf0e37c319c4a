"""The one list of model kinds: which settings a kind takes, and which class builds it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from elman.cells import cell_names, find_cell, is_own_cell
from elman.config import ModelConfig, StackConfig, WindowConfig
from elman.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

    from elman.models.contract import LanguageModel


class Kind(NamedTuple):
    """A family of models that is no recurrent stack."""

    settings: type[ModelConfig]
    model: str
    """Where its class is; imported when a model is built, because it brings torch in."""


_STACK = "elman.models.stack:RecurrentStack"
_KINDS = {"window": Kind(WindowConfig, "elman.models.window:WindowModel")}


def kind_names() -> tuple[str, ...]:
    """Every kind that Elman brings, sorted. A cell's name means the recurrent stack of it."""
    return tuple(sorted((*cell_names(), *_KINDS)))


@cache
def model_config_class(kind: str) -> type[ModelConfig]:
    """The settings of a kind; for a cell's name, those of the stack together with those of the cell.

    Raises:
        ConfigError: no such kind.
    """
    if kind in _KINDS:
        return _KINDS[kind].settings
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
    found: type[LanguageModel] = resolve_name(_KINDS[config.kind].model if config.kind in _KINDS else _STACK)
    return found


def build_model(
    config: ModelConfig,
    vocab_size: int,
    *,
    seed: int | None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    boundary_id: int = 0,
) -> LanguageModel:
    """A new model with its initial weights, or with zeros for ``seed=None``, to be filled from a file.

    The weights are drawn on the CPU, so that a seed gives the same model on every device. ``boundary_id`` is the
    tokenizer's.
    """
    import torch

    from elman.models.noise import derived_seed

    model = model_class(config)(config, vocab_size, dtype=dtype, boundary_id=boundary_id)
    if seed is not None:
        model.reset_parameters(torch.Generator().manual_seed(derived_seed(seed, "initial weights")))
    return model.to(device)
