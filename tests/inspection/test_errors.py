"""Errors sorted by causes that are known, and two models that differ where they must."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from elman.errors import UserError
from elman.inspection.errors import _repeats, _Words, compare_along, compare_models, errors_along
from elman.inspection.errors_page import compared_page, failures_page
from elman.inspection.predictions import predictions, surprisals
from elman.models.file import Bundle, save_model
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer


def prose(seed: int, num_words: int) -> str:
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 6))) for _ in range(60)]
    return " ".join(random.Random(seed + 1).choices(words, k=num_words)) + "."


TRAIN, TEXT = prose(1, 900), prose(1, 300)
TOKENIZER = CharTokenizer("abcdefgh .")


def tokens(text: str) -> np.ndarray:
    return np.concatenate([[0], TOKENIZER.encode(text)])


def counted(order: int) -> Bundle:
    network = build_model(model_config({"kind": "ngram", "order": order}), TOKENIZER.size, seed=1, dtype=torch.float64)
    network.count(tokens(TRAIN))
    return Bundle(network, TOKENIZER)


def neural() -> Bundle:
    config = model_config({"kind": "gru", "hidden_size": 8, "embedding_size": 4})
    return Bundle(build_model(config, TOKENIZER.size, seed=1, dtype=torch.float32), TOKENIZER)


@pytest.mark.parametrize("model", [counted(3), neural()], ids=["ngram", "gru"])
def test_predictions_and_surprisals_are_those_of_one_pass(model):
    ids = tokens(TEXT)
    with torch.no_grad():
        features, _ = model.network.features(torch.from_numpy(ids[None, :-1]), model.network.initial_state(1))
        log_probs = model.network.head.log_probs(features)[0]
    expected = -log_probs[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:])]
    assert surprisals(model.network, ids) == pytest.approx(expected.numpy(), abs=1e-4)
    pieces = list(predictions(model.network, ids))
    assert len(pieces) > 1
    assert torch.cat([piece.log_probs_TV for piece in pieces]).numpy() == pytest.approx(log_probs.numpy(), abs=1e-4)
    assert [piece.start for piece in pieces] == list(range(1, len(ids), 1024))


def test_every_error_has_one_cause():
    found = errors_along(neural(), tokens(TEXT), tokens(TRAIN), order=4)
    assert sum(cause.errors for cause in found.causes) == found.errors > 0
    assert sum(cause.share for cause in found.causes) == pytest.approx(1)
    assert all(cause.errors <= cause.alone for cause in found.causes)
    assert found.causes[0].errors == found.causes[0].alone > 0  # the words repeat themselves: n-grams know them
    assert found.causes[-1].alone == found.errors
    assert found.nats_per_token == pytest.approx(float(surprisals(neural().network, tokens(TEXT)).mean()), rel=1e-5)


def test_an_ngram_is_not_helped_by_an_oracle_of_its_own_order():
    found = errors_along(counted(1), tokens(TEXT), tokens(TRAIN), order=1)
    assert found.causes[0].errors == 0
    helped = errors_along(counted(1), tokens(TEXT), tokens(TRAIN), order=5)
    assert helped.causes[0].share > 0.5


def test_a_longer_memory_helps_where_a_text_repeats_itself():
    once = "".join(random.Random(3).choices("abcdefgh", k=300))
    found = errors_along(neural(), tokens(once + once), tokens(TRAIN), order=1)
    by_name = {cause.name: cause for cause in found.causes}
    assert by_name["memory 100"].errors < 10
    assert 280 < by_name["memory 1,000"].errors <= 300


def test_the_memory_is_that_of_a_search_by_hand():
    rng = np.random.default_rng(1)
    ids = rng.integers(1, 4, 300)
    expected = []
    for end in range(1, len(ids)):
        before = [e for e in range(4, end) if end >= 4 and (ids[e - 4 : e] == ids[end - 4 : end]).all()]
        expected.append(bool(before) and end - before[-1] <= 50 and ids[before[-1]] == ids[end])
    assert _repeats(ids, 50, 4).tolist() == expected
    assert any(expected)


def test_words_of_tokens_of_any_length():
    words = _Words(["", "to", " be", "_", "2", ", ", "or"])
    assert words.words == ["to", "be_2", "be_2", "be_2", "", "or"]
    assert words.begins.tolist() == [True, True, False, False, False, True]
    train = tokens(TRAIN + " hhhhh")
    rare = _Words(["", *TRAIN[:50], *" hhhhh"]).rare(train, TOKENIZER)
    assert not rare[:40].any()
    assert rare[-5:].all()


def test_a_better_model_is_ahead_and_the_interval_says_so():
    first, second = counted(4), counted(1)
    found = compare_along(first, second, tokens(TEXT))
    assert found.first_nats < found.second_nats
    assert found.difference_interval[1] < 0
    assert found.difference_interval[0] <= found.first_nats - found.second_nats <= found.difference_interval[1]
    ids = tokens(TEXT)
    gain = surprisals(second.network, ids) - surprisals(first.network, ids)
    top = found.first_ahead[0]
    assert top.position == int(gain.argmax()) + 1
    assert top.second_nats - top.first_nats == pytest.approx(gain.max(), rel=1e-5)
    assert top.before.endswith(TEXT[: top.position - 1][-60:])
    assert top.at == TEXT[top.position - 1]
    assert sum(kind.tokens for kind in found.kinds) == found.tokens == len(TEXT)
    mean = sum(kind.tokens * kind.first_nats for kind in found.kinds) / found.tokens
    assert mean == pytest.approx(found.first_nats)
    assert found.first_better == pytest.approx((gain > 0).mean())


def test_each_place_of_a_difference_has_a_context_of_its_own():
    found = compare_along(counted(4), counted(1), tokens(TEXT * 3))
    for places in (found.first_ahead, found.second_ahead):
        assert len(places) > 1
        assert len({(place.before[-3:], place.at) for place in places}) == len(places)


def test_all_tokens_are_a_kind_of_their_own():
    found = compare_along(counted(4), counted(1), tokens(TEXT))
    assert found.whole.tokens == found.tokens
    assert found.whole.difference == pytest.approx(
        sum(kind.tokens * kind.difference for kind in found.kinds) / found.tokens
    )
    assert found.verdict == "the first is better"
    html = compared_page(found).html()
    assert ">all<" in html
    assert f"{found.first_better:.1%}" in html


def test_a_model_does_not_differ_from_itself():
    found = compare_along(counted(3), counted(3), tokens(TEXT))
    assert found.difference_interval == (0.0, 0.0)
    assert found.first_ahead == found.second_ahead == ()
    assert "no difference" in compared_page(found).html()


def test_models_of_other_tokens_cannot_be_compared_token_by_token(tmp_path):
    other = CharTokenizer("abc")
    network = build_model(model_config({"kind": "gru", "hidden_size": 4}), other.size, seed=1, dtype=torch.float32)
    save_model(tmp_path / "a.safetensors", neural())
    save_model(tmp_path / "b.safetensors", Bundle(network, other))
    with pytest.raises(UserError, match="different tokens"):
        compare_models(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "stdlib-prose")


def test_json_and_pages():
    found = errors_along(neural(), tokens(TEXT), tokens(TRAIN), order=2)
    assert found.to_dict()["causes"][0]["name"] == "n-gram"
    assert "word start" in failures_page(found).html()
    compared = compare_along(counted(4), neural(), tokens(TEXT))
    assert compared.to_dict()["tokens"] == len(TEXT)
    assert "the first is better" in compared_page(compared).html()
