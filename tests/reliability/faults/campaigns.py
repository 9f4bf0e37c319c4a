"""The list of campaigns."""

from __future__ import annotations

from collections.abc import Mapping

from faults import damage, disk, killed, ranks, signals
from faults.lab import Campaign

CAMPAIGNS: Mapping[str, Campaign] = {
    "killed-in-a-save": killed.in_a_save,
    "killed-anywhere": killed.in_a_run,
    "killed-twice": killed.twice_in_a_row,
    "rank-killed": ranks.killed,
    "rank-frozen": ranks.frozen,
    "one-call-fails": disk.single_errors,
    "every-flush-fails": disk.lasting_errors,
    "disk-full": disk.full_disk,
    "log-full": disk.full_log,
    "signal": signals.one,
    "second-signal": signals.two,
    "damage-found": damage.found,
    "damage-passed": damage.gone_on_from,
    "verifying": damage.cost,
}
"""By the names that ``run.py`` takes."""
