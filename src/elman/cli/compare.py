"""``elman compare``."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from elman.cli.flags import AllFlags, ConfigFile, Json, OwnCell, Preset, given
from elman.errors import UserError

if TYPE_CHECKING:
    from elman.comparison.result import Comparison


def compare(
    *what: str,
    kinds: str | None = None,
    entry: Annotated[list[str] | None, Parameter(negative=())] = None,
    tokens: float | None = None,
    operations: float | None = None,
    seconds: float | None = None,
    parameters: int | None = None,
    seeds: int = 3,
    rates: str | None = None,
    rate_updates: int = 300,
    out: Path | None = None,
    preset: Preset = None,
    config: ConfigFile = None,
    json: Json = False,
    cell: OwnCell = None,
    flags: AllFlags | None = None,
) -> int:
    """Hold models against each other on equal terms: train them, or take runs that are there.

    Args:
        what: Two runs and more, to compare them as they are; or a corpus, as `elman train` takes it.
        kinds: The models to train, such as elman,lstm,gru.
        entry: A further model, 'NAME: SETTING=VALUE ...', such as 'tied: model.kind=lstm model.tie_weights=true'.
        tokens: Budget of each training in tokens.
        operations: Budget of each training in floating-point operations, forward and backward.
        seconds: Budget of each training in seconds. Nothing else should run meanwhile.
        parameters: Give each model the width that comes nearest to so many parameters.
        seeds: Trainings of each model, with the seeds from --seed (1) on.
        rates: Factors for the learning rates to choose from on the validation part, alike for all, such as 0.3,1,3.
        rate_updates: Updates of each of these short trainings.
        out: The folder of runs and results; what it holds is used again. For runs that are there: where to write.
    """
    if runs := [word for word in what if (Path(word) / "run.toml").is_file()]:
        options = {"--kinds": kinds, "--entry": entry, "--tokens": tokens, "--operations": operations,
                   "--seconds": seconds, "--parameters": parameters, "--rates": rates, "--preset": preset,
                   "--config": config}  # fmt: skip
        _refuse_training(what, runs, [name for name, value in options.items() if value is not None], given(flags))
        return _compare_runs(runs, out, cell, json=json)
    settings = given(flags)
    if cell is not None:
        raise UserError("--cell is for runs that are there: name the cell by --kinds ./file.py:Class")
    if out is None:
        raise UserError("give --out FOLDER: it keeps the runs, so that the comparison can be gone on with")
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; accepted: 1 and more")
    first = settings.pop("seed", 1)
    return _train(
        [*(kinds.split(",") if kinds else []), *(entry or [])],
        what or None,
        out,
        json=json,
        max_tokens=tokens,
        max_operations=operations,
        max_seconds=seconds,
        num_parameters=parameters,
        seeds=_seeds(first, seeds),
        rates=_factors(rates),
        rate_updates=rate_updates,
        preset=preset,
        config=config,
        **settings,
    )


def _refuse_training(what: tuple[str, ...], runs: list[str], options: list[str], settings: dict[str, Any]) -> None:
    if others := [word for word in what if word not in runs]:
        raise UserError(f"{runs[0]!r} is a run and {others[0]!r} is none: give runs alone, or a corpus alone")
    if options or settings:
        name = options[0] if options else f"--{next(iter(settings))}"
        raise UserError(f"{name} has no meaning for runs that are there already: leave it out")


def _seeds(first: str | int, count: int) -> range:
    try:
        return range(int(first), int(first) + count)
    except ValueError:
        raise UserError(f"--seed is {first!r}; accepted: a whole number") from None


def _factors(rates: str | None) -> tuple[float, ...]:
    try:
        factors = tuple(float(rate) for rate in rates.split(",")) if rates else ()
    except ValueError:
        factors = (math.nan,)
    if not all(0 < factor < math.inf for factor in factors):
        raise UserError(f"--rates is {rates!r}; accepted: factors above 0 such as 0.3,1,3")
    return factors


def _train(entries: list[str], corpus: tuple[str, ...] | None, out: Path, *, json: bool, **options: Any) -> int:
    from elman.cli.display import Display
    from elman.cli.running import StopOnSignal
    from elman.comparison.compare import compare as run_comparison
    from elman.comparison.page import write_results
    from elman.comparison.trials import Watch
    from elman.settings import resolve

    with StopOnSignal(Display(resolve()), speaks=True) as stop:
        watch = Watch(tell=_tell, callbacks=[stop], should_stop=stop)
        comparison = run_comparison(entries, corpus, out=out, watch=watch, **options)
        page = write_results(comparison, out)
    _print(comparison, page, json=json)
    return 128 + stop.signal if stop.signal is not None else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _compare_runs(runs: list[str], out: Path | None, cell: str | None, *, json: bool) -> int:
    from elman.comparison.existing import compare_runs
    from elman.comparison.page import write_results

    comparison = compare_runs(runs, cell=cell)
    page = None if out is None else write_results(comparison, out)
    _print(comparison, page, json=json)
    return 0


def _print(comparison: Comparison, page: Path | None, *, json: bool) -> None:
    from elman.cli.output import print_json, print_table
    from elman.comparison.tables import about, baseline_line, columns, resolution_line, written
    from elman.visible import clean

    if json:
        print_json(comparison.to_dict() | {"page": None if page is None else str(page)})
        return
    headings = [column.heading for column in columns(comparison)]
    print_table(clean(" ".join(about(comparison))), headings, written(comparison))
    for verdict in comparison.verdicts[: max(0, len(comparison.contestants) - 1)]:
        print(f"{verdict}")
    for line in (resolution_line(comparison), baseline_line(comparison)):
        if line:
            print(line)
    for notice in comparison.notices:
        print(f"note: {clean(notice)}", file=sys.stderr)
    if not comparison.is_complete:
        print("stopped: the same command goes on with it")
    if page is not None:
        print(f"the page: {page}")
