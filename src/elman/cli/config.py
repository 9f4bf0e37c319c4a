"""``elman config``."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from elman.cli.flags import AllFlags, Preset, Switch, given

app = App(name="config", help="Show settings, resolved or as a schema.")


@app.command
def schema() -> None:
    """The JSON schema of all settings, for editors and checkers."""
    from elman.cli.output import print_json
    from elman.settings import json_schema

    print_json(json_schema())


@app.command
def show(
    *corpus: str,
    preset: Preset = None,
    config: Path | None = None,
    json: Switch = False,
    flags: AllFlags | None = None,
) -> None:
    """Every setting, resolved, as TOML: what `elman train` with the same words would use.

    Args:
        corpus: As `elman train` takes it.
        config: A TOML file of settings.
        json: Print one JSON object instead.
    """
    from elman.cli.output import print_json
    from elman.settings import resolve, with_corpus

    resolved = resolve(with_corpus(given(flags), corpus or None), preset=preset, file=config)
    if json:
        print_json(resolved.to_dict())
    else:
        print(resolved.to_toml(), end="")
