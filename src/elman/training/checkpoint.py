"""Resumable states on disk: written beside, flushed, verified by a manifest, renamed.

A checkpoint is a folder ``update-00001234-00`` of two files, ``tensors.safetensors`` and ``trainer.json``, and a
``manifest.json`` with the size and SHA-256 of each. There is no pointer to the newest one: it is found by verifying,
from the newest name down.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from elman.errors import ModelFileError, TrainingError

_TENSORS, _TRAINER, _MANIFEST = "tensors.safetensors", "trainer.json", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on as if it had never stopped."""

    tensors: Mapping[str, Tensor]
    """Weights, optimiser memory and the carried state of every stream, by name."""
    trainer: Mapping[str, Any]
    """Counters, cursor, best figure, rates: plain values."""


def save_checkpoint(folder: Path, update: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint, verify it, and only then remove all but the newest ``keep``."""
    folder.mkdir(parents=True, exist_ok=True)
    # A run that is stopped twice at one update saves that update twice: the older copy stays until pruned.
    serials = [int(path.name[-2:]) for path in folder.glob(f"update-{update:08d}-??")]
    serial = max(serials, default=-1) + 1
    target = folder / f"update-{update:08d}-{serial:02d}"
    for name, tensor in checkpoint.tensors.items():
        if not tensor.isfinite().all():
            raise TrainingError(f"{name} holds a number that is not finite: update {update} is not saved")
    beside = target.with_name(target.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    # Copied: two tensors may be one, which the format does not take.
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in checkpoint.tensors.items()}
    files = {
        _TENSORS: tensors_to_bytes(tensors),
        _TRAINER: json.dumps(dict(checkpoint.trainer), sort_keys=True).encode(),
    }
    manifest = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in files.items()}
    try:
        for name, data in (files | {_MANIFEST: json.dumps(manifest, sort_keys=True).encode()}).items():
            with (beside / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        _flush_folder(beside)
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # half a checkpoint only takes room
        raise
    _flush_folder(folder)
    _read(target)
    others = sorted(path for path in _checkpoints(folder) if path != target)
    for old in others[: max(0, len(others) - keep + 1)]:
        shutil.rmtree(old)
    return target


def newest_checkpoint(folder: Path) -> tuple[Path, Checkpoint, list[str]]:
    """The newest checkpoint that its manifest verifies; damaged ones are renamed, so that they count no more.

    Returns:
        Its path, what it holds, and a line for each newer one that was passed over.

    Raises:
        ModelFileError: there is none.
    """
    passed_over: list[str] = []
    for path in sorted(_checkpoints(folder), reverse=True):
        try:
            return path, _read(path), passed_over
        except ModelFileError as error:
            passed_over.append(str(error))
            path.rename(path.with_name(f"damaged-{path.name}"))
    damaged = f" ({len(passed_over)} damaged: {passed_over[0]})" if passed_over else ""
    raise ModelFileError(f"no checkpoint in {str(folder)!r} to go on from{damaged}")


def has_checkpoint(folder: Path) -> bool:
    """Whether there is one that was written to its end, be it damaged since or not."""
    return any(_checkpoints(folder))


def _checkpoints(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("update-*") if path.suffix != ".tmp" and path.is_dir())


def _read(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        files = {name: (path / name).read_bytes() for name in (_TENSORS, _TRAINER)}
        for name, data in files.items():
            if manifest[name] != {"bytes": len(data), "sha256": _sha256(data)}:
                raise ModelFileError(f"checkpoint {path.name} is damaged: {name} differs from its manifest")
        return Checkpoint(tensors_from_bytes(files[_TENSORS]), json.loads(files[_TRAINER]))
    except ModelFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"checkpoint {path.name} is damaged: {type(error).__name__}: {error}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
