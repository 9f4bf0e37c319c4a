"""The list of campaigns. One that several processes train together belongs into a module of its own beside these."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from faults import damage, disk, killed, signals
from faults.lab import Lab, Result

CAMPAIGNS: Mapping[str, Callable[[Lab, float], Result]] = {
    "killed-in-a-save": killed.in_a_save,
    "killed-anywhere": killed.in_a_run,
    "killed-twice": killed.twice_in_a_row,
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
"""Each takes the lab and the share of its trials to do, 1 for all."""
