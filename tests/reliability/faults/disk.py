"""Disks that fail: single calls, a file system that fills, a device that is always full."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from elman.training.folder import Run
from faults.killed import RUN
from faults.lab import Ended, Lab, Result, can_trace, differences, small_disk, told, until

_LONGER = ("--training.max_updates=100", "--evaluation.every_updates=20", "--checkpoint.every_updates=4")


def single_errors(lab: Lab, share: float) -> Result:
    """Let one system call of a run fail, every one in turn."""
    result = Result(
        "one call fails",
        "ENOSPC or EIO from one system call of a run that writes, flushes, creates or renames (strace), each in turn",
        "the run ends bit-identical, or says in one line what it could not write and does so when started again",
    )
    if why := can_trace():
        result.skipped = why
        return result
    whole = lab.undisturbed(*RUN)
    calls = [call for call in lab.calls_of(*RUN) if call.name in _FALLIBLE]
    trials = [(call, error) for call in calls for error in ("ENOSPC", "EIO")]
    count = max(1, round(share * len(trials)))
    outcomes = {"went on": 0, "said so and ended": 0}
    for call, error in (trials[i * len(trials) // count] for i in range(count)):
        out = lab.fresh()
        command = lab.train(out, *RUN)
        hurt = lab.run(*command, inject=f"{call.name}:error={error}:when={call.number}")
        faults = ["it crashed: " + hurt.err[-300:]] if hurt.has_crashed and not _hits_output(hurt) else []
        outcomes["went on" if hurt.code == 0 else "said so and ended"] += 1
        if hurt.code:
            if not _hits_output(hurt) and not re.search(r"^elman: error: .+$", hurt.err, re.MULTILINE):
                faults.append(f"ended with {hurt.code} and no line that says why: {hurt.err[-300:]}")
            again = lab.run(*command)
            faults += [f"started again, it ended with {again.code}: {again.err}"] if again.code else []
        faults += differences(lab.run_in(out), whole, lost_lines=int(_hits_log(hurt)))
        result.count(bool(hurt.injected), faults, f"{call} {error} {hurt.injected}")
    result.figures |= outcomes
    return result


_FALLIBLE = ("openat", "write", "fsync", "rename", "mkdir")


def _hits_output(ended: Ended) -> bool:
    """Whether what failed was to be read by a person: a terminal that has gone."""
    return any(line.endswith("(INJECTED)") and re.search(r"write\([12]<", line) for line in ended.injected)


def _hits_log(ended: Ended) -> bool:
    return any("metrics.jsonl" in line or "/samples/" in line for line in ended.injected)


def lasting_errors(lab: Lab, share: float) -> Result:
    """From some moment on nothing can be flushed to the disk any more."""
    result = Result(
        "every flush fails",
        "ENOSPC or EIO from every fsync after the n-th (strace)",
        "it trains to the end, names the path and the bytes needed, ends with 1, and goes on bit-identical afterwards",
    )
    if why := can_trace():
        result.skipped = why
        return result
    whole = lab.undisturbed(*RUN)
    flushes = [call for call in lab.calls_of(*RUN) if call.name == "fsync"]
    for number in [call.number for call in flushes][:: round(1 / share)]:
        error = lab.random.choice(["ENOSPC", "EIO"])
        out = lab.fresh()
        command = lab.train(out, *RUN)
        hurt = lab.run(*command, inject=f"fsync:error={error}:when={number}+")
        faults = ["it crashed: " + hurt.err[-300:]] if hurt.has_crashed else []
        if hurt.code == 1 and not re.search(r"elman: error: cannot write '[^']+' \(", hurt.err):
            faults.append(f"no line says what cannot be written: {hurt.err[-300:]}")
        has_begun = any(record["kind"] == "update" for record in lab.run_in(out).records())
        if has_begun and not re.search(r"it takes [\d,]+ bytes", hurt.err):
            faults.append(f"no line says how many bytes are needed: {hurt.err[-300:]}")
        again = lab.run(*command)
        faults += [f"started again, it ended with {again.code}: {again.err}"] if again.code else []
        faults += differences(lab.run_in(out), whole)
        result.count(bool(hurt.injected), faults, f"fsync {number}+ {error}")
    return result


def full_disk(lab: Lab, share: float) -> Result:
    """Fill the disk at a random time; make room a moment later, or only after the run has ended."""
    result = Result(
        "the disk is full",
        "a file system of 2 MB is filled to its last byte at a random time, and freed a moment later or after the end",
        "checkpoints before stay valid, the line names path and bytes; with room again it ends bit-identical",
    )
    whole = lab.undisturbed(*_LONGER)
    duration = lab.run(*lab.train(lab.fresh(), *_LONGER)).seconds
    try:
        for trial in range(max(2, round(share * 20))):
            with small_disk(lab.folder / "small", "2m") as disk:
                _fill_once(lab, result, disk / "run", whole, duration, frees=trial % 2 == 0)
    except PermissionError as error:
        result.skipped = str(error)
    return result


def _fill_once(lab: Lab, result: Result, out: Path, whole: Run, duration: float, *, frees: bool) -> None:
    command = lab.train(out, *_LONGER)
    process = lab.start(*command)
    until(lambda: any((out / "checkpoints").glob("update-*-00")))
    time.sleep(lab.random.uniform(0.0, 0.7 * duration))
    ballast = out.with_name("ballast")
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
    if hurt.code:
        again = lab.run(*command)
        faults += [f"started again, it ended with {again.code}: {again.err}"] if again.code else []
    lost = hurt.err.count("the training goes on without")
    faults += differences(lab.run_in(out), whole, lost_lines=1000 * bool(lost))
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


def full_log(lab: Lab, share: float) -> Result:
    """The log is a device that takes nothing."""
    result = Result(
        "the log cannot be written",
        "metrics.jsonl is /dev/full",
        "the run says so once and ends with the same weights, optimiser, state and model",
    )
    if not Path("/dev/full").exists():
        result.skipped = "there is no /dev/full"
        return result
    whole = lab.undisturbed(*RUN)
    for trial in range(max(1, round(share * 10))):
        out = lab.fresh()
        hurt = lab.run(*lab.train(out, *RUN), log="/dev/full")
        said = hurt.err.count("metrics.jsonl' (No space left on device): the training goes on without")
        faults = [] if said == 1 else [f"it was said {said} times: {hurt.err[-300:]}"]
        faults += [f"it ended with {hurt.code}"] if hurt.code else []
        (out / "metrics.jsonl").unlink()
        faults += differences(lab.run_in(out), whole, lost_lines=len(told(whole)))
        result.count(said > 0, faults, f"trial {trial}")
    return result
