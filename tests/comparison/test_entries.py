"""Entries as they are typed, sizes that are met by the built model, budgets that are equal."""

from __future__ import annotations

import pytest
import torch

from elman.comparison.entries import Entry, Terms, check_names, merged, operations_per_token, plan_entry, sized
from elman.errors import ConfigError, UserError
from elman.models.kinds import build_model, kind_names, model_config

COUNTED = ("ngram",)
VOCAB_SIZE = 60


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("lstm", "lstm", {"model": {"kind": "lstm"}}),
        (" gru ", "gru", {"model": {"kind": "gru"}}),
        ("./my_cell.py:Leaky", "leaky", {"model": {"kind": "./my_cell.py:Leaky"}}),
        ("a.b:Leaky", "leaky", {"model": {"kind": "a.b:Leaky"}}),
        ("tied: model.kind=lstm model.tie_weights=true", "tied", {"model": {"kind": "lstm", "tie_weights": "true"}}),
        ("x: sampling.prompts='The cat' dtype=float64", "x", {"sampling": {"prompts": "The cat"}, "dtype": "float64"}),
    ],
)
def test_entries_are_read_as_typed(text, name, settings):
    assert Entry.parse(text) == Entry(name, settings)


@pytest.mark.parametrize("text", ["a: model.kind", "b: =3", "a/b: model.kind=lstm", ": model.kind=lstm", "../x"])
def test_what_is_no_entry_is_refused_in_one_line(text):
    with pytest.raises(UserError) as caught:
        Entry.parse(text)
    assert "\n" not in str(caught.value)


def test_names_must_differ_and_one_model_is_no_comparison():
    with pytest.raises(UserError, match="two models and more"):
        check_names([Entry.parse("lstm")])
    with pytest.raises(UserError, match="two entries are called 'lstm'"):
        check_names([Entry.parse("lstm"), Entry.parse("lstm")])


def test_settings_are_merged_by_section():
    below = {"model": {"kind": "lstm", "dropout": 0.1}, "seed": 1}
    assert merged(below, {"model": {"kind": "gru"}, "dtype": "float64"}) == {
        "model": {"kind": "gru", "dropout": 0.1}, "seed": 1, "dtype": "float64",
    }  # fmt: skip
    assert below["model"] == {"kind": "lstm", "dropout": 0.1}


@pytest.mark.parametrize("kind", [kind for kind in kind_names() if kind not in COUNTED])
@pytest.mark.parametrize("num_parameters", [60_000, 1_000_000])
def test_every_kind_is_brought_to_the_number_of_parameters(kind, num_parameters):
    settings = sized(model_config({"kind": kind}), num_parameters, VOCAB_SIZE)
    network = build_model(model_config(settings), VOCAB_SIZE, seed=None, dtype=torch.float32)
    assert network.num_parameters == pytest.approx(num_parameters, rel=0.05)
    if settings.get("feedforward_size"):
        assert network.num_parameters == pytest.approx(num_parameters, rel=0.01)


def test_the_nearest_width_is_taken_and_what_hangs_on_it_follows():
    def count(width: int) -> int:
        config = model_config({"kind": "lstm", "hidden_size": width})
        return build_model(config, VOCAB_SIZE, seed=None, dtype=torch.float32).num_parameters

    width = sized(model_config({"kind": "lstm"}), 100_000, VOCAB_SIZE)["hidden_size"]
    assert min(range(width - 3, width + 4), key=lambda w: abs(count(w) - 100_000)) == width
    tied = sized(model_config({"kind": "lstm", "tie_weights": True, "embedding_size": 256}), 100_000, VOCAB_SIZE)
    assert tied["embedding_size"] == tied["hidden_size"]
    deep = sized(model_config({"kind": "mingru"}), 300_000, VOCAB_SIZE)
    assert deep["embedding_size"] == deep["hidden_size"]
    assert deep["num_layers"] == 4
    assert deep["feedforward_size"] == pytest.approx(688 / 256 * deep["hidden_size"], rel=0.05)
    shallow = sized(model_config({"kind": "mingru", "num_layers": 1, "feedforward_size": 32}), 300_000, VOCAB_SIZE)
    assert (shallow["num_layers"], shallow["feedforward_size"]) == (1, 32)
    heads = sized(model_config({"kind": "transformer", "num_heads": 6, "hidden_size": 24}), 300_000, VOCAB_SIZE)
    assert heads["hidden_size"] % 12 == 0


