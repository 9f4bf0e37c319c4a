"""The optimisers: Muon against singular values, PyTorch's own on one step, decay, memory, and the rate's course."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from elman.config import TrainingConfig
from elman.models.kinds import build_model, model_config
from elman.training.optimizers import QUINTICS, Muon, Optimizer, learning_rate_share, newton_schulz


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def network(kind: str = "lstm", **settings: Any):
    config = model_config({"kind": kind, "embedding_size": 6, "hidden_size": 8, "num_layers": 2, **settings})
    return build_model(config, 11, seed=1, dtype=torch.float64)


def give_gradients(model, seed: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = randn(*parameter.shape, seed=100 * seed + index)


def values(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Muon.


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4), (1, 5), (16, 3)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_newton_schulz_keeps_singular_vectors_and_brings_singular_values_near_one(shape, scale):
    matrix = randn(3, *shape) * scale
    result = newton_schulz(matrix)
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    inside = U.mT @ result @ Vh.mT  # diagonal where the singular vectors are kept
    singular = torch.diagonal(inside, dim1=-2, dim2=-1)
    assert (inside - torch.diag_embed(singular)).abs().max() < 1e-9
    scaled = S / (1.01 * S.pow(4).sum(-1, keepdim=True).sqrt()).sqrt()
    large = scaled > 0.03
    assert large.double().mean() > 0.9
    assert (singular[large] - 1).abs().max() < 0.04
    for a, b, c in QUINTICS:
        scaled = a * scaled + b * scaled**3 + c * scaled**5
    torch.testing.assert_close(singular, scaled, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(result, U @ inside @ Vh)


def test_no_quintics_are_nearer_to_one_than_those_of_newton_schulz():
    """Chebyshev: an odd quintic is the best one where its error comes to its greatest size with four changing signs."""
    low, high = 0.03, 1.0
    for a, b, c in QUINTICS:
        inner = np.roots([5 * c, 0, 3 * b, 0, a])  # where the polynomial turns
        turns = sorted(root.real for root in inner if abs(root.imag) < 1e-9 and low < root.real < high)
        errors = [a * x + b * x**3 + c * x**5 - 1 for x in (low, *turns, high)]
        assert len(errors) == 4
        assert [math.copysign(1, error) for error in errors] == [-1, 1, -1, 1]
        assert np.abs(errors) == pytest.approx(np.abs(errors).max(), abs=1e-4)
        low, high = 1 + min(errors), 1 + max(errors)
    assert 0.95 < low < high < 1.05


def test_newton_schulz_of_nothing_is_nothing():
    assert not newton_schulz(torch.zeros(2, 3, 4)).any()


def test_muon_orthogonalises_each_gate_apart():
    matrix = torch.nn.Parameter(randn(12, 5))
    before = matrix.detach().clone()
    gradient = randn(12, 5, seed=2) * torch.tensor([1.0, 100.0, 0.01]).repeat_interleave(4).unsqueeze(1)
    optimizer = Muon([(matrix, 3)], lr=0.1, momentum=0.9, weight_decay=0.5)
    matrix.grad = gradient.clone()
    optimizer.step()
    ahead = gradient + 0.9 * gradient  # the momentum after one step is the gradient
    expected = torch.cat([newton_schulz(block.unsqueeze(0))[0] for block in ahead.chunk(3)])
    torch.testing.assert_close(matrix.detach(), before * (1 - 0.1 * 0.5) - 0.1 * expected)
    for block in ((before * 0.95 - matrix.detach()) / 0.1).chunk(3):
        assert 0.6 < torch.linalg.svdvals(block).min() <= torch.linalg.svdvals(block).max() < 1.3
    matrix.grad = randn(12, 5, seed=3)
    then = matrix.detach().clone()
    optimizer.step()
    momentum = 0.9 * gradient + matrix.grad
    blocks = (matrix.grad + 0.9 * momentum).view(3, 4, 5)
    torch.testing.assert_close(matrix.detach(), then * 0.95 - 0.1 * newton_schulz(blocks).view(12, 5))


def test_a_tall_block_moves_further():
    wide, tall = (torch.nn.Parameter(torch.zeros(*shape, dtype=torch.float64)) for shape in ((4, 16), (16, 4)))
    gradient = randn(4, 16)
    wide.grad, tall.grad = gradient, gradient.T.clone()
    Muon([(wide, 1), (tall, 1)], lr=1.0).step()
    torch.testing.assert_close(tall.detach(), 2.0 * wide.detach().T)  # sqrt(16 / 4)


def test_muon_takes_the_matrices_between_hidden_layers_and_adamw_the_rest():
    model = network()
    config = TrainingConfig(optimizer="muon", learning_rate=1e-3, matrix_learning_rate=0.5, weight_decay=0.1)
    optimizer = Optimizer(model, config)
    before = values(model)
    give_gradients(model, 1)
    optimizer.step(1.0)
    for name, parameter in model.named_parameters():
        if name.startswith("layers") and parameter.dim() == 2:
            num_blocks = 4 if name.endswith("weight_hh") else 1  # gate by gate; the input's matrix is one map
            blocks = (1.95 * parameter.grad).view(num_blocks, -1, parameter.shape[1])
            expected = newton_schulz(blocks).view_as(parameter)
            scale = math.sqrt(max(1.0, blocks.shape[1] / blocks.shape[2]))
            torch.testing.assert_close(parameter.detach(), before[name] * 0.95 - 0.5 * scale * expected)
        else:
            assert (parameter.detach() - before[name]).abs().max() < 2e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_iteration_in_bfloat16_does_what_it_does_in_float32(dtype, monkeypatch):
    monkeypatch.setattr("elman.training.optimizers._iteration_dtype", lambda like: dtype)
    gradient = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    matrix = torch.nn.Parameter(torch.zeros(48, 96))
    matrix.grad = gradient.clone()
    Muon([(matrix, 2)], lr=1.0).step()
    assert matrix.dtype == torch.float32
    for block, of in zip(matrix.detach().chunk(2), gradient.chunk(2), strict=True):
        values = torch.linalg.svdvals(block)
        assert 0.6 < values.min() <= values.max() < 1.3
        expected = newton_schulz(of.double().unsqueeze(0))[0]
        assert torch.nn.functional.cosine_similarity(-block.flatten().double(), expected.flatten(), dim=0) > 0.99


# AdamW and SGD.


def test_adamw_is_pytorchs_with_decay_on_matrices_alone():
    model, theirs = network(), network()
    config = TrainingConfig(learning_rate=0.01, adam_beta1=0.8, adam_beta2=0.95, weight_decay=0.3)
    optimizer = Optimizer(model, config)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.dim() == 2], "weight_decay": 0.3},
            {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.01 * 0.5,
        betas=(0.8, 0.95),
    )
    for update in range(3):
        for each in (model, theirs):
            give_gradients(each, update)
        optimizer.step(0.5)
        reference.step()
    for name, value in values(theirs).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_the_rule_of_the_textbook(momentum):
    model = network()
    config = TrainingConfig(optimizer="sgd", learning_rate=20.0, momentum=momentum, weight_decay=0.01)
    optimizer = Optimizer(model, config)
    expected, velocity = values(model), {}
    for update in range(3):
        give_gradients(model, update)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad + (0.01 * expected[name] if parameter.dim() == 2 else 0.0)
            velocity[name] = momentum * velocity[name] + gradient if name in velocity else gradient
            expected[name] = expected[name] - 20.0 * 0.25 * velocity[name]
        optimizer.step(0.25)
    for name, value in expected.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_decay_is_decoupled_and_falls_on_matrices_alone(kind):
    model = network()
    rates = {"matrix_learning_rate": 0.1} if kind == "muon" else {}
    optimizer = Optimizer(model, TrainingConfig(optimizer=kind, learning_rate=0.1, weight_decay=0.5, **rates))
    before = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_a_tied_matrix_is_updated_once(kind):
    tied = network(tie_weights=True, embedding_size=8)
    untied = network(embedding_size=8)
    untied.embedding.data.copy_(tied.embedding.data)
    config = TrainingConfig(optimizer=kind, learning_rate=0.1, weight_decay=0.2)
    gradient = randn(11, 8)
    for model in (tied, untied):
        give_gradients(model, 1)
        model.embedding.grad = gradient.clone()
        Optimizer(model, config).step(1.0)
    assert torch.equal(tied.embedding, untied.embedding)


# Memory.


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(optimizer="adamw", weight_decay=0.1),
        TrainingConfig(optimizer="sgd", momentum=0.9),
        TrainingConfig(optimizer="sgd"),
        TrainingConfig(optimizer="muon", weight_decay=0.1),
    ],
    ids=["adamw", "sgd-momentum", "sgd", "muon"],
)
def test_what_is_remembered_can_be_put_back(config):
    model, copy = network(), network()
    optimizer = Optimizer(model, config)
    for update in range(3):
        give_gradients(model, update)
        optimizer.step(1.0)
    memory = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    assert bool(memory) == (config.optimizer != "sgd" or config.momentum > 0)
    for name, parameter in copy.named_parameters():
        parameter.data.copy_(model.get_parameter(name).data)
    restored = Optimizer(copy, config)
    restored.load_tensors(memory)
    assert memory.keys() == restored.tensors().keys()
    for update in range(3, 6):
        for each, its in ((model, optimizer), (copy, restored)):
            give_gradients(each, update)
            its.step(0.5)
    assert all(torch.equal(copy.get_parameter(name), value) for name, value in values(model).items())


def test_memory_put_back_is_a_copy():
    model = network()
    optimizer = Optimizer(model, TrainingConfig())
    give_gradients(model, 1)
    optimizer.step(1.0)
    memory = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    kept = {name: tensor.clone() for name, tensor in memory.items()}
    optimizer.load_tensors(memory)
    optimizer.step(1.0)
    assert all(torch.equal(memory[name], tensor) for name, tensor in kept.items())


def test_gradients_are_forgotten():
    model = network()
    optimizer = Optimizer(model, TrainingConfig(optimizer="muon"))
    give_gradients(model, 1)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


# The course of the rate.


@pytest.mark.parametrize(
    ("settings", "update", "progress", "share"),
    [
        ({"schedule": "constant", "warmup_updates": 0}, 0, 0.0, 1.0),
        ({"schedule": "constant", "warmup_updates": 10}, 0, 0.0, 0.1),
        ({"schedule": "constant", "warmup_updates": 10}, 4, 0.0, 0.5),
        ({"schedule": "constant", "warmup_updates": 10}, 9, 0.0, 1.0),
        ({"schedule": "constant", "warmup_updates": 10}, 500, 1.0, 1.0),
        ({"schedule": "cosine", "warmup_updates": 0, "final_rate": 0.1}, 0, 0.0, 1.0),
        ({"schedule": "cosine", "warmup_updates": 0, "final_rate": 0.1}, 0, 0.5, 0.55),
        ({"schedule": "cosine", "warmup_updates": 0, "final_rate": 0.1}, 0, 1.0, 0.1),
        ({"schedule": "cosine", "warmup_updates": 0, "final_rate": 0.0}, 0, 1 / 3, 0.75),
        ({"schedule": "cosine", "warmup_updates": 4, "final_rate": 0.0}, 1, 1 / 3, 0.375),
        ({"schedule": "linear", "warmup_updates": 0, "final_rate": 0.2}, 0, 0.25, 0.8),
        ({"schedule": "linear", "warmup_updates": 0, "final_rate": 0.2}, 0, 1.0, 0.2),
        ({"schedule": "plateau", "warmup_updates": 0}, 0, 0.9, 1 / 16),
        ({"schedule": "plateau", "warmup_updates": 2}, 0, 0.9, 1 / 32),
    ],
)
def test_the_rate_at_known_points(settings, update, progress, share):
    found = learning_rate_share(TrainingConfig(**settings), update, progress, plateau_factor=1 / 16)
    assert found == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_never_rises_after_the_warm_up(schedule):
    config = TrainingConfig(schedule=schedule, warmup_updates=0)
    shares = [learning_rate_share(config, 0, i / 100, 1.0) for i in range(101)]
    assert all(later < earlier for earlier, later in pairwise(shares))
