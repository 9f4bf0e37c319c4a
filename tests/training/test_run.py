"""Runs from end to end: the folder, reproducibility, stopping and going on, small and odd corpora."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import elman
from elman.config import TokenizerConfig
from elman.errors import ConfigError, ElmanError, ModelFileError, TextError, TrainingError
from elman.evaluation import Evaluation
from elman.metrics import Score
from elman.text.building import train_tokenizer
from elman.text.sources import StringSource
from elman.training.folder import Run
from elman.training.loop import Record
from elman.training.run import dry_run, resume, train

MODEL = {"hidden_size": 12, "embedding_size": 8, "num_layers": 2, "dropout": 0.2}
SAMPLING = {"max_new_tokens": 12, "temperatures": [0.8], "prompts": ["", "the "]}


def settings(**training: Any) -> dict[str, Any]:
    """A run small enough for a test."""
    return {
        "model": MODEL,
        "sampling": SAMPLING,
        "training": {"batch_size": 4, "bptt": 16, "warmup_updates": 4, "learning_rate": 0.02} | training,
        "evaluation": {"every_updates": 5, "num_streams": 3},
    }


class Counting:
    """Counts the polls of a training, so that it can be stopped at any of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.polls, self.stop_at = 0, stop_at

    def __call__(self) -> bool:
        self.polls += 1
        return self.stop_at is not None and self.polls >= self.stop_at


def deterministic(run: Run) -> list[dict[str, Any]]:
    """The log without what the clock determines, and without the traces of stopping."""
    kept = []
    for record in run.records():
        record.pop("measured", None)
        if record["kind"] in ("update", "evaluation", "sample", "end"):
            kept.append(record)
    return kept


def final_state(run: Run) -> dict[str, torch.Tensor]:
    """Weights, optimiser memory and carried state of the newest checkpoint."""
    newest = sorted(run.checkpoints.iterdir())[-1]
    return load_file(newest / "tensors.safetensors")


