"""Runs of a model that is counted: the same folder, records and commands as of one that is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elman
from elman.data.prepare import prepare
from elman.errors import ConfigError
from elman.models.file import load_model
from elman.models.ngram.model import NgramModel
from elman.settings import resolve
from elman.training.folder import Run
from elman.training.run import dry_run, resume, train

SETTINGS: dict[str, Any] = {
    "model": {"kind": "ngram", "order": 4},
    "sampling": {"max_new_tokens": 12, "temperatures": [0.8]},
    "evaluation": {"num_streams": 1},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tiny.txt"
    path.write_text(tiny_text * 2, encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(corpus, out=tmp_path_factory.mktemp("runs") / "run", **SETTINGS)


def kinds(run: Run) -> list[str]:
    return [record["kind"] for record in run.records()]


def of_kind(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.records() if record["kind"] == kind]


def test_a_run_counts_once_and_then_judges_samples_and_saves(run):
    assert [kind for kind in kinds(run) if kind != "notice"] == [
        "checkpoint", "update", "evaluation", "sample", "checkpoint", "end"
    ]  # fmt: skip
    (update,) = of_kind(run, "update")
    assert update["update"] == update["epoch"] == 1
    dataset = prepare(resolve(run.config().to_dict()).data, run.config().text, run.config().tokenizer)
    assert update["tokens"] == len(dataset.train.tokens) - 1
    assert 0 < update["nats"] < of_kind(run, "evaluation")[0]["nats_per_token"] < math.log(dataset.tokenizer.size)
    assert "learning_rate" not in update
    assert update["measured"]["progress"] == 1.0
    assert load_model(run.path).provenance["tokens"] == update["tokens"]


def test_the_model_in_the_run_is_that_of_the_training_text(run):
    config = run.config()
    dataset = prepare(config.data, config.text, config.tokenizer)
    model = NgramModel(config.model, dataset.tokenizer.size, dtype=load_model(run.path).network.dtype)
    model.count(dataset.train.tokens)
    loaded = load_model(run.path).network.tensors()
    assert all(np.array_equal(loaded[name], tensor) for name, tensor in model.tensors().items())
    judged = elman.evaluate(run.path, split="valid").evaluation.score
    assert judged.nats_per_token == pytest.approx(of_kind(run, "evaluation")[0]["nats_per_token"], rel=1e-12)


def test_the_same_settings_give_the_same_file(run, corpus, tmp_path):
    again = train(corpus, out=tmp_path / "run", **SETTINGS)
    assert again.model.read_bytes() == run.model.read_bytes()
    assert [r["text"] for r in of_kind(again, "sample")] == [r["text"] for r in of_kind(run, "sample")]


def test_a_finished_run_has_nothing_left_to_do(run, corpus, tmp_path):
    copy = train(corpus, out=tmp_path / "run", **SETTINGS)
    model = copy.model.read_bytes()
    resume(copy.path)
    assert any("there is nothing left to do" in record["text"] for record in of_kind(copy, "notice"))
    assert len(of_kind(copy, "update")) == len(of_kind(copy, "end")) == 1
    assert copy.model.read_bytes() == model
    with pytest.raises(ConfigError, match=r"training\.max_updates: no meaning"):
        resume(copy.path, max_updates=5)


@pytest.mark.parametrize("polls", [1, 3, 6])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(run, corpus, tmp_path, polls):
    calls = iter(range(polls))
    stopped = train(corpus, out=tmp_path / "run", should_stop=lambda: next(calls, None) is None, **SETTINGS)
    assert kinds(stopped)[-1] == "stopped"
    resume(stopped.path)
    assert kinds(stopped)[-1] == "end"
    assert stopped.model.read_bytes() == run.model.read_bytes()


def test_documents_are_texts_of_their_own_where_the_state_is_reset(tmp_path):
    for name, text in (("a.txt", "abc"), ("b.txt", "bcd"), ("c.txt", "bca")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    first = {}
    for resets in (False, True):
        data = {"valid_fraction": 0, "test_fraction": 0, "reset_at_documents": resets}
        train(tmp_path / "*.txt", out=tmp_path / f"run-{resets}", data=data, **SETTINGS)
        bundle = load_model(tmp_path / f"run-{resets}")
        tables = bundle.network.head.tables
        first[resets] = tables.num_ngrams(2)
        (after_c_and_boundary,) = tables.paths(np.array([[*bundle.tokenizer.encode("c").tolist(), 0]]))
        assert (after_c_and_boundary[2] >= 0) == (not resets)
    assert first[True] == first[False]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"training": {"learning_rate": 0.1, "bptt": 3}}, "training.bptt and training.learning_rate: no meaning"),
        ({"training": {"max_seconds": 5}}, "training.max_seconds: no meaning for model.kind 'ngram'"),
        ({"model": {"kind": "ngram", "order": 0}}, "model.order"),
        ({"model": {"kind": "ngram", "order": 21}}, "model.order"),
        ({"model": {"kind": "ngram", "add_k": 0.5}}, "add_k has no meaning for smoothing 'kneser_ney'"),
        ({"model": {"kind": "ngram", "hidden_size": 3}}, "model.hidden_size has no meaning for"),
        ({"data": {"pairs": True}}, "data.pairs"),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(settings, complaint):
    with pytest.raises(ConfigError) as caught:
        resolve({"model": {"kind": "ngram"}, **settings})
    assert complaint in str(caught.value)


def test_of_a_preset_remains_what_has_a_meaning():
    config = resolve({"model": {"kind": "ngram"}}, preset="cpu-1min")
    assert config.training == resolve({}).training
    assert (config.preset, config.model.order, config.tokenizer.level) == ("cpu-1min", 6, "char")
    assert resolve(config.to_dict()) == config
    threads = resolve({"model": {"kind": "ngram"}, "training": {"num_threads": 1}})
    assert threads.training.num_threads == 1


def test_a_dry_run_counts_and_writes_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = dry_run(corpus, **SETTINGS)
    assert (plan.parameters, plan.updates_per_epoch, plan.num_streams) == (0, 1, 1)
    assert plan.parameter_bytes > 1000
    assert 0 < plan.nats_after_one_update < plan.valid_nats_per_token
    assert list(tmp_path.iterdir()) == []
