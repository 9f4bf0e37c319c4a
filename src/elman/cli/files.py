"""Files that a command writes: what would lose something is refused, before anything is computed.

A file that is there already is replaced by one of its own kind alone, a page by a page: so no slip of the hand takes a
model, a text, or another file of a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from elman.errors import UserError


def check_output(path: Path, what: str, is_one: Callable[[Path], bool]) -> None:
    """See that a file can be written and that nothing else is lost by it.

    Args:
        path: the file.
        what: it will be, with its article.
        is_one: whether a file that is there is one already.

    Raises:
        UserError: it is no path of a file, its folder is missing or closed, or something else is there.
    """
    if str(path) == "-":
        raise UserError(f"{what} goes to a file, and '-' is none: name one, or /dev/stdout")
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder: name a file")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {str(path.parent)!r}: make it, or name another file")
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"the folder {str(path.parent)!r} cannot be written: name a file elsewhere")
    if path.is_file() and path.stat().st_size and not is_one(path):
        raise UserError(f"{str(path)!r} is there, and is not {what} that Elman wrote: name another file")


def check_state_file(path: Path) -> None:
    """The same for a place in a text, which ``--save-state`` saves."""
    check_output(path, "a state file", _is_reading)


def _is_reading(path: Path) -> bool:
    from elman.reading import is_reading

    return is_reading(path)


def _is_page(path: Path) -> bool:
    from elman.page import is_page

    return is_page(path)


def _check_page(path: Path) -> None:
    check_output(path, "a page", _is_page)
    if path.is_file() and (path.parent / "run.toml").exists():
        raise UserError(f"{str(path)!r} belongs to a run: name another file")


def _begins(beginning: bytes) -> Callable[[Path], bool]:
    def check(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(len(beginning)) == beginning

    return check


def _checked(check: Callable[[Path], None]) -> Callable[[Any, Any], None]:
    """The check of an option that may be left out, as the parser calls it."""

    def validate(kind: Any, path: Path | None) -> None:
        if path is not None:
            check(path)

    return validate


def _output(what: str, is_one: Callable[[Path], bool]) -> Callable[[Any, Any], None]:
    return _checked(lambda path: check_output(path, what, is_one))


Html = Annotated[
    Path | None,
    Parameter(
        metavar="FILE",
        help="Write a page to look at, one file that needs no network.",
        validator=_checked(_check_page),
    ),
]
TokensFile = Annotated[
    Path | None,
    Parameter(
        help="Write what each token cost to this file, an object of JSON a line.",
        validator=_output("a file of tokens", _begins(b'{"position": ')),
    ),
]
StateFile = Annotated[
    Path | None,
    Parameter(help="Save the place after the last token to this file.", validator=_checked(check_state_file)),
]
ArpaFile = Annotated[
    Path, Parameter(help="The file to write.", validator=_output("an ARPA file", _begins(b"# elman ")))
]
