"""No output takes the place of what a command reads, or of a file of a run: refused before anything is computed."""

from __future__ import annotations

import io
import shutil

import pytest

WRITING = [
    "bench --html",
    "lr-find TEXT --html",
    "eval RUN TEXT --html",
    "eval RUN TEXT --tokens",
    "sample RUN --save-state",
    "export arpa RUN",
    "inspect units RUN TEXT --html",
    "inspect state RUN TEXT --html",
    "inspect embeddings RUN --html",
    "inspect closing RUN TEXT --html",
    "inspect errors RUN TEXT --html",
    "inspect gradients RUN TEXT --html",
    "inspect saliency RUN TEXT --html",
    "inspect mitigations TEXT --html",
    "inspect probe trials --html",
]


@pytest.fixture
def place(tmp_path, run, corpus, monkeypatch):
    """A folder with a run and a text that may be lost."""
    shutil.copytree(run, tmp_path / "run")
    shutil.copy(corpus, tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", WRITING)
@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("run/model.safetensors", "is there, and is not "),
        ("run/run.toml", "is there, and is not "),
        ("run/metrics.jsonl", "is there, and is not "),
        ("text.txt", "is there, and is not "),
        ("run", "is a folder"),
        ("nowhere/page.html", "there is no folder 'nowhere'"),
        ("-", "'-' is none"),
        ("", "is a folder"),
    ],
    ids=str,
)
def test_what_would_be_lost_or_cannot_be_written_is_refused_at_once(elman, place, words, out, why):
    before = contents(place)
    answer = elman(*words.replace("RUN", "run").replace("TEXT", "text.txt").split(), out)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("elman: error: ")
    assert answer.err.count("\n") == 1
    assert why in answer.err
    assert contents(place) == before


def test_the_report_of_a_run_is_not_replaced_by_another_page(elman, place):
    assert elman("report", "run").code == 0
    before = contents(place)
    assert place / "run" / "report.html" in before
    answer = elman("inspect", "embeddings", "run", "a", "--html", "run/report.html")
    assert (answer.code, answer.out) == (2, "")
    assert "'run/report.html' belongs to a run: name another file" in answer.err
    assert contents(place) == before


@pytest.mark.parametrize(
    "words",
    ["inspect embeddings run a --html", "eval run text.txt --tokens", "sample run --max-new-tokens 2 --save-state"],
)
def test_a_file_of_the_same_kind_is_replaced_and_an_empty_one_filled(elman, place, words):
    out = place / "out"
    out.touch()
    assert elman(*words.split(), out).code == 0
    first = out.read_bytes()
    assert elman(*words.split(), out).code == 0
    assert out.read_bytes() == first
    assert first


def test_a_link_to_a_model_is_the_model(elman, place):
    (place / "page.html").symlink_to("run/model.safetensors")
    before = contents(place)
    assert elman("inspect", "embeddings", "run", "--html", "page.html").code == 2
    assert contents(place) == before


def test_an_arpa_file_is_written_again(elman, place):
    assert elman("train", "text.txt", "--model.kind", "ngram", "--model.order", 2, "--out", "counted").code == 0
    for _ in range(2):
        assert elman("export", "arpa", "counted", "model.arpa").code == 0
    (place / "model.arpa").write_text("\\data\\\nof another tool")
    assert elman("export", "arpa", "counted", "model.arpa").code == 2


def test_a_place_is_not_saved_over_a_model_while_writing_in_turns(elman, place, monkeypatch):
    before = contents(place)
    monkeypatch.setattr("sys.stdin", io.StringIO("save run/model.safetensors\nsave place\nquit\n"))
    answer = elman("sample", "run", "--interactive")
    assert answer.err.count("\n") == 1
    assert "is not a state file" in answer.err
    assert contents(place).keys() - before.keys() == {place / "place"}
    assert {path: data for path, data in contents(place).items() if path in before} == before
