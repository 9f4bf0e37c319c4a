"""The machine's figures are of the right order, a family's follow from its time, expectations from recorded curves."""

from __future__ import annotations

import json

import pytest
import torch

from elman.errors import ConfigError
from elman.models.contract import CountedModel
from elman.models.kinds import build_model, kind_names
from elman.settings import preset_names, resolve
from elman.training import bench as benches
from elman.training.bench import RECORDED, bench, expected_nats, measured_kinds, sized_config


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time."""
    for name, value in (("NUM_PARAMETERS", 5000), ("_ROWS", 2), ("_STEPS", 4), ("_MATRIX_SIZE", 64)):
        monkeypatch.setattr(benches, name, value)
    monkeypatch.setattr(benches, "_COPIED_NUMBERS", 2**12)
    monkeypatch.setattr(benches, "RECORDED", {})


@pytest.mark.parametrize("kind", measured_kinds())
def test_a_family_is_measured_at_about_the_number_of_parameters_asked_for(kind: str):
    with torch.device("meta"):
        network = build_model(sized_config(kind), benches.VOCAB_SIZE, seed=None, dtype=torch.float32, device="meta")
    assert 0.8e6 < network.num_parameters < 1.25e6
    assert not isinstance(network, CountedModel)


@pytest.mark.usefixtures("small")
def test_the_bench_measures_the_machine_and_the_families_asked_for():
    told: list[str] = []
    found = bench(["elman", "window"], seconds=0.01, progress=told.append)
    assert told == ["machine", "elman", "window"]
    assert found.machine.threads == torch.get_num_threads()
    assert found.machine.matrix_gflops > 0
    assert found.machine.memory_gigabytes_per_second > 0
    for one in found.families:
        assert one.train_tokens_per_second > 0
        assert one.generated_tokens_per_second > 0
        assert one.train_share_of_peak > 0
    assert json.loads(json.dumps(found.to_dict()))["families"][0]["kind"] == "elman"
    assert "<table" in found.page().html()


def test_the_share_of_the_peak_is_operations_over_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benches, "median_seconds", lambda call, seconds: 2.0)
    monkeypatch.setattr(benches, "NUM_PARAMETERS", 5000)
    one = benches.measure_family("elman", 10.0, seconds=0.01)
    config = sized_config("elman")
    width, vocabulary = config.hidden_size, benches.VOCAB_SIZE
    operations = 2 * (width * config.embedding_size + width * width + vocabulary * width)
    assert one.train_tokens_per_second == pytest.approx(32 * 64 / 2.0)
    assert one.train_share_of_peak == pytest.approx(3 * operations * 32 * 64 / 2.0 / 10e9)


def test_expectations_lie_between_the_points_of_a_curve_and_nowhere_else():
    curve = ((100, 2.0), (400, 1.6), (1600, 1.4))
    assert expected_nats(curve, 100) == 2.0
    assert expected_nats(curve, 200) == pytest.approx(1.8)
    assert expected_nats(curve, 800) == pytest.approx(1.5)
    assert expected_nats(curve, 1600) == 1.4
    assert expected_nats(curve, 99) is None
    assert expected_nats(curve, 1601) is None


def test_what_is_recorded_belongs_to_presets_and_falls():
    assert set(RECORDED) <= set(preset_names())
    for name, recorded in RECORDED.items():
        assert recorded.seconds == resolve(preset=name).training.max_seconds
        updates, nats = zip(*recorded.curve, strict=True)
        assert list(updates) == sorted(updates)
        assert list(nats) == sorted(nats, reverse=True)


def test_a_preset_is_measured_against_its_curve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benches, "median_seconds", lambda call, seconds: 0.1)
    monkeypatch.setattr(benches, "RECORDED", {"cpu-1min": benches.Recorded(60.0, ((300, 1.8), (1200, 1.5)))})
    one = benches.measure_preset("cpu-1min")
    assert (one.updates, one.recorded_updates, one.recorded_nats) in ((600, 300, 1.8), (600, 1200, 1.5))
    assert one.expected_nats == pytest.approx(1.65)


@pytest.mark.parametrize("kind", ["ngram", "lsmt"])
def test_kinds_that_are_not_measured_are_refused(kind: str):
    with pytest.raises(ConfigError, match=f"kind '{kind}' is (not measured|unknown)"):
        bench([kind])


def test_all_kinds_that_are_trained_by_themselves_are_measured():
    assert set(kind_names()) - set(measured_kinds()) == {"ngram", "seq2seq", "stack"}
