"""All sections together: the settings of a run, where they come from, and how they are written down.

Later sources win: the defaults, a preset, a TOML file, single settings. The result is one frozen :class:`Config`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BeforeValidator, Field, NonNegativeInt, SerializeAsAny, ValidationError, model_validator

from elman.cells import is_own_cell, named_by_person
from elman.config import (
    CheckpointConfig,
    CountedConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    SamplingConfig,
    Section,
    Seq2SeqConfig,
    TextConfig,
    TokenizerConfig,
    TrainingConfig,
)
from elman.errors import ConfigError, nearest
from elman.models.kinds import kind_names, model_config, model_config_class, section_of

_MEANINGLESS_FOR_PAIRS = (
    ("data", "field"),
    ("data", "reset_at_documents"),
    ("text", "document_separator"),
    ("training", "bptt"),
    ("training", "trim"),
    ("training", "reset_probability"),
    ("sampling", "temperatures"),
)

_MEANINGLESS_FOR_COUNTS = tuple(("training", name) for name in TrainingConfig.model_fields if name != "num_threads")


def _as_model_config(value: Any) -> Any:
    return model_config(value) if isinstance(value, Mapping) else value


class Config(Section):
    """All settings of a run."""

    seed: NonNegativeInt = 1111
    """Seeds initial weights, dropout and samples."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the model lives; `auto` takes CUDA where there is one, then MPS, else the CPU."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of parameters and arithmetic."""
    preset: str | None = None
    """The named set of settings that this configuration started from."""
    data: DataConfig = DataConfig()
    text: TextConfig = TextConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: Annotated[SerializeAsAny[ModelConfig], BeforeValidator(_as_model_config)] = Field(
        default_factory=lambda: model_config({})
    )
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _pairs_fit_the_rest(self) -> Self:
        if isinstance(self.model, Seq2SeqConfig) and not self.data.pairs:
            raise ValueError("model.kind 'seq2seq' learns targets from sources: set data.pairs true, or take another")
        for section, name in _MEANINGLESS_FOR_PAIRS if self.data.pairs else ():
            values = getattr(self, section)
            if (value := getattr(values, name)) != type(values).model_fields[name].default:
                raise ValueError(
                    f"{section}.{name} {value!r} has no meaning with data.pairs: an example is two texts of one row, "
                    "read whole and from the initial state"
                )
        return self

    @model_validator(mode="after")
    def _a_count_takes_no_training(self) -> Self:
        if not isinstance(self.model, CountedConfig):
            return self
        kind = self.model.kind
        if self.data.pairs:
            raise ValueError(f"model.kind {kind!r} counts whole texts: data.pairs has no meaning for it")
        defaults = TrainingConfig()
        names = [name for _, name in _MEANINGLESS_FOR_COUNTS]
        if changed := [name for name in names if getattr(self.training, name) != getattr(defaults, name)]:
            given = " and ".join(f"training.{name}" for name in changed)
            raise ValueError(f"{given}: no meaning for model.kind {kind!r}, which is counted, not trained")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Every setting, resolved, as plain values; ``none`` where one is not set."""
        return _with_none_by_name(self.model_dump(mode="json"))

    def to_toml(self) -> str:
        """The same as TOML."""
        return tomli_w.dumps(self.to_dict())


def resolve(
    settings: Mapping[str, Any] | None = None, *, preset: str | None = None, file: str | Path | None = None
) -> Config:
    """Put a configuration together: defaults, then a preset, then a TOML file, then single settings.

    Args:
        settings: values by section, such as ``{"training": {"bptt": 64}, "seed": 1}``.
        preset: a name of :func:`preset_names`; a preset named in the file or the settings counts as well.
        file: a TOML file, such as the ``run.toml`` of a run.

    Raises:
        ConfigError: one line that names the setting, what was given and what is accepted.
    """
    given = settings or {}
    from_file = _read_toml(Path(file)) if file is not None else {}
    _refuse_unnamed_cell(from_file, given, file)
    named = [name for name in (preset, given.get("preset"), from_file.get("preset")) if name not in (None, "none")]
    preset = named[0] if named else None
    merged: dict[str, Any] = {}
    of_preset = load_preset(preset) if preset else {}
    if _asks_for_pairs(from_file, given):
        of_preset = _without(of_preset, _MEANINGLESS_FOR_PAIRS)
    if _asks_for_counts(from_file, given):
        of_preset = _without(of_preset, _MEANINGLESS_FOR_COUNTS)
    for source in (of_preset, from_file, given):
        merged = _merge(merged, source)
    if preset:
        merged["preset"] = preset
    try:
        return Config(**merged)
    except ValidationError as error:
        raise ConfigError(_one_line(error, merged)) from None


def with_corpus(settings: Mapping[str, Any], corpus: str | Path | Sequence[str | Path] | None) -> dict[str, Any]:
    """The settings with a corpus put into their data section."""
    if corpus is None:
        return dict(settings)
    names = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    return {**settings, "data": {**settings.get("data", {}), "corpus": [str(name) for name in names]}}


def json_schema() -> dict[str, Any]:
    """The JSON schema of all settings; those of the model depend on its kind."""
    schema = Config.model_json_schema()
    kinds = []
    for kind in kind_names():
        of_kind = model_config_class(kind).model_json_schema()
        of_kind["title"] = kind
        of_kind["properties"]["kind"] |= {"const": kind}
        kinds.append(of_kind)
    own_cell = {"title": "a cell of your own", "properties": {"kind": {"pattern": ":"}}, "required": ["kind"]}
    schema["properties"]["model"] = {"anyOf": [*kinds, own_cell]}
    del schema["$defs"]["ModelConfig"]
    return schema


