"""Which unit of a network follows what in a text, and the proof that the network uses it.

For every label of a text (:mod:`elman.inspection.labels`) and every part of the state, the unit that tells it best is
chosen on the first half of the text and scored on the second. That alone proves nothing: among hundreds of units that
were never trained one tells capitals or line ends well. So each claim is held against the same search in untrained
models of the same shape, and against an intervention: the unit is held at its mean while the text is read, and the odds
of what the label lets a model predict must change by more than if other units are held. Intervals are of 95 %.

Shape letters: K tokens that were kept, U units, L labels, T time, N blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman.errors import TextError, UserError
from elman.inspection.intervention import Hold, held_parts, intervene
from elman.inspection.labels import LABELS, Given, Label, Labeller, Matched, Scanned, governed, label_lines, texts_of
from elman.inspection.predictions import first_tokens, load_plain
from elman.inspection.recording import Ids, Plan, Recording, Values, plan_for, record, unit_of
from elman.inspection.selectivity import (
    BLOCK,
    Bootstrap,
    Chosen,
    Ranked,
    block_means,
    block_sums,
    interval,
    ranks,
    score_of,
)
from elman.inspection.watching import watch, watchable
from elman.judge import SplitName, find_subject
from elman.models.contract import LanguageModel
from elman.models.file import Bundle
from elman.models.kinds import build_model
from elman.text.tokenizers import Tokenizer

Interval = tuple[float, float]

_UNTRAINED_SEEDS = (0, 1, 2)
_RANDOM_UNITS = 30
_MIN_VARIED, _MIN_PLACES = 20, 5
"""Tokens in each half that differ in a label from the others, and places where such tokens stand in a row; a label that
has fewer is not looked for."""
_HELD_TOKENS = 4096
_SHOWN_TOKENS = 500
_NUM_PASSAGES = 5
_PASSAGE = 40
_SATURATED_AT, _SATURATED_SHARE = 0.95, 0.9
_RIDGE = 1e-2


@dataclass(frozen=True)
class Passage:
    """A place at which a unit is high, or low."""

    position: int
    """Of the token, in the text."""
    before: str
    at: str
    after: str
    value: float


@dataclass(frozen=True)
class Claim:
    """A unit that follows a label, or seems to."""

    label: str
    words: str
    part: str
    unit: int
    sign: int
    """1 where high values tell the label, -1 where low ones do."""
    threshold: float | None
    """Beyond which the label is taken for true; none for a graded label."""
    chosen_score: float
    """On the half of the text that the unit was chosen on."""
    score: float
    """On the other half: F1, or the rank correlation with a graded label."""
    score_interval: Interval
    untrained_score: float
    """Of the best unit of any part that the same search finds in three untrained models."""
    gain_interval: Interval
    """Of the score over the untrained one."""
    consequence: str
    """What the next token should be more or less often; empty: the whole prediction is looked at."""
    effect: float
    """By how much the log-odds of that change at a token, in the mean, in nats, while the unit is held at its mean; of
    the whole prediction the total variation, 0 to 1."""
    effect_interval: Interval
    random_interval: Interval | None
    """Of the effects of other units of the part, each held at its mean; none where there is no other unit."""
    margin_interval: Interval | None
    """Of the effect less the upper end of theirs, both on the same resamples of the text."""
    nats_lost: float
    """What holding the unit costs for each token, in the mean."""
    shift_true: float
    """Mean change of the log-odds, with its sign, with the unit held where it is when the label is true, or high."""
    shift_false: float
    """With the unit held where it is when the label is false, or low."""
    profile: tuple[tuple[float, float], ...]
    """Of a graded label: its values, and the mean of the unit at each."""
    passages: tuple[Passage, ...]
    """Where it tells the label most: the highest values, the lowest where low ones tell it."""

    @property
    def beats_untrained(self) -> bool:
        """Whether the score is above that of untrained models by more than chance."""
        return self.gain_interval[0] > 0

    @property
    def passes_intervention(self) -> bool:
        """Whether the effect of holding it lies beyond the interval of random units, by more than chance."""
        return self.margin_interval is not None and self.margin_interval[0] > 0

    @property
    def holds(self) -> bool:
        """Whether it passes both."""
        return self.beats_untrained and self.passes_intervention

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        verdicts = {name: getattr(self, name) for name in ("beats_untrained", "passes_intervention", "holds")}
        return asdict(self) | verdicts


@dataclass(frozen=True)
class Probe:
    """How well a linear map of all units together tells a label, and the controls that say what that is worth."""

    label: str
    score: float
    score_interval: Interval
    shuffled: float
    """The same with the labels in random order."""
    untrained: float
    """The same on an untrained model."""


@dataclass(frozen=True)
class Health:
    """The units of one part that say nothing."""

    part: str
    units: int
    dead: tuple[int, ...]
    """Those that hardly move: a hundredth of the median deviation at most."""
    saturated: tuple[int, ...]
    """Those beyond 0.95 in nine of ten tokens (of parts that leave -1 to 1, tanh is taken first)."""
    saturation: float
    """Share of all values beyond 0.95."""


@dataclass(frozen=True)
class Shown:
    """A unit along the beginning of the second half of the text."""

    part: str
    unit: int
    scale: float
    """The quantile 0.99 of its absolute values: what counts as full colour."""
    values: tuple[float, ...]
    """After each token of the passage."""
    passages: tuple[Passage, ...]
    """Where it is highest."""
    is_asked: bool
    """Whether it was asked for, and not only found."""

    def rounded(self, value: float) -> float:
        """A value to a thousandth of the scale: what is less is no more than rounding."""
        return round(value, 3 - math.floor(math.log10(self.scale))) + 0.0


@dataclass(frozen=True)
class Units:
    """What was found."""

    corpus: str
    split: str
    kind: str
    given: int
    """Tokens of the text, as many as were allowed."""
    tokens: int
    """Read of them: whole blocks."""
    kept: int
    """Of them, those that the search looked at; all where they fit into memory."""
    claims: tuple[Claim, ...]
    """Those that hold first, then by score."""
    probes: tuple[Probe, ...]
    health: tuple[Health, ...]
    absent: tuple[str, ...]
    """Labels that hardly vary in one half of the text: too little to be judged."""
    shown_texts: tuple[str, ...]
    shown: tuple[Shown, ...]
    notices: tuple[str, ...] = ()
    """What a reader of the figures should know about the text."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return asdict(self) | {"claims": [claim.to_dict() for claim in self.claims]}


