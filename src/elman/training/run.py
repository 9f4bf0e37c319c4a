"""Train, resume, or try a run: settings and corpus to a trainer, its records to the run folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

import elman
from elman.cells import is_own_cell
from elman.config import BUDGETS
from elman.data.prepare import Dataset, prepare
from elman.errors import ConfigError
from elman.models.contract import CountedModel
from elman.settings import Config, resolve, resolve_run, with_corpus
from elman.training.checkpoint import has_checkpoint, newest_checkpoint
from elman.training.folder import Run, as_stored, new_run
from elman.training.keeper import Keeper
from elman.training.loop import Callback, Trainer

ResumePolicy: TypeAlias = Literal["never", "auto"]


def train(
    corpus: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    overwrite: bool = False,
    resume: ResumePolicy = "never",
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
    **settings: Any,
) -> Run:
    """Train a model and write its run folder.

    Args:
        corpus: files, a folder, a glob, ``-``, or the name of a corpus; none: that of the configuration.
        out: the run folder; none: ``runs/<corpus>-<kind>``, with a number if that exists.
        preset: a named set of settings.
        config: a TOML file of settings, such as the ``run.toml`` of another run.
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
    resolved = resolve(with_corpus(settings, corpus), preset=preset, file=config)
    if resume == "auto":
        if out is None or overwrite:
            raise ConfigError("--resume auto goes on with the run in --out: give --out, and leave --overwrite out")
        watch: dict[str, Any] = {"callbacks": callbacks, "should_stop": should_stop, "tensorboard": tensorboard}
        if (found := _go_on(Path(out), resolved, watch)) is not None:
            return found
        overwrite = (Path(out) / "run.toml").is_file()  # of a run that was killed before it could save anything at all
    run = new_run(None if out is None else Path(out), resolved, overwrite=overwrite)
    with run.held():
        try:
            dataset = prepare(resolved.data, resolved.text, resolved.tokenizer)
            trainer = _trainer(run, resolved, dataset, callbacks, should_stop)
        except BaseException:
            if not any(run.path.iterdir()):
                run.path.rmdir()
            raise
        run.begin(resolved, _environment(dataset, trainer))
        Keeper(run, trainer, tensorboard=tensorboard).follow()
    return run


def _go_on(path: Path, config: Config, watch: Mapping[str, Any]) -> Run | None:
    """Go on with the run in a folder; nothing where there is none, or none that has saved anything.

    Raises:
        ConfigError: the run there has other settings.
    """
    if not (path / "run.toml").is_file():
        return None
    run = Run(path)
    if not has_checkpoint(run.checkpoints):
        if run.model.exists() or any(run.checkpoints.glob("damaged-*")):
            raise ConfigError(
                f"the run {str(path)!r} holds a model but no checkpoint to go on from: give another --out, or "
                "--overwrite in place of --resume auto"
            )
        return None
    cell = config.model.kind if is_own_cell(config.model.kind) else None
    theirs, mine = resolve_run(path / "run.toml", cell=cell).to_dict(), as_stored(config).to_dict()
    for section, values in mine.items():
        pairs = values.items() if isinstance(values, dict) else [("", values)]
        for name, value in pairs:
            other = theirs[section].get(name) if name else theirs[section]
            if other != value and section != "preset" and name not in (*BUDGETS, "num_threads"):
                where = f"{section}.{name}" if name else section
                raise ConfigError(
                    f"the run {str(path)!r} has {where} {other!r}, {value!r} was given: give the settings it was "
                    "started with, or another --out"
                )
    # A budget that the run had and that is not given any more no longer holds: the word stands for it.
    budgets: dict[str, Any] = {name: getattr(config.training, name) or "none" for name in BUDGETS}
    return resume(path, cell=cell, **watch, **budgets)


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
    run = Run.open(path)
    changes: dict[str, Any] = {"training": {k: v for k, v in budgets.items() if v is not None}}
    if unknown := set(changes["training"]) - set(BUDGETS):
        raise ConfigError(f"resume cannot change {', '.join(sorted(unknown))}; accepted: {', '.join(BUDGETS)}")
    config = resolve_run(run.path / "run.toml", cell=cell, changes=changes)
    with run.held():
        checkpoint_path, checkpoint, passed_over = newest_checkpoint(run.checkpoints)
        dataset = prepare(config.data, config.text, config.tokenizer)
        trainer = _trainer(run, config, dataset, callbacks, should_stop)
        trainer.restore(checkpoint)
        run.write_settings(config, _environment(dataset, trainer))
        run.take_back(trainer.update, trainer.has_observed)
        trainer.notices = [*passed_over, f"going on from {checkpoint_path.name}"]
        if trainer.progress >= 1.0 and isinstance(trainer.network, CountedModel):
            trainer.notices.append("its text is counted: there is nothing left to do")
        elif trainer.progress >= 1.0:
            trainer.notices.append("its budget is used up; to train longer, give more: --training.max-updates N")
        Keeper(run, trainer, tensorboard=tensorboard).follow()
    return run


def _trainer(
    run: Run, config: Config, dataset: Dataset, callbacks: Sequence[Callback], should_stop: Callable[[], bool]
) -> Trainer:
    return Trainer(
        config,
        dataset,
        callbacks=callbacks,
        should_stop=should_stop,
        last_saved=lambda: newest_checkpoint(run.checkpoints)[1],
    )


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

    Takes the arguments of :func:`train` that choose settings: ``preset``, ``config`` and the sections.
    """
    preset, file = options.pop("preset", None), options.pop("config", None)
    resolved = resolve(with_corpus(options, corpus), preset=preset, file=file)
    dataset = prepare(resolved.data, resolved.text, resolved.tokenizer)
    once = resolved.training.model_copy(update=dict.fromkeys(BUDGETS) | {"max_updates": 1})
    short = resolved.sampling.model_copy(update={"prompts": ("",), "temperatures": (0.8,), "max_new_tokens": 100})
    trainer = Trainer(resolved.model_copy(update={"training": once, "sampling": short}), dataset)
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
        "corpus": dataset.corpus_name,
        "corpus_sha256": dataset.sha256,
        "parameters": trainer.network.num_parameters,
    }
