"""All sections together: the settings of a run, where they come from, and how they are written down.

Later sources win: the defaults, a preset, a TOML file, single settings. The result is one frozen :class:`Config`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import tomli_w
from pydantic import BeforeValidator, Field, NonNegativeInt, SerializeAsAny, ValidationError, model_validator

from elman.cells import is_own_cell, named_by_person
from elman.config import (
    CheckpointConfig,
    CountedConfig,
    DataConfig,
    EmbeddingConfig,
    EvaluationConfig,
    ModelConfig,
    SamplingConfig,
    Section,
    Seq2SeqConfig,
    StackConfig,
    TextConfig,
    TokenizerConfig,
    TrainingConfig,
)
from elman.errors import ConfigError, nearest
from elman.models.kinds import kind_names, kind_of, model_config, model_config_class, section_of, whose

_MEANINGLESS_FOR_PAIRS = (
    ("data", "field"),
    ("data", "reset_at_documents"),
    ("text", "document_separator"),
    ("training", "bptt"),
    ("training", "trim"),
    ("training", "random_bptt"),
    ("training", "reset_probability"),
    ("sampling", "temperatures"),
)

_Sections: TypeAlias = dict[str, dict[str, Any]]

_FREE_OF_MODEL = (("model", "dropout"),)
"""Settings that a run may have otherwise than the model it starts from: they shape no parameter."""

_MEANINGLESS_FOR_COUNTS = tuple(("training", name) for name in TrainingConfig.model_fields if name != "num_threads")


def _asks_for_something(section: Section, name: str) -> bool:
    """Whether a setting has another value than its default, and one that does something."""
    value = getattr(section, name)
    # 0 resets nothing; it was the default, so that files of older runs hold it.
    return value != type(section).model_fields[name].default and (name, value) != ("reset_probability", 0.0)


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
    from_model: str | None = None
    """A run folder or model file whose weights training starts from; none: weights drawn by the seed."""
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
            if _asks_for_something(values := getattr(self, section), name):
                raise ValueError(
                    f"{section}.{name} {getattr(values, name)!r} has no meaning with data.pairs: an example is two "
                    "texts of one row, read whole and from the initial state"
                )
        return self

    @model_validator(mode="after")
    def _precision_and_pieces_fit(self) -> Self:
        training = self.training
        if training.precision in ("bfloat16", "float16") and self.dtype == "float64":
            raise ValueError(f"training.precision {training.precision!r} is for dtype float32, and dtype is float64")
        if training.recompute_tokens >= training.bptt and not self.data.pairs:
            raise ValueError(
                f"training.recompute_tokens {training.recompute_tokens} cuts no segment of training.bptt "
                f"{training.bptt} tokens: give fewer"
            )
        return self

    @model_validator(mode="after")
    def _a_count_takes_no_training(self) -> Self:
        if not isinstance(self.model, CountedConfig):
            return self
        kind = self.model.kind
        if self.data.pairs:
            raise ValueError(f"model.kind {kind!r} counts whole texts: data.pairs has no meaning for it")
        names = [name for _, name in _MEANINGLESS_FOR_COUNTS]
        if changed := [name for name in names if _asks_for_something(self.training, name)]:
            given = " and ".join(f"training.{name}" for name in changed)
            raise ValueError(f"{given}: no meaning for model.kind {kind!r}, which is counted, not trained")
        return self

    @model_validator(mode="after")
    def _loss_fits_the_model(self) -> Self:
        model, training = self.model, self.training
        if not isinstance(model, EmbeddingConfig):
            return self
        if training.num_negatives and model.output != "linear":
            raise ValueError(
                f"training.num_negatives has no meaning for model.output {model.output!r}, only for linear"
            )
        if training.label_smoothing and model.output == "adaptive":
            raise ValueError(
                "training.label_smoothing has no meaning for model.output 'adaptive', which never computes it all"
            )
        is_locked = isinstance(model, StackConfig) and model.locked_dropout
        if training.temporal_penalty and model.dropout_before_output and not is_locked:
            raise ValueError(
                "training.temporal_penalty needs masks that stay the same in time before the output: set "
                "model.locked_dropout true, or the dropout there 0"
            )
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

    With ``from_model`` the settings of the model, and the level of its tokenizer, are those of the model named there.

    Args:
        settings: values by section, such as ``{"training": {"bptt": 64}, "seed": 1}``.
        preset: a name of :func:`preset_names`, in place of one named in the settings, and that of one in the file.
        file: a TOML file, such as the ``run.toml`` of a run.

    Raises:
        ConfigError: one line that names the setting, what was given and what is accepted.
    """
    given = settings or {}
    from_file = _read_toml(Path(file)) if file is not None else {}
    _refuse_unnamed_cell(from_file, given, file)
    _refuse_idle_preset(preset or given.get("preset"), from_file, file)
    fixed = _fixed(from_file, given)
    config = _put_together(given, preset, from_file, fixed)
    for where, sections in fixed.items():
        _refuse_contradictions(config, where, sections)
    return config


