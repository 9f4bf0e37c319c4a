"""The traps that conftest lays for every test do spring."""

from __future__ import annotations

import socket

import pytest
import torch


def test_unwritten_memory_is_poisoned():
    like = torch.zeros(3, dtype=torch.float64)
    for unwritten in (torch.empty(3), torch.empty_like(like), like.new_empty(3)):
        assert unwritten.isnan().all()
    for unwritten in (torch.empty(3, dtype=torch.int64), like.new_empty(3, dtype=torch.int64)):
        assert (unwritten > 2**62).all()


def test_only_this_machine_can_be_reached():
    with pytest.raises(PermissionError, match="no network"):
        socket.create_connection(("192.0.2.1", 80), timeout=0.1)
    with pytest.raises(PermissionError, match="no network"):
        socket.create_connection(("example.org", 80), timeout=0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1])).close()
