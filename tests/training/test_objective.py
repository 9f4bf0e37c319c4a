"""What an update lowers: the cost of the targets, penalties on activations, negatives; shares of a global batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from elman.config import TrainingConfig
from elman.errors import ConfigError, TrainingError
from elman.models.kinds import build_model, model_config
from elman.models.losses import Costs, Proposal
from elman.models.noise import Noise
from elman.settings import Config, resolve
from elman.training.objective import activation_change, activation_size, penalty, proposal_of, training_costs

V, B, T = 20, 4, 7
TOKENS = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS[:, 1:]
WEIGHT = torch.ones(B, T, dtype=torch.float64)
WEIGHT[3, 4:] = 0.0
NUM_TARGETS = int(WEIGHT.sum())


def build(**settings):
    given = {"kind": "lstm", "embedding_size": 5, "hidden_size": 6, **settings}
    return build_model(model_config(given), V, seed=1, dtype=torch.float64)


def loss_of(network, rows=slice(None), **training):
    """Features of some rows and their share of the loss of the batch, penalties with it."""
    first = rows.start or 0
    noise = Noise(1, 2, B, first_row=first)
    tokens = TOKENS[rows, :-1]
    features, _ = network.features(tokens, network.initial_state(len(tokens)), noise=noise)
    config = TrainingConfig(**training)
    proposal = proposal_of(config, TOKENS.flatten().numpy(), V)
    costs = training_costs(
        network, features, TARGETS[rows], WEIGHT[rows] / NUM_TARGETS, config, noise, proposal=proposal
    )
    added = penalty(network.config, features, WEIGHT[rows], config) / NUM_TARGETS
    return features, Costs(costs.objective + added, costs.nats)


def test_without_options_it_is_the_mean_cost_of_a_target():
    network = build()
    features, loss = loss_of(network)
    expected = network.head.nll(features, TARGETS, WEIGHT).sum() / NUM_TARGETS
    torch.testing.assert_close(loss.objective, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(loss.nats, expected.detach(), rtol=0, atol=1e-14)
    assert not loss.nats.requires_grad


def test_penalties_are_the_papers_terms_in_numpy():
    network = build(dropout=0.5, locked_dropout=True, output_dropout=0.25)
    features, loss = loss_of(network, activation_penalty=2.0, temporal_penalty=3.0)
    f, w = features.detach().numpy(), WEIGHT.numpy()
    size = sum(w[b, t] * np.mean(f[b, t] ** 2) for b in range(B) for t in range(T))
    change = sum(w[b, t] * w[b, t - 1] * np.mean((f[b, t] - f[b, t - 1]) ** 2) for b in range(B) for t in range(1, T))
    expected = loss.nats.item() + (2.0 * size + 3.0 * 0.75 * change) / NUM_TARGETS
    assert loss.objective.item() == pytest.approx(expected, abs=1e-13)
    assert activation_size(features, WEIGHT).item() == pytest.approx(size, abs=1e-13)
    assert activation_change(features, WEIGHT).item() == pytest.approx(change, abs=1e-13)


def test_the_temporal_penalty_estimates_that_of_the_undropped_output():
    """Over many masks the mean of what dropout leaves, times the share that is kept, is the paper's term."""
    raw = torch.randn(2, T, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.ones(2, T, dtype=torch.float64)
    exact = activation_change(raw, weight).item()
    drawn = [
        0.6 * activation_change(Noise(1, update, 2).dropout(raw, 0.4, "x", locked=True), weight).item()
        for update in range(1500)
    ]
    assert np.mean(drawn) == pytest.approx(exact, abs=4 * np.std(drawn) / 1500**0.5)


@pytest.mark.parametrize(
    "training",
    [{}, {"label_smoothing": 0.1}, {"num_negatives": 8}, {"activation_penalty": 2.0, "temporal_penalty": 1.0}],
)
def test_the_losses_of_the_rows_add_up_to_that_of_the_batch(training):
    network = build(dropout=0.3, locked_dropout=True)
    whole = loss_of(network, **training)[1]
    parts = [loss_of(network, rows, **training)[1] for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(part.objective for part in parts), whole.objective, rtol=0, atol=1e-13)
    torch.testing.assert_close(sum(part.nats for part in parts), whole.nats, rtol=0, atol=1e-13)


def test_label_smoothing_is_lowered_and_the_nats_are_those_of_the_targets():
    network = build()
    _, plain = loss_of(network)
    _, smoothed = loss_of(network, label_smoothing=0.2)
    torch.testing.assert_close(smoothed.nats, plain.nats, rtol=0, atol=1e-14)
    assert abs(smoothed.objective.item() - plain.objective.item()) > 1e-4


def test_negatives_are_those_of_the_update():
    network = build()
    first, again, other = (
        loss_of(network, num_negatives=6)[1],
        loss_of(network, num_negatives=6)[1],
        loss_of(network)[1],
    )
    assert first.nats == again.nats != other.nats


def test_negatives_need_to_be_drawn_from_something():
    network = build()
    config, features = TrainingConfig(num_negatives=6), torch.zeros(B, T, 6, dtype=torch.float64)
    with pytest.raises(TrainingError, match="nothing says how likely each is"):
        training_costs(network, features, TARGETS, WEIGHT, config, Noise(1, 1, B))


def test_as_many_negatives_as_tokens_are_refused():
    assert proposal_of(TrainingConfig(num_negatives=9), np.arange(10), 10) is not None
    with pytest.raises(ConfigError, match=r"num_negatives 10 stands for a vocabulary of 10 tokens; accepted: fewer"):
        proposal_of(TrainingConfig(num_negatives=10), np.arange(10), 10)


def test_negatives_are_drawn_anew_after_a_batch_that_was_skipped():
    network = build()
    config, features = TrainingConfig(num_negatives=6), torch.ones(B, T, 6, dtype=torch.float64)
    proposal = Proposal(torch.full((network.vocab_size,), 1 / network.vocab_size))
    nats = [
        training_costs(
            network, features, TARGETS, WEIGHT, config, Noise(1, 1, B, num_skipped=skipped), proposal=proposal
        ).nats
        for skipped in (0, 0, 1, 2)
    ]
    assert nats[0] == nats[1]
    assert len(set(map(float, nats))) == 3


def test_a_counted_model_has_no_output_to_train():
    counted = build_model(model_config({"kind": "ngram"}), V, seed=1, dtype=torch.float64)
    with pytest.raises(TrainingError, match="no output that can be trained"):
        training_costs(counted, torch.zeros(B, T, 1), TARGETS, WEIGHT, TrainingConfig(), Noise(1, 1, B))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": {"num_negatives": 5, "label_smoothing": 0.1}}, "label_smoothing has no meaning"),
        ({"training": {"num_negatives": 5}, "model": {"output": "adaptive"}}, "num_negatives has no meaning"),
        ({"training": {"label_smoothing": 0.1}, "model": {"output": "adaptive"}}, "label_smoothing has no"),
        ({"training": {"temporal_penalty": 1.0}, "model": {"dropout": 0.1}}, "needs masks that stay the same"),
        ({"training": {"averaging_decay": 0.5}}, "averaging_decay has no meaning"),
        ({"training": {"random_bptt": True}, "data": {"pairs": True}}, "random_bptt True has no meaning"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(settings)


def test_a_temporal_penalty_is_accepted_where_nothing_is_dropped_before_the_output():
    config = resolve({"training": {"temporal_penalty": 1.0}, "model": {"dropout": 0.1, "output_dropout": 0.0}})
    assert isinstance(config, Config)
    with pytest.raises(ValidationError):
        TrainingConfig(activation_penalty=-1.0)
