"""``inspect gradients``, ``saliency`` and ``mitigations`` on the command line."""

from __future__ import annotations

import pytest

from elman.inspection.gradients import inspect_gradients
from elman.inspection.saliency import inspect_saliency


def test_gradients_of_a_run(elman, run, tmp_path):
    expected = inspect_gradients([run], max_lag=5, num_places=1)
    result = elman("inspect", "gradients", run, "--lags", 5, "--places", 1, "--json").json
    assert result == expected.to_dict()
    shown = elman("inspect", "gradients", run, "--lags", 5, "--places", 1, "--html", tmp_path / "page.html").out
    assert "initial" in shown
    assert expected.studies[-1].verdict.words[:30] in shown
    assert shown.rstrip().endswith(f"page: {tmp_path / 'page.html'}")
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_runs_stand_before_the_text(elman, run, tiny_corpus):
    words = (run, run / "model.safetensors", tiny_corpus, "--lags", 4, "--places", 1, "--json")
    result = elman("inspect", "gradients", *words).json
    assert [study["name"] for study in result["studies"]] == [str(run), str(run / "model.safetensors")]
    assert result["split"] == "text"


def test_new_networks(elman, tiny_corpus):
    words = ("--kinds", "elman, gru", "--hidden-size", 4, "--lags", 4, "--places", 1)
    shown = elman("inspect", "gradients", tiny_corpus, *words).out
    assert "spectral radius" in shown
    assert "gru: it " in shown


def test_saliency_of_a_run_and_of_a_prompt(elman, run, tmp_path):
    words = ("--length", 9, "--places", 2, "--max-distance", 12)
    result = elman("inspect", "saliency", run, *words, "--json").json
    assert result == inspect_saliency(run, length=9, num_places=2, max_distance=12).to_dict()
    shown = elman("inspect", "saliency", run, *words, "--html", tmp_path / "page.html").out
    assert "memory horizon: " in shown
    assert (tmp_path / "page.html").stat().st_size > 1000
    shown = elman("inspect", "saliency", run, "--prompt", "the cat").out
    assert "distance" in shown
    assert "memory horizon" not in shown


def test_mitigations(elman, tmp_path, tiny_text):
    (tmp_path / "text.txt").write_text(tiny_text * 8, encoding="utf-8")
    words = (tmp_path / "text.txt", "--seeds", 1, "--updates", 1, "--lag", 4, "--out", tmp_path / "trials")
    answer = elman("inspect", "mitigations", *words)
    assert answer.code == 0, answer.err
    assert "vanilla, seed 0: " in answer.err
    assert "copying over 4 steps" in answer.out
    result = elman("inspect", "mitigations", *words, "--json").json
    assert len(result["arms"]) == 7


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("gradients",), "give a run folder"),
        (("gradients", "nowhere"), "no run folder or model file 'nowhere'"),
        (("gradients", "RUN", "--lags", "100000"), "100000 in a row and one more"),
        (("gradients", "RUN", "--hidden-size", "8"), "--hidden-size is that of new networks"),
        (("gradients", "--kinds", "lstm", "--split", "test"), "leave --split and --cell out"),
        (("gradients", "--kinds", "lstm", "RUN"), "--kinds looks at new networks, and "),
        (("gradients", "--kinds", "ngram"), "'ngram' carries tokens alone"),
        (("saliency", "RUN", "--length", "1"), "--length is 2 and more"),
        (("saliency", "RUN", "--prompt", ""), "the prompt is empty"),
        (("saliency", "RUN", "--prompt", "a☃"), "never saw: '☃': take them out"),
        (("saliency", "RUN", "--threshold", "nan"), "--threshold 0 and more"),
        (("saliency", "RUN", "--threshold", "inf"), "--threshold 0 and more"),
        (("saliency", "RUN", "--threshold", "1e400"), "--threshold 0 and more"),
        (("state", "RUN", ""), "a name in data.corpus is empty"),
        (("mitigations", "-"), "standard input can be read once"),
        (("mitigations", "--seeds", "0"), "--seeds and --updates are 1 and more"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(elman, run, words, what):
    answer = elman("inspect", *(run if word == "RUN" else word for word in words))
    assert answer.code == 2
    assert what in answer.err
    assert answer.err.count("\n") == 1
