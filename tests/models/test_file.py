"""The model file: reproducible, complete, atomic, and safe to open whatever it holds."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from elman.errors import ModelFileError
from elman.models.file import Bundle, load_model, model_path, save_model
from elman.models.kinds import build_model, model_config
from elman.text.building import tokenizer_from_dict
from elman.text.tokenizers import CharTokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "lstm-char.safetensors"
WITH_FEWER_SETTINGS = [GOLDEN.with_name(f"lstm-char-{which}.safetensors") for which in ("first", "second")]
TOKENIZER = CharTokenizer("abcdé\n")
TOKENS = torch.tensor([[0, 2, 3, 4, 7, 5, 6]])


def bundle(kind: str = "lstm", dtype: torch.dtype = torch.float32, **settings: Any) -> Bundle:
    config = model_config({"kind": kind, "embedding_size": 3, "hidden_size": 4, "num_layers": 2, **settings})
    network = build_model(config, TOKENIZER.size, seed=1, dtype=dtype)
    return Bundle(network, TOKENIZER, {"corpus": "naïve.txt", "seed": 1, "valid": {"nats_per_token": 1.5}})


def saved(path: Path, **settings: Any) -> Path:
    save_model(path, bundle(**settings))
    return path


@pytest.mark.parametrize("kind", ["elman", "lstm", "gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_loaded_is_what_was_saved(kind, dtype, tmp_path):
    original = bundle(kind, dtype, biases="double")
    save_model(tmp_path / "m", original)
    loaded = load_model(tmp_path / "m")
    assert loaded.network.config == original.network.config
    assert loaded.network.dtype == dtype
    assert loaded.provenance == original.provenance
    assert loaded.tokenizer.to_dict() == original.tokenizer.to_dict()
    state = original.network.initial_state(1)
    assert torch.equal(loaded.network(TOKENS, state).logits_BTV, original.network(TOKENS, state).logits_BTV)
    assert all(parameter.requires_grad for parameter in loaded.network.parameters())


def test_the_same_model_gives_the_same_bytes_with_one_key_and_no_time(tmp_path):
    first = saved(tmp_path / "a").read_bytes()
    time.sleep(0.01)
    assert saved(tmp_path / "b").read_bytes() == first
    save_model(tmp_path / "c", load_model(tmp_path / "a"))
    assert (tmp_path / "c").read_bytes() == first
    with safe_open(tmp_path / "a", framework="pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["elman"]
    meta = json.loads(metadata["elman"])
    assert metadata["elman"] == json.dumps(meta, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert set(meta) == {"format", "model", "tokenizer", "provenance"}


def test_saving_leaves_nothing_beside_the_file_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    saved(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_model(tmp_path).tokenizer.size == TOKENIZER.size


def test_a_run_folder_means_the_model_inside(tmp_path):
    path = saved(tmp_path / "model.safetensors")
    assert model_path(tmp_path) == model_path(path) == path


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    for name in ("x" * 300, "x" * 300 + ".arpa"):
        with pytest.raises(ModelFileError, match="File name too long") as refused:
            load_model(tmp_path / name)
        assert len(str(refused.value)) < 300


# Files of format 1 must load for ever, those from before a setting was there too. The weights are simple fractions, so
# that the bytes can be made again.


def golden_bundle() -> Bundle:
    config = model_config(
        {"kind": "lstm", "embedding_size": 3, "hidden_size": 4, "num_layers": 2, "tie_weights": True,
         "output_projection": True, "dropout": 0.25}
    )  # fmt: skip
    network = build_model(config, TOKENIZER.size, seed=None, dtype=torch.float32)
    for parameter in network.parameters():
        count = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
        parameter.data.copy_((count * 7 % 13 - 6) / 16)
    return Bundle(network, TOKENIZER, {"corpus": "golden", "corpus_sha256": "0" * 64, "seed": 1, "updates": 2})


GOLDEN_LOGITS = [-0.4214604, 0.0687053, -0.3158703, 0.1742953, -0.2725214, 0.155403, -0.1669314, 0.2609931]


@pytest.mark.parametrize("path", [GOLDEN, *WITH_FEWER_SETTINGS], ids=lambda path: path.stem)
def test_a_golden_file_still_loads_and_gives_the_same_logits(path):
    loaded = load_model(path)
    assert loaded.provenance == {"corpus": "golden", "corpus_sha256": "0" * 64, "seed": 1, "updates": 2}
    assert loaded.tokenizer.decode([2, 3, 4, 5, 6, 7]) == "\nabcdé"
    with torch.no_grad():
        logits_BTV, _ = loaded.network(TOKENS, loaded.network.initial_state(1))
    torch.testing.assert_close(logits_BTV[0, -1], torch.tensor(GOLDEN_LOGITS), rtol=0, atol=1e-6)


def test_the_golden_file_is_still_written_byte_for_byte(tmp_path):
    save_model(tmp_path / "m", golden_bundle())
    assert (tmp_path / "m").read_bytes() == GOLDEN.read_bytes()
    assert len(GOLDEN.read_bytes()) < 20_000


# Files that must be refused, in one line and at once.


def refused(path: Path, **options: Any) -> str:
    started = time.monotonic()
    with pytest.raises(ModelFileError) as error:
        load_model(path, **options)
    assert time.monotonic() - started < 5.0
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value) or "tokenizer" in str(error.value)
    return str(error.value)


def edited(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """Change a file's header and the JSON in its metadata, and write it back."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    meta = json.loads(header["__metadata__"]["elman"])
    change(meta, header)
    header["__metadata__"]["elman"] = json.dumps(meta)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta, _: meta.update(format=2), r"has format 2; this Elman reads up to 1: upgrade it"),
        (lambda meta, _: meta.update(format="1"), "lacks format, model, tokenizer or provenance"),
        (lambda meta, _: meta.pop("format"), "lacks format, model, tokenizer or provenance"),
        (lambda meta, _: meta.pop("provenance"), "lacks format"),
        (lambda meta, _: meta.update(model=[1]), "lacks format"),
        (lambda meta, _: meta["model"].update(hidden_size=10**9), "its settings call for"),
        (lambda meta, _: meta["model"].update(hidden_size=10**30), "its settings call for"),
        (lambda meta, _: meta["model"].update(num_layers=10**6), "its settings call for"),
        (lambda meta, _: meta["model"].update(num_layers=10**15), "its settings call for"),
        (lambda meta, _: meta["model"].update(embedding_size=10**12), "its settings call for"),
        (lambda meta, _: meta["model"].update(hidden_size=-1), "settings are not accepted"),
        (lambda meta, _: meta["model"].update(hidden_size=5), "its settings call for"),
        (lambda meta, _: meta["model"].update(dropout=float("nan")), "settings are not accepted"),
        (lambda meta, _: meta["model"].update(surprise=1), "settings are not accepted"),
        (lambda meta, _: meta["model"].update(kind="gru"), "not accepted|its settings call for"),
        (lambda meta, _: meta["model"].update(kind="lsmt"), "unknown model.kind 'lsmt'; did you mean 'lstm'"),
        (lambda meta, _: meta["model"].update(kind="os:system"), "was trained with the cell 'os:system'"),
        (lambda meta, _: meta["model"].update(kind="../x.py:A"), "give it yourself"),
        (lambda meta, _: meta["model"].update(kind=["lstm"]), "settings are not accepted"),
        (lambda meta, _: meta["model"].update(kind=None), "settings are not accepted"),
        (lambda meta, _: meta["tokenizer"].update(level="letters"), "unknown level 'letters' of the tokenizer"),
        (lambda meta, _: meta["tokenizer"].update(characters="ab"), "its settings call for"),
        (lambda meta, _: meta["tokenizer"].update(characters="ba"), "tokenizer's 'characters' must be"),
        (lambda meta, _: meta["tokenizer"].pop("characters"), "tokenizer must hold"),
        (lambda _, header: header.update(renamed=header.pop("embedding")), "names or shapes differ .*'embedding'"),
        (lambda _, header: header["embedding"].update(shape=[3, 8]), "names or shapes differ .*'embedding'"),
        (lambda _, header: header["embedding"].update(dtype="I32"), "holds tensors of"),
        (lambda _, header: header["embedding"].update(shape=[10**9, 10**9]), "not a readable safetensors file"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change, message, tmp_path):
    path = edited(saved(tmp_path / "m"), change)
    with pytest.raises(ModelFileError, match=message):
        load_model(path)
    refused(path)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused(number, tmp_path):
    damaged = bundle()
    damaged.network.layers[1].weight_hh.data[3, 2] = number
    save_model(tmp_path / "m", damaged)
    assert "layers.1.weight_hh holds a number that is not finite" in refused(tmp_path / "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "its metadata is not JSON"),
        ("[" * 100_000, "its metadata is not JSON"),
        ("1" * 5000, "its metadata"),
        ("null", "lacks format, model, tokenizer or provenance"),
        ("[]", "lacks format, model, tokenizer or provenance"),
        ("{}", "lacks format, model, tokenizer or provenance"),
    ],
)
def test_metadata_that_is_no_object_is_refused(text, message, tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "m", metadata={"elman": text})
    assert message in refused(tmp_path / "m")


