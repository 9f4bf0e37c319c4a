"""Streams: the published layouts, every target exactly once, and nothing between a token and the next."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elman.data.streams import Segment, Streams, check_targets, fit_layout, random_borders
from elman.errors import UserError
from elman.models.kinds import build_model, model_config

ONE_TO_24 = np.arange(1, 25)


@pytest.mark.parametrize("trim", [True, False])
def test_the_published_example_of_24_integers_in_4_rows(trim):
    first, second = Streams(ONE_TO_24, batch_size=4, bptt=3, trim=trim)
    assert first.tokens_BT.T.tolist() == [[1, 7, 13, 19], [2, 8, 14, 20], [3, 9, 15, 21]]
    assert first.targets_BT.T.flatten().tolist() == [2, 8, 14, 20, 3, 9, 15, 21, 4, 10, 16, 22]
    assert second.tokens_BT.T[:2].tolist() == [[4, 10, 16, 22], [5, 11, 17, 23]]
    assert second.targets_BT.T[:2].tolist() == [[5, 11, 17, 23], [6, 12, 18, 24]]


def test_without_trim_the_border_between_rows_is_trained_too():
    _, second = Streams(ONE_TO_24, batch_size=4, bptt=3)
    assert second.tokens_BT[:3, 2].tolist() == [6, 12, 18]
    assert second.targets_BT[:3, 2].tolist() == [7, 13, 19]
    assert second.weight_BT[:, 2].tolist() == [1, 1, 1, 0]
    assert second.num_targets == 11


def batchify(data: torch.Tensor, batch_size: int) -> torch.Tensor:
    """The layout of PyTorch's word-level example, time first: (steps, batch)."""
    steps = data.numel() // batch_size
    return data[: steps * batch_size].reshape(batch_size, steps).T


def get_batch(source: torch.Tensor, start: int, bptt: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = min(bptt, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length]


@given(st.integers(2, 12), st.integers(1, 6), st.integers(1, 9), st.integers(0, 5))
def test_trim_is_the_layout_of_pytorchs_example(steps, batch_size, bptt, remainder):
    tokens = np.arange(steps * batch_size + min(remainder, batch_size - 1))
    source = batchify(torch.from_numpy(tokens), batch_size)
    starts = range(0, len(source) - 1, bptt)
    streams = Streams(tokens, batch_size, bptt, trim=True)
    assert streams.num_segments == len(starts)
    for start, segment in zip(starts, streams, strict=True):
        inputs, targets = get_batch(source, start, bptt)
        assert torch.equal(segment.tokens_BT.T, inputs)
        assert torch.equal(segment.targets_BT.T, targets)
        assert segment.weight_BT.all()
        assert segment.num_targets == inputs.numel()


@given(st.integers(2, 200), st.integers(1, 20), st.integers(1, 30))
def test_every_target_is_trained_exactly_once_an_epoch_after_the_token_before_it(num_tokens, batch_size, bptt):
    batch_size = min(batch_size, num_tokens - 1)
    tokens = np.arange(num_tokens)
    streams = Streams(tokens, batch_size, bptt)
    segments = list(streams)
    assert len(segments) == streams.num_segments
    trained = torch.cat([segment.targets_BT[segment.weight_BT == 1] for segment in segments])
    assert trained.sort().values.tolist() == list(range(1, num_tokens))
    assert sum(segment.num_targets for segment in segments) == streams.num_targets == num_tokens - 1
    for segment in segments:
        counted = segment.weight_BT == 1
        assert torch.equal(segment.targets_BT[counted], segment.tokens_BT[counted] + 1)
        assert set(segment.weight_BT.unique().tolist()) <= {0.0, 1.0}
        assert segment.tokens_BT.shape[1] <= bptt
    lengths = torch.cat([segment.weight_BT for segment in segments], 1).sum(1)
    assert lengths.max() - lengths.min() <= 1


@given(st.integers(2, 100), st.integers(1, 9), st.integers(1, 12), st.booleans())
def test_rows_are_contiguous_and_segment_follows_segment(num_tokens, batch_size, bptt, trim):
    batch_size = min(batch_size, num_tokens // 2)
    segments = list(Streams(np.arange(num_tokens), batch_size, bptt, trim=trim))
    rows = torch.cat([segment.tokens_BT for segment in segments], 1)
    counted = torch.cat([segment.weight_BT for segment in segments], 1) == 1
    ends = []
    for row, valid in zip(rows, counted, strict=True):
        read = row[valid]
        assert read.tolist() == list(range(int(read[0]), int(read[0]) + len(read)))
        ends.append((int(read[0]), int(read[-1]) + 1))
    gap = 1 if trim else 0  # under trim the last token of a row begins no other row
    assert all(end + gap == start for (_, end), (start, _) in pairwise(ends))


def test_only_the_first_segment_starts_the_epoch():
    segments = list(Streams(np.arange(30), 2, 4))
    assert [segment.starts_anew for segment in segments] == [True] + [False] * (len(segments) - 1)


def test_tokens_of_a_small_type_become_int64():
    segment = Streams(np.arange(200, 256).astype(np.uint8), 2, 5).segment(0)
    assert segment.tokens_BT.dtype == segment.targets_BT.dtype == torch.int64
    assert segment.tokens_BT[0].tolist() == [200, 201, 202, 203, 204]


def test_a_text_without_a_target_for_every_stream_is_an_error():
    with pytest.raises(UserError, match="1 tokens give no target for 1 streams; give a longer text or a smaller"):
        Streams(np.array([0]), 1, 5)
    with pytest.raises(UserError, match="5 tokens give no target for 3 streams"):
        Streams(np.arange(5), 3, 5, trim=True)


def test_documents_reset_the_state_where_their_boundary_is_read():
    tokens = np.array([9, 1, 2, 9, 3, 4, 5, 9, 6])
    (segment,) = Streams(tokens, 2, 8, reset_token=9)
    assert segment.tokens_BT.tolist() == [[9, 1, 2, 9], [3, 4, 5, 9]]
    assert segment.reset_BT.tolist() == [[True, False, False, True], [False, False, False, True]]
    assert next(iter(Streams(tokens, 2, 8))).reset_BT is None


# The layout of a text that is too small.


@pytest.mark.parametrize(
    ("num_targets", "batch_size", "bptt", "fitted"),
    [
        (100_000, 32, 64, (32, 64)),
        (32 * 64, 32, 64, (32, 64)),
        (32 * 64 - 1, 32, 64, (31, 64)),
        (13, 32, 64, (1, 13)),
        (1, 32, 64, (1, 1)),
        (13, 4, 3, (4, 3)),
        (13, 5, 3, (4, 3)),
    ],
)
def test_a_small_text_shrinks_the_layout(num_targets, batch_size, bptt, fitted):
    assert fit_layout(num_targets, batch_size, bptt) == fitted


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 128))
def test_a_fitted_layout_always_has_a_whole_segment_to_train(num_targets, batch_size, bptt):
    rows, length = fit_layout(num_targets, batch_size, bptt)
    assert 1 <= rows <= batch_size
    assert 1 <= length <= bptt
    streams = Streams(np.arange(num_targets + 1), rows, length)
    assert streams.segment(0).weight_BT.all()
    assert streams.segment(0).tokens_BT.shape == (rows, length)


