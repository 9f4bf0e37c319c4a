"""The n-gram model on the command line: train, judge, sample, look into, export."""

from __future__ import annotations

import pytest

from elman.cli import main
from elman.cli.display import picture
from elman.training.folder import Run


@pytest.fixture(scope="module")
def ngram_run(tmp_path_factory, corpus):
    path = tmp_path_factory.mktemp("runs") / "ngram"
    words = ["--model.kind", "ngram", "--model.order", "3", "--sampling.max_new_tokens", "12"]
    assert main(["train", str(corpus), "--out", str(path), *words]) == 0
    return path


def test_training_says_what_it_did(elman, corpus, tmp_path):
    answer = elman("train", corpus, "--out", tmp_path / "run", "--model.kind", "ngram", "--sampling.max_new_tokens", 5)
    assert answer.code == 0
    assert "update 1, epoch 1: " in answer.err
    assert "gradient" not in answer.err
    assert "bits/char at update 1" in answer.out
    again = elman("resume", tmp_path / "run")
    assert again.code == 0
    assert "there is nothing left to do" in again.err


def test_a_picture_of_the_run_can_be_drawn(ngram_run):
    run = Run.open(ngram_run)
    assert "ngram" in picture(run.config(), run.records())


def test_a_dry_run_shows_the_plan(elman, corpus):
    answer = elman("train", corpus, "--dry-run", "--model.kind", "ngram", "--preset", "cpu-1min")
    assert answer.code == 0
    assert "ngram, 0 parameters" in answer.out


def test_the_parts_of_the_model_are_shown(elman, ngram_run):
    answer = elman("inspect", "model", ngram_run)
    assert answer.code == 0
    assert "order 3" in answer.out
    found = elman("inspect", "model", ngram_run, "--json").json
    assert (found["parameters"], found["state_bytes"], len(found["parts"])) == (0, 16, 4)
    assert found["entries"] == sum(part["entries"] for part in found["parts"]) > 100
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(1)


def test_the_table_of_sparsity(elman, ngram_run, corpus):
    answer = elman("inspect", "ngram", ngram_run)
    assert answer.code == 0
    assert "never seen" in answer.out
    found = elman("inspect", "ngram", ngram_run, corpus, "--json").json
    assert [order["order"] for order in found["orders"]] == [1, 2, 3]
    assert found["orders"][2]["unseen"] < 0.05


def test_another_model_has_no_such_table_and_no_arpa_file(elman, run, tmp_path):
    for words in (("inspect", "ngram", run), ("export", "arpa", run, tmp_path / "m.arpa")):
        answer = elman(*words)
        assert answer.code == 2
        assert "model.kind 'lstm'" in answer.err


def test_an_exported_file_is_judged_and_sampled_like_the_run(elman, ngram_run, corpus, tmp_path):
    answer = elman("export", "arpa", ngram_run, tmp_path / "m.arpa")
    assert answer.code == 0
    assert "m.arpa" in answer.out
    judged = [elman("eval", where, corpus, "--json").json for where in (ngram_run, tmp_path / "m.arpa")]
    assert judged[1]["nats_per_token"] == pytest.approx(judged[0]["nats_per_token"], abs=1e-8)
    assert judged[1]["bits_per_char"] == pytest.approx(judged[0]["bits_per_char"], abs=1e-8)
    drawn = [elman("sample", where, "--prompt", "the ", "--json").json for where in (ngram_run, tmp_path / "m.arpa")]
    assert drawn[0]["text"] == drawn[1]["text"]
