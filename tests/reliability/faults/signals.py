"""Signals at any time: the work until then is saved, the process ends soon, a second signal changes nothing."""

from __future__ import annotations

import signal
import time

from elman.training.checkpoint import has_checkpoint
from faults.lab import LONG, SAVING, Lab, Result, campaign

_LIMIT = 5.0
"""Seconds that a run may take to save and end, beside one update."""
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@campaign(
    "a signal",
    "SIGTERM, SIGINT, SIGHUP or SIGUSR1 at a random time, and again to the run that goes on",
    "it ends within 5 s, saved, with 128 + the signal's number, or done; the third start ends bit-identical",
)
def one(lab: Lab, share: float, result: Result) -> None:
    """One signal at a random time, twice in a row, then on to the end."""
    _interrupt(lab, share, result, LONG, second=False)


@campaign(
    "a second signal amid a save",
    "two signals 0 to 30 ms apart to a run that saves at every update, and again to the run that goes on",
    "the same",
)
def two(lab: Lab, share: float, result: Result) -> None:
    """Two signals in short order to a run that spends most of its time saving."""
    _interrupt(lab, share, result, SAVING, second=True)


def _interrupt(lab: Lab, share: float, result: Result, settings: tuple[str, ...], *, second: bool) -> None:
    slowest, saved = 0.0, 0
    for serial in range(max(1, round(share * 40))):
        trial = lab.trial(settings)
        number = _NUMBERS[serial % len(_NUMBERS)]
        faults, fired = [], False
        for _ in range(2):
            process = trial.start()
            trial.at_random(process)
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
            has_begun = has_checkpoint(trial.run.checkpoints)
            last = [record["kind"] for record in trial.run.records()][-1:]
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
        result.count(fired, faults + trial.goes_on(), f"trial {serial}, {number.name}")
    result.figures |= {"slowest end in seconds": round(slowest, 2), "saved and ended": saved}