def inspect_units(
    where: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    split: SplitName | None = None,
    labels: Sequence[str] = (),
    label_file: str | Path | None = None,
    units: Sequence[str] = (),
    max_tokens: int = 20_000,
    seed: int = 0,
    cell: str | None = None,
) -> Units:
    """Look for units that follow something in a text.

    Args:
        where: a run folder or a model file.
        text: files, a folder, a glob, ``-``, or the name of a corpus; none: the corpus of the run.
        split: which part; none: the test part, else the validation part.
        labels: names of :data:`elman.inspection.labels.LABELS`, and ``NAME=REGEX`` for others; none: all of the former.
        label_file: numbers, one for each token of the text: one more label.
        units: to be shown in any case, such as ``0.c:37``.
        max_tokens: read so many tokens of the text at most.
        seed: of what is drawn: random units, resamples.
        cell: a person's own cell, where the model was trained with one.

    Raises:
        UserError: there is no such unit or label, the text is too short or lacks a label that was asked for, or the
            model has no units.
    """
    bundle = load_plain(where, cell=cell)
    held_parts(bundle.network)  # refuses a model without units before a corpus is read
    subject = find_subject(where, bundle, text, split=split, cell=cell)
    found = find_units(
        bundle,
        subject.tokens.tokens,
        labels=labels,
        label_file=label_file,
        units=units,
        max_tokens=max_tokens,
        seed=seed,
    )
    return replace(found, corpus=subject.corpus, split=subject.split, notices=subject.notices)


