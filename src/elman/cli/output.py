"""Results on standard output: JSON, and tables that fit their terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elman.config import BUDGETS
from elman.visible import clean

if TYPE_CHECKING:
    from elman.training.run import Plan


def print_json(result: Mapping[str, Any]) -> None:
    """One object on one line; in ASCII, so that even the pieces of a character that a byte model draws are valid."""
    print(json.dumps(result, allow_nan=False))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: int = 1,
    bold: int | None = None,
    footer: bool = False,
) -> None:
    """A table whose first columns are text and whose others are figures; no name and no figure is ever cut.

    Where a terminal is too narrow for it, headings fold, then long text; then the columns that find no room follow
    below, behind those that tell the rows apart once more: the first, or as many as it takes. What goes to a pipe or a
    file is as wide as it is.

    Args:
        title: a line above it.
        columns: the headings.
        rows: the cells.
        text_columns: how many columns, from the left, hold text.
        bold: the index of the row that stands out.
        footer: the last row is a sum.
    """
    columns = [clean(heading) for heading in columns]
    cells = [[clean(cell).expandtabs() for cell in row] for row in rows]
    if title:
        Console(highlight=False, markup=False, emoji=False).print(clean(title), soft_wrap=True)
    room = Console().width if sys.stdout.isatty() else None
    widths = _widths(columns, cells, text_columns, room)
    for part in _parts(widths, _telling(cells), room):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index in part:
            table.add_column(
                Text(columns[index]),
                justify="left" if index < text_columns else "right",
                width=widths[index],
                overflow="fold",
            )
        for number, row in enumerate(cells):
            style = "bold" if number == bold else None
            end_section = footer and number == len(cells) - 2
            table.add_row(*(Text(row[index]) for index in part), style=style, end_section=end_section)
        needed = _needed([widths[index] for index in part])
        Console(highlight=False, markup=False, emoji=False, width=max(needed, room or 0)).print(table)


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int, room: int | None) -> list[int]:
    """Of each column: as wide as it is, or with headings, and then long text, folded at spaces to fit into the room."""
    inside = [max((_width(row[index]) for row in cells), default=0) for index in range(len(columns))]
    whole = [max(_width(heading), width) for heading, width in zip(columns, inside, strict=True)]
    if room is None or _needed(whole) <= room:
        return whole
    folded = [max(_longest_word(heading), width) for heading, width in zip(columns, inside, strict=True)]
    least = list(folded)
    for index in range(text_columns):
        words = max((_longest_word(text) for text in (columns[index], *(row[index] for row in cells))), default=0)
        least[index] = min(folded[index], max(words, room // 3))  # a name of a few words is not worth a fold
    over = _needed(folded) - room
    for index in sorted(range(text_columns), key=lambda index: least[index] - folded[index]):
        less = max(0, min(over, folded[index] - least[index]))
        folded[index] -= less
        over -= less
    return folded


def _telling(cells: Sequence[Sequence[str]]) -> int:
    """How many columns from the left tell the rows apart; one where even all of them do not."""
    most = min(map(len, cells), default=1)
    return next((count for count in range(1, most) if len({tuple(row[:count]) for row in cells}) == len(cells)), 1)


def _parts(widths: Sequence[int], telling: int, room: int | None) -> list[list[int]]:
    """The columns of each table that fits into the room, those that tell the rows apart in all of them.

    Where these leave no room for another, the first alone is in all.
    """
    needed = [_needed([*widths[:telling], width]) for width in widths[telling:]]
    first = list(range(telling if room is None or max(needed, default=0) <= room else 1))
    parts = [first]
    for index in range(len(first), len(widths)):
        part = [*parts[-1], index]
        if room is None or parts[-1] == first or _needed([widths[column] for column in part]) <= room:
            parts[-1] = part
        else:
            parts.append([*first, index])
    return parts


def _needed(widths: Sequence[int]) -> int:
    """The width of a table: three characters stand between its columns, one at either end."""
    return sum(widths) + 3 * (len(widths) - 1) + 2


def _width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def figure(value: float | None, digits: int = 4) -> str:
    """A number for a table: ``inf`` where it is infinite, ``-`` where it is not defined."""
    return "-" if value is None else f"{value:,.{digits}f}"


def size(num_bytes: int) -> str:
    """Bytes for people: ``1.5 MB``."""
    value, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def print_plan(plan: Plan) -> None:
    """What ``--dry-run`` found."""
    config, epoch_seconds = plan.config, plan.updates_per_epoch * plan.seconds_per_update
    budgets = [f"{name} {value:g}" for name in BUDGETS if (value := getattr(config.training, name)) is not None]
    held_out = "none" if plan.valid_nats_per_token is None else f"{plan.valid_nats_per_token:.3f} nats per token"
    for name, value in {
        "model": f"{config.model.kind}, {plan.parameters:,} parameters, {size(plan.parameter_bytes)}",
        "state": f"{size(plan.state_bytes)} for {plan.num_streams} streams",
        "text": f"{plan.train_tokens:,} tokens to train on, {plan.valid_tokens:,} to estimate on",
        "tokens": f"{plan.vocabulary:,} in the vocabulary, level {config.tokenizer.level}",
        "epoch": f"{plan.updates_per_epoch:,} updates, {epoch_seconds:,.0f} s at most: the first update is the slowest",
        "budget": ", ".join(budgets) or "none given",
        "update": f"{plan.nats_after_one_update:.3f} nats in the first, {plan.seconds_per_update:.3f} s",
        "estimate": held_out,
        "memory": f"{size(plan.peak_memory_bytes)} at most so far",
        "seed": str(config.seed),
        "sample": clean(plan.sample).replace("\n", "↵")[:100],
    }.items():
        print(f"{name:10}{value}")
    for notice in plan.notices:
        print(f"{'note':10}{clean(notice)}")
    print("nothing was written; leave --dry-run out to train")
