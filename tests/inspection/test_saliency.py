"""Attributions against what they are defined by; the horizon of models whose memory is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from elman.errors import TextError, UserError
from elman.inspection.saliency import (
    deletion,
    gradient_x_input,
    inspect_saliency,
    integrated_gradients,
    memory_horizon,
)
from elman.inspection.saliency_page import saliency_page
from elman.inspection.watching import Places, places
from elman.models.contract import CountedModel, LanguageModel
from elman.models.kinds import build_model, kind_names, model_config
from elman.models.laws import small_configs
from elman.training.run import train

VOCAB_SIZE = 6
TOKENS = np.concatenate([[0], np.random.default_rng(1).integers(1, VOCAB_SIZE, 200)])
OF_TEXT = [kind for kind in kind_names() if kind != "seq2seq"]
WITH_EMBEDDING = [kind for kind in OF_TEXT if kind != "ngram"]


def network_of(kind: str, **settings: object) -> LanguageModel:
    config = model_config({"kind": kind, **settings}) if settings else small_configs(kind)[0]
    network = build_model(config, VOCAB_SIZE, seed=1, dtype=torch.float64)
    if isinstance(network, CountedModel):
        network.count(TOKENS)
    return network


def log_prob(network: LanguageModel, place: Places, tokens: list[int]) -> float:
    with torch.no_grad():
        features_BTF, _ = network.features(torch.tensor([tokens]), place.state)
        return network.head.log_probs(features_BTF[:, -1:])[0, 0, place.targets_B[0]].item()


@pytest.mark.parametrize("kind", OF_TEXT)
def test_deletion_is_what_reading_without_a_token_gives(kind):
    network = network_of(kind)
    place = places(network, TOKENS, 4, 9).select([2])
    read = place.tokens_BT[0].tolist()
    whole = log_prob(network, place, read)
    expected = [whole - log_prob(network, place, read[:i] + read[i + 1 :]) for i in range(9)]
    assert deletion(network, place).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("kind", "settings", "reach"), [("ngram", {"order": 4}, 3), ("window", {"window_size": 3}, 3)])
def test_beyond_the_order_nothing_changes_bit_for_bit(kind, settings, reach):
    network = network_of(kind, **settings)
    for row in range(3):
        lost = deletion(network, places(network, TOKENS, 3, 12).select([row])).tolist()
        # A token that is left out moves those before it up by one, so that it counts up to the order and no further.
        assert all(value == 0.0 for value in lost[: 12 - reach])
    found = memory_horizon(network, TOKENS, threshold=0.0, max_distance=20, num_places=8)
    assert found.distances[:4] == (1, 2, 3, 4)
    assert found.mean[reach - 2] > 0
    assert all(mean == 0.0 for mean in found.mean[reach - 1 :])
    assert found.tokens == reach


@pytest.mark.parametrize("kind", WITH_EMBEDDING)
def test_integrated_gradients_sum_to_what_they_explain(kind):
    network = network_of(kind)
    place = places(network, TOKENS, 4, 6).select([1])
    added, gap = integrated_gradients(network, place)
    embedding = network.get_parameter("embedding")
    with torch.no_grad():
        embedding_before = embedding.clone()
        whole = log_prob(network, place, place.tokens_BT[0].tolist())
        # Every token of the text now looks like the mean; the state before stays as it is.
        embedding.copy_(embedding.mean(0).expand_as(embedding))
        base = log_prob(network, place, place.tokens_BT[0].tolist())
        embedding.copy_(embedding_before)
    if kind != "window":  # whose state is tokens, that would be others with another embedding
        assert added.sum().item() - gap == pytest.approx(whole - base, abs=1e-9)
    assert abs(gap) <= 1e-3 * max(1.0, abs(added.sum().item() - gap))


@pytest.mark.parametrize("kind", WITH_EMBEDDING)
def test_the_gradient_is_the_slope_of_scaling_a_token(kind):
    network = network_of(kind)
    place = places(network, TOKENS, 4, 6).select([1])
    found = gradient_x_input(network, place)
    token = place.tokens_BT[0, 3].item()
    once = (place.tokens_BT[0] == token).nonzero().flatten()
    before = (TOKENS[: place.starts[0]] == token).any() and kind == "window"
    embedding, step = network.get_parameter("embedding"), 1e-5
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            row = embedding[token].clone()
            embedding[token] *= 1 + sign * step
            sides.append(log_prob(network, place, place.tokens_BT[0].tolist()))
            embedding[token] = row
    if not before:
        slope = (sides[0] - sides[1]) / (2 * step)
        assert found[once].sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_a_network_that_looks_at_one_token_says_so():
    # The vanilla network forgets everything but the last token where its recurrent matrix is zero.
    network = network_of("elman", hidden_size=5, embedding_size=4)
    network.get_parameter("layers.0.weight_hh").data.zero_()
    place = places(network, TOKENS, 2, 7).select([1])
    added, _ = integrated_gradients(network, place)
    for found in (deletion(network, place), gradient_x_input(network, place), added):
        assert not found[:-1].abs().max() > 1e-12
        assert found[-1] != 0
    assert memory_horizon(network, TOKENS, threshold=1e-20, max_distance=10, num_places=6).tokens == 1


def test_the_horizon_of_a_network_that_fades(linear_network):
    network = linear_network([[0.5]])
    network.get_parameter("layers.0.V").data.fill_(1.0)
    network.get_parameter("embedding").data.copy_(torch.tensor([[0.0], [1.0], [-1.0]]))
    tokens = np.concatenate([[0], np.random.default_rng(3).integers(1, 3, 300)])
    found = memory_horizon(network, tokens, threshold=1e-4, max_distance=40, num_places=20)
    chosen, hidden = places(network, tokens, 20, 40), [1.0]
    for token in tokens.tolist():
        hidden.append(0.5 * hidden[-1] + (0.0, 1.0, -1.0)[token])  # after so many tokens

    def log_probs(h: float) -> torch.Tensor:
        return network.head.log_probs(torch.tensor([[[h]]], dtype=torch.float64))[0, 0]

    for distance in (1, 4, 20):
        lost = []
        for row, start in enumerate(chosen.starts):
            other = chosen.starts[(row + 10) % 20]
            end, back = start + 40, 40 - distance
            changed = hidden[end] + 0.5**distance * (hidden[other + back] - hidden[start + back])
            p, q = log_probs(hidden[end]), log_probs(changed)
            lost.append((p.exp() * (p - q)).sum().item())
        at = found.distances.index(distance)
        assert found.mean[at] == pytest.approx(np.mean(lost), rel=1e-6)
        assert found.high[at] == pytest.approx(np.quantile(lost, 0.9), rel=1e-6)
    assert found.tokens is not None
    assert found.mean[found.distances.index(found.tokens)] <= 1e-4
    assert found.mean[found.distances.index(found.tokens) - 1] > 1e-4
    assert memory_horizon(network, tokens, threshold=0.0, max_distance=5, num_places=20).tokens is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saliency")
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat; a dog saw the moon.\n" * 60, encoding="utf-8")
    settings = {"training": {"max_updates": 3, "batch_size": 4, "bptt": 16}, "sampling": {"max_new_tokens": 1}}
    return train(text, out=folder / "run", model={"hidden_size": 8, "embedding_size": 4}, **settings).path


def test_a_run_and_its_page(run):
    found = inspect_saliency(run, length=12, num_places=2, max_distance=16)
    assert (found.split, len(found.attributions)) == ("test", 2)
    for attribution in found.attributions:
        assert len(attribution.tokens) == len(attribution.deletion) == len(attribution.integrated or ()) == 12
    sizes = found.by_distance("deletion")
    assert sizes[0] == pytest.approx(np.mean([abs(one.deletion[-1]) for one in found.attributions]))
    assert set(json.loads(json.dumps(found.to_dict(), allow_nan=False))["by_distance"]) == {
        "gradient",
        "integrated",
        "deletion",
    }
    html = saliency_page(found).html()
    assert "How far back it remembers" in html
    assert html.count('class="coloured"') == 6


def test_a_prompt_is_continued(run):
    found = inspect_saliency(run, prompt="the cat sat", length=5)
    (attribution,) = found.attributions
    assert attribution.tokens == tuple("t sat")
    assert attribution.position == 12
    assert found.horizon is None
    assert inspect_saliency(run, prompt="the").attributions[0].tokens == ("<|endoftext|>", "t", "h", "e")
    assert "memory" not in saliency_page(found).html()


def test_what_has_no_meaning_is_refused(run, tmp_path):
    (tmp_path / "short.txt").write_text("the cat", encoding="utf-8")
    with pytest.raises(TextError, match="has 8 tokens, 100 in a row"):
        inspect_saliency(run, tmp_path / "short.txt")
    with pytest.raises(TextError, match="the prompt is empty"):
        inspect_saliency(run, prompt="")
    with pytest.raises(UserError, match="leave TEXT and --split out"):
        inspect_saliency(run, tmp_path / "short.txt", prompt="the")
    with pytest.raises(UserError, match="--length is 2 and more"):
        inspect_saliency(run, length=1)
    with pytest.raises(TextError, match="1 character or word that the model never saw: 'Ö'"):
        inspect_saliency(run, prompt="Ö")
    with pytest.raises(TextError, match="too few for two places"):
        memory_horizon(network_of("elman"), TOKENS[:12], max_distance=11)


def test_pairs_are_refused(tmp_path):
    (tmp_path / "pairs.tsv").write_text("ab\tba\n" * 30, encoding="utf-8")
    settings = {"training": {"max_updates": 1}, "sampling": {"max_new_tokens": 1}}
    model = {"kind": "seq2seq", "hidden_size": 4, "embedding_size": 4}
    done = train(tmp_path / "pairs.tsv", out=tmp_path / "run", data={"pairs": True}, model=model, **settings)
    with pytest.raises(UserError, match="trained on pairs"):
        inspect_saliency(done.path)
