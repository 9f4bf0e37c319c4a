"""Files that are not what was written: bits flipped, ends cut off, files missing, empty or of another checkpoint."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from elman.errors import ModelFileError
from elman.training.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint
from faults.lab import BRIEF, Lab, Result, campaign, differences

_FILES = ("tensors.safetensors", "trainer.json", "manifest.json")


@campaign(
    "a damaged checkpoint",
    "one random bit flipped, a file cut at a random place, emptied, removed, or taken from another checkpoint",
    "found, named in one line, and the checkpoint before is used",
)
def found(lab: Lab, share: float, result: Result) -> None:
    """Damage the newest checkpoint of a run in every way; it must be passed over, and the one before be taken."""
    checkpoints = lab.undisturbed(*BRIEF).checkpoints
    kinds = {"bit": 300, "cut": 50, "empty": 3, "missing": 3, "swapped": 3, "swapped pair": 1, "all missing": 1}
    figures = {}
    for kind, count in kinds.items():
        for trial in range(max(1, round(share * count))):
            copy = lab.folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(checkpoints, copy)
            changed = _hurt(lab, copy, kind, trial)
            result.count(changed, _faults_of(copy), f"{kind} {trial}")
            figures[kind] = figures.get(kind, 0) + changed
    result.figures |= figures


def _newest_two(checkpoints: Path) -> tuple[Path, Path]:
    newest, before = sorted(checkpoints.iterdir())[:-3:-1]
    return newest, before


def _hurt(lab: Lab, checkpoints: Path, kind: str, trial: int) -> bool:
    """Damage the newest; whether that changed what it says."""
    newest, before = _newest_two(checkpoints)
    names = _FILES if kind in ("bit", "cut") else (_FILES[trial % 3],)
    path = newest / (lab.random.choice(names))
    data = path.read_bytes()
    if kind == "bit":
        place = lab.random.randrange(8 * len(data))
        hurt = bytearray(data)
        hurt[place // 8] ^= 1 << place % 8
        path.write_bytes(hurt)
    elif kind == "cut":
        path.write_bytes(data[: lab.random.randrange(len(data))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "missing":
        path.unlink()
    elif kind == "swapped":
        shutil.copy(before / path.name, path)
    elif kind == "swapped pair":  # whole by itself, but of two checkpoints
        for name in _FILES[:2]:
            shutil.copy(before / name, newest / name)
    else:
        for name in _FILES:
            (newest / name).unlink()
    return not (kind == "bit" and path.name == "manifest.json" and _says_the_same(data, path.read_bytes()))


def _says_the_same(one: bytes, other: bytes) -> bool:
    """Whether a flipped bit left the JSON as it was, as one in a blank may."""
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def _faults_of(checkpoints: Path) -> list[str]:
    newest, before = _newest_two(checkpoints)
    try:
        path, _, passed_over = newest_checkpoint(checkpoints)
    except ModelFileError as error:
        return [str(error)]
    faults = [] if path.name == before.name else [f"{path.name} was taken"]
    said = len(passed_over) == 1 and newest.name in passed_over[0] and "\n" not in passed_over[0]
    return faults if said else [*faults, f"it was said {passed_over}"]


@campaign(
    "going on past damage",
    "a bit flipped in the newest checkpoint of a run, in the two newest, or in all three",
    "the run goes on from the one before, says so, and ends bit-identical; with none left it says that and ends",
)
def gone_on_from(lab: Lab, share: float, result: Result) -> None:
    """Damage the newest checkpoint of a run, or all but the oldest, and go on."""
    for serial in range(max(1, round(share * 15))):
        trial = lab.trial(BRIEF)
        trial.carry_out()
        there = sorted(trial.run.checkpoints.iterdir())
        number = (1, 2, 3)[serial % 3]
        for path in there[-number:]:
            _flip_one(lab, path / _FILES[serial % 2])
        again = trial.carry_out()
        if number == 3:
            is_said = again.code == 2 and "no checkpoint in" in again.err
            result.count(True, [] if is_said else [f"it ended with {again.code}: {again.err}"], f"trial {serial}")
            continue
        faults = [f"exit code {again.code}: {again.err}"] if again.code else differences(trial.run, trial.whole)
        faults += [] if again.err.count("is damaged") == number else [f"not said: {again.err}"]
        result.count(True, faults, f"trial {serial}")


def _flip_one(lab: Lab, path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = lab.random.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


@campaign(
    "the price of verifying",
    "a checkpoint of 200 MB is loaded with and without its SHA-256 being computed, five times each",
    "measured, no promise",
)
def cost(lab: Lab, share: float, result: Result) -> None:
    """How much longer it takes to load a large checkpoint, and to copy its tensors, because it is verified."""
    megabytes = round(200 * share) or 1
    folder = lab.folder / "large"
    values = torch.arange(megabytes * 250_000, dtype=torch.float32)
    path = save_checkpoint(folder, 1, Checkpoint({"model.weight": values}, {"update": 1}), 2)
    verified = min(_seconds(lambda: _copied(newest_checkpoint(folder)[1].tensors)) for _ in range(5))
    bare = min(_seconds(lambda: _copied(load_file(path / _FILES[0]))) for _ in range(5))
    shutil.rmtree(folder)
    result.count(True, [], "")
    result.figures |= {"megabytes": megabytes, "seconds": round(verified, 3), "seconds unverified": round(bare, 3)}


def _copied(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """What goes on with them does so: until then they may still lie on the disk."""
    return [tensor.clone() for tensor in tensors.values()]


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
