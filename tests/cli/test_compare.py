"""``compare``, ``runs``, ``report``, ``scorecard`` and ``tune`` as they are typed."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from shutil import copytree

import pytest

from elman.comparison import scorecard

QUICK = (
    "--model.hidden_size=8",
    "--model.embedding_size=8",
    "--training.batch_size=4",
    "--training.bptt=16",
    "--evaluation.every_updates=4",
    "--sampling.every_updates=4",
    "--sampling.max_new_tokens=8",
    "--training.num_threads=1",
)


def test_models_are_trained_and_compared_and_the_same_command_trains_nothing(elman, corpus, tmp_path):
    words = ["compare", corpus, "--kinds", "elman,gru", "--tokens", 256, "--seeds", 2, "--out", tmp_path / "c", *QUICK]
    answer = elman(*words)
    assert answer.code == 0, answer.err
    assert "4 of 4: " in answer.err
    assert "elman" in answer.out
    assert "gru" in answer.out
    assert "cannot be told apart" in answer.out or "is better than" in answer.out
    assert f"the page: {tmp_path / 'c' / 'comparison.html'}" in answer.out
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert names == {"runs", "comparison.html", "comparison.json", "comparison.csv", "comparison.md"}
    again = elman(*words, "--json")
    assert again.err.count("was there already") == 4
    assert again.json["contestants"] == json.loads((tmp_path / "c" / "comparison.json").read_text())["contestants"]
    assert [outcome["seed"] for outcome in again.json["contestants"][0]["outcomes"]] == [1, 2]


def test_the_terminal_shows_every_column_of_the_table(elman, corpus, tmp_path):
    out = elman("compare", corpus, "--kinds", "elman,gru", "--tokens", 64, "--seeds", 2, "--out", tmp_path, *QUICK).out
    with (tmp_path / "comparison.csv").open(encoding="utf-8", newline="") as file:
        headings = next(csv.reader(file))
    assert len(headings) == 11
    (line,) = (line for line in out.splitlines() if line.startswith(" model "))
    assert re.split(r"  +", line.strip()) == headings


def test_fewer_seeds_than_the_folder_has_are_told(elman, corpus, tmp_path):
    words = ["compare", corpus, "--kinds", "elman,gru", "--tokens", 64, "--out", tmp_path, *QUICK]
    elman(*words, "--seeds", 2)
    answer = elman(*words, "--seeds", 1)
    assert "note: 2 finished trainings in this folder are not part of this comparison" in answer.err
    assert "2 finished trainings" in (tmp_path / "comparison.html").read_text(encoding="utf-8")


def test_runs_that_are_there_are_compared(elman, run, corpus, tmp_path, tiny):
    other = tmp_path / "other"
    elman("train", corpus, "--out", other, *tiny, "--model.kind", "gru")
    found = elman("compare", run, other, "--json").json
    assert {one["name"] for one in found["contestants"]} == {"tiny", "other"}
    assert found["terms"] is None
    assert found["page"] is None
    answer = elman("compare", run, other, "--out", tmp_path / "pages")
    assert "one seed says nothing of the spread" in answer.out
    assert (tmp_path / "pages" / "comparison.html").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["CORPUS", "--kinds", "lstm,gru", "--tokens", "10"], "--out FOLDER"),
        (["CORPUS", "--kinds", "lstm,gru", "--out", "OUT"], "--tokens N, --operations X or --seconds S"),
        (["CORPUS", "--kinds", "lstm", "--tokens", "10", "--out", "OUT"], "two models and more"),
        (["CORPUS", "--kinds", "lstm,gru", "--tokens", "10", "--seeds", "0", "--out", "OUT"], "accepted: 1 and more"),
        (["CORPUS", "--kinds", "lstm,gru", "--tokens", "10", "--rates", "a", "--out", "OUT"], "factors above 0"),
        (["CORPUS", "--kinds", "lstm,gru", "--tokens", "10", "--rates", "1,inf", "--out", "OUT"], "factors above 0"),
        (["CORPUS", "--kinds", "lstm,gru", "--tokens", "nan", "--out", "OUT"], "the budget is nan tokens; accepted"),
        (["CORPUS", "--kinds", "lstm,gru", "--tokens", "10", "--seed", "x", "--out", "OUT"], "a whole number"),
        (["RUN", "CORPUS"], "give runs alone, or a corpus alone"),
        (["RUN", "RUN", "--kinds", "lstm"], "--kinds has no meaning for runs that are there"),
        (["RUN", "RUN", "--training.bptt", "8"], "--training has no meaning for runs that are there"),
        (["RUN"], "two runs and more"),
    ],
)
def test_what_makes_no_sense_is_one_line(elman, run, corpus, tmp_path, words, complaint):
    places = {"CORPUS": corpus, "RUN": run, "OUT": tmp_path / "out"}
    answer = elman("compare", *(places.get(word, word) for word in words))
    assert answer.code == 2
    assert complaint in answer.err
    assert answer.err.count("\n") == 1


def test_runs_are_listed(elman, run, tmp_path):
    answer = elman("runs", run.parent)
    assert answer.code == 0
    assert "tiny" in answer.out
    (one,) = elman("runs", run.parent, "--json").json["runs"]
    assert (one["kind"], one["updates"], one["ending"], one["seed"]) == ("lstm", 8, "finished", 7)
    assert elman("runs", tmp_path / "nowhere").code == 2


def test_runs_are_listed_by_kind_and_by_name(elman, run, tmp_path):
    for name, kind in (("first", "elman"), ("Second", "gru"), ("third", "gru")):
        settings = copytree(run, tmp_path / name, ignore=lambda *_: ["checkpoints"]) / "run.toml"
        settings.write_text(re.sub('(?m)^kind = ".*"', f'kind = "{kind}"', settings.read_text()))

    def names(*words: str) -> list[str]:
        return [one["name"] for one in elman("runs", tmp_path, *words, "--json").json["runs"]]

    assert names("--kind", "gru") == ["Second", "third"]
    assert names("--match", "sec") == ["Second"]
    assert names("--match", "d", "--kind", "gru") == ["Second", "third"]
    assert len(names("--match", "TINY")) == 3  # the text
    assert names("--kind", "gr") == []
    listed = elman("runs", tmp_path, "--kind", "gru").out
    assert "2 runs in" in listed
    assert "of 3" in listed


def test_a_report_is_written_again_and_judged_on_request(elman, corpus, tmp_path, tiny, reports):
    run = tmp_path / "run"
    elman("train", corpus, "--out", run, *tiny)
    page = run / "report.html"
    page.unlink()
    assert elman("report", run).out == f"{page}\n"
    assert page.exists()
    judged = elman("report", run, "--judge", "--json").json["judged"]
    assert judged["judgement"]["nats_per_token"] == elman("eval", run, "--json").json["nats_per_token"]
    assert elman("report", tmp_path).code == 2


def test_the_scorecard_is_measured_printed_and_drawn(elman, tmp_path):
    words = ["scorecard", "--kinds", "lstm,transformer", "--parameters", 20000, "--lengths", "4,16", "--positions",
             "2,32", "--distances", "2,4", "--seconds", 0.001, "--device", "cpu"]  # fmt: skip
    answer = elman(*words, "--out", tmp_path / "card")
    assert answer.code == 0, answer.err
    assert "transformer, reading again" in answer.out
    assert "0 is constant, 1 linear, 2 quadratic" in answer.out
    assert {path.name for path in (tmp_path / "card").iterdir()} == {"scorecard.html", "scorecard.svg"}
    assert len(elman(*words, "--json").json["cards"]) == 3
    assert "whole numbers such as" in elman("scorecard", "--lengths", "a").err


@pytest.mark.parametrize(("stop_at", "says"), [("lstm", "nothing is written"), ("gru", "what was measured by then")])
def test_a_scorecard_that_is_stopped_keeps_what_is_measured(elman, tmp_path, monkeypatch, stop_at, says):
    card = scorecard._card

    def stopped(kind, *others):
        if kind == stop_at:
            raise KeyboardInterrupt
        return card(kind, *others)

    monkeypatch.setattr(scorecard, "_card", stopped)
    words = ["scorecard", "--kinds", "lstm,gru", "--parameters", 20000, "--lengths", "4", "--positions", "2",
             "--distances", "2", "--seconds", 0.001, "--device", "cpu", "--out", tmp_path / "card"]  # fmt: skip
    answer = elman(*words)
    assert answer.code == 130
    assert answer.err.splitlines()[-1].startswith("stopped")
    assert says in answer.err.splitlines()[-1]
    assert (tmp_path / "card" / "scorecard.html").exists() == (stop_at == "gru")
    assert ("lstm" in answer.out) == (stop_at == "gru")


def test_another_search_on_a_folder_is_one_line(elman, corpus, tmp_path):
    pytest.importorskip("optuna")
    words = ["tune", corpus, "--out", tmp_path / "study", "--trials", 1, *QUICK, "--training.max-updates", 4]
    elman(*words, "--search", "model.hidden_size=8,16")
    answer = elman(*words, "--search", "model.hidden_size=8..16")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "holds another search; it differs in the search of model.hidden_size (8,16 there, 8..16 here)" in answer.err


def test_a_search_ends_in_a_run_file(elman, corpus, tmp_path):
    pytest.importorskip("optuna")
    out = tmp_path / "study"
    words = ["tune", corpus, "--out", out, "--trials", 2, "--search", "training.learning_rate=0.001..0.1", *QUICK,
             "--training.max-updates", 4]  # fmt: skip
    answer = elman(*words)
    assert answer.code == 0, answer.err
    assert f"elman train --config {out / 'best.toml'}" in answer.out
    assert elman("train", "--config", out / "best.toml", "--out", tmp_path / "best").code == 0
    found = elman(*words, "--json").json
    assert Path(found["best"]) == out / "best.toml"
    assert found["num_finished"] + found["num_pruned"] == 2
