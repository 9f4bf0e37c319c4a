"""The range test: its rates, where it stops, what it proposes from curves of known shape, that it writes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import elman
from elman.errors import ConfigError, TrainingError
from elman.training.range_test import RangeTest, range_test

SMALL: dict[str, Any] = {
    "model": {"hidden_size": 16, "embedding_size": 8},
    "training": {"batch_size": 8, "bptt": 16, "num_threads": 1},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tiny.txt"
    path.write_text(tiny_text * 8, encoding="utf-8")
    return path


def curve(losses: list[float], matrix_share: float | None = None) -> RangeTest:
    rates = tuple(10.0 ** (-5 + index / 4) for index in range(len(losses)))
    return RangeTest(rates, tuple(losses), tuple(losses), matrix_share)


def test_the_proposal_is_the_rate_at_which_the_loss_falls_the_most():
    found = curve([4.0, 4.0, 3.9, 3.7, 3.0, 2.6, 2.4, 2.3, 2.25, 2.4, 3.5])
    assert found.lowest == pytest.approx(1e-3)
    assert found.steepest == pytest.approx(1e-4)
    assert found.suggestion == pytest.approx(1e-4)
    assert found.settings() == {"learning_rate": found.suggestion}
    assert curve([3.0, 2.0, 4.0], 2.0).settings()["matrix_learning_rate"] == pytest.approx(2 * 1.8e-5)


def test_the_steepest_fall_is_looked_for_before_the_lowest_loss_alone():
    assert curve([4.0, 3.9, 3.5, 3.4, 9.0, 5.0]).steepest == pytest.approx(10.0**-4.5)


def test_where_there_was_no_valley_it_is_said():
    still_fell = "the loss still fell at the last rate, 3.2e-05: let it rise further (to_rate)"
    assert curve([4.0, 3.0, 2.0]).remark == still_fell
    assert curve([4.0, 2.0, 3.0]).remark is None


def test_rates_rise_by_one_factor_and_the_test_stops_when_the_loss_has_turned_up(corpus: Path):
    found = range_test(corpus, from_rate=1e-4, to_rate=1e3, num_updates=60, **SMALL)
    steps = [math.log(after / before) for before, after in zip(found.rates, found.rates[1:], strict=False)]
    assert steps == pytest.approx([math.log(1e7) / 59] * len(steps))
    assert found.rates[0] == pytest.approx(1e-4)
    assert len(found.nats) == len(found.rates) < 60
    assert found.smoothed[-1] > min(found.smoothed)
    assert found.rates[0] <= found.steepest <= found.lowest < found.rates[-1]
    assert found == range_test(corpus, from_rate=1e-4, to_rate=1e3, num_updates=60, **SMALL)


def test_a_rate_that_destroys_everything_ends_the_test(corpus: Path):
    found = range_test(corpus, from_rate=1e-3, to_rate=1e30, num_updates=40, **SMALL | {
        "training": SMALL["training"] | {"optimizer": "sgd", "max_grad_norm": "none"}
    })  # fmt: skip
    assert all(map(math.isfinite, found.nats))
    assert len(found.nats) < 40


def test_a_loss_that_only_rises_has_no_rate(corpus: Path):
    with pytest.raises(TrainingError, match="rose from the first rate on, 100: begin at a lower one"):
        range_test(corpus, from_rate=100.0, to_rate=1e6, num_updates=25, **SMALL)


def test_a_loss_that_never_moves_asks_for_higher_rates(corpus: Path):
    with pytest.raises(TrainingError, match="never fell, up to the rate 1e-20: let it rise further"):
        range_test(corpus, from_rate=1e-22, to_rate=1e-20, num_updates=25, seed=6, **SMALL)


def test_muon_keeps_the_share_of_its_rate(corpus: Path):
    muon = {"training": SMALL["training"] | {"optimizer": "muon", "learning_rate": 0.01, "matrix_learning_rate": 0.03}}
    found = range_test(corpus, num_updates=20, **SMALL | muon)
    assert found.matrix_share == pytest.approx(3.0)
    assert set(found.to_dict()["suggestion"]) == {"learning_rate", "matrix_learning_rate"}


def test_the_model_to_start_from_is_the_one_that_is_tested(corpus: Path, tmp_path: Path):
    run = elman.train(corpus, out=tmp_path / "run", **SMALL | {"training": SMALL["training"] | {"max_updates": 150}})
    fresh = range_test(corpus, num_updates=20, **SMALL).nats[0]
    going_on = range_test(corpus, from_model=run.path, num_updates=20, **SMALL).nats[0]
    learned = [record["nats"] for record in run.records() if record["kind"] == "update"][-1]
    assert going_on == pytest.approx(learned, abs=0.5)
    assert going_on < fresh - 0.5


def test_the_teacher_of_the_run_whose_settings_are_given_teaches(corpus: Path, tmp_path: Path):
    short = SMALL | {"training": SMALL["training"] | {"max_updates": 2}}
    teacher = elman.train(corpus, out=tmp_path / "teacher", **short)
    taught = elman.train(corpus, out=tmp_path / "taught", teachers=[teacher.path], teacher_weight=0.9, **short)
    settings = taught.path / "run.toml"
    with_teacher = range_test(config=settings, num_updates=20)
    (tmp_path / "alone.toml").write_text(settings.read_text(encoding="utf-8"), encoding="utf-8")
    alone = range_test(config=tmp_path / "alone.toml", num_updates=20)
    assert with_teacher.nats[0] == alone.nats[0]  # of the text, before the first update
    assert with_teacher.nats != alone.nats


def test_a_test_that_is_stopped_at_once_says_so(corpus: Path):
    with pytest.raises(TrainingError, match="stopped after 0 updates: there is no curve yet"):
        range_test(corpus, should_stop=lambda: True, **SMALL)


def test_nothing_is_written_and_the_budget_of_a_preset_does_not_matter(corpus: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = SMALL | {"training": SMALL["training"] | {"max_seconds": 1e-9}}
    found = range_test(corpus, preset="demo", num_updates=20, data={"corpus": [str(corpus)]}, **quick)
    assert len(found.nats) == 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"from_rate": 1.0, "to_rate": 0.1},
        {"num_updates": 5},
        {"from_rate": 0.0},
        {"to_rate": math.inf},
        {"from_rate": 1e-300, "to_rate": 1e300},
    ],
)
def test_a_test_without_a_curve_is_refused(options: dict[str, Any], corpus: Path):
    with pytest.raises(ConfigError, match="accepted: finite rates that rise"):
        range_test(corpus, **options, **SMALL)


def test_a_counted_model_has_no_rate(corpus: Path):
    with pytest.raises(ConfigError, match="counted and has no learning rate"):
        range_test(corpus, model={"kind": "ngram"})


def test_the_page_shows_the_curve(tmp_path: Path):
    found = curve([4.0, 3.5, 2.0, 3.0])
    html = found.page().html()
    assert "<svg" in html
    assert f"--training.learning-rate {found.suggestion:g}" in html
    assert "let it rise further" in curve([4.0, 3.0]).page().html()
