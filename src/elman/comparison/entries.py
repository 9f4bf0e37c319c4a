"""Who takes part in a comparison, and the equal terms: sizes found for a number of parameters, budgets for an amount.

Parameters are counted from the settings alone (``predicted_num_parameters``). Operations are those of all matrices that
a token passes, as ``elman inspect model`` counts them, times three: the backward pass costs twice the forward one.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from pydantic import ValidationError

from elman.config import BUDGETS, CountedConfig, ModelConfig
from elman.data.prepare import Dataset, prepare
from elman.errors import ConfigError, UserError
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_class, model_config, section_of
from elman.settings import Config, resolve

Equal: TypeAlias = Literal["tokens", "operations", "seconds"]
Settings: TypeAlias = dict[str, Any]

PASSES_IN_TRAINING = 3
"""Forward, and backward, which costs twice as much."""

_LAYERS_OF_RESIDUAL_STACK = 4
"""Where residual paths are the kind's default and no number of layers is given: these kinds are made to be deep."""
_TOLERANCE = 0.05
_MAX_WIDTH = 1 << 14
_NAME = re.compile(r"[\w.+-]{1,40}")
_UNITS: Mapping[Equal, str] = {
    "tokens": "trained tokens",
    "operations": "floating-point operations of training",
    "seconds": "seconds of training",
}


