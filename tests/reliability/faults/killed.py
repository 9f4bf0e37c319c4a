"""Processes that die without a word: at every system call of a save or a run, and at any time, again and again."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable

from faults.lab import Call, Lab, Result, can_trace, differences, of_one_save

RUN = (
    "--training.max_updates=8",
    "--evaluation.every_updates=3",
    "--checkpoint.every_updates=2",
)
"""Checkpoints at 0, 2, 4 and 6 and at the end; from 4 on each takes out an older one."""
_LONGER = ("--training.max_updates=60", "--evaluation.every_updates=7", "--checkpoint.every_updates=4")


def in_a_save(lab: Lab, share: float) -> Result:
    """Kill a run before each system call of one save that changes the disk."""
    result = Result(
        "killed in a save",
        "SIGKILL before each system call of one save that changes the disk (strace)",
        "the same command goes on by itself and ends bit-identical, no half-written file left",
    )
    return _killed_at(lab, result, lambda calls: _some(of_one_save(calls, 4), share))


def in_a_run(lab: Lab, share: float) -> Result:
    """Kill a run before each of its system calls that changes the disk, from its first to its last."""
    result = Result(
        "killed anywhere",
        "SIGKILL before each system call of a whole run that changes the disk (strace)",
        "the same command starts or goes on by itself and ends bit-identical, no half-written file left",
    )
    return _killed_at(lab, result, lambda calls: _some(calls, share))


def _some(calls: tuple[Call, ...], share: float) -> tuple[Call, ...]:
    """An even choice of calls."""
    count = max(1, round(share * len(calls)))
    return tuple(calls[i * len(calls) // count] for i in range(count))


def _killed_at(lab: Lab, result: Result, choose: Callable[[tuple[Call, ...]], tuple[Call, ...]]) -> Result:
    if why := can_trace():
        result.skipped = why
        return result
    whole = lab.undisturbed(*RUN)
    calls = choose(lab.calls_of(*RUN))
    for call in calls:
        out = lab.fresh()
        command = lab.train(out, *RUN)
        killed = lab.run(*command, inject=f"{call.name}:signal=KILL:when={call.number}")
        again = lab.run(*command)
        faults = differences(lab.run_in(out), whole) if again.code == 0 else [f"exit code {again.code}: {again.err}"]
        result.count(killed.code == -signal.SIGKILL, faults, str(call))
    result.figures |= Counter(call.name for call in calls)
    return result


def twice_in_a_row(lab: Lab, share: float) -> Result:
    """Kill a run at random times, go on, kill it again, go on: twice at least, until it ends."""
    result = Result(
        "killed twice in a row",
        "SIGKILL at a random time of the run, and again of the run that goes on",
        "the third start ends bit-identical in weights, optimiser, state, log, samples and model",
    )
    whole = lab.undisturbed(*_LONGER)
    duration = _duration(lab, _LONGER)
    killed_again = 0
    for trial in range(max(1, round(share * 30))):
        out = lab.fresh()
        command = lab.train(out, *_LONGER)
        codes = []
        for _ in range(2):
            process = lab.start(*command)
            time.sleep(lab.random.uniform(0.0, duration))
            process.send(signal.SIGKILL)
            codes.append(process.wait().code)
        last = lab.run(*command)
        faults = differences(lab.run_in(out), whole) if last.code == 0 else [f"exit code {last.code}: {last.err}"]
        result.count(codes[0] == -signal.SIGKILL, faults, f"trial {trial}, ended with {codes}")
        killed_again += codes == [-signal.SIGKILL] * 2
    result.figures["killed both times"] = killed_again
    return result


def _duration(lab: Lab, words: tuple[str, ...]) -> float:
    """How long such a run takes, in seconds."""
    out = lab.fresh()
    return lab.run(*lab.train(out, *words)).seconds
