"""``elman config``."""

from __future__ import annotations

from cyclopts import App

from elman.cli.flags import AllFlags, ConfigFile, Corpus, Json, Preset, resolved

app = App(name="config", help="Show settings, resolved or as a schema.")


@app.command
def schema() -> None:
    """The JSON schema of all settings, for editors and checkers."""
    from elman.cli.output import print_json
    from elman.settings import json_schema

    print_json(json_schema())


@app.command
def show(
    *corpus: Corpus, preset: Preset = None, config: ConfigFile = None, json: Json = False, flags: AllFlags | None = None
) -> None:
    """Every setting, resolved, as TOML: what `elman train` with the same words would use."""
    from elman.cli.output import print_json

    found = resolved(flags, preset, config, corpus)
    if json:
        print_json(found.to_dict())
    else:
        print(found.to_toml(), end="")