def assert_same_end(one: Run, other: Run) -> None:
    """Two runs ended bit for bit alike, model file included."""
    first, second = final_state(one), final_state(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert (one.path / "model.safetensors").read_bytes() == (other.path / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tiny.txt"
    path.write_text(tiny_text * 2, encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """30 updates: three epochs and a half, six estimates."""
    return train(corpus, out=tmp_path_factory.mktemp("runs") / "a", **settings(max_updates=30))


def test_the_folder_holds_what_the_design_says(undisturbed: Run, corpus: Path) -> None:
    names = {path.name for path in undisturbed.path.iterdir()}
    assert names == {"run.toml", "environment.json", "metrics.jsonl", "samples", "checkpoints", "model.safetensors"}
    records = list(undisturbed.records())
    updates = [r for r in records if r["kind"] == "update"]
    assert [r["update"] for r in updates] == list(range(1, 31))
    assert all(r["grad_norm"] > 0 and r["nats"] > 0 for r in updates)
    assert [r["update"] for r in records if r["kind"] == "evaluation"] == [5, 10, 15, 20, 25, 30]
    assert records[-1]["kind"] == "end"
    assert records[-1]["seed"] == 1111
    assert updates[-1]["nats"] < updates[0]["nats"] - 0.4
    sample = (undisturbed.path / "samples" / "update-00000030.txt").read_text("utf-8")
    assert "bits per character held out" in sample
    assert "prompt 'the '" in sample
    environment = json.loads((undisturbed.path / "environment.json").read_text())
    assert environment["libraries"]["torch"] == torch.__version__
    assert len(environment["corpus_sha256"]) == 64


def test_the_settings_of_a_run_repeat_it_bit_for_bit(undisturbed: Run, tmp_path: Path) -> None:
    again = train(config=undisturbed.path / "run.toml", out=tmp_path / "again")
    assert deterministic(again) == deterministic(undisturbed)
    assert_same_end(again, undisturbed)


def test_another_seed_gives_another_run(undisturbed: Run, corpus: Path, tmp_path: Path) -> None:
    other = train(corpus, out=tmp_path / "b", seed=2, **settings(max_updates=2))
    assert [r["nats"] for r in other.records() if r["kind"] == "update"] != [
        r["nats"] for r in undisturbed.records() if r["kind"] == "update"
    ][:2]


def test_evaluating_sampling_and_saving_leave_no_trace(undisturbed: Run, corpus: Path, tmp_path: Path) -> None:
    busy = settings(max_updates=30) | {"evaluation": {"every_updates": 1}, "checkpoint": {"every_updates": 1}}
    watched = train(corpus, out=tmp_path / "watched", **busy)
    calm = train(corpus, out=tmp_path / "calm", **settings(max_updates=30) | {"evaluation": {"every_updates": 10**6}})
    for run in (watched, calm):
        assert [r for r in deterministic(run) if r["kind"] == "update"] == [
            r for r in deterministic(undisturbed) if r["kind"] == "update"
        ]
        for name, tensor in final_state(run).items():
            assert torch.equal(tensor, final_state(undisturbed)[name]), name


def test_a_run_stopped_at_any_poll_and_resumed_twice_ends_as_the_undisturbed(
    undisturbed: Run, corpus: Path, tmp_path: Path
) -> None:
    counting = Counting()
    train(corpus, out=tmp_path / "count", should_stop=counting, **settings(max_updates=30))
    assert counting.polls > 200  # updates, evaluations and every token of every sample
    # From the first poll on, and with a step that meets updates, evaluations and samples alike.
    for stop_at in range(1, counting.polls, counting.polls // 11):
        run = train(corpus, out=tmp_path / f"{stop_at}", should_stop=Counting(stop_at), **settings(max_updates=30))
        assert list(run.records())[-1]["kind"] == "stopped"
        resume(run.path, should_stop=Counting(max(1, (counting.polls - stop_at) // 3)))
        resume(run.path)
        assert deterministic(run) == deterministic(undisturbed), stop_at
        assert_same_end(run, undisturbed)


@pytest.mark.parametrize("killed_at", [1, 2, 9])
def test_a_run_that_dies_without_a_word_goes_on_from_its_last_checkpoint(
    killed_at: int, undisturbed: Run, corpus: Path, tmp_path: Path
) -> None:
    class Dies(Loud):
        def on_record(self, record: Record) -> dict[str, float] | None:
            if record.values.get("update") == killed_at:
                raise RuntimeError("killed")
            return None

    with pytest.raises(RuntimeError, match="killed"):
        train(corpus, out=tmp_path / "run", callbacks=[Dies(0.0)], **settings(max_updates=30))
    run = resume(tmp_path / "run")
    assert deterministic(run) == deterministic(undisturbed)
    assert_same_end(run, undisturbed)


def test_resume_takes_the_checkpoint_before_a_damaged_one(undisturbed: Run, corpus: Path, tmp_path: Path) -> None:
    every = settings(max_updates=30) | {"checkpoint": {"every_updates": 7, "keep": 3}}
    run = train(corpus, out=tmp_path / "run", **every)
    newest = sorted(run.checkpoints.iterdir())[-1]
    data = bytearray((newest / "tensors.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "tensors.safetensors").write_bytes(data)
    resume(run.path)
    notices = [r["text"] for r in run.records() if r["kind"] == "notice"]
    assert any(newest.name in text and "damaged" in text for text in notices)
    for name, tensor in final_state(run).items():
        assert torch.equal(tensor, final_state(undisturbed)[name]), name


def test_a_longer_budget_continues_a_finished_run(corpus: Path, tmp_path: Path) -> None:
    constant = {"schedule": "constant"}
    short = train(corpus, out=tmp_path / "short", **settings(max_updates=12, **constant))
    resume(short.path, max_updates=20)
    long = train(corpus, out=tmp_path / "long", **settings(max_updates=20, **constant))
    for name, tensor in final_state(short).items():
        assert torch.equal(tensor, final_state(long)[name]), name
    with pytest.raises(ConfigError, match="resume cannot change bptt"):
        resume(short.path, bptt=3)


def test_a_finished_run_may_be_resumed_any_number_of_times(corpus: Path, tmp_path: Path) -> None:
    run = train(corpus, out=tmp_path / "run", **settings(max_updates=4))
    before = {path.name for path in run.checkpoints.iterdir()}
    model, log = run.model.read_bytes(), deterministic(run)
    for _ in range(3):
        resume(run.path)
        assert {path.name for path in run.checkpoints.iterdir()} == before
        assert (run.model.read_bytes(), deterministic(run)) == (model, log)


def test_what_a_killed_process_left_half_written_is_cleared_away(corpus: Path, tmp_path: Path) -> None:
    run = train(corpus, out=tmp_path / "run", **settings(max_updates=4))
    (run.checkpoints / "update-00000003-00.tmp").mkdir()
    (run.checkpoints / "update-00000003-00.tmp" / "trainer.json").touch()
    (run.path / ".elman-writing-model.safetensors").touch()
    (run.path / "model.safetensors.tmp").write_text("mine")
    resume(run.path)
    assert [path.name for path in run.path.rglob("*.tmp")] == ["model.safetensors.tmp"]
    assert not list(run.path.rglob(".elman-*"))


def test_a_run_that_was_being_replaced_is_taken_for_a_run_until_the_end(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(corpus, out=tmp_path / "run", **settings(max_updates=2))
    remove = shutil.rmtree

    def dies(path: Path, **options: Any) -> None:
        if path.name == "samples":
            raise RuntimeError("killed")
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(RuntimeError, match="killed"):
        train(corpus, out=run.path, overwrite=True, **settings(max_updates=3))
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert not run.model.exists()
    again = train(corpus, out=run.path, resume="auto", **settings(max_updates=3))
    assert [r["update"] for r in again.records() if r["kind"] == "update"] == [1, 2, 3]


def test_resume_refuses_another_corpus(corpus: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text(corpus.read_text("utf-8"), "utf-8")
    run = train(own, out=tmp_path / "run", **settings(max_updates=3))
    own.write_text(corpus.read_text("utf-8").replace("cat", "act"), "utf-8")
    with pytest.raises(ModelFileError, match="corpus_sha256"):
        resume(run.path, max_updates=6)


def test_the_model_file_is_the_best_on_validation(undisturbed: Run) -> None:
    best = min((r for r in undisturbed.records() if r["kind"] == "evaluation"), key=lambda r: r["nats_per_token"])
    model = elman.load(undisturbed.path)
    assert model.provenance["updates"] == best["update"]
    assert model.provenance["valid"]["nats_per_token"] == best["nats_per_token"]


def test_the_model_file_is_the_best_of_any_course_and_nan_is_never_best(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = [math.nan, 3.0, 2.0, math.nan, 2.5]
    estimates = (Evaluation(Score(10 * nats, 10, 10, 10), "carried", 1, 1, 0, 9) for nats in course)
    monkeypatch.setattr("elman.training.loop.evaluate_split", lambda *given, **options: next(estimates))
    run = train(corpus, out=tmp_path / "run", **settings(max_updates=5) | {"evaluation": {"every_updates": 1}})
    best = [record["best"] for record in run.records() if record["kind"] == "evaluation"]
    assert best == [False, True, True, False, False]
    assert elman.load(run.path).provenance["updates"] == 3
    end = list(run.records())[-1]
    assert (end["best_update"], end["best_nats_per_token"]) == (3, 2.0)


def test_without_validation_the_last_weights_are_the_model(corpus: Path, tmp_path: Path) -> None:
    run = train(corpus, out=tmp_path / "run", data={"valid_fraction": 0.0}, **settings(max_updates=6))
    assert not [r for r in run.records() if r["kind"] == "evaluation"]
    assert any("no validation part" in r["text"] for r in run.records() if r["kind"] == "notice")
    assert elman.load(run.path).provenance["updates"] == 6


@pytest.mark.parametrize("size", [1, 2, 13, 60])
def test_small_corpora_shrink_the_layout_and_say_so(size: int, tmp_path: Path) -> None:
    path = tmp_path / "small.txt"
    path.write_bytes(b"hello, world\nhello, world\n"[:size] * (1 if size <= 26 else 3))
    run = train(
        path, out=tmp_path / "run", model=MODEL, training={"max_updates": 3}, sampling=SAMPLING | {"prompts": [""]}
    )
    updates = [r for r in run.records() if r["kind"] == "update"]
    assert len(updates) == 3
    assert all(r["tokens"] > 0 for r in updates)
    assert any("training.batch_size 32 becomes" in r["text"] for r in run.records() if r["kind"] == "notice")


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(TextError, match="empty"):
        train(tmp_path / "empty.txt", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_is_never_overwritten_unasked(undisturbed: Run, corpus: Path, tmp_path: Path) -> None:
    before = (undisturbed.path / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="elman resume"):
        train(corpus, out=undisturbed.path, **settings(max_updates=1))
    assert (undisturbed.path / "model.safetensors").read_bytes() == before
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something that is no run"):
        train(corpus, out=precious, overwrite=True, **settings(max_updates=1))
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_a_prompt_that_the_text_cannot_begin_is_refused_at_once(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"sampling\.prompts holds '§'"):
        train(corpus, out=tmp_path / "run", **settings(max_updates=1) | {"sampling": {"prompts": ["§"]}})


class Loud:
    """Adds a metric to every update, and an L2 term on the features to the loss."""

    def __init__(self, strength: float) -> None:
        self.strength, self.seen = strength, []

    def on_record(self, record: Record) -> dict[str, float] | None:
        self.seen.append(record.kind)
        return {"loudness": 3.0} if record.kind == "update" else None

    def loss(self, features_BTF: torch.Tensor, segment: object) -> torch.Tensor | None:
        return self.strength * features_BTF.square().mean()


def test_callbacks_see_records_add_metrics_and_add_to_the_loss(corpus: Path, tmp_path: Path) -> None:
    silent, loud = Loud(0.0), Loud(100.0)
    one = train(corpus, out=tmp_path / "one", callbacks=[silent], **settings(max_updates=5))
    two = train(corpus, out=tmp_path / "two", callbacks=[loud], **settings(max_updates=5))
    assert silent.seen.count("update") == 5
    assert {"evaluation", "sample", "checkpoint", "end"} <= set(silent.seen)
    updates = [[r for r in run.records() if r["kind"] == "update"] for run in (one, two)]
    assert all(r["loudness"] == 3.0 for r in updates[0])
    # The loss that is logged is the language model's own; the term acts through the gradient alone.
    assert updates[0][0]["nats"] == updates[1][0]["nats"]
    assert updates[0][0]["grad_norm"] != updates[1][0]["grad_norm"]
    assert updates[0][4]["nats"] != updates[1][4]["nats"]


def test_a_loss_that_is_not_finite_ends_with_the_remedy_and_keeps_the_weights(corpus: Path, tmp_path: Path) -> None:
    class Poison(Loud):
        def loss(self, features_BTF: torch.Tensor, segment: object) -> torch.Tensor | None:
            return features_BTF.sum() * (float("nan") if self.seen.count("update") == 3 else 0.0)

    with pytest.raises(TrainingError, match=r"after update 3, .* lower training\.learning_rate"):
        train(
            corpus,
            out=tmp_path / "run",
            callbacks=[Poison(0)],
            checkpoint={"every_updates": 1},
            **settings(max_updates=9),
        )
    run = Run.open(tmp_path / "run")
    assert sorted(run.checkpoints.iterdir())[-1].name.startswith("update-00000003-")
    assert all(tensor.isfinite().all() for tensor in final_state(run).values())
    assert elman.load(run.path).provenance["updates"] == 3


def test_budgets_end_training_at_their_measure(corpus: Path, tmp_path: Path) -> None:
    def last(**budget: float) -> dict[str, Any]:
        run = train(corpus, out=tmp_path / str(budget), **settings(**budget))
        return [r for r in run.records() if r["kind"] == "end"][-1]

    assert last(max_updates=4)["update"] == 4
    assert last(max_tokens=130)["tokens"] == 192  # 64 an update
    text = corpus.read_text("utf-8")
    assert last(max_epochs=1)["tokens"] == int(0.9 * len(text))
    assert last(max_seconds=0.2)["measured"]["seconds"] >= 0.2


def test_plateau_divides_the_rate_when_validation_does_not_improve(corpus: Path, tmp_path: Path) -> None:
    options = settings(max_updates=6, schedule="plateau", plateau_divisor=4.0, learning_rate=1.0, warmup_updates=0)
    options["evaluation"] = {"every_updates": 1}
    run = train(corpus, out=tmp_path / "run", **options)
    records = [r for r in run.records() if r["kind"] in ("update", "evaluation")]
    rate = 1.0
    for record in records:
        if record["kind"] == "update":
            assert record["learning_rate"] == rate
        elif not record["best"]:
            rate /= 4.0
    assert rate < 1.0


def test_resetting_streams_at_random_is_recorded_in_the_losses_alone(corpus: Path, tmp_path: Path) -> None:
    always = settings(max_updates=4)
    always["training"]["reset_probability"] = 0.999999
    carried = train(corpus, out=tmp_path / "carried", **settings(max_updates=4, reset_probability=0.0))
    reset = train(corpus, out=tmp_path / "reset", **always)
    losses = [[r["nats"] for r in run.records() if r["kind"] == "update"] for run in (carried, reset)]
    assert losses[0][0] == losses[1][0]  # the first segment starts from the initial state either way
    assert losses[0][1] != losses[1][1]


def test_a_dry_run_tells_the_plan_and_writes_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = dry_run(corpus, **settings(max_updates=1000))
    assert list(tmp_path.iterdir()) == []
    assert plan.config.training.max_updates == 1000
    assert (
        plan.parameters == elman.load(train(corpus, out="run", **settings(max_updates=1)).path).network.num_parameters
    )
    assert plan.updates_per_epoch == -(-plan.train_tokens // (4 * 16))
    assert plan.peak_memory_bytes > 10**7
    assert len(plan.sample) > 0
    json.dumps(plan.to_dict(), allow_nan=False)


def test_tensorboard_events_are_written_on_request(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(corpus, out=tmp_path / "run", tensorboard=True, **settings(max_updates=5))
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    logged = [event.value for event in events.Scalars("train/nats")]
    assert logged == pytest.approx([r["nats"] for r in run.records() if r["kind"] == "update"])


def test_runs_without_a_name_get_one_of_their_own(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [train(corpus, **settings(max_updates=1)).path for _ in range(2)]
    assert paths == [Path("runs/tiny-lstm"), Path("runs/tiny-lstm-2")]


def test_a_folder_that_is_being_written_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    class Meddler(Loud):
        def on_record(self, record: Record) -> None:
            for meddle in (
                lambda: train(corpus, out=tmp_path / "run", overwrite=True, **settings(max_updates=1)),
                lambda: resume(tmp_path / "run"),
            ):
                with pytest.raises(ElmanError, match="another process is writing the run"):
                    meddle()

    run = train(corpus, out=tmp_path / "run", callbacks=[Meddler(0.0)], **settings(max_updates=2))
    assert [r["kind"] for r in run.records()][-1] == "end"


def test_a_callback_that_fails_loses_nothing(undisturbed: Run, corpus: Path, tmp_path: Path) -> None:
    class Fails(Loud):
        def on_record(self, record: Record) -> dict[str, float]:
            return {"nats": 1.0} if record.values.get("update") == 7 else {}

    with pytest.raises(ConfigError, match="a callback adds 'nats', which the record already has"):
        train(corpus, out=tmp_path / "run", callbacks=[Fails(0.0)], **settings(max_updates=30))
    run = Run.open(tmp_path / "run")
    assert sorted(run.checkpoints.iterdir())[-1].name == "update-00000007-00"
    resume(run.path)
    assert deterministic(run) == deterministic(undisturbed)
    assert_same_end(run, undisturbed)


def test_damaged_checkpoints_stand_aside_and_do_not_push_out_whole_ones(corpus: Path, tmp_path: Path) -> None:
    run = train(corpus, out=tmp_path / "run", **settings(max_updates=4))
    for update in (90, 91):
        (run.checkpoints / f"update-{update:08d}-00").mkdir()
    resume(run.path, max_updates=6)
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == [
        "damaged-update-00000090-00",
        "damaged-update-00000091-00",
        "update-00000004-00",
        "update-00000006-00",
    ]


def test_a_run_goes_on_from_any_folder(
    undisturbed: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.txt").write_bytes(corpus.read_bytes())
    monkeypatch.chdir(tmp_path)
    run = train("tiny.txt", out="run", should_stop=Counting(20), **settings(max_updates=30))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = resume("../run")
    assert_same_end(run, undisturbed)
    assert elman.load(run.path).provenance["corpus"] == "tiny.txt"


def test_settings_that_changed_since_the_checkpoint_are_named(corpus: Path, tmp_path: Path) -> None:
    run = train(corpus, out=tmp_path / "run", **settings(max_updates=2))
    text = (run.path / "run.toml").read_text("utf-8")
    for old, new, name in (
        ("hidden_size = 12", "hidden_size = 14", "model.hidden_size 12, this run 14"),
        ('optimizer = "adamw"', 'optimizer = "sgd"', "training.optimizer 'adamw', this run 'sgd'"),
        ("bptt = 16", "bptt = 15", "training.bptt 16, this run 15"),
    ):
        assert old in text
        changed = text.replace(old, new).replace("adam_beta2 = 0.99\n", "" if "sgd" in new else "adam_beta2 = 0.99\n")
        (run.path / "run.toml").write_text(changed, "utf-8")
        with pytest.raises(ModelFileError, match=name):
            resume(run.path, max_updates=4)
    (run.path / "run.toml").write_text(text, "utf-8")
    run.metrics.unlink()
    resume(run.path, max_updates=4)
    assert [r["update"] for r in run.records() if r["kind"] == "update"] == [3, 4]


def test_a_disk_that_cannot_be_written_is_one_line_and_leaves_no_half_files(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    sync, calls = os.fsync, iter(range(10**6))

    def full(descriptor: int) -> None:
        if next(calls) > 12:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    busy = settings(max_updates=9) | {"checkpoint": {"every_updates": 1}}
    with pytest.raises(ElmanError, match=r"cannot write .*No space left on device.*elman resume"):
        train(corpus, out=tmp_path / "run", **busy)
    monkeypatch.setattr(os, "fsync", sync)
    assert not [*(tmp_path / "run").rglob("*.tmp"), *(tmp_path / "run").rglob(".elman-*")]
    resume(tmp_path / "run")


@pytest.mark.parametrize("spoilt", ["file/run", "link", "x" * 300])
def test_a_run_folder_that_cannot_be_made_is_refused_at_once(spoilt: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(ConfigError, match="give another --out"):
        train(corpus, out=tmp_path / spoilt, **settings(max_updates=1))


def test_a_cell_named_by_a_settings_file_alone_is_not_run(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "evil.toml").write_text(f'[model]\nkind = "{tmp_path / "evil.py"}:Evil"\n')
    with pytest.raises(ConfigError, match=r"names the cell .*--model\.kind"):
        train(corpus, config=tmp_path / "evil.toml", out=tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_where_documents_reset_the_state_estimates_reset_it_too(tmp_path: Path) -> None:
    lines = [f'{{"text": "the {word} sat on the mat"}}' for word in ("cat", "dog", "moon", "log") * 40]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    options = settings(max_updates=2) | {"data": {"reset_at_documents": True}}
    run = train(tmp_path / "rows.jsonl", out=tmp_path / "run", **options)
    assert [r["state_policy"] for r in run.records() if r["kind"] == "evaluation"] == ["reset"]
    assert elman.evaluate(run.path).evaluation.state_policy == "reset"


def test_a_tokenizer_file_that_changed_since_is_noticed(corpus: Path, tmp_path: Path) -> None:
    def write_tokenizer(size: int) -> None:
        config = TokenizerConfig(level="bpe", max_size=size)
        trained = train_tokenizer(config, StringSource(corpus.read_text("utf-8")))
        (tmp_path / "tokenizer.json").write_text(json.dumps(trained.to_dict()["tokenizer"]), "utf-8")

    write_tokenizer(300)
    options = settings(max_updates=3) | {"tokenizer": {"level": "bpe", "path": str(tmp_path / "tokenizer.json")}}
    run = train(corpus, out=tmp_path / "run", **options)
    before = elman.evaluate(run.path).evaluation
    write_tokenizer(280)
    assert elman.evaluate(run.path).evaluation == before
    with pytest.raises(ModelFileError, match="tokenizer_sha256"):
        resume(run.path, max_updates=5)
    (tmp_path / "tokenizer.json").unlink()
    assert elman.evaluate(run.path).evaluation == before


def test_resume_auto_starts_a_run_or_goes_on_with_it(corpus: Path, undisturbed: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(corpus, out=out, resume="auto", should_stop=Counting(40), **settings(max_updates=30))
    assert [r["kind"] for r in Run(out).records()][-1] == "stopped"
    run = train(corpus, out=out, resume="auto", **settings(max_updates=30))
    assert deterministic(run) == deterministic(undisturbed)
    assert_same_end(run, undisturbed)
    longer = train(corpus, out=out, resume="auto", **settings(max_updates=31))
    assert [r["update"] for r in longer.records() if r["kind"] == "update"] == list(range(1, 32))


def test_resume_auto_begins_anew_what_was_killed_before_it_saved_anything(corpus: Path, tmp_path: Path) -> None:
    run = train(corpus, out=tmp_path / "run", **settings(max_updates=2))
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ConfigError, match="holds a model but no checkpoint"):  # which is not to be lost
        train(corpus, out=tmp_path / "run", resume="auto", **settings(max_updates=3))
    run.model.unlink()
    (run.checkpoints / "update-00000000-00.tmp").mkdir(parents=True)
    again = train(corpus, out=tmp_path / "run", resume="auto", **settings(max_updates=3))
    assert [r["update"] for r in again.records() if r["kind"] == "update"] == [1, 2, 3]


def test_resume_auto_refuses_other_settings_and_goes_by_the_folder_alone(corpus: Path, tmp_path: Path) -> None:
    train(corpus, out=tmp_path / "run", **settings(max_updates=2))
    with pytest.raises(ConfigError, match=r"has training\.bptt 16, 8 was given: give the settings"):
        train(corpus, out=tmp_path / "run", resume="auto", **settings(max_updates=2, bptt=8))
    other = settings(max_updates=2) | {"model": {**MODEL, "kind": "gru"}}
    with pytest.raises(ConfigError, match=r"has model\.kind 'lstm', 'gru' was given"):
        train(corpus, out=tmp_path / "run", resume="auto", **other)
    with pytest.raises(ConfigError, match="give --out"):
        train(corpus, resume="auto", **settings(max_updates=2))
    with pytest.raises(ConfigError, match="leave --overwrite out"):
        train(corpus, out=tmp_path / "run", resume="auto", overwrite=True, **settings(max_updates=2))


def test_resume_auto_goes_by_the_budgets_given_now(corpus: Path, tmp_path: Path) -> None:
    train(corpus, out=tmp_path / "run", **settings(max_updates=4))
    run = train(corpus, out=tmp_path / "run", resume="auto", **settings(max_tokens=4 * 16 * 6))
    assert [r["update"] for r in run.records() if r["kind"] == "update"] == list(range(1, 7))


def test_a_folder_that_a_killed_run_began_is_taken(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "samples").mkdir(parents=True)
    (tmp_path / "run" / ".elman-writing-origin.json").touch()
    assert list(train(corpus, out=tmp_path / "run", resume="auto", **settings(max_updates=1)).records())
    assert not list((tmp_path / "run").rglob(".elman-*"))
