"""``score``: figures equal to those of ``eval``, lines as they arrive, marks, places and rankings."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time

import pytest

import elman as package
from elman.scoring import by_line, score_stream, score_texts
from elman.text.sources import Piece


@pytest.fixture
def typed(monkeypatch):
    """Put bytes on standard input."""

    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return put


def test_the_summary_is_what_eval_says(elman, run, corpus):
    whole = elman("eval", run, corpus, "--json").json
    result = elman("score", run, corpus, "--json", "--top", 3).json
    assert result["tokens"] == whole["tokens"]
    assert result["nats_total"] == pytest.approx(whole["nats_total"], rel=1e-9)
    assert len(result["most_surprising"]) == 3
    nats = [place["nats"] for place in result["most_surprising"]]
    assert nats == sorted(nats, reverse=True)
    shown = elman("score", run, corpus, "--top", 3).out
    assert f"{whole['nats_per_token']:.4f} nats" in shown
    assert "[" + result["most_surprising"][0]["text"] + "]" in shown.replace("↵", "\n")


def test_lines_are_those_of_python_and_the_surprising_ones_are_marked(elman, run, typed):
    text = "the cat\nhhhhhh\nand so on"
    model = package.load(run)
    lines = list(by_line(score_stream(model, [Piece(text, starts_document=False)])))
    middle = sorted(line.nats_per_token for line in lines)[1]
    typed(text.encode())
    answer = elman("score", run, "--by", "line", "--threshold", middle, "--json")
    found = [json.loads(line) for line in answer.out.splitlines()]
    assert [f["text"] for f in found] == text.split("\n")
    assert [f["nats"] for f in found] == pytest.approx([line.nats for line in lines])
    assert [f["marked"] for f in found] == [line.nats_per_token > middle for line in lines]
    typed(text.encode())
    marked = elman("score", run, "--threshold", middle, "--marked").out.splitlines()
    assert len(marked) == 1
    assert marked[0].startswith("! ")


def test_a_quantile_waits_until_it_knows_something(elman, run, typed):
    usual, odd = "the cat sat\n" * 150, "hththt\n"
    typed((odd + usual + odd).encode())
    marked = elman("score", run, "--quantile", "0.99", "--marked", "--json").out.splitlines()
    numbers = [json.loads(line)["line"] for line in marked]
    assert numbers[-1] == 152
    assert 1 not in numbers


def test_tokens_and_bytes_that_are_no_text(elman, run, typed):
    typed(b"th\xff\r\ne")
    found = [json.loads(line) for line in elman("score", run, "--by", "token", "--json").out.splitlines()]
    assert [f["text"] for f in found] == ["t", "h", "<unk>", "\n", "e"]


def test_candidates_are_ranked_by_what_the_model_thinks_of_them(elman, run, typed):
    texts = ["the cat", "cat the", "hhhhhhh"]
    scores = score_texts(package.load(run), texts, prompt="so ")
    typed("\n".join(texts).encode())
    ranking = elman("score", run, "--rank", "--prompt", "so ", "--json").json["ranking"]
    assert [(r["text"], r["nats"]) for r in ranking] == sorted(((s.text, s.nats) for s in scores), key=lambda p: p[1])
    typed("\n".join(texts).encode())
    rows = [row for row in elman("score", run, "--rank", "--prompt", "so ").out.splitlines() if row.strip()]
    assert [row.split("  ")[0].strip() for row in rows[-3:]] == [r["text"] for r in ranking]


def test_documents_are_ranked_apart(elman, run, tmp_path):
    (tmp_path / "a.txt").write_text("the cat", encoding="utf-8")
    (tmp_path / "b.txt").write_text("the sat", encoding="utf-8")
    ranking = elman("score", run, tmp_path / "a.txt", tmp_path / "b.txt", "--rank", "--json").json["ranking"]
    assert {entry["text"] for entry in ranking} == {"the cat", "the sat"}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--rank", "--by", "line"), "--rank scores whole texts"),
        (("--prompt", "x"), "--prompt belongs to --rank"),
        (("--marked",), "--marked needs something to mark by"),
        (("--quantile", "1.5"), "between 0 and 1"),
        (("--top", "-1"), "accepted: 0 and more"),
        (("--top", "3", "--by", "line"), "--top belongs to the summary"),
        (("a.txt", "b.txt", "--follow"), "--follow reads one file"),
        (("--rank",), "no text to rank"),
        ((), "the text is empty"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(elman, run, typed, words, what):
    typed(b"")
    answer = elman("score", run, *words)
    assert answer.code == 2
    assert what in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.dist
def test_a_growing_file_is_followed_line_by_line(run, environment, tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("the cat\n", encoding="utf-8")
    words = [sys.executable, "-m", "elman", "score", str(run), str(log), "--follow"]

    def heed_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite in the background may have been told to ignore them

    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_interrupts
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("the cat\n")
        with log.open("a", encoding="utf-8") as file:
            file.write("sat on")
            file.flush()
            time.sleep(0.3)
            file.write(" the mat\nand")
        assert process.stdout.readline().endswith("sat on the mat\n")
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert rest == ""
    assert process.returncode == 0


@pytest.mark.parametrize("level", ["bpe", "word", "byte", "char"])
def test_bytes_that_are_no_text_do_not_end_a_stream(elman, corpus, tiny, tmp_path, typed, level):
    out = tmp_path / "run"
    settings = ("--tokenizer.max-size", 300) if level == "bpe" else ()
    elman("train", corpus, "--out", out, *tiny, "--tokenizer.level", level, *settings)
    typed(b"the cat\xff\xc3 sat\nthe dog\n")
    answer = elman("score", out, "--by", "line", "--json")
    assert answer.code == 0
    assert [json.loads(line)["line"] for line in answer.out.splitlines()] == [1, 2]


def test_what_the_model_never_saw_is_refused_left_out_or_read_as_unknown(elman, run, typed):
    def ranked(*words):
        typed("the cat\nthe Жcat\n".encode())
        return elman("score", run, "--rank", *words)

    refused = ranked()
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "lacks 1 character of the text: 'Ж'" in refused.err
    assert "--unknown skip" in refused.err
    first, second = ranked("--unknown", "skip", "--json").json["ranking"]
    assert first["nats"] == pytest.approx(second["nats"])
    assert sorted(one["tokens"] for one in ranked("--unknown", "token", "--json").json["ranking"]) == [7, 8]
    typed("Жa".encode())
    assert elman("score", run, "--unknown", "skip", "--json").json["tokens"] == 1
    typed("Жa".encode())
    assert elman("score", run, "--unknown", "error").code == 2
