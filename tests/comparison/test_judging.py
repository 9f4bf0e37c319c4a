"""What is measured on drawn texts, on a model whose distribution is known, and that the held-out part is seen once."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import elman
from elman import judge
from elman.comparison import judging
from elman.comparison.judging import draw_at_temperatures, judge_run
from elman.models.contract import CountedModel
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer
from elman.training.folder import Run
from elman.training.report import write_report

WORDS = re.findall(r"\w+", "the cat sat on a mat and saw another dog eat some good old bread near that tall house")


def counted(text: str, order: int) -> tuple[Bundle, np.ndarray]:
    tokenizer = CharTokenizer(text)
    network = build_model(model_config({"kind": "ngram", "order": order}), tokenizer.size, seed=1, dtype=torch.float64)
    assert isinstance(network, CountedModel)
    train = np.concatenate([[tokenizer.boundary_id], tokenizer.encode(text)])
    network.count(train)
    return Bundle(network, tokenizer, {}), train


def test_cold_texts_are_surer_less_varied_and_hold_more_known_words_than_hot_ones():
    rng = np.random.default_rng(1)
    bundle, train = counted(" ".join(rng.choice(WORDS, 1500)) + "\n", 5)
    cold, _, hot, corpus = draw_at_temperatures(bundle, train, (0.1, 0.8, 3.0), num_tokens=200)
    assert cold.entropy < hot.entropy
    assert cold.distinct[3] < corpus.distinct[3] < hot.distinct[3]
    assert cold.known_words > 0.95 > hot.known_words
    assert corpus.known_words == 1.0
    assert (cold.name, corpus.name) == ("temperature 0.1", "training text")
    assert len(hot.text) == 200


def test_what_cannot_be_measured_is_none():
    bundle, train = counted("1234567890" * 20, 2)
    (drawn,) = draw_at_temperatures(bundle, train[:50], (1.0,), num_tokens=60)
    assert drawn.known_words is None
    assert 0 <= drawn.entropy <= math.log(bundle.tokenizer.size)


@pytest.fixture
def run(tmp_path: Path, tiny_text: str) -> Run:
    (tmp_path / "tiny.txt").write_text(tiny_text, encoding="utf-8")
    return elman.train(
        tmp_path / "tiny.txt",
        out=tmp_path / "run",
        model={"hidden_size": 8, "embedding_size": 8},
        training={"batch_size": 2, "bptt": 8, "max_updates": 2, "num_threads": 1},
        sampling={"max_new_tokens": 2, "temperatures": (1.0,)},
    )


def test_the_held_out_part_is_looked_at_once_for_each_model(run, monkeypatch):
    looked = []
    monkeypatch.setattr(judging, "write_report", write_report)

    def counted_look(*arguments, **options):
        looked.append(1)
        return judge.evaluate(*arguments, **options)

    monkeypatch.setattr(judging, "evaluate", counted_look)
    first = judge_run(run)
    assert first["judgement"]["nats_per_token"] == judge.evaluate(run.path).evaluation.score.nats_per_token
    assert {"uniform", "unigram", "gzip"} <= set(first["judgement"]["baselines"])
    assert judge_run(run) == first
    assert len(looked) == 1
    assert "guessing blindly" in (run.path / "report.html").read_text(encoding="utf-8")
    elman.resume(run.path, max_updates=4)
    assert judge_run(run)["model_sha256"] != first["model_sha256"]
    assert len(looked) == 2
    judge_run(run, afresh=True)
    assert len(looked) == 3
