"""A small text, a small comparison on it, and what trains in a moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elman.comparison import judging
from elman.comparison.compare import compare
from elman.comparison.result import Comparison


@pytest.fixture(scope="session", autouse=True)
def _short_samples() -> Iterator[None]:
    """Drawing at temperatures and drawing the page of every run are tested in places of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "_NUM_TOKENS", 12)
        patch.setattr(judging, "write_report", lambda run: run.path)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    path = tmp_path_factory.mktemp("comparison") / "tiny.txt"
    path.write_text(tiny_text * 2, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def quick() -> dict[str, Any]:
    """Settings for all models."""
    return {
        "model": {"hidden_size": 8, "embedding_size": 8},
        "training": {"batch_size": 4, "bptt": 8, "num_threads": 1, "warmup_updates": 2},
        "evaluation": {"every_updates": 4, "max_tokens": 50},
        "sampling": {"every_updates": 4, "max_new_tokens": 8, "temperatures": (0.5, 1.5)},
        "data": {"valid_fraction": 0.1, "test_fraction": 0.1},
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small comparison lies."""
    return tmp_path_factory.mktemp("comparison") / "small"


@pytest.fixture(scope="session")
def small(corpus: Path, folder: Path, quick: dict[str, Any]) -> Comparison:
    """Three models, one of them counted, with two seeds; tests leave it as it is."""
    settings = {name: dict(section) for name, section in quick.items()}
    del settings["model"]  # a count has none of these
    entries = [
        "elman: model.kind=elman model.hidden_size=8 model.embedding_size=8",
        "lstm: model.kind=lstm model.hidden_size=8 model.embedding_size=8",
        "counts: model.kind=ngram model.order=2",
    ]
    return compare(entries, corpus, out=folder, max_tokens=8 * 32, seeds=(1, 2), **settings)
