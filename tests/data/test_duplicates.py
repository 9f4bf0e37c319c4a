"""Duplicates: windows and shingles against sets in plain Python, and what goes, what stays and what is said."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.data.duplicates import (
    Deduplicated,
    Duplicates,
    WindowStream,
    code_points,
    find_duplicates,
    window_hashes,
    without_duplicates,
)
from elman.errors import UserError
from elman.text.sources import Corpus, Piece, Source

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "islet", "jetty", "knoll", "ledge"]


def document(seed: int, num_words: int = 120) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words)) + "."


def shingles(text: str) -> set[str]:
    text = re.sub(r"\s+", " ", text.lower())
    return {text[i : i + 9] for i in range(len(text) - 8)} or {text}


def jaccard(one: str, other: str) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def found_in(*texts: str, **options) -> Duplicates:
    return find_duplicates({"all": [Piece(text, True) for text in texts]}, **options)


@given(st.text("ab", max_size=60), st.sampled_from([1, 2, 3, 5, 9, 50]))
def test_windows_are_equal_where_their_texts_are(text: str, size: int):
    hashes = window_hashes(code_points(text), size).tolist()
    windows = [text[i : i + size] for i in range(len(text) - size + 1)]
    assert len(hashes) == len(windows)
    assert len(set(hashes)) == len(set(windows))
    assert len(set(zip(hashes, windows, strict=True))) == len(set(windows))


@given(st.text("abc", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_a_stream_gives_the_same_windows_wherever_it_is_cut(text: str, cuts: list[int]):
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    stream = WindowStream(5)
    pieces = [stream.add(text[start:end]) for start, end in pairwise(places)]
    expected = window_hashes(code_points(text), 5) if len(text) >= 5 else np.empty(0, np.uint64)
    assert np.array_equal(np.concatenate([np.empty(0, np.uint64), *pieces]), expected)


def test_equal_and_nearly_equal_documents_go_and_others_stay():
    first, second = document(1), document(2)
    changed = first.replace("amber", "AMBER", 2).replace(" ", "  ", 3)  # capitals and white space do not count
    edited = first.replace(first.split()[60], "wholly", 1)
    half = first[: len(first) // 2] + second[len(second) // 2 :]
    assert jaccard(first, edited) > 0.85
    assert jaccard(first, half) < 0.6
    found = found_in(first, second, first, changed, half, edited, second)
    assert found.original_D.tolist() == [-1, -1, 0, 0, -1, 0, 1]
    assert found.is_exact_D.tolist() == [False, False, True, False, False, False, True]
    assert found.similarity_D[[2, 3, 6]].tolist() == [1.0, 1.0, 1.0]
    assert found.num_chars_D.tolist() == [len(t) for t in (first, second, first, changed, half, edited, second)]


def test_similarity_is_that_of_the_sets_of_shingles():
    base = document(5, 200).split()
    texts = [" ".join(base)]
    for shift in range(1, 30):
        edited = list(base)
        for place in random.Random(shift).sample(range(len(base)), shift // 3 + 1):
            edited[place] = "zephyr"
        texts.append(" ".join(edited))
    found = found_in(*texts, threshold=0.5)
    errors = []
    for number in range(1, 30):
        original = found.original_D[number]
        if original >= 0:
            errors.append(found.similarity_D[number] - jaccard(texts[original], texts[number]))
    assert len(errors) > 20
    assert abs(np.mean(errors)) < 0.02
    assert np.max(np.abs(errors)) < 0.15  # four standard deviations


def test_a_document_goes_only_if_one_that_stays_is_like_it():
    # A chain in which neighbours are alike and the ends are not.
    base = document(7, 150).split()
    chain = [" ".join(base[shift : shift + 100]) for shift in range(0, 50, 5)]
    found = found_in(*chain, threshold=0.8)
    stays = np.flatnonzero(found.original_D < 0)
    assert 2 < len(stays) < len(chain)
    for number, original in enumerate(found.original_D.tolist()):
        if original >= 0:
            assert original in stays
            assert jaccard(chain[original], chain[number]) > 0.68


def test_short_documents_are_alike_if_they_are_equal():
    found = found_in("yes", "no", "Yes", "yes", "", "a b", "a  b")
    assert found.original_D.tolist() == [-1, -1, 0, 0, -1, -1, 5]
    assert found.is_exact_D.tolist() == [False, False, False, True, False, False, False]


def test_pieces_of_a_document_change_nothing():
    texts = [document(seed, 60) for seed in (1, 2, 1)]
    cut = [Piece(text[i : i + 11], i == 0) for text in texts for i in range(0, len(text), 11)]
    whole, pieces = found_in(*texts), find_duplicates({"all": cut})
    for one, other in zip(vars(whole).values(), vars(pieces).values(), strict=True):
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def test_many_equal_documents_are_one():
    found = found_in(*[document(3)] * 40, document(4))
    assert found.original_D.tolist() == [-1] + [0] * 39 + [-1]


@pytest.mark.parametrize("texts", [[], ["only one"]])
def test_less_than_two_documents_have_no_duplicates(texts: list[str]):
    assert found_in(*texts).original_D.tolist() == [-1] * len(texts)


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.5, float("nan")])
def test_a_similarity_that_is_none_is_refused(threshold: float):
    with pytest.raises(UserError, match="above 0 and up to 1"):
        found_in("a", "b", threshold=threshold)


class Documents(Source):
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def pieces(self):
        return iter([Piece(text, True) for text in self.texts])


def left_of(found: Deduplicated) -> dict[str, list[str]]:
    return {name: [piece.text for piece in source.pieces()] for name, source in found.corpus.parts.items()}


def test_what_goes_is_said_and_what_stays_can_be_read_again_and_again():
    texts = [document(1), "quotes and \n lines 猫", document(1), document(2)]
    found = without_duplicates(Corpus("mine", {"all": Documents(texts)}))
    for _ in range(2):
        assert left_of(found) == {"all": [texts[0], texts[1], texts[3]]}
    (gone,) = found.repeated
    assert (gone.part, gone.document, gone.of_part, gone.of_document) == ("all", 2, "all", 0)
    assert (gone.exact, gone.similarity, gone.begins) == (True, 1.0, texts[2][:60])
    part = found.parts["all"]
    assert (part.documents, part.exact, part.near, part.chars_left_out) == (4, 1, 0, len(texts[2]))
    assert found.corpus.parts["all"].report() == [
        "1 of 4 documents left out that are equal to others, and 0 that are nearly so"
    ]
    assert json.loads(json.dumps(found.to_dict()))["repeated"][0]["exact"] is True


def test_a_long_document_that_goes_takes_all_of_its_pieces_along():
    class Pieces(Source):
        def pieces(self):
            texts = [document(seed, 60) for seed in (1, 2, 1, 3)]
            return iter([Piece(text[i : i + 50], i == 0) for text in texts for i in range(0, len(text), 50)])

    found = without_duplicates(Corpus("mine", {"all": Pieces()}))
    assert "".join(left_of(found)["all"]) == "".join(document(seed, 60) for seed in (1, 2, 3))


def test_held_out_parts_stay_and_the_training_part_gives_way():
    shared, twice = document(1), document(2)
    parts = {
        "train": [document(3), shared, document(4), twice],
        "valid": [twice, document(5), twice],
        "test": [shared, document(6)],
    }
    found = without_duplicates(Corpus("mine", {name: Documents(texts) for name, texts in parts.items()}))
    assert left_of(found) == parts | {"train": [document(3), document(4)]}
    assert {(one.part, one.document, one.of_part, one.of_document) for one in found.repeated} == {
        ("train", 1, "test", 0),
        ("train", 3, "valid", 0),
    }
    assert found.corpus.parts["valid"].report() == []


def test_of_a_text_of_one_document_it_is_said_how_to_cut_it_up():
    found = without_duplicates(Corpus("mine", {"all": Documents(["line one\nline two\n"])}))
    assert "document_separator" in found.corpus.parts["all"].report()[0]