@dataclass(frozen=True)
class Entry:
    """One of the models to be compared: a name, and what sets it apart from the others, by section."""

    name: str
    settings: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Read an entry as it is typed: a kind, or ``NAME: SECTION.FIELD=VALUE ...``.

        Raises:
            UserError: it is neither.
        """
        name, colon, rest = text.partition(": ")
        if not colon:  # a kind, or the path of a person's own cell, whose colon no space follows
            kind = text.strip()
            return cls(_checked_name(kind.rpartition(":")[2].rpartition(".")[2].lower()), {"model": {"kind": kind}})
        settings: dict[str, Any] = {}
        for word in shlex.split(rest):
            path, equals, value = word.partition("=")
            section, dot, field = path.partition(".")
            if not equals or not path:
                raise UserError(f"{word!r} in the entry {name!r} is no SETTING=VALUE, such as model.tie_weights=true")
            if dot:
                settings.setdefault(section, {})[field] = value
            else:
                settings[section] = value
        return cls(_checked_name(name.strip()), settings)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name an entry: accepted are up to 40 letters, digits and .+-_")
    return name


def check_names(entries: Sequence[Entry]) -> None:
    """Raises UserError: there are fewer than two entries, or two of one name."""
    names = [entry.name for entry in entries]
    if len(names) < 2:
        raise UserError("a comparison takes two models and more: give --kinds elman,lstm, or --entry twice")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"two entries are called {twice[0]!r}: give each a name, --entry 'NAME: SETTING=VALUE ...'")


@dataclass(frozen=True)
class Terms:
    """What is equal between the models."""

    budget: Equal
    """What each may use up in training."""
    amount: float
    num_parameters: int | None = None
    """Each has about so many; none: each has the size that its settings give it."""

    def __str__(self) -> str:
        amount = f"{self.amount:,.0f}" if self.amount < 1e9 else f"{self.amount:.3g}"
        size = "" if self.num_parameters is None else f", about {self.num_parameters:,} parameters each"
        return f"{amount} {_UNITS[self.budget]} each{size}"

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return vars(self).copy()


@dataclass(frozen=True)
class Plan:
    """An entry with all of its settings, and what follows from them. The seed is the first."""

    name: str
    config: Config
    dataset: Dataset
    parameters: int
    operations: int
    """For each token, forward."""

    @property
    def is_counted(self) -> bool:
        """Whether it is counted and not trained: budgets, rates and seeds mean nothing to it."""
        return isinstance(self.config.model, CountedConfig)

    def with_training(self, **changes: Any) -> Plan:
        """The same with other settings of the section ``training``."""
        training = self.config.training.model_copy(update=changes)
        return replace(self, config=self.config.model_copy(update={"training": training}))

    def with_rate(self, factor: float) -> Plan:
        """The same with all of its learning rates multiplied."""
        training = self.config.training
        rates = {"learning_rate": training.learning_rate * factor}
        if training.optimizer == "muon":
            rates["matrix_learning_rate"] = training.matrix_learning_rate * factor
        return self.with_training(**rates)


def plan_entry(
    entry: Entry, common: Mapping[str, Any], terms: Terms, *, preset: str | None = None, file: str | Path | None = None
) -> Plan:
    """Settle the settings of an entry, its size and its budget.

    Args:
        entry: what sets it apart.
        common: settings that all share; the entry's own win.
        terms: what is equal.
        preset: a named set of settings below the common ones.
        file: a TOML file of settings below the common ones.

    Raises:
        UserError: a setting is not accepted, no width gives the number of parameters, or the corpus cannot be read.
    """
    settings = merged(common, entry.settings)
    _refuse_budgets(settings.get("training", {}), entry.name)
    try:
        config = _resolve(settings, preset, file)
        dataset = prepare(config.data, config.text, config.tokenizer)
        if terms.num_parameters is not None and not isinstance(config.model, CountedConfig):
            if "hidden_size" in settings.get("model", {}):
                raise ConfigError("model.hidden_size is what is sought for --parameters: leave one of them out")
            model = sized(config.model, terms.num_parameters, dataset.tokenizer.size)
            config = _resolve({**settings, "model": model}, preset, file)
    except ConfigError as error:
        raise ConfigError(f"entry {entry.name!r}: {error}") from None
    network = build_model(config.model, dataset.tokenizer.size, seed=None, dtype=getattr(torch, config.dtype))
    plan = Plan(entry.name, config, dataset, network.num_parameters, operations_per_token(network))
    return plan if plan.is_counted else plan.with_training(**_budget(plan, terms))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """Settings by section, the second winning over the first."""
    found: Settings = dict(below)
    for section, value in above.items():
        lower = found.get(section)
        found[section] = {**lower, **value} if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return found


def _resolve(settings: Settings, preset: str | None, file: str | Path | None) -> Config:
    model = settings.get("model", {})
    if {"kind", "layers"} & model.keys() and issubclass(section_of(model), CountedConfig):
        # What all the others are trained with means nothing to a count.
        training = {name: value for name, value in settings.get("training", {}).items() if name == "num_threads"}
        settings = {**settings, "training": training}
    return resolve(settings, preset=preset, file=file)


def _refuse_budgets(training: Mapping[str, Any], name: str) -> None:
    if given := [f"training.{budget}" for budget in BUDGETS if training.get(budget) not in (None, "none")]:
        raise UserError(
            f"{' and '.join(given)} of {name!r}: the budget of a comparison is one for all, --tokens, --operations or "
            "--seconds"
        )


def sized(model: ModelConfig, num_parameters: int, vocab_size: int) -> Settings:
    """The settings of a model with the width that comes nearest to a number of parameters.

    Widths that hang together grow together: an embedding that has to be as wide as the layers, and a feed-forward
    network, unless it was given, in the proportion of the kind's defaults; where heads allow few widths of the layers,
    that of this network makes up for what they miss.

    Args:
        model: all settings, at some width.
        num_parameters: what is sought.
        vocab_size: V.

    Raises:
        ConfigError: nothing comes near.
    """
    fields, defaults, given = model.model_dump(), type(model).model_fields, model.model_fields_set
    if "hidden_size" not in fields:
        raise ConfigError(f"model.kind {model.kind!r} has no hidden_size to be found for --parameters: leave it out")
    is_deep = "residual" in fields and defaults["residual"].default
    if is_deep and "num_layers" in fields and "num_layers" not in given:
        fields["num_layers"] = _LAYERS_OF_RESIDUAL_STACK
    follows = fields.get("residual") or (fields.get("tie_weights") and not fields["output_projection"])
    proportion = 0.0
    if "feedforward_size" in fields and "feedforward_size" not in given:
        proportion = defaults["feedforward_size"].default / defaults["hidden_size"].default

    def of_width(width: int, feedforward_size: int | None = None) -> Settings:
        followers = {"embedding_size": width} if follows else {}
        if proportion:
            followers["feedforward_size"] = round(proportion * width) if feedforward_size is None else feedforward_size
        return {**fields, "hidden_size": width, **followers}

    def size(width: int, feedforward_size: int | None = None) -> int | None:
        """None where the kind does not take this width."""
        try:
            config = model_config(of_width(width, feedforward_size))
        except (ValidationError, ConfigError):
            return None
        return model_class(config).predicted_num_parameters(config, vocab_size)

    step = _step_of_widths(size)
    # The smallest multiple of the step that reaches the number; the one before may be nearer.
    low, high = 0, _MAX_WIDTH // step
    while high - low > 1:
        middle = (low + high) // 2
        found = size(middle * step)
        low, high = (low, middle) if found is not None and found >= num_parameters else (middle, high)
    known = {width: found for width in (low * step, high * step) if width and (found := size(width)) is not None}
    width = min(known, key=lambda width: abs(known[width] - num_parameters))
    if proportion and (without := size(width, 1)) is not None and (more := size(width, 2)) is not None:
        fitting = 1 + round((num_parameters - without) / (more - without))
        if 0.5 < fitting / (proportion * width) < 2.0:
            return of_width(width, fitting)
    if abs(known[width] - num_parameters) > _TOLERANCE * num_parameters:
        raise ConfigError(
            f"no width of model.kind {model.kind!r} comes within {_TOLERANCE:.0%} of {num_parameters:,} parameters: "
            f"the nearest, width {width}, has {known[width]:,}; give another --parameters"
        )
    return of_width(width)


def _step_of_widths(size: Callable[[int], int | None]) -> int:
    """The smallest step in which a kind takes widths: heads and blocks must divide them."""
    for step in range(1, 257):
        if all(size(step * multiple) is not None for multiple in (8, 9, 10, 11)):
            return step
    raise ConfigError("no width is accepted together with the other settings of the model: leave --parameters out")


def operations_per_token(network: LanguageModel) -> int:
    """Floating-point operations of one token, forward."""
    return sum(component.operations for component in network.components())


def _budget(plan: Plan, terms: Terms) -> dict[str, Any]:
    none: dict[str, Any] = dict.fromkeys(BUDGETS)
    if terms.budget == "seconds":
        return none | {"max_seconds": float(terms.amount)}
    tokens = terms.amount if terms.budget == "tokens" else terms.amount / (PASSES_IN_TRAINING * plan.operations)
    return none | {"max_tokens": math.ceil(tokens)}
