"""Tasks: texts in which some characters are answers, determined by what stands before them."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np

from elman.errors import UserError
from elman.text.synthetic.base import CHUNK, Bits, Generator, Int64, KnownAnswer, Span, setting, size_setting

_BRACKETS = "([{<)]}>"


@dataclass(frozen=True, kw_only=True)
class Dyck(Generator):
    """Balanced brackets of up to four kinds, nested at most ``depth`` deep.

    Format: ``([]())`` and a line end whenever everything is closed. Inside, a bracket opens or closes with equal
    chance, its kind is uniform; at the greatest depth it closes, and at depth zero the line ends. The answers are the
    closing brackets: that one closes is chance, which one is determined, and takes a stack to know.
    """

    name = "dyck"
    has_answers = True
    size: int = size_setting()
    kinds: int = setting(2, 1, 4)
    depth: int = setting(8, 1, 1000)

    def chunks(self) -> Iterator[str]:
        bits, stack = self.bits(), list[int]()
        remaining = self.size
        while remaining > 0:
            count = min(CHUNK, remaining)
            written = list[str]()
            for opens, kind in zip(bits.below(2, count).tolist(), bits.below(self.kinds, count).tolist(), strict=True):
                if not stack or (opens and len(stack) < self.depth):
                    stack.append(kind)
                    written.append(_BRACKETS[kind])
                else:
                    written.append(_BRACKETS[4 + stack.pop()] + ("" if stack else "\n"))
            chunk = "".join(written)[:remaining]
            remaining -= len(chunk)
            yield chunk

    def answers(self, text: str) -> list[Span]:
        return [Span(match.start(), match.end()) for match in re.finditer(r"[)\]}>]", text)]

    def score(self, text: str) -> tuple[int, int]:
        right, total, expected = 0, 0, list[str]()
        for character in text:
            if character in _BRACKETS[:4]:
                expected.append(_BRACKETS[4 + _BRACKETS.index(character)])
            elif character in _BRACKETS:
                total += 1
                right += expected != [] and expected.pop() == character
        return right, total

    def known(self) -> KnownAnswer:
        # A reflecting walk is at each inner depth 1 / depth of the time and at each end half as often.
        bits_per_bracket = (self.depth - 1) / self.depth + math.log2(self.kinds) / 2
        rate = bits_per_bracket / (1 + 1 / (2 * self.depth))
        return KnownAnswer(rate, "the kind of every closing bracket is determined; needs a stack")


@dataclass(frozen=True, kw_only=True)
class Task(Generator):
    """Examples, one a line, each a question of chance and an answer that follows from it and ends with the line."""

    has_answers: ClassVar[bool] = True
    examples: int = setting(10_000, 1, 10**9)

    def chunks(self) -> Iterator[str]:
        bits = self.bits()
        # Long lines come in smaller lots; the lots, too, are part of what defines the text.
        lot = max(1, min(8192, CHUNK // int(self._chars_per_line())))
        for start in range(0, self.examples, lot):
            yield self._lines(bits, min(lot, self.examples - start))

    def answers(self, text: str) -> list[Span]:
        return [Span(*match.span("answer")) for match in self._matches(text)]

    def score(self, text: str) -> tuple[int, int]:
        matches = list(self._matches(text))
        return sum(match["answer"] == self.solve(match["question"]) for match in matches), len(matches)

    def examples_in(self, text: str) -> Iterator[tuple[str, str]]:
        """Question and answer of every example in a text, without the line end; examples without an answer left out."""
        for match in self._matches(text):
            if answer := match["answer"].removesuffix("\n"):
                yield match["question"], answer

    def known(self) -> KnownAnswer:
        return KnownAnswer(self._bits_per_line() / self._chars_per_line(), f"{self._needs}: 0 bits for the answers")

    _needs: ClassVar[str]
    """What a model must be able to do."""

    @property
    @abstractmethod
    def _pattern(self) -> str:
        """A line with the groups ``question`` and ``answer``; the answer may be wrong."""

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        return re.finditer(self._pattern, text, re.MULTILINE)

    @abstractmethod
    def solve(self, question: str) -> str:
        """The right answer, from the question as it stands in the text."""

    @abstractmethod
    def _lines(self, bits: Bits, count: int) -> str: ...

    @abstractmethod
    def _bits_per_line(self) -> float: ...

    @abstractmethod
    def _chars_per_line(self) -> float: ...


def _table(count: int, *columns: str | Int64) -> str:
    """Lines of equal length from constant columns (texts) and columns of letter codes, (count,) or (count, width)."""
    parts = [
        np.tile(np.frombuffer(column.encode(), np.uint8), (count, 1))
        if isinstance(column, str)
        else column.reshape(count, -1).astype(np.uint8)
        for column in columns
    ]
    return np.concatenate(parts, axis=1).tobytes().decode("ascii")


@dataclass(frozen=True, kw_only=True)
class AnBn(Task):
    """As many b as there were a: ``aaabbb``, with 1 to ``longest`` of each, uniform.

    The answer begins after the first b.
    """

    name = "anbn"
    longest: int = setting(16, 1, 10_000)
    _needs = "counting"
    _pattern = r"^(?P<question>a+b)(?P<answer>.*\n)"

    def solve(self, question: str) -> str:
        return "b" * (question.count("a") - 1) + "\n"

    def _lines(self, bits: Bits, count: int) -> str:
        return "".join("a" * n + "b" * n + "\n" for n in (1 + bits.below(self.longest, count)).tolist())

    def _bits_per_line(self) -> float:
        return math.log2(self.longest)

    def _chars_per_line(self) -> float:
        return self.longest + 2


@dataclass(frozen=True, kw_only=True)
class Copying(Task):
    """Repeat what was read: ``hbda...|hbda``, with ``length`` letters out of ``symbols`` and ``delay`` dots."""

    name = "copying"
    length: int = setting(10, 1, 10_000)
    symbols: int = setting(8, 1, 26)
    delay: int = setting(0, 0, 10_000)
    _needs = "keeping all letters until they are asked for"

    @property
    def _pattern(self) -> str:
        return rf"^(?P<question>[a-z]{{{self.length}}}\.{{{self.delay}}}\|)(?P<answer>.*\n)"

    def solve(self, question: str) -> str:
        return question.rstrip(".|") + "\n"

    def _lines(self, bits: Bits, count: int) -> str:
        letters = 97 + bits.below(self.symbols, count, self.length)
        return _table(count, letters, "." * self.delay, "|", letters, "\n")

    def _bits_per_line(self) -> float:
        return self.length * math.log2(self.symbols)

    def _chars_per_line(self) -> float:
        return 2 * self.length + self.delay + 2


@dataclass(frozen=True, kw_only=True)
class Reversing(Task):
    """Write it backwards: ``hbda``, a tab, ``adbh``, with ``shortest`` to ``longest`` letters out of ``symbols``."""

    name = "reversing"
    shortest: int = setting(1, 1, 10_000)
    longest: int = setting(10, 1, 10_000)
    symbols: int = setting(8, 1, 26)
    _needs = "keeping all letters and their order"
    _pattern = r"^(?P<question>[a-z]+)\t(?P<answer>.*\n)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise UserError(
                f"synthetic:reversing: shortest is {self.shortest}; accepted: 1 to longest ({self.longest})"
            )

    def solve(self, question: str) -> str:
        return question[::-1] + "\n"

    def _lines(self, bits: Bits, count: int) -> str:
        lengths = (self.shortest + bits.below(self.longest - self.shortest + 1, count)).tolist()
        letters = (97 + bits.below(self.symbols, sum(lengths))).astype(np.uint8).tobytes().decode("ascii")
        ends = accumulate(lengths)
        words = (letters[end - length : end] for length, end in zip(lengths, ends, strict=True))
        return "".join(f"{word}\t{word[::-1]}\n" for word in words)

    def _bits_per_line(self) -> float:
        return math.log2(self.longest - self.shortest + 1) + self._mean_length * math.log2(self.symbols)

    def _chars_per_line(self) -> float:
        return 2 * self._mean_length + 2

    @property
    def _mean_length(self) -> float:
        return (self.shortest + self.longest) / 2


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Repeat the letters and leave out the dots: ``..h.b...da|hbda``, with ``blanks`` dots at places of chance."""

    name = "selective-copying"
    length: int = setting(10, 1, 1000)
    symbols: int = setting(8, 1, 26)
    blanks: int = setting(20, 0, 10_000)
    _needs = "deciding by content what to keep"

    @property
    def _pattern(self) -> str:
        return rf"^(?P<question>[a-z.]{{{self.length + self.blanks}}}\|)(?P<answer>.*\n)"

    def solve(self, question: str) -> str:
        return question.replace(".", "").rstrip("|") + "\n"

    def _lines(self, bits: Bits, count: int) -> str:
        width = self.length + self.blanks
        places = np.sort(bits.choose(self.length, among=width, rows=count), axis=1)
        letters = 97 + bits.below(self.symbols, count, self.length)
        shown = np.full((count, width), ord("."))
        np.put_along_axis(shown, places, letters, axis=1)
        return _table(count, shown, "|", letters, "\n")

    def _bits_per_line(self) -> float:
        return math.log2(math.comb(self.length + self.blanks, self.length)) + self.length * math.log2(self.symbols)

    def _chars_per_line(self) -> float:
        return 2 * self.length + self.blanks + 2


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(Task):
    """Look up a key: ``c7a3f0?a3``, with ``pairs`` different letters and their digits, then one of the letters."""

    name = "associative-recall"
    pairs: int = setting(8, 1, 26)
    _needs = "storing pairs and finding a value by its key"

    @property
    def _pattern(self) -> str:
        return rf"^(?P<question>(?:[a-z]\d){{{self.pairs}}}\?[a-z])(?P<answer>.*\n)"

    def solve(self, question: str) -> str:
        return question[question.index(question[-1]) + 1] + "\n"

    def _lines(self, bits: Bits, count: int) -> str:
        keys = 97 + bits.choose(self.pairs, among=26, rows=count)
        values = 48 + bits.below(10, count, self.pairs)
        asked = bits.below(self.pairs, count, 1)
        key, value = (np.take_along_axis(column, asked, axis=1) for column in (keys, values))
        return _table(count, np.stack((keys, values), axis=2), "?", key, value, "\n")

    def _bits_per_line(self) -> float:
        return math.log2(math.perm(26, self.pairs)) + self.pairs * math.log2(10) + math.log2(self.pairs)

    def _chars_per_line(self) -> float:
        return 2 * self.pairs + 4


