"""Which learning rate suits: one short training whose rate rises from update to update (Smith 2017).

Paper: Smith 2017, https://arxiv.org/abs/1506.01186.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from elman.cells import own_kind
from elman.errors import ConfigError, TrainingError
from elman.models.contract import CountedModel
from elman.page import COLOURS, Page, new_figure
from elman.settings import resolve, with_corpus
from elman.training.distillation import read_teacher
from elman.training.loop import Trainer
from elman.training.transfer import prepare_for, take_over

_SMOOTHING = 0.9
"""What the running mean of the loss keeps at every update."""
_DIVERGED = 0.25
"""Of what the loss had fallen by: when it has risen again by so much of it, the test is over."""
_FEWEST = 20
"""Updates without which there is no curve."""


@dataclass(frozen=True)
class RangeTest:
    """The loss as the rate rises."""

    rates: tuple[float, ...]
    """Of ``training.learning_rate``; one for each update."""
    nats: tuple[float, ...]
    """Training loss of each update."""
    smoothed: tuple[float, ...]
    """Its running mean."""
    matrix_share: float | None
    """What Muon's rate is of it; none for other optimisers."""

    @property
    def lowest(self) -> float:
        """The rate at which the smoothed loss is lowest."""
        return self.rates[self.smoothed.index(min(self.smoothed))]

    @property
    def steepest(self) -> float:
        """The rate at which the smoothed loss falls the most with the rate's logarithm."""
        until = max(2, self.smoothed.index(min(self.smoothed)) + 1)
        falls = [before - after for before, after in pairwise(self.smoothed[:until])]
        return self.rates[falls.index(max(falls)) + 1]

    @property
    def suggestion(self) -> float:
        """The rate at which the loss falls the most, to two figures.

        A share of the rate of the lowest loss would be no guide: clipped gradients and gates that saturate let the loss
        of a recurrent network fall on far beyond any rate that it can be trained at.
        """
        return float(f"{self.steepest:.1e}")

    @property
    def remark(self) -> str | None:
        """What to ask for where the loss did not turn up between the rates that were tried; else none."""
        if self.lowest == self.rates[-1]:
            return f"the loss still fell at the last rate, {self.lowest:.1e}: let it rise further (to_rate)"
        return None

    def settings(self) -> dict[str, float]:
        """The settings proposed, by their names in ``training``."""
        proposed = {"learning_rate": self.suggestion}
        if self.matrix_share is not None:
            proposed["matrix_learning_rate"] = float(f"{self.suggestion * self.matrix_share:.1e}")
        return proposed

    def page(self) -> Page:
        """The curve on a page."""
        page = Page("Which learning rate", "The training loss while the rate rises from update to update.")
        page.numbers({"proposed": self.suggestion, "lowest": self.lowest})
        figure, axes = new_figure()
        axes.plot(self.rates, self.nats, alpha=0.3, label="each update")
        axes.plot(self.rates, self.smoothed, color=COLOURS[0], label="running mean")
        for rate, name, colour in ((self.suggestion, "proposed", COLOURS[2]), (self.lowest, "lowest", COLOURS[1])):
            axes.axvline(rate, color=colour, linestyle="--", label=name)
        axes.set(xscale="log", xlabel="training.learning_rate", ylabel="nats per token")
        axes.legend()
        page.figure(figure, "Left of the valley the rate is too low to learn by, right of it the training comes apart.")
        if self.remark is not None:
            page.text(self.remark)
        page.code("\n".join(f"--training.{name.replace('_', '-')} {rate:g}" for name, rate in self.settings().items()))
        return page

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return {
            "suggestion": self.settings(),
            "lowest": self.lowest,
            "steepest": self.steepest,
            "remark": self.remark,
            "rates": list(self.rates),
            "nats": list(self.nats),
            "smoothed": list(self.smoothed),
        }


class _Rising(Trainer):
    """A training whose rate rises by the same factor from update to update."""

    rates: Sequence[float] = ()

    def rate_share(self) -> float:
        return self.rates[self.update] / self.config.training.learning_rate


