"""What is plainly wrong with a training, and what to do about it: a line for each, said once.

Every rule waits until chance can no longer be the cause; a training that is merely not the best it could be hears
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from elman.baselines import token_counts
from elman.config import DEFAULT_EPOCHS, TrainingConfig
from elman.data.prepare import Dataset
from elman.settings import Config

WINDOW = 64
"""Updates that a figure is the mean of."""
_FEW_UPDATES = 10
"""Updates an epoch has at least where the batch suits the text."""
_ENOUGH_UPDATES = 50
"""Updates an epoch has with the batch that is proposed."""
_WARMUP_SHARE = 0.1
"""Of the updates of a training: the warm-up that is proposed."""
_RISE, _RELATIVE_RISE = 0.5, 0.2
"""Of the training loss, in nats and relative to its lowest: more than texts of several kinds bring about."""
_NO_GUESS = 1.01
"""Times what a guess costs that no training comes to by learning too little: it begins with a guess."""
_LEARNED_LATEST = 512
"""Updates after the warm-up by which a model knows more than how frequent each token is."""
_SKIPPED_OFTEN = 3
_WAITING_SHARE = 0.3
"""Of the time of an update that may pass until its data are there."""
_WORSE_ESTIMATES, _WORSE = 3, 0.03
"""Estimates in a row that are worse than the best, and how much the last of them is, relative to it."""


class Advisor:
    """Sees the records of a training and says what is wrong.

    Args:
        config: all settings.
        batch_size: of this layout of the text, which may be too short for the one that is set; of all processes.
        processes: that share it.
        updates_per_epoch: of this layout.
        tokens_per_epoch: of this layout.
        vocab_size: tokens that a guess would have to choose from.
        unigram_nats: gives what a token costs when only its frequency is known; called once at most.
    """

    def __init__(
        self,
        config: Config,
        *,
        batch_size: int,
        processes: int,
        updates_per_epoch: int,
        tokens_per_epoch: int,
        vocab_size: int,
        unigram_nats: Callable[[], float],
    ) -> None:
        self._config = config
        self._rates = " and ".join(rates_of(config.training))
        self._batch_size, self._processes = batch_size, processes
        self._updates_per_epoch, self._tokens_per_epoch = updates_per_epoch, tokens_per_epoch
        self._guess_nats = math.log(vocab_size)
        self._unigram_nats = unigram_nats
        self._window: list[Mapping[str, float]] = []
        self._means: list[float] = []
        self._num_skipped = 0
        self._best: tuple[float, int, float] | None = None
        """The best estimate, its update, and the training loss then."""
        self._worse = 0
        self._said: set[str] = set()

    def at_start(self) -> list[str]:
        """What the settings alone show."""
        said = []
        batch_size, updates, training = self._batch_size, self._updates_per_epoch, self._config.training
        if updates < _FEW_UPDATES and batch_size > self._processes and not self._config.data.pairs:
            smaller = max(1, batch_size * updates // _ENOUGH_UPDATES // self._processes)  # the setting is of each
            said.append(
                f"the batch is large for this text: an epoch has only {updates} update{'s' * (updates != 1)}; take "
                f"training.batch_size {smaller}"
            )
        max_epochs = training.max_epochs or (math.inf if training.has_budget else DEFAULT_EPOCHS)
        max_epochs = min(max_epochs, (training.max_tokens or math.inf) / self._tokens_per_epoch)
        num_updates = min(training.max_updates or math.inf, max_epochs * updates)
        if 1 < num_updates < training.warmup_updates:  # a single update is a trial, as a dry run makes one
            said.append(
                f"the warm-up takes {training.warmup_updates} updates, the training {math.ceil(num_updates)}: the rate "
                f"stays below training.learning_rate; take training.warmup_updates {int(num_updates * _WARMUP_SHARE)}"
            )
        return said

    def remarks(self, kind: str, values: Mapping[str, Any], measured: Mapping[str, float]) -> list[str]:
        """What a record shows together with those before it.

        Args:
            kind: of the record.
            values: what the seed determines of it.
            measured: what the clock determines.
        """
        found: Iterator[tuple[str, str]] = iter(())
        if kind == "update" and "learning_rate" in values:  # counting has none
            self._window.append({**values, **measured})
            if len(self._window) == WINDOW:
                found = self._of_window(self._window)
                self._window = []
        elif kind == "skipped":
            found = self._of_skipped()
        elif kind == "evaluation" and values["nats_per_token"] is not None:  # it is not where it was no number
            found = self._of_estimate(values["nats_per_token"], values["update"])
        new = {name: text for name, text in found if name not in self._said}
        self._said |= new.keys()
        return list(new.values())

    def _of_window(self, window: list[Mapping[str, float]]) -> Iterator[tuple[str, str]]:
        mean = math.fsum(record["nats"] for record in window) / WINDOW
        self._means.append(mean)
        update, rate = int(window[-1]["update"]), window[-1]["learning_rate"]
        if len(self._means) > 2:
            lowest = min(self._means[:-2])
            if min(self._means[-2:]) > lowest + max(_RISE, _RELATIVE_RISE * lowest):
                yield (
                    "rate",
                    f"the training loss has risen from {lowest:.2f} to {mean:.2f} nats: the rate ({rate:.2g} now) is "
                    f"too high; take a third of {self._rates}, or what elman lr-find proposes",
                )
        after_warmup = update - self._config.training.warmup_updates
        if after_warmup >= WINDOW and mean > _NO_GUESS * self._guess_nats:
            yield (
                "rate",
                f"after {update} updates a token costs {mean:.2f} nats, and a guess among all would cost "
                f"{self._guess_nats:.2f}: the rate ({rate:.2g} now) is too high; take a third of {self._rates}, or "
                "what elman lr-find proposes",
            )
        if _LEARNED_LATEST <= after_warmup < _LEARNED_LATEST + WINDOW and mean >= self._unigram_nats():
            yield (
                "rate",
                f"after {update} updates a token costs {mean:.2f} nats, no less than its frequency alone would tell: "
                f"the rate ({rate:.2g} now) does not suit; take what elman lr-find proposes",
            )
        waited, seconds = (math.fsum(record.get(name, 0) for record in window) for name in ("data_seconds", "seconds"))
        if waited > _WAITING_SHARE * seconds:
            yield (
                "data",
                f"{waited / seconds:.0%} of the time goes by until the text of an update is there: the disk is slow; "
                "keep the cache (ELMAN_CACHE) on a local one",
            )

    def _of_skipped(self) -> Iterator[tuple[str, str]]:
        self._num_skipped += 1
        if self._num_skipped == _SKIPPED_OFTEN:
            why = (
                f"the rate is too high, or gradients are not clipped; take a third of {self._rates}, or a lower "
                "training.max_grad_norm"
            )
            if drawn := self._config.training.num_negatives:
                why = f"it is an estimate by {drawn} negatives; take more training.num_negatives, or the exact loss (0)"
            yield "rate", f"{_SKIPPED_OFTEN} batches were skipped because their loss was not to be trusted: {why}"

    def _of_estimate(self, nats: float, update: int) -> Iterator[tuple[str, str]]:
        loss = self._means[-1] if self._means else math.inf
        if self._best is None or not nats > self._best[0]:
            self._best, self._worse = (nats, update, loss), 0
            return
        self._worse += 1
        best, then, loss_then = self._best
        if update < self._updates_per_epoch:
            return  # what was read once cannot have been learned by heart: the estimate wanders
        has_learned = max(best, loss) < self._guess_nats  # else it is the rate, whatever the two do
        if self._worse >= _WORSE_ESTIMATES and nats > best * (1 + _WORSE) and loss < loss_then and has_learned:
            yield (
                "overfitting",
                f"it overfits: held-out text was best at update {then} ({best:.3f} nats, now {nats:.3f}) while the "
                "training loss still falls; the model of then is kept: stop, take model.dropout, a smaller model, or "
                "more text",
            )


def rates_of(training: TrainingConfig) -> list[str]:
    """The settings that hold the rate, with their values."""
    names = ("learning_rate", "matrix_learning_rate") if training.optimizer == "muon" else ("learning_rate",)
    return [f"training.{name} {getattr(training, name):g}" for name in names]


def remedy_of(training: TrainingConfig) -> str:
    """What helps where one batch after the other goes wrong."""
    clip = "set" if training.max_grad_norm is None else "lower"
    remedy = f"lower {', '.join(rates_of(training))} or {clip} training.max_grad_norm"
    if training.spike_deviations is not None:
        remedy += "; where the losses were finite, a higher training.spike_deviations lets them pass"
    return remedy


def unigram_nats(dataset: Dataset) -> float:
    """Nats per token of the training part when only each token's frequency in it is known."""
    counts = token_counts(dataset.train.tokens[1:], dataset.tokenizer.size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
