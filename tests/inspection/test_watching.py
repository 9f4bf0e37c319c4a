"""Watching sees what reading computes, for every kind, and leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elman.errors import TextError, UserError
from elman.inspection.watching import in_float64, places, watch, watchable
from elman.models.contract import CountedModel, LanguageModel
from elman.models.kinds import build_model, kind_names
from elman.models.laws import small_configs
from elman.models.state import State, grows

VOCAB_SIZE = 7
TOKENS = np.concatenate([[0], np.random.default_rng(1).integers(1, VOCAB_SIZE, 12)])


def network_of(kind: str, dtype: torch.dtype = torch.float64) -> LanguageModel:
    network = build_model(small_configs(kind)[0], VOCAB_SIZE, seed=1, dtype=dtype)
    if isinstance(network, CountedModel):
        network.count(TOKENS)
    return network


@pytest.mark.parametrize("kind", kind_names())
def test_every_kind_shows_what_it_computes(kind):
    network = network_of(kind)
    names = list(watchable(network))
    assert {"features"} & set(names) or isinstance(network, CountedModel)
    pieces = list(watch(network, TOKENS, names, tokens_at_once=5))
    assert [piece.start for piece in pieces] == [0, 5, 10]
    seen = {name: torch.cat([piece.values[name] for piece in pieces]) for name in names}
    nats = torch.cat([piece.nats_T for piece in pieces])
    tokens_BT = torch.from_numpy(TOKENS)[None]
    with torch.no_grad():
        features_BTF, _ = network.features(tokens_BT[:, :-1], network.initial_state(1))
        expected = network.head.nll(features_BTF, tokens_BT[:, 1:])[0]
        torch.testing.assert_close(nats, expected, rtol=1e-9, atol=1e-9)
        for count in (1, 4, 12):
            _, state = network.features(tokens_BT[:, :count], network.initial_state(1))
            for name in state.tensors.keys() & seen.keys():
                torch.testing.assert_close(seen[name][count - 1], state.tensors[name].flatten(), rtol=1e-8, atol=1e-9)
    assert torch.equal(torch.cat([piece.targets_T for piece in pieces]), tokens_BT[0, 1:])
    initial = network.initial_state(1).tensors
    assert {name for name, part in initial.items() if part.is_floating_point() and not grows(part)} <= set(names)


def test_gates_and_outputs_are_seen_by_the_number_of_their_layer():
    network = build_model(
        small_configs("lstm")[0].model_copy(update={"num_layers": 2, "hidden_size": 3}), 5, seed=1, dtype=torch.float64
    )
    names = watchable(network)
    assert {name: size for name, size in names.items() if name.endswith("forget_gate")} == {
        "0.forget_gate": 3,
        "1.forget_gate": 3,
    }
    (piece,) = watch(network, TOKENS[:6] % 5, ["1.output", "1.h", "1.c", "1.output_gate", "features"])
    v = piece.values
    torch.testing.assert_close(v["1.output"], v["1.output_gate"] * v["1.c"].tanh())
    assert torch.equal(v["1.output"], v["1.h"])
    assert torch.equal(v["1.output"], v["features"])


def test_a_change_of_the_state_acts_from_the_next_token_on():
    network = network_of("elman")

    def cleared(state: State) -> State:
        return state.map(torch.zeros_like)

    (piece,) = watch(network, TOKENS, ["0.h"], change=cleared)
    fresh = [next(watch(network, TOKENS[i : i + 2], ["0.h"])).values["0.h"][0] for i in range(len(TOKENS) - 1)]
    torch.testing.assert_close(piece.values["0.h"], torch.stack(fresh))


def test_watching_leaves_no_trace():
    network = network_of("gru", torch.float32)
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    tokens = TOKENS.copy()
    state = network.initial_state(1)
    kept = state.map(torch.clone)
    list(watch(network, tokens, ["0.h"], state=state))
    double = in_float64(network)
    assert double.dtype == torch.float64
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in network.named_parameters())
    assert all(torch.equal(p.float(), before[name]) for name, p in double.named_parameters())
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in kept.tensors.items())
    assert np.array_equal(tokens, TOKENS)


def test_places_carry_the_state_of_all_that_stands_before():
    network = network_of("lstm")
    tokens = np.concatenate([[0], np.random.default_rng(2).integers(1, VOCAB_SIZE, 700)])
    chosen = places(network, tokens, 3, 20)
    assert chosen.starts == (0, 340, 680)
    for row, start in enumerate(chosen.starts):
        assert chosen.tokens_BT[row].tolist() == tokens[start : start + 20].tolist()
        assert chosen.targets_B[row] == tokens[start + 20]
        if start:
            with torch.no_grad():
                _, state = network.features(torch.from_numpy(tokens[None, :start]), network.initial_state(1))
            for name, tensor in state.tensors.items():
                torch.testing.assert_close(chosen.state.tensors[name][row], tensor[0])
    assert places(network, tokens[:22], 9, 20).starts == (0, 1)
    assert places(network, tokens[:22], 10**9, 20).starts == (0, 1)
    with pytest.raises(TextError, match="has 20 tokens, 20 in a row and one more"):
        places(network, tokens[:20], 3, 20)


def test_what_is_not_there_is_refused_with_what_is():
    with pytest.raises(UserError, match=r"no '0\.x' to watch.*0\.h"):
        watch(network_of("elman"), TOKENS, ["0.x"])
    with pytest.raises(UserError, match="the text is empty"):
        watch(network_of("elman"), TOKENS[:1], ["0.h"])
