"""The n-gram models once more, by their definitions word for word: dictionaries keyed by tuples, token by token."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

Gram = tuple[int, ...]


class Naive:
    """Probabilities of a text's n-grams.

    Args:
        tokens: the text, its boundary first.
        order: of the longest n-gram.
        vocab_size: V.
        reset_token: the boundary, where every document is a text of its own.
    """

    def __init__(self, tokens: Sequence[int], order: int, vocab_size: int, reset_token: int | None = None) -> None:
        self.order, self.vocab_size = order, vocab_size
        self.texts = [list(tokens)]
        if reset_token is not None:
            borders = [i for i, token in enumerate(tokens) if token == reset_token]
            self.texts = [
                list(tokens[start : end + 1])
                for start, end in zip(borders, [*borders[1:], len(tokens) - 1], strict=True)
            ]
        self.raw: dict[int, Counter[Gram]] = {k: Counter() for k in range(1, order + 1)}
        for text in self.texts:
            for i in range(1, len(text)):
                for k in range(1, min(order, i + 1) + 1):
                    self.raw[k][tuple(text[i + 1 - k : i + 1])] += 1
        self.after = {k: of_contexts(counts) for k, counts in self.raw.items()}


def of_contexts(counts: Counter[Gram]) -> dict[Gram, dict[int, int]]:
    """Counts by context and token."""
    found: dict[Gram, dict[int, int]] = defaultdict(dict)
    for gram, count in counts.items():
        found[gram[:-1]][gram[-1]] = count
    return found


class KneserNey(Naive):
    """Interpolated modified Kneser-Ney."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)
        self.discounts: dict[int, list[float]] = {}
        self.counts: dict[int, dict[Gram, dict[int, int]]] = {}
        for k in range(1, self.order + 1):
            a = self.raw[k] if k == self.order else self.continuations(k)
            self.counts[k] = of_contexts(a)
            n = [sum(count == value for count in a.values()) for value in range(5)]
            self.discounts[k] = discounts(n[1], n[2], n[3], n[4])

    def continuations(self, k: int) -> Counter[Gram]:
        before: dict[Gram, set[int]] = defaultdict(set)
        for gram in self.raw[k + 1]:
            before[gram[1:]].add(gram[0])
        found = Counter({gram: len(tokens) for gram, tokens in before.items()})
        for text in self.texts:
            if 2 <= k <= len(text):
                found[tuple(text[:k])] += 1
        return found

    def probability(self, token: int, context: Gram) -> float:
        k = len(context) + 1
        if k > self.order:
            return self.probability(token, context[k - self.order :])
        lower = self.probability(token, context[1:]) if context else 1 / self.vocab_size
        after = self.counts[k].get(context)
        if not after:
            return lower
        d, total = self.discounts[k], sum(after.values())
        count = after.get(token, 0)
        weight = sum(d[min(other, 3)] for other in after.values()) / total
        return (count - d[min(count, 3)]) / total + weight * lower


def discounts(n1: int, n2: int, n3: int, n4: int) -> list[float]:
    if not (n1 and n2):
        return [0, 0.5, 0.5, 0.5]
    y = n1 / (n1 + 2 * n2)
    if n3 and n4:
        three = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
        if min(three) > 0:
            return [0, *three]
    return [0, y, y, y]


class AddK(Naive):
    """Additive smoothing after the longest context that was seen."""

    k = 0.1

    def probability(self, token: int, context: Gram) -> float:
        context = context[max(0, len(context) - self.order + 1) :]
        after = self.after[len(context) + 1].get(context)
        if not after:
            return self.probability(token, context[1:])
        return (after.get(token, 0) + self.k) / (sum(after.values()) + self.k * self.vocab_size)


class StupidBackoff(Naive):
    """Scores of stupid backoff, divided by their sum."""

    def score(self, token: int, context: Gram) -> float:
        after = self.after[len(context) + 1].get(context, {})
        if token in after:
            return after[token] / sum(after.values())
        if not context:
            return 0.4 / self.vocab_size
        return self.score(token, context[1:]) * (0.4 if after else 1)

    def probability(self, token: int, context: Gram) -> float:
        context = context[max(0, len(context) - self.order + 1) :]
        return self.score(token, context) / sum(self.score(other, context) for other in range(self.vocab_size))
