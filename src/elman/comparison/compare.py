"""Train models on equal terms, judge each once on what was held out, and say which differ.

    comparison = compare(["lstm", "gru"], "my.txt", out="runs/gates", max_tokens=1_000_000, seeds=(1, 2, 3))
    print(comparison.verdicts[0])

The folder holds a run for every model and seed, named by a digest of its settings. What is there is used again, what is
missing is trained, so that a comparison may be stopped, gone on with and widened. One that is narrower than what the
folder holds says how much it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elman.cells import is_own_cell
from elman.comparison.entries import Entry, Equal, Plan, Terms, check_names, merged, plan_entry
from elman.comparison.result import FIGURES, Comparison, Contestant, Outcome, ranked
from elman.comparison.trials import Trial, Watch, carry_out, check_folder
from elman.config import CountedConfig
from elman.errors import TrainingError, UserError
from elman.inspection.architecture import describe
from elman.models.file import load_model
from elman.settings import Config, with_corpus
from elman.training.folder import JUDGED_FILE, Run
from elman.training.history import History
from elman.training.report import judged_in

_OBSERVED: Mapping[str, Mapping[str, Any]] = {
    "evaluation": {"every_updates": 50, "max_tokens": 20_000},
    "sampling": {"every_updates": 100, "max_new_tokens": 200},
}
"""How trainings are looked at unless it is given, whatever a preset says: often enough to show the way, and cheaply."""


def compare(
    entries: Sequence[str | Entry],
    corpus: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    max_tokens: float | None = None,
    max_operations: float | None = None,
    max_seconds: float | None = None,
    num_parameters: int | None = None,
    seeds: Sequence[int] = (1, 2, 3),
    rates: Sequence[float] = (),
    rate_updates: int = 300,
    preset: str | None = None,
    config: str | Path | None = None,
    watch: Watch | None = None,
    **settings: Any,
) -> Comparison:
    """Train models on equal terms and hold them against each other.

    Args:
        entries: the models: kinds, or ``NAME: SECTION.FIELD=VALUE ...``.
        corpus: as :func:`elman.train` takes it.
        out: the folder of all runs and results; what it holds already is used again.
        max_tokens: the budget of each training in tokens; or
        max_operations: in floating-point operations, forward and backward; or
        max_seconds: in seconds of training. One of the three.
        num_parameters: give every model the width that comes nearest to so many; none: the sizes of the settings.
        seeds: a training of each model for each of them; a model that is counted needs one.
        rates: factors for the learning rates, of which each model gets the one that is best on the validation part;
            none: the rates stay as they are.
        rate_updates: of each training of that sweep.
        preset: a named set of settings, for all.
        config: a TOML file of settings, for all.
        watch: follows the trainings, and may end them.
        settings: sections and top-level settings, for all; those of an entry win.

    Raises:
        UserError: the terms or settings are not accepted, or nothing of the corpus was held out.
        TrainingError: a model fails at every rate of the sweep.
    """
    watch = watch or Watch()
    terms = _terms(max_tokens, max_operations, max_seconds, num_parameters)
    chosen = [entry if isinstance(entry, Entry) else Entry.parse(entry) for entry in entries]
    check_names(chosen)
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"the seeds are {', '.join(map(str, seeds)) or 'none'}: give one and more, each once")
    if rates and (min(rates) <= 0 or rate_updates < 1):
        raise UserError(f"rates {list(rates)} for {rate_updates} updates: factors and updates start above 0")
    common = with_corpus(settings, corpus)
    plans = [
        _observed(plan_entry(entry, common, terms, preset=preset, file=config), merged(common, entry.settings))
        for entry in chosen
    ]
    split = _split_to_judge(plans, with_rates=bool(rates))
    check_folder(Path(out))
    work = _Work(Path(out) / "runs", tuple(seeds), watch)
    sweep = _Sweep()
    if rates:
        sweep = work.sweep(plans, sorted(rates), rate_updates)
        plans = sweep.applied(plans)
    contestants, failures, is_complete = work.finals(plans) if sweep.is_complete else ([], [], False)
    contestants = [
        replace(one, rate=_best(sweep.nats[one.name]), sweep=sweep.nats[one.name]) if one.name in sweep.nats else one
        for one in contestants
    ]
    figure, in_order = ranked(contestants)
    # Before its sweep is done, nobody knows which trainings are those of this comparison.
    others = work.others(plans) if sweep.is_complete else []
    dataset, notices = plans[0].dataset, (*sweep.notices(), *failures, *others)
    return Comparison(
        corpus=dataset.corpus_name,
        corpus_sha256=dataset.sha256,
        split=split,
        terms=terms,
        figure=figure,
        contestants=in_order,
        notices=notices,
        baselines=baselines_of(Run(Path(outcome.run)) for one in in_order for outcome in one.outcomes),
        is_complete=is_complete,
    )


def _terms(
    max_tokens: float | None, max_operations: float | None, max_seconds: float | None, num_parameters: int | None
) -> Terms:
    amounts: dict[Equal, float | None] = {
        "tokens": max_tokens,
        "operations": max_operations,
        "seconds": max_seconds,
    }
    given: list[tuple[Equal, float]] = [(name, amount) for name, amount in amounts.items() if amount is not None]
    if len(given) != 1:
        raise UserError("a comparison has one budget, the same for all: give --tokens N, --operations X or --seconds S")
    ((budget, amount),) = given
    if not 0 < amount < math.inf:
        raise UserError(f"the budget is {amount:g} {budget}; accepted: a finite number above 0")
    if num_parameters is not None and num_parameters < 1:
        raise UserError(f"the size is {num_parameters} parameters; accepted: 1 and more")
    return Terms(budget, amount, num_parameters)


def _observed(plan: Plan, given: Mapping[str, Any]) -> Plan:
    """The plan with estimates and samples as a comparison wants them, where nobody asked for something else."""
    changes = {}
    for name, wanted in _OBSERVED.items():
        section = getattr(plan.config, name)
        free = {key: value for key, value in wanted.items() if key not in given.get(name, {})}
        changes[name] = section.model_copy(update=free)
    return replace(plan, config=plan.config.model_copy(update=changes))


def _split_to_judge(plans: Sequence[Plan], *, with_rates: bool) -> str:
    """The part that all are judged on, once it is known that they read the same text."""
    datasets = [plan.dataset for plan in plans]
    if len({dataset.sha256 for dataset in datasets}) > 1:
        raise UserError("the entries have different texts: a comparison is on one corpus, read in one way")
    has_test, has_valid = (all(parts) for parts in ([d.test for d in datasets], [d.valid for d in datasets]))
    if with_rates and not (has_test and has_valid):
        raise UserError(
            "rates are chosen on the validation part and models judged on the test part: set data.valid_fraction and "
            "data.test_fraction above 0"
        )
    if not has_test and not has_valid:
        raise UserError("nothing of this corpus is held out to judge on: set data.test_fraction above 0")
    return "test" if has_test else "valid"


@dataclass(frozen=True)
class _Sweep:
    """Nats on the validation part for each model and factor of its rates."""

    nats: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    is_complete: bool = True

    def applied(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans, each with its best rates. Raises TrainingError: one of them failed at every rate."""
        for name, nats in self.nats.items():
            if math.isinf(nats[_best(nats)]):
                raise TrainingError(f"{name} fails at every rate of the sweep: give lower --rates")
        return [plan.with_rate(_best(self.nats[plan.name])) if plan.name in self.nats else plan for plan in plans]

    def notices(self) -> list[str]:
        """Which models may have their best rate beyond the sweep, a line for each rate at its edge."""
        at: dict[float, list[str]] = {}
        for name, nats in self.nats.items():
            if len(nats) > 1 and _best(nats) in (min(nats), max(nats)):
                at.setdefault(_best(nats), []).append(name)
        return [
            f"{', '.join(names)}: best at {rate:g} times the given rates, at the edge of the sweep; maybe better beyond"
            for rate, names in at.items()
        ]


