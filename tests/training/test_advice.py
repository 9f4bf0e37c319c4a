"""What is plainly wrong is said, once and with a remedy; a training as it should be hears nothing."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from elman.settings import Config, preset_names, resolve
from elman.training.advice import WINDOW, Advisor
from elman.training.run import train

UNIGRAM = 3.3
"""Nats of a character whose frequency alone is known."""


VOCABULARY = 60


def advisor_of(config: Config, updates_per_epoch: int, batch_size: int | None = None, processes: int = 1) -> Advisor:
    return Advisor(
        config,
        batch_size=config.training.batch_size if batch_size is None else batch_size,
        processes=processes,
        updates_per_epoch=updates_per_epoch,
        tokens_per_epoch=1000 * updates_per_epoch,
        vocab_size=VOCABULARY,
        unigram_nats=lambda: UNIGRAM,
    )


class Course:
    """A training that is made up, update by update."""

    def __init__(self, preset: str | None = None, updates_per_epoch: int = 500, **training: Any) -> None:
        self.advisor = advisor_of(resolve({"training": training}, preset=preset), updates_per_epoch)
        self.update = 0
        self.said: list[str] = []
        self.random = random.Random(1)

    def train(self, losses: list[float], noise: float = 0.05, waiting: float = 0.02) -> Course:
        for loss in losses:
            self.update += 1
            values = {"update": self.update, "nats": loss + self.random.gauss(0, noise), "learning_rate": 0.01}
            self.said += self.advisor.remarks("update", values, {"seconds": 0.05, "data_seconds": 0.05 * waiting})
        return self

    def judge(self, nats: float) -> Course:
        values = {"update": self.update, "nats_per_token": nats}
        self.said += self.advisor.remarks("evaluation", values, {"seconds": 1.0})
        return self

    def skip(self) -> Course:
        self.said += self.advisor.remarks("skipped", {"update": self.update, "nats": math.inf}, {})
        return self


def test_who_does_worse_than_a_guess_hears_that_the_rate_is_too_high():
    guess = math.log(VOCABULARY)
    assert Course(warmup_updates=0).train([guess] * 4 * WINDOW).said == []  # it learns nothing: no fault of a high rate
    assert Course(warmup_updates=500).train([1.2 * guess] * 4 * WINDOW).said == []
    (text,) = Course(warmup_updates=0, learning_rate=0.5).train([1.2 * guess] * 4 * WINDOW).said
    assert f"a guess among all would cost {guess:.2f}" in text
    assert "a third of training.learning_rate 0.5" in text


def test_an_estimate_that_is_often_not_trusted_wants_more_negatives():
    (text,) = Course(num_negatives=20).skip().skip().skip().skip().said
    assert "an estimate by 20 negatives; take more training.num_negatives" in text


def falling(num_updates: int, low: float = 1.5, high: float = 4.2) -> list[float]:
    """The usual course of a loss: a power of the number of updates."""
    return [low + (high - low) * (1 + update / 20) ** -0.6 for update in range(num_updates)]


def test_a_training_as_it_should_be_hears_nothing():
    course = Course()
    for epoch in range(6):
        course.train(falling(3000)[500 * epoch : 500 * (epoch + 1)], noise=0.1).judge(2.5 - 0.15 * epoch)
    assert course.said == []


def test_texts_of_several_kinds_make_the_loss_uneven_and_are_no_fault():
    uneven = [loss + 0.25 * math.sin(update / 40) for update, loss in enumerate(falling(4000))]
    assert Course().train(uneven).said == []


def test_estimates_that_wander_are_no_overfitting():
    course, losses = Course(), falling(2000)
    for number, nats in enumerate((2.0, 1.8, 1.7, 1.71, 1.72, 1.73, 1.69, 1.70, 1.71, 1.72)):
        course.train(losses[200 * number : 200 * (number + 1)]).judge(nats)
    assert course.said == []


def test_a_loss_that_rises_for_good_says_that_the_rate_is_too_high():
    course = Course(learning_rate=0.3).train(falling(400)).train([3.4] * 4 * WINDOW, noise=0.2)
    (text,) = course.said
    assert "has risen from" in text
    assert "a third of training.learning_rate 0.3" in text
    assert "lr-find" in text
    muon = Course(preset="cpu-1min").train(falling(400)).train([3.4] * 4 * WINDOW)
    assert "training.learning_rate 0.02 and training.matrix_learning_rate 0.04" in muon.said[0]


def test_a_short_rise_is_no_fault():
    assert Course().train(falling(400)).train([3.4] * (WINDOW // 2)).train(falling(900)[400:]).said == []


def test_a_model_that_learns_nothing_but_frequencies_is_told_so():
    course = Course().train([4.2, 3.9, 3.6]).train([UNIGRAM + 0.05] * 1000, noise=0.02)
    (text,) = course.said
    assert "no less than its frequency alone" in text
    assert Course().train([4.2, 3.9, 3.6]).train([UNIGRAM - 0.2] * 1000, noise=0.02).said == []


def test_batches_skipped_again_and_again_say_that_the_rate_is_too_high():
    course = Course().train(falling(100)).skip().skip()
    assert course.said == []
    course.skip().skip().train([3.9] * 4 * WINDOW)
    (text,) = course.said
    assert "3 batches were skipped" in text


def test_waiting_for_data_is_told():
    course = Course().train(falling(2 * WINDOW), waiting=0.2)
    assert course.said == []
    course.train(falling(500)[2 * WINDOW :], waiting=0.6)
    (text,) = course.said
    assert "60% of the time" in text
    assert "ELMAN_CACHE" in text


def test_overfitting_is_told_with_the_update_that_was_best():
    course = Course()
    for number, nats in enumerate((2.2, 2.0, 1.9, 1.95, 2.0, 2.05, 2.2)):
        course.train(falling(1000)[100 * number : 100 * (number + 1)], noise=0.01).judge(nats)
    (text,) = course.said
    assert "best at update 300 (1.900 nats, now 2.050)" in text
    assert "model.dropout" in text


@pytest.mark.parametrize(("of_training", "of_estimates"), [(4.5, 0.0), (0.0, 4.5)])
def test_a_model_that_knows_less_than_a_guess_does_not_overfit(of_training: float, of_estimates: float):
    course, losses = Course(), [of_training + loss for loss in falling(1000)]
    for number, nats in enumerate((2.2, 2.0, 1.9, 1.95, 2.0, 2.05, 2.2)):
        course.train(losses[100 * number : 100 * (number + 1)]).judge(of_estimates + nats)
    assert not any("overfits" in text for text in course.said)


def test_a_text_that_was_read_once_is_not_learned_by_heart():
    course = Course(updates_per_epoch=2000)
    for number, nats in enumerate((2.2, 2.0, 1.9, 1.95, 2.0, 2.05, 2.2)):
        course.train(falling(1000)[100 * number : 100 * (number + 1)], noise=0.01).judge(nats)
    assert course.said == []


def test_an_estimate_that_is_no_number_says_nothing():
    course = Course().train(falling(100)).judge(2.0)
    assert course.advisor.remarks("evaluation", {"update": 101, "nats_per_token": None}, {}) == []


def test_estimates_that_get_worse_with_the_training_loss_are_no_overfitting():
    course = Course()
    course.train([2.0] * 100).judge(1.9)
    for nats in (2.0, 2.1, 2.2):
        course.train([2.1] * 100).judge(nats)
    assert course.said == []


def test_a_batch_that_is_large_for_the_text_is_told_before_anything_is_trained():
    config = resolve({"training": {"batch_size": 64, "max_seconds": 60}})
    (text,) = advisor_of(config, 4).at_start()
    assert "only 4 updates; take training.batch_size 5" in text
    (text,) = advisor_of(config, 1, batch_size=50).at_start()  # what the text has room for
    assert "only 1 update; take training.batch_size 1" in text
    assert advisor_of(config, 10).at_start() == []
    assert advisor_of(config, 1, batch_size=1).at_start() == []
    (text,) = advisor_of(config, 4, batch_size=4 * 64, processes=4).at_start()
    assert "take training.batch_size 5" in text  # of each process
    assert advisor_of(config, 1, batch_size=4, processes=4).at_start() == []


@pytest.mark.parametrize(
    ("training", "most", "proposed"),
    [
        ({"warmup_updates": 1_000_000, "max_updates": 100}, 100, 10),
        ({"warmup_updates": 101, "max_updates": 100, "max_epochs": 9}, 100, 10),
        ({"warmup_updates": 51, "max_epochs": 2.5, "max_updates": 100}, 50, 5),
        ({"max_updates": 8}, 8, 0),
        ({"warmup_updates": 1_000_000, "max_tokens": 30_000}, 30, 3),
        ({"warmup_updates": 201}, 200, 20),  # ten epochs, where none of the budgets is given
    ],
)
def test_a_warm_up_that_outlasts_the_training_is_told_before_anything_is_trained(
    training: dict[str, Any], most: int, proposed: int
):
    config = resolve({"training": training})
    (text,) = advisor_of(config, 20).at_start()
    assert f"takes {config.training.warmup_updates} updates, the training {most}: the rate stays below" in text
    assert text.endswith(f"take training.warmup_updates {proposed}")
    assert advisor_of(resolve({"training": training | {"warmup_updates": most}}), 20).at_start() == []
    assert advisor_of(resolve({"training": training | {"warmup_updates": proposed}}), 20).at_start() == []


@pytest.mark.parametrize("budget", [{"max_seconds": 1}, {"max_updates": 1}], ids=["unknown", "a trial"])
def test_of_a_warm_up_nothing_is_said_where_it_is_not_known_to_be_too_long(budget: dict[str, Any]):
    assert advisor_of(resolve({"training": {"warmup_updates": 1_000_000, **budget}}), 20).at_start() == []


@pytest.mark.parametrize("preset", preset_names())
def test_presets_hear_nothing_before_they_are_trained_on_a_text_of_a_megabyte(preset: str):
    config = resolve(preset=preset)
    updates = 1_000_000 // 6 // (config.training.batch_size * config.training.bptt)  # words of six characters
    assert advisor_of(config, updates).at_start() == []


def test_a_training_says_it(tiny_text: str, tmp_path: Path):
    path = tmp_path / "tiny.txt"
    path.write_text(tiny_text * 12, encoding="utf-8")
    run = train(
        path,
        out=tmp_path / "run",
        model={"hidden_size": 8, "embedding_size": 8},
        training={"batch_size": 64, "bptt": 32, "max_updates": 2, "num_threads": 1},
        sampling={"max_new_tokens": 2},
    )
    records = list(run.records())
    assert any("the batch is large for this text" in r["text"] for r in records if r["kind"] == "notice")
    assert all(0 <= r["measured"]["data_seconds"] <= r["measured"]["seconds"] for r in records if r["kind"] == "update")
