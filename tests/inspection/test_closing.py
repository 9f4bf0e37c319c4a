"""Closings found by hand, and judged by a model that counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elman.errors import UserError
from elman.inspection.closing import _closed, closings_along
from elman.inspection.closing_page import closings_page
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer, WordTokenizer

TEXT = 'f(a, [b]) \'xy\' """doc""" (x] {y} # (no)\n' * 30


def counted(text: str, order: int = 12) -> Bundle:
    tokenizer = CharTokenizer(text)
    network = build_model(model_config({"kind": "ngram", "order": order}), tokenizer.size, seed=1, dtype=torch.float64)
    network.count(tokens(tokenizer, text))
    return Bundle(network, tokenizer)


def tokens(tokenizer, text: str) -> np.ndarray:
    return np.concatenate([[0], tokenizer.encode(text)])


def test_what_closes_is_found_with_its_distance():
    tokenizer = CharTokenizer(TEXT)
    found = list(_closed(tokens(tokenizer, TEXT[:42]), tokenizer))
    assert [(one.group, one.sign, one.distance) for one in found] == [
        ("brackets", "]", 2),
        ("brackets", ")", 7),
        ("quotes", "'", 3),
        ("brackets", "}", 2),
    ]
    assert [TEXT[one.position - 1] for one in found] == [one.sign for one in found]


def test_a_model_that_has_learned_the_text_closes_everything():
    model = counted(TEXT)
    found = closings_along(model, tokens(model.tokenizer, TEXT))
    quotes, brackets = found.groups
    assert (quotes.name, quotes.majority) == ("quotes", 1.0)
    assert brackets.majority == pytest.approx(1 / 3)
    assert [(one.nearest, one.farthest, one.cases) for one in brackets.by_distance] == [(2, 3, 60), (4, 7, 30)]
    for one in (*quotes.by_distance, *brackets.by_distance):
        assert one.probability > 0.9
        assert one.which == 1.0
        assert one.top > 0.9


def test_a_model_without_memory_guesses_the_common_sign():
    model = counted(TEXT, order=1)
    found = closings_along(model, tokens(model.tokenizer, TEXT))
    (at,) = found.groups[0].by_distance
    log_probs = model.network.head.log_probs(torch.zeros(1, 1, 0))[0, 0]
    assert at.probability == pytest.approx(float(log_probs[model.tokenizer.encode("'")[0]].exp()))
    assert at.top == 0.0


def test_a_text_that_closes_nothing_is_refused():
    model = counted(TEXT)
    with pytest.raises(UserError, match="no quotes and no brackets"):
        closings_along(model, tokens(model.tokenizer, "f a b" * 20))
    words = WordTokenizer(["(a)", "b"])
    network = build_model(model_config({"kind": "ngram", "order": 2}), words.size, seed=1, dtype=torch.float64)
    with pytest.raises(UserError, match="characters or bytes"):
        closings_along(Bundle(network, words), tokens(words, "(a) b (a)"))


def test_json_and_page():
    model = counted(TEXT)
    found = closings_along(model, tokens(model.tokenizer, TEXT))
    assert found.to_dict()["groups"][0]["by_distance"][0]["cases"] == 30
    assert "2 to 3" in closings_page(found).html()
