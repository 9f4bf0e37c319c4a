"""Text from anywhere, as a terminal or a page can show it."""

from __future__ import annotations

import pytest

from elman.visible import clean


@pytest.mark.parametrize(
    "text",
    ["Ünïcödé\n\tx", "वास्तविक क्षि", "می\u200cخواهم", "👩\u200d👩\u200d👧", "a\u00a0b\u3000c", "", "$x$ <b>"],
    ids=ascii,
)
def test_text_of_every_script_stays_as_it_is(text):
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x00\x07\x1b[31m\r\x7f", "␀␇␛[31m␍␡"),
        ("a\u202eb\u2067c\ufeff", "a\\u202eb\\u2067c\\ufeff"),
        ("\x85\x9b\u2028", "\\x85\\x9b\\u2028"),
        ("a\udcffb", "a\ufffdb"),
        ("\U000e0041\U0010ffff", "\U000e0041\\U0010ffff"),
    ],
    ids=ascii,
)
def test_what_cannot_be_seen_is_shown_by_a_sign(text, seen):
    assert clean(text) == seen
    assert clean(seen) == seen