def test_another_programs_safetensors_are_refused(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "m")
    assert "is not a model of Elman: its metadata has no key 'elman'" in refused(tmp_path / "m")


def test_a_file_without_tensors_is_refused(tmp_path):
    with safe_open(saved(tmp_path / "m"), framework="pt") as file:
        save_file({}, tmp_path / "empty", metadata=file.metadata())
    refused(tmp_path / "empty")


def test_pickles_are_refused_unread(tmp_path):
    torch.save({"x": torch.zeros(2)}, tmp_path / "model.pt")
    assert "not a readable safetensors file" in refused(tmp_path / "model.pt")
    (tmp_path / "m.pkl").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert "not a readable safetensors file" in refused(tmp_path / "m.pkl")
    assert not (tmp_path / "pwned").exists()


def test_a_file_cut_anywhere_is_refused(tmp_path):
    data = saved(tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    for length in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 4, len(data) - 1):
        path.write_bytes(data[:length])
        assert "not a readable safetensors file" in refused(path)
    path.write_bytes(data + b"\0")
    refused(path)


def test_a_flipped_bit_in_the_header_is_refused_or_harmless(tmp_path):
    data = saved(tmp_path / "whole").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path = tmp_path / "flipped"
    chooser = random.Random(1)
    messages = []
    for _ in range(400):
        flipped = bytearray(data)
        flipped[chooser.randrange(8 + length)] ^= 1 << chooser.randrange(8)
        path.write_bytes(flipped)
        try:
            loaded = load_model(path)
        except ModelFileError as error:
            messages.append(str(error))
        else:  # the flip hit a number or a word that means nothing for the weights, such as the corpus's name
            assert loaded.tokenizer.size == TOKENIZER.size
            assert loaded.network(TOKENS, loaded.network.initial_state(1)).logits_BTV.isfinite().all()
    assert len(messages) > 200
    assert not any("\n" in message for message in messages)


def test_a_missing_file_or_an_unfinished_run_is_said(tmp_path):
    assert refused(tmp_path / "absent") == f"no run folder or model file {str(tmp_path / 'absent')!r}"
    assert "holds no model.safetensors yet" in refused(tmp_path)


def test_the_tokenizer_inside_is_enough_to_read_text():
    with safe_open(GOLDEN, framework="pt") as file:
        meta = json.loads(file.metadata()["elman"])
    assert tokenizer_from_dict(meta["tokenizer"]).encode("abc").tolist() == [3, 4, 5]
