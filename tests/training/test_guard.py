"""Numbers that go wrong: a skipped batch leaves no trace, several in a row lead back, and in the end to a report."""

from __future__ import annotations

import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import elman
from elman.data.streams import Segment, Streams
from elman.errors import TrainingError
from elman.models.state import State
from elman.training import keeper
from elman.training.averaging import Average
from elman.training.checkpoint import newest_checkpoint
from elman.training.folder import Run
from elman.training.gradients import Gradients
from elman.training.guard import MAX_IN_A_ROW, MAX_RETURNS, Guard
from elman.training.history import History
from elman.training.keeper import Keeper
from elman.training.loop import Callback
from elman.training.optimizers import Optimizer
from elman.training.run import dry_run, resume, train

NEVER = 10**9


def settings(**training: Any) -> dict[str, Any]:
    return {
        "model": {"hidden_size": 12, "embedding_size": 8, "dropout": 0.2},
        "sampling": {"every_updates": NEVER, "max_new_tokens": 5},
        "training": {"batch_size": 4, "bptt": 16, "warmup_updates": 4, "learning_rate": 0.02, "num_threads": 1}
        | {"reset_probability": 0.1}
        | training,
        "evaluation": {"every_updates": NEVER},
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tiny.txt"
    path.write_text(tiny_text * 2, encoding="utf-8", newline="")
    return path


class Poison(Callback):
    """Makes the loss of chosen calls infinite; every segment is one call."""

    def __init__(self, calls: set[int]) -> None:
        self.calls, self.count = calls, -1

    def loss(self, features_BTF: torch.Tensor, segment: object) -> torch.Tensor | None:
        self.count += 1
        return features_BTF.sum() * (math.inf if self.count in self.calls else 0.0)


class Harmless(Callback):
    """Adds the same term without the poison."""

    def loss(self, features_BTF: torch.Tensor, segment: object) -> torch.Tensor | None:
        return features_BTF.sum() * 0.0


def tensors(run: Run) -> dict[str, torch.Tensor]:
    return load_file(sorted(run.checkpoints.iterdir())[-1] / "tensors.safetensors")


def updates(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "measured"} for r in run.records() if r["kind"] == "update"]


def of_kind(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.records() if record["kind"] == kind]


@pytest.fixture(scope="module")
def per_epoch(corpus: Path) -> int:
    count = dry_run(corpus, **settings(batch_size=8)).updates_per_epoch
    assert 8 < count < 18
    return count


@pytest.mark.parametrize("bad", [{0}, {3}, {5, 6}, ("last", "first")], ids=str)
def test_a_skipped_batch_leaves_no_trace(bad, per_epoch, corpus, tmp_path, monkeypatch):
    bad = {{"last": per_epoch - 1, "first": per_epoch}.get(index, index) for index in bad}
    hurt = train(corpus, out=tmp_path / "hurt", callbacks=[Poison(bad)], **settings(batch_size=8, max_updates=20))
    assert [s["update"] for s in of_kind(hurt, "skipped")] == [k - sum(b < k for b in bad) for k in sorted(bad)]
    assert all("a loss of" in s["text"] for s in of_kind(hurt, "skipped"))

    segment, kept = Streams.segment, [index for index in range(100) if index not in bad]

    def others_alone(self: Streams, index: int) -> Segment:
        found = segment(self, kept[index])
        # Where the batch that starts an epoch is left out, the state is initial before the one after it.
        return replace(found, starts_anew=found.starts_anew or kept[index] - 1 in bad & {per_epoch})

    monkeypatch.setattr(Streams, "segment", others_alone)
    unhurt = train(corpus, out=tmp_path / "unhurt", callbacks=[Harmless()], **settings(batch_size=8, max_updates=20))
    assert updates(hurt) == updates(unhurt)
    one, other = tensors(hurt), tensors(unhurt)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_run_with_skipped_batches_goes_on_exactly_where_it_stopped(corpus, tmp_path):
    even = {"schedule": "constant"}  # so that the rates do not depend on the budget
    whole = train(corpus, out=tmp_path / "whole", callbacks=[Poison({3, 12, 13})], **settings(max_updates=20, **even))
    parts = train(corpus, out=tmp_path / "parts", callbacks=[Poison({3})], **settings(max_updates=7, **even))
    parts = resume(parts.path, callbacks=[Poison({4, 5})], max_updates=20)  # 8 segments were read before
    assert updates(parts)[7:] == updates(whole)[7:]
    assert [s["update"] for s in of_kind(whole, "skipped")] == [3, 11, 11]
    assert [s["update"] for s in of_kind(parts, "skipped")] == [3, 11, 11]


