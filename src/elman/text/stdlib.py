"""Two corpora that every Python carries: the English prose and the source code of its own standard library.

Files are read, never imported. The text is the same on every machine with the same Python version: only modules that
every distribution ships whole are taken, and nothing depends on the order in which a folder is listed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import sys
import sysconfig
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from elman.errors import TextError

PROSE_VERSION = 4
"""Raised whenever the same Python version would give another prose."""

# Linux distributions and Homebrew ship these apart, or change them for themselves.
_APART = ("distutils", "ensurepip", "idlelib", "lib2to3", "site", "sysconfig", "tkinter", "turtle", "turtledemo")
_SKIPPED_FOLDERS = ("__pycache__", "site-packages", "test", "tests")

_RULE = re.compile(r"^[ \t]*([^\w\s])\1{2,}[ \t]*\n?", re.MULTILINE)
_COLUMNS = " " * 6  # inside a paragraph without its indentation
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_MIN_DOCUMENT = 200
_MIN_PARAGRAPH_TO_COMPARE = 60
_MIN_DOCUMENTS_OF_A_CHARACTER = 8


def python_name() -> str:
    """The interpreter whose library is read, such as ``Python 3.11.7``; not CPython: its name and version as well."""
    name = f"Python {platform.python_version()}"
    if sys.implementation.name == "cpython":
        return name
    return f"{name} ({sys.implementation.name} {'.'.join(map(str, sys.implementation.version[:3]))})"


def source_files() -> list[Path]:
    """The non-test modules of the standard library, in the order of their relative paths.

    Raises:
        TextError: this Python was installed without its source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            relative = path.relative_to(root)
            module = relative.parts[0].removesuffix(".py")
            if module in sys.stdlib_module_names and module not in _APART:
                files[relative.as_posix()] = path
    if "pydoc_data/topics.py" not in files:
        raise TextError(
            f"{python_name()} at {sys.prefix} was installed without the source files of its standard library; "
            "give a text of your own, or synthetic:grammar"
        )
    return [files[name] for name in sorted(files)]


def prose_key() -> str:
    """Differs whenever the prose may: a digest of the Python version, `PROSE_VERSION` and the sizes of the files."""
    parts = [python_name(), str(PROSE_VERSION), *(f"{path} {path.stat().st_size}" for path in source_files())]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def code_documents() -> Iterator[str]:
    """The source files, each a document, with LF at the end of lines."""
    return map(_read, source_files())


def prose_documents() -> list[str]:
    """The help topics and, of each module, the docstrings: English prose in paragraphs, 1.5 MB in a few seconds.

    A topic or a module is a document, so that a model meets several hundred beginnings and can write its own. Left
    out are doctest sessions, tables and rules, which are no prose, and every longer paragraph that occurred before:
    the topics repeat each other, and a repetition would stand in the training and in the held-out part. Paragraphs
    with a character that hardly any document has go too, for a held-out part could hold one that training never
    saw. The order is that of a hash, so that the parts cut off the end resemble the rest.
    """
    documents: list[list[str]] = []
    seen: set[str] = set()
    for raw in _raw_prose():
        paragraphs: list[str] = []
        for indented in _BLANK_LINES.split(_RULE.sub("", raw).strip("\n")):
            paragraph = textwrap.dedent(indented)
            if _is_prose(paragraph) and _is_new(paragraph, seen):
                paragraphs.append(paragraph)
            elif paragraphs and paragraphs[-1].endswith(":"):
                paragraphs.pop()  # it announced what is left out
        documents.append(paragraphs)
    texts = ("\n\n".join(paragraphs) + "\n" for paragraphs in _without_rare_characters(documents))
    return sorted(
        (text for text in texts if len(text) > _MIN_DOCUMENT),
        key=lambda text: hashlib.sha256(text.encode()).digest(),
    )


def _without_rare_characters(documents: list[list[str]]) -> list[list[str]]:
    """The documents without the paragraphs whose characters stand in too few of them, until none is left."""
    while True:
        found = Counter(character for paragraphs in documents for character in set("".join(paragraphs)))
        rare = {character for character, count in found.items() if count < _MIN_DOCUMENTS_OF_A_CHARACTER}
        if not rare:
            return documents
        documents = [[p for p in paragraphs if rare.isdisjoint(p)] for paragraphs in documents]


def _raw_prose() -> Iterator[str]:
    for path in source_files():
        tree = ast.parse(_read(path))
        if path.parts[-2:] == ("pydoc_data", "topics.py"):
            (topics,) = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
            # The longest first: what the others repeat of it then falls away, not the other way round.
            yield from sorted(topics.values(), key=lambda topic: (-len(topic), topic))
        else:
            yield "\n\n".join(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings below a node, in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield from filter(None, [ast.get_docstring(node)])
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler):
            yield from _docstrings(child)


def _is_prose(paragraph: str) -> bool:
    """Whether three quarters of what is not blank are letters, nothing is laid out in columns or typed at a prompt."""
    num_letters = sum(map(str.isalpha, paragraph))
    num_visible = sum(map(len, paragraph.split()))
    if ">>>" in paragraph or _COLUMNS in paragraph:
        return False
    return num_letters > 0 and 4 * num_letters >= 3 * num_visible


def _is_new(paragraph: str, seen: set[str]) -> bool:
    words = " ".join(paragraph.split())
    if len(words) < _MIN_PARAGRAPH_TO_COMPARE:
        return True
    known = words in seen
    seen.add(words)
    return not known


def _read(path: Path) -> str:
    """The text of a source file, decoded as Python decodes it."""
    with tokenize.open(path) as file:
        return file.read()
