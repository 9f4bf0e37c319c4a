"""The generators: the same bytes everywhere, entropies that counting confirms, answers that other code finds too."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache

import numpy as np
import pytest

from elman.errors import UserError
from elman.text.synthetic import GENERATORS, Bits, parse
from elman.text.synthetic.chance import _GRAMMAR, Grammar, Markov, Zipf
from elman.text.synthetic.tasks import Dyck, Task

TASKS = [name for name, generator in GENERATORS.items() if issubclass(generator, Task)]

GOLDEN = {
    "markov": "429f1f46db79a02b98d90b8e52be3d61640f89bdb4a9675646d68f09ca650e12",
    "grammar": "83b4fc503e6072318eab2119103e535a1ea9dc14e92931fd71edc7995d2e8436",
    "zipf": "df7fde52df1c659b46fc174d757120f881de25b9793c8dadbd1e0e05a171c598",
    "dyck": "d6eb75e994ca95582b53caede9279521a2147b13ed6f296f8d2cab90808f6593",
    "anbn": "4a45eaa84a193c695ca20cd58fe7507f677f290cbe28c84aedbe8369d8958925",
    "copying": "c4522f9141d9b85408868036b37fdc32a63b58a603c8e0d4ae31b7de1e5d52cc",
    "reversing": "6f9d64320727835022615fc1351dc1cf8530d8d5ec9ca7bed6d1103e4d8b0759",
    "selective-copying": "b4529ffa0b43552a67e47fa883aec89fbea147f88707d6c8b4b713a8aeac19b3",
    "associative-recall": "89b2e3718ceff7e85ee982bdbce7ef24501894a9229422d73e269c5afd1fea72",
    "parity": "bb31fe0a2e420ca0214725c2ac58b82b7a5a1e7b5a7a21ff09f1cee5b3fa3d6b",
    "modular-arithmetic": "a6722ffe0ed7fe35e86fe8c6a844e36511ff82f7583eadafc493159662bedbc2",
    "adding": "98a9cfbde9910bd00ca1dd6aef7c7dd2cd6b623bc6d3af488252d7c8541ff599",
    "quotes": "f48600cce5dbe7aa96008986dada7c57c676d6ac29ce1fc42559f269e1c79297",
    "agreement": "656ca632ce01ea0cc808509aecf618afb99451c65f350a5c6b8b3af75e709d06",
}


@pytest.mark.parametrize("name", GENERATORS)
def test_the_default_text_is_the_same_on_every_machine(name):
    assert hashlib.sha256(parse(name).text().encode()).hexdigest() == GOLDEN[name]


@pytest.mark.parametrize("name", GENERATORS)
def test_another_seed_is_another_text_and_pieces_are_small(name):
    assert parse(f"{name},seed=1").text() != parse(name).text()
    assert max(map(len, parse(name).chunks())) <= 4_000_000
    assert parse(parse(name).specification) == parse(name)


# The source of chance


def splitmix64(key: int) -> Iterable[int]:
    """The generator as its authors give it, on Python's whole numbers."""
    mask = 2**64 - 1
    while True:
        key = (key + 0x9E3779B97F4A7C15) & mask
        z = key
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_bits_are_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [number for number, _ in zip(splitmix64(1234567), published, strict=False)] == published
    bits = Bits("copying", 7)
    drawn = [*bits.words(3).tolist(), *bits.words(2).tolist()]
    key = int.from_bytes(hashlib.sha256(b"copying:7").digest()[:8], "little")
    assert drawn == [number for number, _ in zip(splitmix64(key), range(5), strict=False)]


def test_numbers_below_a_bound_are_uniform_and_choices_differ():
    counts = np.bincount(Bits("a", 0).below(7, 70_000), minlength=7)
    assert len(counts) == 7
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # chi-square, 6 degrees of freedom, p = 0.001
    rows = Bits("b", 0).choose(3, among=5, rows=6000)
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in rows.tolist())
    counts = np.unique(rows, axis=0, return_counts=True)[1]
    assert len(counts) == 60
    assert ((counts - 100) ** 2 / 100).sum() < 98.3  # 59 degrees of freedom


# Entropy rates


def conditional_entropy(pairs: Iterable[tuple[object, object]]) -> float:
    """Bits of the second given the first, counted."""
    pairs = list(pairs)
    context = Counter(first for first, _ in pairs)
    return -sum(n * math.log2(n / context[first]) for (first, _), n in Counter(pairs).items()) / len(pairs)