class Photographer(Callback):
    """Keeps the run folder as a process that is killed at an update would leave it."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at = folder, at

    def on_record(self, record):
        if record.kind == "update" and record.values["update"] == self.at:
            shutil.copytree(self.folder, self.folder.with_name("killed"))


@pytest.mark.parametrize("bad", [{4}, {3, 4}, {2, 4, 5}], ids=str)
def test_a_batch_skipped_right_after_a_checkpoint_is_told_once_after_a_resume(bad, corpus, tmp_path):
    options = settings(max_updates=10) | {"checkpoint": {"every_updates": 3}}
    callbacks = [Poison(bad), Photographer(tmp_path / "whole", at=5)]
    whole = train(corpus, out=tmp_path / "whole", callbacks=callbacks, **options)
    killed = Run.open(tmp_path / "killed")
    read = max(s["segments_read"] for s in of_kind(whole, "skipped"))
    assert of_kind(killed, "skipped") == [s for s in of_kind(whole, "skipped") if s["segments_read"] <= read]
    _, checkpoint, _ = newest_checkpoint(killed.checkpoints)
    done = checkpoint.trainer["segments_read"]
    assert checkpoint.trainer["update"] == 3
    assert any(index >= done for index in bad)  # one at least comes again
    resume(killed.path, callbacks=[Poison({index - done for index in bad})])
    assert of_kind(killed, "skipped") == of_kind(whole, "skipped")
    assert updates(killed) == updates(whole)
    assert all(torch.equal(tensor, tensors(whole)[name]) for name, tensor in tensors(killed).items())


def test_a_return_that_comes_again_after_a_resume_is_told_once(corpus, tmp_path):
    options = settings(max_updates=9, schedule="constant", warmup_updates=0) | {"checkpoint": {"every_updates": 5}}
    seen = []

    class AfterReturn(Callback):
        def on_record(self, record):
            seen.append(record.kind)
            if seen[-2:] == ["returned", "update"]:
                shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    callbacks = [TooFast(after=7, limit=0.011), AfterReturn()]
    whole = train(corpus, out=tmp_path / "whole", callbacks=callbacks, **options)
    killed = Run.open(tmp_path / "killed")
    assert len(of_kind(killed, "returned")) == 1
    resume(killed.path, callbacks=[TooFast(after=7, limit=0.011)])
    assert [r["update"] for r in of_kind(killed, "returned")] == [r["update"] for r in of_kind(whole, "returned")]
    assert updates(killed) == updates(whole)


class Dear:
    """Makes what is read from the initial state dearer by 5 nats for each epoch, and chosen batches as well."""

    def __init__(self) -> None:
        self.beginnings: list[int] = []
        """The numbers of the batches that began an epoch."""
        self.spikes: set[int] = set()
        self.count = 0

    def price(self, segment: Segment, before: State) -> float:
        is_initial = not any(tensor.any() for tensor in before.tensors.values())
        is_dear = is_initial or self.count in self.spikes
        self.beginnings += [self.count] if segment.starts_anew else []
        self.count += 1
        return 5.0 * len(self.beginnings) if is_dear else 0.0


@pytest.fixture
def dear(monkeypatch) -> Dear:
    compute, dear = Gradients.compute, Dear()

    def with_price(gradients, segment, whole, before, noise):
        loss, grad_norm, state = compute(gradients, segment, whole, before, noise)
        return loss + dear.price(whole, before), grad_norm, state

    monkeypatch.setattr(Gradients, "compute", with_price)
    return dear


EASY: dict[str, Any] = {"bptt": 4, "reset_probability": 0.0, "learning_rate": 1e-3, "spike_deviations": 6.0}


@pytest.mark.parametrize(("batch_size", "max_epochs"), [(2, 2.5), (5, 4.5), (16, 20.0), (28, 25.0), (200, 150.0)])
def test_the_beginning_of_an_epoch_is_no_spike_with_carried_state(batch_size, max_epochs, dear, corpus, tmp_path):
    """Refused, it would leave the state as it is at a beginning, and the next batch would be refused for that."""
    options = settings(batch_size=batch_size, max_epochs=max_epochs, **EASY)
    run = train(corpus, out=tmp_path / "run", **options)
    assert len(of_kind(run, "update")) > 200
    assert len(dear.beginnings) == math.ceil(max_epochs)
    assert not of_kind(run, "skipped")


def test_what_follows_a_beginning_that_was_skipped_is_no_spike_either(dear, corpus, tmp_path):
    per_epoch = dry_run(corpus, **settings(batch_size=2, **EASY)).updates_per_epoch
    assert per_epoch > 128
    poison = Poison({per_epoch, per_epoch + 1})
    run = train(corpus, out=tmp_path / "run", callbacks=[poison], **settings(batch_size=2, max_epochs=1.5, **EASY))
    assert [skipped["update"] for skipped in of_kind(run, "skipped")] == [per_epoch] * 2


def test_a_spike_after_the_beginning_is_skipped(dear, corpus, tmp_path):
    dear.spikes = {300, 301}
    run = train(corpus, out=tmp_path / "run", **settings(batch_size=2, max_updates=310, **EASY))
    assert dear.beginnings[1] < 300
    assert [skipped["update"] for skipped in of_kind(run, "skipped")] == [300] * 2


class Broken(Exception):
    """Comes in the midst of an update."""


@pytest.mark.parametrize(("owner", "name"), [(Optimizer, "step"), (Average, "update"), (Guard, "objection")])
@pytest.mark.parametrize("is_done", [False, True])
def test_an_update_that_was_broken_off_is_not_saved(owner, name, is_done, corpus, tmp_path, monkeypatch):
    options = settings(max_updates=12, averaging="exponential") | {"checkpoint": {"every_updates": 3}}
    whole = train(corpus, out=tmp_path / "whole", **options)
    call, count = getattr(owner, name), 0

    def breaks(*words: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        found = call(*words, **more) if is_done or count != 8 else None
        if count == 8:
            raise Broken
        return found

    monkeypatch.setattr(owner, name, breaks)
    with pytest.raises(Broken):
        train(corpus, out=tmp_path / "broken", **options)
    run = resume(tmp_path / "broken")
    assert updates(run) == updates(whole)
    assert all(torch.equal(tensor, tensors(whole)[name]) for name, tensor in tensors(run).items())


def test_a_run_that_goes_on_says_that_returns_have_lowered_its_rate(corpus, tmp_path):
    options = settings(max_updates=9, schedule="constant", warmup_updates=0) | {"checkpoint": {"every_updates": 5}}
    run = train(corpus, out=tmp_path / "run", callbacks=[TooFast(after=7, limit=0.011)], **options)
    (back,) = of_kind(run, "returned")
    assert back["num_returns"] == 1
    resume(run.path, max_updates=10)
    told = [notice["text"] for notice in of_kind(run, "notice")]
    assert "after 1 return to a saved state the rate stays at 0.5 of the one that is set" in told


@pytest.mark.parametrize("at", [70, 110])
def test_advice_is_told_once_and_when_an_undisturbed_training_tells_it(at, corpus, tmp_path):
    """A rate that is far too high, seen over the updates 1 to 64; the newest checkpoint is of update 50 or 100."""
    options = settings(max_updates=130, warmup_updates=0, learning_rate=3.0) | {"checkpoint": {"every_updates": 50}}
    whole = train(corpus, out=tmp_path / "whole", callbacks=[Photographer(tmp_path / "whole", at=at)], **options)
    killed = Run.open(tmp_path / "killed")
    resume(killed.path)
    (advice,) = [r for r in of_kind(whole, "notice") if r.get("update")]
    assert advice["update"] == 64
    assert "too high" in advice["text"]

    def told(run: Run) -> list[tuple[str, Any, Any]]:
        records = [r for r in run.records() if r["kind"] != "checkpoint" and not r.get("passing")]
        return [(r["kind"], r.get("update"), r.get("text")) for r in records]

    assert told(killed) == told(whole)


def test_advice_of_what_was_taken_back_does_not_silence_what_comes_later(corpus, tmp_path):
    """Skipped batches and a loss that is too high are both the rate's; the first are gone with the return."""
    options = settings(max_updates=130, warmup_updates=0, learning_rate=6.0)
    run = train(corpus, out=tmp_path / "run", callbacks=[Poison(set(range(5, 10)))], **options)
    assert len(of_kind(run, "returned")) == 1
    (advice,) = [r for r in of_kind(run, "notice") if "too high" in r["text"]]
    assert advice["update"] == 64


