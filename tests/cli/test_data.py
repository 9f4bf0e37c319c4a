"""``data`` and ``check``: thin over the functions that they show."""

from __future__ import annotations

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
