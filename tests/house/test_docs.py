"""What is written about Elman agrees with what is there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import elman

TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".cff", ".yml", ".json", ".svg", ".html"}
FOLDERS = ("src", "tests", "tools", "docs", "benchmarks", "examples", ".ci")
GENERATED = {"__pycache__", "_build", "elman.egg-info"}

# Spelled in two halves, so that this file passes its own test.
OF_ONE_MACHINE = re.compile("(?<![.A-Za-z0-9])/(wo" + "rk|farm|root|home/[a-z]+)/|(?<![.A-Za-z0-9])/tm" + "p/env")
LEFT_OVER = re.compile(r"\b(TO" + "DO|FIX" + "ME|X" + r"XX)\b")


def written_files(root: Path) -> Iterator[Path]:
    """Every text file of the project."""
    yield from (p for p in root.iterdir() if p.is_file() and (p.suffix in TEXT_SUFFIXES or p.name == "Makefile"))
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.is_file() and path.suffix in (*TEXT_SUFFIXES, "") and not GENERATED & set(path.parts):
                yield path


def test_no_text_names_a_folder_of_one_machine_or_something_unfinished(root):
    wrong = []
    for path in written_files(root):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if OF_ONE_MACHINE.search(line) or LEFT_OVER.search(line):
                wrong.append(f"{path.relative_to(root)}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_every_module_class_and_function_of_the_public_face_says_what_it_is(sources):
    missing = []
    for s in sources:
        if not ast.get_docstring(s.tree) and s.text.strip():
            missing.append(f"{s.at(s.tree)}: module {s.module}")
        missing += [f"{s.at(node)}: {s.module}.{name}" for node, name in _public(s.tree) if not ast.get_docstring(node)]
    assert not missing, "\n".join(missing)


def _public(
    tree: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Public classes and functions; a method that overrides one of a base class keeps that one's docstring."""
    overrides = isinstance(tree, ast.ClassDef) and bool(tree.bases)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield node, prefix + node.name
                yield from _public(node, f"{prefix}{node.name}.")
            elif not overrides and not _is_described_elsewhere(node):
                yield node, prefix + node.name


def _is_described_elsewhere(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in node.decorator_list)


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short(readme):
    assert len(readme.splitlines()) <= 200


def test_the_cell_of_the_readme_keeps_the_laws(readme, tmp_path):
    from elman.models.laws import check_cell

    (code,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "(Cell)" in block)
    (tmp_path / "my_cell.py").write_text(code, encoding="utf-8")
    assert check_cell(f"{tmp_path}/my_cell.py:MyCell") == []


def test_the_commands_of_readme_and_docs_are_accepted(root):
    from elman.cli import app

    refused = []
    for path in [root / "README.md", root / "CONTRIBUTING.md", root / "Makefile", *(root / "docs").rglob("*.md")]:
        for words in _commands(path.read_text(encoding="utf-8")):
            try:
                app.parse_args(words, exit_on_error=False, print_error=False)
            except Exception as error:
                refused.append(f"{path.name}: elman {' '.join(words)}: {error}")
    assert not refused, "\n".join(refused)


def _commands(text: str) -> list[list[str]]:
    """What follows `elman` in code blocks and recipes, with names put in for what stands in capitals."""
    text = re.sub(r"\\\n\s+", "", text)  # a line that goes on
    lines = re.findall(r"^(?: {4}|\t\$\(BIN\)/)elman (.*)$", text, re.MULTILINE)
    return [shlex.split(line.replace("$(RUN)", "runs/demo"), comments=True) for line in lines]


def test_the_table_of_the_readme_names_every_command(readme):
    from elman.cli import app

    commands = {name for name in app if not name.startswith("-")}
    assert set(re.findall(r"^\| `elman ([a-z-]+)", readme, re.MULTILINE)) == commands


def test_the_make_targets_that_are_written_about_exist(root):
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        (path.name, target)
        for path in [*root.glob("*.md"), root / ".ci" / "run", *(root / "docs").rglob("*.md")]
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named
    assert {(name, target) for name, target in named if target not in targets} == set()


def test_links_between_files_lead_somewhere(root):
    broken = []
    for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
            if "://" not in link and not (path.parent / link).exists():
                broken.append(f"{path.relative_to(root)}: {link}")
    assert not broken, "\n".join(broken)


def test_the_changelog_knows_the_version(root):
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog or f"## [{elman.__version__}]" in changelog


def test_the_licence_is_the_official_text(root):
    text = (root / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
