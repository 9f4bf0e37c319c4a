"""Models of Hugging Face's transformers, made here with random weights, against the library's own forward pass."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from elman.config import TokenizerConfig
from elman.data.prepare import Split, tokenize_text
from elman.errors import ModelFileError, UserError
from elman.evaluation import Window, evaluate_split
from elman.judge import evaluate
from elman.models.huggingface import is_huggingface, load_huggingface
from elman.text.building import train_tokenizer
from elman.text.sources import Piece

TEXT = "the cat sat on the mat; the dog sat on the log. Größe, 猫 and 'quotes'.\n" * 4
CONTEXT = 32


def configuration(kind: str, vocab_size: int, boundary_id: int):
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocab_size, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2,
            bos_token_id=boundary_id, eos_token_id=boundary_id,
        )  # fmt: skip
    return transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, bos_token_id=boundary_id, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each kind, with a tokenizer of byte pairs learned on the text."""
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer(TokenizerConfig(level="bpe", max_size=300), [Piece(TEXT, True)])
    made = {}
    for kind in ("gpt2", "llama"):
        folder = tmp_path_factory.mktemp(kind)
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(3)
            config = configuration(kind, tokenizer.size, tokenizer.boundary_id)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                parameter.data.mul_(8)  # else every token is as probable as any other
            model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()["tokenizer"]), encoding="utf-8")
        made[kind] = folder
    return made


