"""Results on standard output: JSON, and tables that fit their terminal."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elman.config import BUDGETS

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
    """A table whose first columns are text and whose others are figures.

    Args:
        title: a line above it.
        columns: the headings.
        rows: the cells.
        text_columns: how many columns, from the left, hold text.
        bold: the index of the row that stands out.
        footer: the last row is a sum.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index < text_columns else "right", no_wrap=index == 0)
    for index, row in enumerate(rows):
        style = "bold" if index == bold else None
        table.add_row(*(Text(cell) for cell in row), style=style, end_section=footer and index == len(rows) - 2)
    console = Console(highlight=False, markup=False, emoji=False)
    if title:
        console.print(title, soft_wrap=True)
    console.print(table)


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


def clean(text: str) -> str:
    """Text that a terminal shows as it is: nothing in it moves the cursor, changes colours or the direction."""
    return "".join(map(_shown, text))


_DIRECTION_MARKS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    if character < " ":
        return chr(0x2400 + ord(character))  # the pictures of the control characters
    keeps = unicodedata.category(character) in ("Zs", "Cf") and character not in _DIRECTION_MARKS
    return character if keeps else "\ufffd"


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
