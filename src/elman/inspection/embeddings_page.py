"""The page about embeddings: a map, and neighbours."""

from __future__ import annotations

from elman.inspection.embeddings import Embeddings
from elman.page import COLOURS, Page, new_figure


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
    kinds = sorted({point.what for point in found.points})
    for kind, colour in zip(kinds, COLOURS, strict=False):
        own = [point for point in found.points if point.what == kind]
        axes.scatter([p.x for p in own], [p.y for p in own], s=8, color=colour, label=kind)
        for point in own:
            text = shown_token(point.token).replace("$", r"\$")
            axes.annotate(text, (point.x, point.y), xytext=(3, 2), textcoords="offset points", fontsize=8, color=colour)
    axes.legend(frameon=False, fontsize=9)
    page.figure(figure, "The embeddings along their first two principal axes. Tokens used alike lie together.")
    page.section("Neighbours", "The tokens whose vectors point the same way, with the cosine.")
    page.table(
        ["token", "nearest"],
        [
            (shown_token(one.token), ", ".join(f"{shown_token(token)} {cosine:.2f}" for token, cosine in one.nearest))
            for one in found.neighbours
        ],
    )
    return page


def shown_token(token: str) -> str:
    """A token as it can be seen: white space by signs."""
    return token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")
