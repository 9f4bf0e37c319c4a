"""What stands where in a text: a label is a property of places that units may keep track of.

A scanner reads a text character by character and knows after each one whether it is inside quotes, how deep in
brackets, how far from the start of the line, and so on. A token has the properties that hold after its last character;
what a single character is (a capital, a digit, the first of a word) holds for a token if it does for one of its
characters. A person's own labels are a regular expression, matched within each line, or a number for each token.

Shape letters: N tokens of a line, L labels, V vocabulary.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import TextError, UserError, nearest
from elman.text.tokenizers import Tokenizer

_MAX_TOKENS_OF_LINE = 4096
"""A longer line is cut: a text may have no line ends at all."""
_TOKENS_AT_ONCE = 1 << 16
_OPENING, _CLOSING = "([{", ")]}"
_PAIRED_QUOTES = {"“": "”", "«": "»"}
_STRING_PREFIXES = frozenset(("r", "b", "f", "u", "t", "rb", "br", "rf", "fr"))


class Scanner:
    """Follows the form of a text, be it code or prose.

    Quotes are ``'``, ``"``, three of either, and the paired ones. An apostrophe after a letter opens none, unless the
    letters are the prefix of a string in Python. ``'`` closes at the end of its line at the latest, ``"`` at the next
    empty line, which closes all brackets too. Inside quotes there are no brackets and no comments; a comment goes from
    ``#`` to the end of its line.
    """

    def __init__(self) -> None:
        self.column = 0
        """Characters since the last line end."""
        self.quote = ""
        """What will close the quotes; empty outside."""
        self.depth = 0
        """Brackets that are open."""
        self.in_comment = False
        self.in_indentation = False
        """There is white space at the start of the line, and nothing else yet."""
        self.indentation = 0
        """Characters of white space that the line began with."""
        self.character = ""
        self.starts_word = False
        self._word = ""
        self._escaped = False
        self._just_opened = False
        self._empty_quotes = ""
        self._closing_run = 0

    def read(self, character: str) -> None:
        """Move on by one character."""
        is_new_line = self.character in ("", "\n")
        self._read_quotes_and_brackets(character)
        is_of_word = character.isalnum() or character == "_"
        self.starts_word = is_of_word and not self._word
        self._word = (self._word + character)[-3:] if is_of_word else ""
        if character == "\n":
            self.column = self.indentation = 0
            self.in_comment = self.in_indentation = False
        else:
            self.column += 1
            self.in_indentation = character in " \t" and (is_new_line or self.in_indentation)
            self.indentation += self.in_indentation
        self.character = character

    def _read_quotes_and_brackets(self, character: str) -> None:
        empty, self._empty_quotes = self._empty_quotes, ""
        if self.quote:
            self._read_quoted(character)
        elif character == "\n":
            self.depth *= self.character != "\n"
        elif self.in_comment:
            pass
        elif character in "'\"" and self._may_open(character):
            self.quote = 3 * character if empty == character else character
            self._just_opened, self._closing_run = True, 0
        elif character in _PAIRED_QUOTES:
            self.quote = _PAIRED_QUOTES[character]
            self._just_opened, self._closing_run = True, 0
        elif character == "#":
            self.in_comment = True
        elif character in _OPENING:
            self.depth += 1
        elif character in _CLOSING:
            self.depth = max(0, self.depth - 1)

    def _may_open(self, quote: str) -> bool:
        return quote == '"' or not self._word or self._word.lower() in _STRING_PREFIXES

    def _read_quoted(self, character: str) -> None:
        just_opened, self._just_opened = self._just_opened, False
        if self._escaped:
            self._escaped = False
            return
        is_end_of_paragraph = character == "\n" and self.character == "\n"
        self._closing_run = self._closing_run + 1 if character == self.quote[0] else 0
        if character == "\\":
            self._escaped = True
        elif self._closing_run == len(self.quote):
            self._empty_quotes = character if just_opened else ""
            self.quote = ""
        elif (character == "\n" and self.quote == "'") or (is_end_of_paragraph and len(self.quote) == 1):
            self.quote = ""


@dataclass(frozen=True)
class Label:
    """A property of the places of a text."""

    name: str
    words: str
    """As the end of a sentence: a unit follows ..."""
    is_graded: bool = False
    """Whether it is a number, and not just true or false."""
    consequence: str = ""
    """What a model that knows the property can predict: the next token is ...; empty: nothing in particular."""
    governs: Callable[[str], bool] | None = None
    """Whether a token of this text is such a one."""


_Of = Callable[[Scanner], float]


def _holds(characters: str) -> Callable[[str], bool]:
    return lambda text: any(character in text for character in characters)


def _is_blank(text: str) -> bool:
    return bool(text) and not text.strip(" \t")


_ENDS_LINE = ("a line end", _holds("\n"))
_QUOTE_SIGN = ("a quote sign", _holds("'\"”»"))
_CLOSES = ("a closing bracket", _holds(_CLOSING))
_BLANK = ("white space", _is_blank)

# Each with what it is after a character, and whether one character of a token is enough.
_SCANNED: tuple[tuple[Label, _Of, bool], ...] = (
    (Label("quotes", "being inside quotes", False, *_QUOTE_SIGN), lambda s: bool(s.quote), False),
    (Label("brackets", "being inside brackets", False, *_CLOSES), lambda s: s.depth > 0, False),
    (Label("bracket-depth", "how many brackets are open", True, *_CLOSES), lambda s: s.depth, False),
    (Label("comments", "being inside a comment", False, *_ENDS_LINE), lambda s: s.in_comment, False),
    (Label("line-position", "the position in the line", True, *_ENDS_LINE), lambda s: s.column, False),
    (Label("line-start", "the first character of a line", False, *_BLANK), lambda s: s.column == 1, True),
    (Label("indentation", "white space at the start of a line", False, *_BLANK), lambda s: s.in_indentation, False),
    (Label("indentation-width", "how far the line is indented", True, *_BLANK), lambda s: s.indentation, False),
    (
        Label("word-start", "the first character of a word", False, "a letter", lambda text: text.isalpha()),
        lambda s: s.starts_word,
        True,
    ),
    (
        Label("capitals", "capital letters", False, "a capital", lambda text: any(map(str.isupper, text))),
        lambda s: s.character.isupper(),
        True,
    ),
    (
        Label("digits", "digits", False, "a digit", lambda text: any(map(str.isdigit, text))),
        lambda s: s.character.isdigit(),
        True,
    ),
)
LABELS: tuple[Label, ...] = tuple(label for label, _, _ in _SCANNED)
"""Those that are looked for in every text."""


class Labeller(ABC):
    """Gives the tokens of a text their labels, line by line."""

    labels: tuple[Label, ...]

    def begin_document(self) -> None:  # noqa: B027  # most remember nothing
        """Forget what came before: another document begins."""

    @abstractmethod
    def of_line(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """The labels (N, L) of the tokens of the next line, given the texts that they add."""


class Scanned(Labeller):
    """Labels that follow from the form of the text.

    Args:
        names: which of :data:`LABELS`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        known = {label.name: (label, of, is_event) for label, of, is_event in _SCANNED}
        chosen = list(names)
        for name in chosen:
            if name not in known:
                raise UserError(f"no label {name!r}{nearest(name, known)}, or NAME=REGEX for one of your own")
        self._chosen = [known[name] for name in chosen]
        self.labels = tuple(label for label, _, _ in self._chosen)
        self._scanner = Scanner()

    def begin_document(self) -> None:
        self._scanner = Scanner()

    def of_line(self, texts: Sequence[str]) -> NDArray[np.float32]:
        values_NL = np.zeros((len(texts), len(self._chosen)), np.float32)
        for row_L, text in zip(values_NL, texts, strict=True):
            for character in text:
                self._scanner.read(character)
                for column, (_, of, is_event) in enumerate(self._chosen):
                    if is_event:
                        row_L[column] = max(row_L[column], of(self._scanner))
            for column, (_, of, is_event) in enumerate(self._chosen):
                if not is_event:
                    row_L[column] = of(self._scanner)
        return values_NL