def _best(nats: Mapping[float, float]) -> float:
    return min(nats, key=nats.__getitem__)


@dataclass(frozen=True)
class _Work:
    """The trainings of a comparison, in one folder."""

    folder: Path
    seeds: tuple[int, ...]
    watch: Watch

    def sweep(self, plans: Sequence[Plan], rates: Sequence[float], updates: int) -> _Sweep:
        """Train each model with each rate for a while; what is counted has none."""
        trials: dict[tuple[str, float], Trial] = {}
        for plan in plans:
            if not plan.is_counted:
                short = _quiet(plan).with_training(max_tokens=None, max_seconds=None, max_updates=updates)
                trials |= {(plan.name, rate): self._trial(short.with_rate(rate), self.seeds[0]) for rate in rates}
        if not carry_out(list(trials.values()), self.watch):
            return _Sweep(is_complete=False)
        nats: dict[str, dict[float, float]] = {}
        for (name, rate), trial in trials.items():
            nats.setdefault(name, {})[rate] = trial.valid_nats()
        return _Sweep(nats)

    def finals(self, plans: Sequence[Plan]) -> tuple[list[Contestant], list[str], bool]:
        """Train each model with each seed: what came of it, what went wrong, and whether all of it is done."""
        trials = self._finals(plans)
        # What takes the model and not only its log is done while the trial is this process's.
        is_complete = carry_out(trials, self.watch, lambda trial: _finish(trial, trials[0]))
        contestants = []
        for plan in plans:
            done = [trial for trial in trials if trial.plan is plan and trial.is_judged]
            if outcomes := [outcome_of(trial.run, trial.seed, trial.judged()) for trial in done]:
                if done[0].seed == self.seeds[0]:
                    outcomes[0] = replace(outcomes[0], untrained=tuple(done[0].untrained()))
                contestants.append(contestant_of(plan.name, plan.config, outcomes, cell=done[0].own_cell))
        failures = [f"{trial.name}: {trial.failure}" for trial in trials if trial.failure is not None]
        return contestants, failures, is_complete

    def _finals(self, plans: Sequence[Plan]) -> list[Trial]:
        # Seed by seed, so that a comparison that is stopped has something of every model.
        return [
            self._trial(plan, seed)
            for seed in self.seeds
            for plan in plans
            if seed == self.seeds[0] or not plan.is_counted
        ]

    def others(self, plans: Sequence[Plan]) -> list[str]:
        """A line on what was trained and judged in the folder for other comparisons, if there is any.

        Trainings of a sweep are never judged.
        """
        mine = {trial.run.path.name for trial in self._finals(plans)}
        count = sum(path.parent.name not in mine for path in self.folder.glob(f"*/{JUDGED_FILE}"))
        trainings = (
            "1 finished training in this folder is" if count == 1 else f"{count} finished trainings in this folder are"
        )
        return [f"{trainings} not part of this comparison: of other models, seeds or settings"] if count else []

    def _trial(self, plan: Plan, seed: int) -> Trial:
        return Trial(plan, seed, self.folder)


