"""Train, resume, or try a run: settings and corpus to a trainer, its records to the run folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch

import elman
from elman.cells import own_kind
from elman.config import BUDGETS, EXECUTION
from elman.data.prepare import Dataset, prepare
from elman.errors import ConfigError, ElmanError
from elman.models.contract import CountedModel
from elman.settings import Config, resolve, resolve_run, with_corpus
from elman.training.checkpoint import has_checkpoint
from elman.training.distillation import Teacher, copied_models, load_teacher, read_teacher, taught_by
from elman.training.distributed import Ranks, join, newest_for_all
from elman.training.folder import Run, as_stored, new_run
from elman.training.history import in_words
from elman.training.keeper import Keeper
from elman.training.loop import Callback, Trainer, budgets_of
from elman.training.transfer import Origin, prepare_for, take_over

T = TypeVar("T")
ResumePolicy: TypeAlias = Literal["never", "auto"]


def train(
    corpus: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    from_model: str | Path | None = None,
    teachers: str | Path | Sequence[str | Path] = (),
    teacher_weight: float | None = None,
    teacher_temperature: float | None = None,
    overwrite: bool = False,
    resume: ResumePolicy = "never",
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
    **settings: Any,
) -> Run:
    """Train a model and write its run folder; in every process that ``torchrun`` has started, together.

    Args:
        corpus: files, a folder, a glob, ``-``, or the name of a corpus; none: that of the configuration.
        out: the run folder; none: ``runs/<corpus>-<kind>``, with a number if that exists.
        preset: a named set of settings.
        config: a TOML file of settings, such as the ``run.toml`` of another run.
        from_model: a run folder or model file to start from, whose settings the model has; what was taken over is in
            :attr:`elman.training.folder.Run.origin` (see :mod:`elman.training.transfer`).
        teachers: run folders or model files whose distribution, the mean of several, is learned as well (see
            :mod:`elman.training.distillation`); none: those of the run that ``config`` lies in.
        teacher_weight: the share of the loss that is theirs; none: 0.5.
        teacher_temperature: that distributions are flattened by; none: 1.
        overwrite: replace a run folder that is there.
        resume: ``auto`` goes on with the run in ``out`` where there is one; budgets may differ.
        callbacks: each sees every record.
        should_stop: once true, the run is saved and left, ready to be resumed.
        tensorboard: also write event files (extra ``track``).
        settings: sections and top-level settings, such as ``training={"max_seconds": 60}, seed=1``.

    Returns:
        The run.

    Raises:
        ConfigError: a setting is not accepted, or the run folder exists.
        TextError: the corpus cannot be read.
        TrainingError: loss or gradient are no longer finite.
    """
    resolved = resolve(with_corpus(settings, corpus, from_model), preset=preset, file=config)
    if resume == "auto" and (out is None or overwrite):
        raise ConfigError("--resume auto goes on with the run in --out: give --out, and leave --overwrite out")
    named, said = _names(teachers), ""
    if resume == "auto" and out is not None:
        named, said = _still_there(named, Run(Path(out)))
    teacher = _teacher(resolved, config, named, teacher_weight, teacher_temperature)
    watch: dict[str, Any] = {"callbacks": callbacks, "should_stop": should_stop, "tensorboard": tensorboard}
    with join() as ranks:
        if resume == "auto" and out is not None:
            # The first process alone looks: it will soon write there.
            if ranks.spread(lambda: b"on" if _goes_on(Path(out), resolved, teacher) else b""):
                changes = {"training": _may_change(resolved)}
                return _resume(ranks, Path(out), own_kind(resolved.model.kind), changes, said=said, **watch)
            overwrite = (Path(out) / "run.toml").is_file()  # of a run that was killed before it could save anything
        path = None if out is None else Path(out)
        made = ranks.spread(lambda: os.fsencode(new_run(path, resolved, overwrite=overwrite).path))
        return _train(ranks, Run(Path(os.fsdecode(made))), resolved, teacher, **watch)


def _train(
    ranks: Ranks,
    run: Run,
    config: Config,
    teacher: Teacher | None,
    *,
    callbacks: Sequence[Callback],
    should_stop: Callable[[], bool],
    tensorboard: bool,
) -> Run:
    """Train from the start, into a folder that is there."""
    with _held(ranks, run):
        try:
            dataset, bundle = _prepared(ranks, config, lambda: prepare_for(config))
            if bundle is not None and config.training.shard:
                raise ConfigError("--from takes whole weights, and training.shard divides them: leave one of them out")
            trainer = _trainer(ranks, run, config, dataset, teacher, callbacks, should_stop)
            origin = None if bundle is None else take_over(config, bundle, trainer.network, dataset)
        except BaseException:
            if ranks.rank == 0 and not any(run.path.iterdir()):
                run.path.rmdir()
            raise
        if origin is not None:
            _remember(trainer, origin)
            trainer.notices.append(origin.transfer.summary(config.from_model))
        if ranks.rank == 0:
            with _disk_errors(run):
                run.begin(config, _environment(dataset, trainer), origin, teacher)
        _follow(run, trainer, tensorboard)
    return run


def _goes_on(path: Path, config: Config, teacher: Teacher | None) -> bool:
    """Whether there is a run in a folder that has saved something to go on from.

    Raises:
        ConfigError: the run there has other settings, or another teacher.
    """
    if not (path / "run.toml").is_file():
        return False
    run = Run(path)
    if not has_checkpoint(run.checkpoints):
        if run.model.exists() or any(run.checkpoints.glob("damaged-*")):
            raise ConfigError(
                f"the run {str(path)!r} holds a model but no checkpoint to go on from: give another --out, or "
                "--overwrite in place of --resume auto"
            )
        return False
    theirs = resolve_run(path / "run.toml", cell=own_kind(config.model.kind)).to_dict()
    mine = as_stored(config).to_dict()
    for section, values in mine.items():
        pairs = values.items() if isinstance(values, dict) else [("", values)]
        for name, value in pairs:
            other = theirs[section].get(name) if name else theirs[section]
            if other != value and section != "preset" and name not in (*BUDGETS, *EXECUTION):
                where = f"{section}.{name}" if name else section
                raise ConfigError(
                    f"the run {str(path)!r} has {where} {other!r}, {value!r} was given: give the settings it was "
                    "started with, or another --out"
                )
    if taught_by(run.teacher) != (None if teacher is None else teacher.to_dict()):
        raise ConfigError(
            f"the run {str(path)!r} learns from another teacher, or with another weight or temperature, or from none: "
            "give what it was started with, or another --out"
        )
    return True


def _may_change(config: Config) -> dict[str, Any]:
    """The settings of ``training`` that a run may go on with in place of its own."""
    # A budget that the run had and that is not given any more no longer holds: the word stands for it.
    given = {name: getattr(config.training, name) for name in (*BUDGETS, *EXECUTION)}
    return {name: "none" if value is None else value for name, value in given.items()}


def resume(
    path: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    cell: str | None = None,
    tensorboard: bool = False,
    **budgets: float,
) -> Run:
    """Go on with a run from its newest valid checkpoint, as if it had never stopped.

    Args:
        path: the run folder.
        callbacks: each sees every record.
        should_stop: once true, the run is saved and left again.
        cell: a person's own cell, where the run was trained with one.
        tensorboard: also write event files.
        budgets: another ``max_updates``, ``max_epochs``, ``max_tokens`` or ``max_seconds`` in all, to train longer.

    Raises:
        ModelFileError: no run, no valid checkpoint, or another corpus than before.
    """
    changes = {name: value for name, value in budgets.items() if value is not None}
    if unknown := set(changes) - set(BUDGETS):
        raise ConfigError(f"resume cannot change {', '.join(sorted(unknown))}; accepted: {', '.join(BUDGETS)}")
    watch: dict[str, Any] = {"callbacks": callbacks, "should_stop": should_stop, "tensorboard": tensorboard}
    with join() as ranks:
        return _resume(ranks, path, cell, {"training": changes}, **watch)


def _resume(
    ranks: Ranks,
    path: str | Path,
    cell: str | None,
    changes: Mapping[str, Any],
    *,
    callbacks: Sequence[Callback],
    should_stop: Callable[[], bool],
    tensorboard: bool,
    said: str = "",
) -> Run:
    """Go on with a run; what is said is said again in its log."""
    run = Run.open(path)
    config = resolve_run(run.path / "run.toml", cell=cell, changes=changes)
    before = budgets_of(run.config(cell=cell).training)
    origin = run.origin
    with _held(ranks, run):
        if ranks.rank == 0:
            with _disk_errors(run):
                run.clear_half_written()
        checkpoint_path, checkpoint, passed_over = newest_for_all(ranks, run.checkpoints)
        tokenizer = config.tokenizer if origin is None else origin.tokenizer
        dataset = _prepared(ranks, config, lambda: prepare(config.data, config.text, tokenizer))
        teacher = read_teacher(run.teacher, cell=cell)
        trainer = _trainer(ranks, run, config, dataset, teacher, callbacks, should_stop)
        trainer.restore(checkpoint)
        if origin is not None:
            _remember(trainer, origin)
        if ranks.rank == 0:
            with _disk_errors(run):
                run.write_settings(config, _environment(dataset, trainer))
                run.take_back(
                    trainer.update,
                    trainer.has_observed,
                    segments_read=trainer.segments_read,
                    num_returns=trainer.guard.num_returns,
                    best_update=trainer.best_update,
                )
            trainer.recall(run.records())
        trainer.notices = passed_over
        if said:
            trainer.of_this_start.append({"text": said})
        trainer.of_this_start.append({"text": f"going on from {checkpoint_path.name}"})
        if trainer.guard.num_returns:
            times = f"{trainer.guard.num_returns} return{'s' * (trainer.guard.num_returns != 1)} to a saved state"
            trainer.of_this_start.append(
                {"text": f"after {times} the rate stays at {trainer.guard.rate:g} of the one that is set"}
            )
        if trainer.update and before != budgets_of(config.training):
            trainer.of_this_start.append(_with_another_budget(trainer, before))
        if trainer.progress >= 1.0 and isinstance(trainer.network, CountedModel):
            trainer.of_this_start.append({"text": "its text is counted: there is nothing left to do"})
        elif trainer.progress >= 1.0:
            flags = " ".join(f"--training.{name.replace('_', '-')} N" for name in trainer.budgets)
            text = f"its budget is used up ({in_words(trainer.budgets)}); to train longer, give more: {flags}"
            trainer.of_this_start.append({"text": text})
        _follow(run, trainer, tensorboard)
    return run


def _with_another_budget(trainer: Trainer, before: Mapping[str, float]) -> dict[str, Any]:
    """A notice that the report of the run reads, too."""
    now = trainer.budgets
    text = (
        f"going on with another budget from update {trainer.update:,} on: {in_words(now)}, before it was "
        f"{in_words(before) or 'the default'}; a schedule that follows the budget is not "
        f"that of one training with {in_words(now)}"
    )
    return {"text": text, "budgets_before": dict(before), "budgets": now, "at_update": trainer.update}


def _held(ranks: Ranks, run: Run) -> AbstractContextManager[None]:
    """Keep others from writing the folder; the first of several processes does it for all."""
    return run.held() if ranks.rank == 0 else nullcontext()


def _prepared(ranks: Ranks, config: Config, prepare_it: Callable[[], T]) -> T:
    """The text of a run. Raises ConfigError where several processes cannot each read it."""
    if ranks.size > 1 and "-" in config.data.corpus:
        raise ConfigError("standard input ('-') can be read once, and there are several processes: give a file")
    return ranks.in_turn(prepare_it)


def _follow(run: Run, trainer: Trainer, tensorboard: bool) -> None:
    """Carry the training through; the first of several processes keeps what comes of it."""
    ranks = trainer.ranks
    sha256 = trainer.dataset.sha256
    if ranks.spread(sha256.encode) != sha256.encode():
        raise ConfigError(f"process {ranks.rank} reads another corpus than the first: give all machines the same files")
    if ranks.rank == 0:
        Keeper(run, trainer, tensorboard=tensorboard).follow()
    else:
        for _ in trainer.records():
            pass


def _trainer(
    ranks: Ranks,
    run: Run,
    config: Config,
    dataset: Dataset,
    teacher: Teacher | None,
    callbacks: Sequence[Callback],
    should_stop: Callable[[], bool],
) -> Trainer:
    return Trainer(
        config,
        dataset,
        callbacks=callbacks,
        should_stop=should_stop,
        last_saved=lambda: newest_for_all(ranks, run.checkpoints)[1],
        ranks=ranks,
        teacher=teacher,
    )


def _names(names: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [names] if isinstance(names, str | Path) else list(names)


def _still_there(names: Sequence[str | Path], run: Run) -> tuple[list[str | Path], str]:
    """The models of a teacher, the run's own copy in place of each that is gone, and a line that says so."""
    gone = [name != "" and not Path(name).exists() for name in names]
    copies = copied_models(run.teacher) if any(gone) and has_checkpoint(run.checkpoints) else []
    if not copies or len(copies) != len(names):  # another teacher, or no run to go on with
        return list(names), ""
    taken = [copy if is_gone else name for name, copy, is_gone in zip(names, copies, gone, strict=True)]
    missing = ", ".join(repr(str(name)) for name, is_gone in zip(names, gone, strict=True) if is_gone)
    return taken, f"no model at {missing} any more: the run's own copy in {str(run.teacher)!r} teaches"


