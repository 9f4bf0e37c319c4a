"""``elman export``."""

from __future__ import annotations

from cyclopts import App

from elman.cli.files import ArpaFile

app = App(name="export", help="Write a model in the format of other tools.")


@app.command
def arpa(run: str, out: ArpaFile, /) -> None:
    """An n-gram model as an ARPA file, which tools for language models read, `elman eval` and `elman sample` too.

    Args:
        run: A run folder or a model.safetensors.
    """
    from elman.cli.output import size
    from elman.models.arpa import write_arpa
    from elman.models.file import load_model

    write_arpa(load_model(run), out)
    print(f"{out}: {size(out.stat().st_size)}")
