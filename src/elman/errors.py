"""Every error that a user can meet, each one line: what was given, what is accepted, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ElmanError(Exception):
    """Something failed that the user did not cause by a wrong setting. The command line exits with 1."""

    exit_code = 1


class UserError(ElmanError, ValueError):
    """The user gave something that cannot be accepted. The command line exits with 2."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is unknown, out of range, or has no meaning together with another."""


class TextError(UserError):
    """A text cannot be read, decoded or encoded as asked."""


class ModelFileError(UserError):
    """A model file, run folder or checkpoint is missing, damaged, or made for something else."""


class MissingExtraError(UserError):
    """An optional library is needed; the message holds the command that installs it."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library!r}, which is not installed: pip install 'elman[{extra}]'")


class TrainingError(ElmanError):
    """Training cannot go on, for a reason that lies in the numbers and not in a setting."""


class LostProcessError(ElmanError):
    """Another process of a training has ended or does not answer: nothing can be agreed or added up any more."""


def nearest(given: str, accepted: Iterable[str]) -> str:
    """Say what would have been accepted: ``"; did you mean 'lstm'? accepted: elman, gru, lstm"``."""
    names = sorted(accepted)
    matches = get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean {matches[0]!r}?" if matches else ";"
    return f"{hint} accepted: {', '.join(names)}"
