"""Labels against Python's own tokenizer, and against marks made by hand."""

from __future__ import annotations

import bisect
import colorsys
import io
import keyword
import textwrap
import tokenize
from pathlib import Path

import numpy as np
import pytest

from elman.errors import TextError, UserError
from elman.inspection.labels import LABELS, Given, Matched, Scanned, governed, label_lines, texts_of
from elman.text.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer


def labelled(text: str, *names: str) -> np.ndarray:
    return np.concatenate(list(label_lines(list(text), [Scanned(names)])))


def marks(text: str, name: str) -> str:
    return "".join("x" if value else "." for value in labelled(text, name)[:, 0])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("quotes", "a 'b' c", "..xx..."),
        ("quotes", "don't say 'no'", "..........xxx."),
        ("quotes", "\"it's\" 'x\ny", "xxxxx..xx.."),
        ("quotes", 'x = r"a\\"b"', ".....xxxxx."),
        ("quotes", '"""a"b"""', "x.xxxxxx."),
        ("quotes", "a “y” «z»", "..xx..xx."),
        ("quotes", '"over\na line', "xxxxxxxxxxxx"),
        ("quotes", '"to\n\nthe end', "xxxx........"),
        ("quotes", '# "no"', "......"),
        ("brackets", "f(x, [1]) y", ".xxxxxxx..."),
        ("brackets", "(lost\n\nfound", "xxxxxx......"),
        ("brackets", "')' (", "....x"),
        ("comments", "a # b\nc", "..xxx.."),
        ("comments", "'#' # b", "....xxx"),
        ("line-start", "ab\ncd", "x..x."),
        ("indentation", "  a b\n\tc", "xx....x."),
        ("word-start", "to be_2 or", "x..x....x."),
        ("capitals", "aBc D", ".x..x"),
        ("digits", "a1 23", ".x.xx"),
    ],
)
def test_marks_by_hand(name, text, expected):
    assert marks(text, name) == expected


def test_graded_labels_by_hand():
    values = labelled("f(a\n  [b]\n)", "bracket-depth", "line-position", "indentation-width")
    assert values[:, 0].tolist() == [0, 1, 1, 1, 1, 1, 2, 2, 1, 1, 0]
    assert values[:, 1].tolist() == [1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]
    assert values[:, 2].tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 0, 0]


@pytest.mark.parametrize("module", [bisect, colorsys, keyword, textwrap], ids=lambda module: module.__name__)
def test_code_is_read_as_python_reads_it(module):
    source = Path(module.__file__).read_text("utf-8")
    starts = np.cumsum([0, *map(len, source.splitlines(keepends=True))])
    quoted, commented, unclear = (np.zeros(len(source), bool) for _ in range(3))
    depth = np.zeros(len(source) + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type == tokenize.STRING:
            opening = start + min(token.string.index(sign) for sign in "'\"" if sign in token.string)
            quoted[opening : end - 1] = True
            unclear[opening : opening + 3] = True  # where three signs open, it shows at the third
        elif token.type == tokenize.COMMENT:
            commented[start:end] = True
        elif token.type == tokenize.OP and token.string in "([{":
            depth[start:] += 1
        elif token.type == tokenize.OP and token.string in ")]}":
            depth[start:] -= 1
    values = labelled(source, "quotes", "comments", "bracket-depth")
    assert quoted.any()
    assert not (values[:, 0] != quoted)[~unclear].any()
    assert (values[:, 1] == commented).all()
    assert (values[:, 2] == depth[:-1]).all()


def test_a_token_of_several_characters_takes_the_last_state_and_any_event():
    values = np.concatenate(list(label_lines(['x "', 'a" B', "c"], [Scanned(["quotes", "capitals"])])))
    assert values.tolist() == [[1, 0], [0, 1], [0, 0]]


def test_a_document_begins_anew():
    values = np.concatenate(list(label_lines([None, "(", "'", None, "a"], [Scanned(["quotes", "brackets"])])))
    assert values.tolist() == [[0, 0], [0, 1], [1, 1], [0, 0], [0, 0]]


def test_own_labels_by_expression_and_by_file(tmp_path):
    values = np.concatenate(list(label_lines(["ab", "c1", "2\n", "12"], [Matched(r"numbers=\d+")])))
    assert values[:, 0].tolist() == [0, 1, 1, 1]
    path = tmp_path / "mine.txt"
    path.write_text("1 0\n2.5", "utf-8")
    given = Given(path, 3)
    assert given.labels[0].name == "mine"
    assert given.labels[0].is_graded
    assert np.concatenate(list(label_lines([None, "a", "b\n", "c"], [given])))[:, 0].tolist() == [0, 1, 0, 2.5]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: Scanned(["quotse"]), "did you mean 'quotes'"),
        (lambda path: Matched("x"), "NAME=REGEX"),
        (lambda path: Matched("x=("), "is wrong"),
        (lambda path: Matched("x=a{99999999999999999999}"), "is wrong: the repetition number is too large"),
        (lambda path: Matched(f"x={'(' * 3000}a{')' * 3000}"), r"\( \.\.\.' of label 'x' is wrong"),
        (lambda path: Given(path, 4), "holds 3 labels, the text has 4"),
        (lambda path: Given(path.with_name("none"), 4), "cannot be read"),
    ],
)
def test_what_is_no_label_is_refused_in_one_line(tmp_path, make, words):
    path = tmp_path / "mine.txt"
    path.write_text("1 0 1", "utf-8")
    with pytest.raises(UserError, match=words) as caught:
        make(path)
    assert "\n" not in str(caught.value)


def test_a_set_within_a_set_is_read_as_python_reads_it():
    assert Matched("x=[[a]b").of_line(["[b", "ab", "b"])[:, 0].tolist() == [1, 1, 0]


def test_numbers_that_are_none_are_refused(tmp_path):
    path = tmp_path / "mine.txt"
    for text in ("1 x 0", "1 nan 0"):
        path.write_text(text, "utf-8")
        with pytest.raises(UserError, match="number"):
            Given(path, 3)
    path.write_text("1", "utf-8")
    with pytest.raises(TextError):
        Given(path, 3)


def test_texts_of_tokens_join_to_the_text():
    for tokenizer in (ByteTokenizer(), CharTokenizer("aß猫\n")):
        tokens = np.concatenate([[tokenizer.boundary_id], tokenizer.encode("aß\n猫")])
        first, *rest = texts_of(tokens, tokenizer)
        assert first is None
        assert "".join(rest) == "aß\n猫"


def test_the_governed_tokens_are_those_of_the_vocabulary():
    by_name = dict(zip((label.name for label in LABELS), range(len(LABELS)), strict=True))
    chars = CharTokenizer("aB1 \n)'")
    sets = governed(LABELS, chars)
    for name, signs in {"quotes": "'", "brackets": ")", "line-position": "\n", "capitals": "B", "digits": "1"}.items():
        assert "".join(chars.vocabulary[token] for token in np.flatnonzero(sets[by_name[name]])) == signs
    words = WordTokenizer(["end", "x"])
    assert np.flatnonzero(governed(LABELS, words)[by_name["line-position"]]).tolist() == [2]
