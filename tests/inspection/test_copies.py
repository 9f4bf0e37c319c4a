"""Copies: the suffix automaton against a search of every piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.errors import TextError
from elman.inspection.copies import Copied, copies_in, find_copies


def longest_by_search(sample: str, documents: list[str]) -> int:
    pieces = (sample[i:j] for i in range(len(sample)) for j in range(i + 1, len(sample) + 1))
    return max((len(piece) for piece in pieces if any(piece in text for text in documents)), default=0)


@given(st.text("ab", max_size=18), st.lists(st.text("abc", max_size=25), min_size=1, max_size=3))
def test_the_longest_piece_is_that_of_a_search(sample: str, documents: list[str]):
    if not any(documents):
        return
    texts: list[str | None] = []
    for text in documents:
        texts += [None, text[:7], text[7:]]
    (found,) = copies_in([sample], texts)
    assert found.longest == longest_by_search(sample, documents)
    assert len(found.text) == found.longest
    assert sample[found.start : found.start + found.longest] == found.text
    assert any(found.text in text for text in documents)
    assert sample[: found.start + found.longest - 1].find(found.text) in (-1, found.start)


def test_share_counts_every_long_piece_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("elman.inspection.copies.MIN_COPIED", 4)
    corpus = ["the cat sat on the mat", "dogs bark"]
    sample = "xxthe cat sxxdogs barkx the cat sxx"
    (found,) = copies_in([sample], [None, corpus[0], None, corpus[1]])
    covered = set()
    for start in range(len(sample)):
        for end in range(start + 4, len(sample) + 1):
            if any(sample[start:end] in text for text in corpus):
                covered |= set(range(start, end))
    assert found.share == pytest.approx(len(covered) / len(sample))
    assert (found.text, found.is_copied) == ("the cat s", True)


def test_samples_are_judged_each_by_itself_and_a_border_is_no_text():
    long = "it was the best of times, it was the worst of times, it was the age"
    found = copies_in([long[5:60], "zzz", "", "of timesit was"], [None, long, None, "it was"])
    assert [one.longest for one in found] == [55, 0, 0, len("of times")]
    assert [one.is_copied for one in found] == [True, False, False, False]
    assert found[0].share == 1.0
    assert found[1] == Copied("", 0, 0, 0.0)
    assert found[0].to_dict()["copied"] is True


def test_a_corpus_is_found_by_its_file_and_an_empty_one_missed(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("a dog saw the moon", encoding="utf-8")
    assert find_copies(["the dog saw the cat"], file)[0].text == " dog saw the "
    for part, text in {"train": "a cat", "valid": "the dog saw the cat"}.items():
        (tmp_path / f"{part}.txt").write_text(text, encoding="utf-8")
    file.unlink()
    assert find_copies(["the dog saw the cat"], tmp_path)[0].text == " cat"
    (tmp_path / "train.txt").write_text("", encoding="utf-8")
    with pytest.raises(TextError, match="is empty"):
        find_copies(["a"], tmp_path)
