"""Smaller models: which weights go, the best product of a low rank, and files that serve as any other."""

from __future__ import annotations

import errno
import gzip
import os
from typing import Any

import numpy as np
import pytest
import torch

import elman
from elman.engine import Engine, stepper
from elman.errors import ConfigError, ModelFileError, UserError
from elman.models.contract import LanguageModel
from elman.models.file import load_model
from elman.models.kinds import build_model, model_class, model_config
from elman.settings import resolve
from elman.training import shrinking
from elman.training.folder import Run
from elman.training.run import train
from elman.training.shrinking import feature_moments, pruned, shrink, with_output_of_rank

V, H = 30, 12


def model(kind: str = "lstm", **settings: Any) -> LanguageModel:
    """A model with weights far from those that it starts with."""
    config = model_config({"kind": kind, "embedding_size": 8, "hidden_size": H, **settings})
    network = build_model(config, V, seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network


TOKENS = np.concatenate([[0], np.random.default_rng(1).integers(1, V, size=5000)])


# Pruning.


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_the_smallest_weights_of_every_matrix_are_zero_and_all_others_stay(sparsity):
    network = model(num_layers=2)
    small = pruned(network, sparsity)
    for name, before in network.named_parameters():
        values, found = before.detach().numpy(), small.get_parameter(name).detach().numpy()
        if before.dim() == 1:
            assert np.array_equal(found, values)
            continue
        limit = np.sort(np.abs(values).ravel())[int(sparsity * values.size)]
        assert np.array_equal(found, np.where(np.abs(values) < limit, 0.0, values)), name
        assert (found == 0).sum() == int(sparsity * values.size)
    assert all(parameter.count_nonzero() == parameter.numel() for parameter in network.parameters())


def test_a_tied_matrix_stays_one():
    small = pruned(model(tie_weights=True, embedding_size=H), 0.5)
    assert small.head.weight is small.embedding


@pytest.mark.parametrize("sparsity", [-0.1, 1.0])
def test_a_sparsity_is_a_share(sparsity):
    with pytest.raises(ConfigError, match="accepted: a share from 0 to below 1"):
        pruned(model(), sparsity)


# Low rank.


def features(network: LanguageModel) -> np.ndarray:
    """What the head reads along the text, in one stream after the other."""
    rows = TOKENS[:-1][: 16 * 312].reshape(16, -1)
    with torch.no_grad():
        found, _ = network.features(torch.from_numpy(rows), network.initial_state(16))
    return found.flatten(0, 1).numpy()


def centred(logits: np.ndarray) -> np.ndarray:
    """Without what a softmax does not see."""
    return logits - logits.mean(-1, keepdims=True)


def error(network: LanguageModel, other: LanguageModel, x: np.ndarray) -> float:
    """The mean square of the difference of logits over features, summed over the vocabulary."""
    with torch.no_grad():
        pair = [centred(one.head.logits(torch.from_numpy(x)[None])[0].numpy()) for one in (network, other)]
    return float(((pair[0] - pair[1]) ** 2).sum(-1).mean())


def test_the_moments_are_those_of_the_features():
    network = model()
    tokens = TOKENS[: 16 * 312 + 1]
    mean, covariance = feature_moments(network, tokens)
    x = features(network)
    np.testing.assert_allclose(mean, x.mean(0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(x.T, bias=True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"output_projection": True}])
@pytest.mark.parametrize("rank", [1, 4])
def test_the_product_is_the_best_of_its_rank(settings, rank):
    network = model(**settings)
    x = features(network)
    small = with_output_of_rank(network, rank, *feature_moments(network, TOKENS[: 16 * 312 + 1]))
    assert small.head.weight.shape == (V, rank)
    assert small.head.projection.shape == (rank, H)
    found = error(network, small, x)
    # Eckart and Young: of the centred logits of all positions, what the first singular values leave.
    with torch.no_grad():
        logits = centred(network.head.logits(torch.from_numpy(x)[None])[0].numpy())
    values = np.linalg.svd(logits - logits.mean(0), compute_uv=False)
    assert found == pytest.approx((values[rank:] ** 2).sum() / len(x), rel=1e-9)
    # A factorisation of the matrix alone, blind to the features, is worse.
    whole = network.head.weight if not settings else network.head.weight @ network.head.projection
    u, s, v = np.linalg.svd(whole.detach().numpy(), full_matrices=False)
    plain = centred(x @ ((u[:, :rank] * s[:rank]) @ v[:rank]).T + network.head.bias.detach().numpy())
    assert found < ((logits - plain) ** 2).sum(-1).mean() * 0.999


def test_at_the_highest_rank_little_is_lost_and_with_a_narrow_text_nothing():
    """Features that lie in a plane: a product of rank 2 gives the probabilities to the last digits."""
    network = model()
    random = np.random.default_rng(1)
    x = random.normal(size=(500, 2)) @ random.normal(size=(2, H)) + random.normal(size=H)
    moments = torch.from_numpy(x.mean(0)), torch.from_numpy(np.cov(x.T, bias=True))
    small = with_output_of_rank(network, 2, *moments)
    with torch.no_grad():
        pair = [one.head.log_probs(torch.from_numpy(x)[None]) for one in (network, small)]
    torch.testing.assert_close(*pair, rtol=0, atol=1e-9)


def test_the_two_factors_are_of_one_scale():
    small = with_output_of_rank(model(), 3, *feature_moments(model(), TOKENS))
    weight, projection = small.head.weight.detach(), small.head.projection.detach()
    torch.testing.assert_close(weight.T @ weight, projection @ projection.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 9, 40])