def _teacher(
    config: Config,
    file: str | Path | None,
    models: Sequence[str | Path],
    weight: float | None,
    temperature: float | None,
) -> Teacher | None:
    """The teacher that is asked for, or that of the run whose settings a file holds.

    Raises:
        ConfigError: there is none to whom a weight or a temperature could belong.
    """
    cell = own_kind(config.model.kind)
    if models:
        return load_teacher(models, weight=weight, temperature=temperature, cell=cell)
    if weight is not None or temperature is not None:
        raise ConfigError("a teacher's weight and temperature have no meaning without one: give --teacher as well")
    return None if file is None else read_teacher(Path(file).parent / "teacher", cell=cell)


def _remember(trainer: Trainer, origin: Origin) -> None:
    """What the model file says of where the weights come from."""
    names = ("sha256", "corpus", "updates", "num_matched", "num_new", "num_dropped")
    trainer.origin = {name: getattr(origin.transfer, name) for name in names}


@contextmanager
def _disk_errors(run: Run) -> Iterator[None]:
    """Say in one line what of a run folder cannot be written; nothing has been trained yet."""
    try:
        yield
    except OSError as error:
        raise ElmanError(
            f"cannot write {str(error.filename or run.path)!r} ({error.strerror or error}): make room and try again"
        ) from error