@pytest.mark.parametrize("call", [3, 9, 16, 17, 18, None])
@pytest.mark.parametrize(("owner", "name"), [(Keeper, "_keep"), (keeper, "model_bytes")], ids=["record", "model"])
def test_what_was_not_kept_before_a_break_comes_again(owner, name, call, corpus, tmp_path, monkeypatch):
    """The log, the best model and what the checkpoint calls the best agree, wherever between two records it ends."""
    options = settings(max_updates=20) | {"checkpoint": {"every_updates": 7}, "evaluation": {"every_updates": 1}}
    options["data"] = {"valid_fraction": 0.2, "test_fraction": 0.0}
    kept, count, at = getattr(owner, name), 0, 0

    def breaks(*words: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return kept(*words)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks)
        whole = train(corpus, out=tmp_path / "whole", **options)
        at, count = call or count, 0  # none: the last
        with pytest.raises(KeyboardInterrupt):
            train(corpus, out=tmp_path / "broken", **options)
    run = resume(tmp_path / "broken")
    assert updates(run) == updates(whole)
    judged = [
        [(r["update"], r["nats_per_token"], r["best"]) for r in of_kind(one, "evaluation")] for one in (run, whole)
    ]
    assert judged[0] == judged[1]
    best = [update for update, _, is_best in judged[0] if is_best][-1]
    assert elman.load(run.path).provenance["updates"] == best
    assert all(torch.equal(tensor, tensors(whole)[name]) for name, tensor in tensors(run).items())


