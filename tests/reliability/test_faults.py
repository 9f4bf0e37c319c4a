"""A few trials of every campaign; `make reliability` runs them all."""

from __future__ import annotations

import sys

import pytest
from faults.campaigns import CAMPAIGNS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are forked, traced and signalled as on Linux"
)

SHARES = {
    "killed-in-a-save": 0.1,
    "killed-anywhere": 0.004,
    "killed-twice": 0.03,
    "rank-killed": 0.08,
    "one-call-fails": 0.006,
    "every-flush-fails": 0.02,
    "disk-full": 0.05,
    "log-full": 0.1,
    "signal": 0.02,
    "second-signal": 0.02,
    "damage-found": 0.1,
    "damage-passed": 0.06,
    "verifying": 0.005,
}
"""The share of the trials of each campaign that the fast suite can afford; what is not here is slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHARES else pytest.mark.slow) for name in CAMPAIGNS]
)
def test_the_promises_hold(name, lab):
    result = CAMPAIGNS[name](lab, SHARES.get(name, 0.1))
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.broken, "\n".join(result.broken)
    assert result.fired > 0, f"{result.injected} were injected and none is proven to have happened"
    assert result.held == result.fired
