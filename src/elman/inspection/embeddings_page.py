"""The page about embeddings: a map, and neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from elman.inspection.embeddings import Embeddings, Point
from elman.page import COLOURS, Page, new_figure

_LETTER, _LINE = 0.008, 0.022
"""Width of a letter and height of a line on the map, as shares of the whole."""


def embeddings_page(found: Embeddings) -> Page:
    """The embedding of a model, to be looked at."""
    page = Page(
        f"What this {found.kind} has learned of its tokens",
        f"{found.vocabulary:,} tokens of level {found.level}, each a vector of {found.embedding_size} numbers.",
    )
    page.section("Map")
    page.numbers({
        "tokens shown": len(found.points),
        "effective dimension": found.effective_dimension,
        "of the variance on the map": sum(found.explained),
    })  # fmt: skip
    figure, axes = new_figure(height=5.5)
    named = _with_room(found.points)
    kinds = sorted({point.what for point in found.points})
    for kind, colour in zip(kinds, COLOURS, strict=False):
        own = [point for point in found.points if point.what == kind]
        axes.scatter([p.x for p in own], [p.y for p in own], s=8, color=colour, label=kind)
        for point in own:
            if point in named:
                text = shown_token(point.token).replace("$", r"\$")
                place = point.x, point.y
                axes.annotate(text, place, xytext=(3, 2), textcoords="offset points", fontsize=8, color=colour)
    figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False, fontsize=9)
    page.figure(
        figure,
        "The embeddings along their first two principal axes, with names where there is room. Tokens used alike lie "
        "together; those that are hardly ever used have stayed near the middle, where they began.",
    )
    page.section("Neighbours", "The tokens whose vectors point the same way, with the cosine.")
    page.table(
        ["token", "nearest"],
        [
            (
                shown_token(one.token),
                ", ".join(f"{shown_token(token)}\N{NO-BREAK SPACE}{cosine:.2f}" for token, cosine in one.nearest),
            )
            for one in found.neighbours
        ],
    )
    return page


def _with_room(points: Sequence[Point]) -> set[Point]:
    """Points whose names do not cover each other's, those farthest out first."""
    across = max(point.x for point in points) - min(point.x for point in points) or 1.0
    up = max(point.y for point in points) - min(point.y for point in points) or 1.0
    named: list[Point] = []
    for point in sorted(points, key=lambda point: -max(abs(point.x) / across, abs(point.y) / up)):
        widths = (_LETTER * across * (1 + max(len(point.token), len(other.token))) for other in named)
        if all(
            abs(point.x - other.x) > width or abs(point.y - other.y) > _LINE * up
            for other, width in zip(named, widths, strict=True)
        ):
            named.append(point)
    return set(named)


def shown_token(token: str) -> str:
    """A token as it can be seen: white space by signs."""
    return token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")
