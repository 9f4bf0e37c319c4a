"""Tables: whatever the width, every name and every figure is there whole."""

from __future__ import annotations

import io
import sys

import pytest

from elman.cli.output import print_table

HEADINGS = ("run", "kind", "corpus", "training", "parameters", "updates", "nats per token", "bits/char")
ROWS = [
    (f"a-run-with-a-name-{i}", "lstm", "shake.txt", "finished", f"{i},234,567", f"{i}2,000", f"{i}.2345", f"{i}.3456")
    for i in (1, 2, 3)
]
PROSE = "an n-gram of order six, which sees what stands before, has it right"


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def printed(monkeypatch):
    """Print a table to a terminal of so many columns, or to a pipe; its lines come back."""

    def call(width, *table, **options):
        out = io.StringIO() if width is None else _Terminal()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width or 80))
        monkeypatch.setattr(sys, "stdout", out)
        print_table("", *table, **options)
        monkeypatch.undo()
        text = out.getvalue()
        for code in ("\x1b[1m", "\x1b[0m"):
            text = text.replace(code, "")
        return text.splitlines()

    return call


@pytest.mark.parametrize("width", [None, 30, 40, 60, 80, 100, 200])
def test_every_cell_is_whole_at_any_width(printed, width):
    lines = printed(width, HEADINGS, ROWS, text_columns=4)
    assert "…" not in "".join(lines)
    words = [word for line in lines for word in line.split()]
    for row in ROWS:
        assert set(row) <= set(words)
    for heading in HEADINGS:
        assert set(heading.split()) <= set(words)
    if width is not None and width >= 40:  # the name and a figure of ten characters fit
        assert max(map(len, lines)) <= width


def test_a_pipe_has_one_line_for_each_row_whatever_columns_says(printed):
    lines = [line.strip() for line in printed(None, HEADINGS, ROWS, text_columns=4) if line.strip()]
    assert len(lines) == 2 + len(ROWS)
    assert [tuple(line.split()) for line in lines[2:]] == ROWS


@pytest.mark.parametrize("width", [None, 80])
def test_nothing_in_a_table_is_obeyed_by_a_terminal(printed, width):
    lines = printed(width, ("\x1b[31mhead", "n"), [("a\x1b]0;title\x07", "1"), ("b\u202ec\x00", "2")])
    text = "\n".join(lines)
    assert not set(text) & set("\x1b\x07\u202e\x00")
    for shown in ("␛[31mhead", "a␛]0;title␇", r"b\u202ec␀"):
        assert shown in text


def test_a_narrow_terminal_has_the_first_column_before_each_group_of_columns(printed):
    lines = printed(60, HEADINGS, ROWS, text_columns=4)
    tables = sum("─" in line for line in lines)
    assert tables > 1
    assert sum(ROWS[0][0] in line for line in lines) == tables


def test_long_text_folds_before_a_figure_moves_below(printed):
    lines = printed(50, ("", "goes if", "errors"), [("order 6", PROSE, "1,234")], text_columns=2)
    assert sum("─" in line for line in lines) == 1
    assert " ".join(" ".join(lines).replace("order 6", "").replace("1,234", "").split()).endswith(PROSE)
    assert max(map(len, lines)) <= 50


CLAIMS = [
    (label, f"0.{part}:{unit}", "yes", f"0.{unit}", f"1.{unit}", f"2.{unit}")
    for unit, (label, part) in enumerate([("capitals", "c"), ("capitals", "h"), ("word-start", "c")], 101)
]


@pytest.mark.parametrize(("width", "repeated"), [(41, 2), (21, 1), (None, 2)])
def test_the_columns_that_tell_the_rows_apart_stand_before_each_group(printed, width, repeated):
    lines = printed(width, ("follows", "unit", "holds", "score", "untrained", "effect"), CLAIMS, text_columns=3)
    tables = sum("─" in line for line in lines)
    assert (tables == 1) == (width is None)
    for column in range(2):
        for row in CLAIMS[1:]:
            alone = sum(row[column] in line.split() for line in lines)
            assert alone == (tables if column < repeated else 1) * sum(row[column] == one[column] for one in CLAIMS)


def test_rows_that_are_all_alike_are_told_apart_by_nothing(printed):
    lines = printed(26, ("place", "of one", "of another"), [("here", "1.23456", "6.54321")] * 2)
    rows = [line.split() for line in lines if "here" in line]
    assert rows == [["here", "1.23456"]] * 2 + [["here", "6.54321"]] * 2
