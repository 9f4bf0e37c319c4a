"""Signals at any time: the work until then is saved, the process ends soon, a second signal changes nothing."""

from __future__ import annotations

import signal
import time

from elman.training.checkpoint import has_checkpoint
from faults.lab import Lab, Result, differences

_CALM = ("--training.max_updates=80", "--evaluation.every_updates=11", "--checkpoint.every_updates=30")
_SAVING = ("--training.max_updates=30", "--evaluation.every_updates=1000", "--checkpoint.every_updates=1")
_LIMIT = 5.0
"""Seconds that a run may take to save and end, beside one update."""
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def one(lab: Lab, share: float) -> Result:
    """One signal at a random time, twice in a row, then on to the end."""
    result = Result(
        "a signal",
        "SIGTERM, SIGINT, SIGHUP or SIGUSR1 at a random time, and again to the run that goes on",
        "it ends within 5 s, saved, with 128 + the signal's number, or done; the third start ends bit-identical",
    )
    return _interrupted(lab, result, _CALM, max(2, round(share * 40)), second=False)


def two(lab: Lab, share: float) -> Result:
    """Two signals in short order to a run that spends most of its time saving."""
    result = Result(
        "a second signal amid a save",
        "two signals 0 to 30 ms apart to a run that saves at every update, and again to the run that goes on",
        "the same",
    )
    return _interrupted(lab, result, _SAVING, max(2, round(share * 40)), second=True)


def _interrupted(lab: Lab, result: Result, words: tuple[str, ...], trials: int, *, second: bool) -> Result:
    whole = lab.undisturbed(*words)
    duration = lab.run(*lab.train(lab.fresh(), *words)).seconds
    slowest, saved = 0.0, 0
    for trial in range(trials):
        out = lab.fresh()
        command = lab.train(out, *words)
        number = _NUMBERS[trial % len(_NUMBERS)]
        faults, fired = [], False
        for _ in range(2):
            process = lab.start(*command)
            time.sleep(lab.random.uniform(0.0, duration))
            fired |= process.is_alive
            process.send(number)
            sent, numbers = time.monotonic(), [number]
            if second:
                time.sleep(lab.random.uniform(0.0, 0.03))
                numbers.append(lab.random.choice(_NUMBERS))
                process.send(numbers[1])
            ended = process.wait()
            seconds = time.monotonic() - sent
            slowest = max(slowest, seconds)
            faults += [f"it took {seconds:.1f} s to end"] * (seconds > _LIMIT)
            faults += ["it crashed: " + ended.err[-300:]] if ended.has_crashed else []
            run = lab.run_in(out)
            has_begun, last = has_checkpoint(run.checkpoints), [record["kind"] for record in run.records()][-1:]
            # Before the command listens, and when all is saved, a signal does what it does to any process.
            listens = has_begun and last not in (["stopped"], ["end"])
            # A second signal counts where the first came before there was anything to save.
            accepted = {
                0,
                128 + number,
                *(128 + n for n in numbers if not listens),
                *(-n for n in numbers if not listens),
            }
            if ended.code not in accepted:
                faults.append(f"it ended with {ended.code} after {seconds:.1f} s: {ended.err[-300:]}")
            saved += "saved at update" in ended.out
        again = lab.run(*command)
        faults += differences(lab.run_in(out), whole) if again.code == 0 else [f"exit code {again.code}: {again.err}"]
        result.count(fired, faults, f"trial {trial}, {number.name}")
    result.figures |= {"slowest end in seconds": round(slowest, 2), "saved and ended": saved}
    return result
