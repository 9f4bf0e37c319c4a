"""``elman train`` and ``elman resume``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from elman.cli.flags import AllFlags, BudgetFlags, OwnCell, Preset, Switch, given

if TYPE_CHECKING:
    from elman.settings import Config
    from elman.training.trackers import Tracker, TrackerName


def train(
    *corpus: str,
    out: Path | None = None,
    preset: Preset = None,
    config: Path | None = None,
    from_model: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None,
    teacher: Annotated[list[str] | None, Parameter(negative=(), metavar="MODEL")] = None,
    teacher_weight: float | None = None,
    teacher_temperature: float | None = None,
    overwrite: Switch = False,
    resume: Literal["never", "auto"] = "never",
    dry_run: Switch = False,
    json: Switch = False,
    tensorboard: Switch = False,
    track: Literal["mlflow", "trackio", "wandb"] | None = None,
    flags: AllFlags | None = None,
) -> int:
    """Train a model on a text and write its run folder.

    Args:
        corpus: Files, folders, globs, '-' for standard input, or one name from `elman data list`; none: stdlib-prose.
        out: The run folder; none: runs/CORPUS-KIND.
        config: A TOML file of settings, such as the run.toml of another run.
        from_model: Start from the weights of this run folder or model file, whose settings the model has.
        teacher: Learn the distribution of this run or model file as well; repeat it for the mean of several.
        teacher_weight: Share of the loss that is the teacher's; none: 0.5.
        teacher_temperature: What the distributions of teacher and student are flattened by for it; none: 1.
        overwrite: Replace a run folder that is there.
        resume: `auto` goes on with the run in --out where there is one, and starts it where there is none.
        dry_run: One update, one estimate and one sample; print the plan and the memory, write nothing.
        json: Print one JSON object on standard output.
        tensorboard: Also write event files for TensorBoard.
        track: Also send the numbers to this tracker of experiments.
    """
    from elman.cli.display import Display
    from elman.cli.output import print_json, print_plan
    from elman.cli.running import carry_through
    from elman.settings import resolve, with_corpus
    from elman.training import run as runs

    settings: dict[str, Any] = given(flags) | ({} if from_model is None else {"from_model": from_model})
    taught = {"teachers": teacher or (), "teacher_weight": teacher_weight, "teacher_temperature": teacher_temperature}
    chosen = {"preset": preset, "config": config, **settings, **taught}
    if dry_run:
        plan = runs.dry_run(corpus or None, **chosen)
        print_json(plan.to_dict()) if json else print_plan(plan)
        return 0
    resolved = resolve(with_corpus(settings, corpus or None), preset=preset, file=config)
    trackers = _trackers(track, "run" if out is None else out.name, resolved)
    code = carry_through(
        lambda watch: runs.train(
            corpus or None,
            out=out,
            overwrite=overwrite,
            resume=resume,
            tensorboard=tensorboard,
            **chosen,
            **watch | {"callbacks": [*watch["callbacks"], *trackers]},
        ),
        Display(resolved),
        json=json,
    )
    for tracker in trackers:
        if tracker.failure is not None:
            print(f"note: {track} was sent no more ({tracker.failure}); the run is whole", file=sys.stderr)
    return code


def _trackers(name: TrackerName | None, run_name: str, config: Config) -> list[Tracker]:
    """The tracker that was asked for; of several processes the first has it."""
    from elman.training.distributed import Place
    from elman.training.trackers import Tracker

    if name is None or Place.from_environment().rank > 0:
        return []
    return [Tracker(name, run_name=run_name, settings=config.to_dict())]


def resume(
    run: Path,
    /,
    *,
    cell: OwnCell = None,
    json: Switch = False,
    tensorboard: Switch = False,
    flags: BudgetFlags | None = None,
) -> int:
    """Go on with a run.

    Args:
        run: The run folder.
        json: Print one JSON object on standard output.
        tensorboard: Also write event files for TensorBoard.
    """
    from elman.cli.display import Display
    from elman.cli.running import carry_through
    from elman.training import run as runs
    from elman.training.folder import Run

    budgets = given(flags).get("training", {})
    return carry_through(
        lambda watch: runs.resume(run, cell=cell, tensorboard=tensorboard, **budgets, **watch),
        Display(Run.open(run).config(cell=cell)),
        json=json,
    )
