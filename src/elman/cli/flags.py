"""A flag for every setting, made from the sections themselves: names, help, defaults and choices stand in one place.

Values are handed on as they are typed; ``elman.settings.resolve`` checks them, as it checks a TOML file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from cyclopts import Group, Parameter
from cyclopts.validators import Number
from pydantic.fields import FieldInfo

from elman.config import BUDGETS, SamplingConfig, Section, TrainingConfig
from elman.models.kinds import kind_names, model_config_class, whose
from elman.settings import Config, preset_names, resolve, with_corpus

_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT"}


def given(flags: object) -> dict[str, Any]:
    """What was given on the command line, by section, as ``resolve`` takes it."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(flags) if dataclasses.is_dataclass(flags) else ():
        value = getattr(flags, field.name)
        if value is None:
            continue
        section, _, name = field.name.partition("__")
        if name:
            settings.setdefault(section, {})[name] = value
        elif isinstance(value, Mapping):  # settings of a person's own cell
            settings[section] = settings.get(section, {}) | value
        else:
            settings[section] = value
    return settings


def resolved(flags: object, preset: str | None, config: Path | None, corpus: Sequence[str] = ()) -> Config:
    """All settings, from what was given on the command line."""
    return resolve(with_corpus(given(flags), corpus or None), preset=preset, file=config)


def _flags_of(sections: Mapping[str, Mapping[str, tuple[FieldInfo, str]]], *, bare: bool = False) -> Any:
    """A dataclass with a field for every flag, all unset, for cyclopts to read; ``bare`` leaves the section out."""
    fields: list[tuple[str, Any, Any]] = []
    for order, (section, settings) in enumerate(sections.items()):
        group = Group(section or "general", help=_summary(section), sort_key=order)
        for name, (field, help_text) in settings.items():
            path = f"{section}.{name}" if section else name
            flag = name.replace("_", "-") if bare else path
            fields.append((path.replace(".", "__"), _flag(flag, field, help_text, group), None))
    if "model" in sections:
        own = Annotated[dict[str, str] | None, Parameter(name="--model", show=False)]
        fields.append(("model", own, None))
    flags = dataclasses.make_dataclass("Flags", fields, frozen=True, namespace={"__module__": __name__})
    return Annotated[flags, Parameter(name="*")]


def _flag(name: str, field: FieldInfo, help_text: str, group: Group) -> Any:
    kind = _plain(field.annotation)
    several = get_origin(kind) is tuple
    item = _plain(get_args(kind)[0]) if several else kind
    takes: Any = bool if kind is bool else list[str] if several else str
    return Annotated[
        takes | None,
        Parameter(
            name=f"--{name}",
            help=help_text + (" Repeat it for several." if several else ""),
            group=group,
            negative=(),
            metavar=_PLACEHOLDERS.get(item, "NAME"),
            choices=(*get_args(item), *_none(field.annotation)) if get_origin(item) is Literal else None,
            show_default=_shown(field.get_default(call_default_factory=False)),
            json_list=False,
        ),
    ]


def _plain(annotation: Any) -> Any:
    """The type inside ``Annotated`` and ``| None``."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _plain(next(arm for arm in get_args(annotation) if arm is not NoneType))
    return annotation


def _none(annotation: Any) -> tuple[str, ...]:
    """The word for none, where a setting takes it: it puts back what a preset has set."""
    return ("none",) if NoneType in get_args(annotation) else ()


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(map(_shown, default))
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default is None else str(default) or "''"


def _sections() -> dict[str, dict[str, tuple[FieldInfo, str]]]:
    """Every setting with its help text, by section; those at the top under an empty name."""
    sections: dict[str, dict[str, tuple[FieldInfo, str]]] = {"": {}}
    for name, field in Config.model_fields.items():
        section = _section(name)
        if name == "model":
            sections[name] = dict(_model_settings())
        elif section is not None:
            sections[name] = _settings(section, section.model_fields)
        elif name not in ("preset", "from_model"):  # options of their own
            sections[""][name] = (field, field.description or "")
    return sections


def _section(name: str) -> type[Section] | None:
    field = Config.model_fields.get(name)
    kind = _plain(field.annotation) if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _settings(section: type[Section], names: Iterable[str]) -> dict[str, tuple[FieldInfo, str]]:
    return {name: (section.model_fields[name], _help(section, name)) for name in names}


def _summary(section: str) -> str:
    return "" if (kind := _section(section)) is None else (kind.__doc__ or "")


def _help(section: type[Section], name: str) -> str:
    text = section.model_fields[name].description or ""
    if name in section.meaningful:
        other, accepted = section.meaningful[name]
        text += f" Only with {other} {' or '.join(accepted)}."
    return text


def _model_settings() -> Iterator[tuple[str, tuple[FieldInfo, str]]]:
    """The settings of all kinds together; each says which kinds have it, unless all do."""
    found: dict[str, dict[str, list[str]]] = {}
    fields: dict[str, FieldInfo] = {}
    for kind in kind_names():
        section = model_config_class(kind)
        for name, field in section.model_fields.items():
            fields.setdefault(name, field)
            found.setdefault(name, {}).setdefault(_help(section, name), []).append(kind)
    for name in sorted(found, key=lambda name: (name != "kind", -sum(map(len, found[name].values())))):
        texts = [text + whose(kinds) for text, kinds in found[name].items()]
        help_text = f"One of {', '.join(kind_names())}. " * (name == "kind") + " / ".join(texts)
        yield name, (fields[name], help_text)


OF_ONE_TEXT = tuple(
    name for name in SamplingConfig.model_fields if name not in ("every_updates", "prompts", "temperatures")
)
"""The settings of ``sampling`` that ``elman sample`` takes, without the section's name."""
OF_SEVERAL = tuple(
    name for name in OF_ONE_TEXT if get_origin(_plain(SamplingConfig.model_fields[name].annotation)) is tuple
)
"""Those of them that take several values."""

Seed = Annotated[int, Parameter(validator=Number(gte=0))]
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]
OwnCell = Annotated[
    str | None, Parameter(metavar="CELL", help="Your own cell, ./file.py:Class, where the model was trained with one.")
]
Corpus = Annotated[str, Parameter(help="As `elman train` takes it.")]
ConfigFile = Annotated[Path | None, Parameter(help="A TOML file of settings, such as the run.toml of a run.")]
Json = Annotated[Switch, Parameter(help="Print one JSON object on standard output.")]
Preset = Annotated[
    str | None,
    Parameter(
        choices=preset_names(),
        help="A named set of settings, in place of one that --config names; --config and single settings override it.",
    ),
]

if TYPE_CHECKING:
    AllFlags: TypeAlias = object
    BudgetFlags: TypeAlias = object
    SamplingFlags: TypeAlias = object
else:
    _FLAGS = {
        "AllFlags": cache(lambda: _flags_of(_sections())),
        "BudgetFlags": cache(lambda: _flags_of({"training": _settings(TrainingConfig, BUDGETS)})),
        "SamplingFlags": cache(lambda: _flags_of({"sampling": _settings(SamplingConfig, OF_ONE_TEXT)}, bare=True)),
    }

    def __getattr__(name: str) -> Any:
        """The flags of a command, made when it asks for them: those of every kind of model take a while."""
        if name not in _FLAGS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _FLAGS[name]()
