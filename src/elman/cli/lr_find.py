"""``elman lr-find``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from elman.cli.files import Html
from elman.cli.flags import AllFlags, ConfigFile, Json, Preset, given


def lr_find(
    *corpus: str,
    from_rate: float = 1e-5,
    to_rate: float = 10.0,
    num_updates: int = 150,
    preset: Preset = None,
    config: ConfigFile = None,
    html: Html = None,
    json: Json = False,
    flags: AllFlags | None = None,
) -> int:
    """Find a learning rate: train for a moment while the rate rises, and look where the loss turns up.

    Args:
        corpus: Files, folders, globs, '-' for standard input, or one name from `elman data list`; none: stdlib-prose.
        from_rate: The rate of the first update.
        to_rate: The rate of the last.
        num_updates: Updates at most; the test ends when the loss has turned up.
    """
    from elman.cli.output import print_json
    from elman.training.range_test import range_test

    found = range_test(
        corpus or None,
        from_rate=from_rate,
        to_rate=to_rate,
        num_updates=num_updates,
        preset=preset,
        config=config,
        **given(flags),
    )
    if html is not None:
        found.page().write(html)
    if json:
        print_json(found.to_dict())
        return 0
    for line in _curve(found.rates, found.smoothed):
        print(line)
    print(f"lowest    {found.lowest:.1e}, where the loss is lowest")
    print(f"steepest  {found.steepest:.1e}, where it falls the most")
    flag = " ".join(f"--training.{name.replace('_', '-')} {rate:g}" for name, rate in found.settings().items())
    if found.remark is not None:
        print(f"remark    {found.remark}")
    print(f"proposed  {flag}")
    return 0


_LINES, _WIDTH = 24, 50


def _curve(rates: Sequence[float], nats: Sequence[float]) -> Iterator[str]:
    """The loss against the rate, from the top down, a bar for each of some rates."""
    low, high = min(nats), max(nats)
    yield "rate       nats"
    step = max(1, math.ceil(len(rates) / _LINES))
    for rate, value in list(zip(rates, nats, strict=True))[::step]:
        bar = "#" * round(_WIDTH * (value - low) / (high - low or 1.0))
        yield f"{rate:.1e}  {value:7.3f}  {bar}"
