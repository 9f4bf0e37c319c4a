"""Write what comes of a training into its run folder, and keep training where the disk fails.

A checkpoint or a model that cannot be written is tried again, then the training goes on and says so: what was saved
before stays whole. A line of the log that cannot be written is lost, the training is not. Only work that is still
unsaved when a training ends is a failure.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from elman.errors import ElmanError, MissingExtraError, ModelFileError, TrainingError
from elman.files import write_atomically
from elman.models.file import model_bytes
from elman.training.advice import rates_of
from elman.training.checkpoint import save_checkpoint
from elman.training.folder import Run
from elman.training.loop import Record, Trainer
from elman.training.report import write_report

_WAITS = (0.2, 1.0)
"""Seconds before each further attempt to write."""


class Keeper:
    """Carries a training through and keeps its records, samples, checkpoints and model.

    Args:
        run: the folder, held by this process.
        trainer: the training.
        tensorboard: also write event files.
    """

    def __init__(self, run: Run, trainer: Trainer, *, tensorboard: bool) -> None:
        self._run, self._trainer = run, trainer
        self._log = _Log(run.metrics)
        self._events = _TensorBoard(run.path / "tensorboard") if tensorboard else None
        self._unsaved: OSError | ModelFileError | TrainingError | None = None
        """Why the newest checkpoint could not be written."""
        self._num_kept = 0
        """Records of the training whose part of the folder is written."""
        self._unsaved_model: bytes | None = None
        """The best model, where it could not be written yet."""

    def follow(self) -> None:
        """Carry the training through.

        Raises:
            ElmanError: the last state or the model could not be written, whatever was tried.
        """
        try:
            for record in self._trainer.records():
                self._keep(record)
            self._finish()
        except BaseException:
            # Whatever went wrong, a loss that is not finite or a callback, the work until then is kept. A state whose
            # record is not goes with it: from the checkpoint before, both come again.
            if self._num_kept == self._trainer.num_told:
                with suppress(ElmanError, OSError):
                    self._save()
            raise
        finally:
            self._log.close()

    def _keep(self, record: Record) -> None:
        if record.kind == "returned":
            self._mind(self._take_back)
        self._mind(self._log.write, json.dumps(record.to_dict(), ensure_ascii=False))
        if self._events is not None:
            self._mind(self._events.write, record)
        if record.kind == "sample":
            self._mind(self._run.write_sample, record.values)
        if record.kind == "evaluation" and record.values["best"]:
            self._write_model()
        self._num_kept += 1
        if record.kind == "checkpoint":
            self._checkpoint()
        if record.kind in ("end", "stopped"):
            self._report()

    def _take_back(self) -> None:
        """Take out of the log what came after the state that the training has returned to."""
        self._log.close()
        try:
            self._run.take_back(
                self._trainer.update,
                self._trainer.has_observed,
                segments_read=self._trainer.segments_read,
                num_returns=self._trainer.guard.num_returns,
                best_update=self._trainer.best_update,
            )
        finally:
            self._log = _Log(self._run.metrics)
        self._trainer.recall(self._run.records())

    def _mind(self, write: Callable[..., None], *what: object) -> None:
        """Write something that a training can do without; say so where it cannot be written."""
        try:
            write(*what)
        except OSError as error:
            path = error.filename or self._run.path
            self._trainer.note(f"cannot write {str(path)!r} ({error.strerror or error}): the training goes on without")

    def _checkpoint(self) -> None:
        """Save a resumable state; where that fails, go on from the one before."""
        for wait in (*_WAITS, 0.0):
            try:
                self._save()
            except TrainingError as error:  # a number that is not finite: the batches to come will show it
                self._unsaved = error
                self._trainer.note(str(error))
                return
            except (OSError, ModelFileError) as error:  # not written, or not to be read back as it was written
                self._unsaved = failure = error
                time.sleep(wait)
            else:
                self._unsaved = None
                return
        what = self._no_room(failure)
        self._trainer.note(f"{what}; the training goes on, and the checkpoint before is whole")

    def _save(self) -> None:
        trainer = self._trainer
        if self._unsaved_model is not None:  # first: no checkpoint names a model the best that may still be lost
            write_atomically(self._run.model, self._unsaved_model)
            self._unsaved_model = None
        save_checkpoint(self._run.checkpoints, trainer.update, trainer.checkpoint(), trainer.config.checkpoint.keep)
        if trainer.best_update is None:
            write_atomically(self._run.model, model_bytes(trainer.bundle))

    def _write_model(self) -> None:
        """Write the best model so far; where that fails, keep its bytes until the next checkpoint."""
        self._unsaved_model = data = model_bytes(self._trainer.bundle)
        try:
            write_atomically(self._run.model, data)
            self._unsaved_model = None
        except OSError as error:
            self._trainer.note(f"{self._no_room(error, len(data))}; it is kept in memory and tried again")

    def _finish(self) -> None:
        """What a training leaves behind must be on the disk."""
        if self._unsaved is None and self._unsaved_model is None:
            return
        try:
            self._save()
        except TrainingError as error:
            rates = ", ".join(rates_of(self._trainer.config.training))
            raise TrainingError(
                f"{error}, and no other follows; the checkpoint before is whole: lower {rates}"
            ) from error
        except (OSError, ModelFileError) as error:
            raise ElmanError(
                f"{self._no_room(error)}: the checkpoint before is whole; make room and go on with "
                f"`elman resume {self._run.path}`"
            ) from error

    def _report(self) -> None:
        """Write the page of the run. Model and checkpoint are on the disk: a failure is no more than a notice."""
        try:
            write_report(self._run)
        except Exception as error:
            self._trainer.note(f"report.html is not written ({type(error).__name__}: {error}); the run is whole")

    def _no_room(self, error: OSError | ModelFileError, num_bytes: int | None = None) -> str:
        """What could not be written, and what it takes."""
        path, reason, number = self._run.checkpoints, str(error), None
        if isinstance(error, OSError):
            path, reason, number = Path(error.filename or path), error.strerror or reason, error.errno
        if num_bytes is None:
            num_bytes = sum(t.numel() * t.element_size() for t in self._trainer.checkpoint().tensors.values())
        text = f"cannot write {str(path)!r} ({reason}): it takes {num_bytes:,} bytes"
        if number in (errno.ENOSPC, errno.EDQUOT):
            text += f", {shutil.disk_usage(self._run.path).free:,} are free"
        return text


class _Log:
    """A file of lines. One that cannot be written is lost; none is ever left in half."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._size = 0
        self._has_failed = False

    def write(self, line: str) -> None:
        """Append a line. Raises OSError for the first that fails after one that did not."""
        data = (line + "\n").encode("utf-8", "surrogateescape")
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
                self._size = self._file.tell()
            if self._has_failed:
                self._file.truncate(self._size)
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            return
        self._size += len(data)
        self._has_failed = False

    def close(self) -> None:
        """Cut off half a line, and close the file."""
        if self._file is None:
            return
        with suppress(OSError):
            if self._has_failed:
                self._file.truncate(self._size)
        with suppress(OSError):
            self._file.close()


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