@pytest.mark.parametrize(("order", "symbols"), [(0, 3), (1, 26), (2, 4), (3, 2)])
def test_markov_entropy_is_what_counting_finds(order, symbols):
    source = Markov(order=order, symbols=symbols, size=300_000)
    text, rate = source.text(), source.known().entropy_bits_per_char
    assert len(text) == 300_000
    counted = conditional_entropy((text[i - order : i], text[i]) for i in range(order, len(text)))
    assert counted == pytest.approx(rate, abs=0.005)
    if order:
        blind = conditional_entropy((text[i - order + 1 : i], text[i]) for i in range(order, len(text)))
        assert blind > rate + 0.02


def test_markov_entropy_is_the_closed_form():
    """Against the eigenvector of the full transition matrix over pairs of letters, built letter by letter."""
    source = Markov(order=2, symbols=3, seed=5)
    assert (source.weights.sum(axis=1) == 1024).all()
    assert source.weights.min() >= 1024 // 48
    full = np.zeros((9, 9))
    for a in range(3):
        for b in range(3):
            for c in range(3):
                full[3 * a + b, 3 * b + c] = source.weights[3 * a + b, c] / 1024
    values, vectors = np.linalg.eig(full.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.where(full > 0, -full * np.log2(full), 0.0)
    assert source.known().entropy_bits_per_char == pytest.approx(float(stationary @ surprise.sum(axis=1)), abs=1e-12)


def test_grammar_entropy_is_what_parsing_its_text_finds():
    """Parsing sums over all derivations, so that an ambiguous sentence would show, here and in the sum of bits."""
    rules = {
        symbol: [(weight / 16, right.split()) for weight, right in choices] for symbol, choices in _GRAMMAR.items()
    }
    assert all(sum(chance for chance, _ in choices) == 1 for choices in rules.values())
    text = Grammar(size=300_000).text()
    sentences = text.split("\n")[:-1]
    bits = []
    for sentence in sentences:
        words = sentence.split(" ")

        @cache
        def derivations(
            symbol: str, start: int, words: tuple[str, ...] = tuple(words)
        ) -> tuple[tuple[int, float], ...]:
            """(end, chance) of every derivation of the symbol from this word on."""
            if symbol not in rules:
                return ((start + 1, 1.0),) if start < len(words) and words[start] == symbol else ()
            found = []
            for chance, right in rules[symbol]:
                partial = [(start, chance)]
                for part in right:
                    partial = [(end, p * q) for at, p in partial for end, q in derivations(part, at, words)]
                found += partial
            return tuple(found)

        whole = [chance for end, chance in derivations("Sentence", 0) if end == len(words)]
        assert len(whole) == 1, sentence
        bits.append(-math.log2(whole[0]))
    measured = sum(bits) / (sum(map(len, sentences)) + len(sentences))
    assert measured == pytest.approx(Grammar().known().entropy_bits_per_char, rel=0.01)


def test_zipf_has_every_word_and_the_frequencies_of_its_curve():
    source = Zipf(words=200_000, vocabulary=2000)
    words = source.text().split()
    assert len(words) == 200_000
    assert all(len(line.split()) == 20 for line in source.text().splitlines())
    assert len(set(words[:2000])) == 2000
    assert set(words) == set(words[:2000]) == set(source.spelling)
    chances = [1 / (rank + 2.7) for rank in range(1, 2001)]
    drawn = Counter(words[2000:])
    for rank in (1, 2, 10, 100):
        expected = chances[rank - 1] / sum(chances) * 198_000
        assert drawn[source.spelling[rank - 1]] == pytest.approx(expected, abs=5 * math.sqrt(expected))
    bits = sum(-p / sum(chances) * math.log2(p / sum(chances)) for p in chances)
    length = sum(p / sum(chances) * (len(word) + 1) for p, word in zip(chances, source.spelling, strict=True))
    assert source.known().entropy_bits_per_char == pytest.approx(bits / length, rel=1e-6)
    assert len(set(Zipf(words=33_278, vocabulary=33_278).text().split())) == 33_278


@pytest.mark.parametrize("specification", ["dyck,depth=1,kinds=1", "dyck,depth=3", "dyck,depth=2,kinds=4"])
def test_dyck_entropy_is_what_counting_finds(specification):
    source = parse(f"{specification},size=200000")
    pairs, stack = [], ""
    for character in source.text():
        pairs.append((stack, character))
        stack = "" if character == "\n" else stack + character if character in "([{<" else stack[:-1]
        if not stack and character in ")]}>":
            stack = "end"  # the line ends before anything opens
    assert conditional_entropy(pairs) == pytest.approx(source.known().entropy_bits_per_char, abs=0.005)


SMALL = [
    "anbn,longest=5",
    "copying,length=3,symbols=3,delay=2",
    "reversing,longest=3,symbols=3",
    "selective-copying,length=2,symbols=3,blanks=3",
    "associative-recall,pairs=1",
    "parity,length=6",
    "modular-arithmetic,terms=2,modulus=4",
    "adding,length=2",
    "quotes,distance=1,gap=1,kinds=3",
    "agreement,most=0",
    "agreement,fewest=1,most=1",
]


@pytest.mark.parametrize("specification", SMALL)
def test_task_entropy_is_that_of_its_lines_counted(specification):
    source = parse(f"{specification},examples=60000")
    lines = Counter(source.text().splitlines())
    bits = conditional_entropy(("", line) for line in lines.elements())
    bits += (len(lines) - 1) / (2 * 60_000 * math.log(2))  # the bias of counting, to first order (Miller 1955)
    length = sum(n * (len(line) + 1) for line, n in lines.items()) / 60_000
    assert bits / length == pytest.approx(source.known().entropy_bits_per_char, rel=0.005)
    assert {parse(each).name for each in SMALL} == set(TASKS)


# Answers, checked by code that shares nothing with the generators


def is_anbn(line: str) -> bool:
    half = len(line) // 2
    return half > 0 and line == "a" * half + "b" * half


def is_copying(line: str) -> bool:
    question, answer = line.split("|")
    return [letter for letter in question if letter.isalpha()] == list(answer) and question.endswith("." * 3)


def is_reversing(line: str) -> bool:
    question, answer = line.split("\t")
    half = len(question)
    return 1 <= half == len(answer) <= 10 and all(question[i] == answer[half - 1 - i] for i in range(half))


def is_selective_copying(line: str) -> bool:
    question, answer = line.split("|")
    return len(answer) == 10 and "".join(re.findall("[a-z]+", question)) == answer


def is_recall(line: str) -> bool:
    pairs, asked = line.split("?")
    table = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return len(table) == len(pairs) // 2 and table[asked[0]] == asked[1:]


def is_parity(line: str) -> bool:
    digits, answer = line.split("=")
    state = False
    for digit in digits:
        state ^= digit == "1"
    return answer == "01"[state]


def is_arithmetic(line: str) -> bool:
    question, answer = line.split("=")
    value = 0
    for sign, digit in re.findall(r"([-+*]|^)(\d)", question):
        value = value * int(digit) if sign == "*" else value + int(sign + digit)
    return len(answer) == 1 and value % 5 == int(answer)


def is_adding(line: str) -> bool:
    question, answer = line.split("=")
    marked = [int(part[0]) for part in question.split("*")[1:]]
    return len(marked) == 2 and len(answer) == 2 and sum(marked) == int(answer)


def is_quotes(line: str) -> bool:
    signs = [place for place, character in enumerate(line) if character in "\"'`|"]
    return len(signs) == 2 and signs[1] - signs[0] == 21 and line[signs[0]] == line[-1] and signs[0] >= 1


def is_agreement(line: str) -> bool:
    words = line.split()
    nouns = words[1:-2:3]
    return len(nouns) <= 21 and (words[-2] == "are") == (nouns[0][-1] == "s") and words[-2] in ("is", "are")


CHECKERS: dict[str, Callable[[str], bool]] = {
    "anbn": is_anbn,
    "copying,delay=3": is_copying,
    "reversing": is_reversing,
    "selective-copying": is_selective_copying,
    "associative-recall": is_recall,
    "parity": is_parity,
    "modular-arithmetic": is_arithmetic,
    "adding": is_adding,
    "quotes,kinds=4": is_quotes,
    "agreement": is_agreement,
}


@pytest.mark.parametrize("specification", CHECKERS)
def test_every_answer_is_right_and_is_found(specification):
    source, holds = parse(f"{specification},examples=2000,seed=3"), CHECKERS[specification]
    text = source.text()
    lines = text.splitlines()
    assert len(lines) == 2000
    assert [line for line in lines if not holds(line)] == []
    spans = source.answers(text)
    assert len(spans) == 2000
    assert source.score(text) == (2000, 2000)
    ends = [match.end() for match in re.finditer("\n", text)]
    if source.name == "agreement":
        assert {text[start:end] for start, end in spans} == {"is", "are"}
    else:
        assert [end for _, end in spans] == ends
    assert {parse(each).name for each in CHECKERS} == set(TASKS)


@pytest.mark.parametrize("specification", CHECKERS)
def test_a_wrong_answer_is_counted_as_wrong(specification):
    """Every answer is exchanged for that of another example; the checker above says how many are right by luck."""
    source, holds = parse(f"{specification},examples=300"), CHECKERS[specification]
    text = source.text()
    spans = source.answers(text)
    answers = [text[start:end] for start, end in spans]
    parts, last = [], 0
    for (start, end), answer in zip(spans, [*answers[1:], answers[0]], strict=True):
        parts += [text[last:start], answer]
        last = end
    exchanged = "".join([*parts, text[last:]])
    right, total = source.score(exchanged)
    assert total == 300
    assert right == sum(map(holds, exchanged.splitlines())) < 300


def test_dyck_is_balanced_and_answers_are_its_closing_brackets():
    source = Dyck(size=20_000, kinds=3, depth=5)
    text = source.text()
    assert len(text) == 20_000
    deepest = 0
    for line in text.split("\n")[:-1]:
        reduced, rounds = line, 0
        while reduced != (reduced := re.sub(r"\(\)|\[\]|\{\}", "", reduced)):
            rounds += 1
        assert reduced == ""
        assert line
        deepest = max(deepest, rounds)
    assert deepest == 5
    assert "".join(text[start:end] for start, end in source.answers(text)) == "".join(re.findall(r"[\])}]", text))
    assert source.score(text) == (len(source.answers(text)),) * 2
    assert source.score("([)]\n(]))") == (0, 5)
    assert source.score("([]){}>") == (3, 4)


def test_agreement_spans_zero_to_twenty_distractors_evenly():
    counts = Counter(line.count(" the ") for line in parse("agreement,examples=21000").text().splitlines())
    assert sorted(counts) == list(range(21))
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_texts_of_chance_alone_have_no_answers():
    for name in ("markov", "grammar", "zipf"):
        source = parse(name)
        assert source.answers("the dog sleeps .\n") == []
        assert source.score("the dog sleeps .\n") == (0, 0)


# Specifications


def _edges() -> Iterable[str]:
    for name, generator in GENERATORS.items():
        for parameter in fields(generator):
            lowest, highest = parameter.metadata["range"]
            if parameter.name not in ("words", "vocabulary"):
                yield f"{name},{parameter.name}={lowest}"
            if parameter.name in ("kinds", "modulus", "symbols", "pairs", "seed") and name != "markov":
                yield f"{name},{parameter.name}={highest}"


@pytest.mark.parametrize("specification", sorted(_edges()))
def test_the_ends_of_every_range_work(specification):
    source = parse(specification)
    text = source.text()
    assert text
    assert source.known().entropy_bits_per_char >= 0
    right, total = source.score(text)
    assert right == total
    assert total == len(source.answers(text))


@pytest.mark.parametrize(
    ("specification", "says"),
    [
        ("markow", "unknown generator 'synthetic:markow'; did you mean 'markov'?"),
        ("", "unknown generator 'synthetic:'"),
        ("markov,oder=3", "synthetic:markov has no parameter 'oder'; did you mean 'order'?"),
        ("markov,order", "'order'; accepted: order=NUMBER"),
        ("markov,order=two", "'order=two'; accepted: order=NUMBER"),
        ("markov,order=-1", "'order=-1'; accepted: order=NUMBER"),
        ("markov,order=1,order=2", "once"),
        ("markov,order=99", "order is 99; accepted: 0 to 12"),
        ("markov,order=5,symbols=26", "accepted: symbols ** order up to 4096"),
        ("zipf,words=100", "less than vocabulary (10000)"),
        ("agreement,fewest=9,most=8", "fewest is 9; accepted: 0 to most (8)"),
        ("reversing,shortest=9,longest=8", "shortest is 9; accepted: 1 to longest (8)"),
        ("adding,length=1", "length is 1; accepted: 2 to"),
    ],
)
def test_a_wrong_specification_is_one_line_that_helps(specification, says):
    with pytest.raises(UserError) as raised:
        parse(specification)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_generator_describes_itself():
    for name, generator in GENERATORS.items():
        assert generator.name == name
        assert len((generator.__doc__ or "").splitlines()[0]) > 30
        assert generator().known().optimum


def test_an_answer_cut_off_at_the_front_is_not_taken_for_one():
    """A held-out part begins anywhere: what is left of a line counts only where it is a whole question."""
    text = parse("copying,examples=3").text()
    assert parse("copying").score(text[3:]) == (2, 2)


def test_counts_of_letters_follow_their_contexts():
    """Chance of the next letter, context by context, against the weights that the text was made from."""
    source = Markov(order=1, symbols=3, size=300_000)
    following: dict[str, Counter[str]] = defaultdict(Counter)
    text = source.text()
    for before, after in itertools.pairwise(text):
        following[before][after] += 1
    for context, counts in following.items():
        row = source.weights[ord(context) - 97] / 1024
        for letter, count in counts.items():
            chance = row[ord(letter) - 97]
            spread = math.sqrt(counts.total() * chance * (1 - chance))
            assert abs(count - counts.total() * chance) < 5 * spread
