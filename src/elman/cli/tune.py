"""``elman tune``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from elman.cli.flags import AllFlags, ConfigFile, Json, Preset, given


def tune(
    *corpus: str,
    out: Path,
    search: Annotated[list[str] | None, Parameter(negative=())] = None,
    trials: int = 30,
    preset: Preset = None,
    config: ConfigFile = None,
    json: Json = False,
    flags: AllFlags | None = None,
) -> int:
    """Search for the settings that do best on the validation part; they end in a run file.

    Args:
        corpus: As `elman train` takes it.
        out: The folder of one search; the same command goes on with it, and several may work on it at once.
        search: What to search, SETTING=LOW..HIGH or SETTING=A,B,C; none: rates, width and dropout. Repeat it.
        trials: In all: those that are in the folder already count.
    """
    from elman.cli.display import Display
    from elman.cli.output import print_json
    from elman.cli.running import StopOnSignal
    from elman.comparison import tuning
    from elman.settings import resolve

    with StopOnSignal(Display(resolve()), speaks=True) as stop:
        found = tuning.tune(
            corpus or None,
            out=out,
            search=search or (),
            num_trials=trials,
            preset=preset,
            config=config,
            callbacks=[stop],
            should_stop=stop,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
            **given(flags),
        )
    if json:
        print_json(found.to_dict())
    else:
        counts = f"{found.num_finished} finished, {found.num_pruned} given up, {found.num_failed} failed"
        print(f"trials    {counts}" + ("" if found.is_complete else "; the same command goes on"))
        if found.best is not None:
            print(f"best      {found.nats_per_token:.4f} nats per token on the validation part")
            for name, value in found.found.items():
                print(f"          {name} {value:g}" if isinstance(value, float) else f"          {name} {value}")
            print(f"train it  elman train --config {shlex.quote(str(found.best))}")
    return 128 + stop.signal if stop.signal is not None else 0
