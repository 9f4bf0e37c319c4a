"""One training of a comparison: named by a digest of all that decides it, found again if it was done, made if not.

Several commands may work on one folder. Each takes a trial by locking a file, leaves those of others alone, and waits
for them at the end; so two commands share the work, and one that is killed lets go of what it held.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import elman
from elman.cells import is_own_cell
from elman.comparison.entries import Plan
from elman.comparison.judging import judge_run
from elman.errors import TrainingError, UserError
from elman.files import write_atomically
from elman.generation import Sampler
from elman.models.file import Bundle
from elman.models.kinds import build_model
from elman.models.noise import derived_seed
from elman.settings import Config
from elman.training import run as runs
from elman.training.folder import Run
from elman.training.history import History, read_json
from elman.training.loop import Callback
from elman.training.report import judged_in

_FAILED_FILE = "failed.json"
_UNTRAINED_FILE = "untrained.json"
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Watch:
    """Who follows the trainings, and may end them.

    Args:
        tell: gets a line for whatever begins and ends.
        callbacks: see every record of every training.
        should_stop: once true, the training at hand is saved and no other begins.
    """

    tell: Callable[[str], None] = lambda line: None
    callbacks: Sequence[Callback] = ()
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Trial:
    """A plan with a seed, and where its run lies."""

    plan: Plan
    seed: int
    folder: Path
    """Of all trials."""

    @property
    def config(self) -> Config:
        """All settings."""
        return self.plan.config.model_copy(update={"seed": self.seed})

    @property
    def digest(self) -> str:
        """Of whatever decides the result: settings, text, version."""
        settings = self.config.to_dict() | {"preset": None}
        of_place = {"corpus": self.plan.dataset.sha256, "version": elman.__version__}
        settings["data"] = settings["data"] | {"corpus": None}  # the text counts, not where it lies
        text = json.dumps(settings | of_place, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]

    @property
    def run(self) -> Run:
        """The folder of the training."""
        return Run(self.folder / f"{self.plan.name}-{self.seed}-{self.digest}")

    @property
    def own_cell(self) -> str | None:
        """The person's own cell that it is trained with."""
        kind = self.config.model.kind
        return kind if is_own_cell(kind) else None

    @property
    def name(self) -> str:
        """For people."""
        return self.plan.name if self.plan.is_counted else f"{self.plan.name}, seed {self.seed}"

    @property
    def is_trained(self) -> bool:
        """Whether the training came to its end."""
        return self.run.model.is_file() and History.of(self.run).ending == "finished"

    @property
    def is_judged(self) -> bool:
        """Whether there is a model, and what it is worth is known."""
        return self.failure is None and self.is_trained and bool(judged_in(self.run))

    @property
    def failure(self) -> str | None:
        """Why the training could not come to its end, where its numbers went wrong."""
        text = read_json(self.run.path / _FAILED_FILE).get("text")
        return None if text is None else str(text)

    def train(self, watch: Watch) -> bool:
        """Train, or go on where an earlier attempt was left; false where it was stopped."""
        settings = self.config.to_dict()
        del settings["preset"]
        try:
            run = runs.train(
                out=self.run.path, resume="auto", callbacks=watch.callbacks, should_stop=watch.should_stop, **settings
            )
        except TrainingError as error:
            failed = {"text": f"the training failed: {error}"}
            write_atomically(self.run.path / _FAILED_FILE, json.dumps(failed).encode())
            return True
        return History.of(run).ending == "finished"

    def untrained(self) -> list[dict[str, Any]]:
        """What the model writes before its training, in the form of its samples: where the way begins."""
        path = self.run.path / _UNTRAINED_FILE
        if not path.exists():
            write_atomically(path, json.dumps({"samples": self._draw_untrained()}).encode())
        samples: list[dict[str, Any]] = read_json(path).get("samples", [])
        return samples

    def _draw_untrained(self) -> list[dict[str, Any]]:
        config, tokenizer = self.config, self.plan.dataset.tokenizer
        if self.plan.is_counted or config.data.pairs:
            return []
        dtype, boundary_id = getattr(torch, config.dtype), tokenizer.boundary_id
        network = build_model(config.model, tokenizer.size, seed=config.seed, dtype=dtype, boundary_id=boundary_id)
        samples = []
        for prompt, temperature in product(config.sampling.prompts, config.sampling.temperatures):
            settings = config.sampling.model_copy(update={"temperature": temperature})
            seed = derived_seed(config.seed, "sample", 0, prompt, str(temperature))
            text = Sampler(Bundle(network, tokenizer, {}), prompt, settings=settings, seed=seed).run().text
            samples.append({"update": 0, "prompt": prompt, "temperature": temperature, "text": text})
        return samples

    def judged(self, *, with_baselines: bool = False, with_temperatures: bool = False) -> dict[str, Any]:
        """What its model is worth on the held-out part, looked at once; see :func:`judge_run`."""
        return judge_run(
            self.run, cell=self.own_cell, with_baselines=with_baselines, with_temperatures=with_temperatures
        )

    def valid_nats(self) -> float:
        """The best estimate on the validation part; infinite where the training failed or there is none."""
        best = None if self.failure else History.of(self.run).best
        return math.inf if best is None else float(best["nats_per_token"])


def carry_out(trials: Sequence[Trial], watch: Watch, finish: Callable[[Trial], None] = lambda trial: None) -> bool:
    """See that every trial is done, by this process or another.

    Args:
        trials: in the order in which they are wanted.
        watch: follows them.
        finish: done for each trial that is trained, while nobody else works on it.

    Returns:
        Whether all are done; false where it was stopped.
    """
    left = list(trials)
    while left:
        waits = True
        for trial in tuple(left):
            if watch.should_stop():
                return False
            with _claimed(trial) as is_mine:
                if not is_mine:
                    continue
                number = f"{len(trials) - len(left) + 1} of {len(trials)}"
                if not _settled(trial, watch, number):
                    return False
                if trial.failure is None:
                    finish(trial)
            left.remove(trial)
            waits = False
        if waits:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True


def _settled(trial: Trial, watch: Watch, number: str) -> bool:
    """Whether the trial is done by now, be it that its training failed."""
    if trial.is_trained or trial.failure is not None:
        watch.tell(f"{number}: {trial.name}: was there already")
        return True
    watch.tell(f"{number}: {trial.name}: {'counting' if trial.plan.is_counted else 'training'}")
    if not trial.train(watch):
        return False
    if trial.failure is not None:
        watch.tell(f"{number}: {trial.name}: {trial.failure}")
    return True


@contextmanager
def _claimed(trial: Trial) -> Iterator[bool]:
    """Whether the trial is this process's while the context lasts."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield True
        return
    with (trial.folder / f"{trial.run.path.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def check_folder(folder: Path) -> None:
    """Raises UserError: the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {str(folder)!r} cannot be made ({error.strerror}): give another --out") from None
