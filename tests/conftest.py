"""What holds for every test: no network, poisoned memory, untouched global state, a cache of its own."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from elman.training import keeper
from elman.training.report import write_report

settings.register_profile("elman", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("elman")

TINY_TEXT = (
    "the cat sat on the mat.\nthe dog sat on the log.\n"
    "a cat and a dog saw the moon; the moon saw a cat and a dog.\n"
    "der Bär aß Öl, và con mèo ngủ: 猫は月を見た.\n"
)


@pytest.fixture(scope="session")
def tiny_text() -> str:
    """Some lines in several scripts, long enough for a few segments of a small batch."""
    return TINY_TEXT * 8


@pytest.fixture
def tiny_corpus(tmp_path: Path, tiny_text: str) -> Path:
    """The same text as a UTF-8 file."""
    path = tmp_path / "tiny.txt"
    path.write_text(tiny_text, encoding="utf-8", newline="")
    return path


# Memory that nobody has written is full of NaN or of a number that no index allows, not of zeros by luck.


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.device.type == "meta":
            return tensor
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                return tensor.fill_(float("nan"))
            return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

    return poisoned


@pytest.fixture(scope="session", autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


# Tests that reach out would pass here and fail elsewhere.


def _is_local(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a Unix socket's path
    host = address[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _local_only(connect: Callable[..., Any]) -> Callable[..., Any]:
    def local_connect(self: socket.socket, address: Any) -> Any:
        if not _is_local(address):
            raise PermissionError(f"a test tried to reach {address!r}; tests use no network")
        return connect(self, address)

    return local_connect


def _local_names_only(resolve: Callable[..., Any]) -> Callable[..., Any]:
    def local_resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host is not None and not _is_local((host if isinstance(host, str) else host.decode(),)):
            raise PermissionError(f"a test tried to look up {host!r}; tests use no network")
        return resolve(host, *args, **kwargs)

    return local_resolve


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _local_only(getattr(socket.socket, name)))
        patch.setattr(socket, "getaddrinfo", _local_names_only(socket.getaddrinfo))
        yield


# One cache for all workers of a test run: entries are written beside and renamed, so that they may meet.


@pytest.fixture(scope="session", autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELMAN_CACHE", str(root / "elman-cache"))
        yield


# A report takes longer to draw than a tiny model to train: only tests that ask for the fixture ``reports`` have one.


@pytest.fixture(scope="session", autouse=True)
def _without_reports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "write_report", lambda run: run.path)
        yield


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings end with their report, as they do outside of tests."""
    monkeypatch.setattr(keeper, "write_report", write_report)


# The library takes dtype, device, seed and number of threads as arguments. Whoever changes or draws from the global
# ones is named. A test whose oracle does so (torch.nn modules draw their weights) is marked global_rng.


def _global_state() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "gradient mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "working folder": Path.cwd(),
    }


@pytest.fixture(autouse=True)
def _global_state_is_left_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    state = _global_state()
    torch_rng, numpy_rng = torch.get_rng_state(), np.random.get_state(legacy=False)
    yield
    now = _global_state()
    changed = [f"{name}: {was} -> {now[name]}" for name, was in state.items() if was != now[name]]
    if not torch.equal(torch_rng, torch.get_rng_state()):
        changed.append("PyTorch's global generator was seeded or drawn from")
    if not _same_numpy_state(numpy_rng, np.random.get_state(legacy=False)):
        changed.append("NumPy's global generator was seeded or drawn from")
    torch.set_rng_state(torch_rng)
    np.random.set_state(numpy_rng)
    torch.set_default_dtype(state["default dtype"])
    torch.set_num_threads(state["number of threads"])
    torch.set_grad_enabled(state["gradient mode"])
    os.chdir(state["working folder"])
    if request.node.get_closest_marker("global_rng"):
        changed = [line for line in changed if "generator" not in line]
    if changed:
        pytest.fail(f"{request.node.nodeid} left global state changed: {'; '.join(changed)}", pytrace=False)


def _same_numpy_state(one: Any, other: Any) -> bool:
    return one["state"]["pos"] == other["state"]["pos"] and np.array_equal(one["state"]["key"], other["state"]["key"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a CUDA device say so where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
