"""Training on pairs: it learns, it stops and goes on bit for bit, its model knows how sources are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import elman
from elman.config import TrainingConfig
from elman.data.pairs import Pairs
from elman.data.prepare import prepare
from elman.errors import ConfigError, ModelFileError
from elman.models.file import load_model
from elman.settings import resolve
from elman.training.loop import Trainer
from elman.training.run import dry_run, resume, train
from elman.translation import judge_pairs, reverses_source, translate

CORPUS = "synthetic:reversing,longest=4,symbols=3,examples=1500"


def settings(kind: str = "seq2seq", *, data: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    return {
        "data": {"pairs": True, **(data or {})},
        "model": {"kind": kind, "hidden_size": 10, "embedding_size": 6, "dropout": 0.1},
        "sampling": {"max_new_tokens": 6},
        "training": {"batch_size": 16, "warmup_updates": 4, "learning_rate": 0.02, **training},
    }


@pytest.mark.parametrize("kind", ["seq2seq", "lstm"])
def test_both_models_learn_to_reverse(kind):
    config = resolve(
        {
            "data": {"corpus": [CORPUS], "pairs": True},
            "model": {"kind": kind, "hidden_size": 48, "embedding_size": 16},
            "training": {"batch_size": 32, "learning_rate": 0.02, "warmup_updates": 10, "max_updates": 220},
            "evaluation": {"every_updates": 220},
            "sampling": {"every_updates": 220, "max_new_tokens": 6},
        }
    )
    dataset = prepare(config.data, config.text, config.tokenizer)
    trainer = Trainer(config, dataset)
    records = list(trainer.records())
    pairs = Pairs(dataset.test.tokens, 64, dataset.tokenizer.boundary_id)
    report = judge_pairs(trainer.network, dataset.tokenizer, pairs)
    assert report.overall.exact_match > 0.9
    assert report.overall.token_accuracy > 0.95
    (sources,) = ([r.values["prompt"][:-1] for r in records if r.kind == "sample"],)
    written = translate(trainer.bundle, sources)
    assert [r.values["text"] for r in records if r.kind == "sample"] == [t.text for t in written]
    assert len(sources) == 3


class StopAt:
    """Polled so often, then true."""

    def __init__(self, polls: int) -> None:
        self.left = polls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def figures(run: elman.training.folder.Run) -> list[dict[str, Any]]:
    kept = [record for record in run.records() if record["kind"] in ("update", "evaluation", "sample", "end")]
    return [{key: value for key, value in record.items() if key != "measured"} for record in kept]


@pytest.mark.parametrize("polls", [3, 9, 31])
def test_a_run_stopped_within_an_epoch_goes_on_bit_for_bit(tmp_path, polls):
    corpus = "synthetic:reversing,examples=150"
    given = settings(max_updates=22) | {"evaluation": {"every_updates": 6}}
    whole = train(corpus, out=tmp_path / "whole", **given)
    stopped = train(corpus, out=tmp_path / "stopped", should_stop=StopAt(polls), **given)
    assert any(record["kind"] == "stopped" for record in stopped.records())
    resume(stopped.path)
    assert figures(stopped) == figures(whole)
    assert stopped.model.read_bytes() == whole.model.read_bytes()
    ends = [load_file(sorted(run.checkpoints.iterdir())[-1] / "tensors.safetensors") for run in (whole, stopped)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    updates = [record for record in whole.records() if record["kind"] == "update"]
    epoch = next(index for index, record in enumerate(updates) if record["epoch"] == 1)
    assert epoch == 8  # of 135 pairs in batches of 16


def test_the_model_file_knows_that_sources_are_reversed(tmp_path):
    corpus = "synthetic:reversing,examples=60"
    run = train(corpus, out=tmp_path / "a", **settings(max_updates=2, data={"reverse_source": True}))
    bundle = load_model(run.path)
    assert reverses_source(bundle)
    model = elman.load(run.path)
    assert len(model.translate(["ab", "c"], max_new_tokens=3)) == 2
    text = (run.path / "run.toml").read_text("utf-8")
    (run.path / "run.toml").write_text(text.replace("reverse_source = true", "reverse_source = false"), "utf-8")
    with pytest.raises(ModelFileError, match=r"data\.reverse_source True, this run False"):
        resume(run.path)


def test_few_pairs_make_a_smaller_batch_and_say_so(tmp_path):
    plan = dry_run("synthetic:reversing,examples=10", **settings())
    assert any("only 9 pairs to train on: training.batch_size 16 becomes 9" in notice for notice in plan.notices)
    assert plan.updates_per_epoch == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": {"kind": "seq2seq"}}, "model.kind 'seq2seq' learns targets from sources: set data.pairs true"),
        ({"data": {"pairs": True}, "training": {"bptt": 32}}, "training.bptt 32 has no meaning with data.pairs"),
        ({"data": {"pairs": True}, "training": {"trim": True}}, "training.trim True has no meaning with data.pairs"),
        ({"data": {"pairs": True}, "training": {"reset_probability": 0.1}}, "training.reset_probability 0.1 has no"),
        ({"data": {"pairs": True, "reset_at_documents": True}}, "data.reset_at_documents True has no meaning"),
        ({"data": {"pairs": True, "field": "x"}}, "data.field 'x' has no meaning with data.pairs"),
        ({"data": {"pairs": True}, "sampling": {"temperatures": [1.0]}}, "sampling.temperatures (1.0,) has no meaning"),
        ({"data": {"reverse_source": True}}, "reverse_source True has no meaning without pairs: set data.pairs true"),
        ({"data": {"source_field": "x"}}, "source_field 'x' has no meaning without pairs"),
        ({"data": {"pairs": True, "source_field": "target"}}, "source_field and target_field name one field"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(given, says):
    with pytest.raises(ConfigError) as raised:
        resolve(given)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_a_preset_says_of_streams_falls_away(tmp_path):
    for pairs in (True, "true"):
        config = resolve({"data": {"pairs": pairs}}, preset="cpu-1min")
        assert config.training.optimizer == "muon"
        assert config.training.reset_probability == TrainingConfig().reset_probability
    again = tmp_path / "run.toml"
    again.write_text(config.to_toml(), "utf-8")
    assert resolve(file=again) == config
    older = resolve({"training": {"reset_probability": 0.0}}, file=again)  # the default of its time
    assert older.training.reset_probability == 0.0
    assert resolve({"data": {"pairs": False}}, file=again).training.bptt == config.training.bptt


def test_the_folder_gives_its_parts(tmp_path):
    for part, count in (("train", 40), ("valid", 6)):
        lines = (f"{'ab'[i % 2] * (1 + i % 3)}\t{'ba'[i % 2] * (1 + i % 3)}\n" for i in range(count))
        Path(tmp_path / f"{part}.tsv").write_text("".join(lines), encoding="utf-8")
    run = train(tmp_path, out=tmp_path / "run", **settings(max_updates=3))
    (evaluation,) = [record for record in run.records() if record["kind"] == "evaluation"]
    assert evaluation["documents"] == 12


def test_held_out_sources_of_unknown_characters_are_no_obstacle(tmp_path):
    for part, text in (("train", "ab\tba\n" * 20), ("valid", "x\tb\nab\tba\n")):
        (tmp_path / f"{part}.tsv").write_text(text, encoding="utf-8")
    run = train(tmp_path, out=tmp_path / "run", **settings(max_updates=2))
    samples = [record for record in run.records() if record["kind"] == "sample"]
    assert [sample["prompt"] for sample in samples] == ["<unk>\t", "ab\t"]
