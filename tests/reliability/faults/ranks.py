"""Several processes that train one model, one of which is killed or frozen: the others end soon and name it."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping, Sequence

from elman.training.folder import Run
from faults.lab import LONG, Ended, Lab, Process, Result, Trial, campaign, differences

_SIZE = 3
_LIMIT = 30.0
"""Seconds until all have ended."""
_PROMISE = "all end within 30 s, the others name the lost one; started again, they end bit-identical"


@campaign("a process of three is killed", "SIGKILL to one of three processes at a random time, each in turn", _PROMISE)
def killed(lab: Lab, share: float, result: Result) -> None:
    """Kill a process of a group."""
    _lose(lab, result, signal.SIGKILL, max(1, round(share * 12)))


@campaign("a process of three is frozen", "SIGSTOP to one of three processes at a random time, each in turn", _PROMISE)
def frozen(lab: Lab, share: float, result: Result) -> None:
    """Freeze a process of a group."""
    _lose(lab, result, signal.SIGSTOP, max(1, round(share * 9)))


def _lose(lab: Lab, result: Result, number: signal.Signals, count: int) -> None:
    whole = _undisturbed(lab)
    slowest = 0.0
    for serial in range(count):
        victim = serial % _SIZE
        trial = lab.trial(LONG)
        group = _start(trial)
        # Not while they start: a process that has not met the others yet has no number there.
        trial.at_random(group[0], first=0.02, last=0.8)
        fired = all(process.is_alive for process in group)
        group[victim].send(number)
        sent = time.monotonic()
        ended = [process.wait() for process in group]
        seconds = time.monotonic() - sent
        slowest = max(slowest, seconds)
        faults = [f"it took {seconds:.0f} s until all had ended"] * (seconds > _LIMIT)
        faults += _unnamed(ended, victim, f"rank {victim} (process {group[victim].pid} on ")
        if number == signal.SIGKILL:
            fired &= ended[victim].code == -signal.SIGKILL
        faults += _goes_on(trial, whole)
        result.count(fired, faults, f"trial {serial}, rank {victim}")
    result.figures["slowest end in seconds"] = round(slowest, 1)


def _unnamed(ended: Sequence[Ended], victim: int, name: str) -> list[str]:
    """What those that were not hurt have not said."""
    others = [(rank, one) for rank, one in enumerate(ended) if rank != victim]
    lines = [(rank, one.code, one.err.strip().rpartition("\n")[2]) for rank, one in others]
    return [
        f"rank {rank} ended with {code}: {line}"
        for rank, code, line in lines
        if code != 1 or not line.startswith(f"elman: error: {name}")
    ]


def _undisturbed(lab: Lab) -> Run:
    """What three processes train that nothing happens to."""
    trial = lab.trial(LONG, lab.folder / "undisturbed-group")
    if not trial.run.path.exists():
        for ended in _end(_start(trial)):
            if ended.code:
                raise RuntimeError(f"a process that nothing happened to ended with {ended.code}: {ended.err}")
    return trial.run


def _goes_on(trial: Trial, whole: Run) -> list[str]:
    codes = [one.code for one in _end(_start(trial))]
    return differences(trial.run, whole) if not any(codes) else [f"started again, they ended with {codes}"]


def _start(trial: Trial) -> list[Process]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [trial.start(environment=_environment(rank, port)) for rank in range(_SIZE)]


def _environment(rank: int, port: int) -> Mapping[str, str]:
    """What torchrun tells the process of this number."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _end(group: Sequence[Process]) -> list[Ended]:
    return [process.wait() for process in group]
