"""Round trips, independence of cuts, vocabularies, untrusted dictionaries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elman
from elman.config import TokenizerConfig
from elman.errors import ConfigError, ModelFileError, TextError
from elman.text import bpe as bpe_module
from elman.text import tokenizers as module
from elman.text.building import tokenizer_from_dict, train_tokenizer
from elman.text.sources import Piece
from elman.text.tokenizers import (
    BOUNDARY,
    END_OF_LINE,
    UNKNOWN,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
)

SAMPLE = "the cat sat on the mat.\nthe dog, the log: ÄÖ né 漢字 👩\u200d👧\n\n  two  spaces\tand a tab\r\n" * 20
LEVELS = ("char", "byte", "word", "bpe")


def trained(level: str, text: str = SAMPLE, **settings: object) -> Tokenizer:
    return train_tokenizer(TokenizerConfig(level=level, **settings), [Piece(text, True)])


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return trained("bpe", max_size=400)


@pytest.fixture(scope="module")
def every(bpe: Tokenizer) -> dict[str, Tokenizer]:
    return {"bpe": bpe, **{level: trained(level) for level in LEVELS if level != "bpe"}}


# Text that is likely to meet the rules: white space, line ends, specials, what the vocabulary holds, anything else.
texts = st.lists(
    st.one_of(
        st.sampled_from(
            [" ", "\n", "\r\n", "\t", "the", "cat", "é", BOUNDARY, UNKNOWN, END_OF_LINE, "\u2028", "Ġ", "\x00"]
        ),
        st.text(max_size=6),
    ),
    max_size=20,
).map("".join)


@given(texts)
def test_round_trip_is_exact_for_char_byte_and_bpe(every, text):
    assert CharTokenizer(text).decode(CharTokenizer(text).encode(text)) == text
    for level in ("byte", "bpe"):
        ids = every[level].encode(text)
        assert every[level].decode(ids) == text
        assert every[level].boundary_id not in ids


@given(texts)
def test_words_decode_to_the_text_with_white_space_normalised(text):
    # Written from the definition: lines end at LF, words are what str.split gives.
    normalised = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    words = set(text.split()) - {BOUNDARY, UNKNOWN, END_OF_LINE}
    tokenizer = WordTokenizer(sorted(words))
    expected = " ".join(
        UNKNOWN if w in (BOUNDARY, END_OF_LINE) else w for w in normalised.replace("\n", " \n ").split(" ")
    )
    expected = expected.replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n")
    assert tokenizer.decode(tokenizer.encode(text, unknown="token")) == expected


@given(st.text(st.sampled_from("ab \n"), max_size=30))
def test_words_follow_the_example_of_pytorch_line_by_line(text):
    text += "\n"
    expected = [word for line in text.splitlines() for word in [*line.split(), END_OF_LINE]]
    tokenizer = WordTokenizer(sorted(set(text.split())))
    assert [tokenizer.vocabulary[i] for i in tokenizer.encode(text)] == expected


def test_a_last_line_without_a_line_feed_has_no_end_of_line():
    tokenizer = WordTokenizer(["a", "b"])
    assert tokenizer.encode("a b\na").tolist() == [3, 4, 2, 3]
    assert tokenizer.encode("a b\na\n").tolist() == [3, 4, 2, 3, 2]


def pieces_of(documents: list[str], cuts: list[int]) -> list[Piece]:
    pieces = []
    for document in documents:
        ends = sorted({min(cut, len(document)) for cut in cuts} | {len(document)})
        starts = [0, *ends[:-1]]
        parts = [document[a:b] for a, b in zip(starts, ends, strict=True) if a < b]
        pieces += [Piece(part, i == 0) for i, part in enumerate(parts)]
    return pieces


@given(st.lists(texts.filter(bool), min_size=1, max_size=3), st.lists(st.integers(0, 60), max_size=8))
def test_ids_do_not_depend_on_where_pieces_are_cut(every, documents, cuts):
    with pytest.MonkeyPatch.context() as patch:  # so short that every text has several chunks and batches
        patch.setattr(bpe_module, "_CHUNK", 5)
        patch.setattr(module, "_BATCH", 7)
        for tokenizer in every.values():
            whole = [[tokenizer.boundary_id, *tokenizer.encode(d, unknown="token")] for d in documents]
            in_pieces = list(tokenizer.encode_pieces(pieces_of(documents, cuts)))
            assert np.concatenate(in_pieces).tolist() == np.concatenate(whole).tolist()


@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_bytes_decode_the_same_at_once_and_one_by_one(every, ids):
    for level in ("byte", "bpe"):
        decoder = every[level].decoder()
        said = [decoder.feed(token) for token in ids]
        assert "".join(said) + decoder.flush() == every[level].decode(ids)
    plain = bytes(i for i in ids if i < 256)
    assert every["byte"].decode([i for i in ids if i < 256]) == plain.decode("utf-8", "replace")


def test_an_incremental_decoder_holds_back_half_a_character(every):
    for level in ("byte", "bpe"):
        decoder = every[level].decoder()
        said = [decoder.feed(i) for i in every[level].encode("\U0010fffe")]
        assert len(said) > 1
        assert said == [""] * (len(said) - 1) + ["\U0010fffe"]
        assert decoder.flush() == ""


def test_byte_ids_are_the_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé\n").tolist() == list("aé\n".encode())
    raw = bytes(range(256)).decode("utf-8", "surrogateescape")
    assert tokenizer.encode(raw).tolist() == list(range(256))
    assert (tokenizer.size, tokenizer.boundary_id) == (257, 256)


@pytest.mark.parametrize("level", LEVELS)
def test_the_name_of_the_boundary_in_a_text_is_not_the_boundary(level):
    text = f"a {BOUNDARY} b{BOUNDARY}\n"
    tokenizer = trained(level, text * 30, **({"max_size": 300} if level == "bpe" else {}))
    ids = tokenizer.encode(text, unknown="token")
    assert tokenizer.boundary_id not in ids
    if level != "word":
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.boundary_id]) == BOUNDARY


def test_characters_are_ordered_by_code_point_after_the_specials():
    tokenizer = trained("char", "bca\nÄ漢a")
    assert tokenizer.vocabulary == (BOUNDARY, UNKNOWN, "\n", "a", "b", "c", "Ä", "漢")
    assert tokenizer.encode("a漢").tolist() == [3, 7]


def test_three_thousand_characters_of_any_plane_have_ids_of_their_own():
    text = "".join(chr(0x4E00 + i) for i in range(2900)) + "".join(chr(0x1F300 + i) for i in range(100))
    tokenizer = trained("char", text)
    assert tokenizer.size == 3002
    assert tokenizer.encode(text).tolist() == [*range(2, 3002)]


def test_rare_characters_and_the_rest_beyond_max_size_are_unknown():
    text = "aaabbc"
    assert trained("char", text, min_count=2).vocabulary[2:] == ("a", "b")
    assert trained("char", text, max_size=3).vocabulary[2:] == ("a",)
    assert trained("char", "ba", max_size=3).vocabulary[2:] == ("a",)  # equals by code point
    with pytest.raises(ConfigError, match="at least 3"):
        trained("char", text, max_size=2)


def test_words_are_ordered_by_count_then_text_and_unk_is_the_token_itself():
    text = f"b b a c {UNKNOWN} {UNKNOWN} {UNKNOWN}\nz z z\n"
    tokenizer = trained("word", text)
    assert tokenizer.vocabulary == (BOUNDARY, UNKNOWN, END_OF_LINE, "z", "b", "a", "c")
    assert tokenizer.encode(f"a {UNKNOWN}").tolist() == [5, 1]
    assert trained("word", text, min_count=2).vocabulary[3:] == ("z", "b")
    assert trained("word", text, max_size=4).vocabulary[3:] == ("z",)
    assert not tokenizer.lossless


@pytest.mark.parametrize(
    ("level", "text", "missing"), [("char", "xay", ["x", "y"]), ("word", "a xx yy a", ["xx", "yy"])]
)
def test_unknown_text_is_refused_by_name_or_read_or_skipped(level, text, missing):
    tokenizer = trained(level, "a a\n")
    assert tokenizer.unknown_characters(text) == [*missing, *([" "] if " " in missing else [])]
    with pytest.raises(TextError, match=f"lacks 2 .*{missing[0]!r}, {missing[1]!r}.*--unknown skip"):
        tokenizer.encode(text)
    kept = tokenizer.encode(text, unknown="token").tolist()
    assert kept.count(tokenizer.unknown_id) == 2
    assert tokenizer.encode(text, unknown="skip").tolist() == [i for i in kept if i != tokenizer.unknown_id]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ids", [[-1], [10**6], [0, 1, -5]])
def test_ids_outside_of_the_vocabulary_are_refused(every, level, ids):
    with pytest.raises(TextError, match="ids must lie in 0"):
        every[level].decode(ids)


def test_empty_text(every):
    for tokenizer in every.values():
        ids = tokenizer.encode("")
        assert (ids.size, ids.dtype) == (0, np.int64)
        assert tokenizer.decode([]) == ""


def test_a_lone_surrogate_is_an_error_and_no_crash(every):
    for tokenizer in every.values():
        with pytest.raises(TextError):
            tokenizer.encode("\ud800")


def test_text_without_white_space_is_refused_at_word_level(monkeypatch):
    monkeypatch.setattr(module, "_MAX_WORD_LENGTH", 100)
    with pytest.raises(TextError, match="no white space"):
        trained("word", "x" * 200)


def test_vocabularies_do_not_depend_on_the_process():
    code = (
        "import json; from elman.config import TokenizerConfig as C; from elman.text.sources import Piece;"
        "from elman.text.building import train_tokenizer as t; text = 'the cat sat on a mat, a dog lay. é漢' * 9;"
        "print(json.dumps([t(C(level=l), [Piece(text, True)]).to_dict() for l in ('char', 'word', 'bpe')]))"
    )
    said = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(elman.__file__).parents[1])}
        said.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    assert len(said) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_saved_and_rebuilt_is_the_same(every, level):
    tokenizer = every[level]
    saved = json.dumps(tokenizer.to_dict(), sort_keys=True)
    rebuilt = tokenizer_from_dict(json.loads(saved))
    assert json.dumps(rebuilt.to_dict(), sort_keys=True) == saved
    assert rebuilt.vocabulary == tokenizer.vocabulary
    assert (rebuilt.boundary_id, rebuilt.unknown_id, rebuilt.lossless) == (
        tokenizer.boundary_id,
        tokenizer.unknown_id,
        tokenizer.lossless,
    )
    assert rebuilt.encode(SAMPLE).tolist() == tokenizer.encode(SAMPLE).tolist()


BAD = [
    None,
    [],
    {},
    {"level": 3},
    {"level": "chars", "characters": "a"},
    {"level": ["char"]},
    {"level": "char"},
    {"level": "char", "characters": ["a"]},
    {"level": "char", "characters": "ba"},
    {"level": "char", "characters": "aa"},
    {"level": "char", "characters": "a\ud800"},
    {"level": "char", "characters": "a", "more": 1},
    {"level": "byte", "more": 1},
    {"level": "word", "words": "ab"},
    {"level": "word", "words": ["a", 1]},
    {"level": "word", "words": ["a", "a"]},
    {"level": "word", "words": [UNKNOWN]},
    {"level": "word", "words": [""]},
    {"level": "word", "words": ["a b"]},
    {"level": "word", "words": ["\udfff"]},
    {"level": "bpe", "tokenizer": "x"},
    {"level": "bpe", "tokenizer": {}},
    {"level": "bpe", "tokenizer": {"model": None}},
    {"level": "bpe", "tokenizer": {"model": 5}},
    {"level": "bpe", "tokenizer": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}},
    {"level": "bpe", "tokenizer": {"x": {1, 2}}},
]


@pytest.mark.parametrize("data", BAD)
def test_bad_dictionaries_are_refused(data):
    with pytest.raises(ModelFileError):
        tokenizer_from_dict(data)
