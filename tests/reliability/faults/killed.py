"""Processes that die without a word: at every system call of a save or a run, and at any time, again and again."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence

from faults.lab import BRIEF, LONG, Call, Lab, Result, campaign, evenly, of_one_save


@campaign(
    "killed in a save",
    "SIGKILL before each system call of one save that changes the disk (strace)",
    "the same command goes on by itself and ends bit-identical, no half-written file left",
)
def in_a_save(lab: Lab, share: float, result: Result) -> None:
    """Kill a run before each system call of one save."""
    _kill_at(lab, result, evenly(of_one_save(lab.calls_of(*BRIEF), 6), share))


@campaign(
    "killed anywhere",
    "SIGKILL before each system call of a whole run that changes the disk (strace)",
    "the same command starts or goes on by itself and ends bit-identical, no half-written file left",
)
def in_a_run(lab: Lab, share: float, result: Result) -> None:
    """Kill a run before each of its system calls, from its first to its last."""
    _kill_at(lab, result, evenly(lab.calls_of(*BRIEF), share))


def _kill_at(lab: Lab, result: Result, calls: Sequence[Call]) -> None:
    for call in calls:
        trial = lab.trial(BRIEF)
        killed = trial.carry_out(inject=f"{call.name}:signal=KILL:when={call.number}")
        result.count(killed.code == -signal.SIGKILL, trial.goes_on(), str(call))
    result.figures |= Counter(call.name for call in calls)


@campaign(
    "killed twice in a row",
    "SIGKILL at a random time of the run, and again of the run that goes on",
    "the third start ends bit-identical in weights, optimiser, state, log, samples and model",
)
def twice_in_a_row(lab: Lab, share: float, result: Result) -> None:
    """Kill a run at random times, go on, kill it again, go on."""
    killed_again = 0
    for number in range(max(1, round(share * 30))):
        trial, codes = lab.trial(LONG), []
        for _ in range(2):
            process = trial.start()
            trial.at_random(process)
            process.send(signal.SIGKILL)
            codes.append(process.wait().code)
        result.count(codes[0] == -signal.SIGKILL, trial.goes_on(), f"trial {number}, ended with {codes}")
        killed_again += codes == [-signal.SIGKILL] * 2
    result.figures["killed both times"] = killed_again
