"""Several processes that train one model together: what they agree on, what they add up, and how a lost one is noticed.

Each process reads rows of its own and holds the whole model. What depends on a clock, on a signal or on one process's
rows is agreed before anything follows from it, so that all take the same way through the training.

Beside the training, threads of each process write signs of life into the store that the processes share, and read
those of the next process. So one that has ended, or that is frozen, is named within seconds, be it the one that keeps
the store, and however long the others have been waiting for it in the middle of a sum.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]  # public all the same

from elman.errors import ConfigError, LostProcessError
from elman.models.state import State
from elman.training.checkpoint import Checkpoint, newest_checkpoint

T = TypeVar("T")

_BEAT_SECONDS = 1.0
"""Between two signs of life."""
SILENT_SECONDS = 15.0
"""Without one, after which a process counts as lost."""
_WAIT = timedelta(seconds=1)
"""For the others, before asking again whether one is lost."""
_STORE_TIMEOUT = timedelta(minutes=10)
"""For all processes to start, and for the store to be there."""
_BUCKET_BYTES = 2**25
"""Gradients are added up in pieces of this size, so that it takes no second copy of them all."""
_LOST = "lost"


class Place(NamedTuple):
    """Where a process stands among those that train together."""

    rank: int
    size: int
    local_rank: int
    """Its number on its machine."""
    machine: int
    """The number of its machine."""

    @classmethod
    def from_environment(cls) -> Place:
        """As ``torchrun`` says it to every process that it starts; alone where it did not."""
        found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")}
        if not found["RANK"] or not found["WORLD_SIZE"]:
            return cls(0, 1, 0, 0)
        rank = int(found["RANK"])
        return cls(rank, int(found["WORLD_SIZE"]), int(found["LOCAL_RANK"] or rank), int(found["GROUP_RANK"] or 0))


def choose_device(name: str) -> torch.device:
    """The device of a name; ``auto`` takes CUDA, then MPS, then the CPU. Raises ConfigError where it is absent.

    Each process that ``torchrun`` starts on a machine has a CUDA device of its own; ConfigError where there are fewer.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, present in available.items() if present)
    if not available[name]:
        present = ", ".join(kind for kind, there in available.items() if there)
        raise ConfigError(f"device {name!r} is not present here; accepted: auto, {present}")
    place = Place.from_environment()
    if place.size == 1 or name == "cpu":
        return torch.device(name)
    num_devices = torch.cuda.device_count() if name == "cuda" else 1
    if place.local_rank >= num_devices:
        raise ConfigError(
            f"device {name!r} has {num_devices} here, and this is process {place.local_rank + 1}: give torchrun a "
            "--nproc-per-node that is no larger, or --device cpu"
        )
    return torch.device(name, place.local_rank)


