"""A comparison as one page: the table and what it means, curves over four measures of effort, gradients, samples."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from elman.cells import cell_names, find_cell
from elman.comparison.entries import PASSES_IN_TRAINING
from elman.comparison.result import Comparison, Contestant, Outcome
from elman.comparison.tables import about, baseline_line, columns, resolution_line, write_tables, written
from elman.comparison.trials import check_folder
from elman.models.kinds import kind_names, model_config_class
from elman.page import COLOURS, Page, new_figure
from elman.training.folder import Run
from elman.training.history import Curve, Floats, History, environment_of, spread_out, thinned
from elman.training.report import in_plain_powers, judged_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_FILE = "comparison.html"

_MAX_POINTS = 200
_MAX_STAGES = 5
_STYLES = ("-", "--", "-.", ":")
_Samples: TypeAlias = Sequence[Mapping[str, Any]]
_MEASURES = ("updates", "tokens", "seconds", "operations")
_OF_THE_MODEL = ("parameters", "state bytes")
"""Columns of the table that stand among the models on the page."""
_MAX_NAMES = 3
"""In a title: of more models, their number."""


def write_results(comparison: Comparison, folder: Path) -> Path:
    """Write tables and page into a folder, while no other command does; the path of the page."""
    check_folder(folder)
    with _alone_in(folder):
        write_tables(comparison, folder)
        comparison_page(comparison).write(folder / PAGE_FILE)
    return folder / PAGE_FILE


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def comparison_page(comparison: Comparison) -> Page:
    """The page of a comparison."""
    names = [one.name for one in comparison.contestants]
    what = f"{len(names)} models" if len(names) > _MAX_NAMES else ", ".join(names) or "Nothing yet"
    page = Page(
        f"{what} on {Path(comparison.corpus).name}",
        "Each reads a text token by token and says how probable every next token is. \u2212ln\u00a0p of the right one "
        "is its surprise, in nats; it is judged by the mean over a text that it was not trained on. Lower is better.",
    )
    if names:
        histories = {
            one.name: [History.of(Run(Path(outcome.run))) for outcome in one.outcomes] for one in comparison.contestants
        }
        _outcome(page, comparison)
        _models(page, comparison)
        _learning(page, comparison, histories)
        _gradients(page, comparison, histories)
        _samples(page, comparison, histories)
        _order_and_chance(page, comparison)
        _settings(page, comparison)
    else:
        page.text("The comparison was stopped before any model was done: the same command goes on with it.")
    return page


def _outcome(page: Page, comparison: Comparison) -> None:
    best, *others = comparison.contestants
    page.section("Which is better", " ".join(about(comparison)))
    lowest = best.repeated(comparison.figure).mean
    behind = {one.name: one.repeated(comparison.figure).mean - lowest for one in others[:_MAX_NAMES]}
    page.numbers(
        {f"{comparison.unit}: {best.name}": lowest}
        | {f"{name} is behind by": f"{more:.4f}" for name, more in behind.items()}
    )
    for verdict in comparison.verdicts[: len(others)]:
        page.text(f"{verdict}.")
    _dots(page, comparison)
    kept = [place for place, column in enumerate(columns(comparison)) if column.heading not in _OF_THE_MODEL]
    page.table(
        [columns(comparison)[place].heading for place in kept],
        [[row[place] for place in kept] for row in written(comparison)],
        "Tokens, floating-point operations and seconds: of one training.",
    )
    for line in (resolution_line(comparison), baseline_line(comparison)):
        if line:
            page.text(line)
    for notice in comparison.notices:
        page.text(f"Note: {notice}.")
    if not comparison.is_complete:
        page.text("The comparison was stopped: what is missing here is made by the same command.")
    if len(comparison.contestants) > 2:
        _pairs(page, comparison)


def _dots(page: Page, comparison: Comparison) -> None:
    """Every training as a dot, beside those of the simple means that lie in sight."""
    in_order = comparison.contestants[::-1]
    figure, axes = new_figure(height=0.9 + 0.42 * len(in_order))
    for place, one in enumerate(in_order):
        repeated = one.repeated(comparison.figure)
        axes.plot(repeated.values, [place] * len(repeated.values), "o", color=COLOURS[0], alpha=0.6, markersize=6)
        axes.plot([repeated.mean], [place], "|", color=COLOURS[1], markersize=18, markeredgewidth=2)
    means = [one.repeated(comparison.figure).mean for one in in_order]
    room = 0.25 * (max(means) - min(means))
    top = len(in_order) - 0.4
    for name, figures in comparison.baselines.items():
        value = figures[comparison.figure]
        if value is not None and min(means) - room <= value <= max(means) + room:
            axes.axvline(value, color="#888888", linestyle="--", linewidth=1)
            axes.annotate(name, (value, top), ha="center", va="bottom", fontsize=8, color="#666666")
    axes.set_yticks(range(len(in_order)), [one.name for one in in_order])
    axes.set_xlabel(comparison.unit)
    axes.set_ylim(-0.6, top)
    page.figure(
        figure,
        "Each dot is a training with another seed, the bar their mean. Further left is better. Dashed: simple means on "
        "the same text, as far as they lie in sight.",
    )


def _models(page: Page, comparison: Comparison) -> None:
    page.section("The models")
    page.table(
        ["model", "what it is", "parameters", "operations for each token", "state bytes"],
        [
            [one.name, _what_it_is(one.kind), one.parameters, one.operations, one.state_bytes]
            for one in comparison.contestants
        ],
        "Operations: floating-point operations, forward alone. State: what is carried from token to token, all that "
        "the model knows of the text before.",
    )


def _what_it_is(kind: str) -> str:
    """How the first sentence about a kind begins; a person's own cell is nobody else's to describe."""
    if kind not in kind_names():
        return "a cell of one's own"
    said = find_cell(kind).__doc__ if kind in cell_names() else model_config_class(kind).__doc__
    return re.split(r"[,:.]? *\n|[,:] ", str(said).replace("``", ""))[0]


def _pairs(page: Page, comparison: Comparison) -> None:
    names = [one.name for one in comparison.contestants]
    cells = dict.fromkeys(combinations(names, 2), "")
    for verdict in comparison.verdicts:
        mark = {True: "", False: " ?", None: " ?"}[verdict.difference.is_certain]
        cells[verdict.better, verdict.worse] = f"{verdict.difference.mean:.4f}{mark}"
    page.table(
        ["better by", *names[1:]],
        [[name, *(cells.get((name, other), "") for other in names[1:])] for name in names[:-1]],
        "By how much the model of the row is better than that of the column. A question mark: the difference is no "
        "larger than the spread explains, by the interval of Welch's test; all intervals hold together in 95 of 100 "
        "cases.",
    )


def _learning(page: Page, comparison: Comparison, histories: Mapping[str, Sequence[History]]) -> None:
    trained = [one for one in comparison.contestants if len(_mean_curve(histories[one.name])) > 1]
    if not trained:
        return
    page.section("How they learned")
    if comparison.figure != "nats_per_token":
        page.text("Their tokens differ, so losses per token cannot be held against each other: there are no curves.")
        return
    page.text(
        "The same trainings against four measures of effort: a model that learns more from each token may still be the "
        "slower one, and one that takes few operations may have to take them one after the other."
    )
    figure, axes = new_figure(2, 2, height=6.6)
    limits = []
    for number, one in enumerate(trained):
        curve = _mean_curve(histories[one.name])
        limits.append((curve.nats.min(), np.quantile(curve.nats, 0.95)))
        for measure, effort in _efforts(curve, one).items():
            its_axes = axes.flat[_MEASURES.index(measure)]
            its_axes.plot(effort, curve.nats, linewidth=1.3, label=one.name, **_style(number))
    lowest, highest = min(low for low, _ in limits), max(high for _, high in limits)
    room = 0.05 * (highest - lowest) or 0.1
    for measure, one_axes in zip(_MEASURES, axes.flat, strict=True):
        one_axes.set_xlabel(measure)
        one_axes.set_ylim(lowest - room, highest + room)
        _count_in_thousands(one_axes)
    for left in axes[:, 0]:
        left.set_ylabel("nats per token")
    _legend(axes[0, 0], len(trained))
    page.figure(
        figure,
        "The loss of each batch of the training text before its update, a mean over the seeds and over neighbouring "
        "updates. The steep beginning is cut off.",
    )
    if all(_mean_estimates(histories[one.name]) for one in trained):
        figure, axes = new_figure()
        for number, one in enumerate(trained):
            tokens, nats = zip(*_mean_estimates(histories[one.name]), strict=True)
            axes.plot(tokens, nats, marker="o", markersize=3, label=one.name, linewidth=1.3, **_style(number))
        axes.set_xlabel("tokens")
        axes.set_ylabel("nats per token")
        _count_in_thousands(axes)
        _legend(axes, len(trained))
        page.figure(figure, "Estimates on the validation part, a mean over the seeds.")


def _style(number: int) -> dict[str, Any]:
    """Of the line of a model; where the colours are used up, the strokes change."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": _STYLES[number // len(COLOURS) % len(_STYLES)]}


def _count_in_thousands(axes: Axes) -> None:
    """Large counts as 100k or 2M, few enough to stand side by side."""
    from matplotlib.ticker import EngFormatter

    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _efforts(curve: Curve, one: Contestant) -> dict[str, Floats]:
    return {
        "updates": curve.update,
        "tokens": curve.tokens,
        "seconds": curve.elapsed_seconds,
        "operations": curve.tokens * (PASSES_IN_TRAINING * one.operations),
    }


def _mean_curve(histories: Sequence[History]) -> Curve:
    """The mean over seeds, update by update as far as all have come, thinned out."""
    curves = [history.curve for history in histories]
    length = min(len(curve) for curve in curves)
    names = [field.name for field in fields(Curve)]
    columns = [np.mean([getattr(curve, name)[:length] for curve in curves], axis=0) for name in names]
    return Curve(*thinned(columns, _MAX_POINTS))


def _mean_estimates(histories: Sequence[History]) -> list[tuple[float, float]]:
    """Tokens and nats of the estimates that all seeds have made after the same update."""
    found: dict[int, list[tuple[float, float]]] = {}
    for history in histories:
        for one in history.evaluations:
            if one.get("nats_per_token") is not None:
                # Its own count of tokens is that of the text it was made on.
                trained = float(np.interp(one["update"], history.curve.update, history.curve.tokens))
                found.setdefault(one["update"], []).append((trained, one["nats_per_token"]))
    complete = [points for _, points in sorted(found.items()) if len(points) == len(histories)]
    return [(float(np.mean([t for t, _ in points])), float(np.mean([n for _, n in points]))) for points in complete]


def _legend(axes: Axes, count: int) -> None:
    axes.legend(frameon=False, fontsize=8, ncols=2 if count > 4 else 1)


def _gradients(page: Page, comparison: Comparison, histories: Mapping[str, Sequence[History]]) -> None:
    trained = [one for one in comparison.contestants if len(_mean_curve(histories[one.name])) > 1]
    if not trained:
        return
    page.section("Their gradients", "The norm before clipping: what vanishes or explodes shows here.")
    figure, axes = new_figure()
    rows = []
    for number, one in enumerate(trained):
        curve = _mean_curve(histories[one.name])
        axes.plot(curve.update, curve.grad_norm, linewidth=1.1, label=one.name, **_style(number))
        norms = np.concatenate([history.curve.grad_norm for history in histories[one.name]])
        norms = norms[np.isfinite(norms)]
        threshold = one.settings["training"]["max_grad_norm"]
        is_clipped = threshold != "none"
        rows.append(
            [
                one.name,
                float(np.median(norms)),
                float(np.quantile(norms, 0.99)),
                float(norms.max()),
                threshold if is_clipped else None,
                f"{np.mean(norms > threshold):.1%}" if is_clipped else None,
            ]
        )
    in_plain_powers(axes)
    axes.set_xlabel("updates")
    axes.set_ylabel("norm of the gradient")
    _legend(axes, len(trained))
    page.figure(figure, "A mean over the seeds and over neighbouring updates.")
    headings = ["model", "median", "99 of 100 are below", "largest", "clipped at", "clipped updates"]
    page.table(headings, rows, "Every update of every seed.")


def _samples(page: Page, comparison: Comparison, histories: Mapping[str, Sequence[History]]) -> None:
    stories = {one.name: _stages(one.outcomes[0], histories[one.name][0]) for one in comparison.contestants}
    stories = {name: stages for name, stages in stories.items() if any(stages.values())}
    if not stories:
        return
    page.section(
        "From noise to words",
        "What each model writes on its way, with its first seed: before the training, at some moments of it, and at "
        "its end. Each model has its own number of updates, so its moments are its own.",
    )
    stages = _side_by_side(stories)
    temperatures = sorted({sample["temperature"] for stage in stages for _, sample in stage})
    middle = temperatures[len(temperatures) // 2]
    for temperature in sorted(temperatures, key=lambda one: one != middle):
        if temperature == middle:
            page.text(f"At temperature {temperature:g}:")
        for number, stage in enumerate(stages, 1):
            texts: dict[str, str] = {}
            for heading, sample in stage:
                if sample["temperature"] == temperature:
                    texts.setdefault(heading, sample["prompt"] + sample["text"])  # of several, the first
            summary = f"Temperature {temperature:g}, stage {number} of {len(stages)}"
            page.columns(texts, "" if temperature == middle else summary)


def _side_by_side(stories: Mapping[str, Mapping[int, _Samples]]) -> list[list[tuple[str, Mapping[str, Any]]]]:
    """Stage by stage the samples of all models with their headings: before the training, then up to the end of each."""
    later = {name: [update for update in story if update] for name, story in stories.items()}
    count = max(map(len, later.values()))
    rows = [{name: 0 for name, story in stories.items() if 0 in story}]
    rows += [{name: own[-left] for name, own in later.items() if left <= len(own)} for left in range(count, 0, -1)]
    return [
        [(f"{name}, {_when(update)}", sample) for name, update in row.items() for sample in stories[name][update]]
        for row in rows
        if row
    ]


def _when(update: int) -> str:
    return f"after {update:,} update{'s' * (update != 1)}" if update else "before the training"


def _stages(outcome: Outcome, history: History) -> dict[int, list[Mapping[str, Any]]]:
    """Samples by update, before the training first, at moments that are spread out."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for sample in (*outcome.untrained, *history.samples):
        found.setdefault(int(sample["update"]), []).append(sample)
    return {update: found[update] for update in spread_out(sorted(found), _MAX_STAGES)}


def _order_and_chance(page: Page, comparison: Comparison) -> None:
    rows = []
    for one in comparison.contestants:
        for drawn in judged_in(Run(Path(one.outcomes[0].run))).get("temperatures", []):
            share = drawn["known_words"]
            share = None if share is None else f"{share:.1%}"
            rows.append([one.name, drawn["name"], drawn["entropy"], drawn["distinct"][1], drawn["distinct"][3], share])
    if not rows:
        return
    page.section(
        "Order and chance",
        "The finished models at several temperatures. Entropy: how unsure a model is of the next token where it "
        "writes, in nats. Distinct: different runs of two, or four, tokens over all of them. Known words: the share of "
        "the words that stand in the training text, too.",
    )
    page.table(["model", "text", "entropy", "distinct pairs", "distinct fours", "known words"], rows)


def _settings(page: Page, comparison: Comparison) -> None:
    page.section("How it was done")
    swept = [one for one in comparison.contestants if one.sweep]
    if swept:
        factors = sorted({rate for one in swept for rate in one.sweep})
        page.table(
            ["model", *(f"{rate:g}" for rate in factors), "taken"],
            [[one.name, *(one.sweep.get(rate) for rate in factors), one.rate] for one in swept],
            "Nats per token on the validation part after the short trainings that chose the learning rates, by what "
            "these were multiplied by.",
        )
    differing = _differing(comparison.contestants)
    page.table(
        ["setting", *(one.name for one in comparison.contestants)],
        [[name, *values] for name, values in differing.items()],
        "Settings that are not the same for all.",
    )
    environment = environment_of(Run(Path(comparison.contestants[0].outcomes[0].run)))
    libraries = environment.get("libraries", {})
    machine = {name: environment.get(name) for name in ("elman", "python", "system", "cpus", "threads", "device")}
    page.table(["", ""], [*machine.items(), ("torch", libraries.get("torch"))], "The machine.")
    page.table(
        ["model", "seed", comparison.unit, "updates", "tokens", "seconds", "run"],
        [
            [one.name, o.seed, o.figures[comparison.figure], o.updates, o.tokens, o.seconds, Path(o.run).name]
            for one in comparison.contestants
            for o in one.outcomes
        ],
        "Every training.",
    )


def _differing(contestants: Sequence[Contestant]) -> dict[str, list[str]]:
    """Settings that are not the same for all, with the value of each; a dash where a model has no such setting."""
    flat = []
    for one in contestants:
        values = {}
        for section, settings in one.settings.items():
            for name, value in settings.items() if isinstance(settings, Mapping) else (("", settings),):
                values[f"{section}.{name}" if name else section] = _plain(value)
        flat.append(values)
    names = dict.fromkeys(name for values in flat for name in values)
    rows = {name: [values.get(name, "–") for values in flat] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
