"""A comparison: what it trains and judges, that it uses again what is there, and that commands do not collide."""

from __future__ import annotations

import csv
import io
import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import elman
from elman.comparison import trials as trials_module
from elman.comparison.compare import compare
from elman.comparison.existing import compare_runs
from elman.comparison.page import comparison_page, write_results
from elman.comparison.result import Comparison, Contestant, Outcome
from elman.comparison.tables import as_csv, as_markdown, columns, resolution_line, rows, write_tables
from elman.comparison.trials import Watch
from elman.errors import TrainingError, UserError
from elman.training.folder import Run
from elman.training.loop import Callback


def test_every_model_is_trained_with_every_seed_and_judged_as_evaluate_judges(small, folder):
    assert {one.name for one in small.contestants} == {"elman", "lstm", "counts"}
    assert (small.split, small.figure, small.is_complete) == ("test", "nats_per_token", True)
    for one in small.contestants:
        assert [outcome.seed for outcome in one.outcomes] == ([1] if one.name == "counts" else [1, 2])
        for outcome in one.outcomes:
            assert Path(outcome.run).parent == folder / "runs"
            score = elman.evaluate(outcome.run).evaluation.score
            assert outcome.figures["nats_per_token"] == score.nats_per_token
            assert outcome.figures["bits_per_char"] == score.bits_per_char
            if not one.is_counted:
                assert (outcome.updates, outcome.tokens) == (8, 256)
                assert Run(Path(outcome.run)).config().seed == outcome.seed
    means = [one.repeated("nats_per_token").mean for one in small.contestants]
    assert means == sorted(means)
    assert {(verdict.better, verdict.worse) for verdict in small.verdicts} == {
        (one.name, other.name)
        for place, one in enumerate(small.contestants)
        for other in small.contestants[place + 1 :]
    }


def again(corpus, folder, quick, entries, **changes):
    settings = {name: dict(section) for name, section in quick.items()}
    options = {"max_tokens": 256, "seeds": (1,), "out": folder, **settings, **changes}
    return compare(entries, corpus, **options)


def test_what_is_there_is_used_again_and_what_is_new_is_trained(corpus, tmp_path, quick, monkeypatch):
    trained = []
    train = trials_module.runs.train

    def counted(**options):
        trained.append(Path(options["out"]).name.split("-")[0])
        return train(**options)

    monkeypatch.setattr(trials_module.runs, "train", counted)
    first = again(corpus, tmp_path / "a", quick, ["elman", "gru"])
    assert sorted(trained) == ["elman", "gru"]
    same = again(corpus, tmp_path / "a", quick, ["gru", "elman"])
    assert sorted(trained) == ["elman", "gru"]
    assert same == first
    again(corpus, tmp_path / "a", quick, ["elman", "lstm", "gru"], seeds=(1, 2))
    assert sorted(trained) == ["elman", "elman", "gru", "gru", "lstm", "lstm"]
    again(corpus, tmp_path / "a", quick, ["elman", "gru"], max_tokens=64)
    assert len(trained) == 8  # another budget is another training


def test_what_the_folder_holds_beside_the_comparison_is_told(corpus, tmp_path, quick):
    wide = again(corpus, tmp_path, quick, ["elman", "gru"], seeds=(1, 2))
    assert wide.notices == ()
    narrow = again(corpus, tmp_path, quick, ["elman", "gru"], rates=(1.0,), rate_updates=2)
    (notice,) = narrow.notices
    assert notice.startswith("2 finished trainings in this folder are not part of this comparison")
    assert notice in comparison_page(narrow).html()
    (other,) = again(corpus, tmp_path, quick, ["elman", "lstm"], seeds=(1, 2)).notices
    assert other.startswith("2 finished trainings")
    assert again(corpus, tmp_path, quick, ["elman", "gru", "lstm"], seeds=(1, 2)).notices == ()


