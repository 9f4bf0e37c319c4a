"""Resumable states on disk: written beside, flushed, verified by a manifest, renamed.

A checkpoint is a folder ``update-00001234-00`` of two files, ``tensors.safetensors`` and ``trainer.json``, and a
``manifest.json`` with the size and SHA-256 of each. There is no pointer to the newest one: it is found by verifying,
from the highest numbers down. Whatever ends in ``.tmp`` is on its way in or out, and no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from elman.errors import ModelFileError, TrainingError
from elman.files import flush_folder

_TENSORS, _TRAINER, _MANIFEST = "tensors.safetensors", "trainer.json", "manifest.json"
_NAME = re.compile(r"update-(\d+)-(\d+)")
"""The update, and which of those that were saved at it: a run may be stopped more than once at one update."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on as if it had never stopped."""

    tensors: Mapping[str, Tensor]
    """Weights, optimiser memory and the carried state of every stream, by name."""
    trainer: Mapping[str, Any]
    """Counters, cursor, best figure, rates: plain values."""


def save_checkpoint(folder: Path, update: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint, verify it, and only then remove all but the newest ``keep``.

    One that the newest of this update equals is not written again: a finished run may be resumed any number of times.
    """
    for name, tensor in checkpoint.tensors.items():
        if not tensor.isfinite().all():
            raise TrainingError(f"{name} holds a number that is not finite: update {update} is not saved")
    folder.mkdir(parents=True, exist_ok=True)
    # Copied: two tensors may be one, which the format does not take.
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in checkpoint.tensors.items()}
    files = {
        _TENSORS: tensors_to_bytes(tensors),
        _TRAINER: json.dumps(dict(checkpoint.trainer), sort_keys=True).encode(),
    }
    manifest = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in files.items()}
    found = _checkpoints(folder)
    of_update = [path for path in found if _numbers(path)[0] == update]
    target = of_update[-1] if of_update else folder / f"update-{update:08d}-00"
    if not _holds(target, manifest):
        if of_update:
            target = folder / f"update-{update:08d}-{_numbers(target)[1] + 1:02d}"
        _write(target, files | {_MANIFEST: json.dumps(manifest, sort_keys=True).encode()})
    flush_folder(folder)
    _verified(target)
    others = [path for path in found if path != target]
    for old in others[: max(0, len(others) - keep + 1)]:
        _remove(old)
    return target


def _write(target: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder of files beside its place, flush them, and give it its name."""
    beside = _half(target)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        for name, data in files.items():
            with (beside / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        flush_folder(beside)
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # half a checkpoint only takes room
        raise


def _remove(path: Path) -> None:
    """Remove a checkpoint: it stops being one at once, whatever happens to its files."""
    with suppress(OSError):  # it only takes room; the next save tries again
        shutil.rmtree(_half(path), ignore_errors=True)
        path.rename(_half(path))
        shutil.rmtree(_half(path))


def clear_half_written(folder: Path) -> None:
    """Remove what a process that was killed has left on its way in or out."""
    for path in folder.glob("update-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def newest_checkpoint(folder: Path) -> tuple[Path, Checkpoint, list[str]]:
    """The newest checkpoint that its manifest verifies; damaged ones are renamed, so that they count no more.

    Returns:
        Its path, what it holds, and a line for each newer one that was passed over.

    Raises:
        ModelFileError: there is none.
    """
    passed_over: list[str] = []
    for path in reversed(_checkpoints(folder)):
        try:
            return path, _read(path), passed_over
        except ModelFileError as error:
            passed_over.append(str(error))
            _set_aside(path)
    damaged = f" ({len(passed_over)} damaged: {passed_over[0]})" if passed_over else ""
    raise ModelFileError(f"no checkpoint in {str(folder)!r} to go on from{damaged}")


def intact_checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Every checkpoint that its manifest verifies, the oldest first; damaged ones are passed over and stay."""
    for path in _checkpoints(folder):
        with suppress(ModelFileError):
            yield _read(path)


def has_checkpoint(folder: Path) -> bool:
    """Whether there is one that was written to its end, be it damaged since or not."""
    return bool(_checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    """Those that were written to their end, the oldest first."""
    found = (path for path in folder.glob("update-*") if _NAME.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=_numbers)


def _numbers(path: Path) -> tuple[int, int]:
    """The update of a checkpoint and its number among those of that update; names do not sort by them."""
    update, serial = path.name.split("-")[1:]
    return int(update), int(serial)


def _half(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it counts no more and can still be looked at."""
    aside = path.with_name(f"damaged-{path.name}")
    number = 2
    while aside.exists():
        aside, number = path.with_name(f"damaged-{path.name}-{number}"), number + 1
    with suppress(OSError):  # on a disk that cannot be written it stays, and is passed over again
        path.rename(aside)


def _holds(path: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is whole and has these contents."""
    try:
        return _verified(path) == manifest
    except ModelFileError:
        return False


def _read(path: Path) -> Checkpoint:
    with _called_damage(path):
        _verified(path)
        # Mapped into memory, not read a second time: its pages are those that have just been verified.
        return Checkpoint(load_file(path / _TENSORS), json.loads((path / _TRAINER).read_bytes()))


def _verified(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are what it says. Raises ModelFileError: they are not."""
    with _called_damage(path):
        manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_bytes())
        for name in (_TENSORS, _TRAINER):
            with (path / name).open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                found = {"bytes": num_bytes, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            if manifest[name] != found:
                raise ModelFileError(f"checkpoint {path.name} is damaged: {name} differs from its manifest")
        return manifest


@contextmanager
def _called_damage(path: Path) -> Iterator[None]:
    """Whatever reading a checkpoint raises is a ModelFileError that says so."""
    try:
        yield
    except ModelFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelFileError(f"checkpoint {path.name} is damaged: {type(error).__name__}: {error}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
