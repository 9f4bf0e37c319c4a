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


def counted(text: str, order: int = 12, tokenizer: CharTokenizer | None = None) -> Bundle:
    tokenizer = tokenizer or CharTokenizer(text)
    network = build_model(model_config({"kind": "ngram", "order": order}), tokenizer.size, seed=1, dtype=torch.float64)
    network.count(tokens(tokenizer, text))
    return Bundle(network, tokenizer)


def tokens(tokenizer, text: str) -> np.ndarray:
    return np.concatenate([[0], tokenizer.encode(text)])


def test_what_closes_is_found_with_its_distance():
    tokenizer = CharTokenizer(TEXT)
    found = list(_closed(tokens(tokenizer, TEXT[:42]), tokenizer))
    assert [(one.opened.group, one.opened.sign, one.distance) for one in found] == [
        ("brackets", "]", 2),
        ("brackets", ")", 7),
        ("quotes", "'", 3),
        ("quotes", '"""', 4),
        ("brackets", "}", 2),
    ]
    assert [TEXT[one.position - 1] for one in found] == [one.opened.sign[0] for one in found]
    # The first of the three quotes that end a string is where it is decided.
    assert TEXT[found[3].position - 2 : found[3].position + 3] == 'c""" '


def test_a_model_that_has_learned_the_text_closes_everything():
    model = counted(TEXT)
    found = closings_along({"counts": model}, tokens(model.tokenizer, TEXT))
    quotes, brackets = found.groups
    assert (quotes.name, quotes.majority) == ("quotes", 0.5)
    assert brackets.majority == pytest.approx(1 / 3)
    assert [(one.nearest, one.farthest, one.cases) for one in brackets.by_distance] == [(1, 9, 90)]
    for one in (*quotes.by_distance, *brackets.by_distance):
        judged = one.models["counts"]
        assert judged.probability > 0.9
        assert judged.which == 1.0
        assert judged.top > 0.9


def test_a_model_without_memory_guesses_the_common_sign():
    model = counted(TEXT, order=1)
    found = closings_along({"counts": model}, tokens(model.tokenizer, TEXT))
    (at,) = found.groups[0].by_distance
    log_probs = model.network.head.log_probs(torch.zeros(1, 1, 0))[0, 0]
    single, double = (float(log_probs[model.tokenizer.encode(sign)[0]].exp()) for sign in "'\"")
    assert at.models["counts"].probability == pytest.approx((single + double) / 2)
    assert at.models["counts"].top == 0.0


LENGTHS = (3, 12, 30, 55, 120, 250, 450)
FAR = "".join(f'({"a" * length}) {"b" * 700} """{"d" * length}""" {"c" * 700}\n' for length in LENGTHS)


def test_distances_are_counted_between_edges():
    model = counted(FAR, order=4)
    found = closings_along({"counts": model}, tokens(model.tokenizer, FAR))
    edges = [(1, 9), (10, 24), (25, 49), (50, 99), (100, 199), (200, 399), (400, None)]
    for group in found.groups:
        assert [(one.nearest, one.farthest, one.cases) for one in group.by_distance] == [(*edge, 1) for edge in edges]
        assert group.by_distance[-1].words == "400 and more"
        assert group.written_on == ()


def test_models_write_on_from_where_something_is_open():
    tokenizer = CharTokenizer(FAR)
    models = {sign: counted(sign * 3000, order=2, tokenizer=tokenizer) for sign in ')"a'}
    found = closings_along(models, tokens(tokenizer, FAR), num_samples=40)
    assert [group.name for group in found.groups] == ["quotes", "brackets"]
    for group, right in zip(found.groups, '")', strict=True):
        assert [(one.distance, one.cases) for one in group.written_on] == [(50, 4), (100, 3), (200, 2), (400, 1)]
        # From 50 on, what is as long as 55 and 120 closes within 100 more; from 100 on, 120; from 200 on, 250.
        assert [one.text for one in group.written_on] == [2 / 4, 1 / 3, 1 / 2, 1.0]
        for one in group.written_on:
            assert one.models == {sign: float(sign == right) for sign in models}
    few = closings_along(models, tokens(tokenizer, FAR), num_samples=2)
    assert [one.cases for one in few.groups[0].written_on] == [2, 2, 2, 1]
    assert "had been open for so many tokens" in closings_page(few).html()
    near = closings_along(models, tokens(tokenizer, FAR[:700]), num_samples=2)
    assert [(one.cases, one.text, one.models[")"]) for one in near.groups[0].written_on] == [(0, None, None)] * 4
    assert not near.groups[0].is_open_long
    html = closings_page(near).html()
    assert f"No {near.groups[0].name} are open for 50 tokens here" in html
    assert "had been open for so many tokens" not in html


def test_a_text_that_closes_nothing_is_refused():
    model = counted(TEXT)
    with pytest.raises(UserError, match=r"no quotes and no brackets are closed .* \(looked for: ' \" ” » \) \] \}\)"):
        closings_along({"counts": model}, tokens(model.tokenizer, "f a b" * 20))
    words = WordTokenizer(["(a)", "b"])
    network = build_model(model_config({"kind": "ngram", "order": 2}), words.size, seed=1, dtype=torch.float64)
    with pytest.raises(UserError, match="characters or bytes"):
        closings_along({"counts": Bundle(network, words)}, tokens(words, "(a) b (a)"))


def test_json_and_page():
    model = counted(TEXT)
    found = closings_along({"counts": model}, tokens(model.tokenizer, TEXT))
    assert found.to_dict()["groups"][0]["by_distance"][0]["cases"] == 60
    assert found.to_dict()["models"] == {"counts": "ngram"}
    html = closings_page(found).html()
    assert "1 to 9" in html
    assert "fewer than" not in html


def test_few_cases_are_marked():
    model = counted(TEXT)
    html = closings_page(closings_along({"counts": model}, tokens(model.tokenizer, TEXT[:42]))).html()
    assert "1 to 9*" in html
    assert "*: of fewer than 10 cases" in html