def find_units(
    bundle: Bundle,
    tokens: Ids,
    *,
    labels: Sequence[str] = (),
    label_file: str | Path | None = None,
    units: Sequence[str] = (),
    max_tokens: int = 20_000,
    seed: int = 0,
) -> Units:
    """The same for tokens, the boundary first; see :func:`inspect_units`."""
    network, tokenizer = bundle.network, bundle.tokenizer
    parts = held_parts(network)
    asked = [unit_of(unit, watchable(network)) for unit in units]
    labellers = _labellers(labels, label_file, len(tokens) - 1)
    given = len(first_tokens(tokens, max_tokens)) - 1
    plan = plan_for(given, sum(parts.values()))
    tokens = tokens[: plan.num_tokens + 1]
    chosen_labels, values_KL, absent = _label(tokens, tokenizer, labellers, plan, required=bool(labels or label_file))
    recording = record(network, tokens, [*parts, *(part for part, _ in asked if part not in parts)], plan)
    rng = np.random.default_rng(seed)
    bootstrap = Bootstrap(plan.num_held_out_blocks, rng)
    search = _Search(chosen_labels, values_KL, plan.middle_row, bootstrap)
    own = {part: recording.values[part] for part in parts}
    chosen = search.best_by_part(own)
    untrained = _Untrained(network, tokens, list(parts), plan, search)
    held = _Held(bundle, tokens, plan, recording, search, chosen, rng)
    claims = _claims(tokenizer, tokens, plan, recording, search, chosen, untrained.best_sums, held)
    probes = tuple(search.probe(index, own, untrained.values, rng) for index in range(len(chosen_labels)))
    wanted = list(dict.fromkeys([*asked, *((claim.part, claim.unit) for claim in one_each(claims))]))
    texts, shown = _show(bundle, tokens, plan, recording, wanted, asked)
    return Units(
        corpus="",
        split="text",
        kind=network.config.kind,
        given=given,
        tokens=plan.num_tokens,
        kept=plan.num_kept,
        claims=claims,
        probes=probes,
        health=tuple(_health(part, recording.values[part]) for part in recording.values),
        absent=absent,
        shown_texts=texts,
        shown=shown,
    )


def _labellers(labels: Sequence[str], label_file: str | Path | None, num_tokens: int) -> list[Labeller]:
    named = [label for label in labels if "=" not in label]
    if not labels and label_file is None:
        named = [label.name for label in LABELS]
    labellers: list[Labeller] = [Scanned(named)] if named else []
    labellers += [Matched(label) for label in labels if "=" in label]
    if label_file is not None:
        labellers.append(Given(label_file, num_tokens))
    names = [label.name for labeller in labellers for label in labeller.labels]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two labels have the name {twice[0]!r}: give each another, and none twice")
    return labellers


