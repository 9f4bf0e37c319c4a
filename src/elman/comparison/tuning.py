"""Search for settings with Optuna: rates, sizes, regularisation; pruned, gone on with, ending in a run file.

    elman tune my.txt --out runs/search --trials 30 --training.max-updates 500

Each trial is a training of its own, judged by its best estimate on the validation part; the test part is never looked
at. Trials that fall behind the median of the others at the same estimate are given up. The study is a journal in the
folder, one line for each event, which several commands may write at once. It says what the search is about, and a
command about something else is refused: its trials could not be judged beside the others. What was best stands in
``best.toml``, which ``elman train --config`` takes.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from elman.config import BUDGETS, CountedConfig
from elman.data.prepare import prepare
from elman.errors import ConfigError, MissingExtraError, TrainingError, UserError
from elman.files import write_atomically
from elman.settings import Config, resolve, with_corpus
from elman.training import run as runs
from elman.training.folder import as_stored
from elman.training.history import History
from elman.training.loop import Callback, Record

if TYPE_CHECKING:
    import optuna

JOURNAL_FILE, BEST_FILE = "study.journal", "best.toml"

_STOPPED, _ABOUT = "stopped", "about"
_SEARCH_OF = "the search of "
_MAX_DIFFERENCES = 3
_NUM_UNPRUNED = 4
"""Trials that run to their end before any is given up, and by which the sampler begins to learn."""


@dataclass(frozen=True)
class Choice:
    """A setting that is searched, and what it may be."""

    setting: str
    """``section.field``."""
    low: float | None = None
    high: float | None = None
    is_whole: bool = False
    values: tuple[str, ...] = ()
    """In place of a range."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``training.learning_rate=0.001..0.1`` or ``model.num_layers=1,2,3``.

        A range between whole numbers has whole numbers. One that starts above 0 is searched on a logarithmic scale.

        Raises:
            UserError: it is neither.
        """
        setting, equals, accepted = text.partition("=")
        if not equals or "." not in setting:
            raise UserError(f"{text!r} is nothing to search; accepted: SETTING=LOW..HIGH or SETTING=A,B,C")
        if ".." not in accepted:
            return cls(setting, values=tuple(accepted.split(",")))
        low_text, _, high_text = accepted.partition("..")
        try:
            low, high = float(low_text), float(high_text)
        except ValueError:
            raise UserError(f"{accepted!r} is no range; accepted: LOW..HIGH, such as 0.001..0.1") from None
        if not 0 <= low < high < math.inf:
            raise UserError(f"{accepted!r} is no range: LOW must be 0 or more, and HIGH above it")
        return cls(setting, low, high, is_whole=low_text.isdigit() and high_text.isdigit())

    @property
    def ends(self) -> tuple[str, ...]:
        """What has to be accepted for a search to make sense: all values, or both ends of the range."""
        if self.low is None or self.high is None:
            return self.values
        return tuple(f"{end:.0f}" if self.is_whole else repr(end) for end in (self.low, self.high))

    def __str__(self) -> str:
        return f"{self.setting}={(',' if self.low is None else '..').join(self.ends)}"

    def suggest(self, trial: optuna.Trial) -> int | float | str:
        """What a trial takes."""
        if self.low is None or self.high is None:
            return str(trial.suggest_categorical(self.setting, list(self.values)))
        log = self.low > 0
        if self.is_whole:
            return trial.suggest_int(self.setting, int(self.low), int(self.high), log=log)
        return trial.suggest_float(self.setting, self.low, self.high, log=log)


@dataclass(frozen=True)
class Tuned:
    """What a search has found."""

    best: Path | None
    """The run file of the best trial; none where no trial has come to its end."""
    nats_per_token: float | None
    """Its estimate on the validation part."""
    found: Mapping[str, Any]
    """The settings that were searched, as the best trial has them."""
    num_finished: int
    num_pruned: int
    num_failed: int
    is_complete: bool
    """Whether as many trials were done as asked for."""

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return vars(self) | {"best": None if self.best is None else str(self.best), "found": dict(self.found)}


def default_choices(config: Config) -> list[Choice]:
    """What is searched where nothing is asked for: the rates, the width and the dropout of a kind that has them."""
    names = ["training.learning_rate=0.0003..0.03"]
    if config.training.optimizer == "muon":
        names.append("training.matrix_learning_rate=0.003..0.1")
    fields = type(config.model).model_fields
    if "hidden_size" in fields:
        names.append("model.hidden_size=64,128,192,256,384,512")
    if "dropout" in fields:
        names.append("model.dropout=0..0.5")
    return [Choice.parse(name) for name in names]


def tune(
    corpus: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path,
    search: Sequence[str] = (),
    num_trials: int = 30,
    preset: str | None = None,
    config: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Tuned:
    """Search for settings, or go on with a search.

    Args:
        corpus: as :func:`elman.train` takes it.
        out: the folder of the search; trials that are in it count, so it has to be the same search.
        search: what is searched, as :meth:`Choice.parse` reads it; none: :func:`default_choices`.
        num_trials: in all.
        preset: a named set of settings to start from.
        config: a TOML file of settings to start from.
        callbacks: see every record of every training.
        should_stop: once true, the search ends; the trial at hand counts as failed.
        tell: gets a line for each trial.
        settings: sections and top-level settings; a budget in updates, epochs, tokens or seconds is that of each trial.

    Raises:
        MissingExtraError: Optuna is not installed.
        UserError: settings are not accepted, there is no budget or no validation part, or the folder holds another
            search: of another text, other settings or a budget of its own, or of something else.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("optuna", "tune", "the search for settings") from None
    given = with_corpus(settings, corpus)
    base = resolve(given, preset=preset, file=config)
    _check(base, num_trials)
    choices = [Choice.parse(text) for text in search] or default_choices(base)
    folder = Path(out)
    objective = _Objective(optuna, folder, base.seed, given, preset, config, choices, callbacks, should_stop, tell)
    objective.check()
    about = _about(base, choices)
    study = _study(optuna, folder)
    _refuse_another_search(study, folder, about)
    if (there := len(_settled(study))) >= num_trials:
        tell(f"{there} trials are in {str(folder)!r} already, {num_trials} are asked for in all: give more to go on")
    with suppress(_Stopped):
        while not should_stop() and len(_settled(study)) < num_trials:
            study.optimize(objective, n_trials=1, catch=(TrainingError, ConfigError))
    return _result(study, folder, objective, num_trials)


