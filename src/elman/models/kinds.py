"""The one list of model kinds: which settings a kind takes, and which class builds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from elman.cells import cell_names, find_cell, is_own_cell
from elman.config import MixedStackConfig, ModelConfig, NgramConfig, Seq2SeqConfig, UniformStackConfig, WindowConfig
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
_KINDS = {
    "ngram": Kind(NgramConfig, "elman.models.ngram.model:NgramModel"),
    "seq2seq": Kind(Seq2SeqConfig, "elman.models.seq2seq:Seq2Seq"),
    "stack": Kind(MixedStackConfig, _STACK),
    "window": Kind(WindowConfig, "elman.models.window:WindowModel"),
}


def kind_names() -> tuple[str, ...]:
    """Every kind that Elman brings, sorted. A cell's name means the recurrent stack of it, `stack` a mixed one."""
    return tuple(sorted((*cell_names(), *_KINDS)))


def whose(kinds: Sequence[str]) -> str:
    """Which kinds something is for, the shorter way round: `` (gru, lstm only)``, or nothing where it is for all."""
    others = [kind for kind in kind_names() if kind not in kinds]
    if not others:
        return ""
    return f" (not {', '.join(others)})" if len(others) < len(kinds) else f" ({', '.join(kinds)} only)"


def kind_of(settings: Mapping[str, Any]) -> Any:
    """The kind that settings ask for; naming the cells of the layers is asking for a mixed stack."""
    return settings.get("kind", "stack" if "layers" in settings else "lstm")


@cache
def model_config_class(kind: str, layers: tuple[str, ...] = ()) -> type[ModelConfig]:
    """The settings of a kind; for a stack, those of the stack together with those of its cells.

    Args:
        kind: one of :func:`kind_names`, or the path to a person's own cell.
        layers: the cells of a mixed stack, none for its default.

    Raises:
        ConfigError: no such kind, or no such cell.
    """
    if kind == "stack":
        default: tuple[str, ...] = MixedStackConfig.model_fields["layers"].default
        return _with_cells("MixedStack", MixedStackConfig, layers or default)
    if kind in _KINDS:
        return _KINDS[kind].settings
    if not is_own_cell(kind) and kind not in kind_names():
        raise ConfigError(f"unknown model.kind {kind!r}{nearest(kind, kind_names())}, or ./file.py:Class")
    return _with_cells(f"{find_cell(kind).__name__}Stack", UniformStackConfig, (kind,))


def _with_cells(name: str, stack: type[ModelConfig], cells: tuple[str, ...]) -> type[ModelConfig]:
    # The cells come first: where a cell gives a setting of the stack another default, that counts.
    of_cells = dict.fromkeys(find_cell(cell).Config for cell in cells)
    # A class that others derive from comes in with them, and may not stand before them.
    bases = [one for one in of_cells if not any(other is not one and issubclass(other, one) for other in of_cells)]
    return type(name, (*bases, stack), {"__module__": __name__})


def model_config(settings: Mapping[str, Any]) -> ModelConfig:
    """Settings checked by the class of their kind. Raises pydantic's ValidationError or ConfigError.

    Where a kind has residual paths by default, an ``embedding_size`` that is not given is ``hidden_size``.
    """
    section = section_of(settings)
    chosen = {**settings, "kind": kind_of(settings)}
    residual = section.model_fields.get("residual")
    if residual is not None and residual.default and "hidden_size" in settings:
        chosen.setdefault("embedding_size", settings["hidden_size"])
    return section(**chosen)


def section_of(settings: Mapping[str, Any]) -> type[ModelConfig]:
    """The class that checks these settings. Raises ConfigError: no such kind, or no such cell."""
    kind = kind_of(settings)
    if not isinstance(kind, str):
        raise ConfigError(f"model.kind is {kind!r}; accepted: one of {', '.join(kind_names())}")
    if "layers" not in settings:
        return model_config_class(kind)
    if kind != "stack":
        raise ConfigError(
            f"model.layers names the cell of each layer, model.kind {kind!r} one for all: leave one of them out"
        )
    layers = MixedStackConfig(layers=settings["layers"]).layers
    for name in layers:
        if name not in cell_names():
            raise ConfigError(f"model.layers names {name!r}{nearest(name, cell_names())}")
    return model_config_class(kind, layers)


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
