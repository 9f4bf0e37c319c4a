"""What an n-gram model knows, as a tree of contexts in flat arrays, and the compiled kernels that read it.

Shape letters: N positions of a text, K tokens of a context, V vocabulary.

The model is in back-off form. For the context h of the last tokens and the context h' without the oldest of them:

    p(w | h) = stored(h w)              where the n-gram h w is stored
             = weight(h) p(w | h')      where it is not; the weight of a context that is not stored is 1
    p(w | no token at all) = 1 / V

An interpolated model is of this form too: what is stored is the interpolated probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elman.errors import ElmanError
from elman.scan.linear import compiled

Ids: TypeAlias = NDArray[np.int64]
Reals: TypeAlias = NDArray[np.float64]

_MAX_ENTRIES = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Tables:
    """Contexts and n-grams over V tokens.

    Context 0 is the empty one. The children of a context have one more token, on the older side, as the longer past
    has. Contexts are numbered length by length; the children of one stand side by side, ordered by that token. So do
    the n-grams of a context, ordered by the token predicted.
    """

    vocab_size: int
    context_tokens: NDArray[np.int32]
    """The oldest token of each context; 0 for the empty one."""
    first_child: NDArray[np.int32]
    """Context c has the children ``first_child[c]`` up to, and without, ``first_child[c + 1]``."""
    first_ngram: NDArray[np.int32]
    """Context c has the n-grams ``first_ngram[c]`` up to, and without, ``first_ngram[c + 1]``."""
    log_weights: Reals
    """Of each context, in nats."""
    ngram_tokens: NDArray[np.int32]
    """The token that each n-gram predicts."""
    log_probs: Reals
    """Of each n-gram, in nats."""

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """All but the size of the vocabulary, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    @property
    def bytes_per_context(self) -> int:
        """Memory of one context."""
        return sum(a.itemsize for a in (self.context_tokens, self.first_child, self.first_ngram, self.log_weights))

    @property
    def bytes_per_ngram(self) -> int:
        """Memory of one n-gram."""
        return self.ngram_tokens.itemsize + self.log_probs.itemsize

    @cached_property
    def first_of_length(self) -> list[int]:
        """The first context of each length, 0 tokens and on, and behind them the number of contexts."""
        first = [0]
        while first[-1] < len(self.context_tokens):
            first.append(int(self.first_child[first[-1]]))
        return first

    def num_ngrams(self, order: int) -> int:
        """How many n-grams of so many tokens are stored."""
        if order >= len(self.first_of_length):
            return 0
        start, end = self.first_of_length[order - 1 : order + 1]
        return int(self.first_ngram[end]) - int(self.first_ngram[start])

    def num_contexts(self, length: int) -> int:
        """How many contexts of so many tokens are stored."""
        if length + 1 >= len(self.first_of_length):
            return 0
        return self.first_of_length[length + 1] - self.first_of_length[length]

    def paths(self, contexts_NK: Ids) -> Ids:
        """The contexts on the way from none to all of the last K tokens, the newest one last: (N, K + 1).

        Where a context is not stored stands -1, and for all longer ones too.
        """
        num_positions, length = contexts_NK.shape
        paths = np.empty((num_positions, length + 1), np.int64)
        _kernels()[0](np.ascontiguousarray(contexts_NK), self.context_tokens, self.first_child, paths)
        return paths

    def score(self, contexts_NK: Ids, targets_N: Ids, *, backs_off: bool = True) -> tuple[Reals, Ids]:
        """Log-probabilities of targets in nats, and the lengths of the n-grams that they were found in, 0 for none.

        Args:
            contexts_NK: the last K tokens, the newest one last.
            targets_N: the token that follows.
            backs_off: by default what is not stored after a context is looked for after the shorter one. Otherwise its
                probability is weight(h) / V.
        """
        paths = self.paths(contexts_NK)
        log_probs, lengths = np.empty(len(paths)), np.empty(len(paths), np.int64)
        tables = (self.first_ngram, self.log_weights, self.ngram_tokens, self.log_probs, -np.log(self.vocab_size))
        _kernels()[1](paths, np.ascontiguousarray(targets_N), *tables, backs_off, log_probs, lengths)
        return log_probs, lengths

    def distributions(self, contexts_NK: Ids, *, backs_off: bool = True) -> Reals:
        """Log-probabilities of all tokens in nats, (N, V); as :meth:`score` gives them one by one."""
        paths = self.paths(contexts_NK)
        log_probs_NV = np.empty((len(paths), self.vocab_size))
        tables = (self.first_ngram, self.log_weights, self.ngram_tokens, self.log_probs, -np.log(self.vocab_size))
        _kernels()[2](paths, *tables, backs_off, log_probs_NV)
        return log_probs_NV

    def context_rows(self) -> list[Ids]:
        """The tokens of all contexts, for each length one array (contexts, length), the newest token last."""
        rows: list[Ids] = [np.zeros((1, 0), np.int64)]
        for start, end in zip(self.first_of_length[1:], self.first_of_length[2:], strict=False):
            above = self.first_of_length[len(rows) - 1]
            children = np.diff(self.first_child[above : start + 1])
            parents = np.repeat(np.arange(len(children)), children)
            rows.append(np.column_stack([self.context_tokens[start:end].astype(np.int64), rows[-1][parents]]))
        return rows

    def fault(self, order: int) -> str:
        """Why these arrays are no tables of this order, or nothing where they are.

        Tables may come from anywhere. Those without a fault are read without leaving an array.
        """
        num_contexts, num_ngrams = len(self.context_tokens), len(self.ngram_tokens)
        lengths = {
            "context_tokens": max(num_contexts, 1),
            "first_child": num_contexts + 1,
            "first_ngram": num_contexts + 1,
            "log_weights": num_contexts,
            "ngram_tokens": num_ngrams,
            "log_probs": num_ngrams,
        }
        for name, length in lengths.items():
            if self.arrays[name].shape != (length,):
                return f"{name} has the shape {list(self.arrays[name].shape)} where [{length}] belongs"
        for name in ("context_tokens", "ngram_tokens"):
            tokens = self.arrays[name]
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
                return f"{name} holds a token outside of the vocabulary"
        for name, start, end in (("first_child", 1, num_contexts), ("first_ngram", 0, num_ngrams)):
            borders = self.arrays[name]
            if borders[0] != start or borders[-1] != end or (np.diff(borders.astype(np.int64)) < 0).any():
                return f"{name} does not divide its table"
        if (self.first_child[:-1] <= np.arange(num_contexts)).any():
            return "first_child makes a context its own child"
        if len(self.first_of_length) - 1 > order:
            return f"its contexts are longer than those of order {order}"
        for name, borders in (("context_tokens", self.first_child), ("ngram_tokens", self.first_ngram)):
            tokens = self.arrays[name]
            falls = np.diff(tokens.astype(np.int64)) <= 0
            falls[borders[(borders > 0) & (borders < len(tokens))] - 1] = False
            if falls.any():
                return f"{name} is not sorted"
        for name in ("log_weights", "log_probs"):
            if not np.isfinite(self.arrays[name]).all():
                return f"{name} holds a number that is not finite"
        if (self.log_probs > _ROUNDING).any():
            return "log_probs holds a probability above one"
        return ""


