"""A few trials of every campaign; `make reliability` runs them all."""

from __future__ import annotations

import sys

import pytest
from faults.campaigns import CAMPAIGNS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are forked, traced and signalled as on Linux"
)

SHARES = {
    "killed-in-a-save": 0.2,
    "killed-anywhere": 0.01,
    "killed-twice": 0.05,
    "one-call-fails": 0.012,
    "every-flush-fails": 0.05,
    "disk-full": 0.1,
    "log-full": 0.1,
    "signal": 0.05,
    "second-signal": 0.05,
    "damage-found": 0.1,
    "damage-passed": 0.2,
    "verifying": 0.005,
}
"""The share of the trials of each campaign that the fast suite can afford."""


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_the_promises_hold(name, lab):
    result = CAMPAIGNS[name](lab, SHARES[name])
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.broken, "\n".join(result.broken)
    assert result.fired > 0, f"{result.injected} were injected and none is proven to have happened"
    assert result.held == result.fired
