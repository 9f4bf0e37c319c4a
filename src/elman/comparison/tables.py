"""A comparison as a table: for a terminal, as CSV and Markdown, and as JSON, in files beside its page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elman.comparison.result import Comparison, Contestant
from elman.errors import UserError
from elman.files import write_atomically


class Column(NamedTuple):
    """A heading, and how its figures are written for people."""

    heading: str
    format: str


def columns(comparison: Comparison) -> list[Column]:
    """The columns of the table, for :func:`rows`."""
    return [
        Column("model", "s"),
        Column(comparison.unit, ".4f"),
        Column("spread", ".4f"),
        Column("seeds", ",d"),
        Column("bits per character", ".4f"),
        Column("parameters", ",d"),
        Column("state bytes", ",d"),
        Column("tokens", ",.0f"),
        Column("operations", ".3g"),
        Column("seconds", ",.1f"),
        Column("against the best", "s"),
    ]


def rows(comparison: Comparison) -> list[list[str | int | float | None]]:
    """A row for each model, the best first; what is not known is none."""
    against = {verdict.worse: verdict for verdict in comparison.verdicts[: max(0, len(comparison.contestants) - 1)]}

    def word(one: Contestant) -> str:
        if one.name not in against:
            return "best"
        found = against[one.name].difference
        verdict = {True: "worse", False: "not told apart", None: "one seed"}[found.is_certain]
        return f"+{found.mean:.4f}, {verdict}"

    def bits(one: Contestant) -> float | None:
        values = [outcome.figures["bits_per_char"] for outcome in one.outcomes]
        return None if None in values else one.repeated("bits_per_char").mean

    return [
        [
            one.name,
            one.repeated(comparison.figure).mean,
            one.repeated(comparison.figure).deviation if not one.is_counted else None,
            len(one.outcomes),
            bits(one),
            one.parameters,
            one.state_bytes,
            one.mean("tokens"),
            one.training_operations or None,
            one.mean("seconds"),
            word(one),
        ]
        for one in comparison.contestants
    ]


def written(comparison: Comparison) -> list[list[str]]:
    """The rows as text for people."""
    formats = [column.format for column in columns(comparison)]
    return [["-" if v is None else format(v, f) for v, f in zip(row, formats, strict=True)] for row in rows(comparison)]


def as_csv(comparison: Comparison) -> str:
    """The table with full figures, for a spreadsheet."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.heading for column in columns(comparison)])
    writer.writerows(rows(comparison))
    return out.getvalue()


def as_markdown(comparison: Comparison) -> str:
    """The table, the verdicts on the best and the notices, for a README."""
    headings = [column.heading for column in columns(comparison)]
    lines = [_line(headings), "|---" * len(headings) + "|", *map(_line, written(comparison)), ""]
    lines += [f"- {verdict}." for verdict in comparison.verdicts[: max(0, len(comparison.contestants) - 1)]]
    lines += [f"- {line}" for line in (resolution_line(comparison), baseline_line(comparison)) if line]
    lines += [f"- Note: {notice}." for notice in comparison.notices]
    return "\n".join([*about(comparison), "", *lines]) + "\n"


def about(comparison: Comparison) -> list[str]:
    """What was done, in sentences."""
    terms = "the runs as they are" if comparison.terms is None else str(comparison.terms)
    return [
        f"On the {comparison.split} part of {comparison.corpus}, which no training saw; {terms}.",
        f"The mean over the seeds of {comparison.unit}, lower is better; the spread is their standard deviation.",
    ]


def resolution_line(comparison: Comparison) -> str | None:
    """How large a difference would have to be where the best cannot be told from others; none where all can be."""
    others = max(0, len(comparison.contestants) - 1)
    # Counts that are alike are not certain either, but no seed would change them.
    unsure = [
        verdict
        for verdict in comparison.verdicts[:others]
        if verdict.difference.is_certain is False and verdict.difference.half_width
    ]
    if not unsure:
        return None
    halves = sorted(verdict.difference.half_width or 0.0 for verdict in unsure)
    names = {name for verdict in unsure for name in (verdict.better, verdict.worse)}
    counts = {len(one.outcomes) for one in comparison.contestants if one.name in names and not one.is_counted}
    seeds = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    above = " to ".join(dict.fromkeys(f"{half:.4f}" for half in (halves[0], halves[-1])))
    return (
        f"With {seeds} seeds each, models that cannot be told apart would have to differ by more than {above} "
        f"{comparison.unit}; more seeds narrow this."
    )


def baseline_line(comparison: Comparison) -> str | None:
    """What simple means reach, in a sentence; none where it is not known."""
    found = {name: figures[comparison.figure] for name, figures in comparison.baselines.items()}
    known = sorted((value, name) for name, value in found.items() if value is not None)
    shown = ", ".join(f"{name} {value:.4f}" for value, name in known)
    return f"Simple means on the same text, in {comparison.unit}: {shown}." if shown else None


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def write_tables(comparison: Comparison, folder: Path) -> None:
    """Write ``comparison.json``, ``.csv`` and ``.md``. Raises UserError: they cannot be written."""
    texts = {
        "comparison.json": json.dumps(comparison.to_dict(), indent=1) + "\n",
        "comparison.csv": as_csv(comparison),
        "comparison.md": as_markdown(comparison),
    }
    try:
        for name, text in texts.items():
            write_atomically(folder / name, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"{str(folder)!r} cannot be written ({error.strerror}): give another --out") from None
