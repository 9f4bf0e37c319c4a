"""``torchrun -m elman eval``: several processes print once what one process prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from socket import create_server
from typing import Any

import pytest


class Two:
    """A team of which this process is the second."""

    rank, size = 1, 2

    def sum(self, *values: float) -> tuple[float, ...]:
        return values


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "a carried state reads one stream, which 2 processes cannot share: give --state reset or --window"),
        (["--cache"], "a carried state reads one stream"),
        (["-", "--state", "reset"], "standard input goes to one of the 2 processes"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(elman, run, monkeypatch, words, line):
    monkeypatch.setattr("elman.training.distributed.join", lambda: nullcontext(Two()))
    answer = elman("eval", run, *words)
    assert answer.code == 2
    assert line in answer.err
    assert answer.err.count("\n") == 1


def test_the_first_process_speaks_for_all(elman, run, monkeypatch, tmp_path):
    monkeypatch.setattr("elman.training.distributed.join", lambda: nullcontext(Two()))
    words = ["--state", "reset", "--baselines", "--tokens", tmp_path / "tokens.jsonl", "--html", tmp_path / "page.html"]
    answer = elman("eval", run, *words)
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert not list(tmp_path.iterdir())


def in_processes(size: int, words: list[str], environment: dict[str, str]) -> list[str]:
    """What each process of a group says on standard output."""
    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = environment | os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["GLOO_SOCKET_IFNAME"] = "lo"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "elman", *words],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * size, "\n".join(err for _, err in said)
    return [out for out, _ in said]


def check_alike(found: Any, expected: Any) -> None:
    """Equal, and numbers to what float32 allows."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            check_alike(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_alike(one, other)
    else:
        assert found == (pytest.approx(expected, rel=1e-5) if isinstance(expected, float) else expected)


@pytest.mark.slow
@pytest.mark.dist
def test_three_processes_print_what_one_prints(elman, run, tmp_path, environment):
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(40):
        (texts / f"{index:02}.txt").write_text(f"the cat saw {'a dog and ' * (index % 5)}the moon.\n", encoding="utf-8")

    def words(tokens: Path) -> list[str]:
        return ["eval", str(run), str(texts), "--state", "reset", "--accuracy", "--json", "--tokens", str(tokens)]

    expected = elman(*words(tmp_path / "alone.jsonl")).json
    out, *others = in_processes(3, words(tmp_path / "shared.jsonl"), environment)
    assert others == ["", ""]
    found: dict[str, Any] = json.loads(out)
    assert found.pop("num_streams") == 3 * expected.pop("num_streams")
    check_alike(found, expected)
    lines = [
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("shared", "alone")
    ]
    check_alike(*lines)
    assert len(lines[0]) == expected["tokens"]
