"""A state is a value: every operation gives a new one, acts on every part, and is undone by its inverse."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from elman.errors import ModelFileError
from elman.models.state import State, grows


@pytest.fixture
def state() -> State:
    """Parts of different shapes and dtypes, as different families have them."""
    generator = torch.Generator().manual_seed(1)
    return State({
        "0.h": torch.randn(3, 4, generator=generator),
        "0.c": torch.randn(3, 2, 5, generator=generator),
        "1.tokens": torch.randint(9, (3, 6), generator=generator),
        "1.count": torch.tensor([1.0, 2.0, 3.0]),
    })  # fmt: skip


def equal(one: State, other: State) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name])
        for name, tensor in one.tensors.items()
    )


def test_size(state):
    assert state.num_bytes == 3 * (4 * 4 + 10 * 4 + 6 * 8 + 4)


@pytest.mark.parametrize(
    "rows", [[2, 0], [1, 1, 1, 0], torch.tensor([0]), range(3), torch.tensor([True, False, True]), []]
)
def test_selected_rows_are_those_rows_of_every_part(state, rows):
    index = torch.as_tensor(rows) if len(rows) else torch.tensor([], dtype=torch.int64)
    selected = state.select(rows)
    for name, tensor in state.tensors.items():
        assert torch.equal(selected.tensors[name], tensor[index])


def test_stack_undoes_select(state):
    assert equal(State.stack([state.select([0, 1]), state.select([2])]), state)


def test_reset_replaces_the_chosen_rows_of_every_part_and_no_other(state):
    initial = state.map(lambda tensor: torch.full_like(tensor, 7))
    before = state.map(torch.clone)
    after = state.reset(torch.tensor([False, True, False]), initial)
    assert equal(after.select([0, 2]), state.select([0, 2]))
    assert equal(after.select([1]), initial.select([1]))
    assert equal(state, before)


def test_detach_cuts_every_part_and_keeps_the_values(state):
    weight = torch.ones((), requires_grad=True)
    grown = state.map(lambda tensor: tensor * weight)
    cut = grown.detach()
    assert all(tensor.requires_grad for tensor in grown.tensors.values())
    assert not any(tensor.requires_grad for tensor in cut.tensors.values())
    assert all(torch.equal(tensor, grown.tensors[name]) for name, tensor in cut.tensors.items())


def test_bytes_hold_everything(state):
    restored = State.from_bytes(state.to_bytes(), like=state.select([0]))
    assert equal(restored, state)
    assert state.to_bytes() == restored.to_bytes()


def test_a_state_may_be_empty():
    empty = State({})
    assert equal(State.from_bytes(empty.to_bytes(), like=empty), empty)
    assert equal(State.stack([empty.select([0, 1]), empty.reset(torch.tensor([True]), empty)]), empty)
    assert empty.num_bytes == 0
    with pytest.raises(ModelFileError, match=r"has the parts \[\]; the model carries \['c', 'h'\]"):
        State.from_bytes(empty.to_bytes(), like=LIKE)


def test_two_parts_may_be_one_tensor():
    same = torch.arange(6.0).view(2, 3)
    state = State({"h": same, "m": same, "first": same[:, :1]})
    assert equal(State.from_bytes(state.to_bytes(), like=state), state)


def test_a_restored_state_has_memory_of_its_own(state):
    data = bytearray(state.to_bytes())
    restored = State.from_bytes(bytes(data), like=state)
    assert all(tensor.data_ptr() % 64 == 0 or tensor.numel() < 16 for tensor in restored.tensors.values())
    assert all(tensor.storage_offset() == 0 for tensor in restored.tensors.values())


def of(**changes: torch.Tensor | None) -> bytes:
    parts = {"h": torch.zeros(2, 3), "c": torch.zeros(2, 3)} | changes
    return save({name: tensor for name, tensor in parts.items() if tensor is not None})


LIKE = State({"h": torch.zeros(1, 3), "c": torch.zeros(1, 3)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a state that Elman saved"),
        (b"\x80\x04pickle", "not a state that Elman saved"),
        (of()[:-1], "not a state that Elman saved"),
        (b"\xff" * 8 + of()[8:], "not a state that Elman saved"),
        (of(c=None), r"has the parts \['h'\]; the model carries \['c', 'h'\]"),
        (of(d=torch.zeros(2, 3)), r"has the parts \['c', 'd', 'h'\]"),
        (of(h=torch.zeros(3, 3)), "differ in their number of rows"),
        (of(h=torch.zeros(0, 3), c=torch.zeros(0, 3)), "differ in their number of rows, or have none"),
        (of(h=torch.zeros(2, 4)), r"part 'h' of this state is torch.float32 \[4\]; the model carries torch.float32"),
        (of(h=torch.zeros(2, 3, dtype=torch.float64)), "part 'h' of this state is torch.float64"),
        (of(h=torch.full((2, 3), float("nan"))), "part 'h' of this state holds a number that is not finite"),
        (of(c=torch.full((2, 3), float("inf"))), "part 'c' of this state holds a number that is not finite"),
        (of(h=torch.tensor(1.0)), "differ in their number of rows"),
    ],
)
def test_bytes_that_are_no_state_of_the_model_are_refused(data, message):
    with pytest.raises(ModelFileError, match=message) as error:
        State.from_bytes(data, like=LIKE)
    assert "\n" not in str(error.value)


# Parts that grow with the text: empty along their second dimension at first.

GROWING_LIKE = State({"keys": torch.zeros(1, 0, 2), "h": torch.zeros(1, 3)})


def grown(num_rows: int, length: int, start: float = 1.0) -> State:
    """A state that has read ``length`` tokens, counted on from ``start``."""
    keys = torch.arange(num_rows * length * 2.0).view(num_rows, length, 2) + start
    return State({"keys": keys, "h": torch.full((num_rows, 3), start)})


def test_a_part_grows_whose_initial_value_is_empty():
    assert {name: grows(tensor) for name, tensor in GROWING_LIKE.tensors.items()} == {"keys": True, "h": False}
    assert not grows(torch.zeros(4))
    assert GROWING_LIKE.num_bytes == 12


def test_stacked_rows_of_unequal_length_are_filled_up_with_zeros_at_the_front():
    stacked = State.stack([grown(1, 3), GROWING_LIKE, grown(2, 1, 50.0)])
    keys = stacked.tensors["keys"]
    assert keys.shape == (4, 3, 2)
    assert torch.equal(keys[:1], grown(1, 3).tensors["keys"])
    assert not keys[1].any()
    assert not keys[2:, :2].any()
    assert torch.equal(keys[2:, 2:], grown(2, 1, 50.0).tensors["keys"])
    assert stacked.tensors["h"][:, 0].tolist() == [1.0, 0.0, 50.0, 50.0]


def test_a_reset_row_is_empty_and_stays_as_long_as_its_batch():
    state = grown(3, 4)
    after = state.reset(torch.tensor([False, True, False]), GROWING_LIKE.select([0, 0, 0]))
    assert after.tensors["keys"].shape == (3, 4, 2)
    assert not after.tensors["keys"][1].any()
    assert equal(after.select([0, 2]), state.select([0, 2]))
    assert equal(state, grown(3, 4))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_bytes_hold_a_part_of_any_length(length):
    state = grown(2, length)
    assert equal(State.from_bytes(state.to_bytes(), like=GROWING_LIKE), state)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (torch.zeros(2, 4, 3), r"part 'keys' of this state is torch.float32 \[4, 3\]; the model carries torch.float32"),
        (torch.zeros(2, 4), r"part 'keys' of this state is torch.float32 \[4\]"),
        (torch.zeros(2), r"part 'keys' of this state is torch.float32 \[\]"),
        (torch.zeros(2, 4, 2, dtype=torch.float64), "part 'keys' of this state is torch.float64"),
        (torch.full((2, 4, 2), float("nan")), "part 'keys' of this state holds a number that is not finite"),
        (torch.zeros(3, 4, 2), "differ in their number of rows"),
    ],
)
def test_a_growing_part_of_another_form_is_refused(keys, message):
    data = save({"keys": keys, "h": torch.zeros(2, 3)})
    with pytest.raises(ModelFileError, match=message):
        State.from_bytes(data, like=GROWING_LIKE)


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (torch.ones(2, 3), "differ in length within a layer"),
        (torch.ones(2), r"'0.seen' of this state is torch.float32 \[\]"),
    ],
)
def test_growing_parts_of_one_layer_have_one_length(seen, message):
    like = State({"0.keys": torch.zeros(1, 0, 2), "0.seen": torch.zeros(1, 0), "1.keys": torch.zeros(1, 0, 2)})
    good = {"0.keys": torch.zeros(2, 4, 2), "0.seen": torch.ones(2, 4), "1.keys": torch.zeros(2, 5, 2)}
    assert State.from_bytes(save(good), like=like).tensors.keys() == like.tensors.keys()
    with pytest.raises(ModelFileError, match=message):
        State.from_bytes(save({**good, "0.seen": seen}), like=like)
