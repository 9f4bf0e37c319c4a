"""A place in a text: read on, branch, save and load, and files that are not what they should be."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

import elman.reading
from elman.errors import ModelFileError, TextError
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.models.state import State
from elman.reading import Reading, fingerprint
from elman.text.tokenizers import CharTokenizer, WordTokenizer

TOKENIZER = CharTokenizer("abcdef")


def a_bundle(seed=1, kind="lstm", tokenizer=TOKENIZER) -> Bundle:
    config = model_config({"kind": kind, "hidden_size": 9, "embedding_size": 5})
    return Bundle(build_model(config, tokenizer.size, seed=seed, dtype=torch.float32), tokenizer)


@pytest.fixture(params=["lstm", "window"])
def bundle(request):
    return a_bundle(kind=request.param)


def assert_same(one: Reading, other: Reading) -> None:
    assert (one.tokens, one.num_given, one.is_parted) == (other.tokens, other.num_given, other.is_parted)
    assert (one.logits_V == other.logits_V).all()
    for name, tensor in one.state.tensors.items():
        assert torch.equal(tensor, other.state.tensors[name])


def test_a_text_is_read_from_the_boundary_on_in_pieces_of_any_length(bundle, monkeypatch):
    prompt = "abcdef" * 5
    tokens = torch.tensor([[TOKENIZER.boundary_id, *TOKENIZER.encode(prompt)]])
    with torch.no_grad():
        expected = bundle.network(tokens, bundle.network.initial_state(1))
    for length in (1, 7, 31, 1024):
        monkeypatch.setattr(elman.reading, "_PIECE", length)
        reading = Reading.start(bundle).read(prompt)
        assert reading.text == prompt
        np.testing.assert_allclose(reading.logits_V, expected.logits_BTV[0, -1], rtol=0, atol=1e-6)
        for name, tensor in expected.state.tensors.items():
            torch.testing.assert_close(reading.state.tensors[name], tensor, rtol=0, atol=1e-6)


def test_the_start_is_the_boundary_alone(bundle):
    start = Reading.start(bundle)
    with torch.no_grad():
        expected = bundle.network(torch.tensor([[TOKENIZER.boundary_id]]), bundle.network.initial_state(1))
    assert (start.logits_V == expected.logits_BTV[0, 0].numpy()).all()
    assert (start.tokens, start.text) == ((), "")
    assert start.read("") is start


def test_reading_on_leaves_a_place_as_it_is(bundle):
    place = Reading.start(bundle).read("abc")
    kept = Reading.start(bundle).read("abc")
    left, right = place.read("d"), place.take([3, 4])
    assert_same(place, kept)
    assert (left.text, right.text) == ("abcd", "abcbc")
    assert (place.num_given, left.num_given, right.num_given) == (3, 4, 3)


def test_what_was_never_seen_is_refused_or_skipped(bundle):
    start = Reading.start(bundle)
    with pytest.raises(TextError, match="never saw: 'X'"):
        start.read("aX")
    assert_same(start.read("aX", unknown="skip"), start.read("a"))


@pytest.mark.parametrize("text", ["", "abcabc"])
def test_a_saved_place_is_the_same_when_loaded(bundle, tmp_path, text):
    place = Reading.start(bundle).read(text).take([2, 3] if text else [])
    place.save(tmp_path / "place")
    before = (tmp_path / "place").read_bytes()
    assert_same(Reading.load(tmp_path / "place", bundle), place)
    place.save(tmp_path / "place")
    assert (tmp_path / "place").read_bytes() == before


def test_white_space_that_is_no_token_is_kept(tmp_path):
    bundle = a_bundle(tokenizer=WordTokenizer(["the", "cat"]))
    place = Reading.start(bundle).read("the ")
    place.save(tmp_path / "place")
    assert Reading.load(tmp_path / "place", bundle).is_parted
    assert not Reading.start(bundle).read("the ").read("cat").is_parted


@pytest.mark.parametrize("other", [a_bundle(seed=2), a_bundle(kind="gru"), a_bundle(tokenizer=CharTokenizer("abcdeg"))])
def test_a_place_of_another_model_is_refused_in_one_line(tmp_path, other):
    Reading.start(a_bundle()).save(tmp_path / "place")
    with pytest.raises(ModelFileError, match="is a state of another model: give the model that it was saved from"):
        Reading.load(tmp_path / "place", other)


def test_a_fingerprint_follows_from_the_numbers_alone():
    assert fingerprint(a_bundle()) == fingerprint(a_bundle())
    changed = a_bundle()
    changed.network.head.bias.data[3] += 1e-6
    assert fingerprint(changed) != fingerprint(a_bundle())


def rewritten(path, **changes):
    """A state file with some of its arrays or entries replaced."""
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        about = json.loads(file.metadata()["elman_reading"])
    about |= {name: value for name, value in changes.items() if name in about}
    arrays |= {name: value for name, value in changes.items() if name in arrays}
    save_file(arrays, path, metadata={"elman_reading": json.dumps(about)})


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": np.array([99])},
        {"tokens": np.array([-1])},
        {"tokens": np.array([1.5])},
        {"tokens": np.zeros((2, 2), np.int64)},
        {"num_given": 5},
        {"num_given": -1},
        {"num_given": "1"},
        {"is_parted": 1},
        {"format": 2},
        {"logits": np.zeros(3, np.float32)},
        {"logits": np.zeros(8, np.float64)},
        {"state": np.zeros(9, np.uint8)},
    ],
    ids=str,
)
def test_a_damaged_file_is_one_line(tmp_path, changes):
    bundle, path = a_bundle(), tmp_path / "place"
    Reading.start(bundle).read("ab").save(path)
    rewritten(path, **changes)
    with pytest.raises(ModelFileError) as caught:
        Reading.load(path, bundle)
    assert "\n" not in str(caught.value)


def test_a_state_of_two_rows_is_refused(tmp_path):
    bundle, path = a_bundle(), tmp_path / "place"
    Reading.start(bundle).save(path)
    rewritten(path, state=np.frombuffer(bundle.network.initial_state(2).to_bytes(), np.uint8))
    with pytest.raises(ModelFileError, match="do not fit the model"):
        Reading.load(path, bundle)


def test_what_is_no_state_file_is_one_line(tmp_path):
    bundle = a_bundle()
    (tmp_path / "text").write_text("abc")
    save_file({"a": np.zeros(1)}, tmp_path / "tensors")
    Reading.start(bundle).save(tmp_path / "whole")
    (tmp_path / "half").write_bytes((tmp_path / "whole").read_bytes()[:-20])
    for name, message in {
        "missing": "cannot be read",
        "text": "not a state file, or damaged",
        "half": "not a state file, or damaged",
        "tensors": "not a state file of this version",
    }.items():
        with pytest.raises(ModelFileError, match=message):
            Reading.load(tmp_path / name, bundle)
    with pytest.raises(ModelFileError, match="cannot be written"):
        Reading.start(bundle).save(tmp_path / "no folder" / "place")


@pytest.mark.parametrize("token", [-1, TOKENIZER.size, 2**40])
@pytest.mark.parametrize("kind", ["window", "ngram"])
def test_a_state_with_tokens_that_are_none_is_refused(tmp_path, kind, token):
    config = model_config({"kind": kind} | ({"hidden_size": 9, "embedding_size": 5} if kind == "window" else {}))
    bundle = Bundle(build_model(config, TOKENIZER.size, seed=1, dtype=torch.float32), TOKENIZER)
    path = tmp_path / "place"
    Reading.start(bundle).read("ab").save(path)
    tensors = {name: part.clone() for name, part in bundle.network.initial_state(1).tensors.items()}
    tensors["tokens"][0, -1] = token
    rewritten(path, state=np.frombuffer(State(tensors).to_bytes(), np.uint8))
    with pytest.raises(ModelFileError, match="do not fit the model"):
        Reading.load(path, bundle)
