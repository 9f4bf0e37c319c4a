"""Starting from another model: tokens go by their text, old predictions stay, and what was kept is reported."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import elman
from elman.config import ModelConfig, TokenizerConfig
from elman.data.prepare import Dataset, tokenize_text
from elman.errors import ConfigError, ModelFileError, UserError
from elman.models.file import Bundle, load_model, save_model
from elman.models.kinds import build_model, kind_names, model_config
from elman.models.laws import small_configs
from elman.settings import resolve
from elman.text.bpe import BPETokenizer
from elman.text.sources import StringSource
from elman.text.tokenizers import BOUNDARY, ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from elman.training import transfer as module
from elman.training.checkpoint import newest_checkpoint
from elman.training.folder import Run
from elman.training.run import dry_run, resume, train
from elman.training.transfer import NEW_SHARE, matched_ids, parameters_by_token, prepare_for, take_over

OLD, NEW = "the cat sat on the mat. the dog saw the moon.\n", "10 + 20 = 30; the sum is 30.\n7 * 6 = 42\n"


def random_bundle(config: ModelConfig, tokenizer: Tokenizer) -> Bundle:
    """A model whose every parameter differs from what any fresh one has."""
    network = build_model(config, tokenizer.size, seed=9, dtype=torch.float64, boundary_id=tokenizer.boundary_id)
    generator = torch.Generator().manual_seed(2)
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return Bundle(network, tokenizer, {"corpus": "old.txt", "updates": 5})


def dataset_of(text: str, tokenizer: Tokenizer) -> Dataset:
    return Dataset(tokenizer, tokenize_text(text, tokenizer), None, None, "new.txt", "0" * 64, ())


def grown(bundle: Bundle, tokenizer: Tokenizer, folder: Path) -> tuple[Any, Any]:
    """A network for another vocabulary that has taken over a model, and the report."""
    save_model(folder / "model.safetensors", bundle)
    config = resolve().model_copy(update={"from_model": str(folder / "model.safetensors")})
    network = build_model(
        bundle.network.config, tokenizer.size, seed=1, dtype=torch.float64, boundary_id=tokenizer.boundary_id
    )
    return network, take_over(config, bundle, network, dataset_of(NEW, tokenizer)).transfer


def log_probs(network: Any, tokens: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        features_BTF, _ = network.features(torch.from_numpy(tokens)[None], network.initial_state(1))
        return network.head.log_probs(features_BTF)[0]


CONFIGS = [config for kind in kind_names() if kind != "ngram" for config in small_configs(kind)]


@pytest.mark.parametrize("kind", [kind for kind in kind_names() if kind != "ngram"])
def test_growth_leaves_old_text_what_it_was_but_for_the_share_of_the_new(kind, tmp_path):
    old = CharTokenizer(OLD)
    new = old.extended(CharTokenizer(NEW))
    old_ids, new_ids = matched_ids(old, new)
    ids_of_old = np.concatenate([[old.boundary_id], old.encode(OLD)])
    ids_of_new = np.concatenate([[new.boundary_id], new.encode(OLD)])
    assert not np.array_equal(ids_of_old, ids_of_new)  # by number nothing would fit
    for number, config in enumerate(c for c in CONFIGS if c.kind == kind):
        bundle = random_bundle(config, old)
        (folder := tmp_path / str(number)).mkdir()
        if any("clusters" in name for name, _ in bundle.network.named_parameters()):
            with pytest.raises(ConfigError, match=r"shaped by the vocabulary \(head\.clusters.*model\.output linear"):
                grown(bundle, new, folder)
            continue
        network, report = grown(bundle, new, folder)
        before, after = log_probs(bundle.network, ids_of_old), log_probs(network, ids_of_new)
        share_T = after.exp()[:, np.setdiff1d(np.arange(new.size), new_ids)].sum(-1)
        kept = after[:, new_ids] - torch.log1p(-share_T)[:, None]
        # Each softmax of a mixture gives up a share of its own.
        allowed = 0.05 if config.output == "mixture" else 1e-10
        torch.testing.assert_close(kept, before[:, old_ids], rtol=0, atol=allowed)
        probed = log_probs(network, np.concatenate([[new.boundary_id], new.encode(NEW)])).exp()
        of_new_T = probed[:, np.setdiff1d(np.arange(new.size), new_ids)].sum(-1)
        assert of_new_T.max().item() == pytest.approx(NEW_SHARE, rel=1e-3 if config.output == "mixture" else 1e-9)
        assert report.new_share == pytest.approx(of_new_T.mean().item(), rel=1e-9)
        assert (report.num_matched, report.num_dropped) == (old.size, 0)
        assert report.num_new == len(set(NEW) - set(OLD)) == len(report.new_tokens)
        assert {*report.copied, *report.matched_by_row} == dict(network.named_parameters()).keys()
        assert "head.bias" in report.matched_by_row


def test_each_row_is_that_of_its_token_and_new_ones_are_those_of_a_fresh_model(tmp_path):
    old, new = CharTokenizer("bdf"), CharTokenizer("abcf")  # 'd' is dropped, 'a' and 'c' are new
    config = model_config({"kind": "gru", "embedding_size": 5, "hidden_size": 7})
    bundle = random_bundle(config, old)
    network, report = grown(bundle, new, tmp_path)
    fresh = build_model(config, new.size, seed=1, dtype=torch.float64)
    for name in ("embedding", "head.weight"):
        mine, theirs = network.get_parameter(name), bundle.network.get_parameter(name)
        for token, row in zip(new.vocabulary, mine, strict=True):
            expected = theirs[old.vocabulary.index(token)] if token in old.vocabulary else None
            expected = fresh.get_parameter(name)[new.vocabulary.index(token)] if expected is None else expected
            assert torch.equal(row, expected), token
    assert (report.num_matched, report.num_new, report.num_dropped) == (4, 2, 1)
    assert report.new_tokens == ("a", "c")
    assert torch.equal(network.get_parameter("layers.0.weight_hh"), bundle.network.get_parameter("layers.0.weight_hh"))
    assert "4 tokens matched by their text, 2 new, 1 dropped" in report.summary()
    assert "a model of old.txt after 5 updates" in report.summary()


def test_a_tied_matrix_stays_one(tmp_path):
    config = model_config({"kind": "lstm", "embedding_size": 6, "hidden_size": 6, "tie_weights": True})
    network, report = grown(random_bundle(config, CharTokenizer("ab")), CharTokenizer("abc"), tmp_path)
    assert network.head.weight is network.embedding
    assert report.matched_by_row == ("embedding", "head.bias")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (CharTokenizer("ab"), CharTokenizer("bc"), {BOUNDARY, "<unk>", "b"}),
        (WordTokenizer(["the", "cat"]), WordTokenizer(["dog", "the"]), {BOUNDARY, "<unk>", "<eos>", "the"}),
        (ByteTokenizer(), ByteTokenizer(), set(ByteTokenizer().vocabulary)),
    ],
)
def test_tokens_are_matched_by_what_they_stand_for(old, new, expected):
    old_ids, new_ids = matched_ids(old, new)
    assert {old.vocabulary[i] for i in old_ids} == {new.vocabulary[i] for i in new_ids} == expected
    assert [old.vocabulary[i] for i in old_ids] == [new.vocabulary[i] for i in new_ids]


def test_bpe_tokens_are_matched_by_their_bytes_one_to_one():
    config = TokenizerConfig(level="bpe", max_size=290)
    old, new = (BPETokenizer.train(config, StringSource(text * 20)) for text in (OLD, "the log and the dog. ÄÖ\n"))
    old_ids, new_ids = matched_ids(old, new)
    assert len(set(old_ids)) == len(set(new_ids)) == len(old_ids)
    assert [old.entries[i] for i in old_ids] == [new.entries[i] for i in new_ids]
    assert 257 < len(old_ids) < min(old.size, new.size)
    same, also = matched_ids(old, old)
    assert same.tolist() == also.tolist() == list(range(old.size))


def test_parameters_by_token_are_found_by_what_a_larger_vocabulary_changes():
    def of(**settings: Any) -> tuple[str, ...]:
        return parameters_by_token(build_model(model_config(settings), 5, seed=None, dtype=torch.float32))

    assert of(kind="lstm", hidden_size=5, embedding_size=5) == ("embedding", "head.weight", "head.bias")
    assert of(kind="lstm", output_projection=True) == ("embedding", "head.weight", "head.bias")
    assert of(kind="window", direct_connections=True) == ("embedding", "head.weight", "head.bias", "head.direct")
    assert of(kind="seq2seq", share_embedding=False) == ("embedding", "source_embedding", "head.weight", "head.bias")


def test_vocabularies_grow_at_their_end_or_in_order():
    assert CharTokenizer("bd").extended(CharTokenizer("ac")).vocabulary[2:] == ("a", "b", "c", "d")
    words = WordTokenizer(["b", "a"]).extended(WordTokenizer(["c", "a"]))
    assert words.vocabulary[3:] == ("b", "a", "c")
    tokenizer = ByteTokenizer()
    assert tokenizer.extended(ByteTokenizer()) is tokenizer


# Runs.


def settings(**training: Any) -> dict[str, Any]:
    return {
        "sampling": {"max_new_tokens": 5, "temperatures": [0.8]},
        "training": {"batch_size": 4, "bptt": 16, "learning_rate": 0.01, "num_threads": 1, "max_updates": 10}
        | training,
        "evaluation": {"every_updates": 5},
    }


SIZES = {"model": {"hidden_size": 12, "embedding_size": 8}}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in (("old", OLD), ("new", NEW)):
        (folder / f"{name}.txt").write_text(text * 30, encoding="utf-8", newline="")
    return folder / "old.txt", folder / "new.txt"


@pytest.fixture(scope="module")
def old_run(texts: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(texts[0], out=tmp_path_factory.mktemp("runs") / "old", **SIZES, **settings())


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in load_model(run.path).network.named_parameters()}


def updates(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "measured"} for r in run.records() if r["kind"] == "update"]


def test_on_the_same_text_it_goes_on_with_the_very_weights(texts, old_run, tmp_path):
    run = train(texts[0], out=tmp_path / "run", from_model=old_run.path, should_stop=lambda: True, **settings())
    _, checkpoint, _ = newest_checkpoint(run.checkpoints)
    assert checkpoint.trainer["update"] == 0
    for name, tensor in weights(old_run).items():
        assert torch.equal(checkpoint.tensors[f"model.{name}"], tensor), name
    assert run.origin.transfer.num_new == run.origin.transfer.num_dropped == 0
    assert run.origin.transfer.new_share == 0.0


def test_a_run_tells_where_it_started_and_goes_on_without_the_model(texts, old_run, tmp_path):
    origin = tmp_path / "origin"
    shutil.copytree(old_run.path, origin)
    whole = train(texts[1], out=tmp_path / "whole", from_model=origin, **settings())
    polls = iter(range(30))
    stopped = train(
        texts[1],
        out=tmp_path / "stopped",
        from_model=origin,
        should_stop=lambda: next(polls, None) is None,
        **settings(),
    )
    shutil.rmtree(origin)
    assert [record["kind"] for record in stopped.records()][-1] == "stopped"
    resume(stopped.path)
    assert updates(stopped) == updates(whole)
    assert stopped.model.read_bytes() == whole.model.read_bytes()
    said = [r["text"] for r in whole.records() if r["kind"] == "notice" and "tokens matched by their text" in r["text"]]
    report = whole.origin.transfer
    assert said == [report.summary(str(origin))]
    assert report.num_matched == load_model(old_run.path).tokenizer.size
    assert set(report.new_tokens) == set(NEW) - set(OLD)
    model = elman.load(whole.path)
    assert model.provenance["from"]["sha256"] == report.sha256
    assert model.provenance["from"]["corpus"] == "old.txt"
    assert set(OLD) | set(NEW) <= set(model.tokenizer.vocabulary)
    assert math.isfinite(elman.evaluate(whole.path).evaluation.score.nats_per_token)
    assert updates(whole)[-1]["nats"] < updates(whole)[0]["nats"]


@pytest.mark.parametrize(
    "tokenizer", [{"level": "word"}, {"level": "byte"}, {"level": "bpe", "max_size": 270}], ids=str
)
def test_every_level_starts_from_another(tokenizer, texts, tmp_path):
    old = train(texts[0], out=tmp_path / "old", tokenizer=tokenizer, **SIZES, **settings(max_updates=2))
    new = train(texts[1], out=tmp_path / "new", from_model=old.path, **settings(max_updates=2))
    mine, theirs = load_model(new.path).tokenizer, load_model(old.path).tokenizer
    assert mine.level == theirs.level == tokenizer["level"]
    assert (mine.size > theirs.size) == (tokenizer["level"] == "word")
    assert new.origin.transfer.num_matched == theirs.size
    assert new.config().tokenizer.level == tokenizer["level"]
    resume(new.path, max_updates=3)


def test_another_bpe_tokenizer_is_matched_by_text(texts, tmp_path):
    bpe = {"level": "bpe", "max_size": 280}
    old = train(texts[0], out=tmp_path / "old", tokenizer=bpe, **SIZES, **settings(max_updates=2))
    other = BPETokenizer.train(TokenizerConfig(level="bpe", max_size=270), StringSource(NEW * 9))
    (tmp_path / "tokenizer.json").write_text(json.dumps(other.to_dict()["tokenizer"]), "utf-8")
    chosen = {"tokenizer": {"level": "bpe", "path": str(tmp_path / "tokenizer.json")}}
    new = train(texts[1], out=tmp_path / "new", from_model=old.path, **chosen, **settings(max_updates=2))
    report = new.origin.transfer
    assert report.num_matched >= 257
    assert report.num_new > 0
    assert report.num_dropped > 0
    (tmp_path / "tokenizer.json").unlink()
    resume(new.path, max_updates=3)


def test_dropout_may_differ_and_a_preset_gives_way(texts, old_run, tmp_path):
    config = resolve({"from_model": str(old_run.path), "model": {"dropout": 0.3}}, preset="pytorch-word-lm")
    assert (config.model.dropout, config.model.hidden_size, config.tokenizer.level) == (0.3, 12, "char")
    assert config.training.trim
    assert dry_run(texts[1], from_model=old_run.path, **settings()).parameters > 0


def test_a_preset_of_pieces_gives_way_to_the_bytes_of_the_model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(path, random_bundle(model_config({"hidden_size": 5}), ByteTokenizer()))
    tokenizer = resolve({"from_model": str(path)}, preset="cpu-1min-bpe").tokenizer
    assert (tokenizer.level, tokenizer.max_size) == ("byte", None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": {"kind": "gru"}}, r"model\.kind 'gru' was given, '.*' has 'lstm': leave it out"),
        ({"model": {"hidden_size": 13}}, r"model\.hidden_size 13 was given, '.*' has 12: leave it out"),
        ({"model": {"hidden_size": "13"}}, r"model\.hidden_size 13 was given"),
        ({"model": {"tie_weights": True, "output_projection": True}}, r"was given, '.*' has False: leave it out"),
        ({"tokenizer": {"level": "word"}}, r"tokenizer\.level 'word' was given, '.*' has 'char': leave it out"),
    ],
)
def test_what_contradicts_the_model_is_refused_in_one_line(given, message, old_run):
    with pytest.raises(ConfigError, match=message) as raised:
        resolve({"from_model": str(old_run.path), **given})
    assert "\n" not in str(raised.value)


def test_what_cannot_be_started_from_is_refused_in_one_line(texts, tmp_path):
    counted = train(
        texts[0], out=tmp_path / "ngram", model={"kind": "ngram", "order": 2}, sampling={"max_new_tokens": 3}
    )
    for origin, message in (
        (counted.path, r"is counted, not trained, .* --model\.kind ngram"),
        (tmp_path / "nowhere", "no run folder or model file"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            train(texts[1], out=tmp_path / "run", from_model=origin, **settings())
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "run").exists()


def test_a_damaged_record_of_the_origin_is_an_error(texts, old_run, tmp_path):
    run = train(texts[1], out=tmp_path / "run", from_model=old_run.path, **settings(max_updates=1))
    for text in ("", "[]", '{"tokenizer": {"level": "char", "characters": "ab"}}', '{"tokenizer": {}, "transfer": {}}'):
        (run.path / "origin.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"origin\.json' is damaged"):
            resume(run.path, max_updates=2)


def test_an_output_without_a_bias_for_each_token_takes_no_new_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "parameters_by_token", lambda network: ("embedding",))
    config = model_config({"kind": "elman", "embedding_size": 4, "hidden_size": 4})
    with pytest.raises(ConfigError, match="cannot take new tokens"):
        grown(random_bundle(config, CharTokenizer("ab")), CharTokenizer("abc"), tmp_path)


def test_an_output_shaped_by_the_vocabulary_is_taken_over_whole_for_the_same_tokens(tmp_path):
    config = next(config for config in CONFIGS if config.output == "adaptive")
    bundle = random_bundle(config, CharTokenizer(OLD))
    network, report = grown(bundle, CharTokenizer(OLD), tmp_path)
    assert report.matched_by_row == ()
    for name, parameter in bundle.network.named_parameters():
        assert torch.equal(network.get_parameter(name), parameter), name


def test_the_corpus_is_read_in_the_tokens_of_the_model(texts, old_run):
    config = resolve({"from_model": str(old_run.path), "data": {"corpus": str(texts[1])}})
    dataset, bundle = prepare_for(config)
    assert set(bundle.tokenizer.vocabulary) <= set(dataset.tokenizer.vocabulary)
    assert prepare_for(resolve({"data": {"corpus": str(texts[1])}}))[1] is None