def _put_together(
    given: Mapping[str, Any],
    preset: str | None,
    from_file: Mapping[str, Any],
    fixed: Mapping[str, _Sections] | None = None,
) -> Config:
    """Merge and check settings; those that something fixes stand in for a preset's."""
    named = [name for name in (preset, given.get("preset"), from_file.get("preset")) if name not in (None, "none")]
    preset = named[0] if named else None
    merged: dict[str, Any] = {}
    of_preset = load_preset(preset) if preset else {}
    if _asks_for_pairs(from_file, given):
        of_preset = _without(of_preset, _MEANINGLESS_FOR_PAIRS)
    if _asks_for_counts(from_file, given):
        of_preset = _without(of_preset, _MEANINGLESS_FOR_COUNTS)
    fixed_sections = [section for sections in (fixed or {}).values() for section in sections.items()]
    if any(name == "model" for name, _ in fixed_sections):
        of_preset.pop("model", None)  # it may be of another kind
    for source in (of_preset, from_file, given):
        merged = _merge(merged, source)
    for name, values in fixed_sections:
        if not isinstance(merged.get(name, {}), Mapping):
            continue  # which is an error below
        below = {} if name == "model" else merged.get(name, {})
        merged[name] = _merge_section(name, below, {**values, **from_file.get(name, {}), **given.get(name, {})})
    if preset:
        merged["preset"] = preset
    try:
        return Config(**merged)
    except ValidationError as error:
        raise ConfigError(_one_line(error, merged)) from None


def _fixed(from_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, _Sections]:
    """What is fixed by prepared tokens, and by a model to start from: sections by what fixes them, the latter last."""
    fixed: dict[str, _Sections] = {}
    corpus = _said("data", "corpus", from_file, given)
    names = list(corpus) if isinstance(corpus, list | tuple) else [corpus]
    if len(names) == 1 and isinstance(names[0], str | Path) and Path(names[0]).is_dir():
        from elman.data.prepare import prepared_folder, prepared_settings

        if (folder := prepared_folder([str(names[0])])) is not None:
            fixed[str(folder)] = prepared_settings(folder)
    origins = [source["from_model"] for source in (given, from_file) if source.get("from_model") is not None]
    if origins and origins[0] != "none":
        fixed[str(origins[0])] = _settings_of_model(str(origins[0]), from_file, given, is_prepared=bool(fixed))
    return fixed


def _settings_of_model(
    origin: str, from_file: Mapping[str, Any], given: Mapping[str, Any], *, is_prepared: bool
) -> _Sections:
    """The sections that the model to start from decides. Raises UserError where it cannot be trained on."""
    from elman.models.file import load_model

    kind = _said("model", "kind", from_file, given)
    bundle = load_model(origin, cell=kind if isinstance(kind, str) and is_own_cell(kind) else None)
    theirs, level = bundle.network.config, bundle.tokenizer.level
    if isinstance(theirs, CountedConfig):
        raise ConfigError(
            f"{origin!r} is counted, not trained, so nothing can start from it: give a model with weights, or count "
            f"the new text with --model.kind {theirs.kind}"
        )
    if kind not in (None, theirs.kind):
        raise ConfigError(f"model.kind {kind!r} was given, {origin!r} has {theirs.kind!r}: leave it out")
    tokenizer = {"level": level}
    if level == "bpe" and not is_prepared and _said("tokenizer", "path", from_file, given) in (None, "none"):
        tokenizer |= TokenizerConfig(level="bpe").model_dump(mode="json")  # it is kept as it is
    return {"model": theirs.model_dump(mode="json"), "tokenizer": tokenizer}


