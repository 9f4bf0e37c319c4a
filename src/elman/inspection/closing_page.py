"""The page about closing what was opened."""

from __future__ import annotations

from collections.abc import Iterable

from elman.inspection.closing import FEW_CASES, Closings, Group
from elman.page import Page, new_figure

_MEASURES = {
    "which": "right one of the closing signs",
    "top": "most probable of all tokens",
    "probability": "probability of the right sign",
}


def closings_page(found: Closings) -> Page:
    """How models close quotes and brackets, to be looked at."""
    where = "the text" if found.split == "text" else f"the {found.split} part of {found.corpus}"
    page = Page(
        f"What was opened: does it get closed by {' and '.join(found.models)}?",
        f"Every closing sign in {found.tokens:,} tokens of {where}, by the distance from its opening.",
    )
    for group in found.groups:
        page.section(
            group.name.capitalize(),
            f"Which sign it is was decided at the opening. The most common one makes up {group.majority:.1%}.",
        )
        _by_probability(page, found, group)
        if group.written_on:
            _on_samples(page, found, group)
    return page


def _by_probability(page: Page, found: Closings, group: Group) -> None:
    figure, all_axes = new_figure(1, len(_MEASURES), height=3.0)
    places = range(len(group.by_distance))
    for axes, (measure, words) in zip(all_axes, _MEASURES.items(), strict=True):
        for name in found.models:
            shares = [getattr(one.models[name], measure) for one in group.by_distance]
            axes.plot(places, shares, "o-", markersize=4, linewidth=1.3, label=name)
        axes.set_title(words, fontsize=9)
        axes.set_ylim(-0.03, 1.06)
        axes.set_xticks(places, [f"{one.nearest}" for one in group.by_distance])
        axes.set_xlabel("tokens since the opening, from")
    all_axes[0].axhline(group.majority, color="#444444", linestyle="--", linewidth=1, zorder=3)
    figure.legend(
        handles=all_axes[-1].get_lines(), loc="outside upper center", ncols=len(found.models), frameon=False, fontsize=9
    )
    page.figure(figure, "Dashed: the share of the most common sign, which is all that one knows without the opening.")
    page.table(
        ["tokens since the opening", "cases", "model", *_MEASURES.values()],
        [
            (
                f"{one.words}{_mark(one.cases)}",
                one.cases,
                name,
                judged.which,
                judged.top,
                judged.probability,
            )
            for one in group.by_distance
            for name, judged in one.models.items()
        ],
        _few(one.cases for one in group.by_distance),
    )


def _on_samples(page: Page, found: Closings, group: Group) -> None:
    if not group.is_open_long:
        page.text(f"No {group.name} are open for {group.written_on[0].distance} tokens here, to write on from.")
        return
    page.text(
        f"Where the innermost of the {group.name} had been open for so many tokens, each model wrote on by a fair "
        f"draw: how often it was closed by its own sign within {found.within} tokens."
    )
    page.table(
        ["open for", "cases", "the text itself", *found.models],
        [
            (f"{one.distance}{_mark(one.cases)}", one.cases, one.text, *one.models.values())
            for one in group.written_on
            if one.cases
        ],
        _few(one.cases for one in group.written_on),
    )


def _mark(cases: int) -> str:
    return "*" if cases < FEW_CASES else ""


def _few(numbers: Iterable[int]) -> str:
    """What the mark means, where there is one."""
    few = any(0 < number < FEW_CASES for number in numbers)
    return f"*: of fewer than {FEW_CASES} cases, by which little can be judged." if few else ""