def _refuse_unnamed_cell(from_file: Mapping[str, Any], given: Mapping[str, Any], file: str | Path | None) -> None:
    """A file must never choose the code that is run: its cell counts where the person names one as well."""
    in_file, by_person = (source.get("model") for source in (from_file, given))
    kind = in_file.get("kind") if isinstance(in_file, Mapping) else None
    if isinstance(kind, str) and is_own_cell(kind) and not (isinstance(by_person, Mapping) and "kind" in by_person):
        raise ConfigError(f"{str(file)!r} names the cell {kind!r}: give it yourself, as in --model.kind {kind}")


def resolve_run(file: Path, *, cell: str | None = None, changes: Mapping[str, Any] | None = None) -> Config:
    """The settings in a run folder, which may come from anybody.

    Args:
        file: its ``run.toml``.
        cell: the person's own cell; a run that was trained with one is refused without it.
        changes: single settings to change.

    Raises:
        ConfigError: the file is not TOML or holds what is not accepted.
        ModelFileError: ``cell`` does not fit the run.
    """
    settings = _read_toml(file)
    model = settings.get("model")
    if not isinstance(model, Mapping):
        raise ConfigError(f"{str(file)!r} has no section [model]")
    kind = named_by_person(str(model.get("kind")), cell, str(file))
    return resolve(_merge({**settings, "model": {**model, "kind": kind}}, changes or {}))


def preset_names() -> tuple[str, ...]:
    """The presets that Elman brings, sorted."""
    folder = resources.files("elman") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_preset(name: str) -> dict[str, Any]:
    """The settings of a preset, by section. Raises ConfigError if there is none of that name."""
    if name not in preset_names():
        raise ConfigError(f"unknown preset {name!r}{nearest(name, preset_names())}")
    return tomllib.loads((resources.files("elman") / "presets" / f"{name}.toml").read_text("utf-8"))


def _asks_for_pairs(*sources: Mapping[str, Any]) -> bool:
    """Whether the last of these settings that speaks of it asks for pairs, as a value or as typed."""
    sections = [source.get("data") for source in sources]
    said = [section["pairs"] for section in sections if isinstance(section, Mapping) and "pairs" in section]
    return bool(said) and str(said[-1]).lower() == "true"


def _asks_for_counts(*sources: Mapping[str, Any]) -> bool:
    """Whether the last of these settings that names a kind names one that is counted."""
    sections = [source.get("model") for source in sources]
    named = [section for section in sections if isinstance(section, Mapping) and {"kind", "layers"} & section.keys()]
    return bool(named) and issubclass(section_of(named[-1]), CountedConfig)


def _without(settings: Mapping[str, Any], names: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The settings but for those named by section and name."""
    return {
        section: {key: one for key, one in value.items() if (section, key) not in names}
        if isinstance(value, Mapping)
        else value
        for section, value in settings.items()
    }


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as TOML: {error}") from None


def _with_none_by_name(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _with_none_by_name(value) if isinstance(value, dict) else "none" if value is None else value
        for name, value in values.items()
    }


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge setting by setting; what loses its meaning by a choice made above (another optimizer) goes with it."""
    merged = dict(below)
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(name, {}), Mapping):
            merged[name] = _merge_section(name, merged.get(name, {}), value)
        else:
            merged[name] = value
    return merged


def _merge_section(name: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    if name == "model":  # the kind, or the cell of each layer: choosing one takes the other back
        taken_back = "kind" if "kind" not in above and "layers" in above else "layers"
        if "layers" in above or above.get("kind", "stack") != "stack":
            below = {key: value for key, value in below.items() if key != taken_back}
    section = _section_class(name, {**below, **above})
    if section is None:
        return {**below, **above}
    kept = {key: value for key, value in below.items() if name != "model" or key in section.model_fields}
    for setting, (other, accepted) in section.meaningful.items():
        if other in above and above[other] not in accepted:
            kept.pop(setting, None)
    if "residual" in section.model_fields and section.model_fields["residual"].default:
        kept.pop("embedding_size", None)  # that of a preset for another kind: with residual paths it is hidden_size
    return kept | dict(above)


def _section_class(name: str, values: Mapping[str, Any]) -> type[Section] | None:
    """The class of a section; that of the model section depends on its kind."""
    if name == "model":
        return section_of(values)
    annotation = Config.model_fields[name].annotation if name in Config.model_fields else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _one_line(error: ValidationError, settings: Mapping[str, Any]) -> str:
    """What is wrong with the settings, every fault in its clause: where, what was given, what is accepted."""
    faults = []
    for fault in error.errors():
        path = [str(part) for part in fault["loc"] if not str(part).startswith("function-")]
        where = ".".join(path)
        if fault["type"] == "extra_forbidden":
            section = _section_class(path[0], settings[path[0]]) if len(path) > 1 else Config
            faults.append(f"unknown setting {where}{nearest(path[-1], (section or Config).model_fields)}")
        elif fault["type"] == "value_error":
            faults.append(f"{where + ': ' if where else ''}{fault['ctx']['error']}")
        else:
            faults.append(f"{where} is {fault['input']!r}: {fault['msg'][:1].lower()}{fault['msg'][1:]}")
    return "; ".join(faults)