class Stopper(Callback):
    """Ends a comparison after so many updates in all."""

    def __init__(self, count: int) -> None:
        self.left = count

    def on_record(self, record):
        self.left -= record.kind == "update"

    def __call__(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize("count", [3, 11])
def test_a_comparison_that_is_stopped_goes_on_to_the_same_end(count, corpus, tmp_path, quick):
    whole = again(corpus, tmp_path / "whole", quick, ["elman", "gru"])
    stop = Stopper(count)
    watch = Watch(callbacks=[stop], should_stop=stop)
    part = again(corpus, tmp_path / "part", quick, ["elman", "gru"], watch=watch)
    assert not part.is_complete
    assert len(part.contestants) == (count > 8)
    comparison_page(part).html()
    rest = again(corpus, tmp_path / "part", quick, ["elman", "gru"])
    figures = [[one.figures for c in found.contestants for one in c.outcomes] for found in (whole, rest)]
    assert figures[0] == figures[1]


def test_two_commands_share_the_work(corpus, tmp_path, quick, monkeypatch):
    trained, lock = [], threading.Lock()
    train = trials_module.runs.train
    monkeypatch.setattr(trials_module, "_SECONDS_BETWEEN_LOOKS", 0.02)

    def counted(**options):
        with lock:
            trained.append(Path(options["out"]).name)
        return train(**options)

    monkeypatch.setattr(trials_module.runs, "train", counted)
    quick = {**quick, "training": {**quick["training"], "num_threads": None}}
    found: list[object] = []

    def work():
        found.append(again(corpus, tmp_path / "both", quick, ["elman", "gru", "lstm"]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(trained) == len(set(trained)) == 3


def test_rates_are_chosen_on_the_validation_part_for_each_model_alike(corpus, tmp_path, quick):
    found = again(corpus, tmp_path, quick, ["elman", "gru"], rates=(0.001, 3.0, 1.0), rate_updates=6)
    for one in found.contestants:
        assert sorted(one.sweep) == [0.001, 1.0, 3.0]
        assert one.rate == min(one.sweep, key=one.sweep.get) > 0.001
        run = Run(Path(one.outcomes[0].run))
        assert run.config().training.learning_rate == pytest.approx(2e-3 * one.rate)
    assert any("at the edge of the sweep" in notice for notice in found.notices)


def test_a_training_that_fails_is_told_and_not_tried_again(corpus, tmp_path, quick, monkeypatch):
    train = trials_module.runs.train
    tried = []

    def fail(**options):
        if Path(options["out"]).name.startswith("gru"):
            tried.append(1)
            Path(options["out"]).mkdir(parents=True)
            raise TrainingError("the loss is not finite")
        return train(**options)

    monkeypatch.setattr(trials_module.runs, "train", fail)
    for _ in range(2):
        found = again(corpus, tmp_path, quick, ["elman", "gru"])
        assert [one.name for one in found.contestants] == ["elman"]
        assert found.notices == ("gru, seed 1: the training failed: the loss is not finite",)
    assert tried == [1]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"max_seconds": 1.0}, "one budget, the same for all"),
        ({"max_tokens": None}, "one budget, the same for all"),
        ({"max_tokens": -1}, "accepted: a finite number above 0"),
        ({"max_tokens": math.inf}, "accepted: a finite number above 0"),
        ({"num_parameters": 0}, "accepted: 1 and more"),
        ({"seeds": ()}, "give one and more"),
        ({"seeds": (1, 1)}, "each once"),
        ({"rates": (0.0,)}, "factors and updates start above 0"),
        ({"rates": (1.0,), "data": {"valid_fraction": 0.0}}, "chosen on the validation part"),
        ({"data": {"valid_fraction": 0.0, "test_fraction": 0.0}}, "nothing of this corpus is held out"),
        ({"training": {"bpt": 3}}, "did you mean 'bptt'"),
    ],
)
def test_terms_that_do_not_hold_are_refused_in_one_line(changes, complaint, corpus, tmp_path, quick):
    with pytest.raises(UserError, match=complaint) as caught:
        again(corpus, tmp_path / "new", quick, ["elman", "gru"], **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_entries_on_different_texts_are_refused(corpus, tmp_path, quick):
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 200, encoding="utf-8")
    with pytest.raises(UserError, match="different texts"):
        again(corpus, tmp_path / "new", quick, ["elman", f"b: model.kind=gru data.corpus={other}"])


def test_models_of_different_tokens_are_compared_by_bits_per_character_or_not_at_all(corpus, tmp_path, quick):
    found = again(corpus, tmp_path, quick, ["elman", "bytes: model.kind=elman tokenizer.level=byte"])
    assert found.figure == "bits_per_char"
    assert "there are no curves" in comparison_page(found).html()
    with pytest.raises(UserError, match="nothing measures both"):
        again(corpus, tmp_path, quick, ["elman", "words: model.kind=elman tokenizer.level=word"])


def test_the_table_is_the_same_in_all_of_its_forms(small, tmp_path):
    write_tables(small, tmp_path)
    headings = [column.heading for column in columns(small)]
    read = list(csv.reader(io.StringIO((tmp_path / "comparison.csv").read_text(encoding="utf-8"))))
    assert read[0] == headings
    assert [row[0] for row in read[1:]] == [one.name for one in small.contestants]
    for row, one in zip(read[1:], small.contestants, strict=True):
        assert float(row[1]) == one.repeated("nats_per_token").mean
        assert int(row[headings.index("parameters")]) == one.parameters
    whole = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert [one["results"]["nats_per_token"]["mean"] for one in whole["contestants"]] == [float(r[1]) for r in read[1:]]
    assert [verdict["words"] for verdict in whole["verdicts"]] == [str(verdict) for verdict in small.verdicts]
    markdown = as_markdown(small).splitlines()
    table = [line for line in markdown if line.startswith("|")]
    assert len(table) == 2 + len(small.contestants)
    assert {line.count("|") for line in table} == {len(headings) + 1}
    assert as_csv(small) == (tmp_path / "comparison.csv").read_text(encoding="utf-8")
    assert rows(small)[0][-1] == "best"