_ROUNDING = 1e-6


def uniform_tables(vocab_size: int) -> Tables:
    """What is known before anything is counted: nothing."""
    return assemble(vocab_size, [], [np.zeros(0, np.int64)], [np.zeros(1)], [np.zeros(0)])


def assemble(
    vocab_size: int,
    contexts: Sequence[Ids],
    ngrams: Sequence[Ids],
    log_weights: Sequence[Reals],
    log_probs: Sequence[Reals],
) -> Tables:
    """Put tables together that were made length by length; contexts are numbered within their length.

    Args:
        vocab_size: V.
        contexts: for lengths 1, 2 and on, parent * V + oldest token of each context, sorted.
        ngrams: for orders 1, 2 and on, context * V + predicted token of each n-gram, sorted.
        log_weights: for lengths 0, 1 and on, of each context.
        log_probs: for orders 1, 2 and on, of each n-gram.
    """
    sizes = [len(weights) for weights in log_weights]
    if max(sum(sizes), sum(map(len, ngrams))) >= _MAX_ENTRIES:
        raise ElmanError(f"more than {_MAX_ENTRIES:,} n-grams: take a lower model.order, or a smaller vocabulary")
    none = np.zeros(0, np.int64)
    return Tables(
        vocab_size=vocab_size,
        context_tokens=np.concatenate([[0], *(keys % vocab_size for keys in contexts)]).astype(np.int32),
        first_child=1 + _borders(vocab_size, sizes, [*contexts, none]),
        first_ngram=_borders(vocab_size, sizes, ngrams),
        log_weights=np.concatenate(log_weights),
        ngram_tokens=np.concatenate([keys % vocab_size for keys in ngrams]).astype(np.int32),
        log_probs=np.concatenate(log_probs),
    )


