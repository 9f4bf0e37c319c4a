"""The mean of the weights: its equations, when it begins, and that it is what is judged, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elman.config import TrainingConfig
from elman.errors import ConfigError
from elman.models.file import load_model
from elman.models.kinds import build_model, model_config
from elman.training.averaging import Average
from elman.training.checkpoint import newest_checkpoint
from elman.training.run import resume, train


def network():
    return build_model(model_config({"kind": "elman", "embedding_size": 3, "hidden_size": 4}), 6, seed=1,
                       dtype=torch.float64)  # fmt: skip


def walk(model, steps: int, average: Average) -> list[torch.Tensor]:
    """Move the weights, and give those after each step."""
    generator = torch.Generator().manual_seed(5)
    seen = []
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        average.update()
        seen.append(model.embedding.detach().clone())
    return seen


def test_without_averaging_the_model_itself_is_judged():
    model = network()
    average = Average(model, TrainingConfig())
    walk(model, 3, average)
    assert average.network is model
    assert average.tensors() == {}
    assert not average.judged(1.0)


def test_the_exponential_mean_follows_its_equation():
    model = network()
    average = Average(model, TrainingConfig(averaging="exponential", averaging_decay=0.4))
    expected = model.embedding.detach().clone()
    for number, weights in enumerate(walk(model, 12, average), 1):
        decay = min(0.4, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * weights
    assert average.network is not model
    torch.testing.assert_close(average.network.embedding.detach(), expected, rtol=0, atol=1e-12)
    assert not any(parameter.requires_grad for parameter in average.network.parameters())


def test_the_triggered_mean_begins_where_the_paper_says_and_is_the_plain_mean_from_there():
    model = network()
    average = Average(model, TrainingConfig(averaging="triggered"))
    estimates = [5.0, 4.0, 3.0, 3.5, 3.4, 3.3, 3.2, 3.1, 3.05, 2.9]
    # The first that is worse than the best of those more than five before it: 3.1, against 5, 4 and 3.
    begins = []
    for nats in estimates[:7]:
        begins.append(average.judged(nats))
        walk(model, 1, average)
        assert average.network is model
    assert begins == [False] * 7
    assert average.judged(float("nan")) is False
    del average._estimates[-1]
    assert average.judged(3.1) is False  # the best of those more than five before is 4
    assert average.judged(3.05) is True
    seen = walk(model, 6, average)
    torch.testing.assert_close(average.network.embedding.detach(), torch.stack(seen).mean(0), rtol=0, atol=1e-12)
    assert average.judged(9.0) is False


def test_what_a_checkpoint_holds_is_put_back():
    model = network()
    first = Average(model, TrainingConfig(averaging="exponential", averaging_decay=0.9))
    walk(model, 3, first)
    second = Average(model, TrainingConfig(averaging="exponential", averaging_decay=0.9))
    second.restore({name: tensor.clone() for name, tensor in first.tensors().items()}, first.to_dict())
    for average in (first, second):
        average.update()
    assert torch.equal(first.network.embedding, second.network.embedding)


def settings(**training: Any) -> dict[str, Any]:
    return {
        "model": {"hidden_size": 10, "embedding_size": 6},
        "training": {"batch_size": 4, "bptt": 16, "warmup_updates": 2, "num_threads": 1, **training},
        "evaluation": {"every_updates": 5},
        "sampling": {"every_updates": 10**9, "max_new_tokens": 3},
    }


def test_the_mean_is_what_is_judged_and_kept(tiny_corpus: Path, tmp_path: Path):
    runs = {
        name: train(tiny_corpus, out=tmp_path / name, **settings(max_updates=20, averaging=name))
        for name in ("none", "exponential")
    }
    updates = {name: [r["nats"] for r in run.records() if r["kind"] == "update"] for name, run in runs.items()}
    assert updates["none"] == updates["exponential"]  # the training itself is the same
    judged = {
        name: [r["nats_per_token"] for r in run.records() if r["kind"] == "evaluation"] for name, run in runs.items()
    }
    assert judged["none"] != judged["exponential"]
    checkpoint = newest_checkpoint(runs["exponential"].checkpoints)[1]
    saved = load_model(runs["exponential"].path).network
    assert torch.equal(saved.embedding, checkpoint.tensors["average.embedding"])
    assert not torch.equal(saved.embedding, checkpoint.tensors["model.embedding"])


@pytest.mark.parametrize("averaging", ["exponential", "triggered"])
def test_a_resumed_run_goes_on_with_its_mean(averaging: str, tiny_corpus: Path, tmp_path: Path):
    options = settings(averaging=averaging, learning_rate=2.0, schedule="constant", max_grad_norm="none")
    options["evaluation"]["every_updates"] = 2
    whole = train(
        tiny_corpus, out=tmp_path / "whole", **options | {"training": options["training"] | {"max_updates": 30}}
    )
    part = train(
        tiny_corpus, out=tmp_path / "part", **options | {"training": options["training"] | {"max_updates": 20}}
    )
    resumed = resume(part.path, max_updates=30)
    ends = [newest_checkpoint(run.checkpoints)[1] for run in (whole, resumed)]
    assert ends[0].trainer["average"] == ends[1].trainer["average"]
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    assert "average.embedding" in ends[0].tensors
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name


def test_triggered_averaging_says_when_it_begins_and_asks_for_estimates(tiny_corpus: Path, tmp_path: Path):
    options = settings(
        averaging="triggered", learning_rate=2.0, schedule="constant", max_updates=30, max_grad_norm="none"
    )
    options["evaluation"]["every_updates"] = 2
    run = train(tiny_corpus, out=tmp_path / "run", **options)
    said = [r["text"] for r in run.records() if r["kind"] == "notice" and "mean of the weights" in r["text"]]
    assert len(said) == 1
    with pytest.raises(ConfigError, match="averaging 'triggered' needs a validation part"):
        train(tiny_corpus, out=tmp_path / "none", data={"valid_fraction": 0.0}, **options)
