"""``elman bench``."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from elman.cli.files import Html
from elman.cli.flags import Switch
from elman.errors import UserError

if TYPE_CHECKING:
    from elman.training.bench import PresetSpeed


def bench(*kinds: str, seconds: float = 1.0, html: Html = None, json: Switch = False) -> int:
    """Measure this machine: how fast each family trains and writes on it, and what presets can be expected to reach.

    Args:
        kinds: Families, such as lstm; none: all.
        seconds: For each figure of a family.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import figure, print_json, print_table
    from elman.training import bench as benches

    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds is {seconds:g}; accepted: a number above 0")
    found = benches.bench(kinds, seconds=seconds, progress=lambda what: print(f"measuring {what}", file=sys.stderr))
    if html is not None:
        found.page().write(html)
    if json:
        print_json(found.to_dict())
        return 0
    machine = found.machine
    threads = f"{machine.threads} thread{'s' * (machine.threads != 1)}"
    print(f"{machine.processor}, {machine.cpus} processors, {threads} of PyTorch")
    print(f"matrix product  {machine.matrix_gflops:,.0f} GFLOP/s")
    print(f"memory          {machine.memory_gigabytes_per_second:,.1f} GB/s")
    print_table(
        "",
        ("kind", "parameters", "trained tokens/s", "of peak", "written tokens/s"),
        [
            [
                one.kind,
                f"{one.parameters:,}",
                figure(one.train_tokens_per_second, 0),
                f"{one.train_share_of_peak:.1%}",
                figure(one.generated_tokens_per_second, 0),
            ]
            for one in found.families
        ],
    )
    for preset in found.presets:
        print(f"{preset.preset}: {_expectation(preset)}")
    return 0


def _expectation(preset: PresetSpeed) -> str:
    """What a preset can be expected to reach."""
    here = f"{preset.milliseconds_per_update:.0f} ms an update here, about {preset.updates:,} updates in its time"
    what = "nats per character of tiny-shakespeare elsewhere"
    if preset.expected_nats is not None:
        return f"{here}; so many came to {preset.expected_nats:.2f} {what}"
    outside = "fewer end higher" if preset.updates < preset.recorded_updates else "more may end lower"
    return f"{here}; {preset.recorded_updates:,} came to {preset.recorded_nats:.2f} {what}, {outside}"