@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Whether the ones are odd in number: ``0110100=1``, with ``length`` digits."""

    name = "parity"
    length: int = setting(16, 1, 10_000)
    _needs = "one bit of state that every 1 turns over"

    @property
    def _pattern(self) -> str:
        return rf"^(?P<question>[01]{{{self.length}}}=)(?P<answer>.*\n)"

    def solve(self, question: str) -> str:
        return f"{question.count('1') % 2}\n"

    def _lines(self, bits: Bits, count: int) -> str:
        digits = bits.below(2, count, self.length)
        return _table(count, 48 + digits, "=", 48 + digits.sum(axis=1) % 2, "\n")

    def _bits_per_line(self) -> float:
        return self.length

    def _chars_per_line(self) -> float:
        return self.length + 3


@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(Task):
    """Reckon from left to right, without precedence: ``3+4*2-1=3`` is ((3 + 4) * 2 - 1) modulo ``modulus`` 5."""

    name = "modular-arithmetic"
    terms: int = setting(5, 1, 10_000)
    modulus: int = setting(5, 2, 10)
    _needs = "a running result"
    _OPERATORS: ClassVar[str] = "+-*"

    @property
    def _pattern(self) -> str:
        return rf"^(?P<question>\d(?:[-+*]\d){{{self.terms - 1}}}=)(?P<answer>.*\n)"

    def solve(self, question: str) -> str:
        result = int(question[0])
        for sign, digit in zip(question[1:-1:2], question[2:-1:2], strict=True):
            result = {"+": result + int(digit), "-": result - int(digit), "*": result * int(digit)}[sign]
        return f"{result % self.modulus}\n"

    def _lines(self, bits: Bits, count: int) -> str:
        digits = bits.below(self.modulus, count, self.terms)
        signs = bits.below(len(self._OPERATORS), count, self.terms - 1)
        result = digits[:, 0]
        for sign, digit in zip(signs.T, digits[:, 1:].T, strict=True):
            result = np.choose(sign, (result + digit, result - digit, result * digit)) % self.modulus
        codes = np.frombuffer(self._OPERATORS.encode(), np.uint8).astype(np.int64)[signs]
        steps = np.stack((codes, 48 + digits[:, 1:]), axis=2)
        return _table(count, 48 + digits[:, :1], steps, "=", 48 + result, "\n")

    def _bits_per_line(self) -> float:
        return self.terms * math.log2(self.modulus) + (self.terms - 1) * math.log2(len(self._OPERATORS))

    def _chars_per_line(self) -> float:
        return 2 * self.terms + 2


@dataclass(frozen=True, kw_only=True)
class Adding(Task):
    """The sum of the two digits with a star before them: ``3*71*4=11``, with ``length`` digits and two for the sum."""

    name = "adding"
    length: int = setting(10, 2, 10_000)
    _needs = "keeping two marked numbers over a distance"

    @property
    def _pattern(self) -> str:
        return rf"^(?P<question>(?=[^*\n]*\*[^*\n]*\*[^*\n]*=)(?:\*?\d){{{self.length}}}=)(?P<answer>.*\n)"

    def solve(self, question: str) -> str:
        first, second = re.findall(r"\*(\d)", question)
        return f"{int(first) + int(second):02d}\n"

    def _lines(self, bits: Bits, count: int) -> str:
        digits = bits.below(10, count, self.length)
        marked = bits.choose(2, among=self.length, rows=count)
        total = np.take_along_axis(digits, marked, axis=1).sum(axis=1)
        # A star takes a column of its own before its digit: what stands at column c is the digit c - stars so far.
        first, second = np.sort(marked, axis=1).T[:, :, None]
        column = np.arange(self.length + 2)
        starred = (column == first) | (column == second + 1)
        digit = np.minimum(column - (column > first) - (column > second + 1), self.length - 1)
        shown = np.where(starred, ord("*"), 48 + np.take_along_axis(digits, digit, axis=1))
        return _table(count, shown, "=", 48 + total // 10, 48 + total % 10, "\n")

    def _bits_per_line(self) -> float:
        return self.length * math.log2(10) + math.log2(math.comb(self.length, 2))

    def _chars_per_line(self) -> float:
        return self.length + 6


@dataclass(frozen=True, kw_only=True)
class Quotes(Task):
    """A quotation that closes after exactly ``distance`` letters, by the sign that opened it: ``ot a"sin e"``.

    Before it stand 1 to ``gap`` letters, uniform; there are eight letters, the space among them. The opening is chance,
    the closing is determined: when by counting, which of ``kinds`` signs by remembering.
    """

    name = "quotes"
    distance: int = setting(20, 0, 10_000)
    gap: int = setting(10, 1, 10_000)
    kinds: int = setting(2, 1, 4)
    _needs = "counting the distance and remembering the sign"
    _LETTERS: ClassVar[str] = "etaoins "
    _SIGNS: ClassVar[str] = "\"'`|"

    @property
    def _pattern(self) -> str:
        letters = f"[{self._LETTERS}]"
        return rf"^(?P<question>{letters}+[{self._SIGNS}]{letters}{{{self.distance}}})(?P<answer>.*\n)"

    def solve(self, question: str) -> str:
        return question[-self.distance - 1] + "\n"

    def _lines(self, bits: Bits, count: int) -> str:
        gaps = (1 + bits.below(self.gap, count)).tolist()
        signs = bits.below(self.kinds, count).tolist()
        codes = np.frombuffer(self._LETTERS.encode(), np.uint8)
        letters = codes[bits.below(len(codes), sum(gaps) + self.distance * count)].tobytes().decode("ascii")
        lines, at = [], 0
        for gap, sign in zip(gaps, signs, strict=True):
            inside = at + gap
            end = inside + self.distance
            lines.append(letters[at:inside] + self._SIGNS[sign] + letters[inside:end] + self._SIGNS[sign] + "\n")
            at = end
        return "".join(lines)

    def _bits_per_line(self) -> float:
        letters = (1 + self.gap) / 2 + self.distance
        return math.log2(self.gap) + math.log2(self.kinds) + letters * math.log2(len(self._LETTERS))

    def _chars_per_line(self) -> float:
        return (1 + self.gap) / 2 + self.distance + 3


@dataclass(frozen=True, kw_only=True)
class Agreement(Task):
    """The verb agrees with its subject across nouns of either number: ``the dogs near the king above the cat are old``.

    Between subject and verb stand ``fewest`` to ``most`` distractors, uniform. The answer is the verb, ``is`` or
    ``are``: when it comes is chance, which of the two is determined by the first noun.
    """

    name = "agreement"
    fewest: int = setting(0, 0, 1000)
    most: int = setting(20, 0, 1000)
    _needs = "remembering the number of the first noun"
    _NOUNS: ClassVar[list[str]] = ["dog", "cat", "king", "river", "house", "doctor", "bird", "tree"]
    _PREPOSITIONS: ClassVar[list[str]] = ["near", "behind", "above", "beside"]
    _ADJECTIVES: ClassVar[list[str]] = ["old", "small", "quiet", "lost"]
    _pattern = r"^(?P<question>the [a-z]+ (?:[a-z]+ the [a-z]+ )*)(?P<answer>is|are)(?= [a-z]+$)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fewest > self.most:
            raise UserError(f"synthetic:agreement: fewest is {self.fewest}; accepted: 0 to most ({self.most})")

    def solve(self, question: str) -> str:
        return "are" if question.split()[1].endswith("s") else "is"

    def _lines(self, bits: Bits, count: int) -> str:
        nouns = [noun + ending for ending in ("", "s") for noun in self._NOUNS]
        numbers = (self.fewest + bits.below(self.most - self.fewest + 1, count)).tolist()
        adjectives = bits.below(len(self._ADJECTIVES), count).tolist()
        chosen = iter(bits.below(len(nouns), count + sum(numbers)).tolist())
        prepositions = iter(bits.below(len(self._PREPOSITIONS), sum(numbers)).tolist())
        lines = []
        for number, adjective in zip(numbers, adjectives, strict=True):
            subject = next(chosen)
            phrases = [f"{self._PREPOSITIONS[next(prepositions)]} the {nouns[next(chosen)]} " for _ in range(number)]
            verb = "is" if subject < len(self._NOUNS) else "are"
            lines.append(f"the {nouns[subject]} {''.join(phrases)}{verb} {self._ADJECTIVES[adjective]}\n")
        return "".join(lines)

    def _bits_per_line(self) -> float:
        noun, preposition = math.log2(2 * len(self._NOUNS)), math.log2(len(self._PREPOSITIONS))
        number = math.log2(self.most - self.fewest + 1)
        distractors = (self.fewest + self.most) / 2
        return number + noun + distractors * (preposition + noun) + math.log2(len(self._ADJECTIVES))

    def _chars_per_line(self) -> float:
        noun, preposition, adjective = map(_mean_length, (self._NOUNS, self._PREPOSITIONS, self._ADJECTIVES))
        phrase = len("the ") + noun + 0.5 + len(" ")
        distractors = (self.fewest + self.most) / 2
        return phrase + distractors * (preposition + 1 + phrase) + len("is ") + 0.5 + adjective + 1


def _mean_length(words: list[str]) -> float:
    return sum(map(len, words)) / len(words)
