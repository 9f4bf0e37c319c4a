"""Several processes that train one model together: what they agree on, what they add up, and how a lost one is noticed.

Each process reads rows of its own and holds the whole model. What depends on a clock, on a signal or on one process's
rows is agreed before anything follows from it, so that all take the same way through the training.

Beside the training, a thread of each process writes a sign of life into the store that the processes share, and the
first process reads all of them. So a process that has ended, or that is frozen, is named within seconds, however long
the others have been waiting for it in the middle of a sum.
"""

from __future__ import annotations

import json
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
_STORE_TIMEOUT = timedelta(seconds=10)
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
        store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=10)))
        # Where a program trains several times, every training has a part of the store of its own.
        prefix = f"elman/{(store.add('elman', 1) - 1) // place.size}"
        self._store = PrefixStore(prefix, store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        of_group = PrefixStore("group", self._store)
        dist.init_process_group(backend, store=of_group, rank=place.rank, world_size=place.size)
        self._watch = _Watch(prefix, place)
        self.any(False)  # from here on the signs of life of all are there to be read
        self._watch.start()

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
            self._store.set(key, "done")
            return made
        while not self._store.check([key]):
            self._watch.check()
            time.sleep(0.05)
        return make()

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

    def leave(self, why: str) -> None:
        """Tell the others that this process ends before its time."""
        self._watch.stop()
        with suppress(RuntimeError):
            self._store.compare_set(_LOST, "", f"rank {self.rank} has ended: {why}")

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
        yield ranks
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


class _Watch(threading.Thread):
    """Writes signs of life of this process, and reads those of others.

    The first process reads those of all, the others read that of the first: with many processes the store would
    otherwise have much to do. Whoever misses one writes down which it is, for all to read.

    Args:
        prefix: of the part of the store that belongs to this training.
        place: of this process.
    """

    def __init__(self, prefix: str, place: Place) -> None:
        super().__init__(name="elman-watch", daemon=True)
        self._place = place
        # A connection of its own: that of the main thread may be waiting in it.
        connection = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
        )
        self._store = PrefixStore(prefix, connection)
        self._ended = threading.Event()
        self._lost = ""
        self._seen = time.monotonic()
        self._store.set(f"who/{place.rank}", f"{os.getpid()} {place.machine} {socket.gethostname()}")
        self._store.set(f"beat/{place.rank}", "0")

    def run(self) -> None:
        watched = range(1, self._place.size) if self._place.rank == 0 else range(1)
        keys = [f"beat/{rank}" for rank in watched]
        newest = dict.fromkeys(watched, (b"", self._seen))
        beats = 0
        while not self._ended.wait(_BEAT_SECONDS) and not self._lost:
            beats += 1
            try:
                self._store.set(f"beat/{self._place.rank}", str(beats))
                if self._store.check([_LOST]):
                    self._lost = self._store.get(_LOST).decode(errors="replace")
                values = self._store.multi_get(keys)
            except RuntimeError as error:
                self._lost = f"the store that the processes share has gone, and with it who kept it ({_first(error)})"
                return
            now = self._seen = time.monotonic()
            for rank, value in zip(watched, values, strict=True):
                if value != newest[rank][0]:
                    newest[rank] = value, now
                elif now - newest[rank][1] > SILENT_SECONDS:
                    self._give_up(rank)

    def _give_up(self, rank: int) -> None:
        who = self._who(rank)
        self._write_down(f"{who.name} has not answered for {SILENT_SECONDS:g} seconds")
        if who.is_here and os.name == "posix":
            # One that was only stopped goes on, reads that it has been given up, and ends as well.
            with suppress(OSError):
                os.kill(who.pid, signal.SIGCONT)

    def _write_down(self, lost: str) -> None:
        """Say for all to read who is lost; what somebody has said before counts."""
        self._lost = self._store.compare_set(_LOST, "", lost).decode(errors="replace")

    def _who(self, rank: int) -> _Who:
        pid, machine, host = self._store.get(f"who/{rank}").decode().split(" ", 2)
        is_here = int(machine) == self._place.machine and host == socket.gethostname()
        return _Who(int(pid), f"rank {rank} (process {pid} on {host})", is_here)

    def check(self) -> None:
        """Raise LostProcessError where a process is lost."""
        if not self._lost and self.is_alive() and time.monotonic() - self._seen > 2 * SILENT_SECONDS:
            self._lost = "rank 0, or whoever keeps the store that the processes share, does not answer"
        if self._lost:
            raise LostProcessError(f"{self._lost}; the training of all processes ends, its checkpoints are whole")

    def name_lost(self, error: RuntimeError) -> NoReturn:
        """Find out which process a broken connection led to. Raises LostProcessError that names it."""
        until = time.monotonic() + SILENT_SECONDS + 3 * _BEAT_SECONDS
        while time.monotonic() < until:
            self.check()
            for rank in range(self._place.size):
                with suppress(RuntimeError):
                    who = self._who(rank)
                    if who.is_here and _has_ended(who.pid):
                        self._write_down(f"{who.name} has ended")
            time.sleep(0.1)
        raise LostProcessError(f"the connection to the other processes has broken: {_first(error)}") from error

    def stop(self) -> None:
        """Give no more signs of life."""
        self._ended.set()
        if self.is_alive():
            self.join(2 * _BEAT_SECONDS)


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
