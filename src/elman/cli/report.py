"""``elman report`` and ``elman runs``."""

from __future__ import annotations

from pathlib import Path

from elman.cli.flags import Json, OwnCell, Switch


def report(run: Path, /, *, judge: Switch = False, json: Json = False, cell: OwnCell = None) -> None:
    """Write the page report.html of a run: what it learned from, how it went, how good it is, what it writes.

    Args:
        run: The run folder.
        judge: Look at the test part, beside baselines, and draw at several temperatures; it stays in the run.
    """
    from elman.cli.output import print_json
    from elman.comparison.judging import judge_run
    from elman.training.folder import Run
    from elman.training.report import judged_in, write_report

    folder = Run.open(run)
    if judge:
        judge_run(folder, cell=cell, afresh=True)
    page = write_report(folder)
    if json:
        print_json({"report": str(page), "judged": judged_in(folder) or None})
    else:
        print(f"{page}")


def runs(folder: Path = Path("runs"), /, *, kind: str | None = None, match: str = "", json: Json = False) -> None:
    """List the runs in a folder, the best estimate of each on its validation part.

    Args:
        folder: What holds them, at any depth.
        kind: Those of this model.kind alone.
        match: Those alone that have this text in their name or that of their corpus; capitals do not count.
    """
    import sys

    from elman.cli.output import figure, print_json, print_table
    from elman.training.history import list_runs
    from elman.visible import clean

    all_found, faults = list_runs(folder)
    for fault in faults:
        print(f"note: {clean(fault)}", file=sys.stderr)
    found = [
        one
        for one in all_found
        if kind in (None, one.kind) and any(match.casefold() in name.casefold() for name in (one.name, one.corpus))
    ]
    if json:
        print_json({"runs": [one.to_dict() for one in found]})
        return
    print_table(
        f"{len(found)} runs in {folder}" + (f" of {len(all_found)}" if len(found) < len(all_found) else ""),
        ["run", "kind", "corpus", "training", "seed", "parameters", "updates", "seconds", "nats/token", "bits/char"],
        [
            (clean(one.name), clean(one.kind), clean(one.corpus), one.ending, str(one.seed),
             "-" if one.parameters is None else f"{one.parameters:,}", f"{one.updates:,}", figure(one.seconds, 1),
             figure(one.nats_per_token), figure(one.bits_per_char))
            for one in found
        ],
        text_columns=4,
    )  # fmt: skip
