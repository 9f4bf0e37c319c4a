"""Plant the faults of mutants.toml one at a time in a copy of the code; the tests named beside each must fail.

    python tools/mutants.py [--list] [NAME ...]

A fault is text that stands exactly once in a source file and what takes its place. First all named tests have to pass
on an unpatched copy. A fault counts as caught by an assertion that fails: an import error, a crash or a broken fixture
shows that the patch is bad, not that the tests are good. Ends with 1 where a fault is not caught or no longer
fits the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
WORKERS = 2
LIMIT_SECONDS = 120
ASSERTIONS = ("AssertionError", "assert ", "Failed: ")
"""How pytest begins the message of a failed assertion, of ``pytest.fail`` and of an exception that did not come."""


class Fault(NamedTuple):
    """What is wrong, where, and who must notice."""

    name: str
    what: str
    file: str
    """Below src/elman."""
    edits: Sequence[tuple[str, str]]
    """Old text and new."""
    tests: Sequence[str]
    """Node ids; those of a whole parametrized test may stand for all."""

    def misfits(self, package: Path) -> list[str]:
        """Why the patch does not fit the code; nothing where it does."""
        text = (package / self.file).read_text(encoding="utf-8")
        wrong = [(old, text.count(old)) for old, _ in self.edits if text.count(old) != 1]
        return [f"{old.strip()!r} stands {count} times in {self.file}: rewrite the fault" for old, count in wrong]

    def plant(self, package: Path) -> None:
        """Patch a copy."""
        path = package / self.file
        text = path.read_text(encoding="utf-8")
        for old, new in self.edits:
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


class Verdict(NamedTuple):
    """What one run of tests said."""

    caught_by: str
    """The test whose assertion failed; empty where none did."""
    passed: bool
    trouble: str
    """How it ended otherwise, in a line."""


def read_faults() -> list[Fault]:
    """All faults, in the order of the file."""

    def listed(value: str | list[str]) -> list[str]:
        return [value] if isinstance(value, str) else value

    return [
        Fault(
            name,
            entry["what"],
            entry["file"],
            list(zip(listed(entry["old"]), listed(entry["new"]), strict=True)),
            listed(entry["test"]),
        )
        for name, entry in tomllib.loads(FAULTS.read_text(encoding="utf-8")).items()
    ]


def run_tests(source: Path, tests: Sequence[str]) -> Verdict:
    """Run tests of this checkout against the package in a folder, in a process of its own, up to the first failure."""
    scratch = source.parent
    report = scratch / "report.xml"
    environment = os.environ | {
        "PYTHONPATH": str(source),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        "OMP_NUM_THREADS": "1",
    }
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(scratch / "tmp")]
    command = [sys.executable, "-m", "pytest", *options, "--junit-xml", str(report), *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict("", False, f"no end after {LIMIT_SECONDS} seconds")
    if done.returncode == 0:
        return Verdict("", True, "every test named passed: the fault survives")
    complaints = list(_complaints(report)) if report.exists() else []
    for test, kind, message in complaints:
        if kind == "failure" and message.startswith(ASSERTIONS):
            return Verdict(test, False, "")
    said = [f"{test}: {message}" for test, _, message in complaints] or done.stderr.strip().splitlines()[-1:]
    return Verdict("", False, f"no assertion failed, but {' '.join(said or [f'pytest ended with {done.returncode}'])}")


def _complaints(report: Path) -> Iterator[tuple[str, str, str]]:
    """Test, "failure" or "error", and the message's first line, from a JUnit report."""
    for case in ElementTree.parse(report).iter("testcase"):
        for complaint in case:
            if complaint.tag in ("failure", "error"):
                yield case.get("name", ""), complaint.tag, complaint.get("message", "").split("\n")[0]


def try_fault(unpatched: Path, fault: Fault) -> tuple[Fault, Verdict, float]:
    """Plant one fault in a copy of its own and run its tests."""
    started = time.perf_counter()
    if misfits := fault.misfits(unpatched / "elman"):
        return fault, Verdict("", False, "; ".join(misfits)), 0.0
    with tempfile.TemporaryDirectory(prefix="elman-mutant-") as scratch:
        source = Path(scratch, "src")
        shutil.copytree(unpatched, source)  # compiled files too: the patched one is newer than its own
        fault.plant(source / "elman")
        verdict = run_tests(source, fault.tests)
    return fault, verdict, time.perf_counter() - started


def main() -> int:
    """Try the faults asked for, and say what became of each."""
    parser = argparse.ArgumentParser(description="Plant named faults one at a time; a test must catch each.")
    parser.add_argument("names", metavar="NAME", nargs="*", help="faults to try; none: all")
    parser.add_argument("--list", action="store_true", help="only list them")
    asked = parser.parse_args()
    faults = read_faults()
    if unknown := set(asked.names) - {fault.name for fault in faults}:
        parser.error(f"no fault {', '.join(sorted(unknown))}; --list shows them")
    faults = [fault for fault in faults if not asked.names or fault.name in asked.names]
    if asked.list:
        for fault in faults:
            print(f"{fault.name:28} {fault.what}\n{'':28} {' '.join(fault.tests)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="elman-mutants-") as scratch:
        unpatched = Path(scratch, "src")
        shutil.copytree(ROOT / "src" / "elman", unpatched / "elman", ignore=shutil.ignore_patterns("__pycache__"))
        started = time.perf_counter()
        verdict = run_tests(unpatched, list(dict.fromkeys(test for fault in faults for test in fault.tests)))
        if not verdict.passed:
            print(f"the tests fail without any fault: {verdict.caught_by or verdict.trouble}")
            return 1
        print(f"without a fault every test passes ({time.perf_counter() - started:.0f} s)", flush=True)
        num_caught = 0
        with ThreadPoolExecutor(WORKERS) as pool:
            for fault, verdict, seconds in pool.map(partial(try_fault, unpatched), faults):
                num_caught += bool(verdict.caught_by)
                outcome = f"caught by {verdict.caught_by}" if verdict.caught_by else f"NOT CAUGHT: {verdict.trouble}"
                print(f"{fault.name:28} {fault.what}; {outcome} ({seconds:.1f} s)", flush=True)
    print(f"{len(faults)} faults, {num_caught} caught, {time.perf_counter() - started:.0f} s")
    return int(num_caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