class Ranks:
    """The processes that train together. This class is a process that trains alone; each call answers at once."""

    rank = 0
    """The number of this process; the first, 0, writes files and speaks to the user."""
    size = 1
    """How many there are."""

    def any(self, flag: bool) -> bool:
        """Whether it is true in some process."""
        return flag

    def sum(self, *values: float) -> tuple[float, ...]:
        """The sum of each value over all processes, in float64."""
        return values

    def of_first(self, *values: float) -> tuple[float, ...]:
        """The values of the first process."""
        return values

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor, in place, the sum of those of all processes."""

    def spread(self, make: Callable[[], bytes]) -> bytes:
        """What the first process makes, in all of them; the others make nothing."""
        return make()

    def gather(self, data: bytes) -> list[bytes]:
        """In the first process the bytes of all, in order; in the others none."""
        return [data]

    def in_turn(self, make: Callable[[], T]) -> T:
        """What each process makes for itself, the first of every machine before its others: a cache holds it then."""
        return make()


class ProcessGroup(Ranks):
    """Several processes, joined by ``torch.distributed``: gloo for memory of the CPU, NCCL for that of CUDA devices.

    Args:
        place: of this process.
    """

    def __init__(self, place: Place) -> None:
        self.rank, self.size = place.rank, place.size
        self._place = place
        self._num_turns = 0
        store, _, _ = next(rendezvous("env://", timeout=_STORE_TIMEOUT))
        # Where a program trains several times, every training has a part of the store of its own.
        prefix = f"elman/{(store.add('elman', 1) - 1) // place.size}"
        self._store = PrefixStore(prefix, store)
        self._watch = _Watch(prefix, place)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        of_group = PrefixStore("group", self._store)
        dist.init_process_group(backend, store=of_group, rank=place.rank, world_size=place.size)
        self._watch.begin()  # all have met, so the first sign of each is there

    def any(self, flag: bool) -> bool:
        return self.sum(float(flag))[0] > 0

    def sum(self, *values: float) -> tuple[float, ...]:
        added = torch.tensor(values, dtype=torch.float64)
        self._reduce(added)
        return tuple(added.tolist())

    def of_first(self, *values: float) -> tuple[float, ...]:
        return self.sum(*(value if self.rank == 0 else 0.0 for value in values))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            self._reduce(flat)
            for tensor, added in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(added.view_as(tensor))

    def spread(self, make: Callable[[], bytes]) -> bytes:
        data = make() if self.rank == 0 else b""
        (num_bytes,) = self.of_first(len(data))
        return self._told_by(0, data, int(num_bytes))

    def gather(self, data: bytes) -> list[bytes]:
        sizes = self.sum(*(float(len(data)) if rank == self.rank else 0.0 for rank in range(self.size)))
        # Told to all, though the first alone needs it: gloo has no way to wait for one process with patience.
        told = [self._told_by(rank, data, int(num_bytes)) for rank, num_bytes in enumerate(sizes)]
        return told if self.rank == 0 else []

    def _told_by(self, rank: int, data: bytes, num_bytes: int) -> bytes:
        """The bytes of one process, in all."""
        if num_bytes == 0:
            return b""
        sent = torch.frombuffer(bytearray(data if self.rank == rank else num_bytes), dtype=torch.uint8)
        self._wait(lambda: dist.broadcast(sent, rank, async_op=True), sent.device)
        return sent.numpy().tobytes()

    def in_turn(self, make: Callable[[], T]) -> T:
        # Not by a barrier: a large corpus may take longer than a group waits for its members.
        self._num_turns += 1
        key = f"turn/{self._num_turns}/{self._place.machine}"
        if self._place.local_rank == 0:
            made = make()
            self._ask_store(lambda: self._store.set(key, "done"))
            return made
        self._ask_store(lambda: self._wait_until_set(key))
        return make()

    def _wait_until_set(self, key: str) -> None:
        # Asked again and again: a call that waits would keep others, such as NCCL, from the store.
        while not (self._watch.ended.is_set() or self._store.check([key])):
            time.sleep(0.05)

    def _ask_store(self, ask: Callable[[], None]) -> None:
        """Ask something of the store, and wait for its answer or for the news that a process is lost.

        Where the keeper of the store is frozen, whoever asks it waits for ever: that is left to a thread.
        """
        errors: list[RuntimeError] = []
        is_answered = threading.Event()

        def wait_for_answer() -> None:
            try:
                ask()
            except RuntimeError as error:
                errors.append(error)
            is_answered.set()

        threading.Thread(target=wait_for_answer, name="elman-question", daemon=True).start()
        while not is_answered.wait(_BEAT_SECONDS):
            self._watch.check()
        if errors:
            self._watch.name_lost(errors[0])

    def _reduce(self, tensor: Tensor) -> None:
        self._wait(lambda: dist.all_reduce(tensor, async_op=True), tensor.device)

    def _wait(self, start: Callable[[], dist.Work], device: torch.device) -> None:
        """Start something that takes all processes, and wait for its end or for the news that one of them is lost.

        Raises:
            LostProcessError: one is.
        """
        self._watch.check()
        is_done = _is_done if device.type == "cpu" else _is_done_on_device
        try:
            work = start()
            while not is_done(work):
                self._watch.check()
        except RuntimeError as error:  # the connection to one of them has broken
            self._watch.name_lost(error)

    def look_into(self, error: RuntimeError) -> None:
        """Raise LostProcessError where an error comes of a lost process, as it may within a divided model."""
        if isinstance(error, dist.DistError) or any(name in str(error) for name in ("gloo", "NCCL")):
            self._watch.name_lost(error)

    def leave(self, why: str) -> None:
        """Tell the others that this process ends before its time."""
        self._watch.leave(why)

    def close(self) -> None:
        """End together with the others."""
        self.any(False)
        self._watch.stop()
        dist.destroy_process_group()


@contextmanager
def join() -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` has started; in a process that it did not start, be alone.

    Raises:
        LostProcessError: another process has ended before its time, or does not answer.
    """
    place = Place.from_environment()
    if place.size == 1:
        yield Ranks()
        return
    ranks = ProcessGroup(place)
    try:
        try:
            yield ranks
        except RuntimeError as error:
            ranks.look_into(error)
            raise
    except BaseException as error:
        said = str(error) if isinstance(error, Exception) else ""
        ranks.leave(" ".join((said or type(error).__name__).split()))
        raise
    ranks.close()