def _borders(vocab_size: int, sizes: Sequence[int], below: Sequence[Ids]) -> NDArray[np.int32]:
    """Where the entries that belong to each context begin, and where the last ones end."""
    counts = [np.bincount(keys // vocab_size, minlength=size) for size, keys in zip(sizes, below, strict=True)]
    return np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int32)


@cache
def _kernels() -> tuple[Callable[..., None], ...]:
    return compiled(_find_contexts), compiled(_score), compiled(_fill)


def _find_contexts(contexts: Ids, context_tokens: Any, first_child: Any, paths: Ids) -> None:
    num_positions, length = contexts.shape
    for i in range(num_positions):
        paths[i, :] = -1
        paths[i, 0] = context = 0
        for depth in range(1, length + 1):
            token = contexts[i, length - depth]
            start, end = first_child[context], first_child[context + 1]
            at = start + np.searchsorted(context_tokens[start:end], token)
            if at == end or context_tokens[at] != token:
                break
            paths[i, depth] = context = at


def _score(
    paths: Ids, targets: Ids, first_ngram: Any, log_weights: Reals, ngram_tokens: Any, log_probs: Reals,
    log_uniform: float, backs_off: bool, found: Reals, lengths: Ids,
) -> None:  # fmt: skip
    for i in range(len(paths)):
        depth = paths.shape[1] - 1
        while paths[i, depth] < 0:
            depth -= 1
        total = 0.0
        while depth >= 0:
            context = paths[i, depth]
            start, end = first_ngram[context], first_ngram[context + 1]
            at = start + np.searchsorted(ngram_tokens[start:end], targets[i])
            if at < end and ngram_tokens[at] == targets[i]:
                total += log_probs[at]
                break
            total += log_weights[context]
            depth = depth - 1 if backs_off else -1
        found[i] = total if depth >= 0 else total + log_uniform
        lengths[i] = depth + 1


def _fill(
    paths: Ids, first_ngram: Any, log_weights: Reals, ngram_tokens: Any, log_probs: Reals,
    log_uniform: float, backs_off: bool, filled: Reals,
) -> None:  # fmt: skip
    for i in range(len(paths)):
        deepest = paths.shape[1] - 1
        while paths[i, deepest] < 0:
            deepest -= 1
        shallowest = 0 if backs_off else deepest
        weight = 0.0
        for depth in range(shallowest, deepest + 1):
            weight += log_weights[paths[i, depth]]
        filled[i, :] = weight + log_uniform
        for depth in range(shallowest, deepest + 1):  # what is stored after a longer context takes precedence
            context = paths[i, depth]
            weight -= log_weights[context]
            for j in range(first_ngram[context], first_ngram[context + 1]):
                filled[i, ngram_tokens[j]] = weight + log_probs[j]
