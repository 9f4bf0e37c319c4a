"""``elman inspect units|state|embeddings|probe|closing|errors``: table, JSON and page."""

from __future__ import annotations

import html
import re
import signal

import pytest

from elman.cli import main
from elman.inspection import probing


@pytest.mark.parametrize(
    ("words", "key", "shown"),
    [
        (("units", "--label", "word-start", "--unit", "0.c:3", "--max-tokens", "1100"), "claims", "word-start"),
        (("state", "--span", "the cat", "--max-tokens", "1100"), "dimensions", "effective dimension"),
        (("errors", "--order", "2"), "causes", "rare word"),
    ],
    ids=["units", "state", "errors"],
)
def test_table_json_and_page(elman, run, corpus, tmp_path, words, key, shown):
    name, *options = words
    call = ("inspect", name, run, corpus, *options)
    assert shown in elman(*call).out
    path = tmp_path / "page.html"
    answer = elman(*call, "--json", "--html", path)
    assert answer.json[key]
    assert path.read_text("utf-8").startswith("<!DOCTYPE html>")
    out = elman(*call, "--html", path).out
    assert shown in out
    assert out.endswith(f"page: {path}\n")


@pytest.mark.parametrize(
    "words",
    [
        "units RUN TEXT --label line-position --max-tokens 1100",
        "state RUN TEXT --max-tokens 1100",
        "errors RUN TEXT --order 2 --max-tokens 1100",
        "saliency RUN TEXT --length 4 --places 1 --max-distance 4",
        "gradients RUN TEXT --lags 3 --places 1",
        "ngram COUNTED TEXT",
    ],
)
def test_what_the_model_never_saw_is_said_of_a_text(elman, run, counted, tmp_path, words):
    text, page = tmp_path / "strange.txt", tmp_path / "page.html"
    text.write_text("the ЖЖ cat ЩЩ\n" * 100, "utf-8")
    words = words.replace("RUN", str(run)).replace("TEXT", str(text)).replace("COUNTED", str(counted))
    options = () if words.startswith("ngram") else ("--html", page)
    answer = elman("inspect", *words.split(), *options)
    note = f"400 of 1,400 tokens of {text} are <unk>: the model never saw what stands there"
    assert answer.code == 0
    assert f"note: {note}\n" in answer.err
    if options:
        assert html.escape(f"Note: {note}.") in page.read_text("utf-8")
    assert note in elman("inspect", *words.split(), "--json").json["notices"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory, corpus):
    """An n-gram model of the same text."""
    path = tmp_path_factory.mktemp("counted") / "run"
    assert main(["train", str(corpus), "--model.kind", "ngram", "--model.order", "2", "--out", str(path)]) == 0
    return path