def newest_for_all(ranks: Ranks, folder: Path) -> tuple[Path, Checkpoint, list[str]]:
    """What :func:`newest_checkpoint` finds, in every process; only the first reads the folder."""

    def found() -> bytes:
        path, checkpoint, passed_over = newest_checkpoint(folder)
        rest = json.dumps([str(path), dict(checkpoint.trainer), passed_over]).encode()
        return len(rest).to_bytes(8, "little") + rest + tensors_to_bytes(dict(checkpoint.tensors))

    if ranks.size == 1:
        return newest_checkpoint(folder)
    data = ranks.spread(found)
    start = 8 + int.from_bytes(data[:8], "little")
    path, trainer, passed_over = json.loads(data[8:start])
    return Path(path), Checkpoint(tensors_from_bytes(data[start:]), trainer), passed_over


def gather_tensors(ranks: Ranks, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """In the first process the tensors of all, in order; in the others none."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return [tensors_from_bytes(data) for data in ranks.gather(tensors_to_bytes(copies))]


@dataclass(frozen=True)
class Gathered:
    """What the first process has got from all for a checkpoint."""

    segments_read: int
    """When it was."""
    state: State
    """Of the rows of all."""
    memory: Mapping[str, Tensor]
    """Of the optimiser, where the model is divided."""


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (num_bytes + size > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += size
    if bucket:
        yield bucket


def _is_done_on_device(work: dist.Work) -> bool:
    """Whether it is, after a short while: NCCL breaks off what is waited for and does not come in time."""
    if work.is_completed():
        return work.wait()
    time.sleep(5e-5)
    return False


def _is_done(work: dist.Work) -> bool:
    """Whether it is, after waiting for it a while."""
    if work.is_completed():
        return work.wait()
    try:
        return work.wait(_WAIT)
    except RuntimeError:
        if work.is_completed():
            raise  # it has failed; else it takes longer than the while
        return False


class _Who(NamedTuple):
    """One of the processes."""

    pid: int
    name: str
    is_here: bool
    """Whether it runs on this machine."""


class _Heard(NamedTuple):
    """What the store has said last."""

    num_answers: int
    """So many it has given by then."""
    sign: bytes
    """Of the next process."""
    lost: str
    """Who is lost, in the words of whoever found out first."""


class _Watch:
    """Finds out whether a process is lost, and lets all know which.

    Each process watches the next, the last one the first, and each watches the store. So whichever are lost, and
    however many: whoever lives before one of them misses it, and writes down which it is, for all to read.

    It takes two threads. One alone talks to the store, because it may wait for ever where the keeper of the store is
    frozen: the first process, or under ``torchrun`` its launcher. The other judges. It counts silence in beats of its
    own and not by the clock, so that a process that has been frozen does not take all others for lost when it wakes.

    Args:
        prefix: of the part of the store that belongs to this training.
        place: of this process.
    """

    def __init__(self, prefix: str, place: Place) -> None:
        self._place = place
        # A connection of its own: that of the main thread may be waiting in it.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        connection = TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
        self._store = PrefixStore(prefix, connection)
        of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        self._launcher = f"the store that torchrun keeps on {address}" if of_launcher else ""
        self._who: list[_Who] = []
        self._heard = _Heard(0, b"", "")
        self._broken = ""
        """Why the store cannot be asked any more."""
        self._found = ""
        """Who is lost, as this process has found out."""
        self._lost = ""
        """Who is lost, as all know it."""
        self._judged_at = time.monotonic()
        self._woken_at = -math.inf
        """When this process went on after it had itself been silent."""
        self.ended = threading.Event()
        """Set when this process gives no more signs of life."""
        self._hurry = threading.Event()
        self._threads: list[threading.Thread] = []
        if place.rank == 0:
            self._store.set(_LOST, "")
        self._store.set(f"sign/{place.rank}", "0")
        self._store.set(f"who/{place.rank}", f"{os.getpid()} {place.machine} {socket.gethostname()}")

    def begin(self) -> None:
        """Watch from now on. All processes have made their watch."""
        told = self._store.multi_get([f"who/{rank}" for rank in range(self._place.size)])
        self._who = [self._as_told(rank, value.decode()) for rank, value in enumerate(told)]
        self._judged_at = time.monotonic()
        for act in (self._exchange, self._judge):
            self._threads.append(threading.Thread(target=act, name=f"elman{act.__name__}", daemon=True))
            self._threads[-1].start()

    def _as_told(self, rank: int, text: str) -> _Who:
        pid, machine, host = text.split(" ", 2)
        is_here = int(machine) == self._place.machine and host == socket.gethostname()
        return _Who(int(pid), f"rank {rank} (process {pid} on {host})", is_here)

    def _exchange(self) -> None:
        """Write signs of life of this process and read those of the next, until it ends."""
        mine, of_next = (f"sign/{rank % self._place.size}" for rank in (self._place.rank, self._place.rank + 1))
        try:
            while not self.ended.is_set():
                self._hurry.wait(_BEAT_SECONDS)
                self._hurry.clear()
                num_answers = self._heard.num_answers + 1
                self._store.set(mine, str(num_answers))
                if self._found:
                    self._store.compare_set(_LOST, "", self._found)  # what somebody has said before counts
                lost, sign = self._store.multi_get([_LOST, of_next])
                self._heard = _Heard(num_answers, sign, lost.decode(errors="replace"))
        except RuntimeError as error:
            self._broken = _first(error)

    def _judge(self) -> None:
        """Count the beats without a sign of the next process, or without an answer of the store."""
        limit = SILENT_SECONDS / _BEAT_SECONDS
        before = self._heard
        without_answer = without_sign = 0
        while not self.ended.wait(_BEAT_SECONDS) and not self._lost:
            heard, now = self._heard, time.monotonic()
            if now - self._judged_at > SILENT_SECONDS:
                self._woken_at = now
            self._judged_at = now
            if heard.num_answers == before.num_answers:
                without_answer += 1
            else:
                without_answer = 0
                without_sign = without_sign + 1 if heard.sign == before.sign else 0
            before = heard
            if heard.lost:
                self._lost = heard.lost
            elif self._broken:
                self._lost = f"{self._launcher or self._who[0].name} has ended ({self._broken})"
            elif without_answer >= limit:
                self._lost = f"{self._launcher or self._who[0].name} has not answered for {SILENT_SECONDS:g} seconds"
            elif without_sign >= limit:
                lost = self._who[(self._place.rank + 1) % self._place.size]
                self._write_down(f"{lost.name} has not answered for {SILENT_SECONDS:g} seconds")
        if self._lost:
            self._wake_stopped()

    def _write_down(self, found: str) -> None:
        """Say for all to read who is lost."""
        self._found = self._found or found
        until = time.monotonic() + 2 * _BEAT_SECONDS
        while not (self._heard.lost or self._broken) and time.monotonic() < until:
            self._hurry.set()
            time.sleep(0.02)
        self._lost = self._heard.lost or self._found

    def _wake_stopped(self) -> None:
        """Have those on this machine that were only stopped go on: they read that they are given up, and end too."""
        if os.name != "posix":
            return
        for who in self._who:
            if who.is_here and who.pid != os.getpid():
                with suppress(OSError):
                    os.kill(who.pid, signal.SIGCONT)

    def check(self) -> None:
        """Raise LostProcessError where a process is lost."""
        if self._lost:
            raise LostProcessError(f"{self._lost}; the training of all processes ends, its checkpoints are whole")

    def name_lost(self, error: RuntimeError) -> NoReturn:
        """Find out which process a broken connection led to. Raises LostProcessError that names it."""
        until = time.monotonic() + SILENT_SECONDS + 3 * _BEAT_SECONDS
        while time.monotonic() < until:
            self.check()
            now = time.monotonic()
            if now - self._judged_at > SILENT_SECONDS or now - self._woken_at < SILENT_SECONDS:
                me = self._who[self._place.rank].name
                self._lost = f"{me}, this one, has not answered for {SILENT_SECONDS:g} seconds: the others have gone"
            elif ended := [who.name for who in self._who if who.is_here and _has_ended(who.pid)]:
                self._write_down(f"{ended[0]} has ended")
            else:
                time.sleep(0.1)
        raise LostProcessError(f"the connection to the other processes has broken: {_first(error)}") from error

    def leave(self, why: str) -> None:
        """Say for all to read that this process ends, and stop."""
        if not self._lost and self._who:
            self._write_down(f"{self._who[self._place.rank].name} has ended: {why}")
        if self._place.rank == 0 and not self._launcher:
            time.sleep(3 * _BEAT_SECONDS)  # the store ends with it: the others read first
        self.stop()

    def stop(self) -> None:
        """Give no more signs of life."""
        self.ended.set()
        self._hurry.set()
        for thread in self._threads:
            thread.join(_BEAT_SECONDS)


def _has_ended(pid: int) -> bool:
    """Whether there is no such process any more, or only what is left of it until its parent has taken notice."""
    if os.name != "posix":  # elsewhere to ask is to end it
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False


def _first(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]
