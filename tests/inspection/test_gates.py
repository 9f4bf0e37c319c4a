"""Where gates stand over a text, what forget gates keep by it, and what the tanh over a memory lets through."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elman.inspection.gates import Memory, intermediates, memory, saturation
from elman.inspection.watching import in_float64, watch
from elman.models.contract import LanguageModel
from elman.models.kinds import build_model, model_config

TOKENS = np.concatenate([[0], np.random.default_rng(1).integers(1, 5, 400)])


def network_of(kind: str) -> LanguageModel:
    config = model_config({"kind": kind, "hidden_size": 6, "embedding_size": 6})
    return build_model(config, 5, seed=1, dtype=torch.float64)


def test_what_forget_gates_keep_is_their_product():
    gates = torch.tensor([0.97, 0.95, 0.999]).expand(50, 3)
    read = torch.full((50, 3), 0.9)
    read[:10, 0], read[:, 1] = -0.99, 1.0
    assert 0.97**100 > 0.01 > 0.95**100
    found = memory({"1.forget_gate": gates, "tanh(1.c)": read, "2.forget_gate": gates}, 100)
    assert found == Memory(3, 100, 2, pytest.approx((10 / 50 + 0) / 2))
    assert memory({"1.forget_gate": gates}, 100) is None


def test_a_memory_is_looked_at_as_it_is_read():
    network = in_float64(network_of("lstm"))
    (piece,) = watch(network, TOKENS[:101], ["0.c"])
    seen = intermediates(network, TOKENS[:101])
    np.testing.assert_allclose(seen["tanh(0.c)"].numpy(), np.tanh(piece.values["0.c"].numpy()), rtol=1e-14)
    assert "0.c" not in seen
    assert "tanh(0.h)" not in intermediates(in_float64(network_of("gru")), TOKENS[:101])


def test_gates_are_counted_where_they_stand():
    network = in_float64(network_of("lstm"))
    bias = network.get_parameter("layers.0.bias").data
    network.get_parameter("layers.0.weight_ih").data.zero_()
    network.get_parameter("layers.0.weight_hh").data.zero_()
    bias[:6], bias[6:9], bias[9:12], bias[18:] = -5.0, 5.0, 0.0, 0.0  # input shut, half of the forget gates open
    found = {gate.name: gate for gate in saturation(intermediates(network, TOKENS))}
    assert "0.input_gate" not in found  # one value throughout: nothing is known of its range
    network.get_parameter("layers.0.weight_ih").data.normal_(0, 0.01, generator=torch.Generator().manual_seed(0))
    found = {gate.name: gate for gate in saturation(intermediates(network, TOKENS))}
    assert (found["0.input_gate"].low, found["0.input_gate"].high) == (1.0, 0.0)
    assert (found["0.forget_gate"].low, found["0.forget_gate"].high) == (0.0, 0.5)
    assert (found["0.forget_gate"].stuck, found["0.forget_gate"].units) == (3, 6)
    assert found["0.candidate"].range == "-1 to 1"
