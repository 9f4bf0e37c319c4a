"""``eval`` and the function behind it: which text, which figures, which baselines."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

import elman as package
from elman.errors import TextError, UserError
from elman.evaluation import Evaluation
from elman.judge import evaluate
from elman.metrics import Score


def held_out(corpus: Path, first: float, last: float) -> str:
    text = corpus.read_text(encoding="utf-8")
    return text[round(first * len(text) - 0.5) : round(last * len(text) - 0.5) if last < 1 else None]


@pytest.mark.parametrize(("split", "first", "last"), [("test", 0.95, 1), ("valid", 0.9, 0.95), ("train", 0, 0.9)])
def test_each_part_gives_the_figures_of_its_text_scored_by_itself(run, corpus, split, first, last):
    judgement = evaluate(run, split=split)
    text = held_out(corpus, first, last)
    expected = package.load(run).score(text).score
    assert judgement.evaluation.score.chars == len(text)
    assert judgement.evaluation.score.bytes == len(text.encode())
    assert judgement.evaluation.score.nats_total == pytest.approx(expected.nats_total, rel=1e-9)


def test_json_has_the_keys_that_others_rely_on(elman, run):
    result = elman("eval", run, "--json").json
    assert result["split"] == "test"
    assert (result["seed"], result["updates"], result["level"]) == (7, 8, "char")
    assert result["tokens"] == result["chars"]
    assert result["bits_per_char"] == pytest.approx(result["nats_total"] / math.log(2) / result["chars"])
    assert result["bits_per_byte"] < result["bits_per_char"]
    assert result["perplexity"] == pytest.approx(math.exp(result["nats_per_token"]))
    assert result["state_policy"] == "carried"
    assert len(result["corpus_sha256"]) == 64
    assert result["baselines"] == {}


def test_baselines_stand_beside_the_model_sorted(elman, run):
    result = elman("eval", run, "--baselines", "--json").json
    assert set(result["baselines"]) == {"uniform", "unigram", "gzip", "bzip2", "xz"}
    assert result["baselines"]["uniform"]["perplexity"] == pytest.approx(result["vocabulary"])
    answer = elman("eval", run, "--baselines")
    figures = {line.split()[0]: float(line.split()[-4]) for line in answer.out.splitlines() if "." in line[:40]}
    assert list(figures.values()) == sorted(figures.values())
    assert "the test part of" in answer.out
    assert "perplexity per" in answer.out


def test_a_text_of_one_s_own_from_a_file_or_standard_input(elman, run, tmp_path, monkeypatch):
    file = tmp_path / "mine.txt"
    file.write_bytes(b"the cat sat.\r\n")
    named = elman("eval", run, file, "--json").json
    expected = package.load(run).score("the cat sat.\n")
    assert named["split"] == "text"
    assert named["nats_total"] == pytest.approx(expected.score.nats_total)
    assert any("CR LF" in notice for notice in named["notices"])
    with file.open(encoding="utf-8") as piped_in:
        monkeypatch.setattr("sys.stdin", piped_in)
        piped = elman("eval", run, "-", "--json").json
    assert piped["nats_total"] == named["nats_total"]
    assert piped["corpus_sha256"] == named["corpus_sha256"]


def test_a_bare_model_file_serves_where_a_text_is_given(elman, run, corpus, tmp_path):
    model = shutil.copy(run / "model.safetensors", tmp_path / "m.safetensors")
    bare = elman("eval", model, corpus, "--json").json
    assert bare["nats_total"] == elman("eval", run, corpus, "--json").json["nats_total"]
    for words in ([], [corpus, "--baselines"]):
        answer = elman("eval", model, *words)
        assert answer.code == 2
        assert "run folder" in answer.err
        assert answer.err.count("\n") == 1


def test_unknown_characters_leave_the_figures_per_character_undefined(elman, run, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("the cat Ж", encoding="utf-8")
    answer = elman("eval", run, file)
    assert "1 tokens are <unk>" in answer.err
    assert " - " in answer.out
    result = elman("eval", run, file, "--json").json
    assert result["bits_per_char"] is None
    assert result["unknown_tokens"] == 1


def test_reset_reads_every_document_from_the_start(run, tmp_path):
    texts = ["the cat", "a dog saw the moon", "the log."]
    for index, text in enumerate(texts):
        (tmp_path / f"{index}.txt").write_text(text, encoding="utf-8")
    judgement = evaluate(run, tmp_path, state_policy="reset")
    model = package.load(run)
    # The boundary that ends a document is predicted too, but for the last one.
    ended = [model.score(text).score.nats_total for text in texts]
    assert judgement.evaluation.num_documents == 3
    assert judgement.evaluation.score.tokens == sum(map(len, texts)) + 2
    assert judgement.evaluation.score.nats_total > sum(ended)
    carried = evaluate(run, tmp_path).evaluation.score
    assert carried.tokens == judgement.evaluation.score.tokens
    assert carried.nats_total != judgement.evaluation.score.nats_total


def test_given_parts_are_used_as_they_are(elman, run, tmp_path):
    for part, text in {"train": "the cat sat.", "valid": "a dog.", "test": "the moon."}.items():
        (tmp_path / f"{part}.txt").write_text(text, encoding="utf-8")
    assert elman("eval", run, tmp_path, "--json").json["chars"] == len("the moon.")
    assert elman("eval", run, tmp_path, "--split", "valid", "--json").json["chars"] == len("a dog.")
    (tmp_path / "test.txt").unlink()
    assert elman("eval", run, tmp_path, "--json").json["split"] == "valid"
    with pytest.raises(UserError, match="no test part"):
        evaluate(run, tmp_path, split="test")
    with pytest.raises(UserError, match="without parts"):
        evaluate(run, tmp_path / "train.txt", split="test")


def test_the_valid_part_stands_in_for_the_test_part_and_nothing_for_none(elman, corpus, tmp_path, tiny):
    out = tmp_path / "run"
    elman("train", corpus, "--out", out, *tiny, "--data.test_fraction", 0)
    assert elman("eval", out, "--json").json["split"] == "valid"
    elman("train", corpus, "--out", out, "--overwrite", *tiny, "--data.test_fraction", 0, "--data.valid_fraction", 0)
    answer = elman("eval", out)
    assert answer.code == 2
    assert "nothing of this corpus was held out" in answer.err
    assert elman("eval", out, "--split", "train").code == 0


def test_a_corpus_that_has_changed_since_is_refused(elman, corpus, tmp_path, tiny):
    mine, out = tmp_path / "mine.txt", tmp_path / "run"
    shutil.copy(corpus, mine)
    elman("train", mine, "--out", out, *tiny)
    mine.write_text(mine.read_text(encoding="utf-8") + "more", encoding="utf-8")
    with pytest.raises(TextError, match="has changed"):
        evaluate(out)
    assert evaluate(out, mine).split == "text"


def test_infinite_perplexity_prints_inf_and_is_null_in_json(elman, run, monkeypatch):
    hopeless = Evaluation(Score(1e6, 10, 10, 10), "carried", 1, 1, 0, 50)
    monkeypatch.setattr("elman.judge.evaluate_split", lambda *arguments, **options: hopeless)
    assert " inf " in elman("eval", run).out
    result = elman("eval", run, "--json").json
    assert result["perplexity"] is None
    assert result["perplexity_is_infinite"] is True
