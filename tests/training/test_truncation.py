"""Truncated back-propagation: exact losses, gradients that stop at the border and nowhere else, and clipping."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from elman.data.prepare import Dataset, Split
from elman.models.stack import RecurrentStack
from elman.settings import resolve
from elman.text.tokenizers import CharTokenizer
from elman.training.loop import Trainer

TOKENIZER = CharTokenizer("abcdefg")
V, B, T, H = TOKENIZER.size, 3, 5, 6


def trainer(tokens: np.ndarray, kind: str = "elman", **settings: Any) -> Trainer:
    split = Split(tokens, num_chars=len(tokens) - 1, num_bytes=len(tokens) - 1, num_documents=1, num_unknown=0)
    dataset = Dataset(TOKENIZER, split, None, None, "test", "0" * 64, ())
    training = {
        "batch_size": B, "bptt": T, "optimizer": "sgd", "schedule": "constant", "warmup_updates": 0,
        "learning_rate": 1e-300, "max_grad_norm": "none", "max_updates": 100, "reset_probability": 0.0,
    }  # fmt: skip
    sections = {
        "model": {"kind": kind, "embedding_size": 4, "hidden_size": H, **settings.pop("model", {})},
        "data": settings.pop("data", {}),
        "training": training | settings,
        "sampling": {"max_new_tokens": 0},
        "device": "cpu",
        "dtype": "float64",
    }
    return Trainer(resolve(sections), dataset)


def updates(training: Trainer):
    """The records of updates, one at a time; gradients of the last one are still in the parameters."""
    return (record.values for record in training.records() if record.kind == "update")


def gradients(network: RecurrentStack) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


TOKENS = np.concatenate([[0], np.random.default_rng(3).integers(1, V, size=B * 4 * T)])


@pytest.mark.parametrize("kind", ["elman", "lstm", "gru"])
def test_segments_with_carried_state_give_the_losses_of_one_long_pass(kind):
    training = trainer(TOKENS, kind, model={"num_layers": 2})
    rows = torch.from_numpy(TOKENS[:-1].reshape(B, -1)), torch.from_numpy(TOKENS[1:].reshape(B, -1))
    with torch.no_grad():
        features, _ = training.network.features(rows[0], training.network.initial_state(B))
        expected = training.network.head.nll(features, rows[1]).view(B, 4, T).mean((0, 2))
    found = [values["nats"] for values, _ in zip(updates(training), range(4), strict=False)]
    assert found == pytest.approx(expected.tolist(), rel=1e-13)
    assert len(set(found)) == 4


def by_hand(network: RecurrentStack, inputs, targets, h):
    """Loss of a segment and last state of the vanilla RNN, from its equations."""
    p = dict(network.named_parameters())
    nats = []
    for time in range(inputs.shape[1]):
        x = p["embedding"][inputs[:, time]]
        h = torch.tanh(x @ p["layers.0.weight_ih"].T + h @ p["layers.0.weight_hh"].T + p["layers.0.bias"])
        logits = h @ p["head.weight"].T + p["head.bias"]
        nats.append(functional.cross_entropy(logits, targets[:, time]))
    return torch.stack(nats).mean(), h


def test_the_gradient_stops_at_the_border_and_nowhere_else():
    training = trainer(TOKENS)
    network = training.network
    inputs, targets = (torch.from_numpy(row.reshape(B, -1)) for row in (TOKENS[:-1], TOKENS[1:]))
    zero = torch.zeros(B, H, dtype=torch.float64)
    first, carried = by_hand(network, inputs[:, :T], targets[:, :T], zero)
    second, _ = by_hand(network, inputs[:, T : 2 * T], targets[:, T : 2 * T], carried.detach())
    untruncated, _ = by_hand(network, inputs[:, T : 2 * T], targets[:, T : 2 * T], carried)
    names, parameters = zip(*network.named_parameters(), strict=True)
    of_first, of_second, of_both = (
        dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))
        for loss in (first, second, untruncated)
    )
    steps = updates(training)
    for expected in (of_first, of_second):
        next(steps)
        assert not any(tensor.requires_grad for tensor in training.state.tensors.values())
        for name, gradient in gradients(network).items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-13)
    assert not torch.allclose(of_second["layers.0.weight_hh"], of_both["layers.0.weight_hh"], rtol=1e-3)


def test_no_gradient_reaches_what_an_earlier_segment_read():
    early, late = [1, 2, 3], [4, 5, 6]
    tokens = np.array([0, *(early * 2)[: T - 1], *(late * 3)[: T + 1]])
    training = trainer(tokens, "lstm", batch_size=1, model={"num_layers": 2})
    steps = updates(training)
    next(steps)
    of_first = training.network.embedding.grad.clone()
    next(steps)
    of_second = training.network.embedding.grad
    assert of_first[[0, 1, 2, 3]].abs().sum(1).all()
    assert not of_second[[0, 1, 2, 3]].any()
    assert of_second[late[:T]].abs().sum(1).all()


def test_the_epoch_that_wraps_starts_from_the_initial_state():
    training = trainer(TOKENS)
    losses = [values["nats"] for values, _ in zip(updates(training), range(8), strict=False)]
    assert losses[4:] == losses[:4]  # nothing was learned, so nothing may differ


def test_the_shorter_last_segment_is_a_mean_over_its_own_targets():
    tokens = TOKENS[: B * (T + 2)]  # 20 targets: rows of 7, 7 and 6
    training = trainer(tokens)
    records = [values for values, _ in zip(updates(training), range(2), strict=False)]
    assert [values["tokens"] for values in records] == [15, 20]
    with torch.no_grad():
        total = 0.0
        for start, length in ((0, 7), (7, 7), (14, 6)):
            row = torch.from_numpy(tokens[start : start + length + 1]).unsqueeze(0)
            features, _ = training.network.features(row[:, :-1], training.network.initial_state(1))
            total += training.network.head.nll(features, row[:, 1:])[:, T:].sum().item()
    assert records[1]["nats"] == pytest.approx(total / 5, rel=1e-13)


@pytest.mark.parametrize("reset", [True, False])
def test_documents_start_from_the_initial_state_where_that_is_asked_for(reset):
    lengths = [4, 7, 3, 2]  # inputs of each document, its boundary first: borders within a segment and at its start
    documents = [np.concatenate([[0], np.random.default_rng(n).integers(1, V, size=n - 1)]) for n in lengths]
    tokens = np.concatenate([*documents, [1]])
    training = trainer(tokens, "lstm", batch_size=1, bptt=4, data={"reset_at_documents": reset})
    network = training.network
    nats, state = [], network.initial_state(1)
    with torch.no_grad():
        for token, target in pairwise(tokens.tolist()):
            state = network.initial_state(1) if reset and token == 0 else state
            features, state = network.features(torch.tensor([[token]]), state)
            nats.append(network.head.nll(features, torch.tensor([[target]])).item())
    found = [values["nats"] for values, _ in zip(updates(training), range(4), strict=False)]
    assert found == pytest.approx(np.array(nats).reshape(4, 4).mean(1).tolist(), rel=1e-13)


def test_streams_are_reset_before_a_segment_with_the_probability_asked_for():
    training = trainer(TOKENS, reset_probability=0.5, max_updates=40)
    network = training.network
    inputs, targets = (torch.from_numpy(row.reshape(B, -1)) for row in (TOKENS[:-1], TOKENS[1:]))
    initial = network.initial_state(B)
    num_reset, state = 0, initial
    for values in updates(training):
        segment = slice((values["update"] - 1) % 4 * T, ((values["update"] - 1) % 4 + 1) * T)
        state = initial if segment.start == 0 else state
        chances = torch.cartesian_prod(*[torch.tensor([False, True])] * B)
        for resets_B in chances:  # whichever streams were reset, the loss tells
            with torch.no_grad():
                features, after = network.features(inputs[:, segment], state.reset(resets_B, initial))
                loss = network.head.nll(features, targets[:, segment]).mean().item()
            if values["nats"] == pytest.approx(loss, rel=1e-13):
                break
        else:
            pytest.fail(f"no choice of reset streams gives the loss of update {values['update']}")
        num_reset += int(resets_B.sum()) if segment.start else 0
        state = after
    assert 25 <= num_reset <= 65  # of 90, half on average, with a deviation of 4.7


# Clipping.


def first_update(**settings: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    training = trainer(TOKENS, "gru", **settings)
    return next(updates(training)), gradients(training.network)


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).norm().item()


def test_a_gradient_above_the_threshold_keeps_its_direction_and_the_norm_before_is_logged():
    values, plain = first_update()
    assert values["grad_norm"] == pytest.approx(norm(plain), rel=1e-12)
    threshold = norm(plain) / 10
    clipped_values, clipped = first_update(max_grad_norm=threshold)
    assert clipped_values["grad_norm"] == values["grad_norm"]
    assert norm(clipped) == pytest.approx(threshold, rel=1e-4)
    factor = norm(clipped) / norm(plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(clipped[name], gradient * factor, rtol=1e-12, atol=0)


def test_a_gradient_below_the_threshold_is_untouched_to_the_last_bit():
    values, plain = first_update()
    clipped_values, clipped = first_update(max_grad_norm=norm(plain) * 1.01)
    assert clipped_values == values
    assert all(torch.equal(clipped[name], gradient) for name, gradient in plain.items())


def test_the_clipped_gradient_is_the_one_that_is_applied():
    training = trainer(TOKENS, learning_rate=0.5, max_grad_norm=1e-3)
    before = {name: parameter.detach().clone() for name, parameter in training.network.named_parameters()}
    next(updates(training))
    change = {name: parameter.detach() - before[name] for name, parameter in training.network.named_parameters()}
    assert norm(change) == pytest.approx(0.5 * 1e-3, rel=2e-3)
