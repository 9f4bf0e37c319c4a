"""Several processes against one: equal parameters, losses and estimates; runs that stop and go on; lost processes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import elman
from elman.errors import ConfigError
from elman.settings import resolve
from elman.training import resume
from elman.training.distributed import SILENT_SECONDS, Place, Ranks
from elman.training.folder import Run
from elman.training.loop import Trainer

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("ranked.py")


@pytest.fixture(scope="module")
def ranked() -> ModuleType:
    """The script's own names: what it trains."""
    spec = importlib.util.spec_from_file_location("ranked", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def processes(words: list[str], size: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """A group of processes of Python; those that are left are killed at the end."""
    port = str(free_port())
    source = str(Path(elman.__file__).parents[1])
    shared = os.environ | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def carry_out(*words: object, size: int = 2) -> list[str]:
    """Start a group, wait for its end, and give what each has said."""
    with processes([str(word) for word in words], size) as started:
        said = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0] * size, "\n".join(said)
    return said


@pytest.fixture(scope="module")
def texts(ranked: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranked")
    ranked.write_texts(folder)
    return folder


@pytest.fixture(scope="module")
def trained(texts: Path) -> Path:
    """What two processes have trained."""
    carry_out(SCRIPT, "equalities", texts)
    return texts


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a number, as a share of the largest of its tensor."""
    assert found.keys() == expected.keys()
    return max(
        float((tensor - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-3))
        for name, tensor in found.items()
    )


CASES = ("lstm", "float32", "documents", "pieces", "muon", "mixed", "taught", "pairs")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one_with_the_rows_of_both(ranked: ModuleType, trained: Path, name: str) -> None:
    case = ranked.CASES[name]
    config = ranked.config_of(case, trained, batch_size=8, accumulate=1)
    trainer, expected = ranked.results(config, **ranked.options_of(name, config))
    found = [load_file(trained / f"{name}-{rank}.safetensors") for rank in range(2)]
    assert trainer.streams.batch_size == 8
    assert len(expected["losses"]) == config.training.max_updates
    assert expected["losses"][0] != expected["losses"][-1]
    for one in found:
        assert distance(one, expected) < (1e-5 if case.get("dtype") is None else 1e-10)
    for tensor, same in zip(*(one.values() for one in found), strict=True):
        assert torch.equal(tensor, same)


def test_an_estimate_counts_every_token_once(ranked: ModuleType, trained: Path) -> None:
    found = load_file(trained / "lstm-1.safetensors")
    config = ranked.config_of(ranked.CASES["lstm"], trained)
    assert int(found["estimate"][1]) == len(ranked.dataset_of(config).valid.tokens) - 1


@pytest.mark.parametrize("name", ["sharded", "sharded-pieces"])
def test_a_divided_model_is_trained_like_a_whole_one(ranked: ModuleType, trained: Path, name: str) -> None:
    _, expected = ranked.results(ranked.config_of(ranked.SHARDED, trained, batch_size=8))
    assert distance(load_file(trained / f"{name}.safetensors"), expected) < 1e-10


@pytest.fixture(scope="module")
def finished(texts: Path) -> Path:
    """Whole runs of two processes."""
    carry_out(SCRIPT, "runs", texts)
    return texts


def end_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").iterdir())[-1] / "tensors.safetensors")


def told(run: Path) -> list[dict[str, Any]]:
    """The log without what the clock and the stops have left."""
    kept = [record for record in Run(run).records() if record["kind"] in ("update", "evaluation", "sample", "end")]
    return [{key: value for key, value in record.items() if key != "measured"} for record in kept]


class OfOtherClock(Ranks):
    """A process on a machine whose clock began long after that of the first process."""

    def of_first(self, *values: float) -> tuple[float, ...]:
        now = time.monotonic()
        return tuple(value + 1e6 if abs(value - now) < 60 else value for value in values)


def test_the_clock_of_the_first_process_alone_decides_when_a_checkpoint_is_due(ranked: ModuleType, texts: Path) -> None:
    settings = {
        "data": {"corpus": [str(texts / "text.txt")]},
        "model": {"hidden_size": 4, "embedding_size": 4},
        "training": {"max_updates": 3, "batch_size": 2, "bptt": 8},
        "sampling": {"max_new_tokens": 1},
    }
    config = resolve(settings)
    trainer = Trainer(config, ranked.dataset_of(config), ranks=OfOtherClock())
    assert [record.values["update"] for record in trainer.records() if record.kind == "checkpoint"] == [0, 3]


@pytest.mark.parametrize("name", ["whole", "divided"])
def test_a_run_that_one_process_stops_twice_ends_bit_for_bit_like_one_undisturbed(finished: Path, name: str) -> None:
    expected, found = end_of(finished / name), end_of(finished / f"{name}-stopped")
    assert expected.keys() == found.keys()
    assert len(expected["state.0.h"]) == 8
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key
    assert told(finished / name) == told(finished / f"{name}-stopped")
    model = (finished / name / "model.safetensors").read_bytes()
    assert model == (finished / f"{name}-stopped" / "model.safetensors").read_bytes()


def test_a_divided_run_leaves_the_files_of_a_whole_one(finished: Path) -> None:
    whole, divided = end_of(finished / "whole"), end_of(finished / "divided")
    assert {name: tensor.shape for name, tensor in whole.items()} == {n: t.shape for n, t in divided.items()}
    assert distance(divided, whole) < 1e-9
    assert elman.load(finished / "divided").score("the cat sat").score.tokens > 0


def test_another_number_of_processes_goes_on_with_the_same_rows(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "whole-at-13", tmp_path / "run")
    run = resume(tmp_path / "run")
    assert distance(end_of(run.path), end_of(finished / "whole")) < 1e-10
    notices = [record["text"] for record in run.records() if record["kind"] == "notice"]
    assert any("its 8 rows are divided over 1 processes" in text for text in notices)


def wait_for(paths: list[Path], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"{paths} have not come"
        time.sleep(0.05)


def lose(texts: Path, folder: Path, number: signal.Signals, victim: int, *words: str, size: int = 2) -> float:
    """Send a signal to one of several processes; the seconds until all have ended, each saying who is lost."""
    for name in ("text.txt", "pairs.tsv"):
        shutil.copy(texts / name, folder / name)
    with processes([str(SCRIPT), "endless", str(folder), *words], size) as started:
        wait_for([folder / f"begun-{rank}" for rank in range(size)], 300)
        at = time.monotonic()
        os.kill(int((folder / f"begun-{victim}").read_text()), number)
        for process in started:
            process.wait(timeout=SILENT_SECONDS + 30)
        seconds = time.monotonic() - at
    heard = range(size) if number == signal.SIGSTOP else [rank for rank in range(size) if rank != victim]
    for rank in heard:
        end = json.loads((folder / f"end-{rank}.json").read_text())
        assert end["error"] == "LostProcessError"
        assert end["text"].startswith(f"rank {victim} (process {(folder / f'begun-{victim}').read_text()} on ")
        assert ("has not answered" if number == signal.SIGSTOP else "has ended") in end["text"]
    return seconds


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_process_ends_all_and_is_named(texts: Path, tmp_path: Path, victim: int) -> None:
    assert lose(texts, tmp_path, signal.SIGKILL, victim) < 30


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_frozen_process_ends_all_and_is_named(texts: Path, tmp_path: Path, victim: int) -> None:
    """The first keeps the store here, as it does not under torchrun: that falls silent with it."""
    assert lose(texts, tmp_path, signal.SIGSTOP, victim, size=3) < 30


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_of_a_divided_model_is_missed_as_well(
    texts: Path, tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    """The others wait for it within PyTorch's own sums."""
    assert lose(texts, tmp_path, number, victim, "divided") < 30


def test_what_torchrun_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Place.from_environment() == Place(0, 1, 0, 0)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Place.from_environment() == Place(5, 8, 1, 1)


class Many(Ranks):
    """As if there were eight processes."""

    size = 8


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"model": {"kind": "ngram"}}, "'ngram' is counted by one process, and there are 8"),
        (
            {"training": {"bptt": 4000, "batch_size": 4}},
            "long enough for 1 rows side by side, and there are 8 ",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(
    ranked: ModuleType, texts: Path, settings: dict[str, Any], line: str
) -> None:
    config = resolve({"data": {"corpus": [str(texts / "text.txt")]}, **settings})
    with pytest.raises(ConfigError, match=line):
        Trainer(config, ranked.dataset_of(config), ranks=Many())


def test_one_process_divides_nothing(ranked: ModuleType, texts: Path) -> None:
    with pytest.raises(ConfigError, match=r"training.shard divides a model over several processes, and this is one"):
        ranked.results(ranked.config_of(ranked.SHARDED, texts, shard=True))


@pytest.mark.slow
def test_torchrun_starts_stops_and_resumes_the_command(texts: Path, tmp_path: Path) -> None:
    """By `torchrun -m elman`: a signal to the launcher saves, and `--resume auto` goes on."""
    words = [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())),
        *("-m", "elman", "train", str(texts / "text.txt"), "--out", str(tmp_path / "run"), "--resume", "auto"),
        *("--model.hidden-size", "10", "--training.batch-size", "4", "--training.bptt", "12"),
        *("--evaluation.every-updates", "100000", "--training.num-threads", "1"),
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(elman.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [sys.executable, *words, "--training.max-updates", "100000"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for([tmp_path / "run" / "metrics.jsonl"], 120)
    until = time.monotonic() + 120
    while sum(record["kind"] == "update" for record in Run(tmp_path / "run").records()) < 5:
        assert time.monotonic() < until
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=60)
    stopped = [record for record in Run(tmp_path / "run").records() if record["kind"] == "stopped"]
    assert len(stopped) == 1, said
    second = subprocess.run(
        [sys.executable, *words, "--training.max-updates", str(stopped[0]["update"] + 5)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert second.returncode == 0, second.stderr
    updates = [record["update"] for record in Run(tmp_path / "run").records() if record["kind"] == "update"]
    assert updates == list(range(1, stopped[0]["update"] + 6))
    assert second.stdout.count("trained") == 1, "one process speaks for all"


@pytest.mark.slow
def test_under_torchrun_a_refusal_is_said_once(tmp_path: Path) -> None:
    words = [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())),
        *("-m", "elman", "train", "nowhere.txt", "--model.kind", "lsmt"),
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(elman.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode != 0
    assert found.stderr.count("elman: error: ") == 1, found.stderr
    assert "did you mean 'lstm'" in found.stderr


@pytest.mark.gpu
def test_several_gpus_equal_one(ranked: ModuleType, texts: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes a device for each process, and there are fewer than two")
    carry_out(SCRIPT, "devices", texts)
    _, expected = ranked.results(ranked.config_of(ranked.CASES["float32"] | {"device": "cuda"}, texts, batch_size=8))
    for rank in range(2):
        found = load_file(texts / f"cuda-{rank}.safetensors")
        assert distance(found, {name: tensor.cpu() for name, tensor in expected.items()}) < 1e-3
