"""The pages about errors: what would help one model, and where two differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elman.inspection.errors import Compared, Difference, Failures
from elman.page import COLOURS, Page, Piece, new_figure, shown


def failures_page(found: Failures) -> Page:
    """The errors of one model, to be looked at."""
    page = Page(
        f"Where this {found.kind} fails, and what would help",
        f"{found.tokens:,} tokens of {_where(found.split, found.corpus)}. An error is a token whose probability was "
        "below one half.",
    )
    page.section("Causes", "Each is asked about the errors that those before it left; alone, about all of them.")
    page.numbers({
        "errors": found.errors,
        "of all tokens": f"{found.errors / found.tokens:.1%}",
        "nats per token": found.nats_per_token,
    })  # fmt: skip
    figure, axes = new_figure(height=0.8 + 0.35 * len(found.causes))
    rows = range(len(found.causes))[::-1]
    axes.barh(list(rows), [cause.share for cause in found.causes], color=COLOURS[0], height=0.6)
    axes.set_yticks(list(rows), [cause.name for cause in found.causes])
    axes.set_xlabel("share of all errors")
    page.figure(figure, "What takes the errors away, one after the other.")
    page.table(
        ["", "an error goes if", "errors", "share", "share of the nats", "alone"],
        [
            (cause.name, cause.words, cause.errors, f"{cause.share:.1%}", f"{cause.nats:.1%}", cause.alone)
            for cause in found.causes
        ],
        f"The oracle n-grams were counted on {found.counted_tokens:,} tokens of the training text.",
    )
    return page


def compared_page(found: Compared) -> Page:
    """Two models held against each other, to be looked at."""
    page = Page(
        "Two models, token by token",
        f"{found.first} against {found.second} on {found.tokens:,} tokens of {_where(found.split, found.corpus)}.",
    )
    low, high = found.difference_interval
    page.section("In the mean", f"In nats per token: {found.verdict}.")
    page.numbers({
        f"nats of {found.first}": found.first_nats,
        f"nats of {found.second}": found.second_nats,
        "difference, 95 %": f"{shown(low)} to {shown(high)}",
        f"of the tokens are cheaper for {found.first}": f"{found.first_better:.1%}",
    })  # fmt: skip
    page.table(
        ["tokens", "number", found.first, found.second, "difference"],
        [
            (one.name, one.tokens, one.first_nats, one.second_nats, one.difference)
            for one in (*found.kinds, found.whole)
        ],
        "Nats per token, by what the token is.",
    )
    page.section("Along the text", "Where it is orange the first is ahead, where it is blue the second.")
    scale = float(np.quantile(np.abs(found.shown_differences), 0.99)) or 1.0
    page.coloured(
        [
            Piece(text, difference / scale, f"{difference:+.2f}")
            for text, difference in zip(found.shown_texts, found.shown_differences, strict=True)
        ],
        f"{found.second} ahead",
        f"{found.first} ahead",
        f"Full colour: {shown(scale)} nats and more.",
    )
    for name, places in ((found.first, found.first_ahead), (found.second, found.second_ahead)):
        page.section(f"Where {name} is most ahead", "One place for each token after the same few before it.")
        page.table(["before", "token", "after", found.first, found.second], _rows(places), "Nats of the token.")
    return page


def _rows(places: Sequence[Difference]) -> list[tuple[object, ...]]:
    return [
        (_visible(one.before), _visible(one.at), _visible(one.after), one.first_nats, one.second_nats) for one in places
    ]


def _where(split: str, corpus: str) -> str:
    return "the text" if split == "text" else f"the {split} part of {corpus}"


def _visible(text: str) -> str:
    return text.replace("\n", "↵")
