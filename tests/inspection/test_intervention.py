"""Interventions against a plain loop that changes the state by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elman.errors import UserError
from elman.inspection.intervention import Hold, held_parts, intervene
from elman.models.kinds import build_model, model_config

SIZE = 9
TOKENS = np.array([0, 3, 1, 4, 1, 5, 8, 2, 6, 5, 3, 5])
SETS = np.zeros((2, SIZE), bool)
SETS[0, [1, 5]] = SETS[1, 8] = True


def network(kind: str = "lstm", **settings):
    size = {"hidden_size": 8} if kind != "ngram" else {}
    return build_model(model_config({"kind": kind, **size, **settings}), SIZE, seed=1, dtype=torch.float64)


def by_hand(model, part: str, unit: int, value: float) -> np.ndarray:
    """The probabilities (T, V) of a model whose one number is overwritten after every step."""
    state, rows = model.initial_state(1), []
    with torch.no_grad():
        for token in TOKENS[:-1].tolist():
            features, state = model.step(torch.tensor([token]), state)
            if part == "features":
                features[0, unit] = value
            else:
                state.tensors[part].view(1, -1)[0, unit] = value
                if part == "0.h":  # the output of the cell, which the head reads
                    features = state.tensors["0.h"]
            rows.append(model.head.log_probs(features[:, None])[0, 0].exp())
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(
    ("kind", "part"), [("lstm", "0.c"), ("lstm", "0.h"), ("gru", "0.h"), ("mlstm", "0.C"), ("window", "features")]
)
def test_a_held_unit_does_what_a_loop_by_hand_does(kind, part):
    settings = {"num_layers": 1, "num_heads": 2} if kind == "mlstm" else {}
    model = network(kind, **settings)
    before = {name: tensor.clone() for name, tensor in model.tensors().items()}
    holds = [Hold(part, 2, 0.7), Hold(part, 5, -0.4)]
    found = intervene(model, TOKENS, model.initial_state(1), holds, SETS)
    with torch.no_grad():
        logits, _ = model(torch.from_numpy(TOKENS[None, :-1]), model.initial_state(1))
    rows = [logits[0].softmax(-1).numpy(), *(by_hand(model, part, hold.unit, hold.value) for hold in holds)]
    for row, p in enumerate(rows):
        odds = p @ SETS.T / (1 - p @ SETS.T)
        assert found.log_odds_TRL[:, row] == pytest.approx(np.log(odds), abs=1e-5)
        assert found.distance_TR[:, row] == pytest.approx(np.abs(p - rows[0]).sum(1) / 2, abs=1e-6)
        assert found.nats_TR[:, row] == pytest.approx(-np.log(p[np.arange(len(p)), TOKENS[1:]]), abs=1e-5)
    assert found.distance_TR[1:, 1:].max() > 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.tensors().items())


def test_a_unit_of_a_lower_layer_is_held_for_the_upper_one_too():
    model = network("lstm", num_layers=2)
    found = intervene(model, TOKENS, model.initial_state(1), [Hold("0.h", 1, 0.9)], SETS)
    with torch.no_grad():
        model.layers[1].weight_ih[:, 1] = 0
        model.layers[0].weight_hh[:, 1] = 0
    deaf = intervene(model, TOKENS, model.initial_state(1), [Hold("0.h", 1, 0.9)], SETS)
    assert found.distance_TR[:, 1].min() > 0
    assert deaf.distance_TR.max() == 0


def test_the_parts_that_can_be_held():
    assert held_parts(network("lstm", num_layers=2)) == {"0.h": 8, "0.c": 8, "1.h": 8, "1.c": 8}
    assert held_parts(network("lstm", convolution_size=3)) == {"0.h": 8, "0.c": 8}
    assert held_parts(network("window")) == {"features": 8}
    assert list(held_parts(network("transformer", num_heads=2, num_layers=1))) == ["features"]
    with pytest.raises(UserError, match="has no units"):
        held_parts(network("ngram"))
