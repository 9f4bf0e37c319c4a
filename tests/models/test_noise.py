"""Dropout's masks: the right share, the right scale, and nothing but their key decides them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elman.models.kinds import build_model, model_config
from elman.models.noise import Noise, derived_seed

ONES = torch.ones(4, 50, 100)
KEY = Noise(seed=3, update=5, num_rows=4)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_is_dropped_and_the_rest_scaled(share):
    dropped = KEY.dropout(ONES, share, "embedding")
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / (1 - share)])
    deviation = (share * (1 - share) / ONES.numel()) ** 0.5
    assert abs((dropped == 0).double().mean().item() - share) < 4 * deviation


def test_a_share_of_zero_does_nothing():
    assert KEY.dropout(ONES, 0.0, "embedding") is ONES


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (Noise(seed=4, update=5, num_rows=4), "embedding"),
        (Noise(seed=3, update=6, num_rows=4), "embedding"),
        (KEY, "layer 0"),
    ],
)
def test_another_key_gives_other_masks(key, place):
    mine = KEY.dropout(ONES, 0.5, "embedding")
    assert torch.equal(mine, KEY.dropout(ONES, 0.5, "embedding"))
    assert 0.4 < (mine == key.dropout(ONES, 0.5, place)).double().mean() < 0.6


def test_rows_have_the_masks_of_their_number_in_the_global_batch():
    whole = KEY.dropout(ONES, 0.5, "x")
    parts = [Noise(3, 5, 4, first_row=first).dropout(ONES[first : first + 2], 0.5, "x") for first in (0, 2)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole[0], whole[1])


def test_uniform_numbers_fill_the_unit_interval_and_belong_to_their_row():
    drawn = KEY.uniform((4, 5000), "x", torch.device("cpu"))
    assert 0 <= drawn.min() < 0.001
    assert 0.999 < drawn.max() < 1
    assert abs(drawn.mean().item() - 0.5) < 4 / (12 * drawn.numel()) ** 0.5
    assert torch.equal(Noise(3, 5, 4, first_row=2).uniform((2, 5000), "x", torch.device("cpu")), drawn[2:])


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_sixteen_bits_decide_each_place_whatever_the_number_of_places(width):
    key = Noise(3, 5, 3)
    chosen = key.chosen((3, 7, width), 0.3, "x", torch.device("cpu"))
    generator = torch.Generator().manual_seed(derived_seed(3, 5, "x"))
    words = torch.zeros(-(-21 * width // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    quarters = np.frombuffer(words.numpy().tobytes(), dtype="<i2")[: 21 * width].reshape(3, 7, width)
    assert np.array_equal(chosen.numpy(), (quarters.astype(np.int64) + 2**15) / 2**16 < 0.3 - 0.3 % 2**-16)
    assert torch.equal(Noise(3, 5, 3, first_row=1).chosen((2, 7, width), 0.3, "x", torch.device("cpu")), chosen[1:])


def test_the_smallest_and_the_largest_share_lie_within_sixteen_bits():
    places = (4, 1000, 1000)
    assert not KEY.chosen(places, 1e-6, "x", torch.device("cpu")).any()
    kept = ~KEY.chosen(places, 1 - 1e-9, "x", torch.device("cpu"))
    assert abs(kept.double().mean().item() * 2**16 - 1) < 4 * (2**16 / 4e6) ** 0.5


def test_the_dtype_stays_and_the_mask_does_not_depend_on_it():
    double = KEY.dropout(ONES.double(), 0.5, "x")
    assert double.dtype == torch.float64
    assert torch.equal(double.float(), KEY.dropout(ONES, 0.5, "x"))


def test_a_derived_seed_is_the_same_in_every_process():
    assert derived_seed(1111, "initial weights") == 2370784381751425995
    assert derived_seed(1, "a") != derived_seed(1, "b") != derived_seed(2, "b")
    assert all(0 <= derived_seed(i) < 2**63 for i in range(100))


def test_a_model_drops_in_training_only_and_never_on_the_recurrent_path():
    config = model_config({"kind": "lstm", "embedding_size": 8, "hidden_size": 8, "num_layers": 2, "dropout": 0.5})
    network = build_model(config, 5, seed=1, dtype=torch.float64)
    tokens = torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(1))
    initial = network.initial_state(4)
    with torch.no_grad():
        first, after = network.features(tokens, initial)
        again, _ = network.features(tokens, initial)
        noisy, noisy_after = network.features(tokens, initial, noise=KEY)
    assert torch.equal(first, again)
    assert 0.3 < (noisy == 0).double().mean() < 0.7  # the last layer's output is dropped
    assert all((tensor != 0).all() for tensor in noisy_after.tensors.values())  # what is carried is not
    assert not torch.equal(noisy_after.tensors["0.h"], after.tensors["0.h"])  # the embedding is


# Masks that stay the same in time, words, weights.


def test_a_locked_mask_is_one_for_all_times_of_a_row():
    dropped = KEY.dropout(ONES, 0.5, "x", locked=True)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert dropped.unique().tolist() == [0.0, 2.0]
    deviation = (0.25 / 400) ** 0.5
    assert abs((dropped[:, 0] == 0).double().mean().item() - 0.5) < 4 * deviation
    assert not torch.equal(dropped[0], dropped[1])
    part = Noise(3, 5, 4, first_row=2).dropout(ONES[2:], 0.5, "x", locked=True)
    assert torch.equal(part, dropped[2:])


def test_a_dropped_word_is_dropped_wherever_it_stands():
    tokens = torch.randint(300, (4, 200), generator=torch.Generator().manual_seed(1))
    dropped = KEY.drop_words(torch.ones(4, 200, 3), tokens, 300, 0.25)
    of_word = {}
    for token, value in zip(tokens.flatten().tolist(), dropped[..., 0].flatten().tolist(), strict=True):
        assert of_word.setdefault(token, value) == value
    shares = torch.tensor([value == 0 for value in of_word.values()]).double()
    assert abs(shares.mean().item() - 0.25) < 4 * (0.25 * 0.75 / len(of_word)) ** 0.5
    assert {round(value, 6) for value in of_word.values()} == {0.0, round(1 / 0.75, 6)}
    rows = Noise(3, 5, 4, first_row=2).drop_words(torch.ones(2, 200, 3), tokens[2:], 300, 0.25)
    assert torch.equal(rows, dropped[2:])
    embeddings = torch.ones(4, 200, 3)
    assert KEY.drop_words(embeddings, tokens, 300, 0.0) is embeddings


def test_dropped_weights_are_the_same_for_every_row_and_anew_for_every_update():
    matrix = torch.ones(80, 50)
    dropped = KEY.drop_weights(matrix, 0.3, "layer 0 weight_hh")
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert abs((dropped == 0).double().mean().item() - 0.3) < 4 * (0.21 / 4000) ** 0.5
    assert torch.equal(Noise(3, 5, 4, first_row=2).drop_weights(matrix, 0.3, "layer 0 weight_hh"), dropped)
    other = Noise(3, 6, 4).drop_weights(matrix, 0.3, "layer 0 weight_hh")
    assert not torch.equal(other, dropped)
    assert KEY.drop_weights(matrix, 0.0, "x") is matrix