# The shift.

RANDOM = np.random.default_rng(1).integers(5, size=400)


def shifted(segment: Segment, by: int) -> Segment:
    tokens = torch.from_numpy(RANDOM[: 8 * 45].reshape(8, 45)).long()
    return Segment(
        tokens[:, :40], tokens[:, by : 40 + by], segment.weight_BT, None, segment.num_targets, segment.starts_anew
    )


def test_a_shift_by_anything_but_one_is_caught():
    segment = Streams(RANDOM[:321], 8, 40).segment(0)
    check_targets(segment)
    check_targets(shifted(segment, 1))
    for by in (0, 2, 3):
        with pytest.raises(ValueError, match="targets must be the inputs shifted by one"):
            check_targets(shifted(segment, by))


def test_a_shift_by_zero_trains_a_copy_machine():
    # Random tokens cannot be predicted below ln V. What seems to do so has seen its targets.
    segment = Streams(RANDOM[:321], 8, 40).segment(0)
    losses = {}
    for by in (0, 1):
        network = build_model(
            model_config({"kind": "elman", "embedding_size": 8, "hidden_size": 8}), 5, seed=1, dtype=torch.float32
        )
        optimizer = torch.optim.Adam(network.parameters(), 0.03)
        for _ in range(40):
            features, _ = network.features(shifted(segment, by).tokens_BT, network.initial_state(8))
            loss = network.head.nll(features, shifted(segment, by).targets_BT).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[by] = loss.item()
    assert losses[0] < 0.1
    assert losses[1] > 0.8 * math.log(5)


def test_padding_is_no_wrong_target():
    for segment in Streams(np.arange(1, 25), 4, 3):
        check_targets(segment)


# Segments of random lengths.


@given(st.integers(2, 400), st.integers(1, 6), st.integers(1, 40), st.integers(0, 5), st.booleans())
def test_random_segments_hold_every_target_once_and_are_as_many(num_tokens, batch_size, bptt, seed, trim):
    tokens = np.arange(max(num_tokens, 2 * batch_size))
    plain = Streams(tokens, batch_size, bptt, trim=trim)
    streams = Streams(tokens, batch_size, bptt, trim=trim, random_seed=seed)
    assert streams.num_segments == plain.num_segments
    for epoch in range(2):
        segments = [streams.segment(epoch * streams.num_segments + i) for i in range(streams.num_segments)]
        assert [segment.starts_anew for segment in segments] == [i == 0 for i in range(len(segments))]
        for name in ("tokens_BT", "targets_BT", "weight_BT"):
            whole = torch.cat([getattr(segment, name) for segment in segments], dim=1)
            assert torch.equal(whole, torch.cat([getattr(segment, name) for segment in plain], dim=1)), name
        assert all(segment.tokens_BT.shape[1] > 0 for segment in segments)


def test_random_lengths_lie_around_bptt_some_around_half_of_it_and_differ_between_epochs():
    streams = Streams(np.zeros(700_001, np.int64), 10, 70, random_seed=3)
    lengths = np.array([streams.segment(index).tokens_BT.shape[1] for index in range(streams.num_segments)])
    assert lengths.mean() == pytest.approx(70, abs=0.1)
    near = np.abs(lengths - 70 / 0.975) < 20  # stretched, because a twentieth are half as long
    half = np.abs(lengths - 35 / 0.975) < 16
    assert (near | half).all()
    assert abs(half.mean() - 0.05) < 4 * (0.05 * 0.95 / 1000) ** 0.5
    assert lengths[near].std() == pytest.approx(5 / 0.975, rel=0.15)
    first, second = (random_borders(3, epoch, 100, 7000, 70) for epoch in (0, 1))
    assert (first != second).any()
    assert np.array_equal(first, random_borders(3, 0, 100, 7000, 70))
