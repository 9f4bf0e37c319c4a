"""Recurrent cells: one file, one cell; the file's name is the name that ``model.kind`` takes."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from elman.cells.base import Cell
from elman.errors import ConfigError, ModelFileError, nearest

_NOT_CELLS = ("base", "primitives")


def cell_names() -> tuple[str, ...]:
    """The names of the cells that Elman brings, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_CELLS))


def is_own_cell(kind: str) -> bool:
    """Whether the name points to a person's own code: ``./file.py:Class`` or ``package.module:Class``."""
    return ":" in kind


def own_kind(kind: str) -> str | None:
    """The kind where it is a person's own code, which may then be run for a model that names it; else none."""
    return kind if is_own_cell(kind) else None


def named_by_person(kind: str, cell: str | None, where: str) -> str:
    """The kind to use for a file that names ``kind``: a file must never choose the code that is run.

    Args:
        kind: what the file says.
        cell: the person's own cell, as given on the command line or in Python.
        where: the file, for the message.

    Raises:
        ModelFileError: the file names a person's cell that was not given, or the other way round.
    """
    if is_own_cell(kind):
        if cell is None or cell.rpartition(":")[2] != kind.rpartition(":")[2]:
            raise ModelFileError(f"{where!r} was trained with the cell {kind!r}: give it yourself, as in --cell {kind}")
        return cell
    if cell is not None:
        raise ModelFileError(f"{where!r} was trained with the built-in {kind!r}: leave --cell out")
    return kind


@cache
def find_cell(kind: str) -> type[Cell]:
    """The cell class of a name, or of a path that a person gave: ``./file.py:Class``, ``package.module:Class``.

    Raises:
        ConfigError: the name is unknown, or the path does not lead to a cell.
    """
    if is_own_cell(kind):
        return _own_cell(kind)
    if kind not in cell_names():
        raise ConfigError(f"unknown cell {kind!r}{nearest(kind, cell_names())}")
    module = importlib.import_module(f"{__name__}.{kind}")
    (cell,) = (c for c in vars(module).values() if _is_cell(c) and c.__module__ == module.__name__)
    return cell


def _is_cell(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Cell) and value is not Cell


def _own_cell(kind: str) -> type[Cell]:
    where, _, name = kind.rpartition(":")
    module = _module_from_file(Path(where)) if where.endswith(".py") else _module_from_name(where)
    cells = sorted(key for key, value in vars(module).items() if _is_cell(value))
    if name not in vars(module):
        raise ConfigError(f"{where} has no class {name!r}{nearest(name, cells)}")
    cell = vars(module)[name]
    if not _is_cell(cell):
        raise ConfigError(f"{kind} is not a cell: it must be a class derived from elman.cells.base.Cell")
    return cell


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"no file {str(path)!r} for the cell; give ./file.py:Class or package.module:Class")
    # A name of its own for every path, so that two files called my_cell.py do not meet in sys.modules.
    name = f"elman_own_cell_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{str(path)!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks a class's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{str(path)!r} failed to import: {type(error).__name__}: {error}") from error
    return module


def _module_from_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"module {name!r} of the cell failed to import: {type(error).__name__}: {error}") from error