def _check(base: Config, num_trials: int) -> None:
    if isinstance(base.model, CountedConfig):
        raise UserError(f"model.kind {base.model.kind!r} is counted, not trained: there is no rate to search")
    if not base.training.has_budget:
        raise UserError(f"give each trial a budget: one of {', '.join(f'training.{name}' for name in BUDGETS)}")
    if base.data.valid_fraction == 0.0:
        raise UserError("trials are judged on the validation part: set data.valid_fraction above 0")
    if num_trials < 1:
        raise UserError(f"{num_trials} trials were asked for; accepted: 1 and more")


def _about(base: Config, choices: Sequence[Choice]) -> dict[str, Any]:
    """What decides the result of a search, by name, as JSON keeps it: text, settings with the budget, what is searched.

    Raises:
        UserError: the text cannot be read, or one setting is searched twice.
    """
    searched = {choice.setting: str(choice).partition("=")[2] for choice in choices}
    if len(searched) < len(choices):
        twice = next(name for name in searched if sum(choice.setting == name for choice in choices) > 1)
        raise UserError(f"{twice} is searched twice: give it one range, or one list of values")
    settings = base.to_dict()
    del settings["preset"]
    del settings["data"]["corpus"]  # the text counts, not where it lies
    about = {f"{_SEARCH_OF}{name}": accepted for name, accepted in sorted(searched.items())}
    for section, value in settings.items():
        fields = (
            {f"{section}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {section: value}
        )
        about |= {name: one for name, one in fields.items() if name not in searched}
    dataset = prepare(base.data, base.text, base.tokenizer)
    found: dict[str, Any] = json.loads(json.dumps({"the text": [dataset.corpus_name, dataset.sha256], **about}))
    return found


def _refuse_another_search(study: optuna.Study, folder: Path, about: dict[str, Any]) -> None:
    """Write into a new study what it is about. Raises UserError: it is about something else."""
    if _ABOUT not in study.user_attrs and not study.trials:
        study.set_user_attr(_ABOUT, about)
    there = study.user_attrs.get(_ABOUT)
    if there is None:
        raise UserError(f"{str(folder)!r} holds a search that does not say what it is about: give another --out")

    def value(found: Mapping[str, Any], name: str) -> str:
        return "none" if found.get(name) is None else str(found[name])

    # A text may lie elsewhere by now, or bear another name.
    names = there.keys() | about.keys()
    told = {name.removeprefix(_SEARCH_OF) for name in names if name.startswith(_SEARCH_OF)} | {"the text"}
    differences = [f"{name} ({value(there, name)} there, {value(about, name)} here)" for name in sorted(names - told)
                   if there.get(name) != about.get(name)]  # fmt: skip
    if there["the text"][1] != about["the text"][1]:
        differences.insert(0, f"the text ({there['the text'][0]} there, {about['the text'][0]} here)")
    if differences:
        more = len(differences) - _MAX_DIFFERENCES
        shown = [*differences[:_MAX_DIFFERENCES], *([f"{more} more"] if more > 0 else [])]
        raise UserError(f"{str(folder)!r} holds another search; it differs in {', '.join(shown)}: give another --out")


def _study(module: Any, folder: Path) -> optuna.Study:
    """The study of a folder, made or found."""
    module.logging.set_verbosity(module.logging.WARNING)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        journal = module.storages.journal.JournalFileBackend(str(folder / JOURNAL_FILE))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", module.exceptions.ExperimentalWarning)
            storage = module.storages.JournalStorage(journal)
    except OSError as error:
        raise UserError(f"the folder {str(folder)!r} cannot be used ({error.strerror}): give another --out") from None
    study: optuna.Study = module.create_study(
        storage=storage,
        study_name="elman",
        load_if_exists=True,
        direction="minimize",
        pruner=module.pruners.MedianPruner(n_startup_trials=_NUM_UNPRUNED),
    )
    return study


class _Objective:
    """One trial: suggested settings, a training, its best estimate."""

    def __init__(
        self,
        module: Any,
        folder: Path,
        seed: int,
        given: Mapping[str, Any],
        preset: str | None,
        file: str | Path | None,
        choices: Sequence[Choice],
        callbacks: Sequence[Callback],
        should_stop: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        self._optuna, self._folder, self._seed, self._choices = module, folder, seed, choices
        self._given, self._preset, self._file = given, preset, file
        self._callbacks, self._should_stop, self._tell = callbacks, should_stop, tell

    def config(self, chosen: Mapping[str, Any]) -> Config:
        """All settings of a trial. Raises ConfigError: they do not go together."""
        settings = {name: dict(value) if isinstance(value, Mapping) else value for name, value in self._given.items()}
        for name, value in chosen.items():
            section, _, field = name.partition(".")
            settings.setdefault(section, {})[field] = value
        return resolve(settings, preset=self._preset, file=self._file)

    def check(self) -> None:
        """Raises ConfigError: a setting that is searched does not exist, or an end of its range is not accepted."""
        for choice in self._choices:
            for end in choice.ends:
                self.config({choice.setting: end})

    def __call__(self, trial: optuna.Trial) -> float:
        # By the trial's number, which no other has: what goes on, or begins at the same time, does not draw it again.
        seed = self._seed + trial.number
        trial.study.sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=_NUM_UNPRUNED)
        chosen = {choice.setting: choice.suggest(trial) for choice in self._choices}
        config = self.config(chosen)
        words = ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                          for name, value in chosen.items())  # fmt: skip
        self._tell(f"trial {trial.number}: {words}")
        reporter = _Reporter(trial)
        path = self._folder / f"trial-{trial.number:04d}"
        settings = config.to_dict()
        del settings["preset"]
        run = runs.train(
            out=path,
            overwrite=True,
            callbacks=[*self._callbacks, reporter],
            should_stop=lambda: self._should_stop() or reporter.should_prune,
            **settings,
        )
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # a trial is not gone on with
        best = History.of(run).best
        if reporter.should_prune:
            self._tell(f"trial {trial.number}: given up, {reporter.last:.4f} nats per token")
            raise self._optuna.TrialPruned
        if self._should_stop():
            trial.set_user_attr(_STOPPED, True)
            raise _Stopped
        if best is None:
            raise TrainingError("its estimate is not finite")
        nats = float(best["nats_per_token"])
        self._tell(f"trial {trial.number}: {nats:.4f} nats per token")
        return nats


