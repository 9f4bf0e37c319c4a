"""What ``train`` and ``resume`` share: follow the training, save on Ctrl-C, say at the end where everything lies."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from elman.cells import is_own_cell
from elman.cli.display import Dashboard, Display
from elman.cli.output import print_json
from elman.training.distributed import Place
from elman.training.folder import REPORT_FILE, Run
from elman.training.loop import Callback, Record

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
"""Those that ask a training to save and stop, as far as the system has them."""


class StopOnSignal(Callback):
    """Ctrl-C or another signal asks the training to save and stop; before its first record it interrupts at once."""

    def __init__(self, display: Display, *, speaks: bool = True) -> None:
        self.signal: int | None = None
        self._speaks = speaks
        self._display = display
        self._has_begun = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (s for s in signal.Signals if s.name in _SIGNALS):
                if not (number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):  # as nohup sets it
                    self._before[number] = signal.signal(number, self._handle)
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
        self._display.status = "stopping: saving ..." if self.signal is None else "still saving ..."
        self.signal = self.signal or number
        if not self._speaks:
            return
        # Past Python's buffers, which the signal may have interrupted in the middle of a write.
        os.write(2, (f"\r{self._display.status}" if sys.stderr.isatty() else f"{self._display.status}\n").encode())


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
    speaks = Place.from_environment().rank == 0  # of several processes, the first
    with StopOnSignal(display, speaks=speaks) as stop, display:
        run = start({"callbacks": [stop, display] if speaks else [stop], "should_stop": stop})
    if not speaks:
        return 0 if stop.signal is None else 128 + stop.signal
    where = shlex.quote(str(run.path))
    if is_own_cell(kind := dashboard.config.model.kind):
        where += f" --cell {shlex.quote(kind)}"
    stopped = "stopped" in dashboard.latest
    result = dashboard.latest["stopped" if stopped else "end"]
    if json:
        print_json(_summary(run, dashboard, result))
    elif stopped:
        best = dashboard.best
        which = "the model as saved last" if best is None else f"its best so far, of update {best['update']:,}"
        print(f"saved at update {result['update']:,}; to go on: elman resume {where}")
        print(f"to judge it: elman eval {where} ({which})")
    else:
        seconds = result["measured"]["seconds"]
        print(f"run       {where} (seed {result['seed']})")
        print(f"best      {dashboard.estimate(result.get('best_nats_per_token'), result.get('best_update'))}")
        print(f"trained   {seconds:.1f} s, {result['update']:,} updates, {result['tokens']:,} tokens")
        if (page := run.path / REPORT_FILE).exists():
            print(f"report    {page}")
        print(f"go on     elman {'translate' if dashboard.config.data.pairs else 'sample'} {where}")
        print(f"          elman eval {where}")
    return 128 + stop.signal if stopped and stop.signal is not None else 0


def _summary(run: Run, dashboard: Dashboard, result: Mapping[str, Any]) -> dict[str, Any]:
    figures = {key: value for key, value in result.items() if key not in ("kind", "measured")}
    return {
        "run": str(run.path),
        "seed": dashboard.config.seed,
        "stopped": result["kind"] == "stopped",
        **figures,
        "seconds": dashboard.latest["update"]["measured"]["elapsed_seconds"] if "update" in dashboard.latest else None,
        "evaluation": dashboard.latest.get("evaluation"),
    }
