"""``elman inspect``."""

from __future__ import annotations

from cyclopts import App

from elman.cli.flags import OwnCell, Switch

app = App(name="inspect", help="Look into a model.")


@app.command(name="model")
def model(run: str, /, *, json: Switch = False, cell: OwnCell = None) -> None:
    """Layers with their shapes, parameters, state and operations.

    Args:
        run: A run folder or a model.safetensors.
        json: Print one JSON object on standard output.
    """
    from elman.cli.output import print_json, print_table
    from elman.inspection.architecture import describe
    from elman.models.file import load_model

    architecture = describe(load_model(run, cell=cell))
    if json:
        print_json(architecture.to_dict())
        return
    rows = []
    for part in architecture.parts:
        shapes = "\n".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in part.shapes.items())
        counts = (part.parameters, part.state_bytes, part.operations)
        share = f"{architecture.share(part):.1%}"
        rows.append([f"{part.name}\n{part.what}", shapes, share, *(f"{count:,}" for count in counts)])
    totals = (architecture.parameters, architecture.state_bytes, architecture.operations)
    rows.append(["all", "", "100.0%", *(f"{total:,}" for total in totals)])
    print_table(
        f"{architecture.kind}, {architecture.dtype}, vocabulary {architecture.vocabulary:,}",
        ["", "shapes", "share", "parameters", "state bytes", "operations per token"],
        rows,
        text_columns=2,
        footer=True,
    )
