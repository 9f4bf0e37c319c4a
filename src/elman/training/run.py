"""Train, resume, or try a run: settings and corpus to a trainer, its records to the run folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import elman
from elman.config import BUDGETS
from elman.data.prepare import Dataset, prepare
from elman.errors import ConfigError, ElmanError, MissingExtraError
from elman.models.file import save_model
from elman.settings import Config, resolve, resolve_run, with_corpus
from elman.training.checkpoint import newest_checkpoint, save_checkpoint
from elman.training.folder import Run, new_run
from elman.training.loop import Callback, Record, Trainer


def train(
    corpus: str | Path | Sequence[str | Path] | None = None,
    *,
    out: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    overwrite: bool = False,
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
    run = new_run(None if out is None else Path(out), resolved, overwrite=overwrite)
    with run.held():
        try:
            dataset = prepare(resolved.data, resolved.text, resolved.tokenizer)
            trainer = Trainer(resolved, dataset, callbacks=callbacks, should_stop=should_stop)
        except BaseException:
            if not any(run.path.iterdir()):
                run.path.rmdir()
            raise
        run.begin(resolved, _environment(dataset, trainer))
        _follow(run, trainer, tensorboard)
    return run


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
        trainer = Trainer(config, dataset, callbacks=callbacks, should_stop=should_stop)
        trainer.restore(checkpoint)
        run.write_settings(config, _environment(dataset, trainer))
        run.take_back(trainer.update, trainer.has_observed)
        trainer.notices = [*passed_over, f"going on from {checkpoint_path.name}"]
        if trainer.progress >= 1.0:
            trainer.notices.append("its budget is used up; to train longer, give more: --training.max-updates N")
        _follow(run, trainer, tensorboard)
    return run


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
    (sample,) = (record for record in records if record.kind == "sample")
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
        parameter_bytes=sum(p.numel() * p.element_size() for p in trainer.network.parameters()),
        state_bytes=trainer.state.num_bytes,
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


def _follow(run: Run, trainer: Trainer, tensorboard: bool) -> None:
    """Carry a training through, and put what comes of it into the folder."""
    events = _TensorBoard(run.path / "tensorboard") if tensorboard else None
    with run.metrics.open("a", encoding="utf-8", errors="surrogateescape") as log:
        try:
            for record in trainer.records():
                log.write(json.dumps(record.to_dict(), ensure_ascii=False) + "\n")
                log.flush()
                if events is not None:
                    events.write(record)
                if record.kind == "sample":
                    run.write_sample(record.values)
                if record.kind == "checkpoint":
                    _save(run, trainer)
                if record.kind == "evaluation" and record.values["best"]:
                    save_model(run.model, trainer.bundle)
        except BaseException as error:
            # Whatever went wrong, a loss that is not finite or a callback, the work until then is kept.
            with suppress(ElmanError, OSError):
                _save(run, trainer)
            if isinstance(error, OSError):
                where = error.filename or run.path
                raise ElmanError(
                    f"cannot write {str(where)!r} ({error.strerror or error}): the checkpoint before is whole; make "
                    f"room and go on with `elman resume {run.path}`"
                ) from error
            raise


def _save(run: Run, trainer: Trainer) -> None:
    """Save a resumable state, and the model as well as long as no estimate has found a best one."""
    save_checkpoint(run.checkpoints, trainer.update, trainer.checkpoint(), trainer.config.checkpoint.keep)
    if trainer.best_update is None:
        save_model(run.model, trainer.bundle)


class _TensorBoard:
    """Writes the numbers of each record as event files."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "track", "writing TensorBoard events") from None
        self._writer = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Add the numbers of updates and evaluations, and the text of samples."""
        step = record.values.get("update", 0)
        if record.kind == "sample":
            self._writer.add_text(f"sample/temperature {record.values['temperature']:g}", record.values["text"], step)
        elif record.kind in ("update", "evaluation"):
            prefix = "train" if record.kind == "update" else "valid"
            for name, value in {**record.values, **record.measured}.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{prefix}/{name}", value, step)
        self._writer.flush()
