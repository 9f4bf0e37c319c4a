"""Costs in pieces against PyTorch's own, their gradients of every order, and the memory that they take."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from elman.models import losses
from elman.models.losses import (
    LinearCost,
    MixtureCost,
    Negatives,
    Positions,
    Proposal,
    in_pieces,
    mixture_log_probs,
    sampled_costs,
    unigram_chances,
)

R, F, V, E, K = 13, 5, 11, 4, 3


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGETS = torch.randint(V, (R,), generator=torch.Generator().manual_seed(2))
WEIGHT = torch.rand(R, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LINEAR = (randn(V, F, seed=4), randn(V, seed=5))
MIXTURE = (randn(K, F, seed=6), randn(K * E, F, seed=7), randn(K * E, seed=8), randn(V, E, seed=9), randn(V, seed=10))


@pytest.fixture(params=[2, 5, 100], ids=lambda rows: f"{rows} rows at once")
def pieces(request, monkeypatch):
    monkeypatch.setattr(losses, "FEW_NUMBERS", 0)
    monkeypatch.setattr(losses, "_MIN_ROWS", request.param)
    monkeypatch.setattr(losses, "_NUMBERS_AT_ONCE", 1)


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def gradients(total, wanted):
    return torch.autograd.grad(total, wanted)


def plain(cost, x, parameters, weight=WEIGHT):
    """PyTorch's own cross entropy, everything at once."""
    if isinstance(cost, LinearCost):
        logits = functional.linear(x, *parameters)
        return functional.cross_entropy(logits, TARGETS, reduction="none", label_smoothing=cost.smoothing) * weight
    log_probs = mixture_log_probs(x, tuple(parameters))
    smooth = -log_probs.mean(1)
    nats = functional.nll_loss(log_probs, TARGETS, reduction="none")
    return ((1 - cost.smoothing) * nats + cost.smoothing * smooth) * weight


CASES = [
    (LinearCost(), LINEAR),
    (LinearCost(), LINEAR[:1]),
    (LinearCost(smoothing=0.2), LINEAR),
    (MixtureCost(), MIXTURE),
    (MixtureCost(smoothing=0.1), MIXTURE),
]


@pytest.mark.parametrize(("cost", "parameters"), CASES)
@pytest.mark.parametrize("how", ["sum", "scaled", "each"])
@pytest.mark.usefixtures("pieces")
def test_costs_and_gradients_are_those_of_the_plain_form(cost, parameters, how):
    upstream = {"sum": torch.ones(R).double(), "scaled": torch.full((R,), 0.3).double(), "each": randn(R, seed=11)}[how]
    x, *own = leaves(randn(R, F), *parameters)
    found = in_pieces(cost, Positions(x, TARGETS, WEIGHT), tuple(own))
    ours = gradients((found.objective * upstream).sum(), [x, *own])
    again, *theirs = leaves(randn(R, F), *parameters)
    expected = plain(cost, again, theirs)
    wanted = gradients((expected * upstream).sum(), [again, *theirs])
    torch.testing.assert_close(found.objective, expected, rtol=0, atol=1e-12)
    for mine, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    nats = functional.nll_loss(
        mixture_log_probs(x, tuple(own)) if len(own) == 5 else functional.linear(x, *own).log_softmax(1),
        TARGETS,
        reduction="none",
    )
    torch.testing.assert_close(found.nats, (nats * WEIGHT).detach(), rtol=0, atol=1e-12)
    assert not found.nats.requires_grad


@pytest.mark.parametrize(("cost", "parameters"), CASES)
@pytest.mark.global_rng
@pytest.mark.usefixtures("pieces")
def test_gradients_have_gradients(cost, parameters):
    def total(x, *own):
        return in_pieces(cost, Positions(x, TARGETS, WEIGHT).rows(slice(6)), own).objective

    arguments = leaves(randn(6, F), *parameters)
    assert torch.autograd.gradcheck(total, arguments)
    assert torch.autograd.gradgradcheck(total, arguments)


