"""The forecast of memory, time and communication: closed forms, counts of built models, and the fit of speeds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from elman.cli import main
from elman.config import TrainingConfig
from elman.errors import ConfigError
from elman.models.kinds import build_model, model_class, model_config
from elman.settings import resolve
from elman.training.averaging import Average
from elman.training.distributed import Ranks
from elman.training.scaling import Machine, Update, Work, fit, forecast, measured_speeds, time_updates, work_of

MACHINE = Machine(
    operations_per_second=1e9, step_seconds=1e-4, memory_bytes=1e9, bytes_per_second=1e8, latency_seconds=1e-4
)
WORK = Work(
    parameters=1_000_000,
    largest_group=400_000,
    optimizer_numbers=2,
    operations=2_000_000,
    passes=3,
    num_layers=2,
    saved_bytes=5000.0,
    rows=10,
    steps=50,
)


def test_one_device_waits_for_steps_and_products() -> None:
    found = forecast(WORK, MACHINE, 1)
    assert found.waiting_seconds == pytest.approx(50 * 2 * 1e-4)
    assert found.product_seconds == pytest.approx(3 * 500 * 2e6 / 1e9)
    assert found.communication_seconds == 0
    assert found.memory_bytes == 4 * 1e6 * 4 + 500 * 5000
    assert found.tokens_per_second == pytest.approx(500 / (0.01 + 3.0))
    assert found.efficiency == 1


def test_more_devices_move_each_gradient_there_and_back() -> None:
    two, many = forecast(WORK, MACHINE, 2), forecast(WORK, MACHINE, 64)
    assert two.communication_seconds == pytest.approx(4e6 / 1e8 + 4 * 1e-4)  # one bucket, and three small sums
    assert many.communication_seconds == pytest.approx(2 * 63 / 64 * 4e6 / 1e8 + 4 * 63 * 1e-4)
    assert two.waiting_seconds == many.waiting_seconds == forecast(WORK, MACHINE, 1).waiting_seconds
    assert 1.9 < two.tokens_per_second / forecast(WORK, MACHINE, 1).tokens_per_second < 2


def test_dividing_takes_less_memory_and_more_communication() -> None:
    whole, divided = forecast(WORK, MACHINE, 8), forecast(WORK, MACHINE, 8, is_divided=True)
    assert divided.memory_bytes == 4 * 1e6 * 4 / 8 + 2 * 4 * 400_000 + 500 * 5000
    assert divided.memory_bytes < whole.memory_bytes
    assert divided.communication_seconds > 1.4 * whole.communication_seconds


def test_what_does_not_fit_whole_may_fit_divided() -> None:
    large = replace(WORK, parameters=100_000_000)
    assert not forecast(large, MACHINE, 8).fits
    assert forecast(large, MACHINE, 8, is_divided=True).fits


def test_the_work_of_a_model_is_counted() -> None:
    model = model_config({"kind": "lstm", "hidden_size": 24, "embedding_size": 16, "num_layers": 2})
    built = build_model(model, 50, seed=1, dtype=torch.float32)
    work = work_of(model, TrainingConfig(batch_size=3, bptt=7), 50)
    assert work.parameters == built.num_parameters
    assert work.operations == 2 * (built.num_parameters - 50 * 16)  # biases are multiplied by one
    assert work.num_layers == 2
    assert work.largest_group == sum(p.numel() for p in built.layers[1].parameters())
    assert (work.rows, work.steps, work.passes) == (3, 7, 3)
    tied = work_of(
        model_config({"kind": "lstm", "hidden_size": 16, "embedding_size": 16, "tie_weights": True}),
        TrainingConfig(recompute_tokens=8),
        50,
    )
    assert tied.operations == 2 * tied.parameters
    assert tied.passes == 4


def test_activations_grow_with_the_width_and_those_of_large_models_continue_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def saved(width: int) -> float:
        model = model_config({"kind": "elman", "hidden_size": width, "embedding_size": width})
        return work_of(model, TrainingConfig(), 30).saved_bytes

    whole = saved(256)
    assert saved(128) < whole < 2.2 * saved(128)
    monkeypatch.setattr("elman.training.scaling._MAX_BUILT", 20_000)
    assert saved(256) == pytest.approx(whole, rel=0.1)


def test_a_counted_model_has_no_update_to_plan() -> None:
    with pytest.raises(ConfigError, match="'ngram' is counted, not trained"):
        work_of(model_config({"kind": "ngram"}), TrainingConfig(), 10)


def test_speeds_are_found_again_in_the_times_that_they_make() -> None:
    works = [replace(WORK, operations=operations, rows=rows) for operations in (10**5, 10**7) for rows in (2, 20)]
    measured = [(work, forecast(work, MACHINE, 1).seconds) for work in works]
    assert fit(measured) == pytest.approx((1e9, 1e-4))


def test_times_without_a_floor_give_none_and_times_without_products_are_refused() -> None:
    works = [replace(WORK, operations=operations) for operations in (10**5, 10**6, 10**7)]
    speed, step = fit([(work, work.operations * (1.0 + 0.01 * n)) for n, work in enumerate(works)])
    assert step == 0
    # The least sum of (x r - 1)^2, where r are products per second and x the seconds of one.
    rates = [3 * 500 / (1.0 + 0.01 * n) for n in range(3)]
    assert speed == pytest.approx(sum(rate**2 for rate in rates) / sum(rates), rel=1e-12)
    with pytest.raises(ConfigError, match="measure wider models"):
        fit([(work, 1.0 / work.operations) for work in works])


def test_updates_are_timed() -> None:
    model = model_config({"kind": "elman", "hidden_size": 4, "embedding_size": 4})
    seconds = time_updates(model, TrainingConfig(batch_size=2, bptt=3), 11, Ranks(), num_updates=3)
    assert len(seconds) == 3
    assert all(0 < taken < 5 for taken in seconds)


SMALL = model_config({"kind": "lstm", "hidden_size": 32, "embedding_size": 32})


def test_an_update_changes_the_model_by_almost_nothing() -> None:
    network = build_model(SMALL, 66, seed=1, dtype=torch.float32)
    before = network.embedding.detach().clone()
    update = Update(network, resolve(preset="cpu-1min").training.model_copy(update={"batch_size": 2, "bptt": 3}))
    update()
    assert update.num_tokens == 6
    assert 0 < (network.embedding - before).abs().max() < 1e-6


def test_a_gradient_alone_changes_nothing_but_the_state() -> None:
    network = build_model(SMALL, 66, seed=1, dtype=torch.float32)
    before = network.embedding.detach().clone()
    update = Update(network, TrainingConfig(batch_size=2, bptt=3))
    update.gradient()
    first = network.embedding.grad.clone()
    update.gradient()
    assert torch.equal(network.embedding, before)
    assert first.any()
    assert not torch.equal(network.embedding.grad, first)  # not twice the first either: it reads on from its state
    assert not torch.equal(network.embedding.grad, 2 * first)


def test_an_update_is_in_the_precision_of_its_training() -> None:
    gradients = []
    for precision in (None, "bfloat16"):
        network = build_model(SMALL, 66, seed=1, dtype=torch.float32)
        Update(network, TrainingConfig(batch_size=2, bptt=3, precision=precision)).gradient()
        gradients.append(network.embedding.grad)
    exact, rounded = gradients
    assert not torch.equal(exact, rounded)
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 3e-2


@pytest.mark.parametrize("vocabulary", [10_000, 50_000])
def test_a_larger_vocabulary_adds_its_matrices_and_little_for_each_token(vocabulary: int) -> None:
    model = model_config({"kind": "lstm", "hidden_size": 64, "embedding_size": 64})
    work, small = (work_of(model, TrainingConfig(batch_size=32, bptt=64), size) for size in (vocabulary, 5_000))
    assert work.parameters - small.parameters == (vocabulary - 5_000) * (64 + 64 + 1)
    assert work.saved_bytes == small.saved_bytes


@pytest.mark.parametrize(
    "words",
    [
        ["--vocabulary", "0"],
        ["--vocabulary", "-3"],
        ["--processes", "0"],
        ["--processes", "-2"],
        ["--tokens", "-5"],
        ["--tera-operations", "0"],
        ["--memory-gigabytes", "-1"],
        ["--link-gigabytes", "nan"],
        ["--step-microseconds", "-1"],
    ],
)
def test_numbers_that_cannot_be_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert f"{words[0]} is {words[1]}; accepted: " in capsys.readouterr().err


def test_the_command_prints_a_forecast_for_every_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model.hidden-size", "32", "--vocabulary", "40", "--processes", "1", "--processes", "4"]
    assert main([*words, "--tokens", "1e6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["processes"], one["is_divided"]) for one in found["forecasts"]] == [(1, False), (4, False), (4, True)]
    assert found["forecasts"][0]["hours"] == pytest.approx(1e6 / found["forecasts"][0]["tokens_per_second"] / 3600)
    assert main([*words, "--memory-gigabytes", "0.0001"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("whole") == 2
    assert "! does not fit into 100.0 kB" in printed


@pytest.mark.parametrize(
    ("words", "vocabulary", "stated"),
    [
        ([], 256, "256 (assumed)"),
        (["--tokenizer.level", "bpe"], 8192, "8,192"),
        (["--tokenizer.level", "word"], 10_000, "10,000 (assumed)"),
        (["--preset", "cpu-1min-bpe"], 1000, "1,000"),
        (["--preset", "cpu-1min-bpe", "--vocabulary", "300"], 300, "300"),
        (["--preset", "cpu-1min-bpe", "--tokenizer.level", "byte"], 257, "257"),
    ],
)
def test_the_vocabulary_is_that_of_the_tokenizer_unless_it_is_given(
    words: list[str], vocabulary: int, stated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["plan", *words, "--model.hidden-size", "8", "--model.embedding-size", "8", "--processes", "1"]
    config = resolve({"model": {"hidden_size": 8, "embedding_size": 8}})
    expected = work_of(config.model, config.training, vocabulary).parameters
    assert main([*small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["vocabulary"], found["work"]["parameters"]) == (vocabulary, expected)
    assert main(small) == 0
    assert f"{expected:,} parameters, a vocabulary of {stated}, " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("projection", [{}, {"output_projection": 64}, {"output_projection": True}], ids=str)
def test_the_work_of_a_large_vocabulary_is_that_of_a_narrower_model_continued(projection: dict[str, Any]) -> None:
    model = model_config({"kind": "lstm", "embedding_size": 256, "hidden_size": 256, **projection})
    work = work_of(model, TrainingConfig(), 300_000)
    whole = model_class(model).predicted_num_parameters(model, 300_000)
    assert work.parameters == whole > 50_000_000
    few = work_of(model, TrainingConfig(), 30_000)
    assert work.saved_bytes == pytest.approx(few.saved_bytes, rel=0.05)  # of a layer, whatever the vocabulary


@pytest.mark.parametrize("averaging", ["none", "exponential"])
@pytest.mark.parametrize(
    "optimizer",
    [{"optimizer": "adamw"}, {"optimizer": "muon"}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}],
    ids=str,
)
def test_what_the_optimiser_remembers_is_counted(optimizer: dict[str, Any], averaging: str) -> None:
    model = model_config({"kind": "lstm", "embedding_size": 24, "hidden_size": 16, "num_layers": 2})
    config = TrainingConfig(**optimizer, averaging=averaging, batch_size=2, bptt=3)
    network = build_model(model, 500, seed=1, dtype=torch.float32)
    update = Update(network, config)
    update()
    kept = update._optimizer.tensors() | {f"mean.{name}": t for name, t in Average(network, config).tensors().items()}
    expected = sum(tensor.numel() for tensor in kept.values() if tensor.numel() > 1)  # AdamW counts its steps
    work = work_of(model, config, 500)
    assert work.optimizer_numbers * work.parameters == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["transformer", "slstm", "mlstm", "gated_deltanet", "rglru"])
def test_heads_and_blocks_stay_whole_in_narrower_models(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_config({"kind": kind, "embedding_size": 72, "hidden_size": 72, "num_layers": 1})
    whole = work_of(model, TrainingConfig(), 30)
    monkeypatch.setattr("elman.training.scaling._MAX_BUILT", whole.parameters - 1)
    assert work_of(model, TrainingConfig(), 30).saved_bytes == pytest.approx(whole.saved_bytes, rel=0.1)


def test_narrow_models_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []

    def timed(model: Any, *rest: Any) -> list[float]:
        widths.append(model.hidden_size)
        return [0.01 * model.hidden_size * rest[0].batch_size]

    monkeypatch.setattr("elman.training.scaling.time_updates", timed)
    model = model_config({"kind": "transformer", "embedding_size": 200, "hidden_size": 200})
    measured_speeds(model, TrainingConfig(batch_size=4), 30)
    model = model_config({"kind": "lstm", "embedding_size": 3, "hidden_size": 3})
    measured_speeds(model, TrainingConfig(batch_size=4), 30)
    assert widths == [200, 200, 48, 48, 3, 3, 1, 1]


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_vocabulary_for_which_no_model_is_narrow_enough_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="a vocabulary of 4,000,000,000 tokens is too large for this forecast"):
        work_of(model_config({"kind": kind, "embedding_size": 64, "hidden_size": 64}), TrainingConfig(), 4 * 10**9)
