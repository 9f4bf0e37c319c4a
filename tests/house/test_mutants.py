"""The faults of tools/mutants.toml still fit the code, and the tests that must catch them are there."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mutants(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", root / "tools" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_patch_applies_exactly_once_and_leaves_python(mutants: ModuleType, root: Path, tmp_path: Path) -> None:
    faults = mutants.read_faults()
    assert len(faults) >= 24
    assert [line for fault in faults for line in fault.misfits(root / "src" / "elman")] == []
    for fault in faults:
        source = (root / "src" / "elman" / fault.file).read_text(encoding="utf-8")
        copy = tmp_path / fault.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source, encoding="utf-8")
        fault.plant(tmp_path)
        patched = copy.read_text(encoding="utf-8")
        assert ast.dump(ast.parse(patched, fault.name)) != ast.dump(ast.parse(source)), fault.name


def test_every_fault_names_a_test_that_exists(mutants: ModuleType, root: Path) -> None:
    for fault in mutants.read_faults():
        assert fault.tests, fault.name
        for test in fault.tests:
            file, _, function = test.partition("[")[0].partition("::")
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
            assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], fault.name


def test_a_patch_that_no_longer_fits_is_told(mutants: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n", encoding="utf-8")
    fault = mutants.Fault("f", "", "a.py", [("x = 1", ""), ("= 1", ""), ("z", "")], [])
    assert fault.misfits(tmp_path) == [
        "'= 1' stands 2 times in a.py: rewrite the fault",
        "'z' stands 0 times in a.py: rewrite the fault",
    ]


@pytest.mark.parametrize(
    ("body", "caught", "passed"),
    [
        ("assert 1 == 2", True, False),
        ("raise RuntimeError('assert 1')", False, False),
        ("pass", False, True),
    ],
)
def test_only_a_failed_assertion_counts_as_caught(
    mutants: ModuleType, tmp_path: Path, body: str, caught: bool, passed: bool
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(f"def test_it():\n    {body}\n", encoding="utf-8")
    verdict = mutants.run_tests(tmp_path / "src", [str(test)])
    assert (bool(verdict.caught_by), verdict.passed) == (caught, passed), verdict