@dataclass(frozen=True)
class Plan:
    """What a run would be, found by one update, one evaluation and one sample."""

    config: Config
    parameters: int
    train_tokens: int
    valid_tokens: int
    vocabulary: int
    updates_per_epoch: int
    nats_after_one_update: float
    valid_nats_per_token: float | None
    sample: str
    seconds_per_update: float
    parameter_bytes: int
    state_bytes: int
    num_streams: int
    peak_memory_bytes: int
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it by name, ready for JSON."""
        return vars(self) | {"config": self.config.to_dict(), "notices": list(self.notices)}


def dry_run(corpus: str | Path | Sequence[str | Path] | None = None, **options: Any) -> Plan:
    """Do everything once and write nothing: one update, one evaluation, one sample.

    Takes the arguments of :func:`train` that choose settings: ``preset``, ``config``, ``from_model``, ``teachers`` with
    weight and temperature, and the sections.
    """
    preset, file, from_model = (options.pop(name, None) for name in ("preset", "config", "from_model"))
    taught = [options.pop(name, None) for name in ("teachers", "teacher_weight", "teacher_temperature")]
    resolved = resolve(with_corpus(options, corpus, from_model), preset=preset, file=file)
    teacher = _teacher(resolved, file, _names(() if taught[0] is None else taught[0]), taught[1], taught[2])
    dataset, bundle = prepare_for(resolved)
    once = resolved.training.model_copy(update=dict.fromkeys(BUDGETS) | {"max_updates": 1})
    short = resolved.sampling.model_copy(update={"prompts": ("",), "temperatures": (0.8,), "max_new_tokens": 100})
    trainer = Trainer(resolved.model_copy(update={"training": once, "sampling": short}), dataset, teacher=teacher)
    if bundle is not None:
        trainer.notices.append(
            take_over(resolved, bundle, trainer.network, dataset).transfer.summary(resolved.from_model)
        )
    records = list(trainer.records())
    (update,) = (record for record in records if record.kind == "update")
    sample = next(record for record in records if record.kind == "sample")
    return Plan(
        config=resolved,
        parameters=trainer.network.num_parameters,
        train_tokens=trainer.streams.num_targets,
        valid_tokens=0 if dataset.valid is None else len(dataset.valid.tokens) - 1,
        vocabulary=dataset.tokenizer.size,
        updates_per_epoch=trainer.streams.num_segments,
        nats_after_one_update=update.values["nats"],
        valid_nats_per_token=(trainer.last_evaluation or {}).get("nats_per_token"),
        sample=sample.values["text"],
        seconds_per_update=update.measured["seconds"],
        parameter_bytes=sum(t.numel() * t.element_size() for t in trainer.network.tensors().values()),
        state_bytes=trainer.state.num_bytes,
        num_streams=trainer.streams.batch_size,
        peak_memory_bytes=peak_memory_bytes(),
        notices=tuple(trainer.notices),
    )


def peak_memory_bytes() -> int:
    """The most memory that this process has held at once."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def _environment(dataset: Dataset, trainer: Trainer) -> dict[str, Any]:
    libraries = ("torch", "numpy", "pydantic", "tokenizers", "safetensors")
    parts = {"train": dataset.train, "valid": dataset.valid, "test": dataset.test}
    return {
        "elman": elman.__version__,
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in libraries},
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": trainer.config.training.num_threads or torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(trainer.device),
        "processes": trainer.ranks.size,
        "corpus": dataset.corpus_name,
        "corpus_sha256": dataset.sha256,
        "tokens": {name: len(part.tokens) - 1 for name, part in parts.items() if part is not None},
        "vocabulary": dataset.tokenizer.size,
        "parameters": trainer.network.num_parameters,
    }
