"""Where runs are hurt: processes to start, trace and signal, runs to compare, and what to count."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import elman
from elman.training.checkpoint import newest_checkpoint
from elman.training.folder import Run

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a process that does not end has failed."""
TEXT = (
    "the cat sat on the mat.\nthe dog sat on the log.\n"
    "a cat and a dog saw the moon; the moon saw a cat and a dog.\n"
    "der Bär aß Öl, và con mèo ngủ: 猫は月を見た.\n"
) * 16
SHORT = (
    "--model.hidden_size=12",
    "--model.embedding_size=8",
    "--model.dropout=0.2",
    "--training.batch_size=4",
    "--training.bptt=16",
    "--training.warmup_updates=4",
    "--training.learning_rate=0.02",
    "--training.num_threads=1",
    "--evaluation.num_streams=3",
    "--sampling.temperatures=0.8",
    "--sampling.max_new_tokens=5",
)
"""Settings of a run that takes a moment: an LSTM with dropout, on a text of a few thousand characters."""


def _of(updates: int, evaluation: int, checkpoint: int) -> tuple[str, ...]:
    return (
        f"--training.max_updates={updates}",
        f"--evaluation.every_updates={evaluation}",
        f"--checkpoint.every_updates={checkpoint}",
        "--checkpoint.keep=3",
    )


BRIEF = _of(8, 3, 2)
"""Checkpoints at 0, 2, 4, 6 and 8; from 6 on each takes out an older one."""
LONG = _of(60, 7, 4)
"""A run that can be met at many moments."""
SAVING = _of(20, 1000, 1)
"""A run that spends most of its time saving."""


@dataclass
class Result:
    """What came of a campaign."""

    name: str
    fault: str
    """What was done to the runs."""
    promise: str
    """What had to hold after it."""
    injected: int = 0
    fired: int = 0
    """How often the fault is proven to have happened."""
    held: int = 0
    """How often the promise was kept, of those that fired."""
    broken: list[str] = field(default_factory=list)
    """What was wrong, a line for each time it was not."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What was measured beside."""
    skipped: str = ""
    """Why it could not be run here."""
    seconds: float = 0.0

    def count(self, fired: bool, faults: list[str], where: str) -> None:
        """Enter one trial."""
        self.injected += 1
        if not fired:
            return
        self.fired += 1
        self.held += not faults
        self.broken += [f"{where}: {fault}" for fault in faults]


class NotHereError(Exception):
    """A campaign cannot be carried out on this machine, and why."""


Campaign: TypeAlias = Callable[["Lab", float], Result]
"""From the lab and the share of the trials to do, 1 for all."""


def campaign(name: str, fault: str, promise: str) -> Callable[[Callable[[Lab, float, Result], None]], Campaign]:
    """Make a campaign of a function that enters its trials into a result.

    Args:
        name: of the fault.
        fault: what is done to the runs.
        promise: what has to hold after it.
    """

    def made(carry_out: Callable[[Lab, float, Result], None]) -> Campaign:
        def of_share(lab: Lab, share: float) -> Result:
            result = Result(name, fault, promise)
            try:
                carry_out(lab, share, result)
            except NotHereError as why:
                result.skipped = str(why)
            return result

        return of_share

    return made


