"""``elman inspect gradients``, ``saliency`` and ``mitigations``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from elman.cli.flags import OwnCell, Switch
from elman.errors import UserError

if TYPE_CHECKING:
    from elman.inspection.gradients import GradientReport
    from elman.inspection.mitigations import Mitigations
    from elman.inspection.saliency import Saliency
    from elman.page import Page

_LAGS = (1, 2, 5, 10, 20, 50, 100, 200, 400)
_NUM_SHOWN = 5


def gradients(
    *runs_and_text: str,
    kinds: str | None = None,
    hidden_size: int | None = None,
    split: Literal["test", "valid", "train"] | None = None,
    lags: int = 400,
    places: int = 16,
    json: Switch = False,
    html: Path | None = None,
    cell: OwnCell = None,
) -> None:
    """How far back gradients reach, on which way, and what would help where they do not.

    A run alone is followed from its initial weights over its checkpoints to the model; several are held against each
    other, on one text.

    Args:
        runs_and_text: Run folders or files model.safetensors; then files, folders, globs or the name of a corpus, none
            for the run's own.
        kinds: In place of runs, new networks of these kinds, as in elman,lstm,gru.
        hidden_size: Of the new networks; none: 64.
        split: The part of the corpus; none: the test part, else the validation part.
        lags: How many tokens to go back.
        places: How many places of the text to start from.
        json: Print one JSON object on standard output.
        html: Write a page to look at.
    """
    from elman.cli.output import print_json
    from elman.inspection import gradients as inspection
    from elman.inspection.gradients_page import gradients_page

    if kinds is not None:
        if split is not None or cell is not None:
            raise UserError("--kinds looks at new networks on a whole text: leave --split and --cell out")
        report = inspection.inspect_kinds(
            [name.strip() for name in kinds.split(",")],
            runs_and_text or None,
            hidden_size=64 if hidden_size is None else hidden_size,
            max_lag=lags,
            num_places=places,
        )
    else:
        if hidden_size is not None:
            raise UserError("--hidden-size is that of new networks: give --kinds, or leave it out")
        runs, text = _runs_and_text(runs_and_text)
        report = inspection.inspect_gradients(
            runs, text or None, split=split, max_lag=lags, num_places=places, cell=cell
        )
    if json:
        print_json(report.to_dict())
    else:
        _print_gradients(report)
    _write(html, gradients_page(report) if html else None, json=json)


def _runs_and_text(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The words before the first that is no run, and the others."""
    if not words:
        raise UserError("give a run folder or a model.safetensors, or --kinds elman,lstm for new networks")
    count = 1  # the first is a run, or is said to be none
    while count < len(words) and _is_run(Path(words[count])):
        count += 1
    return list(words[:count]), list(words[count:])


def _is_run(path: Path) -> bool:
    return path.suffix == ".safetensors" or (path / "run.toml").is_file() or (path / "model.safetensors").is_file()


def _print_gradients(report: GradientReport) -> None:
    from elman.cli.output import clean, figure, print_table
    from elman.inspection.gradients import finite

    part = report.corpus if report.split == "text" else f"the {report.split} part of {report.corpus}"
    lags = [lag for lag in _LAGS if lag <= report.max_lag]
    print_table(
        clean(f"gradient of the loss by the state so many tokens back, one token back = 1; {part}"),
        ["tokens back", *(study.name for study in report.studies)],
        [[f"{lag}", *(f"{study.by_lag[lag]:.2g}" for study in report.studies)] for lag in lags],
    )
    mapped = [(study, study.state_map) for study in report.studies if study.state_map is not None]
    if mapped:
        print_table(
            "the map from one state to the next",
            ["", "kind", "numbers", "spectral radius", "largest Lyapunov exponent", "standard error"],
            [
                [study.name, study.kind, f"{state_map.size:,}", figure(state_map.spectral_radius, 3),
                 figure(finite(state_map.exponents[0])), figure(finite(state_map.errors[0]))]
                for study, state_map in mapped
            ],
            text_columns=2,
        )  # fmt: skip
    for study in report.studies:
        if study.matrices:
            print(f"{study.name}: {study.verdict.words}")
    if (clipping := report.clipping) is not None:
        print(
            f"while it trained: gradients of norm {clipping.median_norm:.3g} (median) to {clipping.largest_norm:.3g}, "
            f"{clipping.num_clipped:,} of {clipping.num_updates:,} updates clipped, {clipping.num_skipped:,} batches "
            "skipped"
        )