def test_a_rank_that_makes_nothing_smaller_is_refused(rank):
    moments = torch.zeros(H), torch.eye(H)
    with pytest.raises(ConfigError, match=rf"rank {rank} is no smaller than this one of 30 x 12; accepted: 1 to 8"):
        with_output_of_rank(model(), rank, *moments)


@pytest.mark.parametrize(
    ("network", "what"),
    [
        ({"tie_weights": True, "embedding_size": H}, "linear, tied"),
        ({"output": "mixture"}, "no plain matrix"),
        ({"kind": "window", "direct_connections": True}, "linear"),
    ],
)
def test_an_output_that_is_no_matrix_of_its_own_is_refused(network, what):
    with pytest.raises(ConfigError, match=rf"only an output of one matrix .* this one is {what}"):
        with_output_of_rank(model(**network), 2, torch.zeros(H), torch.eye(H))


def test_an_output_may_have_a_width_from_the_start():
    network = model(output_projection=3)
    assert network.head.weight.shape == (V, 3)
    assert network.num_parameters == model_class(network.config).predicted_num_parameters(network.config, V)
    assert model(output_projection=1).head.projection.shape == (1, H)
    assert model(output_projection=True).head.projection.shape == (8, H)


@pytest.mark.parametrize(("typed", "width"), [("64", 64), ("true", True), ("False", False), ("1", 1), (False, False)])
def test_a_projection_is_a_switch_or_a_width(typed, width):
    found = resolve({"model": {"output_projection": typed}}).model.output_projection
    assert (type(found), found) == (type(width), width)


@pytest.mark.parametrize("typed", ["wide", "-3", 0, 1.5])
def test_what_is_no_width_is_refused(typed):
    with pytest.raises(ConfigError, match=rf"model.output_projection: {typed!r} is no width: give true, false, or"):
        resolve({"model": {"output_projection": typed}})


def test_a_tied_matrix_needs_the_width_of_the_embedding():
    assert resolve({"model": {"output_projection": 128, "tie_weights": True}}).model.tie_weights
    with pytest.raises(ConfigError, match=r"equal to output_projection \(64\); set them equal"):
        resolve({"model": {"output_projection": 64, "tie_weights": True}})


# Files.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Run:
    folder = tmp_path_factory.mktemp("shrink")
    (folder / "text.txt").write_text(tiny_text * 4, encoding="utf-8")
    return train(
        folder / "text.txt",
        out=folder / "run",
        model={"hidden_size": 24, "embedding_size": 8},
        training={"batch_size": 4, "bptt": 16, "learning_rate": 0.02, "max_updates": 60, "num_threads": 1},
        evaluation={"every_updates": 1000},
        sampling={"every_updates": 1000, "max_new_tokens": 2},
    )


def test_a_smaller_model_is_a_model_file_and_its_cost_is_that_of_the_validation_part(run, tmp_path):
    shrunk = shrink(run.path, tmp_path / "new" / "small.safetensors", rank=4, sparsity=0.5)
    bundle, old = load_model(shrunk.path), load_model(run.path)
    assert bundle.network.config.output_projection == 4
    assert bundle.provenance["shrunk"] == {"rank": 4, "sparsity": 0.5}
    assert bundle.provenance["corpus_sha256"] == old.provenance["corpus_sha256"]
    vocab_size = bundle.tokenizer.size
    assert shrunk.before.parameters - shrunk.after.parameters == 24 * vocab_size - 4 * (24 + vocab_size)
    assert shrunk.after.nonzero < 0.55 * shrunk.after.parameters
    assert shrunk.after.bytes == shrunk.path.stat().st_size
    assert shrunk.after.gzip_bytes == len(gzip.compress(shrunk.path.read_bytes(), mtime=0)) < shrunk.after.bytes
    judged = elman.evaluate(run.path, split="valid").evaluation.score
    assert shrunk.before.nats_per_token == pytest.approx(judged.nats_per_token, rel=1e-12)
    assert shrunk.tokens == judged.tokens
    assert shrunk.to_dict()["cost_nats_per_token"] > 0.01
    assert bundle.provenance["valid"]["nats_per_token"] == shrunk.after.nats_per_token
    assert len(elman.load(shrunk.path).generate("the ", max_new_tokens=9, seed=1).text) > 0


