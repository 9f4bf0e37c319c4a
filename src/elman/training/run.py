"""A run is a folder: its settings, its log, its samples, its checkpoints, and the model.

run.toml           every setting, resolved
environment.json   versions, machine, corpus and its SHA-256
metrics.jsonl      a record per update, evaluation and message
samples/           a text file per update at which samples were drawn
checkpoints/       resumable states
tensorboard/       on request
model.safetensors  the model: the best on the validation part, or the last where there is none
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch

import elman
from elman.config import BUDGETS
from elman.data.prepare import Dataset, prepare
from elman.errors import ConfigError, MissingExtraError, ModelFileError
from elman.models.file import MODEL_FILE, save_model, write_atomically
from elman.settings import Config, resolve, resolve_run, with_corpus
from elman.training.checkpoint import newest_checkpoint, save_checkpoint
from elman.training.loop import Callback, Record, Trainer


@dataclass(frozen=True)
class Run:
    """A run folder that exists."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The run in a folder. Raises ModelFileError if there is none."""
        path = Path(path)
        if not (path / "run.toml").is_file():
            raise ModelFileError(f"{str(path)!r} is not a run folder: it has no run.toml")
        return cls(path)

    def config(self, *, cell: str | None = None) -> Config:
        """The settings of the run; one that was trained with a person's own cell is refused without it."""
        return resolve_run(self.path / "run.toml", cell=cell)

    @property
    def checkpoints(self) -> Path:
        """The folder of resumable states."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The log, a JSON object a line."""
        return self.path / "metrics.jsonl"

    def records(self) -> Iterator[dict[str, Any]]:
        """What the log holds, from the start; a last line that was cut by a crash is left out."""
        with self.metrics.open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)


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
    path = Path(out) if out is not None else _free_path(resolved)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not overwrite:
            raise ConfigError(f"{str(path)!r} exists: give another --out, --overwrite, or `elman resume {path}`")
        if not (path / "run.toml").is_file():
            raise ConfigError(f"{str(path)!r} is not a run folder, so it is not overwritten: give another --out")
    dataset = prepare(resolved.data, resolved.text, resolved.tokenizer)
    trainer = Trainer(resolved, dataset, callbacks=callbacks, should_stop=should_stop)
    if path.exists():
        shutil.rmtree(path)
    run = Run(path)
    (path / "samples").mkdir(parents=True)
    write_atomically(path / "run.toml", resolved.to_toml().encode())
    environment = json.dumps(_environment(dataset, trainer), indent=2)
    write_atomically(path / "environment.json", environment.encode())
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
    checkpoint_path, checkpoint, passed_over = newest_checkpoint(run.checkpoints)
    dataset = prepare(config.data, config.text, config.tokenizer)
    trainer = Trainer(config, dataset, callbacks=callbacks, should_stop=should_stop)
    trainer.restore(checkpoint)
    if changes["training"]:
        write_atomically(run.path / "run.toml", config.to_toml().encode())
    _cut_log(run, trainer)
    trainer.notices = [*passed_over, f"going on from {checkpoint_path.name}"]
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


def _free_path(config: Config) -> Path:
    """``runs/<corpus>-<kind>``, numbered from 2 where it exists."""
    stem = Path(config.data.corpus[0]).name.split(".")[0].replace(":", "-").strip("-*") or "stdin"
    kind = config.model.kind.rpartition(":")[2].lower()
    base = Path("runs") / f"{stem}-{kind}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


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
    with run.metrics.open("a", encoding="utf-8") as log:
        for record in trainer.records():
            log.write(json.dumps(record.to_dict(), ensure_ascii=False) + "\n")
            log.flush()
            if events is not None:
                events.write(record)
            if record.kind == "sample":
                _write_sample(run.path / "samples", record.values)
            if record.kind == "checkpoint":
                save_checkpoint(run.checkpoints, trainer.update, trainer.checkpoint(), trainer.config.checkpoint.keep)
            is_best = record.kind == "evaluation" and record.values["best"]
            if is_best or (record.kind == "checkpoint" and trainer.best_update is None):
                save_model(run.path / MODEL_FILE, trainer.bundle)


def _write_sample(folder: Path, sample: Mapping[str, Any]) -> None:
    """Append one sample to the file of its update, with what the model was worth then."""
    bits, nats = sample["valid_bits_per_char"], sample["valid_nats_per_token"]
    worth = (
        f"{bits:.3f} bits per character held out" if bits else f"{nats:.3f} nats per token" if nats else "no estimate"
    )
    heading = f"== update {sample['update']}, {worth}, temperature {sample['temperature']:g}"
    if sample["prompt"]:
        heading += f", prompt {sample['prompt']!r}"
    with (folder / f"update-{sample['update']:08d}.txt").open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{heading}\n{sample['prompt']}{sample['text']}\n\n")


def _cut_log(run: Run, trainer: Trainer) -> None:
    """Take out of log and samples what came after the checkpoint: it will come again."""

    def stays(record: Mapping[str, Any]) -> bool:
        update = record.get("update", 0)
        if record["kind"] in ("evaluation", "sample") and update == trainer.update:
            return trainer.has_observed(record["kind"])
        return update <= trainer.update and record["kind"] not in ("stopped", "end")

    kept = [record for record in run.records() if stays(record)]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    write_atomically(run.metrics, text.encode())
    sampled = {f"update-{record['update']:08d}.txt" for record in kept if record["kind"] == "sample"}
    for path in (run.path / "samples").glob("update-*.txt"):
        if path.name not in sampled:
            path.unlink()


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
