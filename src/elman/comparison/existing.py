"""Hold runs against each other that are there already, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elman.cells import is_own_cell
from elman.comparison.compare import baselines_of, contestant_of, outcome_of
from elman.comparison.judging import judge_run
from elman.comparison.result import Comparison, Contestant, ranked
from elman.errors import UserError
from elman.settings import Config
from elman.training.folder import Run
from elman.training.history import History, environment_of, settings_of


def compare_runs(paths: Sequence[str | Path], *, cell: str | None = None) -> Comparison:
    """Hold runs against each other; those that differ in their seed alone are one model.

    A run that was not judged before is judged now, on its test part, else on its validation part.

    Args:
        paths: two run folders and more.
        cell: a person's own cell, where runs were trained with one.

    Raises:
        UserError: fewer than two runs, different corpora, nothing held out, or a run without a model.
    """
    if len(paths) < 2:
        raise UserError("a comparison takes two runs and more: elman compare RUN1 RUN2")
    runs = [Run.open(path) for path in paths]
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("a run is given twice: give each once")
    cells = [cell if is_own_cell(str(settings_of(run).get("model", {}).get("kind"))) else None for run in runs]
    configs = [run.config(cell=own) for run, own in zip(runs, cells, strict=True)]
    _refuse_different_texts(runs, configs)
    judged = [judge_run(run, cell=own, with_baselines=False) for run, own in zip(runs, cells, strict=True)]
    same: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        same.setdefault(str(config.model_copy(update={"seed": 0, "preset": None}).to_dict()), []).append(index)
    contestants = []
    for indices in same.values():
        outcomes = [outcome_of(runs[index], configs[index].seed, judged[index]) for index in indices]
        first = indices[0]
        contestants.append(contestant_of(runs[first].path.resolve().name, configs[first], outcomes, cell=cells[first]))
    figure, in_order = ranked(_told_apart(contestants))
    environment, split = environment_of(runs[0]), judged[0]["judgement"]["split"]
    notices = _notices(runs, [one["judgement"]["state_policy"] for one in judged])
    return Comparison(
        corpus=environment["corpus"],
        corpus_sha256=environment["corpus_sha256"],
        split=split,
        terms=None,
        figure=figure,
        contestants=in_order,
        notices=tuple(notices),
        baselines=baselines_of(runs),
    )


def _refuse_different_texts(runs: Sequence[Run], configs: Sequence[Config]) -> None:
    """The corpora must be the same, and cut the same way."""
    environments = [environment_of(run) for run in runs]
    for run, environment, config in zip(runs, environments, configs, strict=True):
        if "corpus_sha256" not in environment:
            raise UserError(f"{str(run.path)!r} does not say what it was trained on: its environment.json is damaged")
        if not environment.get("tokens", {}).keys() & {"test", "valid"}:
            raise UserError(
                f"{str(run.path)!r} was trained with nothing held out that it could be judged on: train it again with "
                "data.test_fraction above 0"
            )
        if environment["corpus_sha256"] != environments[0]["corpus_sha256"]:
            raise UserError(
                f"{str(runs[0].path)!r} was trained on {environments[0]['corpus']!r} and {str(run.path)!r} on "
                f"{environment['corpus']!r}, another text: compare runs of one corpus"
            )
        mine, others = ((one.data.valid_fraction, one.data.test_fraction) for one in (config, configs[0]))
        if mine != others:
            raise UserError(
                f"{str(run.path)!r} holds out {mine[0]:g} and {mine[1]:g} of the text, {str(runs[0].path)!r} "
                f"{others[0]:g} and {others[1]:g}: compare runs that are judged on the same part"
            )


def _told_apart(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Runs of one name in different folders get the names of these folders before theirs."""
    names = [one.name for one in contestants]
    return [
        one if names.count(one.name) == 1 else replace(one, name="/".join(Path(one.outcomes[0].run).parts[-2:]))
        for one in contestants
    ]


def _notices(runs: Sequence[Run], policies: Sequence[str]) -> list[str]:
    endings = [(run, History.of(run).ending) for run in runs]
    notices = [f"the training of {str(run.path)!r} is {ending}" for run, ending in endings if ending != "finished"]
    if len(set(policies)) > 1:
        notices.append("some are judged with a carried state and some with one that is reset at documents")
    return notices
