"""A lower layer never imports a higher one, inside functions and for type checkers too."""

from __future__ import annotations

import ast

import pytest

# From the bottom up. Names on one line are peers that do not import each other either.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "files", "visible"),
    ("config",),
    ("text", "scan", "page", "process"),
    ("cells", "metrics"),
    ("models",),
    ("engine",),
    ("data",),
    ("choosing", "beam", "reading"),
    ("evaluation", "generation", "scoring"),
    ("baselines", "adaptation", "surprisal", "settings", "translation"),
    ("judge", "model", "draft"),
    ("training",),
    ("inspection",),
    ("comparison",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# These answer before torch, which takes seconds to import, is needed.
TORCH_INSIDE_FUNCTIONS_ONLY = ("errors", "config", "settings", "cells")
NO_TORCH_AT_ALL = ("errors", "files", "visible", "config", "text", "page")


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> list[tuple[ast.AST, str]]:
    """Every module that the code imports, at the top or anywhere else, as absolute names."""
    found: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            if base == "elman":  # `from elman import settings` imports elman.settings
                found += [(node, f"elman.{alias.name}") for alias in node.names]
            else:
                found.append((node, base))
    return found


def complaint(importer: str, imported: str) -> str | None:
    """Why the module may not import the other, or nothing."""
    source, target = (name.partition(".")[2].partition(".")[0] for name in (importer, imported))
    if target in ("", "__version__") or source in ("", target):
        return None  # the package's own __init__ hands out names from every layer, when they are asked for
    if target not in RANK:
        return f"{importer} imports {imported}, whose layer is not in the table"
    if RANK[target] >= RANK[source]:
        return f"{importer} ({source}) imports {imported} ({target}), which is not below it"
    return None


def test_every_module_has_a_layer(sources):
    unknown = sorted({s.top for s in sources if s.top and s.top not in RANK})
    assert not unknown, f"put these into LAYERS: {unknown}"


def test_imports_point_down(sources):
    wrong = []
    for s in sources:
        for node, imported in imported_modules(s.tree, s.module, s.path.name == "__init__.py"):
            if imported.split(".")[0] == "elman" and (why := complaint(s.module, imported)):
                wrong.append(f"{s.at(node)}: {why}")
    assert not wrong, "\n".join(wrong)


def test_torch_stays_out_of_the_light_layers(sources):
    wrong = []
    for s in sources:
        if s.top in NO_TORCH_AT_ALL:
            searched = [s.tree]
        elif s.top in TORCH_INSIDE_FUNCTIONS_ONLY:
            searched = [node for node in s.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        else:
            continue
        for tree in searched:
            wrong += [
                f"{s.at(node)}: {s.module} imports {imported}"
                for node, imported in imported_modules(tree, s.module, is_package=False)
                if imported.split(".")[0] == "torch"
            ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "code", "complains"),
    [
        ("elman.text.sources", "from elman.errors import TextError", False),
        ("elman.text.sources", "from elman.text.tokenizers import Tokenizer", False),
        ("elman.text.sources", "from .tokenizers import Tokenizer", False),
        ("elman.text.sources", "def f():\n    from elman.data.store import TokenStore", True),
        ("elman.text.sources", "from ..data import store", True),
        ("elman.text.sources", "if TYPE_CHECKING:\n    import elman.models.stack", True),
        ("elman.config", "from elman import settings", True),
        ("elman.config", "from elman import __version__", False),
        ("elman.cells.lstm", "from elman import metrics", True),
        ("elman.cli.train", "import elman.unheard_of", True),
        ("elman", "from elman.cli import main", False),
    ],
)
def test_the_test_itself_sees_each_kind_of_import(importer, code, complains):
    found = imported_modules(ast.parse(code), importer, is_package=False)
    reasons = [complaint(importer, name) for _, name in found if name.split(".")[0] == "elman"]
    assert any(reasons) == complains
