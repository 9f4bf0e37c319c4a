"""Disks that fail: single calls, a file system that fills, a device that is always full."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from faults.lab import (
    BRIEF,
    LONG,
    Ended,
    Lab,
    NotHereError,
    Result,
    Trial,
    campaign,
    differences,
    evenly,
    small_disk,
    told,
    until,
)

_FALLIBLE = ("openat", "write", "fsync", "rename", "mkdir")


@campaign(
    "one call fails",
    "ENOSPC or EIO from one system call of a run that writes, flushes, creates or renames (strace), each in turn",
    "the run ends bit-identical, or says in one line what it could not write and does so when started again",
)
def single_errors(lab: Lab, share: float, result: Result) -> None:
    """Let one system call of a run fail, every one in turn."""
    calls = [call for call in lab.calls_of(*BRIEF) if call.name in _FALLIBLE]
    outcomes = {"went on": 0, "said so and ended": 0}
    for call, error in evenly([(call, error) for call in calls for error in ("ENOSPC", "EIO")], share):
        trial = lab.trial(BRIEF)
        hurt = trial.carry_out(inject=f"{call.name}:error={error}:when={call.number}")
        faults = ["it crashed: " + hurt.err[-300:]] if hurt.has_crashed and not _hits_output(hurt) else []
        outcomes["went on" if hurt.code == 0 else "said so and ended"] += 1
        if hurt.code and not _hits_output(hurt) and not re.search(r"^elman: error: .+$", hurt.err, re.MULTILINE):
            faults.append(f"ended with {hurt.code} and no line that says why: {hurt.err[-300:]}")
        faults += _end_of(trial, hurt, lost_lines=int(_hits_log(hurt)))
        result.count(bool(hurt.injected), faults, f"{call} {error} {hurt.injected}")
    result.figures |= outcomes


def _end_of(trial: Trial, hurt: Ended, *, lost_lines: int) -> list[str]:
    """What is wrong with a run in the end, which goes on where it has failed."""
    if hurt.code:
        return trial.goes_on(lost_lines=lost_lines)
    return differences(trial.run, trial.whole, lost_lines=lost_lines)


def _hits_output(ended: Ended) -> bool:
    """Whether what failed was to be read by a person: a terminal that has gone."""
    return any(line.endswith("(INJECTED)") and re.search(r"write\([12]<", line) for line in ended.injected)


def _hits_log(ended: Ended) -> bool:
    return any("metrics.jsonl" in line or "/samples/" in line for line in ended.injected)


@campaign(
    "every flush fails",
    "ENOSPC or EIO from every fsync after the n-th (strace)",
    "it trains to the end, names the path and the bytes needed, ends with 1, and goes on bit-identical afterwards",
)
def lasting_errors(lab: Lab, share: float, result: Result) -> None:
    """From some moment on nothing can be flushed to the disk any more."""
    for call in evenly([call for call in lab.calls_of(*BRIEF) if call.name == "fsync"], share):
        error = lab.random.choice(["ENOSPC", "EIO"])
        trial = lab.trial(BRIEF)
        hurt = trial.carry_out(inject=f"fsync:error={error}:when={call.number}+")
        faults = ["it crashed: " + hurt.err[-300:]] if hurt.has_crashed else []
        if hurt.code == 1 and not re.search(r"elman: error: cannot write '[^']+' \(", hurt.err):
            faults.append(f"no line says what cannot be written: {hurt.err[-300:]}")
        has_begun = any(record["kind"] == "update" for record in trial.run.records())
        if has_begun and not re.search(r"it takes [\d,]+ bytes", hurt.err):
            faults.append(f"no line says how many bytes are needed: {hurt.err[-300:]}")
        result.count(bool(hurt.injected), faults + trial.goes_on(), f"fsync {call.number}+ {error}")


@campaign(
    "the disk is full",
    "a file system of 2 MB is filled to its last byte at a random time, and freed a moment later or after the end",
    "checkpoints before stay valid, the line names path and bytes; with room again it ends bit-identical",
)
def full_disk(lab: Lab, share: float, result: Result) -> None:
    """Fill the disk at a random time; make room a moment later, or only after the run has ended."""
    for number in range(max(1, round(share * 20))):
        with small_disk(lab.folder / "small", "2m") as disk:
            _fill_once(result, lab.trial(LONG, disk / "run"), frees=number % 2 == 0)


def _fill_once(result: Result, trial: Trial, *, frees: bool) -> None:
    process = trial.start()
    until(lambda: any(trial.run.checkpoints.glob("update-*-00")))
    trial.at_random(process, first=0.0, last=0.7)
    ballast = trial.run.path.with_name("ballast")
    _fill(ballast)
    if frees:
        with suppress(TimeoutError):  # where it ends before it writes anything
            until(lambda: "No space left" in process.files.with_suffix(".err").read_text("utf-8"), patience=2.0)
        ballast.unlink()
    hurt = process.wait()
    faults = ["it crashed: " + hurt.err[-300:]] if hurt.has_crashed else []
    fired = "No space left on device" in hurt.err
    said = re.search(r"cannot write '[^']+' \(No space left.*\): it takes [\d,]+ bytes, [\d,]+ are free", hurt.err)
    if fired and not said and "the training goes on without" not in hurt.err:
        faults.append(f"no line names path and bytes: {hurt.err[-300:]}")
    if not frees:
        ballast.unlink()
    faults += _end_of(trial, hurt, lost_lines=1000 * ("the training goes on without" in hurt.err))
    result.count(fired, faults, f"freed {'soon' if frees else 'late'}, ended with {hurt.code}")
    key = "freed soon" if frees else "freed late"
    result.figures[key] = result.figures.get(key, 0) + 1


def _fill(path: Path) -> None:
    """Write until nothing more fits."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    os.write(descriptor, bytes(size))
            except OSError:
                continue
    finally:
        os.close(descriptor)


@campaign(
    "the log cannot be written",
    "metrics.jsonl is /dev/full",
    "the run says so once and ends with the same weights, optimiser, state and model",
)
def full_log(lab: Lab, share: float, result: Result) -> None:
    """The log is a device that takes nothing."""
    if not Path("/dev/full").exists():
        raise NotHereError("there is no /dev/full")
    for number in range(max(1, round(share * 10))):
        trial = lab.trial(BRIEF)
        hurt = trial.carry_out(log="/dev/full")
        said = hurt.err.count("metrics.jsonl' (No space left on device): the training goes on without")
        faults = [] if said == 1 else [f"it was said {said} times: {hurt.err[-300:]}"]
        faults += [f"it ended with {hurt.code}"] if hurt.code else []
        trial.run.metrics.unlink()
        faults += differences(trial.run, trial.whole, lost_lines=len(told(trial.whole)))
        result.count(said > 0, faults, f"trial {number}")
