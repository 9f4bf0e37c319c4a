"""The page about closing what was opened."""

from __future__ import annotations

from elman.inspection.closing import Closings
from elman.page import Page, new_figure


def closings_page(found: Closings) -> Page:
    """How a model closes quotes and brackets, to be looked at."""
    where = "the text" if found.split == "text" else f"the {found.split} part of {found.corpus}"
    page = Page(
        f"Does this {found.kind} close what was opened?",
        f"Every closing sign in {found.tokens:,} tokens of {where}, by the distance from its opening.",
    )
    for group in found.groups:
        page.section(
            group.name.capitalize(),
            f"Which sign it is was decided at the opening. The most common one makes up {group.majority:.1%}.",
        )
        figure, axes = new_figure()
        centres = [(one.nearest * one.farthest) ** 0.5 for one in group.by_distance]
        for name in ("which", "top", "probability"):
            axes.plot(centres, [getattr(one, name) for one in group.by_distance], "o-", label=_NAMES[name])
        axes.axhline(group.majority, color="#888888", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("tokens since the opening")
        axes.legend(frameon=False, fontsize=9)
        page.figure(figure, "Dashed: the share of the most common sign.")
        page.table(
            ["tokens since the opening", "cases", *_NAMES.values()],
            [
                (f"{one.nearest} to {one.farthest}", one.cases, one.which, one.top, one.probability)
                for one in group.by_distance
            ],
        )
    return page


_NAMES = {
    "which": "right one of the closing signs",
    "top": "most probable of all tokens",
    "probability": "probability of the right sign",
}
