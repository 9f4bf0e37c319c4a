"""The committed table of which kind can do what, held against the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from elman.cells import cell_names, find_cell
from elman.cells.base import Cell
from elman.models.kinds import kind_names


@pytest.fixture(scope="module")
def rows(root: Path) -> dict[str, list[str]]:
    lines = (root / "docs" / "capabilities.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_it_has_every_kind_and_no_other(rows):
    assert set(rows) == set(kind_names())


def test_what_it_says_of_scans_and_mixed_stacks_is_so(rows):
    for kind in cell_names():
        _, scan, *_, layer, arpa = rows[kind]
        assert scan.startswith("native" if find_cell(kind).scan is not Cell.scan else "fallback"), kind
        assert (layer, arpa) == ("native", "refused")


def test_what_has_to_be_compiled_is(rows):
    for kind in ("elman", "lstm", "gru", "mingru", "minlstm", "mamba", "window", "ngram"):
        assert rows[kind][3].startswith("native"), kind
