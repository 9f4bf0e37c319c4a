"""Neighbours of planted vectors; what a network shares between words and an n-gram cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elman.errors import UserError
from elman.inspection import embeddings_page as embeddings_page_module
from elman.inspection.embeddings import Point, look_at_embeddings
from elman.inspection.embeddings_page import embeddings_page
from elman.inspection.sharing import measure_sharing, sharing_text
from elman.models.file import Bundle
from elman.models.kinds import build_model, model_config
from elman.text.tokenizers import CharTokenizer, WordTokenizer


def bundle(kind: str = "lstm", tokenizer=None) -> Bundle:
    tokenizer = tokenizer or WordTokenizer(["cat", "dog", "cup", "mug", "$x$"])
    size = {} if kind == "ngram" else {"hidden_size": 4, "embedding_size": 3}
    network = build_model(model_config({"kind": kind, **size}), tokenizer.size, seed=1, dtype=torch.float32)
    return Bundle(network, tokenizer)


@pytest.mark.parametrize("kind", ["lstm", "window"])
def test_the_neighbours_are_those_that_point_the_same_way(kind):
    model = bundle(kind)
    with torch.no_grad():
        model.network.embedding[3:] = torch.tensor(
            [[1, 0, 0.1], [9, 0, 0], [0, 1, 0], [0, 2, 0.2], [-1, 0, 0.0]], dtype=torch.float32
        )
    found = look_at_embeddings(model, ["cat", "mug"])
    cat, mug = found.neighbours
    assert (cat.token, cat.nearest[0][0], cat.nearest[-1][0]) == ("cat", "dog", "$x$")
    assert cat.nearest[0][1] == pytest.approx(1 / 1.01**0.5)
    assert mug.nearest[0][0] == "cup"
    places = {point.token: (point.x, point.y) for point in found.points}
    assert abs(places["dog"][0] - places["$x$"][0]) > abs(places["cup"][0] - places["mug"][0])
    assert sum(found.explained) <= 1 + 1e-9
    assert "cup" in embeddings_page(found).html()


def test_characters_are_told_apart_on_the_map():
    found = look_at_embeddings(bundle(tokenizer=CharTokenizer("aBz1 \n.")))
    kinds = {point.token: point.what for point in found.points}
    assert kinds == {
        "\n": "space",
        " ": "space",
        ".": "sign",
        "1": "digit",
        "B": "capital",
        "a": "vowel",
        "z": "consonant",
    }


def test_names_on_the_map_do_not_cover_each_other():
    rng = np.random.default_rng(1)
    tokens = [*"abcdefghij", *("long" * length for length in range(1, 5)), ".", "'"]
    for spread in (0.02, 1.0):
        spots = [*(spread * rng.standard_normal((len(tokens), 2))).tolist(), (-3.0, -3.0), (3.0, 3.0)]
        points = [Point(token, "sign", *spot) for token, spot in zip([*tokens, "<", ">"], spots, strict=True)]
        across, up = (max(one) - min(one) for one in zip(*spots, strict=True))
        names = embeddings_page_module._with_room(points)
        assert {"<", ">"} <= {point.token for point in names}
        boxes = []
        for point, (x, y) in names.items():
            wide = len(point.token) * embeddings_page_module._LETTER * across / 2
            high = embeddings_page_module._LINE * up / 2
            assert abs(x - point.x) <= 0.02 * across + 1.01 * wide + (point.token in ".'") * across
            assert not any(abs(x - other.x) < wide and abs(y - other.y) < high for other in points)
            boxes.append((x, y, wide, high))
        for index, (x, y, wide, high) in enumerate(boxes):
            for other_x, other_y, other_wide, other_high in boxes[:index]:
                assert abs(x - other_x) >= 0.99 * (wide + other_wide) or abs(y - other_y) >= 0.99 * (high + other_high)
        assert (len(names) < len(points)) == (spread < 1)


def test_signs_of_a_dot_are_named_in_quotes():
    found = look_at_embeddings(bundle(tokenizer=CharTokenizer("ab.,!")))
    html = embeddings_page(found).html()
    for name in ("“.”", "“,”", ">!<", ">a<"):
        assert name in html


@pytest.mark.parametrize(("kind", "word"), [("ngram", "cat"), ("lstm", "horse"), ("lstm", "cat dog")])
def test_what_has_no_vector_is_refused(kind, word):
    with pytest.raises(UserError):
        look_at_embeddings(bundle(kind), [word])


def test_the_two_texts_differ_in_what_was_done_alone():
    sat, fell = (sharing_text(cats).splitlines() for cats in ("sat", "fell"))
    assert len(sat) == len(fell) == 1100
    different = {(one, other) for one, other in zip(sat, fell, strict=True) if one != other}
    assert {one.split()[1] for one, _ in different} == {"cat", "dog", "cup", "lamp"}
    assert not any("kitten sat" in line or "kitten fell" in line for line in (*sat, *fell))


def test_an_ngram_shares_nothing_and_a_network_does():
    counted = measure_sharing("ngram")
    assert counted.after_cats_sat == counted.after_cats_fell
    learned = measure_sharing("window")
    assert learned.ratio > 2
