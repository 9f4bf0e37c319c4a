"""Trackers: what they are sent, by a library that notes it down, and that a broken one harms no training."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import elman
from elman.cli import main
from elman.errors import UserError
from elman.training.history import History
from elman.training.trackers import Tracker


class Notebook(ModuleType):
    """A library that answers every call by noting it down."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: self.calls.append((name, arguments, options))


@pytest.fixture
def train(tmp_path, tiny_corpus):
    def call(tracker):
        return elman.train(
            tiny_corpus,
            out=tmp_path / "run",
            callbacks=[tracker],
            model={"hidden_size": 8, "embedding_size": 8},
            training={"batch_size": 2, "bptt": 8, "max_updates": 4, "num_threads": 1},
            evaluation={"every_updates": 2},
            sampling={"temperatures": ()},
        )

    return call


@pytest.mark.parametrize(
    ("name", "begins", "logs", "ends"),
    [
        ("trackio", ["init"], "log", "finish"),
        ("wandb", ["init"], "log", "finish"),
        ("mlflow", ["set_experiment", "start_run", "log_params"], "log_metrics", "end_run"),
    ],
)
def test_every_number_is_sent_once_and_the_run_ended(name, begins, logs, ends, train, monkeypatch):
    notes = Notebook(name)
    monkeypatch.setitem(sys.modules, name, notes)
    run = train(Tracker(name, run_name="one", settings={"seed": 1, "model": {"kind": "lstm"}}))
    names = [call for call, _, _ in notes.calls]
    assert names == [*begins, *[logs] * 6, ends]
    sent = [(options["step"], arguments[0]) for call, arguments, options in notes.calls if call == logs]
    assert [step for step, numbers in sent if "valid/nats_per_token" in numbers] == [2, 4]
    losses = [numbers["train/nats"] for _, numbers in sent if "train/nats" in numbers]
    assert losses == History.of(run).curve.nats.tolist()


def test_a_tracker_that_breaks_is_left_alone(train, monkeypatch):
    notes = Notebook("wandb")
    monkeypatch.setitem(sys.modules, "wandb", notes)

    def fail(*arguments, **options):
        raise ConnectionError("no network")

    notes.log = fail
    tracker = Tracker("wandb", run_name="one", settings={})
    assert History.of(train(tracker)).ending == "finished"
    assert tracker.failure == "ConnectionError: no network"
    assert [call for call, _, _ in notes.calls] == ["init"]


def test_the_command_line_tells_that_a_tracker_broke(tiny_corpus, tmp_path, monkeypatch, capfd):
    notes = Notebook("trackio")
    monkeypatch.setitem(sys.modules, "trackio", notes)
    words = ["train", tiny_corpus, "--out", tmp_path / "run", "--training.max-updates", 2, "--training.bptt", 8,
             "--model.hidden-size", 8, "--sampling.max-new-tokens", 2, "--track", "trackio"]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    name, _, options = notes.calls[0]
    assert (name, options["name"], options["config"]["training"]["bptt"]) == ("init", "run", 8)
    assert "trackio was sent no more" not in capfd.readouterr().err

    def fail(*arguments, **options):
        raise ConnectionError("no network")

    notes.log = fail
    assert main([str(word) for word in (*words, "--overwrite")]) == 0
    assert "trackio was sent no more (ConnectionError: no network)" in capfd.readouterr().err


def test_one_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match="pip install trackio"):
        Tracker("trackio", run_name="one", settings={})
