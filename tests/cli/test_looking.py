"""``elman inspect units|state|embeddings|probe|closing|errors``: table, JSON and page."""

from __future__ import annotations

import pytest


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
    assert elman(*call, "--html", path).out == f"written: {path}\n"


def test_embeddings(elman, run, tmp_path):
    assert elman("inspect", "embeddings", run, "a", "--json").json["neighbours"][0]["token"] == "a"
    assert "nearest" in elman("inspect", "embeddings", run).out
    assert elman("inspect", "embeddings", run, "ab").code == 2


def test_two_models(elman, run, corpus):
    call = ("inspect", "errors", run, corpus, "--against", run / "model.safetensors")
    assert elman(*call, "--json").json["difference_interval"] == [0.0, 0.0]
    assert "nats per token" in elman(*call).out
    assert elman(*call, "--order", "3").code == 2


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


def test_probe(elman, tmp_path):
    assert elman("inspect", "probe", tmp_path, "--task", "nothing").code == 2
    words = ("inspect", "probe", tmp_path / "trials", "--task", "anbn", "--kind", "ngram")
    assert "learned up to length 12" in elman(*words).out
    answer = elman(*words, "--json", "--html", tmp_path / "page.html")
    assert answer.json["trials"][0]["kind"] == "ngram"
    assert "anbn ngram" in answer.err
    assert (tmp_path / "page.html").exists()
