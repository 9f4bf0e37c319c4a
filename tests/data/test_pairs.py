"""Batches of pairs: a hand-made example, every target exactly once an epoch, an order that is the seed's alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman.data.pairs import Pairs
from elman.data.streams import check_targets
from elman.errors import UserError

# Two examples: 5 6 -> 7, and 8 -> 9 8 9; the boundary is 0.
TOKENS = np.array([0, 5, 6, 0, 7, 0, 8, 0, 9, 8, 9], np.uint8)


def stream(examples: list[tuple[list[int], list[int]]], boundary: int) -> np.ndarray:
    tokens = [token for source, target in examples for token in (boundary, *source, boundary, *target)]
    return np.array(tokens, np.uint16)


def test_a_batch_written_out_by_hand():
    (segment,) = Pairs(TOKENS, 2, 0)
    # The shorter source first; 1 pads, for the boundary would begin another source.
    assert segment.tokens_BT.tolist() == [[0, 8, 0, 9, 8, 9], [0, 5, 6, 0, 7, 1]]
    assert segment.targets_BT.tolist() == [[8, 0, 9, 8, 9, 0], [5, 6, 0, 7, 0, 1]]
    assert segment.weight_BT.tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0]]
    assert (segment.num_targets, segment.starts_anew, segment.reset_BT) == (6, True, None)
    assert segment.tokens_BT.dtype == segment.targets_BT.dtype == torch.int64
    check_targets(segment)


def test_a_reversed_source_is_read_backwards_and_the_target_stays():
    forward, backward = (Pairs(TOKENS, 2, 0, reverse_source=reverse).segment(0) for reverse in (False, True))
    assert backward.tokens_BT.tolist() == [[0, 8, 0, 9, 8, 9], [0, 6, 5, 0, 7, 1]]
    assert backward.targets_BT[1].tolist() == [6, 5, 0, 7, 0, 1]
    assert torch.equal(forward.weight_BT, backward.weight_BT)
    assert Pairs(TOKENS, 2, 0, reverse_source=True).source(0).tolist() == [5, 6]


texts = st.lists(st.integers(0, 8), min_size=1, max_size=6)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=20), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_every_example_is_trained_once_an_epoch_whole_and_by_itself(examples, batch_size, reverse, epoch):
    pairs = Pairs(stream(examples, 9), batch_size, 9, reverse, seed=4)
    assert pairs.num_examples == len(examples)
    first = epoch * pairs.num_segments
    segments = [pairs.segment(index) for index in range(first, first + pairs.num_segments)]
    assert sum(segment.num_targets for segment in segments) == pairs.num_targets
    seen = []
    for segment in segments:
        check_targets(segment)
        assert 1 <= len(segment.tokens_BT) <= batch_size
        assert not (segment.tokens_BT[:, 1:] == 9).sum(1).ne(1).any()  # padding is no boundary
        for tokens, targets, weight in zip(segment.tokens_BT, segment.targets_BT, segment.weight_BT, strict=True):
            turn = tokens[1:].tolist().index(9) + 1
            asked = targets[weight == 1].tolist()
            assert tokens[0] == 9
            assert weight[:turn].sum() == 0
            assert asked[-1] == 9
            source = tokens[1:turn].tolist()
            seen.append((source[::-1] if reverse else source, asked[:-1]))
    assert sorted(seen) == sorted(examples)


def test_the_order_is_the_seeds_another_in_every_epoch_and_whatever_was_asked_for_before():
    examples = [([i % 7] * (1 + i % 5), [i % 7]) for i in range(40)]
    tokens = stream(examples, 9)

    def order(pairs: Pairs, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in pairs.batches(epoch)]

    one, other = Pairs(tokens, 4, 9, seed=1), Pairs(tokens, 4, 9, seed=1)
    first, second = order(one, 0), order(one, 1)
    assert first != second
    assert order(other, 1) == second  # epoch 1 alone
    assert order(one, 0) == first
    assert order(Pairs(tokens, 4, 9, seed=2), 0) != first
    index = 3 + one.num_segments
    assert torch.equal(one.segment(index).tokens_BT, other.segment(index).tokens_BT)


def test_sources_of_like_length_share_a_batch():
    examples = [([1] * (1 + i % 5), [2]) for i in range(40)]
    for batch in Pairs(stream(examples, 9), 4, 9, seed=1).batches():
        assert len({len(examples[i][0]) for i in batch}) == 1


def test_the_first_examples_up_to_so_many_targets():
    assert Pairs(TOKENS, 2, 0, max_targets=6).num_targets == 6
    assert Pairs(TOKENS, 2, 0, max_targets=5).num_targets == 2
    assert Pairs(TOKENS, 2, 0, max_targets=1).num_examples == 1  # one at least


def test_what_is_no_corpus_of_pairs_is_refused():
    with pytest.raises(UserError, match="3 documents, an odd number"):
        Pairs(np.array([0, 1, 0, 2, 0, 3]), 2, 0)
    with pytest.raises(UserError, match="no pair of a source and a target"):
        Pairs(np.empty(0, np.int64), 2, 0)
