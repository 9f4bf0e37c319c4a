"""Model files of an n-gram model: nothing in them makes a kernel leave its arrays."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from elman.errors import ModelFileError
from elman.models.contract import CountedModel
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("abcd")
Tensors = dict[str, torch.Tensor]


def bundle(order: int = 3) -> Bundle:
    network = build_model(model_config({"kind": "ngram", "order": order}), TOKENIZER.size, seed=1, dtype=torch.float32)
    assert isinstance(network, CountedModel)
    network.count(np.array([0, *TOKENIZER.encode("abacadabbcd" * 3).tolist()]))
    return Bundle(network, TOKENIZER, {"seed": 1})


def losses(network: torch.nn.Module) -> torch.Tensor:
    tokens_BT = torch.tensor([[0, 2, 3, 2, 4, 1, 0, 2]])
    features_BTF, _ = network.features(tokens_BT, network.initial_state(1))
    network.head.logits(features_BTF)
    return network.head.nll(features_BTF, tokens_BT.flip(1), dtype=torch.float64)


@pytest.mark.parametrize("order", [1, 3])
def test_what_is_loaded_is_what_was_saved(order, tmp_path):
    original = bundle(order)
    save_model(tmp_path / "m", original)
    loaded = load_model(tmp_path / "m")
    assert loaded.network.config == original.network.config
    assert torch.equal(losses(loaded.network), losses(original.network))
    save_model(tmp_path / "again", loaded)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()


def altered(tmp_path: Path, change: Callable[[Tensors], None]) -> Path:
    save_model(tmp_path / "m", bundle())
    with safe_open(tmp_path / "m", framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, tmp_path / "altered", metadata)
    return tmp_path / "altered"


def put(name: str, index: int, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][index] = value

    return change


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        *((drop(name), "has the shape") for name in ("first_child", "first_ngram", "log_weights", "log_probs")),
        (lambda t: t.update({name: t[name][:0].clone() for name in t}), "has the shape"),
        (lambda t: t.update(log_probs=t["log_probs"].reshape(1, -1)), "has the shape"),
        (put("context_tokens", 2, -1), "outside of the vocabulary"),
        (put("ngram_tokens", 2, TOKENIZER.size), "outside of the vocabulary"),
        (put("ngram_tokens", 2, 2**31 - 1), "outside of the vocabulary"),
        (put("first_ngram", 2, 10_000), "does not divide its table"),
        (put("first_ngram", 2, -1), "does not divide its table"),
        (put("first_ngram", -1, 3), "does not divide its table"),
        (put("first_child", 1, 2**31 - 1), "does not divide its table"),
        (put("first_child", 0, 0), "does not divide its table"),
        (put("first_child", 1, 1), "makes a context its own child"),
        (put("context_tokens", 1, 3), "context_tokens is not sorted"),
        (put("ngram_tokens", 0, 4), "ngram_tokens is not sorted"),
        (put("log_probs", 1, float("nan")), "not finite"),
        (put("log_weights", 1, float("inf")), "not finite"),
        (put("log_probs", 1, 0.5), "above one"),
        (lambda t: t.update(ngram_tokens=t["ngram_tokens"].to(torch.int64)), "holds tensors of"),
        (lambda t: t.update(log_probs=t["log_probs"].to(torch.int32)), "its table log_probs is torch.int32"),
        (lambda t: t.pop("log_probs"), "holds the tables"),
        (lambda t: t.update(more=torch.zeros(2, dtype=torch.int32)), "holds the tables"),
    ],
)
def test_damaged_tables_get_one_line(change, complaint, tmp_path):
    path = altered(tmp_path, change)
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_tables_of_a_higher_order_than_the_settings_are_refused(tmp_path):
    save_model(tmp_path / "m", bundle())
    with safe_open(tmp_path / "m", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        meta = json.loads(file.metadata()["elman"])
    meta["model"]["order"] = 2
    save_file(tensors, tmp_path / "other", {"elman": json.dumps(meta)})
    with pytest.raises(ModelFileError, match="contexts are longer"):
        load_model(tmp_path / "other")
    meta["model"] = {"kind": "lstm"}
    save_file(tensors, tmp_path / "other", {"elman": json.dumps(meta)})
    with pytest.raises(ModelFileError, match="holds tensors of"):
        load_model(tmp_path / "other")


def test_whatever_bits_are_flipped_a_file_is_refused_or_read_without_harm(tmp_path):
    save_model(tmp_path / "m", bundle())
    whole = (tmp_path / "m").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(1)
    outcomes = set()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(start, len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "flipped").write_bytes(data)
        try:
            losses(load_model(tmp_path / "flipped").network)
            outcomes.add("read")
        except ModelFileError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