class _Reporter(Callback):
    """Tells a trial of its estimates, and hears whether it is worth going on."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial, self._count = trial, 0
        self.should_prune, self.last = False, math.inf

    def on_record(self, record: Record) -> None:
        """Report each estimate; the first of every training are held against each other, then the second ones."""
        if record.kind == "evaluation":
            self.last = float(record.values["nats_per_token"])
            self._trial.report(self.last, self._count)
            self._count += 1
            self.should_prune = self._trial.should_prune()


class _Stopped(Exception):
    """Whoever follows the search wants it to end; the trial at hand does not count."""


def _settled(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Trials that count: all that have ended by themselves."""
    trials = study.get_trials(deepcopy=False)
    return [trial for trial in trials if trial.state.is_finished() and _STOPPED not in trial.user_attrs]


def _result(study: optuna.Study, folder: Path, objective: _Objective, num_trials: int) -> Tuned:
    settled = _settled(study)
    counts = Counter(trial.state.name for trial in settled)
    path, best = None, None
    if counts["COMPLETE"]:
        best, path = study.best_trial, folder / BEST_FILE
        write_atomically(path, as_stored(objective.config(best.params)).to_toml().encode())
    return Tuned(
        best=path,
        nats_per_token=None if best is None else best.value,
        found={} if best is None else best.params,
        num_finished=counts["COMPLETE"],
        num_pruned=counts["PRUNED"],
        num_failed=counts["FAIL"],
        is_complete=len(settled) >= num_trials,
    )
