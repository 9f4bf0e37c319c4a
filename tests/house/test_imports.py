"""Importing Elman needs the core dependencies alone, prints nothing, and brings torch in only for a model."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import elman

MODULE_OF = {"pytest-xdist": "xdist", "myst-parser": "myst_parser", "tomli-w": "tomli_w"}

# Imports what is named on standard input, with the blocked libraries out of reach, and says what came in.
IMPORT_ALL = """
import contextlib, importlib, io, json, sys

asked = json.load(sys.stdin)

class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in asked["blocked"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked)
printed = io.StringIO()
failed = {}
with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
    for name in asked["modules"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
json.dump({"failed": failed, "printed": printed.getvalue(), "loaded": sorted(sys.modules)}, sys.stdout)
"""

HELP = """
import contextlib, io, json, sys

sys.argv = ["elman", *json.load(sys.stdin)]
from elman.cli import main

printed = io.StringIO()
with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
    main()
json.dump({"printed": printed.getvalue(), "loaded": sorted(sys.modules)}, sys.stdout)
"""


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def module_names(requirements: list[str]) -> set[str]:
    names = (re.split(r"[^A-Za-z0-9._-]", requirement)[0] for requirement in requirements)
    return {MODULE_OF.get(name, name) for name in names if name != "elman"}


@pytest.fixture(scope="module")
def core(project: dict[str, Any]) -> set[str]:
    return module_names(project["dependencies"])


@pytest.fixture(scope="module")
def extras(project: dict[str, Any]) -> set[str]:
    return module_names([r for requirements in project["optional-dependencies"].values() for r in requirements])


def in_a_fresh_process(code: str, asked: object, root: Path) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(asked),
        cwd=root / "src",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def test_every_module_imports_with_the_core_dependencies_alone_and_in_silence(sources, extras, root):
    modules = [s.module for s in sources if s.top != "__main__"]
    result = in_a_fresh_process(IMPORT_ALL, {"modules": modules, "blocked": sorted(extras)}, root)
    assert result["failed"] == {}
    assert result["printed"] == ""
    assert set(modules) <= set(result["loaded"])


def test_the_light_modules_leave_torch_out(sources, root):
    light = ("", "errors", "config", "settings", "cells", "text")
    modules = [s.module for s in sources if s.top in light]
    result = in_a_fresh_process(IMPORT_ALL, {"modules": modules, "blocked": []}, root)
    assert result["failed"] == {}
    assert {"torch", "numba"} & set(result["loaded"]) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]], ids=" ".join)
def test_help_answers_without_torch(arguments, root):
    result = in_a_fresh_process(HELP, arguments, root)
    assert result["printed"].strip()
    assert {"torch", "numba"} & set(result["loaded"]) == set()


@pytest.mark.parametrize("name", elman.__all__)
def test_every_public_name_leads_somewhere(name):
    assert getattr(elman, name) is not None


def test_third_party_imports_are_declared_and_optional_ones_wait_for_their_function(sources, core, extras):
    wrong = []
    for s in sources:
        at_import = set(_outside_functions(s.tree))
        for node in ast.walk(s.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"elman"} - core:
                if name not in extras:
                    wrong.append(f"{s.at(node)}: {name} is not declared in pyproject.toml")
                elif node in at_import:
                    wrong.append(f"{s.at(node)}: {name} is optional: import it in the function that needs it")
    assert not wrong, "\n".join(wrong)


def _outside_functions(node: ast.AST) -> list[ast.AST]:
    """Every node that runs when the module is imported."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_for_type_checkers(child):
            continue
        found += [child, *_outside_functions(child)]
    return found


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_constraints_pin_every_direct_dependency_within_its_range(project, root):
    from packaging.requirements import Requirement

    pins = {}
    for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name] = version
    declared = [*project["dependencies"], *(r for rs in project["optional-dependencies"].values() for r in rs)]
    requirements = {r.name: r for r in map(Requirement, declared) if r.name != "elman"}
    assert pins.keys() == requirements.keys()
    assert [name for name, pin in pins.items() if pin not in requirements[name].specifier] == []


def test_all_is_every_extra_but_dev_and_docs(project):
    extras = project["optional-dependencies"]
    assert extras["all"] == [f"elman[{','.join(sorted(set(extras) - {'all', 'dev', 'docs'}))}]"]
