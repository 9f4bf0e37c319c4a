"""The page about embeddings: a map, and neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from elman.inspection.embeddings import Embeddings, Point
from elman.page import COLOURS, Page, new_figure

_LETTER, _LINE = 0.011, 0.027
"""Width of a letter and height of a line on the map, as shares of the whole."""
_AWAY = 0.008
"""How far a name stands from its point."""
_SMALL = frozenset(".,'`´’‘:;-_·~^\"°")
"""Signs that can hardly be seen alone."""

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


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
    places = _with_room(found.points)
    kinds = sorted({point.what for point in found.points})
    for kind, colour in zip(kinds, COLOURS, strict=False):
        own = [point for point in found.points if point.what == kind]
        axes.scatter([p.x for p in own], [p.y for p in own], s=8, color=colour, label=kind)
        for point in own:
            if point in places:
                text = _name(point.token)
                axes.text(*places[point], text, fontsize=8, color=colour, ha="center", va="center")
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


def _with_room(points: Sequence[Point]) -> dict[Point, tuple[float, float]]:
    """Where the names go that cover no point and no other name, those of the points farthest out first."""
    across = max(point.x for point in points) - min(point.x for point in points) or 1.0
    up = max(point.y for point in points) - min(point.y for point in points) or 1.0
    dots = [(point.x / across, point.y / up) for point in points]
    taken: list[Box] = []
    places: dict[Point, tuple[float, float]] = {}
    for point in sorted(points, key=lambda point: -max(abs(point.x) / across, abs(point.y) / up)):
        x, y, half = point.x / across, point.y / up, _LETTER * len(_name(point.token)) / 2
        for right, above in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            middle = x + right * (half + _AWAY), y + above * (_LINE / 2 + _AWAY)
            box = (middle[0] - half, middle[1] - _LINE / 2, middle[0] + half, middle[1] + _LINE / 2)
            if not any(box[0] < x < box[2] and box[1] < y < box[3] for x, y in dots) and not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken
            ):
                taken.append(box)
                places[point] = middle[0] * across, middle[1] * up
                break
    return places


def _name(token: str) -> str:
    """A token as it is named on the map: a sign that is little more than a point stands in quotes."""
    return f"“{token}”" if token in _SMALL else shown_token(token)


def shown_token(token: str) -> str:
    """A token as it can be seen: white space by signs."""
    return token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")