def evenly(of: Sequence[T], share: float) -> list[T]:
    """An even choice: this share of them, one at least."""
    count = max(1, round(share * len(of)))
    return [of[i * len(of) // count] for i in range(count)]


@dataclass(frozen=True)
class Ended:
    """How a process has ended."""

    code: int
    """Below zero: minus the signal that killed it."""
    out: str
    err: str
    seconds: float
    """From its start."""
    traced: tuple[str, ...]
    """Lines of strace."""

    @property
    def injected(self) -> list[str]:
        """The system calls that were tampered with."""
        return [line for line in self.traced if "(INJECTED)" in line]

    @property
    def has_crashed(self) -> bool:
        """Whether a person would see a traceback or a bug."""
        return "elman: bug:" in self.err or "Traceback" in self.err or self.code == 70


_CALL = re.compile(r"^(?P<pid>\d+) +(?P<name>\w+)\(")


@dataclass(frozen=True)
class Call:
    """A system call that changes what is on the disk."""

    name: str
    number: int
    """Which of those of its name, from 1: what strace calls ``when``."""
    line: str

    def __str__(self) -> str:
        return f"{self.name} {self.number}"


CHANGING = (
    "openat", "write", "pwrite64", "fsync", "fdatasync", "rename", "renameat", "renameat2", "mkdir", "mkdirat",
    "unlink", "unlinkat", "rmdir", "ftruncate",
)  # fmt: skip
"""All system calls by which a run changes what is on the disk; an openat counts where it creates a file."""


def _changing(traced: Sequence[str]) -> Iterator[Call]:
    counts = dict.fromkeys(CHANGING, 0)
    for line in traced:
        # Of the process itself: strace counts the calls of each one that it starts, such as uname, apart.
        if (match := _CALL.match(line)) and match["pid"] == traced[0].split()[0] and match["name"] in counts:
            counts[match["name"]] += 1
            if match["name"] != "openat" or "O_CREAT" in line:
                yield Call(match["name"], counts[match["name"]], line)


@dataclass
class Process:
    """A command that is running."""

    lab: Lab
    pid: int
    files: Path
    """Its outputs, without their endings."""
    started: float
    tracer: subprocess.Popen[bytes] | None

    def send(self, number: int) -> None:
        """Send a signal; one that comes too late is no error."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return _condition(self.pid) not in ("Z", "X")

    def wait(self) -> Ended:
        """Wait for its end; one that takes too long is killed and counts as such."""
        code = self.lab.wait(self.pid)
        seconds = time.monotonic() - self.started
        traced: tuple[str, ...] = ()
        if self.tracer is not None:
            self.tracer.wait(PATIENCE)
            self.tracer.stderr.close()
            traced = tuple(self.files.with_suffix(".trace").read_text("utf-8", "replace").splitlines())
        out, err = (self.files.with_suffix(s).read_text("utf-8", "replace") for s in (".out", ".err"))
        return Ended(code, out, err, seconds, traced)


class Lab:
    """Starts commands in processes of their own. A context manager.

    Args:
        folder: for everything that is written.
        seed: of all that is chosen at random.
    """

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.corpus = folder / "corpus.txt"
        self._count = 0
        self._undisturbed: dict[tuple[str, ...], Run] = {}
        self._calls: dict[tuple[str, ...], tuple[Call, ...]] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.corpus.write_text(TEXT, encoding="utf-8", newline="")
        paths = os.pathsep.join([str(Path(elman.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        changes = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ELMAN_CACHE": str(self.folder / "cache")}
        changes["PYTHONDONTWRITEBYTECODE"] = "1"  # so that every run makes the same system calls
        self._nursery = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | changes,
            start_new_session=True,
        )
        self._buffer = b""
        self._answer()
        self.run("data", "inspect", str(self.corpus))  # so that its tokens are in the cache
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.stdin.close()
        self._nursery.stdout.close()
        self._nursery.kill()
        self._nursery.wait()

    def _ask(self, order: dict[str, Any]) -> Any:
        self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self._nursery.stdin.flush()
        return self._answer()

    def _answer(self, patience: float = 2 * PATIENCE) -> Any:
        descriptor = self._nursery.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], patience)[0]:
                raise TimeoutError("no answer within the patience of the lab")
            self._buffer += os.read(descriptor, 1 << 16)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def start(
        self,
        *words: str,
        inject: str | None = None,
        trace: str | None = None,
        log: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a command.

        Args:
            words: as on the command line.
            inject: a fault for strace's ``-e inject``, such as ``fsync:error=EIO:when=2``.
            trace: the system calls that strace writes down; none: those of ``inject``.
            log: a device that takes the place of the run's log.
            environment: variables beside those of the lab.
        """
        self._count += 1
        files = self.folder / f"process-{self._count}"
        is_traced = inject is not None or trace is not None
        order = {"out": f"{files}.out", "err": f"{files}.err", "stopped": is_traced, "log": log}
        pid = self._ask({"words": list(words), "environment": dict(environment or {}), **order})
        tracer = self._traced(pid, files, inject, trace) if is_traced else None
        return Process(self, pid, files, time.monotonic(), tracer)

    def _traced(self, pid: int, files: Path, inject: str | None, trace: str | None) -> subprocess.Popen[bytes]:
        until(lambda: _condition(pid) == "T")
        calls = trace or (inject or "").partition(":")[0]
        words = ["strace", "-f", "-y", "-p", str(pid), "-o", f"{files}.trace", "-e", f"trace={calls}"]
        if inject is not None:
            words += ["-e", f"inject={inject}"]
        tracer = subprocess.Popen(words, stderr=subprocess.PIPE)
        while b"attached" not in (line := tracer.stderr.readline()):
            if not line:
                raise RuntimeError(f"strace does not attach: {' '.join(words)}")
        os.kill(pid, signal.SIGCONT)
        return tracer

    def run(self, *words: str, **options: Any) -> Ended:
        """Start a command and wait for its end."""
        return self.start(*words, **options).wait()

    def wait(self, pid: int) -> int:
        """The status of a child that has ended, or was made to."""
        self._nursery.stdin.write(json.dumps({"wait": pid}).encode() + b"\n")
        self._nursery.stdin.flush()
        try:
            return int(self._answer(PATIENCE))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self._answer()
            return -1000

    def train(self, out: Path, *more: str) -> tuple[str, ...]:
        """The command that starts a run in a folder, or goes on with it."""
        return ("train", str(self.corpus), "--out", str(out), "--resume", "auto", *SHORT, *more)

    def undisturbed(self, *more: str) -> Run:
        """A run of these settings that nothing has happened to; the same one every time."""
        if more not in self._undisturbed:
            out = self.folder / f"undisturbed-{len(self._undisturbed)}"
            ended = self.run(*self.train(out, *more))
            if ended.code != 0:
                raise RuntimeError(f"an undisturbed run ended with {ended.code}: {ended.err}")
            self._undisturbed[more] = Run(out)
        return self._undisturbed[more]

    def trial(self, settings: tuple[str, ...], out: Path | None = None) -> Trial:
        """A run that is to be hurt.

        Args:
            settings: one of those above.
            out: where; none: a folder that does not exist, in place of that of the trial before.
        """
        whole = self.undisturbed(*settings)
        if out is None:
            out = self.folder / "run"
            shutil.rmtree(out, ignore_errors=True)
        return Trial(self, Run(out), self.train(out, *settings), whole)

    def calls_of(self, *more: str) -> tuple[Call, ...]:
        """The system calls of such a run that change the disk, in their order, found by watching one.

        Raises:
            NotHereError: strace cannot be used.
        """
        if why := _cannot_trace():
            raise NotHereError(why)
        if more not in self._calls:
            traced = self.trial(more).carry_out(trace=",".join(f"?{name}" for name in CHANGING)).traced
            self._calls[more] = tuple(_changing(traced))
        return self._calls[more]


@dataclass
class Trial:
    """A run that is to be hurt, and the one that it has to equal in the end."""

    lab: Lab
    run: Run
    command: tuple[str, ...]
    """Starts it, or goes on with it."""
    whole: Run
    """One that nothing has happened to."""

    def start(self, **options: Any) -> Process:
        """Start it, or go on."""
        return self.lab.start(*self.command, **options)

    def carry_out(self, **options: Any) -> Ended:
        """The same, and wait for its end."""
        return self.start(**options).wait()

    def at_random(self, process: Process, first: float = -0.2, last: float = 0.95) -> None:
        """Wait for a random moment: so many seconds after the start, or when so much of what is left is in the log.

        Args:
            process: that writes it; where it ends before, so does the waiting.
            first: the earliest; below zero: seconds while it starts.
            last: the latest, as a share of the log.
        """
        drawn = self.lab.random.uniform(first, last)
        time.sleep(max(0.0, -drawn))
        done, all_of_it = _size(self.run.metrics), _size(self.whole.metrics)
        until(lambda: _size(self.run.metrics) >= done + drawn * (all_of_it - done) or not process.is_alive)

    def goes_on(self, *, lost_lines: int = 0) -> list[str]:
        """What is wrong after the same command again: it has to end well, and like the run that nothing happened to."""
        again = self.carry_out()
        if again.code:
            return [f"started again, it ended with {again.code}: {again.err}"]
        return differences(self.run, self.whole, lost_lines=lost_lines)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def until(is_so: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Wait for something that will be so within so many seconds. Raises TimeoutError if it is not."""
    give_up = time.monotonic() + patience
    while not is_so():
        if time.monotonic() > give_up:
            raise TimeoutError("a process did not get where it was expected")
        time.sleep(0.001)


def _condition(pid: int) -> str:
    """R for running, T for stopped, Z for ended, and the like."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


_CLOCK = ("measured",)
_KINDS = ("update", "evaluation", "sample", "skipped", "returned", "end")


def told(run: Run) -> list[dict[str, Any]]:
    """The log without what the clock determines, and without the traces of stopping and going on."""
    records = [record for record in run.records() if record["kind"] in _KINDS]
    return [{name: value for name, value in record.items() if name not in _CLOCK} for record in records]


def differences(run: Run, other: Run, *, lost_lines: int = 0) -> list[str]:
    """In what a run differs from one that nothing happened to: weights, optimiser, state, log, samples, model.

    Args:
        run: the one that something happened to.
        other: the one that it should equal to the last bit.
        lost_lines: how many lines its log may lack.
    """
    found = []
    try:
        (path, mine, passed_over), (_, theirs, _) = (newest_checkpoint(r.checkpoints) for r in (run, other))
    except elman.UserError as error:
        return [str(error)]
    if passed_over:
        found.append(f"damaged at its end: {passed_over}")
    for name in sorted(mine.tensors.keys() | theirs.tensors.keys()):
        if name not in mine.tensors or name not in theirs.tensors:
            found.append(f"{path.name} and the other hold different tensors: {name}")
        elif mine.tensors[name].numpy().tobytes() != theirs.tensors[name].numpy().tobytes():
            found.append(f"{path.name}: {name} differs")
    for name in sorted(mine.trainer.keys() - {"elapsed_seconds"}):
        if mine.trainer[name] != theirs.trainer[name]:
            found.append(f"{path.name}: {name} is {mine.trainer[name]!r}, not {theirs.trainer[name]!r}")
    if not run.model.exists() or run.model.read_bytes() != other.model.read_bytes():
        found.append("the model file differs")
    log, expected = told(run), told(other)
    if lost_lines:
        missing = sum(record not in log for record in expected)
        if missing > lost_lines or any(record not in expected for record in log):
            found.append(f"the log lacks {missing} lines, or has others")
    elif log != expected:
        found.append(f"the log differs: {len(log)} lines of {len(expected)}")
    if not lost_lines and _samples(run) != _samples(other):
        found.append("the samples differ")
    half = [str(path.relative_to(run.path)) for kind in ("*.tmp", ".elman-*") for path in run.path.rglob(kind)]
    if half:
        found.append(f"half-written files are left: {half}")
    return found


def _samples(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.path / "samples").glob("*")}


@cache
def _cannot_trace() -> str:
    """Why strace cannot be used here, or nothing."""
    if sys.platform != "linux" or shutil.which("strace") is None:
        return "strace is not installed"
    process = subprocess.Popen(["sleep", "30"])
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            tried = subprocess.run(
                ["strace", "-p", str(process.pid), "-o", os.devnull], capture_output=True, timeout=0.5, check=False
            )
            return f"strace may not trace here: {tried.stderr.decode().strip()[:100]}"
        return ""
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk in memory that is soon full. Raises NotHereError where none may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "elman", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        raise NotHereError(f"no disk may be mounted here: {mounted.stderr.decode().strip()[:100]}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def of_one_save(calls: tuple[Call, ...], update: int) -> tuple[Call, ...]:
    """Those from the first of a checkpoint to the last of its clearing up."""
    rest = dropwhile(lambda call: f"update-{update:08d}-00.tmp" not in call.line, calls)
    return tuple(takewhile(lambda call: "/checkpoints" in call.line, rest))
