"""Decoded texts and their words, whatever the pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elman.config import TokenizerConfig
from elman.data import texts as texts_module
from elman.data.prepare import tokenize_text
from elman.data.texts import count_words, texts_of
from elman.text.building import train_tokenizer
from elman.text.sources import Piece


@given(st.text("ab \n\t", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_words_are_counted_once_wherever_the_text_is_cut(text: str, cuts: list[int]):
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert count_words(pieces) == len(text.split())


def test_a_word_ends_where_a_document_ends():
    assert count_words(["one tw", "o", None, "", "three"]) == 3
    assert count_words(["one", "two"]) == 1
    assert count_words([]) == 0


@pytest.mark.parametrize("level", ["char", "byte", "bpe"])
def test_documents_come_back_as_they_were(level: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(texts_module, "_TOKENS_AT_ONCE", 7)
    documents = ["the cat sat.\n", "Größe 猫\n\nand more", "x"]
    tokenizer = train_tokenizer(TokenizerConfig(level=level), [Piece(text, True) for text in documents])
    ids = np.concatenate(list(tokenizer.encode_pieces([Piece(text, True) for text in documents])))
    found, pieces = [""], list(texts_of(ids, tokenizer))
    for piece in pieces:
        if piece is None:
            found.append("")
        else:
            found[-1] += piece
    assert found == documents
    assert list(texts_of(tokenize_text("", tokenizer).tokens, tokenizer)) in ([""], ["", ""])
