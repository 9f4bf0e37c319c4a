"""Settings: where they come from, which one wins, how they are written down, and what is said when one is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from elman.cells import cell_names
from elman.errors import ConfigError
from elman.models.kinds import kind_names, model_config_class
from elman.settings import Config, load_preset, preset_names, resolve


def test_nothing_given_is_the_defaults():
    assert resolve() == Config()
    assert resolve().model.kind == "lstm"
    assert resolve().model.hidden_size == 256


# Where they come from.


def test_every_preset_is_accepted_and_remembers_its_name():
    assert set(preset_names()) >= {"demo", "pytorch-word-lm"}
    for name in preset_names():
        config = resolve(preset=name)
        assert config.preset == name
        for section, values in load_preset(name).items():
            if isinstance(values, dict):
                written = config.to_dict()[section]
                assert {key: written[key] for key in values} == values


def test_the_parity_preset_has_the_examples_settings():
    config = resolve(preset="pytorch-word-lm")
    model, training = config.model, config.training
    assert (model.embedding_size, model.hidden_size, model.num_layers, model.dropout) == (200, 200, 2, 0.2)
    assert (model.embedding_range, model.biases, model.recurrent_init) == (0.1, "double", "uniform")
    assert (model.bias_init, model.forget_bias, model.tie_weights) == ("uniform", None, False)
    assert (training.optimizer, training.learning_rate, training.momentum) == ("sgd", 20.0, 0.0)
    assert (training.schedule, training.plateau_divisor, training.warmup_updates) == ("plateau", 4.0, 0)
    assert (training.max_grad_norm, training.bptt, training.batch_size) == (0.25, 35, 20)
    assert (training.trim, training.max_epochs, config.seed) == (True, 40, 1111)
    assert config.tokenizer.level == "word"


@pytest.mark.parametrize("kind", sorted(set(cell_names()) - {"lstm"}))
def test_another_kind_over_a_preset_drops_what_only_the_presets_kind_has(kind):
    config = resolve({"model": {"kind": kind}}, preset="pytorch-word-lm")
    assert config.model.kind == kind
    assert config.model.num_layers == 2
    fields = type(config.model).model_fields
    assert "forget_bias" not in fields or config.model.forget_bias is None
    assert "biases" not in fields or config.model.biases == "double"


def test_another_choice_over_a_preset_drops_what_belonged_to_the_old_one(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text('[training]\noptimizer = "sgd"\nmomentum = 0.9\nschedule = "plateau"\nplateau_divisor = 3.0\n')
    assert resolve(file=path).training.momentum == 0.9
    config = resolve({"training": {"optimizer": "adamw", "schedule": "cosine"}}, file=path)
    assert config.training.momentum == 0.0
    assert config.training.plateau_divisor == 4.0


def test_another_level_over_a_preset_drops_what_has_no_meaning_for_it():
    assert load_preset("cpu-1min-bpe")["tokenizer"] == {"level": "bpe", "max_size": 1000}
    of_bytes = resolve({"tokenizer": {"level": "byte"}}, preset="cpu-1min-bpe")
    assert (of_bytes.tokenizer.level, of_bytes.tokenizer.max_size) == ("byte", None)
    of_words = resolve({"tokenizer": {"level": "word"}}, preset="cpu-1min-bpe")
    assert of_words.tokenizer.max_size == 1000
    finished = resolve({"tokenizer": {"path": "t.json", "max_size": "none"}}, preset="cpu-1min-bpe")
    assert finished.tokenizer.max_size is None


def test_single_settings_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text("seed = 7\n[training]\nbptt = 11\nbatch_size = 12\n", "utf-8")
    config = resolve({"training": {"bptt": 13}}, preset="pytorch-word-lm", file=path)
    assert (config.training.bptt, config.training.batch_size, config.seed) == (13, 12, 7)
    assert config.training.learning_rate == 20.0


def test_a_preset_named_in_the_file_or_the_settings_counts(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text('preset = "pytorch-word-lm"\n', "utf-8")
    assert resolve(file=path) == resolve({"preset": "pytorch-word-lm"}) == resolve(preset="pytorch-word-lm")
    assert resolve({"preset": "none"}) == Config()


def test_a_preset_takes_the_place_of_the_file_s_and_is_refused_where_the_file_leaves_nothing_of_it(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text('preset = "demo"\n[training]\nbptt = 11\n', "utf-8")
    config = resolve(preset="cpu-1min-bpe", file=path)
    assert (config.preset, config.training.bptt, config.tokenizer.max_size) == ("cpu-1min-bpe", 11, 1000)
    for resolved in (resolve(preset="demo"), resolve({"model": {"kind": "gru"}}), resolve()):
        path.write_text(resolved.to_toml(), "utf-8")
        for given in ({"preset": "cpu-1min"}, {"settings": {"preset": "cpu-1min"}}):
            with pytest.raises(ConfigError, match=r"^preset 'cpu-1min' would change nothing: '.*f.toml' goes before"):
                resolve(**given, file=path)
        assert resolve(preset=resolved.preset, file=path) == resolved


# How they are written down.


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preset": "pytorch-word-lm"},
        {"preset": "demo", "seed": 5, "device": "cpu", "dtype": "float64"},
        {"model": {"kind": "gru", "reset_after": False}, "training": {"max_grad_norm": "none", "max_seconds": 1.5}},
        {"model": {"forget_bias": None}, "data": {"corpus": ["a.txt", "b c.txt"], "valid_fraction": 0}},
        {"sampling": {"prompts": ["", 'quo"te\n', "né"], "temperatures": [0, 1]}},
        {"text": {"document_separator": "\n\n"}, "tokenizer": {"level": "bpe", "max_size": 300}},
    ],
)
def test_toml_holds_everything_and_gives_it_back(settings, tmp_path):
    config = resolve(settings)
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(), "utf-8")
    assert resolve(file=path) == config
    assert resolve(config.to_dict()) == config
    assert resolve(file=path).to_toml() == config.to_toml()


def test_what_is_not_set_is_written_as_none():
    written = tomllib.loads(resolve({"training": {"max_grad_norm": None}}).to_toml())
    assert written["training"]["max_grad_norm"] == "none"
    assert written["preset"] == "none"
    assert resolve({"training": {"max_grad_norm": "none"}}).training.max_grad_norm is None


def test_one_corpus_may_be_a_string():
    assert resolve({"data": {"corpus": "a.txt"}}).data.corpus == ("a.txt",)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        resolve().seed = 3


# What is said when one is wrong.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainign": {}}, r"unknown setting trainign; did you mean 'training'\? accepted: checkpoint, data, device"),
        ({"training": {"learing_rate": 1}}, r"unknown setting training.learing_rate; did you mean 'learning_rate'\?"),
        ({"model": {"kind": "lsmt"}}, r"unknown model.kind 'lsmt'; did you mean 'lstm'\? .*, or ./file.py:Class"),
        ({"model": {"kind": 3}}, "model.kind is 3; accepted: one of elman, "),
        ({"model": {"nonlinearity": "relu"}}, r"nonlinearity has no meaning for .* 'lstm' \(elman only\)"),
        ({"model": {"kind": "lstm", "zoneot": 0.1}}, "unknown setting model.zoneot; did you mean 'zoneout'"),
        ({"model": {"kind": "mamba", "zoneout": 0.1}}, r"no meaning for .* 'mamba' \(elman, gru, .*, stack only\)"),
        ({"model": {"layers": ["mamba"], "zoneout": 0.1}}, r"no .* 'stack' \(elman, gru, .*, multi\w* only\)"),
        ({"model": {"kind": "windows"}}, r"unknown model.kind 'windows'; did you mean 'window'\?"),
        ({"model": {"kind": 3}}, "model.kind is 3; .*, window$"),
        ({"model": {"kind": "window", "num_layers": 2}}, r"no .* 'window' \(not ngram, stack, window\)"),
        ({"model": {"kind": "window", "window_size": 0}}, "model.window_size is 0: input should be greater than 0"),
        ({"model": {"window_size": 4}}, r"no meaning for model.kind 'lstm' \(window only\): leave it out"),
        ({"model": {"hidden_size": 0}}, "model.hidden_size is 0: input should be greater than 0"),
        ({"model": {"dropout": 1.0}}, "model.dropout is 1.0: input should be less than 1"),
        ({"model": {"tie_weights": True}}, r"tie_weights needs embedding_size \(128\) equal to hidden_size \(256\)"),
        ({"model": 3}, "model is 3: "),
        ({"training": 3}, "training is 3: "),
        ({"training": {"momentum": 0.9}}, "momentum has no meaning for optimizer 'adamw', only for sgd"),
        ({"training": {"matrix_learning_rate": 0.1}}, "matrix_learning_rate has no meaning for optimizer 'adamw'"),
        ({"training": {"optimizer": "sgd", "adam_beta1": 0.5}}, "adam_beta1 has no meaning for optimizer 'sgd'"),
        ({"training": {"schedule": "plateau", "final_rate": 0.5}}, "final_rate has no meaning for schedule 'plateau'"),
        ({"training": {"plateau_divisor": 2.0}}, "plateau_divisor has no meaning for schedule 'cosine'"),
        ({"training": {"max_grad_norm": float("inf")}}, "training.max_grad_norm is inf: input should be a finite"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate is nan: "),
        ({"training": {"bptt": "x", "batch_size": -1}}, "batch_size is -1: .*; training.bptt is 'x': "),
        ({"training": {"schedule": "cosin"}}, "training.schedule is 'cosin': input should be 'constant', 'cosine'"),
        ({"training": {"bptt": "none"}}, "training.bptt is 'none'"),
        ({"tokenizer": {"level": "byte", "min_count": 2}}, "min_count has no meaning for level 'byte', only for char"),
        ({"tokenizer": {"level": "byte", "max_size": 9}}, "max_size has no meaning for level 'byte'"),
        ({"tokenizer": {"level": "bpe", "min_count": 2}}, "min_count has no meaning for level 'bpe'"),
        ({"tokenizer": {"path": "t.json"}}, "path names a finished tokenizer: give it with level 'bpe' and max"),
        ({"data": {"valid_fraction": 0.6, "test_fraction": 0.4}}, "valid_fraction and test_fraction must sum to less"),
        ({"data": {"valid_fraction": -0.1}}, "data.valid_fraction is -0.1: "),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p is 0.0: input should be greater than 0"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep is 1: input should be greater than or equal to 2"),
        ({"seed": -1}, "seed is -1: input should be greater than or equal to 0"),
        ({"device": "gpu"}, "device is 'gpu': input should be 'auto', 'cpu', 'cuda' or 'mps'"),
        ({"preset": "demoo"}, r"unknown preset 'demoo'; did you mean 'demo'\?"),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_is_accepted(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        resolve(settings)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no configuration file '.*f.toml'"),
        (b"seed = ", "cannot be read as TOML"),
        (b"\xff\xfe", "cannot be read as TOML"),
        (b"[training]\nbpt = 3", r"unknown setting training.bpt; did you mean 'bptt'\?"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(content, message, tmp_path):
    path: Path = tmp_path / "f.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        resolve(file=path)
    assert "\n" not in str(error.value)


def test_a_folder_in_the_place_of_a_file_is_told_what_it_is(tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder; accepted: a TOML file, such as the run\.toml of a run$"):
        resolve(file=tmp_path)


def test_every_setting_has_a_help_text():
    def missing(section: type[Any], prefix: str) -> list[str]:
        return [f"{prefix}{name}" for name, field in section.model_fields.items() if not field.description]

    sections = {name: type(getattr(resolve(), name)) for name in ("data", "text", "tokenizer", "training", "evaluation",
                                                                  "sampling", "checkpoint")}  # fmt: skip
    kinds = {f"model({kind})": model_config_class(kind) for kind in kind_names()}
    assert [m for name, section in (sections | kinds).items() for m in missing(section, f"{name}.")] == []


def test_with_residual_paths_the_embedding_is_as_wide_as_the_layers_unless_it_is_given():
    assert resolve({"model": {"kind": "mingru"}}, preset="demo").model.embedding_size == 256
    assert resolve({"model": {"kind": "mamba", "hidden_size": 128}}).model.embedding_size == 128
    assert resolve({"model": {"kind": "mamba", "hidden_size": 128, "embedding_size": 64}}).model.embedding_size == 64
    assert resolve({"model": {"kind": "lstm", "hidden_size": 64}}).model.embedding_size == 128
