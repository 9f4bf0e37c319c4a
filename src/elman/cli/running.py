"""What ``train`` and ``resume`` share: follow the training, save on Ctrl-C, say at the end where everything lies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from elman.cli.display import Dashboard, Display
from elman.cli.output import print_json
from elman.training.loop import Callback, Record
from elman.training.run import Run


class StopOnSignal(Callback):
    """Ctrl-C or SIGTERM asks the training to save and stop; before its first record it interrupts at once."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.signal: int | None = None
        self._dashboard = dashboard
        self._has_begun = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether the training should stop."""
        return self.signal is not None

    def on_record(self, record: Record) -> None:
        """From the first record on there is something to save."""
        self._has_begun = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._has_begun:
            raise KeyboardInterrupt(number)
        message = "stopping: saving" if self.signal is None else "still saving"
        self._dashboard.status = message
        self.signal = self.signal or number
        # Past Python's buffers, which the handler may have interrupted in the middle of a write.
        os.write(2, f"\r{message} ...".encode() if sys.stderr.isatty() else f"{message} ...\n".encode())


def carry_through(start: Callable[[dict[str, Any]], Run], display: Display, *, json: bool) -> int:
    """Carry a training through and say what came of it.

    Args:
        start: calls ``train`` or ``resume`` with the callbacks and ``should_stop`` that it is given.
        display: shows the records.
        json: print the result as JSON.

    Returns:
        The exit code.
    """
    dashboard = display.dashboard
    with StopOnSignal(dashboard) as stop, display:
        run = start({"callbacks": [stop, display], "should_stop": stop})
    stopped = "stopped" in dashboard.latest
    result = dashboard.latest["stopped" if stopped else "end"]
    if json:
        print_json(_summary(run, dashboard, result))
    elif stopped:
        print(f"saved at update {result['update']:,}; to go on: elman resume {run.path}")
        print(f"to judge it: elman eval {run.path} ({_which_model(dashboard)})")
    else:
        print(f"run       {run.path} (seed {dashboard.config.seed})")
        print(f"best      {dashboard.estimate(dashboard.best) if dashboard.best else 'no validation part to judge by'}")
        print(f"trained   {result['measured']['seconds']:.1f} s, {result['update']:,} updates, {result['tokens']:,} tokens")
        print(f"go on     elman sample {run.path}")
        print(f"          elman eval {run.path}")
    return 128 + stop.signal if stopped and stop.signal is not None else 0


def _which_model(dashboard: Dashboard) -> str:
    """Which model a judgement of a stopped run is about."""
    return "the model as saved last" if dashboard.best is None else f"its best so far, of update {dashboard.best['update']:,}"


def _summary(run: Run, dashboard: Dashboard, result: dict[str, Any]) -> dict[str, Any]:
    figures = {key: value for key, value in result.items() if key not in ("kind", "measured")}
    return {
        "run": str(run.path),
        "seed": dashboard.config.seed,
        "stopped": result["kind"] == "stopped",
        **figures,
        "seconds": dashboard.latest["update"]["measured"]["elapsed_seconds"] if "update" in dashboard.latest else None,
        "evaluation": dashboard.latest.get("evaluation"),
    }