def _quiet(plan: Plan) -> Plan:
    """The plan without samples, and with one estimate at its end."""
    changes = {
        "evaluation": plan.config.evaluation.model_copy(update={"every_updates": None}),
        "sampling": plan.config.sampling.model_copy(update={"temperatures": (), "every_updates": None}),
    }
    return replace(plan, config=plan.config.model_copy(update=changes))


def _finish(trial: Trial, first: Trial) -> None:
    """Judge a trial; one of all beside the baselines, and the first seed of each model with samples too."""
    trial.judged(with_baselines=trial is first, with_temperatures=trial.seed == first.seed)
    if trial.seed == first.seed:
        trial.untrained()


def outcome_of(run: Run, seed: int, judged: Mapping[str, Any]) -> Outcome:
    """A training that was judged, as part of a comparison."""
    history, judgement = History.of(run), judged["judgement"]
    return Outcome(
        seed=seed,
        run=str(run.path),
        figures={name: judgement[name] for name in FIGURES},
        tokens=history.tokens,
        updates=history.updates,
        seconds=history.seconds or 0.0,
    )


def baselines_of(runs: Iterable[Run]) -> dict[str, dict[str, float | None]]:
    """What simple means reach, from the first of some runs on one text that was judged beside them."""
    for run in runs:
        if found := judged_in(run).get("judgement", {}).get("baselines"):
            return {name: {figure: score[figure] for figure in FIGURES} for name, score in found.items()}
    return {}


def contestant_of(name: str, config: Config, outcomes: Sequence[Outcome], *, cell: str | None) -> Contestant:
    """A model with its trainings, of which there is one at least."""
    kind = config.model.kind
    architecture = describe(load_model(outcomes[0].run, cell=cell if is_own_cell(kind) else None))
    return Contestant(
        name=name,
        kind=kind,
        is_counted=isinstance(config.model, CountedConfig),
        settings={key: value for key, value in config.to_dict().items() if key != "seed"},
        parameters=architecture.parameters,
        operations=architecture.operations,
        state_bytes=architecture.state_bytes,
        outcomes=tuple(sorted(outcomes, key=lambda one: one.seed)),
    )