def test_numbers_that_no_width_meets_are_refused():
    with pytest.raises(ConfigError, match=r"no width of model.kind 'lstm' comes within 5% of 10 parameters"):
        sized(model_config({"kind": "lstm"}), 10, VOCAB_SIZE)
    with pytest.raises(ConfigError, match="has no hidden_size"):
        sized(model_config({"kind": "ngram"}), 10_000, VOCAB_SIZE)


def test_budgets_are_equal_in_what_they_count(corpus):
    common = {"data": {"corpus": [str(corpus)]}, "training": {"learning_rate": 0.01}}
    by_tokens = plan_entry(Entry.parse("lstm"), common, Terms("tokens", 1000))
    assert by_tokens.config.training.max_tokens == 1000
    assert by_tokens.config.training.learning_rate == 0.01
    by_time = plan_entry(Entry.parse("lstm"), common, Terms("seconds", 3))
    assert (by_time.config.training.max_seconds, by_time.config.training.max_tokens) == (3.0, None)
    plans = [plan_entry(Entry.parse(kind), common, Terms("operations", 1e9, 50_000)) for kind in ("lstm", "mingru")]
    for plan in plans:
        assert plan.parameters == pytest.approx(50_000, rel=0.05)
        network = build_model(plan.config.model, plan.dataset.tokenizer.size, seed=1, dtype=torch.float32)
        assert plan.operations == operations_per_token(network)
        assert 3 * plan.operations * plan.config.training.max_tokens == pytest.approx(1e9, rel=1e-3)


def test_what_is_counted_takes_none_of_the_training(corpus):
    common = {"data": {"corpus": [str(corpus)]}, "training": {"learning_rate": 0.01, "num_threads": 1}}
    plan = plan_entry(Entry.parse("ngram"), common, Terms("seconds", 3, 50_000), preset="cpu-1min")
    assert plan.is_counted
    assert plan.config.training.num_threads == 1
    assert plan.parameters == 0


def test_rates_are_multiplied_alike(corpus):
    common = {"data": {"corpus": [str(corpus)]}}
    plan = plan_entry(Entry("a", {"training": {"optimizer": "muon"}}), common, Terms("tokens", 100))
    before, after = plan.config.training, plan.with_rate(3.0).config.training
    assert after.learning_rate == pytest.approx(3 * before.learning_rate)
    assert after.matrix_learning_rate == pytest.approx(3 * before.matrix_learning_rate)
    adam = plan_entry(Entry("a", {}), common, Terms("tokens", 100)).with_rate(0.5).config
    assert adam == adam.model_validate(adam.to_dict())  # a rate that has no meaning is left alone


@pytest.mark.parametrize(
    ("entry", "terms", "complaint"),
    [
        ("a: training.max_updates=5", Terms("tokens", 10), "the budget of a comparison is one for all"),
        ("a: model.hidden_size=5", Terms("tokens", 10, 1000), "hidden_size is what is sought for --parameters"),
        ("a: model.kind=lsmt", Terms("tokens", 10), "did you mean 'lstm'"),
        ("a: model.order=3", Terms("tokens", 10), "entry 'a': model.order has no meaning"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_name_of_the_entry(corpus, entry, terms, complaint):
    with pytest.raises(UserError, match=complaint):
        plan_entry(Entry.parse(entry), {"data": {"corpus": [str(corpus)]}}, terms)
