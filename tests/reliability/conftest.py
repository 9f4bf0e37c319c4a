"""The laboratory in which runs are hurt, once for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `faults` is a package of tests alone

from faults.lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Processes that are forked from one that has imported everything."""
    with Lab(tmp_path_factory.mktemp("lab")) as made:
        yield made
