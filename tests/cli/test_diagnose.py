"""``diagnose``: a run, a text, and what is refused."""

from __future__ import annotations

import pytest

from elman.inspection.repetition import diagnose


def test_a_run_is_drawn_from_and_held_against_its_text(elman, run):
    words = ("--num-tokens", 90, "--num-samples", 2, "--seed", 3)
    found = diagnose(run, num_tokens=90, num_samples=2, seed=3)
    result = elman("diagnose", run, *words, "--json").json
    assert result["verdict"] == found.verdict
    assert result["corpus"]["repeated"] == found.corpus.repeated
    assert [drawn["temperature"] for drawn in result["drawn"]] == [0.0, 0.3, 0.8, 1.0]
    shown = elman("diagnose", run, *words).out
    assert "greedy" in shown
    assert f"{found.drawn[0].repetition.repeated:.1%}" in shown
    assert shown.rstrip().endswith(found.words)
    assert result["copied"]["longest"] == found.copied.longest == max(d["copied"]["longest"] for d in result["drawn"])
    assert ("COPIED: " if result["copied"]["copied"] else "no copy: ") in shown
    assert f"has {found.copied.longest} characters: " in shown


def test_a_text_is_measured_alone(elman, tmp_path):
    text = tmp_path / "drawn.txt"
    text.write_text("It was a dark night. " + "and the end of the world is near, " * 9, encoding="utf-8")
    result = elman("diagnose", text, "--json").json
    assert result["period"] == 34
    assert result["begins"] == 20 + 34  # with the space before the first "and"
    assert "it loops from character 54 of 327 on, every 34 characters" in elman("diagnose", text).out


@pytest.mark.parametrize(
    ("words", "what"), [(("--num-tokens", 5), "accepted: 80 and more"), (("--num-samples", 0), "accepted: 1 and more")]
)
def test_what_has_no_meaning_is_refused_in_one_line(elman, run, words, what):
    answer = elman("diagnose", run, *words)
    assert answer.code == 2
    assert what in answer.err
    assert answer.err.count("\n") == 1


def test_a_model_without_its_text_is_not_taken_for_a_text(elman, run):
    answer = elman("diagnose", run / "model.safetensors")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "give the run folder" in answer.err


def test_a_text_of_nothing_is_refused(elman, tmp_path):
    (tmp_path / "empty.txt").touch()
    answer = elman("diagnose", tmp_path / "empty.txt")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