def _label(
    tokens: Ids, tokenizer: Tokenizer, labellers: Sequence[Labeller], plan: Plan, *, required: bool
) -> tuple[list[Label], Values, tuple[str, ...]]:
    """The labels that there is something to find of, their values at the kept tokens (K, L), and the others' names."""
    labels = [label for labeller in labellers for label in labeller.labels]
    is_kept = np.zeros(plan.num_tokens // BLOCK, bool)
    is_kept[plan.kept_blocks] = True
    rows, start = [], 0
    for line_NL in label_lines(texts_of(tokens[:-1], tokenizer), labellers):
        rows.append(line_NL[is_kept[np.arange(start, start + len(line_NL)) // BLOCK]])
        start += len(line_NL)
    values_KL = np.concatenate(rows)
    halves = values_KL[: plan.middle_row], values_KL[plan.middle_row :]
    there = []
    for index, label in enumerate(labels):
        if all(_varies(half[:, index]) for half in halves):
            there.append(index)
        elif required:
            raise TextError(
                f"there is nothing to learn about {label.words} ({label.name}) from this text: in each half "
                f"{_MIN_VARIED} tokens or more, in {_MIN_PLACES} places or more, must differ in it from the others; "
                "give another text or label"
            )
    if not there:
        raise TextError(
            "none of the labels varies in both halves of this text: give another text, or labels of your own"
        )
    absent = tuple(label.name for index, label in enumerate(labels) if index not in there)
    return [labels[index] for index in there], values_KL[:, there], absent


def _varies(labels_K: Values) -> bool:
    """Whether enough tokens, in enough places, have another value than the most common one."""
    _, which_K, counts = np.unique(labels_K, return_inverse=True, return_counts=True)
    differs_K = which_K != counts.argmax()
    num_places = np.count_nonzero(differs_K & ~np.append(False, differs_K[:-1]))
    return bool(differs_K.sum() >= _MIN_VARIED and num_places >= _MIN_PLACES)


class _Search:
    """Chooses on the rows of the first half, scores on those of the second."""

    def __init__(self, labels: Sequence[Label], values_KL: Values, middle: int, bootstrap: Bootstrap) -> None:
        self.labels, self.bootstrap, self._middle = labels, bootstrap, middle
        self.first_KL, self.second_KL = values_KL[:middle], values_KL[middle:]

    def best_by_part(self, values: Mapping[str, Values]) -> list[dict[str, Chosen]]:
        """For each label the best unit of each part."""
        found: list[dict[str, Chosen]] = [{} for _ in self.labels]
        for part, values_KU in values.items():
            ranked = Ranked(values_KU[: self._middle])
            for index, label in enumerate(self.labels):
                found[index][part] = ranked.best(self.first_KL[:, index], is_graded=label.is_graded)
        return found

    def sums(self, index: int, values_KU: Values, chosen: Chosen) -> NDArray[np.float64]:
        """Of the chosen unit on the second half, block by block."""
        values_K = values_KU[self._middle :, chosen.unit].astype(np.float64)
        return block_sums(values_K, self.second_KL[:, index], chosen, is_graded=self.labels[index].is_graded)

    def probe(
        self, index: int, values: Mapping[str, Values], untrained: Mapping[str, Values], rng: np.random.Generator
    ) -> Probe:
        """A linear map of all units to a label."""
        mixed_K = np.concatenate([rng.permutation(half[:, index]) for half in (self.first_KL, self.second_KL)])
        true_K = np.concatenate([self.first_KL[:, index], self.second_KL[:, index]])
        sums = self._probed(index, values, true_K)
        return Probe(
            self.labels[index].name,
            float(score_of(sums.sum(0))),
            interval(self.bootstrap.scores(sums)),
            float(score_of(self._probed(index, values, mixed_K).sum(0))),
            float(score_of(self._probed(index, untrained, true_K).sum(0))),
        )

    def _probed(self, index: int, values: Mapping[str, Values], labels_K: Values) -> NDArray[np.float64]:
        """Ridge regression on the first half, read like a unit of its own."""
        x_KU = np.concatenate(list(values.values()), axis=1)
        first_KU = x_KU[: self._middle]
        deviation_U = first_KU.std(0)
        x_KU = (x_KU - first_KU.mean(0)) / np.where(deviation_U > 0, deviation_U, 1.0)
        first_KU, is_graded = x_KU[: self._middle], self.labels[index].is_graded
        target_K = ranks(labels_K[: self._middle]) if is_graded else labels_K[: self._middle]
        gram_UU = first_KU.T @ first_KU + _RIDGE * len(first_KU) * np.eye(x_KU.shape[1], dtype=np.float32)
        weight_U = np.linalg.solve(gram_UU, first_KU.T @ (target_K - target_K.mean()).astype(np.float32))
        said_K = (x_KU @ weight_U).astype(np.float64)
        chosen = Ranked(said_K[: self._middle, None]).best(labels_K[: self._middle], is_graded=is_graded)
        return block_sums(said_K[self._middle :], labels_K[self._middle :], chosen, is_graded=is_graded)


class _Untrained:
    """The same search in models of the same shape that were never trained."""

    def __init__(self, network: LanguageModel, tokens: Ids, parts: list[str], plan: Plan, search: _Search) -> None:
        self.best_sums: list[NDArray[np.float64]] = []
        """For each label, of the best of their units on the second half."""
        self.values: Mapping[str, Values] = {}
        """Of the first of them."""
        for seed in _UNTRAINED_SEEDS:
            fresh = build_model(
                network.config,
                network.vocab_size,
                seed=seed,
                dtype=network.dtype,
                device=network.device,
                boundary_id=network.boundary_id,
            )
            values = record(fresh, tokens, parts, plan).values
            self.values = self.values or values
            found = []
            for index, of_label in enumerate(search.best_by_part(values)):
                part = max(of_label, key=lambda part: of_label[part].score)
                found.append(search.sums(index, values[part], of_label[part]))
            earlier = self.best_sums or found
            self.best_sums = [
                max(pair, key=lambda sums: float(score_of(sums.sum(0)))) for pair in zip(earlier, found, strict=True)
            ]


class _Held:
    """What became of the predictions while each chosen unit was held, and units of chance beside them.

    Args:
        chosen: for each label the best unit of each part.
    """

    def __init__(
        self,
        bundle: Bundle,
        tokens: Ids,
        plan: Plan,
        recording: Recording,
        search: _Search,
        chosen: Sequence[Mapping[str, Chosen]],
        rng: np.random.Generator,
    ) -> None:
        values = {part: recording.values[part][: plan.middle_row] for part in chosen[0]}
        means = {part: values_KU.mean(0) for part, values_KU in values.items()}
        holds: list[Hold] = []
        self._rows: dict[tuple[int, str], int] = {}
        """Of each chosen unit: the row in which it is held at its mean; where the label is true; where it is not."""
        self._random_rows: dict[str, dict[int, int]] = {}
        """In each part, units of chance and the rows in which they are held at their means."""
        for index, of_label in enumerate(chosen):
            label_K = search.first_KL[:, index]
            middle = np.median(label_K) if search.labels[index].is_graded else 0
            is_true_K = label_K > middle
            if not is_true_K.any():  # most of it is the highest there is
                is_true_K = label_K >= middle
            for part, one in of_label.items():
                self._rows[index, part] = len(holds) + 1
                values_K = values[part][:, one.unit]
                levels = (means[part][one.unit], values_K[is_true_K].mean(), values_K[~is_true_K].mean())
                holds += [Hold(part, one.unit, float(level)) for level in levels]
        for part, means_U in means.items():
            drawn = rng.permutation(len(means_U))[: _RANDOM_UNITS + 1].tolist()
            self._random_rows[part] = dict(zip(drawn, range(len(holds) + 1, len(holds) + 1 + len(drawn)), strict=True))
            holds += [Hold(part, unit, float(means_U[unit])) for unit in drawn]
        self._sets_LV = governed(search.labels, bundle.tokenizer)
        held_tokens = tokens[plan.middle : plan.middle + _HELD_TOKENS + 1]
        self._consequences = intervene(bundle.network, held_tokens, recording.state, holds, self._sets_LV)
        self._bootstrap = Bootstrap(-(-(len(held_tokens) - 1) // BLOCK), rng)

    def effects(self, index: int, part: str, unit: int) -> dict[str, Any]:
        """What is said of it in the claim that the unit follows a label."""
        row, governs = self._rows[index, part], bool(self._sets_LV[index].any())
        size_TR = shift_TR = self._consequences.distance_TR
        if governs:
            log_odds_TR = self._consequences.log_odds_TRL[:, :, index]
            shift_TR = log_odds_TR - log_odds_TR[:, :1]
            size_TR = np.abs(shift_TR)
        others = [other_row for other, other_row in self._random_rows[part].items() if other != unit]
        effect_N = block_means(size_TR[:, row].astype(np.float64))
        effects = self._bootstrap.means(effect_N)
        random_interval = margin_interval = None
        if others:
            others_NR = block_means(size_TR[:, others].astype(np.float64))
            random_interval = interval(others_NR.mean(0))
            margin_interval = interval(effects - np.quantile(self._bootstrap.means(others_NR), 0.975, axis=1))
        nats_T = self._consequences.nats_TR[:, row].astype(np.float64) - self._consequences.nats_TR[:, 0]
        return {
            "governs": governs,
            "effect": float(effect_N.mean()),
            "effect_interval": interval(effects),
            "random_interval": random_interval,
            "margin_interval": margin_interval,
            "nats_lost": float(nats_T.mean()),
            "shift_true": float(shift_TR[:, row + 1].mean()) if governs else 0.0,
            "shift_false": float(shift_TR[:, row + 2].mean()) if governs else 0.0,
        }


def _claims(
    tokenizer: Tokenizer,
    tokens: Ids,
    plan: Plan,
    recording: Recording,
    search: _Search,
    chosen: Sequence[Mapping[str, Chosen]],
    untrained: Sequence[NDArray[np.float64]],
    held: _Held,
) -> tuple[Claim, ...]:
    """Put together what is known of every unit that was found."""
    claims = []
    for index, label in enumerate(search.labels):
        for part, one in chosen[index].items():
            sums = search.sums(index, recording.values[part], one)
            scores = search.bootstrap.scores(sums)
            values_K = recording.values[part][:, one.unit]
            effects = held.effects(index, part, one.unit)
            claims.append(
                Claim(
                    label=label.name,
                    words=label.words,
                    part=part,
                    unit=one.unit,
                    sign=one.sign,
                    threshold=None if label.is_graded else one.threshold,
                    chosen_score=one.score,
                    score=float(score_of(sums.sum(0))),
                    score_interval=interval(scores),
                    untrained_score=float(score_of(untrained[index].sum(0))),
                    gain_interval=interval(scores - search.bootstrap.scores(untrained[index])),
                    consequence=label.consequence if effects.pop("governs") else "",
                    profile=_profile(values_K, search, index) if label.is_graded else (),
                    passages=_passages(tokenizer, tokens, plan, values_K, one.sign),
                    **effects,
                )
            )
    return tuple(sorted(claims, key=lambda claim: (not claim.holds, -claim.score)))


def _profile(values_K: Values, search: _Search, index: int) -> tuple[tuple[float, float], ...]:
    """The mean of a unit at each value of a graded label, of those that are common."""
    labels_K = np.concatenate([search.first_KL[:, index], search.second_KL[:, index]])
    levels, which_K, counts = np.unique(labels_K, return_inverse=True, return_counts=True)
    means = np.bincount(which_K, values_K) / counts
    common = counts >= _MIN_VARIED
    return tuple(zip(levels[common].tolist(), means[common].tolist(), strict=True))


def _passages(tokenizer: Tokenizer, tokens: Ids, plan: Plan, values_K: Values, sign: int) -> tuple[Passage, ...]:
    """The places of the highest values, no two of them close together."""
    rows: list[int] = []
    for row in np.argsort(-sign * values_K, kind="stable")[: 20 * _PASSAGE].tolist():
        if len(rows) < _NUM_PASSAGES and all(abs(row - other) > _PASSAGE for other in rows):
            rows.append(row)
    found, positions_K = [], plan.positions
    for row in rows:
        position = int(positions_K[row])
        pieces = (tokens[max(0, position - _PASSAGE) : position], tokens[position : position + 1])
        before, at = (tokenizer.decode(piece) for piece in pieces)
        after = tokenizer.decode(tokens[position + 1 : position + 1 + _PASSAGE // 2])
        found.append(Passage(position, before, at, after, float(values_K[row])))
    return tuple(found)


def one_each(claims: Sequence[Claim]) -> list[Claim]:
    """The first claim about each label."""
    first: dict[str, Claim] = {}
    for claim in claims:
        first.setdefault(claim.label, claim)
    return list(first.values())


def _show(
    bundle: Bundle,
    tokens: Ids,
    plan: Plan,
    recording: Recording,
    wanted: Sequence[tuple[str, int]],
    asked: Sequence[tuple[str, int]],
) -> tuple[tuple[str, ...], tuple[Shown, ...]]:
    """The texts of the first tokens of the second half, and some units along them."""
    piece = tokens[plan.middle : plan.middle + _SHOWN_TOKENS + 1]
    parts = list(dict.fromkeys(part for part, _ in wanted))
    pieces = list(watch(bundle.network, piece, parts, state=recording.state))
    shown = []
    for part, unit in wanted:
        values_K = recording.values[part][:, unit]
        along = [value for one in pieces for value in one.values[part][:, unit].tolist()]
        scale = float(np.quantile(np.abs(values_K), 0.99)) or 1.0
        passages = _passages(bundle.tokenizer, tokens, plan, values_K, sign=1)
        shown.append(Shown(part, unit, scale, tuple(along), passages, (part, unit) in asked))
    return tuple(text or "" for text in texts_of(piece[:-1], bundle.tokenizer)), tuple(shown)


def _health(part: str, values_KU: Values) -> Health:
    squashed_KU = values_KU if np.abs(values_KU).max() <= 1.0 else np.tanh(values_KU)
    is_beyond_KU = np.abs(squashed_KU) > _SATURATED_AT
    deviation_U = values_KU.std(0)
    dead = np.flatnonzero(deviation_U <= 0.01 * np.median(deviation_U))
    saturated = np.flatnonzero(is_beyond_KU.mean(0) > _SATURATED_SHARE)
    return Health(part, values_KU.shape[1], tuple(dead.tolist()), tuple(saturated.tolist()), float(is_beyond_KU.mean()))