def test_nothing_taken_away_costs_nothing(run, tmp_path):
    shrunk = shrink(run.path, tmp_path / "same.safetensors", sparsity=0.0)
    assert shrunk.before.nats_per_token == shrunk.after.nats_per_token
    assert shrunk.before.parameters == shrunk.after.parameters


def test_the_engine_compiles_it_and_training_starts_from_it(run, tmp_path):
    path = shrink(run.path, tmp_path / "small.safetensors", rank=4).path
    network = load_model(path).network
    assert isinstance(stepper(network), Engine)
    corpus = run.config().data.corpus
    again = train(
        corpus,
        out=tmp_path / "again",
        from_model=path,
        teachers=run.path,
        training={"batch_size": 4, "bptt": 16, "learning_rate": 0.01, "max_updates": 60, "num_threads": 1},
        evaluation={"every_updates": 1000},
        sampling={"every_updates": 1000, "max_new_tokens": 2},
    )
    recovered = load_model(again.path)
    assert recovered.network.config.output_projection == 4
    assert recovered.provenance["valid"]["nats_per_token"] < load_model(path).provenance["valid"]["nats_per_token"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to do: give --rank, or --sparsity, or both"),
        ({"sparsity": 2.0}, "a sparsity of 2; accepted"),
        ({"rank": 500}, "an output of rank 500 is no smaller"),
    ],
)
def test_what_makes_nothing_smaller_is_refused_and_writes_nothing(given, message, run, tmp_path):
    with pytest.raises(ConfigError, match=message):
        shrink(run.path, tmp_path / "small.safetensors", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays_and_a_model_without_its_corpus_is_refused(run, tmp_path):
    (tmp_path / "here").write_text("mine")
    with pytest.raises(ConfigError, match="here' exists: give another --out"):
        shrink(run.path, tmp_path / "here", sparsity=0.5)
    assert (tmp_path / "here").read_text() == "mine"
    with pytest.raises(ModelFileError, match=r"is not a run folder: .* judged on the validation text of its run"):
        shrink(run.model, tmp_path / "there", sparsity=0.5)
    with pytest.raises(ModelFileError, match=r"is not a run folder: it has no run\.toml"):
        shrink(tmp_path, tmp_path / "there", sparsity=0.5)
    with pytest.raises(ModelFileError, match=r"no run folder '.*nowhere'"):
        shrink(tmp_path / "nowhere", tmp_path / "there", sparsity=0.5)


@pytest.mark.parametrize("place", ["file/small", "file/new/small", "/proc/small", "x" * 300])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(place, run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(shrinking, "load_model", None)
    with pytest.raises(UserError, match=r"cannot be written .*: give another --out") as raised:
        shrink(run.path, tmp_path / place, sparsity=0.5)
    assert repr(str(tmp_path / place)) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_is_one_line(run, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"small' cannot be written \(No space left on device\): give another --out"):
        shrink(run.path, tmp_path / "small", sparsity=0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_pairs_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{n}\t{n + 1}\n" for n in range(100, 300)))
    pairs = train(
        tmp_path / "pairs.tsv",
        out=tmp_path / "run",
        data={"pairs": True},
        model={"hidden_size": 8, "embedding_size": 6},
        training={"batch_size": 4, "max_updates": 2, "num_threads": 1},
    )
    with pytest.raises(ConfigError, match=r"a model of pairs .* smaller --model\.hidden-size and .* `elman eval`"):
        shrink(pairs.path, tmp_path / "small", sparsity=0.5)


def test_a_counted_model_has_no_matrices(run, tmp_path):
    counted = train(run.config().data.corpus, out=tmp_path / "run", model={"kind": "ngram"})
    with pytest.raises(ConfigError, match="'ngram' has no matrices"):
        shrink(counted.path, tmp_path / "small", sparsity=0.5)


def test_documents_are_judged_by_themselves_where_the_training_reset_there(tmp_path, tiny_text):
    (tmp_path / "text.txt").write_text(tiny_text * 4, encoding="utf-8")
    reset = train(
        tmp_path / "text.txt",
        out=tmp_path / "run",
        data={"reset_at_documents": True},
        text={"document_separator": "\n"},
        model={"hidden_size": 24, "embedding_size": 8},
        training={"batch_size": 4, "bptt": 16, "max_updates": 5, "num_threads": 1},
        sampling={"max_new_tokens": 2},
    )
    shrunk = shrink(reset.path, tmp_path / "small", rank=3)
    judged = elman.evaluate(reset.path, split="valid").evaluation
    assert judged.state_policy == "reset"
    assert shrunk.before.nats_per_token == pytest.approx(judged.score.nats_per_token, rel=1e-9)