def test_a_batch_read_from_the_initial_state_is_no_spike_and_not_remembered():
    guard = Guard(6.0)
    assert not any(guard.objection(1.0, 1.0) for _ in range(128))
    assert not guard.objection(2.0, 1.0, is_fresh=True)
    assert guard.objection(1.07, 1.0)  # six hundredths are the limit, as if the 2 had not been
    for loss, norm in ((math.inf, 1.0), (1.0, math.nan)):
        assert guard.objection(loss, norm, is_fresh=True)


def test_a_spike_is_told_from_noise_by_the_losses_before_it():
    guard, rng = Guard(6.0), np.random.default_rng(1)
    losses = (2.0 + 0.1 * rng.standard_normal(200)).tolist()
    assert not any(guard.objection(loss, 1.0) for loss in losses)
    mean, deviation = statistics.fmean(losses[-128:]), statistics.pstdev(losses[-128:])
    for number in (1, 2):  # a spike is not among the losses that the next is held against
        assert guard.objection(mean + 6.01 * deviation, 1.0)
        assert guard.num_in_a_row == number
    assert not guard.objection(mean + 5.99 * deviation, 1.0)
    assert guard.num_in_a_row == 0
    assert not guard.objection(0.001, 1.0)  # falling is no fault
    for loss, norm in ((math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)):
        assert "a loss of" in guard.objection(loss, norm)
    assert guard.num_in_a_row == 4
    assert not Guard(None).objection(1e9, 1.0)


def test_losses_at_rest_and_a_short_past_make_no_spikes():
    guard = Guard(6.0)
    for _ in range(127):
        assert not guard.objection(1.0, 1.0)
    assert not guard.objection(50.0, 1.0)  # the 128th: nothing to hold it against yet
    guard = Guard(6.0)
    for _ in range(128):
        guard.objection(1.0, 1.0)
    assert not guard.objection(1.05, 1.0)
    assert guard.objection(1.07, 1.0)  # one in a hundred counts as deviation at least


def test_the_guard_is_part_of_what_is_saved():
    guard = Guard(6.0)
    for loss in (1.0, 2.0, math.nan):
        guard.objection(loss, 1.0)
    again = Guard(6.0)
    again.restore(guard.to_dict())
    assert again.to_dict() == guard.to_dict()
    assert again.num_in_a_row == 1


class TooFast(Callback):
    """Every batch goes wrong after some update, until the rate is low enough."""

    def __init__(self, after: int, limit: float) -> None:
        self.after, self.limit, self.update, self.rates = after, limit, 0, [math.inf]

    def on_record(self, record):
        if record.kind in ("update", "returned"):
            self.update = record.values["update"]
            self.rates.append(record.values.get("learning_rate", self.rates[-1]))

    def loss(self, features_BTF, segment):
        fails = self.update >= self.after and self.rates[-1] > self.limit
        return features_BTF.sum() * (math.nan if fails else 0.0)


