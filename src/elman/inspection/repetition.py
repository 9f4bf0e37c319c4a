"""Why does it loop? How much a text repeats itself, and whether decoding, training or the data is to blame.

The drawn texts are held against the training text too: the longest piece that stands there word for word.

A token counts as *repeated* where it lies in an n-gram that stood in the same text before. That share is measured in
texts drawn greedily and at rising temperatures, and held against pieces of the training text of the same length:

- at temperature 1, without any filter, a text is a fair draw from the model. If the training text is full of
  duplicates, a model that loops has learned them: **data**;
- if the training text is not, the model's own distribution is at fault: **training**;
- if the fair draw is as varied as the training text, and only greedy or cold draws loop, it is **decoding**: the most
  probable continuation of a repetition is a repetition (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751).

Shape letters: B rows, T time, V vocabulary, N tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from elman.config import SamplingConfig
from elman.data.texts import texts_of
from elman.engine import stepper
from elman.errors import TextError, UserError
from elman.generation import Generated, generate_batch
from elman.inspection.copies import Copied, copies_in
from elman.judge import dataset_of_run
from elman.models.file import Bundle, load_model
from elman.text.tokenizers import Tokenizer
from elman.translation import is_of_pairs

Ids: TypeAlias = npt.NDArray[np.integer[Any]]
Verdict: TypeAlias = Literal["none", "decoding", "training", "data"]

TEMPERATURES = (0.0, 0.3, 0.8, 1.0)
"""Greedy first, a fair draw last."""

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_SHARE_THAT_LOOPS = 0.2
_N = {"char": 20, "byte": 20, "word": 6, "bpe": 8}
"""Length of the n-grams: so long that they seldom recur by chance."""
_NUM_WINDOWS = 32
_NUM_QUARTERS = 4
_MAX_CORPUS_TOKENS = 4_000_000
_TOKENS_AT_ONCE = 512

_WORDS: Mapping[Verdict, str] = {
    "none": "nothing loops: drawn texts repeat themselves no more than the training text (nor would noise: look at the "
    "validation figure too)",
    "decoding": "decoding: a fair draw repeats itself no more than the training text, colder ones loop; draw at a "
    "higher temperature, with --top-p or --min-p, or give --repetition-penalty or --no-repeat-ngram-size",
    "training": "training: even a fair draw loops, and the training text does not; train longer or at a lower rate, "
    "and look at the validation figure",
    "data": "data: the training text repeats itself, and the model has learned that; remove duplicates and train again",
}


@dataclass(frozen=True)
class Repetition:
    """How much one text, or several of one length, repeat themselves."""

    tokens: int
    """Of one text."""
    repeated: float
    """Share of the tokens that lie in an n-gram seen before in the same text."""
    period: int | None
    """The most common distance between an n-gram and its last occurrence, in tokens; none where none recurs."""
    begins: int | None
    """The first token from which on at least nine in ten are repeated to the end: where a loop sets in."""
    distinct: tuple[float, ...]
    """Distinct n-grams over all n-grams, for n = 1, 2, 3, 4."""


@dataclass(frozen=True)
class Drawn:
    """Texts drawn at one temperature."""

    temperature: float
    repetition: Repetition
    """Means over the texts; period and begin are those of the one that repeats itself most."""
    entropy: tuple[float, ...]
    """Of the model's distribution at temperature 1, in nats, mean over each quarter of the texts."""
    corpus_words: float | None
    """Share of the words that stand in the training text; None where there are no words."""
    example: str
    """The end of the text that repeats itself most."""
    copied: Copied
    """Of the text with the longest piece that stands in the training text word for word."""


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and who is to blame."""

    verdict: Verdict
    n: int
    """Length of the n-grams, in tokens."""
    drawn: tuple[Drawn, ...]
    corpus: Repetition
    """Pieces of the training text, as long as the drawn texts."""
    duplicates: float
    """Share of the tokens of the training text that lie in an n-gram seen before anywhere in it, n being 2.5 times as
    long."""

    @property
    def words(self) -> str:
        """The verdict in a sentence, with what to do."""
        return _WORDS[self.verdict]

    @property
    def copied(self) -> Copied:
        """The longest piece of all texts that stands in the training text, and its text."""
        return max((one.copied for one in self.drawn), key=lambda copied: copied.longest)

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {"words": self.words, "copied": self.copied.to_dict()}


def n_for(level: str) -> int:
    """Length of the n-grams that repetition is measured by, for a level of tokens."""
    return _N[level]


def repetition(tokens: Ids, n: int) -> Repetition:
    """Measure one text.

    Raises:
        TextError: the text is shorter than two n-grams.
    """
    if len(tokens) < 2 * n:
        raise TextError(f"the text has {len(tokens)} tokens: to speak of repetition takes {2 * n} and more")
    last_seen = _last_occurrence(_ngram_keys(tokens, n))
    is_repeated = _covered(last_seen >= 0, n)
    lags = np.flatnonzero(last_seen >= 0) - last_seen[last_seen >= 0]
    return Repetition(
        tokens=len(tokens),
        repeated=float(is_repeated.mean()),
        period=int(np.bincount(lags).argmax()) if lags.size else None,
        begins=_onset(is_repeated),
        distinct=tuple(distinct_ngrams(tokens, size) for size in (1, 2, 3, 4)),
    )


def distinct_ngrams(tokens: Ids, n: int) -> float:
    """Distinct n-grams over all n-grams (Li et al. 2016, https://arxiv.org/abs/1510.03055); 1 where there are none."""
    if len(tokens) < n:
        return 1.0
    keys = _ngram_keys(tokens, n)
    return len(np.unique(keys)) / len(keys)


def words_in(text: str) -> list[str]:
    """The words of a text, without capitals: letters, with an apostrophe inside or none."""
    return [word.lower() for word in _WORD.findall(text)]


def corpus_words(train: Ids, tokenizer: Tokenizer) -> frozenset[str]:
    """The words of a training text, the boundary first, of which the first four million tokens are looked at."""
    texts = texts_of(train[:_MAX_CORPUS_TOKENS], tokenizer)
    return frozenset(words_in("".join("\n" if text is None else text for text in texts)))


def share_of_corpus_words(texts: Iterable[str], corpus_words: Set[str]) -> float | None:
    """The share of the words of some texts that stand in the corpus: near 1 once a model can spell.

    The first and the last word of each text may be cut off, and do not count. None where no word is left.
    """
    written = [word for text in texts for word in words_in(text)[1:-1]]
    return sum(word in corpus_words for word in written) / len(written) if written else None


def _ngram_keys(tokens: Ids, n: int) -> npt.NDArray[np.int64]:
    """A number for each n-gram, equal for equal ones and for no others: built up token by token, ranks of pairs."""
    keys = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    size = 1
    while size < n:
        grown = min(size, n - size)  # the first part and one that overlaps or follows it make a longer n-gram
        pairs = keys[: len(keys) - grown] * (keys.max() + 1) + keys[grown:]
        keys = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        size += grown
    return keys


def _last_occurrence(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each key stood last before, -1 where it is new."""
    order = np.argsort(keys, kind="stable")
    found = np.full(len(keys), -1, np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    found[order[1:][same]] = order[:-1][same]
    return found


def _covered(starts: npt.NDArray[np.bool_], n: int) -> npt.NDArray[np.bool_]:
    """The tokens of the n-grams that start where ``starts`` is true."""
    opened = np.zeros(len(starts) + n, np.int64)
    opened[: len(starts)] += starts
    opened[n:] -= starts
    return np.cumsum(opened)[: len(starts) + n - 1] > 0


def _onset(is_repeated: npt.NDArray[np.bool_]) -> int | None:
    """The first repeated token from which on at least nine in ten are repeated, up to the end."""
    to_end = np.cumsum(is_repeated[::-1])[::-1] / np.arange(len(is_repeated), 0, -1)
    candidates = np.flatnonzero(is_repeated & (to_end >= 0.9))
    return int(candidates[0]) if candidates.size and len(is_repeated) - candidates[0] > len(is_repeated) // 10 else None


def diagnose(
    where: str | Path, *, num_tokens: int = 600, num_samples: int = 8, seed: int = 0, cell: str | None = None
) -> Diagnosis:
    """Draw from a trained model and say whether, and why, its texts loop.

    Args:
        where: a run folder; its corpus is needed.
        num_tokens: length of the drawn texts.
        num_samples: texts at each temperature; greedily there is only one.
        seed: of the texts.
        cell: a person's own cell, where the model was trained with one.

    Raises:
        UserError: the folder has no corpus, the training text is too short, or the model is one of pairs.
    """
    bundle = load_model(where, cell=cell)
    if is_of_pairs(bundle):
        raise UserError(
            f"{str(where)!r} was trained on pairs and writes no text of its own: give a model of plain text"
        )
    train = dataset_of_run(where, cell=cell).train.tokens
    return diagnose_model(bundle, train, num_tokens=num_tokens, num_samples=num_samples, seed=seed)


def diagnose_model(bundle: Bundle, train: Ids, *, num_tokens: int, num_samples: int, seed: int = 0) -> Diagnosis:
    """The same for a model and the tokens that it was trained on, the boundary first.

    Of these the first four million are looked at for repetition and words, and all for copies.
    """
    n = n_for(bundle.tokenizer.level)
    if num_tokens < 4 * n:
        raise UserError(f"texts of {num_tokens} tokens are too short to loop: accepted: {4 * n} and more")
    if num_samples < 1:
        raise UserError(f"{num_samples} texts were asked for: accepted: 1 and more")
    whole, train = train, np.array(train[:_MAX_CORPUS_TOKENS], np.int64)
    if len(train) < 2 * num_tokens:
        raise UserError(f"the training text has {len(train)} tokens, too few to hold texts of {num_tokens} against it")
    words = corpus_words(train, bundle.tokenizer)
    texts = {
        temperature: draw_texts(bundle, temperature, num_samples if temperature else 1, num_tokens, seed=seed)
        for temperature in TEMPERATURES
    }
    written = [text.text for its in texts.values() for text in its]
    copies = copies_in(written, texts_of(whole, bundle.tokenizer))
    drawn = []
    for temperature, its in texts.items():
        longest = max(copies[: len(its)], key=lambda one: one.longest)
        drawn.append(_measured(bundle, temperature, its, n, words, longest))
        del copies[: len(its)]
    starts = np.linspace(0, len(train) - num_tokens, _NUM_WINDOWS).astype(int)
    corpus = _mean([repetition(train[start : start + num_tokens], n) for start in starts])
    longer = 5 * n // 2
    duplicates = float(_covered(_last_occurrence(_ngram_keys(train, longer)) >= 0, longer).mean())
    return Diagnosis(_verdict(drawn, corpus, duplicates), n, tuple(drawn), corpus, duplicates)


def draw_texts(bundle: Bundle, temperature: float, num_texts: int, num_tokens: int, *, seed: int) -> list[Generated]:
    """Texts of one length: one that ends early would be measured on fewer tokens, so the boundary is put off.

    Args:
        bundle: the model.
        temperature: 0 takes the most probable token each time.
        num_texts: so many, with one seed after the other.
        num_tokens: of each.
        seed: of the first.
    """
    settings = SamplingConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens, temperature=temperature, top_p=1.0)
    seeds = range(seed, seed + num_texts)
    return generate_batch(bundle, [""] * num_texts, seeds=seeds, settings=settings, stepper=stepper(bundle.network))


def _measured(
    bundle: Bundle, temperature: float, texts: Sequence[Generated], n: int, words: Set[str], copied: Copied
) -> Drawn:
    tokens = [np.array(text.tokens) for text in texts]
    found = [repetition(one, n) for one in tokens]
    worst = max(range(len(found)), key=lambda index: found[index].repeated)
    example = bundle.tokenizer.decode(tokens[worst][-8 * n :])
    known = share_of_corpus_words((text.text for text in texts), words)
    return Drawn(temperature, _mean(found), entropy_along(bundle, tokens), known, example, copied)


def entropy_along(bundle: Bundle, texts: Sequence[Ids]) -> tuple[float, ...]:
    """The entropy of the model's prediction along texts of equal length, in nats: its mean over each quarter."""
    network, boundary = bundle.network, bundle.tokenizer.boundary_id
    tokens_BT = torch.tensor(np.stack([np.concatenate([[boundary], text[:-1]]) for text in texts]))
    state, entropies = network.initial_state(len(texts)), []
    with torch.no_grad():
        for piece_BT in tokens_BT.split(_TOKENS_AT_ONCE, dim=1):
            features_BTF, state = network.features(piece_BT.to(network.device), state)
            log_probs_BTV = network.head.log_probs(features_BTF).double()
            entropies.append(torch.special.entr(log_probs_BTV.exp()).sum(-1).mean(0))
    return tuple(quarter.mean().item() for quarter in torch.cat(entropies).tensor_split(_NUM_QUARTERS))


def _mean(found: Sequence[Repetition]) -> Repetition:
    """Shares averaged; period and begin of the text that repeats itself most."""
    worst = max(found, key=lambda one: one.repeated)
    return Repetition(
        tokens=found[0].tokens,
        repeated=math.fsum(one.repeated for one in found) / len(found),
        period=worst.period,
        begins=worst.begins,
        distinct=tuple(math.fsum(values) / len(found) for values in zip(*(f.distinct for f in found), strict=True)),
    )


def _verdict(drawn: Sequence[Drawn], corpus: Repetition, duplicates: float) -> Verdict:
    loops = [one.repetition.repeated >= max(_SHARE_THAT_LOOPS, corpus.repeated) for one in drawn]
    if duplicates >= _SHARE_THAT_LOOPS and any(one.repetition.repeated >= _SHARE_THAT_LOOPS for one in drawn):
        return "data"
    if loops[-1]:
        return "training"
    return "decoding" if any(loops) else "none"
