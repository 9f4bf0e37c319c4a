"""The laws, over every kind that Elman brings and every option of it; the kinds are found, none is left out."""

from __future__ import annotations

import pytest

from elman.config import ModelConfig
from elman.models.kinds import kind_names, model_class
from elman.models.laws import check_config, small_configs
from elman.models.stack import RecurrentStack

CONFIGS = [config for kind in kind_names() for config in small_configs(kind)]


def short_name(config: ModelConfig) -> str:
    """The kind and what is chosen beside the defaults."""
    chosen = config.model_dump(exclude_defaults=True, exclude={"embedding_size", "hidden_size", "dropout"})
    return "-".join([config.kind, *(f"{name}={value}" for name, value in chosen.items() if name != "kind")])


@pytest.mark.parametrize("config", CONFIGS, ids=short_name)
def test_every_model_keeps_every_law(config):
    assert [str(finding) for finding in check_config(config)] == []


def test_every_kind_and_every_value_of_every_option_is_run():
    assert {config.kind for config in CONFIGS} == set(kind_names())
    seen = {(c.kind, name, value) for c in CONFIGS for name, value in c if isinstance(value, str | bool | None)}
    expected = {
        *(("elman", "nonlinearity", value) for value in ("tanh", "relu")),
        *(("gru", "reset_after", value) for value in (True, False)),
        ("lstm", "forget_bias", None),
        *(
            ("window", name, value)
            for name in ("tie_weights", "output_projection", "direct_connections")
            for value in (True, False)
        ),
        *((kind, "biases", value) for kind in ("elman", "lstm", "gru") for value in ("single", "double")),
        *((kind, "tie_weights", value) for kind in ("elman", "lstm", "gru") for value in (True, False)),
        *((kind, "output_projection", value) for kind in ("elman", "lstm", "gru") for value in (True, False)),
    }
    assert expected <= seen
    stacks = [c for c in CONFIGS if model_class(c) is RecurrentStack]
    assert {len(c.cell_names) for c in stacks} == {1, 2}
    around = {(c.kind, c.residual, c.norm, bool(c.convolution_size), bool(c.feedforward_size)) for c in stacks}
    for kind in {c.kind for c in stacks}:
        of_kind = [choice[1:] for choice in around if choice[0] == kind]
        assert {choice[0] for choice in of_kind} == {choice[2] for choice in of_kind} == {False, True}
        assert {choice[1] for choice in of_kind} == {"none", "layer", "rms"}
    assert any(c.kind == "gru" and c.biases == "double" and not c.reset_after for c in CONFIGS)
