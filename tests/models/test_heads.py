"""The outputs: adaptive softmax against PyTorch's own, the mixture, tied weights, costs of training, sparse rows."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from elman.errors import ConfigError
from elman.models.file import Bundle, load_model, save_model
from elman.models.heads import look_up
from elman.models.kinds import build_model, model_class, model_config
from elman.models.laws import check_config
from elman.models.losses import Objective, Proposal, unigram_chances
from elman.models.noise import Noise
from elman.text.tokenizers import CharTokenizer

V, E, H = 40, 8, 12
ADAPTIVE = {"output": "adaptive", "output_cutoffs": (10, 25)}
MIXTURE = {"output": "mixture", "num_mixtures": 3}
TOKENS = torch.randint(V, (3, 9), generator=torch.Generator().manual_seed(2))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]
WEIGHT = torch.rand(3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def build(dtype: torch.dtype = torch.float64, vocab_size: int = V, **settings):
    given = {"kind": "lstm", "embedding_size": E, "hidden_size": H, **settings}
    network = build_model(model_config(given), vocab_size, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return network


def features_of(network):
    return network.features(INPUTS, network.initial_state(3))[0]


@pytest.mark.global_rng
def test_the_adaptive_softmax_is_that_of_pytorch():
    network = build(hidden_size=32, **ADAPTIVE)
    head = network.head
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(32, V, [10, 25], div_value=4.0, head_bias=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.head.weight.copy_(head.weight)
        theirs.head.bias.copy_(head.bias)
        for tail, projection, matrix in zip(theirs.tail, head.projections, head.clusters, strict=True):
            tail[0].weight.copy_(projection)
            tail[1].weight.copy_(matrix)
    features = features_of(network).detach()
    expected = theirs.log_prob(features.flatten(0, 1)).view(3, 8, V)
    torch.testing.assert_close(head.log_probs(features), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        head.nll(features, TARGETS).flatten(),
        -theirs(features.flatten(0, 1), TARGETS.flatten()).output,
        rtol=0,
        atol=1e-12,
    )
    head.nll(features, TARGETS).sum().backward()
    (-theirs(features.flatten(0, 1), TARGETS.flatten()).output.sum()).backward()
    pairs = [(head.weight, theirs.head.weight), (head.bias, theirs.head.bias)]
    for tail, projection, matrix in zip(theirs.tail, head.projections, head.clusters, strict=True):
        pairs += [(projection, tail[0].weight), (matrix, tail[1].weight)]
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-12)


def test_a_cluster_without_a_target_costs_nothing_and_gets_no_gradient():
    network = build(**ADAPTIVE)
    features = features_of(network)
    network.head.nll(features, TARGETS % 10).sum().backward()
    assert all(matrix.grad is None for matrix in network.head.clusters)
    assert network.head.weight.grad.any()


def test_cutoffs_beyond_the_vocabulary_are_left_out():
    network = build(output="adaptive", output_cutoffs=(30, 40, 1000))
    assert [tuple(matrix.shape) for matrix in network.head.clusters] == [(10, 3)]
    small = build(vocab_size=20, output="adaptive", output_cutoffs=(30, 40))
    assert len(small.head.clusters) == 0
    assert small.head.weight.shape == (20, H)
    torch.testing.assert_close(small.head.log_probs(torch.ones(1, 1, H).double()).exp().sum().item(), 1.0)


@pytest.mark.parametrize(
    "settings",
    [ADAPTIVE, MIXTURE, MIXTURE | {"tie_weights": True}, {"output": "adaptive", "output_cutoffs": (1,)}],
)
@pytest.mark.parametrize("kind", ["lstm", "window"])
def test_parameters_are_predicted_saved_and_loaded(kind, settings, tmp_path):
    network = build(kind=kind, vocab_size=10, **settings)
    assert model_class(network.config).predicted_num_parameters(network.config, 10) == network.num_parameters
    path = tmp_path / "model.safetensors"
    save_model(path, Bundle(network, CharTokenizer("abcdefgh")))
    loaded = load_model(path).network
    for name, parameter in network.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.mark.parametrize("settings", [ADAPTIVE | {"output_cutoffs": (3, 7)}, MIXTURE])
def test_the_laws_hold(settings):
    config = model_config({"kind": "elman", "embedding_size": 6, "hidden_size": 6, **settings})
    assert [str(finding) for finding in check_config(config)] == []


def test_a_mixture_of_tied_weights_uses_the_embedding():
    network = build(tie_weights=True, **MIXTURE)
    assert network.head.weight is network.embedding
    assert sum(p is network.embedding for p in network.parameters()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "adaptive", "tie_weights": True}, "tie_weights has no meaning for output 'adaptive'"),
        ({"output": "mixture", "output_projection": True}, "output_projection has no meaning for output 'mixture'"),
        ({"output_cutoffs": (5, 6)}, "output_cutoffs has no meaning for output 'linear'"),
        ({"num_mixtures": 3}, "num_mixtures has no meaning for output 'linear'"),
        ({"output": "adaptive", "output_cutoffs": (5, 5)}, "must rise"),
        ({"output": "adaptive", "output_cutoffs": ()}, "at least 1 item"),
        ({"kind": "window", "output": "mixture", "direct_connections": True}, "direct_connections has no meaning"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        build(**settings)


@pytest.mark.parametrize(
    ("settings", "stated"),
    [
        ({"output_projection": H + 1}, str(H + 1)),
        ({"output_projection": True, "embedding_size": H + 2}, rf"true, the width of the embedding \({H + 2}\),"),
    ],
)
def test_a_projection_that_widens_is_refused(settings, stated):
    with pytest.raises(ConfigError, match=rf"output_projection {stated} is wider than .*; accepted: up to {H}, or"):
        build(**settings)


def test_cutoffs_may_be_typed_as_one_word():
    assert build(output="adaptive", output_cutoffs="10,25").config.output_cutoffs == (10, 25)


# Costs of training.


@pytest.mark.parametrize(
    "settings",
    [{}, {"output_projection": True}, {"tie_weights": True, "embedding_size": H}, ADAPTIVE, MIXTURE,
     {"kind": "window", "direct_connections": True}],
)  # fmt: skip
def test_training_costs_are_the_loss_of_the_full_distribution(settings):
    network = build(**settings)
    parameters = list(network.parameters())
    features = features_of(network)
    costs = network.head.training_costs(features, TARGETS, WEIGHT, Objective())
    mine = torch.autograd.grad(costs.objective.sum(), parameters, allow_unused=True, retain_graph=True)
    log_probs = network.head.log_probs(features)
    expected = -log_probs.gather(2, TARGETS.unsqueeze(2)).squeeze(2) * WEIGHT
    theirs = torch.autograd.grad(expected.sum(), parameters, allow_unused=True)
    torch.testing.assert_close(costs.objective, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(costs.nats, expected.detach(), rtol=0, atol=1e-12)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(torch.zeros(()) if one is None else one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("settings", [{}, MIXTURE])
def test_label_smoothing_is_the_cost_of_a_smoothed_target(settings):
    network = build(**settings)
    features = features_of(network)
    costs = network.head.training_costs(features, TARGETS, WEIGHT, Objective(label_smoothing=0.3))
    log_probs = network.head.log_probs(features)
    wanted = 0.7 * torch.nn.functional.one_hot(TARGETS, V).double() + 0.3 / V
    torch.testing.assert_close(costs.objective, -(wanted * log_probs).sum(-1) * WEIGHT, rtol=0, atol=1e-12)
    assert not torch.allclose(costs.objective, costs.nats)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sampled_softmax_learns_from_its_negatives_alone(tied):
    network = build(tie_weights=tied, embedding_size=H)
    proposal = Proposal(unigram_chances(torch.arange(V, 0, -1)))
    negatives = proposal.draw(torch.rand(6, generator=torch.Generator().manual_seed(4)).double())
    features = features_of(network).detach()
    costs = network.head.training_costs(features, TARGETS, WEIGHT, Objective(negatives=negatives, sparse_rows=not tied))
    costs.objective.sum().backward()
    gradient = network.head.weight.grad.to_dense() if network.head.weight.grad.is_sparse else network.head.weight.grad
    touched = set(gradient.any(1).nonzero().flatten().tolist())
    assert touched <= {*TARGETS.flatten().tolist(), *negatives.ids_N.tolist()}
    assert network.head.bias.grad.any()
    assert math.isfinite(costs.nats.sum())


# Sparse rows.


def test_rows_looked_up_have_a_sparse_gradient_where_it_pays_and_the_same_one():
    matrix = torch.randn(100, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ids = torch.tensor([[3, 7, 3], [0, 99, 5]])
    found = {}
    for sparse in (False, True):
        matrix.grad = None
        (look_up(ids, matrix, sparse=sparse) * torch.arange(6.0).view(2, 3, 1)).sum().backward()
        assert matrix.grad.is_sparse == sparse
        found[sparse] = matrix.grad.to_dense()
    assert torch.equal(found[False], found[True])
    matrix.grad = None
    look_up(ids.repeat(5, 1), matrix, sparse=True).sum().backward()
    assert not matrix.grad.is_sparse


@pytest.mark.parametrize(("kind", "vocab_size", "tied", "is_sparse"),
                         [("lstm", 100, False, True), ("lstm", 100, True, False), ("lstm", 30, False, False),
                          ("window", 2000, False, True)])  # fmt: skip
def test_a_model_gives_its_embedding_a_sparse_gradient_on_request(kind, vocab_size, tied, is_sparse):
    network = build(kind=kind, vocab_size=vocab_size, tie_weights=tied, embedding_size=H)
    noise = Noise(1, 1, 3, sparse_rows=True)
    features, _ = network.features(INPUTS % vocab_size, network.initial_state(3), noise=noise)
    network.head.nll(features, TARGETS % vocab_size).sum().backward()
    assert network.embedding.grad.is_sparse == is_sparse
    sparse = network.embedding.grad.to_dense() if is_sparse else network.embedding.grad.clone()
    network.zero_grad()
    features, _ = network.features(INPUTS % vocab_size, network.initial_state(3))
    network.head.nll(features, TARGETS % vocab_size).sum().backward()
    torch.testing.assert_close(sparse, network.embedding.grad, rtol=0, atol=1e-12)
