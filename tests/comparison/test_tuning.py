"""The search for settings: what may be searched, that it finds what is better, goes on, and ends in a run file."""

from __future__ import annotations

import sys
import tomllib
import warnings

import pytest

import elman
from elman.comparison import tuning
from elman.comparison.tuning import JOURNAL_FILE, Choice, default_choices, tune
from elman.errors import ConfigError, MissingExtraError, UserError
from elman.settings import resolve
from elman.training.loop import Callback


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("training.learning_rate=0.001..0.1", Choice("training.learning_rate", 0.001, 0.1)),
        ("model.hidden_size=64..512", Choice("model.hidden_size", 64.0, 512.0, is_whole=True)),
        ("model.dropout=0..0.5", Choice("model.dropout", 0.0, 0.5)),
        ("training.learning_rate=1e-4..1e-2", Choice("training.learning_rate", 1e-4, 1e-2)),
        ("model.kind=lstm,gru", Choice("model.kind", values=("lstm", "gru"))),
    ],
)
def test_choices_are_read_as_typed(text, choice):
    assert Choice.parse(text) == choice


@pytest.mark.parametrize("text", ["bptt=3", "training.bptt", "training.bptt=5..3", "training.bptt=a..b", "a.b=-1..2"])
def test_what_is_no_choice_is_refused_in_one_line(text):
    with pytest.raises(UserError) as caught:
        Choice.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["model.hidden_size=64..512", "model.kind=lstm,gru", "training.learning_rate=0.001..0.1"]
)
def test_choices_are_written_as_they_are_typed(text):
    assert str(Choice.parse(text)) == text


def test_by_default_the_rates_the_width_and_the_dropout_of_the_kind_are_searched():
    def names(**settings):
        return [choice.setting for choice in default_choices(resolve(settings))]

    assert names() == ["training.learning_rate", "model.hidden_size", "model.dropout"]
    assert "training.matrix_learning_rate" in names(training={"optimizer": "muon"})


def test_without_optuna_the_extra_is_named(monkeypatch, corpus, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"elman\[tune\]"):
        tune(corpus, out=tmp_path / "study", training={"max_updates": 2})


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna")


def search(corpus, out, quick, **changes):
    settings = {name: dict(section) for name, section in quick.items()}
    settings["training"] |= {"max_updates": 12}
    options = {"search": ["training.learning_rate=0.0001,0.03"], "num_trials": 4, "seed": 5} | settings | changes
    return tune(corpus, out=out, **options)


def test_it_finds_what_is_better_and_ends_in_a_run_file(optuna, corpus, tmp_path, quick):
    lines: list[str] = []
    found = search(corpus, tmp_path / "study", quick, num_trials=6, tell=lines.append)
    assert found.is_complete
    assert found.num_finished + found.num_pruned == 6
    assert found.found == {"training.learning_rate": "0.03"}
    settings = tomllib.loads(found.best.read_text(encoding="utf-8"))
    assert settings["training"]["learning_rate"] == 0.03
    run = elman.train(config=found.best, out=tmp_path / "best")
    records = [record for record in run.records() if record["kind"] == "end"]
    assert records[0]["best_nats_per_token"] == found.nats_per_token
    assert any("nats per token" in line for line in lines)
    assert not list((tmp_path / "study").glob("trial-*/checkpoints"))


def test_the_same_command_goes_on_and_one_that_is_done_does_nothing(optuna, corpus, tmp_path, quick):
    first = search(corpus, tmp_path / "study", quick, num_trials=2)
    assert first.num_finished == 2
    lines: list[str] = []
    more = search(corpus, tmp_path / "study", quick, num_trials=3, tell=lines.append)
    assert more.num_finished + more.num_pruned == 3
    assert lines[0].startswith("trial 2:")
    lines.clear()
    assert search(corpus, tmp_path / "study", quick, num_trials=3, tell=lines.append) == more
    (line,) = lines
    assert line.startswith("3 trials are in ")
    assert "3 are asked for in all" in line


def test_searches_that_begin_at_once_draw_different_trials(optuna, corpus, tmp_path, quick, monkeypatch):
    def rates(lines):
        return [line.partition("learning_rate ")[2] for line in lines if "learning_rate" in line]

    first: list[str] = []
    second: list[str] = []
    wide = {"search": ["training.learning_rate=0.0001..0.03"]}
    look = tuning._refuse_another_search

    def meanwhile(*arguments):
        """Between the first command's look into the empty folder and its first draw."""
        monkeypatch.setattr(tuning, "_refuse_another_search", look)
        look(*arguments)
        search(corpus, tmp_path / "study", quick, num_trials=2, tell=second.append, **wide)

    monkeypatch.setattr(tuning, "_refuse_another_search", meanwhile)
    found = search(corpus, tmp_path / "study", quick, num_trials=4, tell=first.append, **wide)
    assert found.is_complete
    assert len(rates(first)) == len(rates(second)) == 2
    assert len({*rates(first), *rates(second)}) == 4


