"""The page about states: the map, the dimensions, and what resembles what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from elman.inspection.recording import read_in_words
from elman.inspection.states import Alike, States
from elman.page import COLOURS, Page, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS = {"pca": "principal axes", "tsne": "t-SNE", "umap": "UMAP"}


def states_page(found: States) -> Page:
    """Everything that was found about the states of a model, to be looked at."""
    where = "the text" if found.split == "text" else f"the {found.split} part of {found.corpus}"
    what = "all that it carries" if found.part == "all" else f"its part {found.part}"
    page = Page(
        f"The states of this {found.kind}",
        f"Read: {where}, {read_in_words(found.given, found.tokens)}. Map and similarities are of {what}.",
    )
    page.section(
        "Map",
        f"Each point is the state after one token, by {_METHODS[found.method]}: {found.spread:,} tokens, evenly spaced "
        f"after the first {found.warm_up:,}, in which the state leaves the zeros that it begins with.",
    )
    page.figure(
        _map(found),
        "Coloured by what the token was. The black line goes along the tokens in a row that are shown below, from the "
        "square to the cross.",
    )
    page.section(
        "Dimension",
        "The effective dimension is the participation ratio: as many directions as would share the variance equally. "
        f"It is that of the same {found.spread:,} states.",
    )
    page.table(
        ["part", "units", "effective dimension", "variance along the first axis", "along the first ten"],
        [(one.part, one.units, one.effective, one.explained[0], sum(one.explained)) for one in found.dimensions],
    )
    page.section(
        "Similar moments",
        "How alike are the states after some tokens in a row, and which other moments of the text have the state most "
        f"similar to the one after {_visible(found.span.at)!r}? Similarity is the cosine of states less their mean.",
    )
    page.figure(_heatmap(found), "Each token with each: orange alike, blue opposite.")
    page.table(["before", "here", "after", "cosine"], _rows([found.span, *found.alike_moments]))
    page.section("Similar spans", _spans_in_words(found))
    if found.alike_spans:
        page.table(
            ["before", "span", "after", "alike"],
            _rows([found.span, *found.alike_spans]),
            "Alike: the share of these units that are on, times the ratio of the lengths, the shorter by the longer.",
        )
    return page


def _spans_in_words(found: States) -> str:
    if not found.span_units:
        return f"No unit is on throughout {_visible(found.span.at)!r}: a shorter span has more in common."
    number = len(found.span_units)
    return (
        f"{number:,} {'unit is' if number == 1 else 'units are'} on throughout {_visible(found.span.at)!r}. In these "
        "spans of about its length most of them are on, too."
    )


def _map(found: States) -> Figure:
    figure, axes = new_figure(height=5.0)
    path = range(found.span.start, found.span.start + len(found.side_by_side))
    along = [moment for moment in found.moments if moment.position in path]
    axes.plot([m.x for m in along], [m.y for m in along], color="#222222", linewidth=0.9, zorder=3)
    for end, marker in ((along[0], "s"), (along[-1], "X")):
        axes.plot(end.x, end.y, marker, color="#222222", markeredgecolor="#ffffff", markersize=8, zorder=4)
    kinds = sorted({moment.what for moment in found.moments})
    for kind, colour in zip(kinds, COLOURS, strict=False):
        own = [moment for moment in found.moments if moment.what == kind]
        axes.scatter([m.x for m in own], [m.y for m in own], s=12, color=colour, alpha=0.7, label=kind, linewidths=0)
    figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False, fontsize=9)
    axes.set_xlabel("first axis")
    axes.set_ylabel("second axis")
    return figure


def _heatmap(found: States) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap

    figure, axes = new_figure(height=6.0)
    colours = LinearSegmentedColormap.from_list("alike", [COLOURS[0], "#ffffff", COLOURS[1]])
    axes.imshow(np.array(found.side_by_side), cmap=colours, vmin=-1, vmax=1)
    places = range(len(found.side_by_side_texts))
    labels = [_visible(text) for text in found.side_by_side_texts]
    axes.set_xticks(places, labels, fontsize=6)
    axes.set_yticks(places, labels, fontsize=6)
    axes.grid(False)
    return figure


def _rows(places: Sequence[Alike]) -> list[tuple[object, ...]]:
    return [
        (_visible(one.before), _visible(one.at).replace(" ", "␣"), _visible(one.after), one.similarity)
        for one in places
    ]


def _visible(text: str) -> str:
    return text.replace("\n", "↵")
