"""A process that has imported everything and forks one child for each command, so that a run starts in milliseconds.

It reads orders as lines of JSON and answers each with a line: ``{"words": [...], ...}`` starts a child and answers with
its process id, ``{"wait": pid}`` answers with the status that it ended with. A child is the command line and nothing
else: its own process, signals, files and exit code. It never trains itself, because PyTorch's backward pass does not
survive a fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from elman.files import write_atomically
from elman.training.folder import Run


def main() -> None:
    """Serve orders until standard input ends."""
    _warm_up()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers goes there
    print(json.dumps("ready"), file=answers, flush=True)
    while line := sys.stdin.readline():
        order = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                _live(order)
        print(json.dumps(answer), file=answers, flush=True)


def _warm_up() -> None:
    """Import what a run needs."""
    for name in ("cli.data", "cli.display", "cli.output", "cli.running", "cli.train", "data.inspect", "models.stack"):
        import_module(f"elman.{name}")
    import torch

    from elman.models.kinds import build_model
    from elman.settings import resolve
    from elman.training import keeper
    from elman.training.optimizers import Optimizer

    keeper._WAITS = (0.0, 0.0)  # between attempts to write, which would fail again at once
    keeper.write_report = _short_report
    config = resolve()
    network = build_model(config.model, 10, seed=1, dtype=torch.float32)
    optimizer = Optimizer(network, config.training)  # its first step imports most of PyTorch
    for parameter in optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)


def _short_report(run: Run) -> None:
    """Write the page of a run without drawing, which would take most of the time of all campaigns."""
    write_atomically(run.path / "report.html", f"{sum(1 for _ in run.records())} records".encode())


def _live(order: dict[str, Any]) -> NoReturn:
    """The child: stop until somebody is ready to watch, then run the command."""
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, order["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(path, flags, 0o644), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the shell had it ignored
    os.environ.update(order["environment"])
    if order["log"]:
        _log_to(order["log"])
    from elman.cli import main as command

    code = 70
    try:
        if order["stopped"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        code = command(order["words"])
        sys.stdout.flush()
    except KeyboardInterrupt:  # before the command was called
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _log_to(device: str) -> None:
    """Have every run's log be a device, such as one that is always full."""
    begin = Run.begin

    def begin_with_log(run: Run, *arguments: Any) -> None:
        begin(run, *arguments)
        Path(run.metrics).symlink_to(device)

    Run.begin = begin_with_log


if __name__ == "__main__":
    main()
