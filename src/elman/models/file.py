"""The model file: one safetensors file that is enough to sample, evaluate, serve or export anywhere.

Its metadata holds one key, ``elman``, with canonical JSON: format, settings, tokenizer, provenance. There is no time
stamp, so the same training gives the same bytes. A file from anywhere may be opened: nothing in it is executed, its
shapes are held against its settings before any memory is taken, and every number must be finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensors_to_bytes

from elman.cells import named_by_person
from elman.config import CountedConfig
from elman.errors import ConfigError, ModelFileError
from elman.files import write_atomically
from elman.models.contract import CountedModel, LanguageModel
from elman.models.kinds import build_model, model_class, model_config
from elman.text.building import tokenizer_from_dict
from elman.text.tokenizers import Tokenizer

FORMAT = 1
MODEL_FILE = "model.safetensors"
_KEY = "elman"
_DTYPES = {"F32": torch.float32, "F64": torch.float64}
_OF_TABLES = {"F64", "I32"}


@dataclass(frozen=True)
class Bundle:
    """A trained network with all that gives its numbers a meaning."""

    network: LanguageModel
    tokenizer: Tokenizer
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: corpus and its SHA-256, seed, updates, tokens seen, version of Elman."""


def save_model(path: str | Path, bundle: Bundle) -> None:
    """Write a model file: beside it first, flushed, then renamed, so that no reader meets half a file."""
    write_atomically(Path(path), model_bytes(bundle))


def model_bytes(bundle: Bundle) -> bytes:
    """A model file: the same bytes for the same model, whenever and wherever it is written."""
    meta = {
        "format": FORMAT,
        "model": bundle.network.config.model_dump(mode="json"),
        "tokenizer": bundle.tokenizer.to_dict(),
        "provenance": dict(bundle.provenance),
    }
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    tensors = {name: t.detach().cpu().contiguous() for name, t in bundle.network.tensors().items()}
    return tensors_to_bytes(tensors, metadata={_KEY: text})


def model_path(where: str | Path) -> Path:
    """The model file that a path means: itself, or the one inside a run folder.

    Raises:
        ModelFileError: there is none, or the system refuses to look.
    """
    path = Path(where)
    try:
        if path.is_dir():
            inside = path / MODEL_FILE
            if not inside.is_file():
                raise ModelFileError(
                    f"run folder {str(path)!r} holds no {MODEL_FILE} yet: train longer, or give another"
                )
            return inside
        if not path.is_file():
            raise ModelFileError(f"no run folder or model file {str(path)!r}")
    except OSError as error:  # the name is too long, or a folder on the way closed
        raise ModelFileError(f"cannot open {str(path)[:200]!r}: {error.strerror}") from None
    return path


def load_model(where: str | Path, *, device: torch.device | str = "cpu", cell: str | None = None) -> Bundle:
    """Read a model file, or the one in a run folder.

    Args:
        where: ``model.safetensors``, a run folder, or an n-gram model in an ``.arpa`` file.
        device: where the network goes.
        cell: a person's own cell, ``./file.py:Class`` or ``package.module:Class``. A file that was trained with one
            is refused without it, because a file must never choose the code that is run.

    Raises:
        ModelFileError: missing, damaged, from a newer format, or inconsistent.
    """
    path = model_path(where)
    if path.suffix == ".arpa":
        from elman.models.arpa import read_arpa

        return read_arpa(path, device=device)
    try:
        with safe_open(path, framework="pt") as file:
            meta = _read_meta(path, file.metadata())
            shapes = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            network = _empty_network(path, meta, shapes, cell)
            if isinstance(network, CountedModel):
                _fill_tables(path, network, {name: file.get_tensor(name) for name in shapes})
            for name, parameter in network.named_parameters():
                tensor = file.get_tensor(name)
                if not tensor.isfinite().all():
                    raise ModelFileError(f"{str(path)!r} is damaged: {name} holds a number that is not finite")
                # Copied: memory that comes from a file has another alignment, which changes the order of sums.
                parameter.data.copy_(tensor)
    except (SafetensorError, OSError) as error:
        if _looks_like_arpa(path):
            raise ModelFileError(f"{str(path)!r} holds an n-gram model in ARPA: give it a name in .arpa") from None
        raise ModelFileError(f"{str(path)!r} is not a readable safetensors file: {error}") from error
    return Bundle(network.to(device), tokenizer_from_dict(meta["tokenizer"]), meta["provenance"])


def _looks_like_arpa(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return b"\\data\\" in file.read(1024)
    return False


def _fill_tables(path: Path, network: CountedModel, tables: Mapping[str, torch.Tensor]) -> None:
    try:
        network.load_tables(tables)
    except ModelFileError as error:
        raise ModelFileError(f"{str(path)!r} is damaged: {error}") from None


def _read_meta(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(_KEY)
    if text is None:
        raise ModelFileError(f"{str(path)!r} is not a model of Elman: its metadata has no key {_KEY!r}")
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{str(path)!r} is damaged: its metadata is not JSON ({error})") from error
    wrong = not isinstance(meta, dict) or any(
        not isinstance(meta.get(key), dict) for key in ("model", "tokenizer", "provenance")
    )
    if wrong or not isinstance(meta.get("format"), int):
        raise ModelFileError(f"{str(path)!r} is damaged: its metadata lacks format, model, tokenizer or provenance")
    if meta["format"] > FORMAT:
        raise ModelFileError(f"{str(path)!r} has format {meta['format']}; this Elman reads up to {FORMAT}: upgrade it")
    return meta


def _empty_network(path: Path, meta: Mapping[str, Any], shapes: Mapping[str, Any], cell: str | None) -> LanguageModel:
    """A network of the shapes that both the settings and the tensors of the file agree on."""
    settings = dict(meta["model"])
    settings["kind"] = named_by_person(str(settings.get("kind")), cell, str(path))
    tokenizer = tokenizer_from_dict(meta["tokenizer"])
    dtypes = {entry.get_dtype() for entry in shapes.values()}
    try:
        config = model_config(settings)
    except (ValidationError, ConfigError) as error:
        first = str(error).splitlines()[0]
        raise ModelFileError(f"{str(path)!r} is damaged: its model settings are not accepted ({first})") from error
    if isinstance(config, CountedConfig) and dtypes == _OF_TABLES:
        # What its tables hold, only the file knows; they are looked at when they are there.
        return build_model(config, tokenizer.size, seed=None, dtype=torch.float64, boundary_id=tokenizer.boundary_id)
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        raise ModelFileError(f"{str(path)!r} holds tensors of {sorted(dtypes)}; accepted: one of {sorted(_DTYPES)}")
    held = sum(math.prod(entry.get_shape()) for entry in shapes.values())
    predicted = model_class(config).predicted_num_parameters(config, tokenizer.size)
    if held != predicted:
        raise ModelFileError(f"{str(path)!r} is damaged: it holds {held} numbers, its settings call for {predicted}")
    dtype = _DTYPES[dtypes.pop()]
    network = build_model(config, tokenizer.size, seed=None, dtype=dtype, boundary_id=tokenizer.boundary_id)
    expected = {name: list(parameter.shape) for name, parameter in network.named_parameters()}
    found = {name: list(entry.get_shape()) for name, entry in shapes.items()}
    if found != expected:
        differing = sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))
        raise ModelFileError(f"{str(path)!r} is damaged: names or shapes differ from its settings at {differing[:3]}")
    return network