def between(*models: tuple[str, list[float]]) -> Comparison:
    """A comparison of given figures."""
    base = {"kind": "lstm", "is_counted": False, "settings": {"tokenizer": {}}, "parameters": 1, "operations": 1,
            "state_bytes": 1}  # fmt: skip
    contestants = [
        Contestant(name=name, **base, outcomes=tuple(
            Outcome(seed, "", {"nats_per_token": nats, "bits_per_char": None}, 1, 1, 1.0)
            for seed, nats in enumerate(figures)
        ))
        for name, figures in models
    ]  # fmt: skip
    return Comparison("text", "0", "test", None, "nats_per_token", tuple(contestants), (), {})


def test_where_models_are_not_told_apart_it_says_how_large_a_difference_had_to_be():
    line = resolution_line(between(("a", [1.0, 2.0]), ("b", [1.1, 2.1])))
    # Equal variances of 0.5: a standard error of sqrt(0.5), two degrees of freedom, t = 4.30265.
    assert line.startswith(
        "With 2 seeds each, models that cannot be told apart would have to differ by more than 3.0424 "
    )
    found = between(("a", [1.0, 2.0]), ("b", [1.1, 2.1]))
    assert line in as_markdown(found)
    assert resolution_line(between(("a", [1.0, 1.001, 1.002]), ("b", [2.0, 2.001, 2.002]))) is None
    assert resolution_line(between(("a", [1.0]), ("b", [2.0]))) is None
    assert resolution_line(between(("a", [1.0, 2.0]))) is None
    counts = [replace(one, is_counted=True) for one in between(("a", [1.0]), ("b", [1.0])).contestants]
    assert resolution_line(replace(found, contestants=tuple(counts))) is None
    assert "With 2 to 3 seeds each" in resolution_line(between(("a", [1.0, 2.0]), ("b", [1.1, 2.1, 1.6])))


def test_the_page_shows_every_model_its_samples_and_its_settings(small, folder):
    html = write_results(small, folder).read_text(encoding="utf-8")
    assert html == comparison_page(small).html()
    assert 'href="http' not in html
    assert " src=" not in html
    for one in small.contestants:
        assert one.name in html
    sections = ("Which is better", "How they learned", "Their gradients", "From noise to words", "Order and chance")
    assert all(section in html for section in sections)
    assert "before the training" in html
    assert "model.order" in html


def test_samples_begin_with_those_of_the_untrained_model(small):
    (model,) = (one for one in small.contestants if one.name == "lstm")
    texts = model.outcomes[0].untrained
    assert [one["temperature"] for one in texts] == [0.5, 1.5]
    assert all(len(one["text"]) > 0 and one["update"] == 0 for one in texts)
    (counted,) = (one for one in small.contestants if one.is_counted)
    assert counted.outcomes[0].untrained == ()


def test_runs_that_are_there_are_compared_without_training(small, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("nothing is trained here")

    monkeypatch.setattr(trials_module.runs, "train", never)
    runs = [outcome.run for one in small.contestants for outcome in one.outcomes]
    found = compare_runs(runs)
    assert len(found.contestants) == 3  # seeds of one model are together
    assert [one.outcomes[0].figures for one in found.contestants] == [o.outcomes[0].figures for o in small.contestants]
    assert found.terms is None
    comparison_page(found).html()


def test_runs_on_different_texts_or_parts_are_refused_in_one_line(small, corpus, quick, tmp_path):
    first = small.contestants[0].outcomes[0].run
    other = tmp_path / "other.txt"
    other.write_text("the dog and the cat\n" * 60, encoding="utf-8")
    settings = {**quick, "training": {**quick["training"], "max_updates": 2}}
    elsewhere = elman.train(other, out=tmp_path / "elsewhere", **settings)
    cut = {**settings, "data": {"valid_fraction": 0.2, "test_fraction": 0.1}}
    otherwise = elman.train(corpus, out=tmp_path / "otherwise", **cut)
    for run, complaint in ((elsewhere, "compare runs of one corpus"), (otherwise, "judged on the same part")):
        with pytest.raises(UserError, match=complaint) as caught:
            compare_runs([first, run.path])
        assert "\n" not in str(caught.value)
        assert not (run.path / "judged.json").exists()  # refused before its test part is looked at
    with pytest.raises(UserError, match="two runs and more"):
        compare_runs([first])
    with pytest.raises(UserError, match="given twice"):
        compare_runs([first, f"{first}/"])
    with pytest.raises(UserError, match="not a run folder"):
        compare_runs([first, tmp_path])


def test_a_run_without_a_held_out_part_is_refused_in_one_line(corpus, quick, tmp_path):
    nothing = {"valid_fraction": 0.0, "test_fraction": 0.0}
    settings = {**quick, "training": {**quick["training"], "max_updates": 2}, "data": nothing}
    runs = [elman.train(corpus, out=tmp_path / str(seed), seed=seed, **settings) for seed in (1, 2)]
    with pytest.raises(UserError, match="was trained with nothing held out") as caught:
        compare_runs([run.path for run in runs])
    assert "\n" not in str(caught.value)
