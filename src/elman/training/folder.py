"""The run folder: what lies in it, who may write it, and what is taken back when a run goes on from a checkpoint.

run.toml           every setting, resolved
origin.json        what the run was started from, where that is another model, and its tokenizer
teacher/           the models that it learns from beside the text, where it does, and how
environment.json   versions, machine, corpus and its SHA-256
metrics.jsonl      a record per update, evaluation and message
samples/           a text file per update at which samples were drawn
checkpoints/       resumable states
tensorboard/       on request
report.html        the run at a glance
judged.json        what the model is worth on the test part, once somebody has asked
model.safetensors  the model: the best on the validation part, or the last where there is none
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elman.errors import ConfigError, ElmanError, ModelFileError
from elman.files import clear_writing, is_being_written, lock, write_atomically
from elman.models.file import MODEL_FILE
from elman.settings import Config, resolve_run
from elman.text.corpora import is_named
from elman.training.checkpoint import clear_half_written
from elman.training.distillation import Teacher
from elman.training.transfer import Origin

REPORT_FILE = "report.html"
JUDGED_FILE = "judged.json"

_PARTS = (
    "run.toml",
    "origin.json",
    "teacher",
    "environment.json",
    "metrics.jsonl",
    "samples",
    "checkpoints",
    "tensorboard",
    REPORT_FILE,
    JUDGED_FILE,
    MODEL_FILE,
)
_BEGINNINGS = {"samples", "origin.json", "teacher"}
"""What is written before ``run.toml``."""


@dataclass(frozen=True)
class Run:
    """A run folder that exists."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The run in a folder. Raises ModelFileError if there is none."""
        path = Path(path)
        if not path.exists():
            raise ModelFileError(f"no run folder {str(path)!r}")
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

    @property
    def model(self) -> Path:
        """The model file."""
        return self.path / MODEL_FILE

    def records(self) -> Iterator[dict[str, Any]]:
        """What the log holds, from the start; a line that is no record, cut by a crash or a full disk, is left out."""
        if not self.metrics.is_file():  # be it missing, or a device without an end
            return
        with self.metrics.open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict) and "kind" in record:
                    yield record

    @property
    def origin(self) -> Origin | None:
        """The model that it was started from; none where its weights were drawn. Raises ModelFileError if damaged."""
        path = self.path / "origin.json"
        if not path.is_file():
            return None
        try:
            return Origin.from_dict(json.loads(path.read_bytes()))
        except (ModelFileError, OSError, ValueError) as error:
            raise ModelFileError(f"{str(path)!r} is damaged: {error}") from None

    @property
    def teacher(self) -> Path:
        """The folder of the models that it learns from; it is there where it does."""
        return self.path / "teacher"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing this folder. Raises ElmanError where one does."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if lock(descriptor) is False:
                raise ElmanError(f"another process is writing the run {str(self.path)!r}: wait for it or stop it")
            yield
        finally:
            os.close(descriptor)

    def clear_half_written(self) -> None:
        """Take out what a process that was killed has left in the middle of writing."""
        clear_writing(self.path)
        clear_half_written(self.checkpoints)

    def begin(
        self,
        config: Config,
        environment: Mapping[str, Any],
        origin: Origin | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """Take out what an earlier run has left, and write down settings and environment."""
        for name in reversed(_PARTS):  # run.toml last: without it nobody may take what is left for a run
            old = self.path / name
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)
        clear_writing(self.path)
        (self.path / "samples").mkdir()
        if origin is not None:
            write_atomically(self.path / "origin.json", json.dumps(origin.to_dict()).encode())
        if teacher is not None:
            teacher.write(self.teacher)
        self.write_settings(config, environment)

    def write_settings(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Write ``run.toml`` and ``environment.json``."""
        write_atomically(self.path / "run.toml", as_stored(config).to_toml().encode())
        write_atomically(self.path / "environment.json", json.dumps(environment, indent=2).encode())

    def write_sample(self, sample: Mapping[str, Any]) -> None:
        """Append one sample to the file of its update, with what the model was worth then."""
        bits, nats = sample["valid_bits_per_char"], sample["valid_nats_per_token"]
        worth = "no estimate"
        if nats is not None:
            worth = f"{nats:.3f} nats per token" if bits is None else f"{bits:.3f} bits per character held out"
        heading = f"== update {sample['update']}, {worth}, temperature {sample['temperature']:g}"
        if sample["prompt"]:
            heading += f", prompt {sample['prompt']!r}"
        path = self.path / "samples" / f"update-{sample['update']:08d}.txt"
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{heading}\n{sample['prompt']}{sample['text']}\n\n")

    def take_back(
        self,
        update: int,
        has_observed: Callable[[Any], bool],
        *,
        segments_read: int,
        num_returns: int,
        best_update: int | None,
    ) -> None:
        """Take out of log and samples what came after a checkpoint: it will come again.

        Args:
            update: that of the checkpoint.
            has_observed: whether the ``evaluation``, or the ``sample``, of that very update belongs to it.
            segments_read: by then; a batch that was skipped later will be skipped again.
            num_returns: to a saved state, by then.
            best_update: that of the model that is kept, whose estimate stays.
        """

        def stays(record: Mapping[str, Any]) -> bool:
            if record["kind"] == "evaluation" and record["best"] and record["update"] == best_update:
                return True
            if record["kind"] in ("evaluation", "sample") and record["update"] == update:
                return has_observed(record["kind"])
            if record["kind"] in ("stopped", "end") or record.get("update", 0) > update:
                return False
            return record.get("segments_read", 0) <= segments_read and record.get("num_returns", 0) <= num_returns

        kept: list[Mapping[str, Any]] = []
        latest_stays = True
        for record in self.records():
            if record["kind"] != "notice":
                latest_stays = stays(record)
            if latest_stays or (record["kind"] == "notice" and "update" not in record):  # one about the whole training
                kept.append(record)
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        write_atomically(self.metrics, text.encode("utf-8", "surrogateescape"))
        (self.path / "samples").mkdir(exist_ok=True)
        sampled = {f"update-{record['update']:08d}.txt" for record in kept if record["kind"] == "sample"}
        for path in (self.path / "samples").glob("update-*.txt"):
            if path.name not in sampled:
                path.unlink()


def as_stored(config: Config) -> Config:
    """The settings with files as absolute paths, so that the run can be resumed anywhere."""
    data = config.data.model_copy(update={"corpus": tuple(map(_absolute, config.data.corpus))})
    tokenizer = config.tokenizer
    if tokenizer.path is not None:
        tokenizer = tokenizer.model_copy(update={"path": _absolute(tokenizer.path)})
    from_model = None if config.from_model is None else _absolute(config.from_model)
    return config.model_copy(update={"data": data, "tokenizer": tokenizer, "from_model": from_model})


def new_run(path: Path | None, config: Config, *, overwrite: bool) -> Run:
    """Make the folder of a new run, or take an empty one, or with ``overwrite`` one that holds a run.

    Args:
        path: where; none: ``runs/<corpus>-<kind>``, numbered from 2 where that exists.
        config: names a run without a path.
        overwrite: an older run may be replaced.

    Raises:
        ConfigError: something is there, or the folder cannot be made.
    """
    if path is None:
        return _numbered(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # A run that was killed while it made its folder may have left no more than this.
        is_empty = all(entry.name in _BEGINNINGS or is_being_written(entry) for entry in path.iterdir())
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"the run folder {str(path)!r} cannot be made ({reason}): give another --out") from None
    if not is_empty and not (path / "run.toml").is_file():
        raise ConfigError(f"{str(path)!r} holds something that is no run: give another --out")
    if not is_empty and not overwrite:
        raise ConfigError(f"{str(path)!r} exists: give another --out, --overwrite, or `elman resume {path}`")
    return Run(path)


def _numbered(config: Config) -> Run:
    stem = Path(config.data.corpus[0]).name.split(".")[0].replace(":", "-").strip("-*") or "stdin"
    kind = config.model.kind.rpartition(":")[2].lower()
    base = Path("runs") / f"{stem}-{kind}"
    path, number = base, 2
    while True:
        try:
            path.mkdir(parents=True)
            return Run(path)
        except FileExistsError:
            path, number = base.with_name(f"{base.name}-{number}"), number + 1
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"the run folder {str(path)!r} cannot be made ({reason}): give another --out") from None


def _absolute(spec: str) -> str:
    return spec if spec == "-" or is_named(spec) else str(Path(spec).expanduser().absolute())
