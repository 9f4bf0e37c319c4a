"""Texts of chance alone, whose entropy rate is known: a Markov chain, a grammar, words of natural frequency."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from elman.errors import UserError
from elman.text.synthetic.base import CHUNK, Bits, Generator, Int64, KnownAnswer, setting, size_setting


@dataclass(frozen=True, kw_only=True)
class Markov(Generator):
    """Letters, each drawn given the ``order`` letters before it; the chances are multiples of 1/1024.

    Format: one endless word, such as ``abdacab``. Nothing is determined, everything has a known chance: the best
    model counts the (order + 1)-grams, and its bits per character are the entropy rate of the chain, the sum over
    contexts of stationary probability times entropy of the next letter.
    """

    name = "markov"
    size: int = size_setting()
    order: int = setting(2, 0, 12)
    symbols: int = setting(4, 2, 26)

    _PARTS: ClassVar[int] = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.symbols**self.order > 4096:
            raise UserError(
                f"synthetic:markov: order {self.order} over {self.symbols} symbols has {self.symbols**self.order} "
                "contexts; accepted: symbols ** order up to 4096"
            )

    @cached_property
    def weights(self) -> Int64:
        """Chance of each letter in each context, in parts of 1024, (contexts, letters).

        The context's number has the letters before as digits, the last letter as the last digit.
        """
        contexts = self.symbols**self.order
        # Cubes of uniform numbers: most contexts then have a favourite, as in natural text.
        raw = (Bits("markov weights", self.seed).below(64, contexts, self.symbols) + 1) ** 3
        # No letter is rarer than a sixteenth of its even share, or the chain could stick and be far from its mean.
        least = self._PARTS // (16 * self.symbols)
        weights = least + (self._PARTS - least * self.symbols) * raw // raw.sum(axis=1, keepdims=True)
        weights[np.arange(contexts), raw.argmax(axis=1)] += self._PARTS - weights.sum(axis=1)
        return weights

    def chunks(self) -> Iterator[str]:
        contexts = len(self.weights)
        # table[context][draw of 10 bits] is the next letter: each letter stands there as often as its weight says.
        table = [bytes(np.repeat(np.arange(self.symbols, dtype=np.uint8), row)) for row in self.weights]
        letters = bytes(range(97, 97 + self.symbols)).ljust(256)
        draws, context = self.bits().endless(num_bits=10), 0
        for start in range(0, self.size, CHUNK):
            chosen = bytearray()
            for draw in islice(draws, min(CHUNK, self.size - start)):
                letter = table[context][draw]
                chosen.append(letter)
                context = (context * self.symbols + letter) % contexts
            yield chosen.translate(letters).decode("ascii")

    @cached_property
    def stationary(self) -> NDArray[np.float64]:
        """Long-run probability of each context."""
        chances = self.weights / self._PARTS
        contexts = len(chances)
        probability = np.full(contexts, 1.0 / contexts)
        for _ in range(100_000):
            # (oldest letter, rest) x next letter -> (rest, next letter); with order 0 there is one context.
            flow = (probability[:, None] * chances).reshape(-1, contexts)
            following = flow.sum(axis=0) if self.order else probability
            if np.abs(following - probability).sum() < 1e-13:
                break
            probability = following
        return probability

    def known(self) -> KnownAnswer:
        chances = self.weights / self._PARTS
        rate = float(-(self.stationary[:, None] * chances * np.log2(chances)).sum())
        return KnownAnswer(rate, f"entropy rate of the chain; a {self.order + 1}-gram model reaches it")


_GRAMMAR: dict[str, list[tuple[int, str]]] = {
    "Sentence": [(12, "the Noun Verb ."), (4, "the Noun Verb when the Noun Verb .")],
    "Noun": [(10, "Thing"), (3, "Quality Thing"), (2, "Thing Place the Noun"), (1, "Thing who Verb")],
    "Verb": [(6, "Rests"), (8, "Takes the Noun"), (2, "Says that the Noun Verb")],
    "Thing": [
        (4, "dog"),
        (3, "cat"),
        (3, "child"),
        (2, "king"),
        (1, "teacher"),
        (1, "river"),
        (1, "moon"),
        (1, "house"),
    ],
    "Quality": [(6, "old"), (4, "small"), (3, "red"), (2, "quiet"), (1, "wonderful")],
    "Place": [(8, "near"), (5, "behind"), (3, "above")],
    "Rests": [(7, "sleeps"), (5, "waits"), (3, "sings"), (1, "disappears")],
    "Takes": [(6, "sees"), (5, "likes"), (3, "follows"), (2, "remembers")],
    "Says": [(10, "says"), (4, "thinks"), (2, "forgets")],
}
"""Rules as (chance in parts of 16, expansion); a capital marks what is expanded further."""


@dataclass(frozen=True, kw_only=True)
class Grammar(Generator):
    """English-like sentences of a probabilistic context-free grammar, with clauses inside clauses.

    Format: a sentence per line, ``the old dog near the house sees the cat .``; words and the dot are separated by one
    space. A sentence has one derivation only, for the grammar tells every rule apart by the words that follow, so the
    entropy of a sentence is that of its rules. The text is cut after ``size`` characters.
    """

    name = "grammar"
    size: int = size_setting()

    def chunks(self) -> Iterator[str]:
        # 16 entries each, one for every draw; the last symbol first, as the stack gives them back.
        rules = {
            symbol: [tuple(reversed(right.split())) for weight, right in choices for _ in range(weight)]
            for symbol, choices in _GRAMMAR.items()
        }
        draws = self.bits().endless(num_bits=4)
        remaining, words, stack = self.size, list[str](), list[str]()
        while remaining > 0:
            length = 0
            while length < min(CHUNK, remaining):
                symbol = stack.pop() if stack else "Sentence"
                if symbol in rules:
                    stack.extend(rules[symbol][next(draws)])
                else:
                    words.append(_written(symbol))
                    length += len(words[-1])
            yield "".join(words)[:remaining]
            remaining -= length
            words.clear()

    def known(self) -> KnownAnswer:
        symbols = list(_GRAMMAR)
        produces = np.zeros((len(symbols), len(symbols)))
        bits, length = np.zeros(len(symbols)), np.zeros(len(symbols))
        for row, choices in enumerate(_GRAMMAR.values()):
            for weight, right in choices:
                chance = weight / 16
                bits[row] -= chance * math.log2(chance)
                for symbol in right.split():
                    if symbol in _GRAMMAR:
                        produces[row, symbols.index(symbol)] += chance
                    else:
                        length[row] += chance * len(_written(symbol))
        # Expected uses of every symbol in one sentence: uses = first + produces' uses.
        first = np.array([symbol == "Sentence" for symbol in symbols], float)
        uses = np.linalg.solve(np.eye(len(symbols)) - produces.T, first)
        rate = float(uses @ bits / (uses @ length))
        return KnownAnswer(rate, "entropy of a sentence's rules over its mean length; needs the stack of open clauses")


def _written(word: str) -> str:
    return ".\n" if word == "." else f"{word} "


@dataclass(frozen=True, kw_only=True)
class Zipf(Generator):
    """Words drawn independently with a natural rank-frequency curve, for speed tests with large vocabularies.

    Format: 20 words per line, such as ``ta ne runo``. The word of rank r has a chance proportional to 1 / (r + 2.7)
    (Mandelbrot 1953), and frequent words are short. The text begins with every word once, in random order, so that
    the vocabulary is complete; from there on the entropy rate holds, and only line ends are determined.
    """

    name = "zipf"
    words: int = setting(200_000, 1, 10**9)
    vocabulary: int = setting(10_000, 2, 300_000)

    _WORDS_PER_LINE: ClassVar[int] = 20
    _SYLLABLES: ClassVar[list[str]] = [consonant + vowel for consonant in "tnrslkdmpvbfgz" for vowel in "aeiou"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.words < self.vocabulary:
            raise UserError(
                f"synthetic:zipf: words is {self.words}, less than vocabulary ({self.vocabulary}); "
                "every word occurs at least once, so ask for more words or a smaller vocabulary"
            )

    @cached_property
    def spelling(self) -> list[str]:
        """The word of each rank, the most frequent first: 70 words of one syllable, then two, then three."""
        return [self._spell(rank) for rank in range(self.vocabulary)]

    def _spell(self, rank: int) -> str:
        more, last = divmod(rank, len(self._SYLLABLES))
        return (self._spell(more - 1) if more else "") + self._SYLLABLES[last]

    @cached_property
    def weights(self) -> Int64:
        """Frequency of each rank, in whole parts of their sum."""
        return 10 * 2**32 // (10 * np.arange(1, self.vocabulary + 1) + 27)

    def chunks(self) -> Iterator[str]:
        bits = self.bits()
        ranks = bits.choose(self.vocabulary, among=self.vocabulary, rows=1)[0]
        edges = np.cumsum(self.weights).astype(np.uint64)
        step = CHUNK // self._WORDS_PER_LINE * self._WORDS_PER_LINE
        spelled = np.array(self.spelling, dtype=object)
        for start in range(0, self.words, step):
            count = min(step, self.words - start)
            drawn = np.searchsorted(edges, bits.words(count) % edges[-1], side="right")
            opening = ranks[start : start + count]
            drawn[: len(opening)] = opening
            chosen = spelled[drawn].tolist()
            lines = (chosen[at : at + self._WORDS_PER_LINE] for at in range(0, count, self._WORDS_PER_LINE))
            yield "".join(" ".join(line) + "\n" for line in lines)

    def known(self) -> KnownAnswer:
        chances = self.weights / self.weights.sum()
        bits_per_word = float(-(chances * np.log2(chances)).sum())
        chars_per_word = float(chances @ np.array([len(word) for word in self.spelling])) + 1
        return KnownAnswer(
            bits_per_word / chars_per_word, f"{bits_per_word:.4f} bits per word; a unigram model of words reaches it"
        )