def range_test(
    corpus: str | Path | Sequence[str | Path] | None = None,
    *,
    from_rate: float = 1e-5,
    to_rate: float = 10.0,
    num_updates: int = 150,
    should_stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> RangeTest:
    """Train while the rate rises, until the loss has turned up again; nothing is written.

    Args:
        corpus: as for :func:`elman.training.run.train`.
        from_rate: ``training.learning_rate`` of the first update.
        to_rate: that of the last.
        num_updates: how many there are at most.
        should_stop: once true, what there is by then is the result.
        options: those of ``train`` that choose settings: ``preset``, ``config``, ``from_model`` and the sections;
            beside the ``run.toml`` of a run, its teacher as well.

    Raises:
        ConfigError: the rates do not rise, or the model has none.
        TrainingError: the loss was not finite from the start, or never lower than there; or it was stopped at once.
    """
    if not 0 < from_rate < to_rate or not math.isfinite(to_rate / from_rate) or num_updates < _FEWEST:
        raise ConfigError(
            f"the test is from {from_rate:g} to {to_rate:g} in {num_updates} updates; accepted: finite rates that rise "
            f"from above 0, and {_FEWEST} updates or more"
        )
    preset, file, from_model = (options.pop(name, None) for name in ("preset", "config", "from_model"))
    config = resolve(with_corpus(options, corpus, from_model), preset=preset, file=file)
    budget = dict.fromkeys(("max_epochs", "max_tokens", "max_seconds"))
    training = config.training.model_copy(update={**budget, "max_updates": num_updates + 1, "spike_deviations": None})
    if training.schedule == "plateau":  # it asks for estimates, and there are none
        training = training.model_copy(update={"schedule": "constant"})
    dataset, origin = prepare_for(config)
    teacher = None if file is None else read_teacher(Path(file).parent / "teacher", cell=own_kind(config.model.kind))
    never = {"every_updates": num_updates + 1}
    sampling = config.sampling.model_copy(update={"prompts": ("",), **never})  # prompts are held against the text
    evaluation = config.evaluation.model_copy(update=never)
    config = config.model_copy(update={"training": training, "sampling": sampling, "evaluation": evaluation})
    trainer = _Rising(config, dataset, should_stop=should_stop, teacher=teacher)
    if isinstance(trainer.network, CountedModel):
        raise ConfigError(f"model.kind {config.model.kind!r} is counted and has no learning rate")
    if origin is not None:
        take_over(config, origin, trainer.network, dataset)
    factor = (to_rate / from_rate) ** (1 / (num_updates - 1))
    trainer.rates = [from_rate * factor**update for update in range(num_updates)]
    nats: list[float] = []
    smoothed: list[float] = []
    is_skipped = False
    for record in trainer.records():
        if is_skipped := record.kind == "skipped":
            break
        if record.kind == "update":
            nats.append(record.values["nats"])
            smoothed.append(_running_mean(nats))
            if len(nats) == num_updates or _has_turned_up(smoothed):
                break
    if len(nats) < 2 and is_skipped:
        raise TrainingError(f"the loss was not finite from the start, at the rate {from_rate:g}: begin at a lower one")
    if len(nats) < 2:
        raise TrainingError(f"stopped after {len(nats)} updates: there is no curve yet, let it go on for longer")
    if min(smoothed) == smoothed[0]:
        if _has_turned_up(smoothed):
            raise TrainingError(f"the loss rose from the first rate on, {from_rate:g}: begin at a lower one")
        raise TrainingError(
            f"the loss never fell, up to the rate {trainer.rates[len(nats) - 1]:g}: let it rise further"
        )
    share = training.matrix_learning_rate / training.learning_rate if training.optimizer == "muon" else None
    return RangeTest(tuple(trainer.rates[: len(nats)]), tuple(nats), tuple(smoothed), share)


def _running_mean(values: Sequence[float]) -> float:
    """The mean of the values so far, each weighing ``_SMOOTHING`` times what the one after it weighs."""
    recent = values[-100:]
    weights = [_SMOOTHING**age for age in range(len(recent))]
    return math.fsum(w * v for w, v in zip(weights, reversed(recent), strict=True)) / math.fsum(weights)


def _has_turned_up(smoothed: Sequence[float]) -> bool:
    lowest = min(smoothed)
    return len(smoothed) >= _FEWEST and smoothed[-1] > lowest + max(0.1, _DIVERGED * (smoothed[0] - lowest))
