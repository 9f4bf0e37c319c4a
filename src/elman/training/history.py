"""What the log of a run tells, sorted: its curve, its estimates, its samples, how it ended; and a list of runs.

A log may come from anywhere and may be cut short: what a line lacks counts as unknown.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from elman.errors import ElmanError, UserError
from elman.training.folder import Run

Floats: TypeAlias = npt.NDArray[np.float64]
Ending: TypeAlias = Literal["finished", "stopped", "unfinished"]

_MESSAGES = ("notice", "skipped", "returned")
_COLUMNS = ("update", "tokens", "nats", "grad_norm", "learning_rate")
_MEASURED = ("elapsed_seconds", "tokens_per_second")


@dataclass(frozen=True)
class Curve:
    """A figure for every update, as columns of equal length; what a log does not hold is NaN."""

    update: Floats
    tokens: Floats
    nats: Floats
    """Per token, of the batch."""
    grad_norm: Floats
    """Before clipping."""
    learning_rate: Floats
    elapsed_seconds: Floats
    """Of training alone."""
    tokens_per_second: Floats

    def __len__(self) -> int:
        return len(self.update)


@dataclass(frozen=True)
class History:
    """The log of a run."""

    curve: Curve
    evaluations: tuple[Mapping[str, Any], ...]
    """The estimates on the validation part, in their order."""
    samples: tuple[Mapping[str, Any], ...]
    messages: tuple[str, ...]
    """What was said that a user should know of the text and the model; not how a training went on once."""
    budget_changes: tuple[Mapping[str, Any], ...]
    """The notices of going on with another budget, in their order."""
    ending: Ending
    end: Mapping[str, Any]
    """The last record of a run that finished or was stopped; else empty."""

    @classmethod
    def of(cls, run: Run) -> Self:
        """Read the log of a run."""
        return cls.read(run.records())

    @classmethod
    def read(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """Sort records, in the form of lines of ``metrics.jsonl``."""
        rows: list[list[float]] = []
        evaluations, samples, messages, budget_changes = [], [], [], []
        ending: Ending = "unfinished"
        end: Mapping[str, Any] = {}
        for record in records:
            kind = record.get("kind")
            if kind == "update":
                measured = record.get("measured", {})
                rows.append([_number(record.get(n)) for n in _COLUMNS] + [_number(measured.get(n)) for n in _MEASURED])
                ending = "unfinished"
            elif kind == "evaluation" and record.get("split") == "valid":
                evaluations.append(record)
            elif kind == "sample":
                samples.append(record)
            elif kind in _MESSAGES and record.get("passing"):
                budget_changes += [record] if "budgets_before" in record else []
            elif kind in _MESSAGES:
                messages.append(str(record.get("text")))
            elif kind in ("end", "stopped"):
                ending, end = "finished" if kind == "end" else "stopped", record
        columns = np.array(rows, np.float64).reshape(len(rows), len(_COLUMNS) + len(_MEASURED)).T
        curve, changes = Curve(*columns), tuple(budget_changes)
        return cls(curve, tuple(evaluations), tuple(samples), tuple(messages), changes, ending, end)

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The best estimate on the validation part, whose model is the one that was kept."""
        known = [one for one in self.evaluations if math.isfinite(_number(one.get("nats_per_token")))]
        return min(known, key=lambda one: _number(one["nats_per_token"]), default=None)

    @property
    def seconds(self) -> float | None:
        """Of training alone, so far."""
        return float(self.curve.elapsed_seconds[-1]) if len(self.curve) else None

    @property
    def tokens(self) -> int:
        """Trained so far."""
        return int(self.curve.tokens[-1]) if len(self.curve) else 0

    @property
    def updates(self) -> int:
        """Made so far."""
        return int(self.curve.update[-1]) if len(self.curve) else 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def in_words(budgets: Mapping[str, float]) -> str:
    """Budgets for people: ``max_updates 100, max_seconds 60``; empty where there are none."""
    return ", ".join(f"{name} {value:.10g}" for name, value in budgets.items())


def thinned(columns: Sequence[Floats], max_points: int) -> list[Floats]:
    """Columns of equal length as at most so many points, each the mean of as many neighbours, the last of the rest."""
    size = max(1, -(-len(columns[0]) // max_points))
    starts = np.arange(0, len(columns[0]), size)
    if not len(starts):
        return list(columns)
    lengths = np.diff(np.append(starts, len(columns[0])))
    return [np.add.reduceat(column, starts) / lengths for column in columns]


def spread_out(items: Sequence[int], max_items: int) -> list[int]:
    """At most so many of some sorted numbers, the first and the last among them, by about equal ratios.

    Much happens early in a training and little late, so equal ratios show more of it than equal steps.
    """
    if len(items) <= max_items:
        return list(items)
    chosen: list[int] = []
    for rank, place in enumerate(np.geomspace(1, len(items), max_items)):
        # One further on each time, even where the ratios say the same place twice.
        at = max(round(place) - 1, chosen[-1] + 1 if chosen else 0)
        chosen.append(min(at, len(items) - (max_items - rank)))
    return [items[at] for at in chosen]


@dataclass(frozen=True)
class RunSummary:
    """A run in one line."""

    name: str
    path: str
    kind: str
    corpus: str
    seed: int
    parameters: int | None
    updates: int
    tokens: int
    seconds: float | None
    nats_per_token: float | None
    """The best estimate on the validation part."""
    bits_per_char: float | None
    """The same."""
    ending: Ending

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return vars(self).copy()


def list_runs(folder: str | Path) -> tuple[list[RunSummary], list[str]]:
    """Every run in a folder and below it, by name.

    Returns:
        The runs, and a line for each that cannot be read.

    Raises:
        UserError: there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no folder {str(folder)!r}: name one that holds runs, such as runs")
    found, faults = [], []
    for file in sorted(folder.rglob("run.toml")):
        try:
            found.append(summarise(Run(file.parent), str(file.parent.relative_to(folder))))
        except (ElmanError, OSError, ValueError) as error:
            faults.append(f"{file.parent}: {error}")
    return found, faults


def summarise(run: Run, name: str) -> RunSummary:
    """A run in one line, under a name."""
    settings, environment, history = settings_of(run), environment_of(run), History.of(run)
    best = history.best or {}
    return RunSummary(
        name=name,
        path=str(run.path),
        kind=str(settings.get("model", {}).get("kind")),
        corpus=Path(str(environment.get("corpus", "?"))).name,
        seed=int(settings.get("seed", 0)),
        parameters=environment.get("parameters"),
        updates=history.updates,
        tokens=history.tokens,
        seconds=history.seconds,
        nats_per_token=best.get("nats_per_token"),
        bits_per_char=best.get("bits_per_char"),
        ending=history.ending,
    )


def settings_of(run: Run) -> dict[str, Any]:
    """What stands in ``run.toml``, by section, taken for no more than it says."""
    return tomllib.loads((run.path / "run.toml").read_text("utf-8"))


def environment_of(run: Run) -> dict[str, Any]:
    """What stands in ``environment.json``; empty where it is gone."""
    return read_json(run.path / "environment.json")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
