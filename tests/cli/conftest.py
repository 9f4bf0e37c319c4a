"""A tiny trained run, and the command line called in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import elman as package
from elman.cli import main

_TINY = (
    "--model.hidden_size=12",
    "--model.embedding_size=8",
    "--training.batch_size=4",
    "--training.bptt=16",
    "--training.max_updates=8",
    "--evaluation.every_updates=4",
    "--sampling.max_new_tokens=12",
    "--training.num_threads=1",
)


class Answer(NamedTuple):
    """What the command line said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on standard output."""
        parsed = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(parsed, dict)
        return parsed


Call = Callable[..., Answer]


@pytest.fixture
def elman(capfd: pytest.CaptureFixture[str]) -> Call:
    """Call the command line; no option of pytest makes standard error a terminal."""

    def call(*words: object) -> Answer:
        capfd.readouterr()
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        return Answer(code, out, err)

    return call


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """The settings of a run that takes a moment."""
    return _TINY


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For a process of its own."""
    return os.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, tiny_text: str) -> Path:
    """A text in several scripts whose held-out parts hold no character that is new."""
    path = tmp_path_factory.mktemp("corpus") / "tiny.txt"
    path.write_text(tiny_text * 4, encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A trained run; tests leave it as it is."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", str(corpus), "--out", str(path), "--seed", "7", *_TINY]) == 0
    return path
