"""Noise in a stack: where each kind of dropout falls, weight dropout and zoneout inside a cell, off without noise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from elman.models.kinds import build_model, model_config
from elman.models.laws import check_config
from elman.models.noise import Noise

V, E, H, B, T = 50, 6, 8, 4, 12
TOKENS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
KEY = Noise(seed=3, update=5, num_rows=B)
NOISY = {
    "locked": {"locked_dropout": True, "dropout": 0.5},
    "embedding": {"embedding_dropout": 0.5},
    "output": {"output_dropout": 0.5},
    "words": {"word_dropout": 0.5},
    "weights": {"weight_dropout": 0.5},
    "zoneout": {"zoneout": 0.5},
}


def build(kind: str = "lstm", **settings):
    given = {"kind": kind, "embedding_size": E, "hidden_size": H, "num_layers": 2, **settings}
    network = build_model(model_config(given), V, seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


def read(network, noise=None, tokens=TOKENS, state=None, reset=None):
    with torch.no_grad():
        return network.features(tokens, network.initial_state(len(tokens)) if state is None else state, reset, noise)


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("kind", ["elman", "lstm", "gru"])
def test_every_kind_of_noise_is_off_without_noise_and_the_keys_with_it(kind, name):
    network = build(kind, **NOISY[name])
    first, again, noisy, repeated = (read(network, noise)[0] for noise in (None, None, KEY, KEY))
    assert torch.equal(first, again)
    assert torch.equal(noisy, repeated)
    assert not torch.allclose(first, noisy)
    assert not torch.equal(noisy, read(network, Noise(3, 6, B))[0])
    rows = [
        network.features(TOKENS[one : one + 2], network.initial_state(2), None, Noise(3, 5, B, first_row=one))[0]
        for one in (0, 2)
    ]
    torch.testing.assert_close(torch.cat(rows), noisy, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in NOISY if name != "zoneout"])
def test_dropout_leaves_evaluation_as_it_is_without_it(name):
    plain, noisy = build(), build(**NOISY[name])
    noisy.load_state_dict(plain.state_dict())
    assert torch.equal(read(plain)[0], read(noisy)[0])


def test_shares_of_their_own_hold_at_the_embedding_and_at_the_output_and_dropout_between():
    network = build(dropout=0.25, embedding_dropout=0.0, output_dropout=0.75)
    noisy, _ = read(network, KEY)
    assert 0.6 < (noisy == 0).double().mean() < 0.9
    assert torch.equal(noisy != 0, KEY.dropout(torch.ones(B, T, H), 0.75, "layer 1") != 0)
    between = build(num_layers=1, dropout=0.5, embedding_dropout=0.0, output_dropout=0.0)
    assert torch.equal(read(between, KEY)[0], read(between)[0])


def test_a_locked_mask_zeroes_a_unit_at_all_times():
    noisy, _ = read(build(locked_dropout=True, dropout=0.5), KEY)
    dropped = noisy == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert 0.2 < dropped.double().mean() < 0.8


def test_dropped_words_have_no_embedding():
    network = build(word_dropout=0.5)
    silent = build(word_dropout=0.5)
    silent.load_state_dict(network.state_dict())
    kept = KEY.common((V,), "words", torch.device("cpu")) >= 0.5
    with torch.no_grad():
        silent.embedding.mul_(kept.double().unsqueeze(1) * 2)
    torch.testing.assert_close(read(network, KEY)[0], read(silent)[0], rtol=0, atol=1e-14)


def test_weight_dropout_is_one_mask_on_the_recurrent_matrix_of_each_layer():
    network, masked = build(weight_dropout=0.3), build()
    masked.load_state_dict(network.state_dict())
    with torch.no_grad():
        for index, layer in enumerate(masked.layers):
            layer.weight_hh.copy_(KEY.drop_weights(layer.weight_hh, 0.3, f"layer {index} weight_hh"))
    torch.testing.assert_close(read(network, KEY)[0], read(masked)[0], rtol=0, atol=1e-14)


def test_the_gradient_of_dropped_weights_is_zero_and_that_of_the_others_scaled():
    network = build(weight_dropout=0.3, num_layers=1)
    features, _ = network.features(TOKENS, network.initial_state(B), noise=KEY)
    features.sum().backward()
    mask = KEY.drop_weights(torch.ones(4 * H, H), 0.3, "layer 0 weight_hh")
    gradient = network.layers[0].weight_hh.grad
    assert torch.equal(gradient == 0, mask == 0)


# Zoneout.


def zoneout_in_numpy(network, z):
    """Krueger et al., equations (1) and (2), for a tanh network of one layer; z gives what is held at each time."""
    p = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
    x = p["embedding"][TOKENS.numpy()]
    h = np.zeros((B, H))
    outputs = []
    for time in range(T):
        new = np.tanh(x[:, time] @ p["layers.0.weight_ih"].T + h @ p["layers.0.weight_hh"].T + p["layers.0.bias"])
        h = z(time) * h + (1 - z(time)) * new
        outputs.append(h)
    return np.stack(outputs, 1)


def test_zoneout_is_the_papers_equation_in_numpy_with_masks_and_with_their_mean():
    network = build("elman", num_layers=1, zoneout=0.3)
    held = KEY.chosen((B, T, H), 0.3, "layer 0 zoneout h", torch.device("cpu")).double().numpy()
    assert 0.2 < held.mean() < 0.4
    np.testing.assert_allclose(
        read(network, KEY)[0], zoneout_in_numpy(network, lambda time: held[:, time]), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(read(network)[0], zoneout_in_numpy(network, lambda time: 0.3), rtol=0, atol=1e-12)


def test_each_part_of_the_state_is_held_by_a_mask_of_its_own():
    network = build(num_layers=1, zoneout=0.5)
    state = network.initial_state(B).map(lambda tensor: tensor + 7.0)
    _, after = read(network, KEY, TOKENS[:, :1], state)
    for part in ("h", "c"):
        held = KEY.chosen((B, 1, H), 0.5, f"layer 0 zoneout {part}", torch.device("cpu"))[:, 0]
        assert torch.equal(after.tensors[f"0.{part}"] == 7.0, held)


def test_noise_inside_a_cell_does_not_depend_on_where_rows_are_reset():
    network = build(zoneout=0.5, weight_dropout=0.2, dropout=0.3)
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[0, 4] = reset[2, 9] = True
    whole, _ = read(network, KEY, reset=reset)
    untouched, _ = read(network, KEY)
    assert torch.equal(whole[[1, 3]], untouched[[1, 3]])
    assert torch.equal(whole[0, :4], untouched[0, :4])
    assert not torch.equal(whole[0, 4:], untouched[0, 4:])
    starts = [0, 4, 9, T]
    state, pieces = network.initial_state(B), []
    for start, end in pairwise(starts):  # without noise the same comes in pieces
        state = state.reset(reset[:, start], network.initial_state(B))
        piece, state = read(network, None, TOKENS[:, start:end], state)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), read(network, None, reset=reset)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["elman", "lstm", "gru"])
def test_a_model_with_every_kind_of_noise_keeps_the_laws(kind):
    config = model_config({
        "kind": kind, "embedding_size": 6, "hidden_size": 8, "num_layers": 2, "dropout": 0.3, "locked_dropout": True,
        "embedding_dropout": 0.2, "output_dropout": 0.4, "word_dropout": 0.2, "weight_dropout": 0.3, "zoneout": 0.2,
    })  # fmt: skip
    assert [str(finding) for finding in check_config(config)] == []


def test_noise_inside_a_cell_is_refused_where_there_is_no_recurrent_matrix_to_drop_from():
    with pytest.raises(ValidationError, match="zoneout"):
        build("mingru", zoneout=0.5)
    mixed = model_config({"layers": ["mingru", "lstm"], "embedding_size": H, "hidden_size": H, "zoneout": 0.5})
    network = build_model(mixed, V, seed=1, dtype=torch.float64)
    assert not torch.equal(read(network, KEY)[0], read(network)[0])
