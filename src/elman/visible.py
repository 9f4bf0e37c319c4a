"""Text from anywhere as a terminal or a page can show it."""

from __future__ import annotations

import unicodedata

_DIRECTION_MARKS = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


def clean(text: str) -> str:
    """Text that is shown as it is: nothing in it moves the cursor, changes colours or the direction.

    Control characters become their pictures (``␛``), bytes that are no characters U+FFFD, and whatever else cannot be
    seen its escape (``\\u202e``). Line ends and tabs stay.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    if character < " ":
        return chr(0x2400 + ord(character))
    if character == "\x7f":
        return "\u2421"
    category = unicodedata.category(character)
    if category == "Cs":
        return "\ufffd"
    if category in ("Zs", "Cf") and character not in _DIRECTION_MARKS:
        return character
    return ascii(character)[1:-1]
