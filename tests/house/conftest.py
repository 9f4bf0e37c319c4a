"""The source files of Elman, parsed once for the tests that read them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class SourceFile(NamedTuple):
    """One module of the package."""

    path: Path
    module: str
    text: str
    tree: ast.Module

    @property
    def top(self) -> str:
        """The module or folder right below ``elman``; empty for the package itself."""
        return self.module.partition(".")[2].partition(".")[0]

    def at(self, node: ast.AST) -> str:
        """Where a node stands, for a message."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[SourceFile]:
    folder = ROOT / "src"
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(SourceFile(path, module, text, ast.parse(text, str(path))))
    assert len(found) > 10
    return found
