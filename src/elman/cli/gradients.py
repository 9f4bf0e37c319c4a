"""``elman inspect gradients``, ``saliency`` and ``mitigations``."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from elman.cli.files import Html
from elman.cli.flags import Json, OwnCell
from elman.cli.inspect import Part, Run, Text, hand_out, names_model, where
from elman.errors import UserError

if TYPE_CHECKING:
    from elman.inspection.gradients import GradientReport
    from elman.inspection.mitigations import Mitigations
    from elman.inspection.saliency import Saliency

_LAGS = (1, 2, 5, 10, 20, 50, 100, 200, 400)
_STAGE_LAG = 20
"""Tokens back at which networks are compared along their training."""
_NUM_SHOWN = 5
_LONG_NORM = 1e6
"""A gradient's norm from which on it is written as a power of ten."""


def gradients(
    *runs_and_text: str,
    kinds: str | None = None,
    hidden_size: int | None = None,
    split: Part = None,
    lags: int = 400,
    places: int = 16,
    json: Json = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """How far back gradients reach, on which way, and what would help where they do not.

    A run alone is followed from its initial weights over its checkpoints to the model. Several are held against each
    other on one text, as they are and as they were at the checkpoints that all have kept.

    Args:
        runs_and_text: Run folders or files model.safetensors; then files, folders, globs or the name of a corpus, none
            for the run's own.
        kinds: In place of runs, new networks of these kinds, as in elman,lstm,gru.
        hidden_size: Of the new networks; none: 64.
        lags: How many tokens to go back.
        places: How many places of the text to start from.
    """
    from elman.inspection import gradients as inspection
    from elman.inspection.gradients_page import gradients_page

    if kinds is not None:
        if split is not None or cell is not None:
            raise UserError(
                "--kinds looks at new networks on the text that a training would read: leave --split and --cell out"
            )
        if runs := [word for word in runs_and_text if names_model(word)]:
            raise UserError(f"--kinds looks at new networks, and {runs[0]!r} is a run: leave one of the two out")
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
    hand_out(report, _print_gradients, gradients_page, json=json, html=html, notices=report.notices)


def _runs_and_text(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The words before the first that is no run, and the others."""
    if not words:
        raise UserError("give a run folder or a model.safetensors, or --kinds elman,lstm for new networks")
    count = 1 + len(list(takewhile(names_model, words[1:])))  # the first is a run, or is said to be none
    return list(words[:count]), list(words[count:])


def _print_gradients(report: GradientReport) -> None:
    from elman.cli.output import figure, print_table
    from elman.inspection.gradients import finite
    from elman.visible import clean

    lags = [lag for lag in _LAGS if lag <= report.max_lag]
    print_table(
        clean(f"gradient of the loss by the state so many tokens back, one token back = 1; {where(report)}"),
        ["tokens back", *(study.name for study in report.studies)],
        [[f"{lag}", *(f"{study.by_lag[lag]:.2g}" for study in report.studies)] for lag in lags],
    )
    ways = [
        (study.name, study.additive, study.gradient.median) for study in report.studies if study.additive is not None
    ]
    if ways:
        print_table(
            "length of the part of it that came by the additive way alone, all of it = 1",
            ["tokens back", *(name for name, _, _ in ways)],
            [[f"{lag}", *(_ratio(additive[lag], whole[lag]) for _, additive, whole in ways)] for lag in lags],
        )
    if report.stages:
        lag = min(_STAGE_LAG, report.max_lag)
        print_table(
            f"what of the gradient is left {lag} tokens back, along the training",
            ["", *(stage.name for stage in report.stages), "the model"],
            [
                [study.name, *(f"{stage.by_lag[study.name][lag]:.2g}" for stage in report.stages),
                 f"{study.by_lag[lag]:.2g}"]
                for study in report.studies
            ],
        )  # fmt: skip
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


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2g}" if whole else "-"


def saliency(
    run: Run,
    /,
    *text: Text,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    split: Part = None,
    length: int = 100,
    places: int = 8,
    threshold: float = 0.01,
    max_distance: int = 400,
    json: Json = False,
    html: Html = None,
    cell: OwnCell = None,
) -> None:
    """Which earlier tokens predictions rest on, and how far back the model remembers.

    Args:
        prompt: Look at the most probable continuation of this text alone.
        length: Tokens of each context that are looked at one by one.
        places: Contexts, spread over the text.
        threshold: Nats below which a change of the prediction counts as none.
        max_distance: Tokens back to which the memory horizon is looked for.
    """
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
    hand_out(found, _print_saliency, saliency_page, json=json, html=html, notices=found.notices)


def _print_saliency(found: Saliency) -> None:
    from elman.cli.output import print_table
    from elman.inspection.saliency import METHODS
    from elman.visible import clean

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
    json: Json = False,
    html: Html = None,
) -> None:
    """Train small networks with clipping, bptt, first weights and gates switched one at a time, and compare.

    Args:
        text: Files, folders, globs, or the name of a corpus; none: stdlib-prose.
        seeds: Trainings of each kind.
        updates: Of each training; the copying task takes three times as many.
        seconds: Of each training at most.
        lag: Steps over which the copying task has to remember.
        out: Folder of the finished trainings, which are not done again; none: runs/mitigations.
    """
    import sys

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
    hand_out(found, _print_mitigations, mitigations_page, json=json, html=html)


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
                _norm(arm.mean("largest_norm")),
                "-" if clipped is None else f"{clipped:.0%}",
            ]
        )
    columns = ["", "diverged", "bits per token", "state is worth", "largest gradient", "clipped"]
    title = f"{found.updates:,} updates of each on {found.corpus}, {3 * found.updates:,} of each on copying"
    print_table(title, columns, rows)
    for sentence in found.words:
        print(sentence)


def _norm(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < _LONG_NORM else f"{value:.3g}"
