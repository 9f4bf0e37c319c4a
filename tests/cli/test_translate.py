"""``elman translate`` and ``elman eval`` on a run of pairs."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from elman.cli import main


@pytest.fixture(scope="module")
def pairs_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    words = ["ab", "ba", "abc", "cab", "bca", "c", "a", "b"]
    (folder / "words.tsv").write_text("".join(f"{w}\t{w[::-1]}\n" for w in words * 12), encoding="utf-8")
    arguments = [
        "train",
        str(folder / "words.tsv"),
        "--data.pairs",
        "--model.kind=seq2seq",
        "--model.hidden_size=12",
        "--model.embedding_size=8",
        "--training.batch_size=8",
        "--training.max_updates=12",
        "--training.num_threads=1",
        "--sampling.max_new_tokens=8",
        "--out",
        str(folder / "run"),
    ]
    assert main(arguments) == 0
    return folder / "run"


def test_targets_come_a_line_each_from_arguments_or_standard_input(elman, pairs_run, monkeypatch):
    answer = elman("translate", pairs_run, "ab", "c", "bca")
    assert answer.code == 0
    assert answer.out.count("\n") == 3
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"ab\nc\nbca\n")))
    assert elman("translate", pairs_run, "-").out == answer.out
    result = elman("translate", pairs_run, "ab", "--num-beams", 3, "--json").json
    (translation,) = result["translations"]
    assert set(translation) == {"source", "text", "tokens", "nats", "finished"}
    assert (result["num_beams"], result["updates"]) == (3, 12)


def test_only_line_ends_part_sources(elman, pairs_run, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("a\u2028b\r\nc\x85\x0ca\n".encode())))
    result = elman("translate", pairs_run, "--unknown", "skip", "--json").json
    assert [found["source"] for found in result["translations"]] == ["a\u2028b", "c\x85\x0ca"]


def test_eval_reports_what_is_right(elman, pairs_run):
    result = elman("eval", pairs_run, "--json").json
    assert result["state_policy"] == "pairs"
    assert set(result["pairs"]) == {
        "num_beams",
        "examples",
        "exact_match",
        "token_accuracy",
        "written_token_accuracy",
        "nats_per_token",
        "by_target_length",
    }
    assert result["pairs"]["nats_per_token"] == pytest.approx(result["nats_per_token"], rel=1e-5)
    answer = elman("eval", pairs_run, "--num-beams", 2)
    assert "targets written with 2 beams, by their length in tokens" in answer.out


def test_the_interval_of_pairs_is_printed_as_that_of_a_text(elman, pairs_run):
    result = elman("eval", pairs_run, "--split", "train", "--json").json
    low, high = result["interval"]["nats_per_token"]
    assert low < result["nats_per_token"] < high
    assert result["interval"]["blocks"] == min(100, result["pairs"]["examples"])
    assert "95% interval of nats/token" in elman("eval", pairs_run, "--split", "train").out
    assert elman("eval", pairs_run, "--json").json["interval"] is None  # fewer than ten examples


def test_eval_reads_pairs_from_another_file(elman, pairs_run, tmp_path):
    (tmp_path / "more.tsv").write_text("ab\tba\nc\tc\n", encoding="utf-8")
    result = elman("eval", pairs_run, tmp_path / "more.tsv", "--json").json
    assert (result["split"], result["pairs"]["examples"], result["tokens"]) == ("text", 2, 5)


def test_an_ordinary_run_says_null(elman, run):
    assert elman("eval", run, "--json").json["pairs"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["translate", "PAIRS", "ab", "--num-beams", "0"], "num_beams is 0; accepted: 1 (greedy) and more"),
        (["translate", "PAIRS", "xyz"], "never saw: 'x' 'y' 'z'"),
        (["translate", "PAIRS", ""], "source 1 is empty"),
        (["translate", "RUN", "ab"], "not trained on pairs of source and target"),
        (["sample", "PAIRS"], "was trained on pairs and writes targets of sources: elman translate"),
        (["eval", "RUN", "--num-beams", "2"], "--num-beams has no meaning here"),
        (["eval", "PAIRS", "--num-beams", "0"], "num_beams is 0; accepted: 1"),
        (["eval", "PAIRS", "--state", "carried"], "leave --state, --baselines, --window"),
        (["eval", "PAIRS", "--baselines"], "leave --state, --baselines, --window"),
        (["eval", "PAIRS", "stdlib-prose"], "'stdlib-prose' has no pairs of source and target"),
        (["train", "--data.pairs"], "'stdlib-prose' has no pairs of source and target"),
        (["train", "synthetic:reversing", "--model.kind", "seq2seq"], "set data.pairs true"),
    ],
)
def test_mistakes_are_one_line(elman, run, pairs_run, words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = elman(*({"PAIRS": pairs_run, "RUN": run}.get(word, word) for word in words))
    assert answer.code == 2
    assert says in answer.err
    assert answer.err.count("\n") == 1
