"""Checkpoints: everything comes back, damage is found and passed over, old ones go only when the new one is good."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from elman.data.prepare import Dataset, Split
from elman.errors import ModelFileError
from elman.settings import resolve
from elman.text.tokenizers import CharTokenizer
from elman.training.checkpoint import Checkpoint, clear_half_written, newest_checkpoint, save_checkpoint
from elman.training.loop import Trainer

TOKENIZER = CharTokenizer("abcdefg")


def checkpoint(update: int) -> Checkpoint:
    tensors = {
        "model.weight": torch.full((3, 2), float(update)),
        "optimizer.0.1.step": torch.tensor(float(update)),
        "state.0.h": torch.arange(4, dtype=torch.float64),
    }
    return Checkpoint(tensors, {"update": update, "best_nats": None, "rate": 0.1})


def save(folder: Path, *updates: int, keep: int = 10) -> list[Path]:
    return [save_checkpoint(folder, update, checkpoint(update), keep) for update in updates]


def test_everything_comes_back(tmp_path):
    (path,) = save(tmp_path / "checkpoints", 1234)
    found_path, found, passed_over = newest_checkpoint(tmp_path / "checkpoints")
    assert found_path == path
    assert path.name == "update-00001234-00"
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "tensors.safetensors", "trainer.json"]
    assert passed_over == []
    assert found.trainer == checkpoint(1234).trainer
    assert found.tensors.keys() == checkpoint(1234).tensors.keys()
    for name, tensor in checkpoint(1234).tensors.items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.tensors[name].dtype == tensor.dtype


def test_tensors_that_are_one_or_have_gaps_are_saved_by_value(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    save_checkpoint(tmp_path, 1, Checkpoint({"a": base, "b": base, "c": base[:, 1], "d": base.T}, {}), 2)
    _, found, _ = newest_checkpoint(tmp_path)
    for name, expected in {"a": base, "b": base, "c": base[:, 1], "d": base.T}.items():
        assert torch.equal(found.tensors[name], expected)


def test_only_the_newest_stay(tmp_path):
    save(tmp_path, 5, 10, 15, 100, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-00000015-00", "update-00000100-00"]


def test_one_update_may_be_saved_any_number_of_times(tmp_path):
    """A run is stopped at one update again and again, each time with more observed."""
    for serial in range(103):
        after = Checkpoint(checkpoint(7).tensors, {"update": 7, "serial": serial})
        assert save_checkpoint(tmp_path, 7, after, 2).name == f"update-00000007-{serial:02d}"
        path, found, passed_over = newest_checkpoint(tmp_path)
        assert (path.name, found.trainer["serial"], passed_over) == (f"update-00000007-{serial:02d}", serial, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-00000007-101", "update-00000007-102"]


def test_a_state_that_is_saved_already_is_not_written_again(tmp_path):
    save(tmp_path, 5, 7)
    names = {path.name for path in save(tmp_path, 7, 7, 7)}
    assert names == {"update-00000007-00"}
    flip(tmp_path / "update-00000007-00" / "trainer.json")
    assert save(tmp_path, 7)[0].name == "update-00000007-01"  # that one is not what it was
    assert newest_checkpoint(tmp_path)[0].name == "update-00000007-01"


def test_the_newest_is_the_one_of_the_highest_numbers_not_of_the_last_name(tmp_path):
    save(tmp_path, 99_999_999, 100_000_000)
    assert newest_checkpoint(tmp_path)[0].name == "update-100000000-00"


def test_an_old_one_that_cannot_be_removed_is_no_failure_and_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, keep=2)
    remove = shutil.rmtree

    def stubborn(path, **options):
        if (path / "manifest.json").exists():
            (path / "manifest.json").unlink()
            raise OSError("no more")

    monkeypatch.setattr(shutil, "rmtree", stubborn)
    save(tmp_path, 3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "update-00000001-00.tmp", "update-00000002-00", "update-00000003-00"
    ]  # fmt: skip
    monkeypatch.setattr(shutil, "rmtree", remove)
    clear_half_written(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-00000002-00", "update-00000003-00"]


def test_damage_that_comes_again_finds_a_name_of_its_own(tmp_path):
    for _ in range(3):
        save(tmp_path, 5)
        flip(tmp_path / "update-00000005-00" / "trainer.json")
        with pytest.raises(ModelFileError, match="1 damaged"):
            newest_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged-update-00000005-00", "damaged-update-00000005-00-2", "damaged-update-00000005-00-3"
    ]  # fmt: skip


def test_half_written_ones_and_strangers_are_not_looked_at(tmp_path):
    save(tmp_path, 5)
    shutil.copytree(tmp_path / "update-00000005-00", tmp_path / "update-00000009-00.tmp")
    (tmp_path / "update-00000010-00").write_text("a file")
    (tmp_path / "notes.txt").write_text("mine")
    path, _, passed_over = newest_checkpoint(tmp_path)
    assert path.name == "update-00000005-00"
    assert passed_over == []
    save(tmp_path, 9, keep=2)
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / "update-00000009-00.tmp").exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tensors flipped": lambda path: flip(path / "tensors.safetensors"),
    "trainer flipped": lambda path: flip(path / "trainer.json"),
    "tensors cut": lambda path: (path / "tensors.safetensors").write_bytes(b"x"),
    "tensors empty": lambda path: (path / "tensors.safetensors").write_bytes(b""),
    "trainer missing": lambda path: (path / "trainer.json").unlink(),
    "tensors missing": lambda path: (path / "tensors.safetensors").unlink(),
    "manifest missing": lambda path: (path / "manifest.json").unlink(),
    "manifest empty": lambda path: (path / "manifest.json").write_bytes(b""),
    "manifest a list": lambda path: (path / "manifest.json").write_bytes(b"[]"),
    "manifest of nothing": lambda path: (path / "manifest.json").write_bytes(b"{}"),
    "manifest no text": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"),
    "of another update": lambda path: shutil.copy(path.with_name("update-00000005-00") / "trainer.json", path),
    "all files gone": lambda path: [file.unlink() for file in path.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_is_passed_over_with_a_line(damage, tmp_path):
    save(tmp_path, 5, 10)
    DAMAGE[damage](tmp_path / "update-00000010-00")
    path, found, passed_over = newest_checkpoint(tmp_path)
    assert path.name == "update-00000005-00"
    assert found.trainer["update"] == 5
    (line,) = passed_over
    assert line.startswith("checkpoint update-00000010-00 is damaged: ")
    assert "\n" not in line


def test_any_flipped_bit_is_found(tmp_path):
    save(tmp_path, 5, 10)
    newest = tmp_path / "update-00000010-00"
    chooser = random.Random(1)
    for _ in range(150):
        file = chooser.choice(sorted(newest.iterdir()))
        whole = file.read_bytes()
        data = bytearray(whole)
        data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        file.write_bytes(data)
        path, _, passed_over = newest_checkpoint(tmp_path)
        harmless = file.name == "manifest.json" and _same_json(whole, bytes(data))
        assert (path == newest and not passed_over) if harmless else (path != newest and len(passed_over) == 1)
        if not harmless:  # it stands aside and counts no more
            newest.with_name(f"damaged-{newest.name}").rename(newest)
        file.write_bytes(whole)


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def test_with_none_left_the_error_says_so(tmp_path):
    with pytest.raises(ModelFileError, match=r"no checkpoint in '.*' to go on from$"):
        newest_checkpoint(tmp_path / "absent")
    for path in save(tmp_path, 5, 10):
        flip(path / "trainer.json")
    with pytest.raises(ModelFileError, match=r"to go on from \(2 damaged: checkpoint update-00000010-00 is damaged"):
        newest_checkpoint(tmp_path)


def test_old_ones_stay_when_the_new_one_cannot_be_read_back(tmp_path, monkeypatch):
    save(tmp_path, 5, 10, keep=2)
    monkeypatch.setattr("elman.training.checkpoint.flush_folder", lambda path: _damage_new(path))

    def _damage_new(path: Path) -> None:
        if (path / "trainer.json").exists():
            flip(path / "trainer.json")

    with pytest.raises(ModelFileError, match="update-00000015-00 is damaged"):
        save(tmp_path, 15, keep=2)
    assert {path.name for path in tmp_path.iterdir()} > {"update-00000005-00", "update-00000010-00"}
    assert newest_checkpoint(tmp_path)[0].name == "update-00000010-00"


def test_a_tied_matrix_is_one_tensor_in_the_checkpoint_and_after_it(tmp_path):
    def trainer() -> Trainer:
        tokens = np.random.default_rng(1).integers(1, TOKENIZER.size, size=81)
        split = Split(tokens, num_chars=80, num_bytes=80, num_documents=1, num_unknown=0)
        settings = {
            "model": {"kind": "lstm", "embedding_size": 6, "hidden_size": 6, "tie_weights": True, "dropout": 0.3},
            "training": {"batch_size": 2, "bptt": 10, "max_updates": 6, "learning_rate": 0.01},
            "sampling": {"max_new_tokens": 0},
            "device": "cpu",
        }
        return Trainer(resolve(settings), Dataset(TOKENIZER, split, None, None, "test", "0" * 64, ()))

    def after(training: Trainer, update: int) -> dict[str, torch.Tensor]:
        for record in training.records():
            if record.kind == "update" and record.values["update"] == update:
                break
        return {name: tensor.detach().clone() for name, tensor in training.checkpoint().tensors.items()}

    whole, halved = trainer(), trainer()
    expected = after(whole, 6)
    after(halved, 3)
    save_checkpoint(tmp_path, 3, halved.checkpoint(), keep=2)
    _, saved, _ = newest_checkpoint(tmp_path)
    matrices = [name for name, tensor in saved.tensors.items() if tensor.shape == (TOKENIZER.size, 6)]
    assert [name for name in matrices if name.startswith("model.")] == ["model.embedding"]
    assert len(matrices) == 3  # the matrix and AdamW's two means
    resumed = trainer()
    resumed.restore(saved)
    assert resumed.network.head.weight is resumed.network.embedding
    found = after(resumed, 6)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