class Matched(Labeller):
    """A person's own label: the characters that a regular expression matches, within each line.

    Args:
        specification: ``NAME=REGEX``.
    """

    def __init__(self, specification: str) -> None:
        name, equals, pattern = specification.partition("=")
        if not equals or not name or not pattern:
            raise UserError(
                f"{specification!r} is no label of your own; accepted: NAME=REGEX, such as 'urls=https?:\\S+'"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of sets that another Python may read in another way
                self._pattern = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            short = pattern if len(pattern) <= 100 else f"{pattern[:100]} ..."
            raise UserError(f"the regular expression {short!r} of label {name!r} is wrong: {error}") from None
        self.labels = (Label(name, f"matches of {pattern}"),)

    def of_line(self, texts: Sequence[str]) -> NDArray[np.float32]:
        line = "".join(texts)
        marked = np.zeros(len(line) + 1, np.int64)
        for match in self._pattern.finditer(line):
            marked[match.start() + 1 : match.end() + 1] = 1
        before = marked.cumsum()
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        return (before[ends] > before[starts]).astype(np.float32)[:, None]


class Given(Labeller):
    """A person's own label: a number for each token, from a file of numbers separated by white space.

    Args:
        path: the file.
        num_tokens: of the text, without the boundary at its start.
    """

    def __init__(self, path: str | Path, num_tokens: int) -> None:
        try:
            words = Path(path).read_text("utf-8").split()
            with np.errstate(over="ignore"):  # which is refused below
                values = np.array([float(word) for word in words]).astype(np.float32)
        except OSError as error:
            raise UserError(f"the labels {str(path)!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(
                f"the labels {str(path)!r} are not all numbers ({error}): give one for each token"
            ) from None
        if not np.isfinite(values).all():
            raise UserError(
                f"the labels {str(path)!r} are not all finite in single precision: give a number for each token"
            )
        if len(values) != num_tokens:
            raise TextError(
                f"{str(path)!r} holds {len(values):,} labels, the text has {num_tokens:,} tokens: give one for each"
            )
        name = Path(path).stem
        is_graded = not np.isin(values, (0.0, 1.0)).all()
        self.labels = (Label(name, f"the labels of {Path(path).name}", is_graded),)
        self._values = np.concatenate([np.zeros(1, np.float32), values])  # the boundary has none
        self._next = 0

    def of_line(self, texts: Sequence[str]) -> NDArray[np.float32]:
        values_N1 = self._values[self._next : self._next + len(texts), None]
        self._next += len(texts)
        return values_N1


def label_lines(texts: Iterable[str | None], labellers: Sequence[Labeller]) -> Iterator[NDArray[np.float32]]:
    """The labels of a text, line by line: (N, L), those of all labellers side by side.

    Args:
        texts: what each token adds to the text, in order; none for the boundary, which begins a document.
        labellers: fresh ones.
    """
    for line in _lines(texts):
        if line is None:
            for labeller in labellers:
                labeller.begin_document()
        yield np.concatenate([labeller.of_line(line or [""]) for labeller in labellers], axis=1)


def _lines(texts: Iterable[str | None]) -> Iterator[list[str] | None]:
    """The lines of a text, and none where a document begins."""
    line: list[str] = []
    for text in texts:
        if text is not None:
            line.append(text)
        if line and (text is None or "\n" in text or len(line) == _MAX_TOKENS_OF_LINE):
            yield line
            line = []
        if text is None:
            yield None
    if line:
        yield line


def texts_of(tokens: NDArray[np.integer[Any]], tokenizer: Tokenizer) -> Iterator[str | None]:
    """What each token adds to the text: nothing where it ends inside a character, and none for the boundary."""
    decoder = tokenizer.decoder()
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        for token in tokens[start : start + _TOKENS_AT_ONCE].tolist():
            if token == tokenizer.boundary_id:
                decoder.flush()
                yield None
            else:
                yield decoder.feed(token)


def governed(labels: Sequence[Label], tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """For each label the tokens that it lets a model predict, (L, V); none of them where it is silent about that."""
    texts = [tokenizer.decoder().feed(token) for token in range(tokenizer.size)]
    special = {tokenizer.boundary_id, tokenizer.unknown_id}
    return np.array([
        [label.governs is not None and token not in special and label.governs(text) for token, text in enumerate(texts)]
        for label in labels
    ])  # fmt: skip