def saliency(
    run: str,
    /,
    *text: str,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    split: Literal["test", "valid", "train"] | None = None,
    length: int = 100,
    places: int = 8,
    threshold: float = 0.01,
    max_distance: int = 400,
    json: Switch = False,
    html: Path | None = None,
    cell: OwnCell = None,
) -> None:
    """Which earlier tokens predictions rest on, and how far back the model remembers.

    Args:
        run: A run folder or a model.safetensors.
        text: Files, folders, globs, '-' for standard input, or the name of a corpus; none: the run's own corpus.
        prompt: Look at the most probable continuation of this text alone.
        split: The part of the corpus; none: the test part, else the validation part.
        length: Tokens of each context that are looked at one by one.
        places: Contexts, spread over the text.
        threshold: Nats below which a change of the prediction counts as none.
        max_distance: Tokens back to which the memory horizon is looked for.
        json: Print one JSON object on standard output.
        html: Write a page to look at.
    """
    from elman.cli.output import print_json
    from elman.inspection.saliency import inspect_saliency
    from elman.inspection.saliency_page import saliency_page

    found = inspect_saliency(
        run,
        text or None,
        prompt=prompt,
        split=split,
        length=length,
        num_places=places,
        threshold=threshold,
        max_distance=max_distance,
        cell=cell,
    )
    if json:
        print_json(found.to_dict())
    else:
        _print_saliency(found)
    _write(html, saliency_page(found) if html else None, json=json)


def _print_saliency(found: Saliency) -> None:
    from elman.cli.output import clean, print_table
    from elman.inspection.saliency import METHODS

    for attribution in found.attributions[:1]:
        top = sorted(range(len(attribution.tokens)), key=lambda index: -abs(attribution.deletion[index]))[:_NUM_SHOWN]
        context = "".join(attribution.tokens)[-60:]
        rows = []
        for index in top:
            values = [getattr(attribution, method) for method in METHODS]
            cells = ["-" if value is None else f"{value[index]:+.3f}" for value in values]
            rows.append([repr(attribution.tokens[index]), f"{len(attribution.tokens) - index}", *cells])
        print_table(
            clean(
                f"nats that tokens add to {attribution.target!r} after {context!r}, which cost {attribution.nats:.2f}"
            ),
            ["token", "distance", *METHODS.values()],
            rows,
        )
    if len(found.attributions) > 1:
        by_distance = {name: sizes for method, name in METHODS.items() if (sizes := found.by_distance(method))}
        print_table(
            f"mean size of what the token at each distance adds, in nats, over {len(found.attributions)} contexts",
            ["distance", *by_distance],
            [
                [f"{lag}", *(f"{sizes[lag - 1]:.2g}" for sizes in by_distance.values())]
                for lag in _LAGS
                if lag <= len(by_distance[METHODS["deletion"]])
            ],
        )
    if (horizon := found.horizon) is not None:
        at = f"more than {horizon.distances[-1]:,} tokens" if horizon.tokens is None else f"{horizon.tokens:,} tokens"
        print(f"memory horizon: {at}; what stands further back is worth less than {horizon.threshold:g} nats")


def mitigations(
    *text: str,
    seeds: int = 3,
    updates: int = 400,
    seconds: float | None = None,
    lag: int = 10,
    out: Path | None = None,
    json: Switch = False,
    html: Path | None = None,
) -> None:
    """Train small networks with clipping, bptt, first weights and gates switched one at a time, and compare.

    Args:
        text: Files, folders, globs, or the name of a corpus; none: stdlib-prose.
        seeds: Trainings of each kind.
        updates: Of each training; the copying task takes three times as many.
        seconds: Of each training at most.
        lag: Steps over which the copying task has to remember.
        out: Folder of the finished trainings, which are not done again; none: runs/mitigations.
        json: Print one JSON object on standard output.
        html: Write a page to look at.
    """
    import sys

    from elman.cli.output import print_json
    from elman.inspection.mitigations import OUT, inspect_mitigations
    from elman.inspection.mitigations_page import mitigations_page

    found = inspect_mitigations(
        text or None,
        num_seeds=seeds,
        updates=updates,
        seconds=seconds,
        lag=lag,
        out=OUT if out is None else out,
        told=lambda line: print(line, file=sys.stderr),
    )
    if json:
        print_json(found.to_dict())
    else:
        _print_mitigations(found)
    _write(html, mitigations_page(found) if html else None, json=json)


def _print_mitigations(found: Mitigations) -> None:
    from elman.cli.output import figure, print_table

    rows = []
    for arm in (*found.arms, *found.copying):
        clipped = arm.mean("clipped")
        rows.append(
            [
                arm.name,
                f"{arm.num_diverged} of {len(arm.trials)}",
                figure(arm.mean("bits"), 3),
                figure(arm.state_is_worth, 3),
                figure(arm.mean("largest_norm"), 1),
                "-" if clipped is None else f"{clipped:.0%}",
            ]
        )
    columns = ["", "diverged", "bits per token", "state is worth", "largest gradient", "clipped"]
    print_table(f"{found.updates:,} updates of each on {found.corpus}", columns, rows)
    for sentence in found.words:
        print(sentence)


def _write(path: Path | None, page: Page | None, *, json: bool) -> None:
    """Write the page where one was asked for, and say where it is."""
    if path is None or page is None:
        return
    page.write(path)
    if not json:
        print(f"page: {path}")