def test_several_in_a_row_lead_back_to_the_last_saved_state_at_half_the_rate(corpus, tmp_path):
    run = train(
        corpus,
        out=tmp_path / "run",
        callbacks=[TooFast(after=7, limit=0.011)],
        checkpoint={"every_updates": 5},
        **settings(max_updates=12, schedule="constant", warmup_updates=0),
    )
    (returned,) = of_kind(run, "returned")
    assert returned["update"] == 5
    assert "back to update 5" in returned["text"]
    rates = {r["update"]: r["learning_rate"] for r in updates(run)}
    assert list(rates) == list(range(1, 13))  # what came after update 5 was taken back and came again
    assert [rates[1], rates[5], rates[6], rates[12]] == pytest.approx([0.02, 0.02, 0.01, 0.01])
    assert all(tensor.isfinite().all() for tensor in tensors(run).values())


def test_in_the_end_it_stops_and_says_what_to_do(corpus, tmp_path):
    with pytest.raises(
        TrainingError, match=r"5 batches in a row .* after 3 returns .* set training\.max_grad_norm; .* finite"
    ):
        train(
            corpus,
            out=tmp_path / "run",
            callbacks=[TooFast(after=3, limit=0.0)],
            checkpoint={"every_updates": 1},
            **settings(max_updates=9, max_grad_norm=None),
        )
    run = Run.open(tmp_path / "run")
    _, checkpoint, _ = newest_checkpoint(run.checkpoints)
    assert checkpoint.trainer["guard"]["num_returns"] == MAX_RETURNS
    assert checkpoint.trainer["guard"]["rate"] == 0.5**MAX_RETURNS  # the last that was tried
    assert [returned["num_returns"] for returned in of_kind(run, "returned")] == list(range(1, MAX_RETURNS + 1))
    assert len(of_kind(run, "skipped")) == MAX_IN_A_ROW  # those before a return were taken back with it
    assert all(tensor.isfinite().all() for tensor in tensors(run).values())


def test_a_last_update_that_cannot_be_saved_is_a_failure(corpus, tmp_path):
    options = settings(max_updates=1, learning_rate=1e39, warmup_updates=0)
    options["sampling"] = {"prompts": []}  # nothing is drawn from such weights
    with pytest.raises(TrainingError, match=r"update 1 is not saved, and no other .* lower training\.learning_rate"):
        train(corpus, out=tmp_path / "run", **options)
    assert math.isfinite(elman.evaluate(tmp_path / "run", split="test").evaluation.score.nats_per_token)


def test_what_is_kept_in_the_end_is_a_model_that_gives_numbers(corpus, tmp_path):
    with pytest.raises(TrainingError, match="the weights of update 0 are kept"):
        train(corpus, out=tmp_path / "run", **settings(max_updates=60, learning_rate=1e38))
    assert math.isfinite(elman.evaluate(tmp_path / "run", split="valid").evaluation.score.nats_per_token)


JUDGED: dict[str, Any] = {"checkpoint": {"every_updates": 5}, "evaluation": {"every_updates": 4}}
"""An estimate at update 8, after the state that a training which goes wrong then returns to."""


def test_the_best_model_outlives_a_return(corpus, tmp_path):
    options = settings(max_updates=12) | JUDGED | {"data": {"valid_fraction": 0.2, "test_fraction": 0.0}}
    with pytest.raises(TrainingError, match="the weights of update 8 are kept"):
        train(corpus, out=tmp_path / "run", callbacks=[TooFast(after=8, limit=0.0)], **options)
    run = Run.open(tmp_path / "run")
    kept = elman.load(run.path).provenance
    assert kept["updates"] == 8
    best = [record for record in of_kind(run, "evaluation") if record["best"]][-1]
    assert best["update"] == 8
    assert History.of(run).best == best
    assert best["nats_per_token"] == kept["valid"]["nats_per_token"]
    _, checkpoint, _ = newest_checkpoint(run.checkpoints)
    assert (checkpoint.trainer["update"], checkpoint.trainer["best_update"]) == (5, 8)


def test_the_plateau_is_that_of_the_state_returned_to(corpus, tmp_path):
    estimates = []

    class Estimates(Callback):
        def on_record(self, record):
            if record.kind == "evaluation":
                estimates.append(record.values["nats_per_token"])

    options = settings(max_updates=9, schedule="plateau", warmup_updates=0) | JUDGED
    options["data"] = {"valid_fraction": 0.2, "test_fraction": 0.0}
    run = train(corpus, out=tmp_path / "run", callbacks=[TooFast(after=8, limit=0.011), Estimates()], **options)
    at_4, at_8, again_at_8, _ = estimates
    assert at_8 < again_at_8 < at_4
    assert [r["learning_rate"] for r in updates(run) if r["update"] in (8, 9)] == pytest.approx([0.01, 0.01])