@pytest.mark.usefixtures("pieces")
def test_a_gradient_that_is_kept_can_be_taken_twice():
    x, *own = leaves(randn(R, F), *LINEAR)
    total = in_pieces(LinearCost(), Positions(x, TARGETS, WEIGHT), tuple(own)).objective.sum() / 7
    first = torch.autograd.grad(total, [x, *own], retain_graph=True)
    second = torch.autograd.grad(total, [x, *own])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.usefixtures("pieces")
def test_without_gradients_the_costs_are_the_same_and_the_softmax_has_the_dtype_asked_for():
    x, *own = leaves(randn(R, F).float(), *(parameter.float() for parameter in LINEAR))
    with torch.no_grad():
        found = in_pieces(LinearCost(dtype=torch.float64), Positions(x, TARGETS, WEIGHT), tuple(own))
        logits = functional.linear(x, *own).double()
    assert found.objective.dtype == torch.float64
    expected = functional.cross_entropy(logits, TARGETS, reduction="none") * WEIGHT
    torch.testing.assert_close(found.objective, expected, rtol=0, atol=1e-6)  # logits are rounded in float32
    with_gradient = in_pieces(LinearCost(dtype=torch.float64), Positions(x, TARGETS, WEIGHT.float()), tuple(own))
    torch.testing.assert_close(with_gradient.objective.detach(), expected, rtol=0, atol=1e-6)
    assert gradients(with_gradient.objective.sum(), [x])[0].dtype == torch.float32