def windows_by_the_library(folder: Path, tokens: np.ndarray, size: int, stride: int) -> tuple[float, list[float]]:
    """The oracle: the library's logits of each window, softmax in float64."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    nats: list[float] = []
    last = len(tokens) - 1
    end = min(size, last)
    while len(nats) < last:
        begin, scored = max(0, end - size), len(nats)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens[None, begin:end].astype(np.int64))).logits[0].double()
        log_probs = logits.log_softmax(-1)
        nats += [-log_probs[t - begin, tokens[t + 1]].item() for t in range(scored, end)]
        end = min(end + stride, last)
    return math.fsum(nats), nats


@pytest.mark.global_rng
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(("size", "stride"), [(32, 16), (8, 3), (20, 20)])
def test_windows_cost_what_the_library_says(kind: str, size: int, stride: int, folders: dict[str, Path]):
    network, tokenizer = load_huggingface(folders[kind])
    split = tokenize_text(TEXT, tokenizer)
    assert split.tokens[0] == tokenizer.boundary_id
    expected, each = windows_by_the_library(folders[kind], split.tokens, size, stride)
    nats = np.empty(len(split.tokens) - 1)
    for rows in (1, 3):
        result = evaluate_split(
            network, split, tokenizer, window=Window(size, stride), num_streams=rows, surprisal=nats
        )
        assert result.score.nats_total == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(nats, each, rtol=1e-3, atol=1e-4)
    assert (result.score.chars, result.score.bytes) == (len(TEXT), len(TEXT.encode()))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_any_chunking_gives_the_same_until_the_context_is_full(kind: str, folders: dict[str, Path]):
    network, tokenizer = load_huggingface(folders[kind])
    tokens = torch.from_numpy(tokenize_text(TEXT, tokenizer).tokens[None, :CONTEXT].astype(np.int64))
    with torch.no_grad():
        whole, _ = network.features(tokens, network.initial_state(1))
        state, pieces = network.initial_state(1), []
        for piece in tokens.split(9, dim=1):
            features, state = network.features(piece, state)
            pieces.append(features)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="reads 32 tokens at most, and 33 were given"):
        network.features(tokens[:, :1], state)


def test_logits_are_made_piece_by_piece_and_as_the_model_makes_them(folders: dict[str, Path], monkeypatch):
    network, tokenizer = load_huggingface(folders["llama"])
    split = tokenize_text(TEXT, tokenizer)
    whole = evaluate_split(network, split, tokenizer, window=Window(32, 32)).score.nats_total
    monkeypatch.setattr("elman.evaluation._MAX_LOGITS", 5 * network.vocab_size)
    seen = []
    logits = network.head.logits
    monkeypatch.setattr(network.head, "logits", lambda features: seen.append(features.shape[1]) or logits(features))
    pieces = evaluate_split(network, split, tokenizer, window=Window(32, 32)).score.nats_total
    assert max(seen) == 5
    assert pieces == pytest.approx(whole, rel=1e-6)


@pytest.mark.global_rng
def test_a_model_that_does_more_to_its_logits_is_taken_at_its_word(folders: dict[str, Path], tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    tokenizer_file = folders["llama"] / "tokenizer.json"
    settings = transformers.Gemma2Config(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=CONTEXT, final_logit_softcapping=0.5,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(settings)
    for parameter in model.parameters():
        parameter.data.mul_(8)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    network, tokenizer = load_huggingface(tmp_path)
    split = tokenize_text(TEXT, tokenizer)
    expected, _ = windows_by_the_library(tmp_path, split.tokens, 16, 8)
    found = evaluate_split(network, split, tokenizer, window=Window(16, 8)).score.nats_total
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_folder_is_judged_by_the_protocol_of_all(folders: dict[str, Path], tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    judgement = evaluate(folders["gpt2"], file, with_accuracy=True, with_surprisal=True)
    result = judgement.to_dict()
    assert (result["state_policy"], result["window"], result["stride"]) == ("window", CONTEXT, CONTEXT // 2)
    assert (result["chars"], result["bytes"], result["words"]) == (len(TEXT), len(TEXT.encode()), len(TEXT.split()))
    assert result["level"] == "bpe"
    assert 0 <= result["accuracy_at_1"] <= result["accuracy_at_5"] <= 1
    assert judgement.surprisal.nats.sum() == pytest.approx(result["nats_total"])
    assert evaluate(folders["gpt2"], file, window=8, stride=2).evaluation.window == Window(8, 2)


def test_documents_are_apart_under_reset(folders: dict[str, Path]):
    network, tokenizer = load_huggingface(folders["llama"])
    texts = ["the cat sat", "on the mat; the dog sat on the log. the cat sat on the mat", "a"]
    ids = np.concatenate(list(tokenizer.encode_pieces([Piece(text, True) for text in texts])))
    split = Split(ids, 0, 0, len(texts), 0)
    result = evaluate_split(network, split, tokenizer, state_policy="reset", window=Window(8, 4), num_streams=2)
    starts = [*np.flatnonzero(ids == tokenizer.boundary_id).tolist(), len(ids) - 1]
    alone = [
        evaluate_split(network, Split(ids[a : b + 1], 0, 0, 1, 0), tokenizer, window=Window(8, 4)).score.nats_total
        for a, b in pairwise(starts)
    ]
    assert result.score.nats_total == pytest.approx(sum(alone), rel=1e-5)
    assert result.score.tokens == len(ids) - 1


def test_what_cannot_be_read_is_one_line(folders: dict[str, Path], tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "nothing-of-this-name"}', encoding="utf-8")
    assert is_huggingface(folder)
    with pytest.raises(ModelFileError, match=r"holds no tokenizer.json"):
        evaluate(folder, text)
    (folder / "tokenizer.json").write_bytes((folders["gpt2"] / "tokenizer.json").read_bytes())
    with pytest.raises(ModelFileError, match="no causal language model that can be read here"):
        evaluate(folder, text)
    (folder / "config.json").write_bytes((folders["gpt2"] / "config.json").read_bytes())
    with pytest.raises(ModelFileError, match="no causal language model that can be read here") as raised:
        evaluate(folder, text)
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="give a TEXT, and leave"):
        evaluate(folders["gpt2"])
    with pytest.raises(UserError, match="give a TEXT, and leave"):
        evaluate(folders["gpt2"], text, with_baselines=True)


def test_weights_that_are_missing_are_not_drawn_at_random(folders: dict[str, Path], tmp_path: Path):
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folders["llama"] / name).read_bytes())
    tensors = load_file(folders["llama"] / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks weights of its own architecture: model\.layers\.1\.mlp\.up_proj"):
        load_huggingface(tmp_path)


def test_a_boundary_is_found_or_missed_in_one_line(folders: dict[str, Path], tmp_path: Path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders["gpt2"] / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 7}), encoding="utf-8")
    _, tokenizer = load_huggingface(tmp_path)
    assert tokenizer.boundary_id == 7
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"bos_token_id": 50256, "eos_token_id": None}), encoding="utf-8"
    )
    _, tokenizer = load_huggingface(tmp_path)
    assert tokenizer.vocabulary[tokenizer.boundary_id] == "<|endoftext|>"
