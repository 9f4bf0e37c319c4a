"""A disk that fails: the training goes on, says what it could not write, and ends as if nothing had been."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import elman
from elman.errors import ElmanError
from elman.training import checkpoint, keeper
from elman.training.folder import Run
from elman.training.loop import Callback
from elman.training.run import train

pytestmark = pytest.mark.usefixtures("no_waits")


@pytest.fixture
def no_waits(monkeypatch):
    monkeypatch.setattr(keeper, "_WAITS", (0.0, 0.0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tiny.txt"
    path.write_text(tiny_text * 2, encoding="utf-8", newline="")
    return path


def settings() -> dict[str, Any]:
    return {
        "model": {"hidden_size": 12, "embedding_size": 8},
        "sampling": {"max_new_tokens": 5},
        "training": {"batch_size": 4, "bptt": 16, "max_updates": 12, "num_threads": 1},
        "evaluation": {"every_updates": 4},
        "checkpoint": {"every_updates": 2},
    }


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(corpus, out=tmp_path_factory.mktemp("runs") / "a", **settings())


def deterministic(run: Run) -> list[dict[str, Any]]:
    kinds = ("update", "evaluation", "sample", "end")
    return [{k: v for k, v in r.items() if k != "measured"} for r in run.records() if r["kind"] in kinds]


def notices(run: Run) -> list[str]:
    return [record["text"] for record in run.records() if record["kind"] == "notice"]


class Failing:
    """Lets ``os.fsync`` fail for files of one name, in some of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, calls: range, number: int = errno.ENOSPC) -> None:
        self.name, self.calls, self.number, self.count, self.fired = name, calls, number, 0, 0
        self.sync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if self.name in path:
            self.count += 1
            if self.count - 1 in self.calls:
                self.fired += 1
                raise OSError(self.number, os.strerror(self.number), path)
        self.sync(descriptor)


def assert_same_end(run: Run, other: Run) -> None:
    assert deterministic(run) == deterministic(other)
    one, two = (load_file(sorted(r.checkpoints.iterdir())[-1] / "tensors.safetensors") for r in (run, other))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert run.model.read_bytes() == other.model.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell files apart")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_checkpoints_that_cannot_be_written_do_not_stop_a_training(number, corpus, undisturbed, tmp_path, monkeypatch):
    failing = Failing(monkeypatch, "tensors.safetensors", range(1, 8), number)  # the first at update 0 is written
    run = train(corpus, out=tmp_path / "run", **settings())
    assert failing.fired == 7  # two checkpoints and all attempts at them, and one attempt at the third
    said = [text for text in notices(run) if "cannot write" in text]
    assert len(said) == 2
    needed = sum(t.numel() * t.element_size() for t in load_file(_newest(run) / "tensors.safetensors").values())
    for text in said:
        assert "tensors.safetensors" in text
        assert f"it takes {needed:,} bytes" in text
        assert ("are free" in text) == (number == errno.ENOSPC)
        assert text.endswith("the training goes on, and the checkpoint before is whole")
    assert_same_end(run, undisturbed)
    assert not [*run.path.rglob("*.tmp"), *run.path.rglob(".elman-*")]


def _newest(run: Run) -> Path:
    return sorted(run.checkpoints.iterdir())[-1]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell files apart")
def test_a_best_model_that_cannot_be_written_is_kept_and_written_later(corpus, undisturbed, tmp_path, monkeypatch):
    # It is written at updates 0, 2 (no estimate yet), 4, 8 and 12. That of 8 fails, and the next checkpoint mends it.
    failing = Failing(monkeypatch, "model.safetensors", range(3, 4))
    models = {}

    class Watch(Callback):
        def on_record(self, record):
            if record.kind == "update" and record.values["update"] == 9:
                models["at 9"] = elman.load(tmp_path / "run").provenance["updates"]

    run = train(corpus, out=tmp_path / "run", callbacks=[Watch()], **settings())
    assert failing.fired == 1
    assert models == {"at 9": 8}
    assert any("it is kept in memory and tried again" in text for text in notices(run))
    assert_same_end(run, undisturbed)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell files apart")
def test_work_that_cannot_be_saved_at_the_end_is_a_failure_with_the_remedy(corpus, tmp_path, monkeypatch):
    Failing(monkeypatch, "tensors.safetensors", range(3, 10**6))
    with pytest.raises(ElmanError, match=r"cannot write .* bytes.*: the checkpoint before is whole; .*elman resume"):
        train(corpus, out=tmp_path / "run", **settings())


def test_a_checkpoint_that_is_not_read_back_as_written_is_written_again(corpus, undisturbed, tmp_path, monkeypatch):
    flush, hurt = checkpoint.flush_folder, []

    def hurts_the_third(path: Path) -> None:
        flush(path)
        if path.name == "update-00000004-00.tmp":
            (path / "trainer.json").write_bytes(b"{}")
            hurt.append(path)

    monkeypatch.setattr(checkpoint, "flush_folder", hurts_the_third)
    run = train(corpus, out=tmp_path / "run", **settings())
    assert len(hurt) == 1
    assert_same_end(run, undisturbed)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_that_cannot_be_written_stops_nothing(corpus, undisturbed, tmp_path, monkeypatch):
    begin = Run.begin

    def with_a_full_log(self: Run, *arguments: Any) -> None:
        begin(self, *arguments)
        self.metrics.symlink_to("/dev/full")

    monkeypatch.setattr(Run, "begin", with_a_full_log)
    seen = []

    class Watch(Callback):
        def on_record(self, record):
            if record.kind == "notice":
                seen.append(record.values["text"])

    run = train(corpus, out=tmp_path / "run", callbacks=[Watch()], **settings())
    assert [text for text in seen if "metrics.jsonl" in text and "the training goes on without" in text]
    assert run.model.read_bytes() == undisturbed.model.read_bytes()


def test_a_line_of_the_log_is_written_whole_or_not_at_all(tmp_path):
    log = keeper._Log(tmp_path / "log")
    log.write("one")
    real = log._file

    class Half:
        def write(self, data: bytes) -> int:
            real.write(bytes(data[:3]))
            raise OSError(errno.ENOSPC, "No space left on device")

        def truncate(self, size: int) -> None:
            real.truncate(size)

    log._file = Half()
    with pytest.raises(OSError, match="No space left"):
        log.write("two")
    log.write("three")  # said once, lost in silence from then on
    log._file = real
    log.write("four")
    log.close()
    assert (tmp_path / "log").read_text() == "one\nfour\n"
