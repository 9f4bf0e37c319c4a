"""Trials: what is kept, what is done again, what they measure."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import elman
from elman.errors import ModelFileError, TextError, UserError
from elman.inspection import mitigations
from elman.inspection.mitigations import (
    ARMS,
    Arm,
    ArmResult,
    Mitigations,
    Trial,
    bits_per_token,
    inspect_mitigations,
)
from elman.inspection.mitigations_page import mitigations_page
from elman.models.kinds import build_model, model_config

FEW = tuple(arm for arm in ARMS if arm.name in ("vanilla", "lstm"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat; a dog saw the moon. " * 400, encoding="utf-8")
    return path


def test_every_arm_is_trained_once_and_then_taken_from_the_folder(text, tmp_path, monkeypatch):
    heard: list[str] = []
    options = {"num_seeds": 1, "updates": 3, "lag": 4, "out": tmp_path / "trials", "told": heard.append}
    found = inspect_mitigations(text, **options)
    assert [arm.name for arm in found.arms] == [arm.name for arm in ARMS]
    assert len(heard) == len(ARMS) + 2
    assert [arm.bptt for arm in found.copying] == [2, 16]
    assert all(arm.trials[0].accuracy is not None for arm in found.copying)
    assert found.arms[3].bptt == 4
    monkeypatch.setattr(mitigations, "Trainer", None)
    again = inspect_mitigations(text, **options)
    assert again == found
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["arms"][0]["name"] == "vanilla"
    html = mitigations_page(found).html()
    for sentence in found.words:
        assert sentence[5:20] in html
    with pytest.raises(TypeError):  # another budget is another trial, which would have to be trained
        inspect_mitigations(text, **{**options, "updates": 4})
    monkeypatch.setattr(elman, "__version__", "0.0.9")
    with pytest.raises(TypeError):  # and so is another version
        inspect_mitigations(text, **options)


def test_a_damaged_trial_is_named(text, tmp_path, monkeypatch):
    monkeypatch.setattr(mitigations, "ARMS", FEW)
    folder = tmp_path / "trials"
    folder.mkdir()
    (folder / "notes.txt").touch()
    with pytest.raises(UserError, match=r"holds 'notes.txt', which is no trial"):
        inspect_mitigations(text, out=folder)
    (folder / "notes.txt").unlink()
    config = mitigations._config(FEW[0], [str(text)], 400, None, 0)
    mitigations._trial(FEW[0], quick(config), folder, None)
    (path,) = folder.iterdir()
    path.write_text("{", encoding="utf-8")
    (folder / ".elman-writing-trial-00.json").touch()  # as a process leaves it that was killed
    with pytest.raises(ModelFileError, match="is no trial"):
        mitigations._trial(FEW[0], quick(config), folder, None)


def quick(config):
    return config.model_copy(update={"training": config.training.model_copy(update={"max_updates": 2})})


def test_a_training_that_blows_up_counts_as_diverged(text, tmp_path):
    wild = Arm("wild", "a rate far too high", {"nonlinearity": "relu"}, {"max_grad_norm": None, "learning_rate": 1e4})
    config = mitigations._config(wild, [str(text)], 30, None, 0)
    trial = mitigations._trial(wild, config, tmp_path, None)
    assert trial.diverged
    assert (trial.bits, trial.by_lag) == (None, ())
    assert trial.updates < 30
    assert math.isfinite(trial.largest_norm)
    result = ArmResult("wild", "", 64, (trial,))
    assert (result.num_diverged, result.mean("bits"), result.state_is_worth, result.by_lag) == (1, None, None, ())


def test_figures_are_means_over_what_did_not_diverge():
    def trial(seed: int, bits: float | None) -> Trial:
        cut = None if bits is None else bits + 0.5
        return Trial("a", seed, bits is None, 9, 1.0, 2.0, 0.1, bits, cut, () if bits is None else (2.0, bits), None)

    result = ArmResult("a", "", 64, (trial(0, 2.0), trial(1, 3.0), trial(2, None)))
    assert (result.num_diverged, result.mean("bits"), result.state_is_worth) == (1, 2.5, 0.5)
    assert result.by_lag == (2.0, 2.5)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.095, 0.118), "no network has learned the task"),
        ((0.095, None), "no network has learned the task"),
        ((0.17, 0.94), "the longer one alone"),
        ((None, 0.94), "the longer one alone"),
        ((0.6, 0.94), "the shorter one has taught it too"),
    ],
)
def test_copying_is_said_to_show_what_it_shows(shares, said):
    arms = [
        ArmResult(name, "", 5, (Trial(name, 0, False, 9, 1.0, 7e10, 0.1, 2.0, 2.1, (2.0,) * 20, share),))
        for name, share in [*((arm.name, None) for arm in ARMS), ("short", shares[0]), ("long", shares[1])]
    ]
    found = Mitigations("text", 60, tuple(arms[:-2]), 10, tuple(arms[-2:]))
    assert said in found.of_copying
    html = mitigations_page(found).html()
    assert said in html
    assert "bounds what is learned" not in html


def test_bits_with_the_state_carried_and_cut():
    config = model_config({"kind": "elman", "hidden_size": 5, "embedding_size": 4})
    network = build_model(config, 4, seed=1, dtype=torch.float64)
    tokens = np.concatenate([[0], np.random.default_rng(1).integers(1, 4, 140)])
    both = torch.from_numpy(tokens[:129])
    with torch.no_grad():
        features_BTF, _ = network.features(both[None, :-1], network.initial_state(1))
        carried = network.head.nll(features_BTF, both[None, 1:]).mean().item() / math.log(2)
        cut = 0.0
        for start in (0, 64):
            features_BTF, _ = network.features(both[None, start : start + 64], network.initial_state(1))
            cut += network.head.nll(features_BTF, both[None, start + 1 : start + 65]).sum().item() / 128 / math.log(2)
    assert bits_per_token(network, tokens) == pytest.approx(carried)
    assert bits_per_token(network, tokens, cut_every=64) == pytest.approx(cut)
    assert carried != cut
    with pytest.raises(TextError, match="takes 65 and more"):
        bits_per_token(network, tokens[:64])


@pytest.mark.parametrize("wrong", [{"num_seeds": 0}, {"updates": 0}, {"lag": 3}, {"seconds": 0.0}])
def test_numbers_out_of_range_are_refused(text, tmp_path, wrong):
    with pytest.raises(UserError, match="--lag is 4 and more"):
        inspect_mitigations(text, out=tmp_path / "trials", **wrong)


def test_a_text_that_can_be_read_once_is_refused(text, tmp_path):
    with pytest.raises(UserError, match="standard input can be read once"):
        inspect_mitigations([text, "-"], out=tmp_path / "trials")
    assert not (tmp_path / "trials").exists()


def test_a_text_too_short_to_hold_anything_out_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("ab", encoding="utf-8")
    with pytest.raises(TextError, match="too short for a validation part"):
        inspect_mitigations(tmp_path / "short.txt", out=tmp_path / "trials")
