"""Files and folders that are whole or not there, whatever happens to the process that writes them.

What is on its way lies beside its place: a file under its name and ``.tmp``, a folder as ``.elman-building-...``.
Whoever writes it holds a lock on it that ends with his process. So two who write the same file do not get into each
other's way, and what nobody holds was left by a process that was killed: whoever comes next takes it or removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

_BUILDING = ".elman-building-"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that, whenever power fails, the path holds the old bytes or the new ones."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of another when all is written and flushed, and not at all after an error.

    A device or a pipe, such as ``/dev/stdout``, is written as it is.
    """
    if path.exists() and (not path.is_file() or path.parent == Path("/dev")):
        with path.open("wb") as stream:
            yield stream
        return
    path = path.resolve() if path.is_symlink() else path
    file = _beside(path)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)  # half a file only takes room
            raise
    flush_folder(path.parent)


def _beside(path: Path) -> IO[bytes]:
    """A file beside a path that this process alone writes, empty; what a killed one has left is taken."""
    beside, number = path.with_name(f"{path.name}.tmp"), 2
    while True:
        file = beside.open("ab")
        if lock(file.fileno()) is not False and _is_at(beside, file.fileno()):
            if file.tell():
                file.truncate(0)
            return file
        file.close()
        beside, number = path.with_name(f"{path.name}.{number}.tmp"), number + 1


def flush_folder(path: Path) -> None:
    """Have the disk keep which files a folder holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Building:
    """A new folder in which something is made that shall be seen when it is whole. A context manager.

    When it is closed, what still lies under its path is removed; what has been renamed stays. Those that killed
    processes have left in the same place are removed at the beginning.

    Args:
        home: the folder that it is made in, which is made as well.
    """

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        clear_building(home)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=home))
            with suppress(FileNotFoundError):  # one who clears up has taken it for left before it was locked
                self._descriptor = os.open(self.path, os.O_RDONLY)
                if lock(self._descriptor) is not False and _is_at(self.path, self._descriptor):
                    return
                os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder, if it still has its name."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def clear_building(home: Path) -> None:
    """Remove what processes that were killed have left in a folder; what a living one holds stays."""
    for path in home.glob(f"{_BUILDING}*"):
        with suppress(OSError):  # of another user, or gone by now
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if lock(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def lock(descriptor: int) -> bool | None:
    """Lock what is open there until it is closed; false where another holds it, none where there are no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether what is open lies at the path, and was not renamed or removed before it was locked."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