def test_what_was_found_is_not_lost_with_a_page_that_cannot_be_written(elman, run, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elman.page.write_atomically", fail)
    answer = elman("inspect", "embeddings", run, "a", "--html", tmp_path / "page.html")
    assert answer.code == 2
    assert "nearest" in answer.out
    assert "the page cannot be written" in answer.err


def test_units_that_are_asked_for_are_shown_in_the_terminal_too(elman, run, corpus):
    call = ("inspect", "units", run, corpus, "--label", "word-start", "--max-tokens", "1100")
    out = elman(*call, "--unit", "0.c:3", "--unit", "0.forget_gate:4").out
    assert "1,088 of 1,100 tokens, whole blocks of 64" in out
    assert "where unit 3 of 0.c is highest" in out
    assert "where unit 4 of 0.forget_gate is highest" in out
    assert "is highest" not in elman(*call).out
    verdicts = {"yes", "no, score", "no, effect"}
    rows = [line for line in out.splitlines() if line.startswith(" word-start")]
    assert len(rows) == 2
    for verdict in verdicts - {"yes"}:
        assert any(verdict in row for row in rows) == (f"{verdict}: " in out)
    assert all(any(verdict in row for verdict in verdicts) for row in rows)


@pytest.mark.parametrize(
    "name", ["units", "state", "embeddings", "closing", "errors", "saliency", "gradients", "probe", "mitigations"]
)
def test_every_option_says_what_it_does(elman, name):
    out = " ".join(elman("inspect", name, "--help").out.replace("│", " ").split())
    assert "Print one JSON object on standard output." in out
    assert "Write a page to look at" in out
    if name not in ("embeddings", "probe", "mitigations"):
        assert "The part of the corpus; none: the test part" in out
    if name in ("units", "state", "closing", "errors"):
        assert "Read so many tokens of the text." in out
    if name in ("units", "state", "embeddings", "closing", "errors", "saliency"):
        assert "A run folder" in out


def test_embeddings(elman, run, tmp_path):
    assert elman("inspect", "embeddings", run, "a", "--json").json["neighbours"][0]["token"] == "a"
    assert "nearest" in elman("inspect", "embeddings", run).out
    assert elman("inspect", "embeddings", run, "ab").code == 2


def test_two_models(elman, run, corpus):
    call = ("inspect", "errors", run, corpus, "--against", run / "model.safetensors")
    assert elman(*call, "--json").json["difference_interval"] == [0.0, 0.0]
    out = elman(*call).out
    assert "nats per token" in out
    assert "difference of all, 95 % interval: 0.0000 to 0.0000: no difference beyond chance" in out
    assert "0.0% of the tokens are cheaper for" in out
    assert next(line for line in out.splitlines() if line.startswith(" all ")).split()[-1] == "0.0000"
    assert elman(*call, "--order", "3").code == 2
    assert "accepted: 1 to 12" in elman("inspect", "errors", run, corpus, "--order", "0").err


def test_what_is_missing_is_said_in_one_line(elman, run, corpus):
    for words, message in (
        (("closing", run, corpus), "no quotes and no brackets are closed"),
        (("units", run), "takes 1,024 and more"),
        (("units", run, corpus, "--unit", "0.c:12"), "0.c has the units 0 to 11"),
        (("units", run, corpus, "--label", "comments"), "comments"),
        (("state", run, corpus, "--method", "umap"), "umap-learn"),
    ):
        answer = elman("inspect", *words)
        assert answer.code == 2
        assert message in answer.err
        assert answer.err.count("\n") == 1


def test_closing(elman, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("f('a', [b]) and \"c\"\n" * 60, "utf-8")
    out, page = tmp_path / "run", tmp_path / "page.html"
    assert elman("train", text, "--model.kind", "ngram", "--model.order", "4", "--out", out).code == 0
    assert "tokens since the opening" in elman("inspect", "closing", out, text).out
    groups = elman("inspect", "closing", out, text, "--json", "--html", page).json["groups"]
    assert [group["name"] for group in groups] == ["quotes", "brackets"]
    assert "the most common sign" in page.read_text("utf-8")


def test_closing_by_several_models_side_by_side(elman, run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(f"f({'a' * 120}, '{'b' * 60}') and so on\n" * 30, "utf-8")
    models = []
    for order in (1, 4):
        models.append(tmp_path / f"order-{order}")
        words = ("train", text, "--model.kind", "ngram", "--model.order", order, "--out", models[-1])
        assert elman(*words).code == 0
    answer = elman("inspect", "closing", *models, text, "--samples", 3)
    rows = [line.split() for line in answer.out.splitlines() if line.strip().startswith("100 to 199")]
    assert [row[3:5] for row in rows] == [["30", "order-1"], ["30", "order-4"]]
    assert "closed within 100 more" in answer.out
    assert not any(cell.startswith("*") for row in rows for cell in row)  # of 30 cases
    few = [line.split() for line in answer.out.splitlines() if line.split()[:2] == ["50", "3"]]
    assert few
    assert all(cell.startswith("*") for row in few for cell in row[2:])
    assert answer.out.rstrip().endswith("*: of fewer than 10 cases, by which little can be judged")
    found = elman("inspect", "closing", *models, text, "--samples", 3, "--json").json
    assert found["models"] == {"order-1": "ngram", "order-4": "ngram"}
    brackets = found["groups"][1]
    (near,) = [one for one in brackets["by_distance"] if one["nearest"] == 100]
    assert (near["farthest"], near["cases"]) == (199, 30)
    cases = {one["distance"]: one["cases"] for one in brackets["written_on"]}
    assert cases == {50: 3, 100: 3, 200: 0, 400: 0}
    for words, message in (
        ((models[0], models[0]), "given twice"),
        ((models[0], run, text), "has other tokens than"),
        ((models[0], "--samples", -1), "accepted: 0 and more"),
    ):
        answer = elman("inspect", "closing", *words)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert message in answer.err


def test_probe(elman, tmp_path):
    assert elman("inspect", "probe", tmp_path, "--task", "nothing").code == 2
    assert elman("inspect", "probe", tmp_path, "--rate", "0.01", "--rate", "2").code == 2
    words = ("inspect", "probe", tmp_path / "trials", "--task", "anbn", "--kind", "ngram")
    assert "(a's; learned up to 12)" in elman(*words).out
    answer = elman(*words, "--json", "--html", tmp_path / "page.html")
    assert answer.json["trials"][0]["kind"] == "ngram"
    assert "anbn ngram" in answer.err
    assert (tmp_path / "page.html").exists()
    assert "nine of ten answers" not in answer.out
    assert "nine of ten answers" in elman(*words, "--task", "parity").out


def test_probe_tells_all_it_trains_and_what_a_guess_has(elman, tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "_LEARNED_EXAMPLES", 1200)
    monkeypatch.setattr(probing, "_ASKED_CASES", 40)
    words = ("--task", "modular-arithmetic", "--kind", "elman", "--updates", 2, "--parameters", 1000)
    answer = elman("inspect", "probe", tmp_path, *words)
    told = [re.match(r"(\S+ \S+) at ([\d.e-]+): ", line).groups() for line in answer.err.splitlines()]
    assert [name for name, _ in told] == ["parity elman", "modular-arithmetic elman"]  # the first to find the rate
    assert len({rate for _, rate in told}) == 1
    assert "(terms; learned up to 5); guess: the last term, reckoned from 0" in answer.out
    (row,) = (line.split() for line in answer.out.splitlines() if line.strip().startswith("guess"))
    assert row == ["guess", "30.3%", "32.0%", "32.1%", "32.1%", "32.1%"]


def test_what_probe_has_finished_before_ctrl_c_is_kept_and_said(elman, tmp_path, monkeypatch):
    really = probing._trial

    def interrupted(out, task, kind, *others):
        if kind == "elman":
            raise KeyboardInterrupt
        return really(out, task, kind, *others)

    monkeypatch.setattr(probing, "_trial", interrupted)
    answer = elman("inspect", "probe", tmp_path, "--task", "anbn", "--kind", "ngram", "--kind", "elman")
    assert (answer.code, answer.out) == (128 + signal.SIGINT, "")
    assert f"what was finished is kept in {tmp_path}" in answer.err
    assert (tmp_path / "anbn-ngram" / "probe.json").is_file()
