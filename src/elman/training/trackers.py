"""Trackers of experiments: the numbers of a training go to trackio, Weights & Biases or MLflow, as it goes on.

elman.train("my.txt", callbacks=[Tracker("trackio", run_name="small", settings={"seed": 1})])
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from elman.errors import UserError
from elman.training.loop import Callback, Record

TrackerName: TypeAlias = Literal["mlflow", "trackio", "wandb"]

_PROJECT = "elman"


class Tracker(Callback):
    """Sends the numbers of updates and estimates to a tracker.

    What it cannot send is lost and the training is not: :attr:`failure` says why, and nothing more is sent.

    Args:
        name: of the library.
        run_name: under which the run is shown.
        settings: shown beside it.

    Raises:
        UserError: the library is not installed.
    """

    def __init__(self, name: TrackerName, *, run_name: str, settings: Mapping[str, Any]) -> None:
        self.failure: str | None = None
        try:
            library = importlib.import_module(name)
        except ImportError:
            raise UserError(f"tracking with {name} needs that library: pip install {name}") from None
        self._log: Callable[[dict[str, float], int], object]
        if name == "mlflow":
            library.set_experiment(_PROJECT)
            library.start_run(run_name=run_name)
            library.log_params(_flat(settings))
            self._log = lambda numbers, step: library.log_metrics(numbers, step=step)
            self._finish: Callable[[], object] = library.end_run
        else:  # these two share one face
            library.init(project=_PROJECT, name=run_name, config=dict(settings))
            self._log = lambda numbers, step: library.log(numbers, step=step)
            self._finish = library.finish

    def on_record(self, record: Record) -> None:
        """Send what an update or an estimate holds."""
        if self.failure is not None:
            return
        try:
            if record.kind in ("update", "evaluation"):
                prefix = "train" if record.kind == "update" else "valid"
                values = {**record.values, **record.measured}
                numbers = {f"{prefix}/{key}": float(value) for key, value in values.items() if _is_number(value)}
                self._log(numbers, int(record.values["update"]))
            elif record.kind in ("end", "stopped"):
                self._finish()
        except Exception as error:  # whatever a service far away may raise
            self.failure = f"{type(error).__name__}: {error}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by ``section.field``."""
    found = {}
    for section, value in settings.items():
        for name, setting in value.items() if isinstance(value, Mapping) else (("", value),):
            found[f"{section}.{name}" if name else section] = str(setting)
    return found
