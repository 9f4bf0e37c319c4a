"""Every setting has a flag, made from the sections; values arrive where TOML would put them."""

from __future__ import annotations

import json
import re
import tomllib

import pytest

from elman.cli.flags import AllFlags, given
from elman.models.kinds import kind_names, model_config_class
from elman.settings import Config, json_schema, preset_names, resolve


def all_settings() -> set[str]:
    names = {f"model.{name}" for kind in kind_names() for name in model_config_class(kind).model_fields}
    for name, field in Config.model_fields.items():
        sections = getattr(field.annotation, "model_fields", None)
        if sections is None:
            names.add(name)
        elif name != "model":
            names |= {f"{name}.{setting}" for setting in sections}
    return names - {"model"}


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


def test_train_help_shows_every_setting_and_no_other(elman, wide):
    shown = set(re.findall(r"--([\w.]+)", elman("train", "--help").out))
    own = {"out", "preset", "config", "from", "teacher", "overwrite", "dry", "json", "tensorboard", "track", "resume"}
    assert shown - own == all_settings() - {"preset", "from_model"}


def test_help_says_what_a_setting_means_its_default_and_who_has_it(elman, wide):
    lines = {match[1]: match[0] for match in re.finditer(r"│ +--([\w.]+).*", elman("train", "--help").out)}
    assert "Tokens per segment T" in lines["training.bptt"]
    assert "[default: 64]" in lines["training.bptt"]
    assert "[choices: adamw, sgd, muon]" in lines["training.optimizer"]
    assert "(gru only)" in lines["model.reset_after"]
    assert "(lstm, mogrifier_lstm, multiplicative_lstm, stack only)" in lines["model.forget_bias"]
    assert "only" not in lines["model.kind"]
    assert "(not ngram, seq2seq, stack, window)" in lines["model.num_layers"]
    assert re.search(r"state\. \(not ngram, seq2seq, window\) / .* \(window only\)", lines["model.hidden_size"])
    assert "Only with optimizer sgd." in lines["training.momentum"]
    for kind in kind_names():
        assert kind in lines["model.kind"]
    for preset in preset_names():
        assert preset in lines["preset"]


def test_no_flag_is_no_setting():
    assert given(None) == {}
    assert given(AllFlags.__origin__()) == {}


def shown(elman, *words: str) -> dict:
    answer = elman("config", "show", *words)
    assert answer.code == 0, answer.err
    return tomllib.loads(answer.out)


def test_none_puts_back_what_a_preset_has_set(elman, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('[training]\nprecision = "bfloat16"\nmax_seconds = 9.0\n', encoding="utf-8")
    words = ("--config", str(file), "--training.precision", "none", "--training.max_seconds", "none")
    settings = shown(elman, *words)["training"]
    assert settings["precision"] == settings["max_seconds"] == "none"


def test_flags_go_before_the_file_and_the_file_before_the_preset(elman, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('[training]\nbptt = 5\nbatch_size = 6\n[model]\nkind = "gru"\n', encoding="utf-8")
    settings = shown(elman, "--preset", "demo", "--config", str(file), "--training.batch_size", "7")
    demo = resolve(preset="demo")
    assert settings["training"]["batch_size"] == 7
    assert settings["training"]["bptt"] == 5
    assert settings["model"]["kind"] == "gru"
    assert settings["training"]["learning_rate"] == demo.training.learning_rate
    assert settings["preset"] == "demo"


@pytest.mark.parametrize(
    "words", [["--model.tie-weights"], ["--model.tie_weights", "true"], ["--model.tie_weights=true"]]
)
def test_switches_and_hyphens(elman, words):
    assert shown(elman, *words, "--model.embedding_size", "256")["model"]["tie_weights"] is True


def test_a_switch_can_be_taken_back(elman):
    assert shown(elman, "--preset", "pytorch-word-lm")["training"]["trim"] is True
    assert shown(elman, "--preset", "pytorch-word-lm", "--training.trim", "false")["training"]["trim"] is False


def test_lists_repeat_and_none_unsets(elman):
    settings = shown(
        elman,
        "a.txt",
        "-",
        "--sampling.prompts",
        "one two",
        "--sampling.prompts",
        "",
        "--training.max_grad_norm",
        "none",
    )
    assert settings["sampling"]["prompts"] == ["one two", ""]
    assert settings["data"]["corpus"] == ["a.txt", "-"]
    assert settings["training"]["max_grad_norm"] == "none"


def test_what_config_show_prints_is_a_configuration(elman, tmp_path):
    answer = elman("config", "show", "--preset", "pytorch-word-lm", "--seed", "3")
    file = tmp_path / "run.toml"
    file.write_text(answer.out, encoding="utf-8")
    assert resolve(file=file) == resolve({"seed": 3}, preset="pytorch-word-lm")


def test_the_schema_knows_every_setting(elman):
    schema = elman("config", "schema").json
    assert schema == json.loads(json.dumps(json_schema()))
    found = set()
    for name, entry in schema["properties"].items():
        reference = entry.get("$ref", "").rpartition("/")[2]
        kinds = [kind.get("properties", {}) for kind in entry.get("anyOf", [])] if name == "model" else []
        sections = [schema["$defs"][reference]["properties"]] if reference else kinds
        found |= {f"{name}.{setting}" for section in sections for setting in section} or {name}
    assert found == all_settings()


def test_the_word_level_preset_has_the_settings_of_pytorch_s_example():
    config = resolve(preset="pytorch-word-lm")
    model, training = config.model, config.training
    assert (config.seed, config.tokenizer.level) == (1111, "word")
    assert (model.kind, model.embedding_size, model.hidden_size, model.num_layers) == ("lstm", 200, 200, 2)
    assert (model.dropout, model.tie_weights, model.biases, model.forget_bias) == (0.2, False, "double", None)
    assert (model.recurrent_init, model.bias_init, model.embedding_range) == ("uniform", "uniform", 0.1)
    assert (training.optimizer, training.learning_rate, training.momentum) == ("sgd", 20.0, 0.0)
    assert (training.schedule, training.plateau_divisor, training.warmup_updates) == ("plateau", 4.0, 0)
    assert (training.max_grad_norm, training.bptt, training.batch_size) == (0.25, 35, 20)
    assert (training.max_epochs, training.trim, training.weight_decay) == (40, True, 0.0)
    assert config.evaluation.every_updates is None


@pytest.mark.parametrize("kind", ["elman", "gru"])
def test_the_word_level_preset_takes_the_other_kinds_of_the_example(kind):
    assert resolve({"model": {"kind": kind}}, preset="pytorch-word-lm").model.kind == kind