@pytest.fixture(scope="module")
def searched(corpus, tmp_path_factory, quick):
    """The folder of a search; what is refused there leaves it as it is."""
    pytest.importorskip("optuna")
    out = tmp_path_factory.mktemp("searched")
    search(corpus, out, quick, num_trials=1)
    return out


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"training": {"max_updates": 40}}, "training.max_updates (12 there, 40 here)"),
        ({"training": {"max_tokens": 999}}, "training.max_tokens (none there, 999 here)"),
        ({"seed": 6}, "seed (5 there, 6 here)"),
        ({"data": {"valid_fraction": 0.2}}, "data.valid_fraction (0.1 there, 0.2 here)"),
        (
            {"search": ["training.learning_rate=0.0001..0.03"]},
            "the search of training.learning_rate (0.0001,0.03 there, 0.0001..0.03 here)",
        ),
        (
            {"search": ["training.learning_rate=0.0001,0.03", "training.bptt=8,16"]},
            "the search of training.bptt (none there, 8,16 here)",
        ),
    ],
)
def test_another_search_on_the_folder_is_refused_in_one_line(searched, corpus, quick, changes, difference):
    # Optuna writes into its journal that somebody looked.
    files = [path for path in searched.rglob("*") if path.is_file() and path.name != JOURNAL_FILE]
    before = {path: path.read_bytes() for path in files}
    if "training" in changes:
        changes = {"training": {**quick["training"], "max_updates": 12, **changes["training"]}}
    if "data" in changes:
        changes = {"data": quick["data"] | changes["data"]}
    with pytest.raises(UserError) as caught:
        search(corpus, searched, quick, num_trials=2, **changes)
    message = str(caught.value)
    assert "holds another search" in message
    assert difference in message
    assert "give another --out" in message
    assert "\n" not in message
    assert message.count(" there, ") == 1  # a setting that is searched is told once
    assert {path: path.read_bytes() for path in before} == before
    assert search(corpus, searched, quick, num_trials=1).num_finished == 1


def test_the_text_counts_and_not_where_it_lies(searched, corpus, tmp_path, quick):
    other = tmp_path / "other.txt"
    other.write_text("the dog and the cat\n" * 60, encoding="utf-8")
    with pytest.raises(UserError, match=r"in the text \(.*tiny.* there, .*other.* here\): give another"):
        search(other, searched, quick, num_trials=2)
    moved = tmp_path / "moved.txt"
    moved.write_bytes(corpus.read_bytes())
    assert search(moved, searched, quick, num_trials=1).num_finished == 1


def test_a_study_that_does_not_say_what_it_is_about_is_refused(optuna, corpus, tmp_path, quick):
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(storage=optuna.storages.JournalStorage(journal), study_name="elman")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(UserError, match="does not say what it is about: give another --out"):
        search(corpus, tmp_path, quick)


class StopAfter(Callback):
    """Ends a search after so many updates in all."""

    def __init__(self, count: int) -> None:
        self.left = count

    def on_record(self, record):
        self.left -= record.kind == "update"

    def __call__(self) -> bool:
        return self.left <= 0


def test_a_trial_that_is_stopped_does_not_count(optuna, corpus, tmp_path, quick):
    stop = StopAfter(16)
    found = search(corpus, tmp_path / "study", quick, callbacks=[stop], should_stop=stop)
    assert not found.is_complete
    assert (found.num_finished, found.num_failed) == (1, 0)
    assert search(corpus, tmp_path / "study", quick, num_trials=2).is_complete


def test_trials_that_fall_behind_are_given_up(optuna, corpus, tmp_path, quick):
    choice = ["training.learning_rate=0.03,1e-9"]
    found = search(corpus, tmp_path / "study", quick, search=choice, num_trials=14, evaluation={"every_updates": 2})
    assert found.num_pruned > 0
    assert found.found == {"training.learning_rate": "0.03"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"training": {}}, "give each trial a budget"),
        ({"data": {"valid_fraction": 0.0}}, "judged on the validation part"),
        ({"model": {"kind": "ngram"}, "training": {}}, "counted, not trained"),
        ({"num_trials": 0}, "accepted: 1 and more"),
        ({"search": ["training.bpt=3,4"]}, "did you mean 'bptt'"),
        ({"search": ["training.bptt=8,16", "training.bptt=8..16"]}, "training.bptt is searched twice"),
        ({"search": ["training.bptt=0..4"]}, "training.bptt is '0'"),
    ],
)
def test_searches_that_make_no_sense_are_refused_in_one_line(optuna, changes, complaint, corpus, tmp_path, quick):
    with pytest.raises((UserError, ConfigError), match=complaint) as caught:
        search(corpus, tmp_path / "study", quick, **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "study").exists()
