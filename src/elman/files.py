"""Files and folders that are whole or not there, whatever happens to the process that writes them.

What is on its way lies beside its place: a file as ``.elman-writing-`` and its name, a folder as
``.elman-building-...``. Whoever writes it holds a lock on it that ends with his process. So two who write the same file
do not get into each other's way, and what nobody holds was left by a process that was killed: whoever comes next
removes it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

_BUILDING, _WRITING = ".elman-building-", ".elman-writing-"
_MAX_NAME = 200
"""Bytes of a file's name in that of what is on its way to it; most systems allow 255 in all."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that, whenever power fails, the path holds the old bytes or the new ones."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of another when all is written and flushed, and not at all after an error.

    It has the permissions of the one it replaces, and a new one those that the umask leaves. A device or a pipe, such
    as ``/dev/stdout``, is written as it is.
    """
    if path.exists() and (not path.is_file() or path.parent == Path("/dev")):
        with path.open("wb") as stream:
            yield stream
        return
    if path.is_symlink():
        with suppress(FileNotFoundError):
            path.stat()  # links that lead round in a circle are an error here
        path = path.resolve()
    with _blaming(path):
        beside, file = _beside(path)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            with _blaming(path):
                beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)  # half a file only takes room
            raise
    flush_folder(path.parent)


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Have an error name the file that is written, and not what is on its way to it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _beside(path: Path) -> tuple[Path, IO[bytes]]:
    """A new file beside a path, of the same permissions, that this process alone writes."""
    try:
        mode, permissions = 0o666, stat.S_IMODE(path.stat().st_mode)
        mode &= permissions  # at no moment can others read more than they could
    except FileNotFoundError:
        mode, permissions = 0o666, None
    name, number = _WRITING + os.fsencode(path.name)[:_MAX_NAME].decode(errors="ignore"), 1
    while True:
        beside = path.with_name(name if number == 1 else f"{name}.{number}")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # which follows no link
        except FileExistsError:
            if not _remove_left(beside):
                number += 1
            continue
        if lock(descriptor) is not False and _is_at(beside, descriptor):
            if permissions is not None:
                with suppress(OSError):  # not every disk has them
                    os.fchmod(descriptor, permissions)
            return beside, os.fdopen(descriptor, "wb")
        os.close(descriptor)  # another has taken it for left before it was locked


def _remove_left(path: Path) -> bool:
    """Remove a file that a killed process was writing. False where it is of a living one, or no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not lock(descriptor):
            return False
        if _is_at(path, descriptor):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def clear_writing(home: Path) -> None:
    """Remove what killed processes were writing in a folder; what a living one writes stays."""
    for path in home.glob(f"{_WRITING}*"):
        _remove_left(path)


def is_being_written(path: Path) -> bool:
    """Whether a file is one that is on its way, by its name."""
    return path.name.startswith(_WRITING)


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
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
