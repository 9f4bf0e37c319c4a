"""``eval`` and the function behind it: which text, which figures, which baselines."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

import elman as package
from elman.errors import TextError, UserError
from elman.evaluation import Evaluation
from elman.judge import dataset_of_run, evaluate
from elman.metrics import Score
from elman.models.file import load_model, model_bytes


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
    ngrams = {"2-gram", "3-gram", "6-gram"}
    assert set(result["baselines"]) == {"uniform", "unigram", "gzip", "bzip2", "xz", "zstd"} | ngrams
    assert all(figures["words"] == result["words"] for figures in result["baselines"].values())
    assert result["baselines"]["uniform"]["perplexity"] == pytest.approx(result["vocabulary"])
    answer = elman("eval", run, "--baselines")
    figures = {
        line.split()[0]: float(line.split()[-5])
        for line in answer.out.splitlines()
        if line.strip().startswith((*result["baselines"], "this"))
    }
    assert len(figures) == 10
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


def test_the_figures_stand_beside_their_interval_and_the_words_of_the_text(elman, run, corpus):
    result = elman("eval", run, corpus, "--accuracy", "--json").json
    text = corpus.read_text(encoding="utf-8")
    assert result["words"] == len(text.split())
    assert result["perplexity_per_word"] == pytest.approx(math.exp(result["nats_total"] / len(text.split())))
    interval = result["interval"]
    assert (interval["level"], interval["resamples"], interval["seed"]) == (0.95, 10_000, 0)
    for name in ("nats_per_token", "perplexity", "bits_per_char", "bits_per_byte"):
        low, high = interval[name]
        assert low < result[name] < high
    assert 0 < result["accuracy_at_1"] < result["accuracy_at_5"] < 1
    assert sum(one["tokens"] for one in result["calibration"]) == result["tokens"]
    answer = elman("eval", run, corpus, "--accuracy").out
    assert "95% interval of nats/token" in answer
    assert "right at the first guess" in answer


def test_windows_are_asked_for_and_said(elman, run):
    result = elman("eval", run, "--window", 16, "--json").json
    assert (result["state_policy"], result["window"], result["stride"]) == ("window", 16, 8)
    assert elman("eval", run, "--window", 16, "--stride", 1, "--json").json["stride"] == 1
    assert "windows of 16 moving on by 8" in elman("eval", run, "--window", 16).out
    for words in (["--stride", 4], ["--window", 4, "--stride", 5]):
        answer = elman("eval", run, *words)
        assert answer.code == 2
        assert answer.err.count("\n") == 1


def test_what_each_token_cost_is_written_as_json_and_as_a_page(elman, run, tmp_path):
    lines, page = tmp_path / "tokens.jsonl", tmp_path / "text.html"
    result = elman("eval", run, "--tokens", lines, "--html", page, "--json").json
    tokens = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert len(tokens) == result["tokens"]
    assert sum(token["nats"] for token in tokens) == pytest.approx(result["nats_total"], rel=1e-12)
    assert "".join(token["text"] for token in tokens) == held_out_text(run)
    assert "the test part of" in page.read_text(encoding="utf-8")
    answer = elman("eval", run, "--tokens", tmp_path / "no" / "tokens.jsonl")
    assert answer.code == 2
    assert answer.err.count("\n") == 1


def held_out_text(run: Path) -> str:
    dataset = dataset_of_run(run)
    return dataset.tokenizer.decode(dataset.test.tokens[1:])


def test_models_that_learn_stand_in_columns_of_their_own(elman, run, monkeypatch):
    monkeypatch.setattr("elman.adaptation.LEARNING_RATES", (1e-4, 1e-3))
    monkeypatch.setattr("elman.adaptation.DECAYS", (1e-3,))
    plain = elman("eval", run, "--json").json
    assert (plain["dynamic"], plain["cache"]) == (None, None)
    result = elman("eval", run, "--dynamic", "--cache", "--json").json
    assert result["nats_total"] == plain["nats_total"]
    assert result["dynamic"]["tuned_on"] == result["cache"]["tuned_on"] == "the beginning of the valid part"
    assert result["dynamic"]["tokens"] == result["cache"]["tokens"] == plain["tokens"]
    assert result["dynamic"]["settings"].keys() == {"learning_rate", "decay", "segment_length"}
    assert result["cache"]["settings"].keys() == {"size", "flatness", "weight"}
    assert result["dynamic"]["nats_total"] != plain["nats_total"]
    of_valid = elman("eval", run, "--split", "valid", "--cache", "--json").json["cache"]
    assert of_valid["tuned_on"].startswith("the end of the train part")
    answer = elman("eval", run, "--dynamic", "--cache").out
    assert "dynamic: learning rate" in answer
    assert "with a cache: size" in answer


@pytest.mark.parametrize("words", [["--state", "reset"], ["--window", "8"]])
def test_models_that_learn_need_one_stream(elman, run, words):
    answer = elman("eval", run, "--dynamic", *words)
    assert answer.code == 2
    assert "learn from one stream" in answer.err
    assert answer.err.count("\n") == 1


def test_an_ngram_cannot_learn_while_it_is_judged(elman, corpus, tmp_path):
    out = tmp_path / "run"
    assert elman("train", corpus, "--out", out, "--model.kind", "ngram", "--model.order", 3).code == 0
    answer = elman("eval", out, "--cache")
    assert answer.code == 2
    assert "neither gradients nor features" in answer.err
    assert elman("eval", out, "--accuracy", "--json").json["accuracy_at_1"] > 0.3


def test_unknown_words_have_a_rate_and_a_price(elman, corpus, tmp_path, tiny):
    out = tmp_path / "run"
    assert (
        elman("train", corpus, "--out", out, *tiny, "--tokenizer.level", "word", "--tokenizer.max_size", 12).code == 0
    )
    result = elman("eval", out, "--json").json
    assert result["unknown_rate"] == pytest.approx(result["unknown_tokens"] / result["tokens"])
    assert result["unknown_kinds"] > 3
    assert result["adjusted_perplexity"] > result["perplexity"]
    assert "of the tokens are <unk>; perplexity that has to say which one each is" in elman("eval", out).out


def test_weights_that_give_no_numbers_are_told(run, tmp_path):
    bundle = load_model(run)
    for parameter in bundle.network.parameters():
        parameter.data.sign_().mul_(3e38)
    path = tmp_path / "model.safetensors"
    path.write_bytes(model_bytes(bundle))
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 20)
    judgement = evaluate(path, tmp_path / "text.txt")
    assert math.isnan(judgement.evaluation.score.nats_per_token)
    assert any("gives no number (nan) for some tokens" in notice for notice in judgement.notices)
    assert not any("gives no number" in notice for notice in evaluate(run).notices)
