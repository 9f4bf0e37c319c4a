"""``data`` and ``check``: thin over the functions that they show."""

from __future__ import annotations

import json

from elman.text.corpora import corpus_names


def test_every_named_corpus_is_listed(elman):
    listed = elman("data", "list").out
    assert all(name in listed for name in corpus_names())
    assert [corpus["name"] for corpus in elman("data", "list", "--json").json["corpora"]] == corpus_names()


def test_inspect_shows_counts_pairs_and_what_would_go_wrong(elman, corpus, tmp_path):
    answer = elman("data", "inspect", corpus, "--training.bptt", 8)
    assert answer.code == 0
    assert "pair" in answer.out
    report = elman("data", "inspect", corpus, "--training.bptt", 8, "--json").json
    text = corpus.read_text(encoding="utf-8")
    assert sum(part["characters"] for part in report["parts"].values()) == len(text)
    assert report["bptt"] == 8
    assert report["pairs"][0]["targets"].startswith(text[:4])
    tiny = tmp_path / "tiny.txt"
    tiny.write_text("hello, world.", encoding="utf-8")
    assert "warning" in elman("data", "inspect", tiny).out


def test_a_text_is_prepared_into_a_folder_that_is_a_corpus(elman, corpus, tmp_path, tiny):
    out = tmp_path / "my corpus"
    answer = elman("data", "prepare", corpus, "--out", out, "--shard-tokens", 1000, "--data.valid_fraction", 0.1)
    assert answer.code == 0
    assert f"elman train '{out}'" in answer.out
    assert {path.name for path in out.iterdir()} > {"dataset.json", "train-00000.bin", "valid-00000.bin"}
    assert elman("train", out, "--out", tmp_path / "run", *tiny).code == 0
    assert elman("eval", tmp_path / "run").code == 0
    report = elman("data", "prepare", corpus, "--out", tmp_path / "b", "--json").json
    assert report["files"] == len(report["tokens"]) == 3
    assert elman("data", "prepare", corpus, "--out", out).code == 2


def test_what_is_built_in_need_not_be_fetched(elman):
    answer = elman("data", "fetch", "stdlib-prose")
    assert answer.code == 2
    assert "nothing to fetch" in answer.err


def test_check_prints_a_line_for_each_broken_law_and_exits_with_1(elman, tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        "from elman.cells.elman import Elman\n"
        "class Bad(Elman):\n"
        "    def scan(self, p, x_BTI, state):\n"
        "        output, state = self.readable_scan(p, x_BTI, state)\n"
        "        return output * 1.5, state\n",
        encoding="utf-8",
    )
    broken = elman("check", f"{file}:Bad")
    assert broken.code == 1
    assert len(broken.out.splitlines()) >= 1


def test_check_says_so_where_every_law_is_kept(elman, monkeypatch):
    monkeypatch.setattr("elman.models.laws.check_cell", lambda kind: [])
    sound = elman("check", "elman")
    assert (sound.code, sound.out) == (0, "elman keeps every law\n")
    assert elman("check", "elman", "--json").json == {"cell": "elman", "findings": []}


def test_prepare_says_what_repeats_what_and_leaves_it_out_when_asked(elman, tmp_path):
    texts = [
        "the moon saw a cat and a dog on the mat",
        "a cat sat on the log",
        "the moon saw a cat and a dog on the mat",
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    settings = ("--data.valid_fraction", 0, "--data.test_fraction", 0)
    answer = elman("data", "prepare", file, "--out", tmp_path / "seen", "--dedup", *settings)
    assert answer.code == 0
    assert "all 2 is equal to all 0: 'the moon saw" in answer.out
    result = elman("data", "prepare", file, "--out", tmp_path / "clean", "--dedup", *settings, "--json").json
    assert (result["duplicates"]["parts"]["all"]["exact"], result["duplicates"]["threshold"]) == (1, 0.8)
    report = elman("data", "inspect", tmp_path / "clean", "--json").json
    assert report["parts"]["train"]["documents"] == 2
    assert any("1 of 3 documents left out" in notice for notice in report["notices"])
    for words in (["--threshold", 0.9], ["--dedup", "--threshold", 0], ["--dedup", "--data.pairs"]):
        refused = elman("data", "prepare", file, "--out", tmp_path / "new", *words)
        assert refused.code == 2
        assert refused.err.count("\n") == 1
    assert not (tmp_path / "new").exists()
