"""The page about units: each claim with its verdict, the unit along a text, and what it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elman.inspection.recording import read_in_words
from elman.inspection.units import Claim, Passage, Shown, Units, one_each
from elman.page import COLOURS, Page, Piece, new_figure, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def units_page(found: Units) -> Page:
    """Everything that was found about the units of a model, to be looked at."""
    holding = [claim for claim in found.claims if claim.holds]
    where = "the text" if found.split == "text" else f"the {found.split} part of {found.corpus}"
    page = Page(
        f"What the units of this {found.kind} follow",
        f"Read: {where}, {read_in_words(found.given, found.tokens)}. Every unit was chosen on the first half "
        "and scored on the second.",
    )
    page.section("The claims", _METHOD)
    best = max((claim.score for claim in holding), default=None)
    page.numbers({
        "claims that hold": f"{len(holding)} of {len(found.claims)}",
        "best score of one that holds": best,
        "tokens looked at": found.kept,
    })  # fmt: skip
    firsts = one_each(found.claims)
    page.figure(_overview(firsts), _OVERVIEW + ("" if all(claim.consequence for claim in firsts) else _OF_ANY_TOKEN))
    page.table(
        ["a unit follows", "unit", "score", "95 %", "untrained", "passes"],
        [
            (*_names(claim), claim.score, _span(claim.score_interval), claim.untrained_score, claim.beats_untrained)
            for claim in found.claims
        ],
        "The first test. Score: F1, or the rank correlation for a graded label.",
    )
    page.table(
        ["a unit follows", "unit", "effect", "95 %", "random", "passes", "holds"],
        [
            (
                *_names(claim),
                claim.effect,
                _span(claim.effect_interval),
                _beside(claim),
                claim.passes_intervention,
                claim.holds,
            )
            for claim in found.claims
        ],
        "The second test, and whether both are passed. Effect: mean change of the log-odds of what the label governs, "
        "in nats, with the unit held at its mean; where that is any token, the share of the probability that moves to "
        "other tokens. Random: the same for other units of the part.",
    )
    if found.absent:
        page.text(f"Not looked for, because there is too little of it in the text to judge: {', '.join(found.absent)}.")
    by_unit = {(one.part, one.unit): one for one in found.shown}
    told: set[tuple[str, int]] = set()
    for claim in firsts:
        told.add((claim.part, claim.unit))
        _tell(page, claim, by_unit[claim.part, claim.unit], found.shown_texts)
    for key, one in by_unit.items():
        if key not in told:
            page.section(f"Unit {one.unit} of {one.part}", "Asked for.")
            _colour(page, one, found.shown_texts)
            _passages(page, one.passages, one)
    _probes(page, found)
    page.section("Units that say nothing", "Dead: hardly moving. Saturated: at an end of their range nearly always.")
    page.table(
        ["part", "units", "dead", "saturated", "share of values saturated"],
        [(one.part, one.units, len(one.dead), len(one.saturated), one.saturation) for one in found.health],
    )
    return page


_METHOD = (
    "A claim says that a unit follows something in the text. It holds if it passes two tests. First, its score on the "
    "half of the text that it was not chosen on is above that of the best unit which the same search finds in three "
    "untrained models of the same shape. Second, the unit is held at its mean while the model reads: the odds of what "
    "the label governs must change by more than when random units of the same part are held, beyond the interval of "
    "these, on nearly all resamples of the text."
)
_OVERVIEW = (
    "One claim for each label. Left: the score on the held-out half (filled) and that of the best unit of untrained "
    "models (hollow). Right: what holding the unit does (filled), and the interval of random units (grey)."
)
_OF_ANY_TOKEN = " Of any token it is not nats, but the share of the probability that moves to other tokens."


def _names(claim: Claim) -> tuple[str, str]:
    return claim.label, f"{claim.part}:{claim.unit}"


def _span(interval: tuple[float, float]) -> str:
    return " to ".join(map(shown, interval))


def _beside(claim: Claim) -> str:
    return "no other units" if claim.random_interval is None else _span(claim.random_interval)


def _overview(claims: Sequence[Claim]) -> Figure:
    figure, (scores, effects) = new_figure(1, 2, height=1.2 + 0.32 * len(claims))
    rows = range(len(claims))[::-1]
    for row, claim in zip(rows, claims, strict=True):
        colour = COLOURS[2] if claim.holds else COLOURS[7]
        scores.plot(claim.score_interval, (row, row), color=colour, linewidth=2)
        scores.plot(claim.score, row, "o", color=colour)
        scores.plot(claim.untrained_score, row, "o", color=COLOURS[1], markerfacecolor="none")
        effects.plot(claim.random_interval or (0, 0), (row, row), color="#88888888", linewidth=7, solid_capstyle="butt")
        effects.plot(claim.effect_interval, (row, row), color=colour, linewidth=2)
        effects.plot(claim.effect, row, "o", color=colour)
    scores.set_yticks(list(rows), [claim.label for claim in claims])
    effects.set_yticks(list(rows), [claim.consequence or "any token" for claim in claims])
    scores.set_xlim(0, 1.02)
    scores.set_xlabel("score on the held-out half")
    effects.set_xlabel("change of the log-odds of ..., in nats")
    return figure


def _tell(page: Page, claim: Claim, along: Shown, texts: Sequence[str]) -> None:
    verdict = "holds" if claim.holds else "does not hold"
    page.section(f"{claim.label}: unit {claim.unit} of {claim.part}, {verdict}", _in_words(claim))
    _colour(page, along, texts)
    if claim.profile:
        figure, axes = new_figure(height=2.6)
        axes.plot(*zip(*claim.profile, strict=True), "o-", markersize=3)
        axes.set_xlabel(claim.words)
        axes.set_ylabel("mean of the unit")
        page.figure(figure, "The unit against what it follows.")
    _passages(page, claim.passages, along, claim.sign)


def _in_words(claim: Claim) -> str:
    kind = "F1" if claim.threshold is not None else "rank correlation"
    beats = "above" if claim.beats_untrained else "not surely above"
    outside = "beyond" if claim.passes_intervention else "not beyond"
    what = f"the log-odds of {claim.consequence} change" if claim.consequence else "the probabilities change"
    unit = " nats" if claim.consequence else " of the whole"
    words = (
        f"Its {kind} with {claim.words} is {shown(claim.score)} on the held-out half, {beats} the "
        f"{shown(claim.untrained_score)} that an untrained model reaches. With the unit held at its mean, {what} by "
        f"{shown(claim.effect)}{unit} at a token, {outside} what random units do ({_beside(claim)}), and a token costs "
        f"{shown(claim.nats_lost)} nats more. "
    )
    if not claim.consequence:
        return words
    state = "true" if claim.threshold is not None else "high"
    return words + (
        f"Held where it is when the label is {state}, the log-odds shift by {claim.shift_true:+.3f}; where it is "
        f"otherwise, by {claim.shift_false:+.3f}."
    )


def _colour(page: Page, along: Shown, texts: Sequence[str]) -> None:
    pieces = [Piece(text, value / along.scale, f"{value:.2f}") for text, value in zip(texts, along.values, strict=True)]
    page.coloured(pieces, "low", "high", f"Unit {along.unit} of {along.part} after each token of the held-out half.")


def _passages(page: Page, passages: Sequence[Passage], along: Shown, sign: int = 1) -> None:
    rows = [
        (
            _visible(one.before),
            _visible(one.at).replace(" ", "␣"),
            _visible(one.after),
            along.rounded(one.value),
        )
        for one in passages
    ]
    where = "highest in all of the text" if sign > 0 else "lowest in all of the text: low values tell the label"
    page.table(["before", "here", "after", "value"], rows, f"Where it is {where}.")


def _visible(text: str) -> str:
    return text.replace("\n", "↵")


def _probes(page: Page, found: Units) -> None:
    page.section(
        "All units together",
        "A linear map of all units to each label, fitted on the first half and scored on the second. Labels in random "
        "order show what the score is worth, an untrained model shows what training has added.",
    )
    page.table(
        ["label", "score", "95 %", "labels shuffled", "model untrained"],
        [(one.label, one.score, _span(one.score_interval), one.shuffled, one.untrained) for one in found.probes],
    )