def test_a_leaf_without_a_gradient_gets_none():
    x, weight = randn(R, F), LINEAR[0].clone().requires_grad_()
    in_pieces(LinearCost(), Positions(x, TARGETS, WEIGHT), (weight,)).objective.sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_no_tensor_of_all_positions_and_all_words_is_ever_made(monkeypatch):
    monkeypatch.setattr(losses, "FEW_NUMBERS", 0)
    monkeypatch.setattr(losses, "_MIN_ROWS", 8)
    monkeypatch.setattr(losses, "_NUMBERS_AT_ONCE", 8 * 200)
    num_rows, vocab_size = 64, 200
    x, weight = leaves(randn(num_rows, F), randn(vocab_size, F))
    targets = torch.randint(vocab_size, (num_rows,), generator=torch.Generator().manual_seed(1))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            return False

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            result = function(*arguments, **(keywords or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    positions = Positions(x, targets, torch.ones(num_rows).double())
    with Watch():
        in_pieces(LinearCost(), positions, (weight,)).objective.sum().backward()
    assert largest == 8 * vocab_size


def test_a_mixture_is_the_papers_equation_in_numpy():
    x = randn(R, F).numpy()
    prior, latent, latent_bias, weight, bias = (parameter.numpy() for parameter in MIXTURE)

    def softmax(z):
        e = np.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    pi = softmax(x @ prior.T)
    h = np.tanh(x @ latent.T + latent_bias).reshape(R, K, E)
    p = (pi[:, :, None] * softmax(h @ weight.T + bias)).sum(1)
    found = mixture_log_probs(torch.from_numpy(x), MIXTURE)
    np.testing.assert_allclose(found.numpy(), np.log(p), rtol=1e-12)


# Sampled softmax.


COUNTS = torch.tensor([500, 0, 3, 70, 20, 1, 0, 9, 0, 4, 30])
CHANCES = unigram_chances(COUNTS)


def test_negatives_are_as_likely_as_their_counts_and_the_power_say():
    weights = [(count + 1) ** 0.75 for count in COUNTS.tolist()]
    np.testing.assert_allclose(CHANCES, np.array(weights) / sum(weights), rtol=1e-14)
    np.testing.assert_allclose(unigram_chances(COUNTS, power=0.0), np.full(V, 1 / V), rtol=1e-14)


def test_ids_are_drawn_with_their_chances_and_told_how_often_they_were_expected():
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    negatives = Proposal(CHANCES).draw(uniform)
    chances = CHANCES.numpy()
    shares = np.bincount(negatives.ids_N, minlength=V) / len(uniform)
    deviations = np.sqrt(chances * (1 - chances) / len(uniform))
    assert (np.abs(shares - chances) < 4.5 * deviations).all()
    np.testing.assert_allclose(negatives.log_expected_N, np.log(len(uniform) * chances)[negatives.ids_N], rtol=1e-12)
    edges = Proposal(CHANCES).draw(torch.tensor([0.0, 1 - 1e-16], dtype=torch.float64))
    assert edges.ids_N.tolist() == [0, V - 1]


def test_a_tokens_interval_is_as_long_as_its_chance():
    """The inverse of the distribution function, by hand."""
    up_to = np.cumsum(CHANCES.numpy())
    for token in range(V):
        inside = torch.tensor([up_to[token] - 1e-9, up_to[token] - CHANCES[token].item() + 1e-9]).double()
        assert Proposal(CHANCES).draw(inside).ids_N.tolist() == [token, token]


def sampled(x, weight, bias, negatives, targets=TARGETS):
    positions, ids = Positions(x, targets, torch.ones(len(x)).double()), negatives.ids_N
    return sampled_costs(positions, weight[targets], bias[targets], negatives, weight[ids], bias[ids]).objective


def test_sampled_costs_are_the_equation_in_numpy():
    weight, bias = LINEAR
    ids = torch.tensor([3, 0, 3, 7])
    negatives = Negatives(ids, randn(4, seed=12))
    found = sampled(randn(R, F), weight, bias, negatives).numpy()
    z = randn(R, F).numpy() @ weight.numpy().T + bias.numpy()
    for row, target in enumerate(TARGETS.tolist()):
        others = sum(
            math.exp(z[row, i] - log_expected)
            for i, log_expected in zip(ids.tolist(), negatives.log_expected_N.tolist(), strict=True)
            if i != target
        )
        assert found[row] == pytest.approx(math.log(math.exp(z[row, target]) + others) - z[row, target], abs=1e-12)


def test_with_many_negatives_the_cost_and_its_gradient_come_to_the_exact_ones():
    x, weight, bias = leaves(randn(R, F), *LINEAR)
    exact = functional.cross_entropy(functional.linear(x, weight, bias), TARGETS, reduction="none")
    uniform = torch.rand(400_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    near = sampled(x, weight, bias, Proposal(CHANCES).draw(uniform))
    torch.testing.assert_close(near, exact, rtol=0.01, atol=0.01)
    for one, other in zip(gradients(near.sum(), [weight]), gradients(exact.sum(), [weight]), strict=True):
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)
    few = Proposal(CHANCES).draw(uniform[:5])
    assert (sampled(x, weight, bias, few) - exact).abs().max() > 0.05


def test_the_corrected_sum_is_that_over_all_other_tokens_in_expectation():
    """Over many draws of few negatives; without the correction, or with a wrong one, it is not."""
    x, (weight, bias) = randn(R, F), LINEAR
    z = functional.linear(x, weight, bias)
    exact = z.exp().sum(1) - z.exp().gather(1, TARGETS.unsqueeze(1)).squeeze(1)
    uniform = torch.rand(6000, 7, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    of_target = z.gather(1, TARGETS.unsqueeze(1)).squeeze(1)
    drawn = [sampled(x, weight, bias, Proposal(CHANCES).draw(u)) for u in uniform]
    sums = torch.stack([(cost + of_target).exp() - of_target.exp() for cost in drawn])
    error = (sums.mean(0) - exact).abs()
    assert (error < 4.5 * sums.std(0) / len(uniform) ** 0.5).all()
    assert (error < 0.25 * exact).all()