def _said(section: str, name: str, *sources: Mapping[str, Any]) -> Any:
    """What the last of these settings that speaks of one says; none where none does."""
    sections = [source.get(section) for source in sources]
    said = [values[name] for values in sections if isinstance(values, Mapping) and name in values]
    return said[-1] if said else None


def _refuse_contradictions(config: Config, where: str, fixed: _Sections) -> None:
    """Raise ConfigError where something was given that has another value already."""
    for section, values in fixed.items():
        chosen = getattr(config, section).model_dump(mode="json")
        for name, value in values.items():
            if (section, name) not in _FREE_OF_MODEL and (mine := chosen.get(name)) != value:
                raise ConfigError(f"{section}.{name} {mine!r} was given, {where!r} has {value!r}: leave it out")


def with_corpus(
    settings: Mapping[str, Any],
    corpus: str | Path | Sequence[str | Path] | None,
    from_model: str | Path | None = None,
) -> dict[str, Any]:
    """The settings with a corpus put into their data section, and the model to start from, where they are given."""
    found = dict(settings)
    if corpus is not None:
        names = [corpus] if isinstance(corpus, str | Path) else list(corpus)
        found["data"] = {**settings.get("data", {}), "corpus": [str(name) for name in names]}
    if from_model is not None:
        found["from_model"] = str(from_model)
    return found


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


def _refuse_idle_preset(preset: str | None, from_file: Mapping[str, Any], file: str | Path | None) -> None:
    """A file of a finished run holds every setting, and nothing is left of a preset that is given beside it."""
    if file is None or preset is None or preset in ("none", from_file.get("preset")):
        return
    if _merge(load_preset(preset), from_file) == _merge({}, from_file):
        raise ConfigError(
            f"preset {preset!r} would change nothing: {str(file)!r} goes before it and has a value for each of its "
            "settings; leave one of the two out"
        )


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
    # The model that it started from is not looked at: it may have gone, and all its settings are here.
    return _put_together(_merge({**settings, "model": {**model, "kind": kind}}, changes or {}), None, {})


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
    return str(_said("data", "pairs", *sources)).lower() == "true"


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
    except IsADirectoryError:
        raise ConfigError(f"{str(path)!r} is a folder; accepted: a TOML file, such as the run.toml of a run") from None
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


def _not_there(path: Sequence[str], settings: Mapping[str, Any]) -> str:
    """What is said of a setting that its section does not have: which kinds of model have it, or what there is."""
    where, name = ".".join(path), path[-1]
    if path[0] == "model" and len(path) > 1:
        kind = kind_of(settings["model"])
        others = [other for other in kind_names() if other != kind and name in model_config_class(other).model_fields]
        if others:
            return f"{where} has no meaning for model.kind {kind!r}{whose(others)}: leave it out, or take another kind"
    section = _section_class(path[0], settings[path[0]]) if len(path) > 1 else Config
    return f"unknown setting {where}{nearest(name, (section or Config).model_fields)}"


def _one_line(error: ValidationError, settings: Mapping[str, Any]) -> str:
    """What is wrong with the settings, every fault in its clause: where, what was given, what is accepted."""
    faults = []
    for fault in error.errors():
        path = [str(part) for part in fault["loc"] if not str(part).startswith("function-")]
        where = ".".join(path)
        if fault["type"] == "extra_forbidden":
            faults.append(_not_there(path, settings))
        elif fault["type"] == "value_error":
            faults.append(f"{where + ': ' if where else ''}{fault['ctx']['error']}")
        else:
            faults.append(f"{where} is {fault['input']!r}: {fault['msg'][:1].lower()}{fault['msg'][1:]}")
    return "; ".join(faults)
