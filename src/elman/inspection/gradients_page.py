"""Gradients through time as a page to look at."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from elman.inspection.gradients import Clipping, GradientReport, Study, finite
from elman.page import COLOURS, Page, new_figure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST = 1e-20
"""What a logarithmic scale reaches down to."""
_MAX_MATRICES = 6
_IN_A_ROW = 3
"""Of small pictures, and of names above a picture."""
_MOST_DECADES = 20
"""Of the singular values of a product, below its largest: what lies lower is cut off."""
_LIGHTEST, _DARKEST = (0.72, 0.82, 0.93), (0.07, 0.22, 0.42)
"""Of the checkpoints between the first weights and the model, in their order."""


def gradients_page(report: GradientReport) -> Page:
    """Everything of a report, pictures first."""
    part = report.corpus if report.split == "text" else f"the {report.split} part of {report.corpus}"
    page = Page(
        "Gradients through time",
        f"How much of the gradient of a prediction's loss is left so many tokens back, at {report.num_places} places "
        f"of {part}. Where little is left, nothing is learned from what stands there.",
    )
    page.section("What is left, by distance")
    page.figure(
        by_distance(report.studies),
        "The norm of the gradient of the loss with respect to the state k tokens before, divided by that one token "
        "before: median over the places; the band, of the last network, holds eight places of ten.",
    )
    if report.stages:
        page.section("Along the training", "The same with the initial weights, and at checkpoints that all have kept.")
        page.figure(
            along_training(report), "One picture for each time, on the same scale, and last what the runs have become."
        )
    detailed = [study for study in report.studies if study.matrices]  # not the stages in between
    for study in detailed:
        page.text(f"{_named(study)}: {study.verdict.words}.")
    _add_ways(page, detailed)
    _add_matrices(page, detailed)
    if any(study.state_map for study in detailed):
        _add_state_maps(page, detailed)
    _add_saturation(page, detailed)
    if report.clipping is not None:
        _add_clipping(page, report.clipping)
    return page


def by_distance(studies: tuple[Study, ...]) -> Figure:
    """The gradient by lag of all networks in one picture."""
    figure, axes = new_figure(height=4.0)
    lags = range(1, len(studies[0].gradient.median))
    for study, line in zip(studies, _lines(studies), strict=True):
        axes.plot(lags, _drawn(study.by_lag[1:]), label=_label(study, studies), **line)
    last = studies[-1]
    one = last.gradient.median[1] or math.nan
    axes.fill_between(
        lags,
        _drawn([norm / one for norm in last.gradient.low[1:]]),
        _drawn([norm / one for norm in last.gradient.high[1:]]),
        color=axes.get_lines()[-1].get_color(),
        alpha=0.15,
        linewidth=0,
    )
    _logarithmic(axes)
    axes.set_xscale("log")
    axes.set_xlabel("tokens back")
    axes.set_ylabel("gradient, one token back = 1")
    _name_lines(figure, axes)
    return figure


def _lines(studies: tuple[Study, ...]) -> Iterator[dict[str, Any]]:
    """How each network is drawn: the checkpoints of one run light to dark, its first and last weights apart."""
    between = [study for study in studies if not study.matrices]
    if 0 < len(between) == len(studies) - 2:
        yield {"color": COLOURS[-1], "linewidth": 2.2, "linestyle": "--"}
        for index in range(len(between)):
            share = index / max(1, len(between) - 1)
            mixed = tuple((1 - share) * low + share * high for low, high in zip(_LIGHTEST, _DARKEST, strict=True))
            yield {"color": mixed, "linewidth": 1.4}
        yield {"color": COLOURS[1], "linewidth": 2.6}
        return
    for index in range(len(studies)):
        again = index >= len(COLOURS)
        yield {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.8, "linestyle": "--" if again else "-"}


def along_training(report: GradientReport) -> Figure:
    """The gradient by lag of several runs, a picture for each time of their training and one for their models."""
    times = {stage.name: stage.by_lag for stage in report.stages}
    times["the model"] = {study.name: study.by_lag for study in report.studies}
    figure, panels = _small_pictures(len(times), 2.7)
    labels = {study.name: _label(study, report.studies) for study in report.studies}
    for (time, by_lag), panel in zip(times.items(), panels, strict=True):
        for (name, ratios), line in zip(by_lag.items(), _lines(report.studies), strict=True):
            panel.plot(range(1, len(ratios)), _drawn(ratios[1:]), label=labels[name], **line)
        panel.set_title(time, fontsize=11)
        panel.set_xscale("log")
        panel.set_xlabel("tokens back")
        _logarithmic(panel)
    lowest, highest = min(panel.get_ylim()[0] for panel in panels), max(panel.get_ylim()[1] for panel in panels)
    for index, panel in enumerate(panels):
        panel.set_ylim(lowest, highest)
        if index % _IN_A_ROW == 0:
            panel.set_ylabel("gradient, one token back = 1")
        else:
            panel.tick_params(labelleft=False)
    _name_lines(figure, panels[0])
    return figure


def _small_pictures(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """So many pictures of one height, in rows."""
    columns = min(_IN_A_ROW, count)
    rows = math.ceil(count / columns)
    figure, axes = new_figure(rows, columns, height=0.6 + height * rows)
    panels = list(np.ravel(axes))
    for panel in panels[count:]:
        panel.remove()
    return figure, panels[:count]


def _name_lines(figure: Figure, axes: Axes) -> None:
    """What the lines of a picture are, above it, where no line runs through the names."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=_IN_A_ROW, frameon=False, fontsize=9)


def _label(study: Study, studies: tuple[Study, ...]) -> str:
    return study.name if len({one.kind for one in studies}) == 1 else _named(study)


def _named(study: Study) -> str:
    """With its kind, unless it is called by it."""
    return study.name if PurePath(study.name).name == study.kind else f"{study.name} ({study.kind})"


def _drawn(values: tuple[float, ...] | list[float]) -> list[float]:
    """Values for a logarithmic scale: what lies too low is left out."""
    return [value if value > _LEAST else math.nan for value in values]


def _logarithmic(axes: Axes) -> None:
    if not any(np.isfinite(line.get_ydata()).any() for line in axes.get_lines()):
        return  # a gradient that is zero everywhere has no place on it
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, _LEAST), high)
    axes.tick_params(axis="y", which="minor", labelsize=8, labelcolor="#444444")


def _add_ways(page: Page, studies: list[Study]) -> None:
    known = [(study, study.additive, study.rest) for study in studies if study.additive and study.rest]
    if not known:
        return
    page.section(
        "On which way it comes",
        "The additive way leads from one state to the next past all gates and candidates, which are held fixed: the "
        "product of the forget gates in an LSTM, nothing at all in a vanilla network. The rest has passed a matrix, a "
        "gate or a candidate at least once. The two are vectors that add up to the whole; where they point against "
        "each other, each may be longer than their sum.",
    )
    for study, additive, rest in known:
        figure, axes = new_figure()
        lags = range(1, len(additive))
        axes.plot(lags, _drawn(study.gradient.median[1:]), label="whole", color="#44444455", linewidth=5)
        # What arrives one token back is the start of the additive way.
        passes = any(additive[2:])
        axes.plot(lags, _drawn(additive[1:]), label="by the additive way alone" if passes else None)
        axes.plot(lags, _drawn(rest[1:]), label="the rest")
        for index, (name, norms) in enumerate(study.parts.items() if len(study.parts) > 1 else ()):
            colour = COLOURS[(index + 2) % len(COLOURS)]
            axes.plot(lags, _drawn(norms[1:]), label=f"by {name}", linestyle=":", color=colour, linewidth=1.4)
        _logarithmic(axes)
        axes.set_xlabel("tokens back")
        axes.set_ylabel("norm")
        _name_lines(figure, axes)
        none = "" if passes else " Nothing comes by the additive way."
        dotted = " Dotted: by each part of the state." if len(study.parts) > 1 else ""
        caption = f"{_named(study)}: norms of the gradient, medians over the places.{dotted}{none}"
        page.figure(figure, caption)


def _add_matrices(page: Page, studies: list[Study]) -> None:
    page.section(
        "What each step adds to the gradient of a matrix",
        "One matrix is used at every step, and its gradient is the sum of what each use adds. The share is what the "
        "uses so far back add in the direction of the whole; back-propagation that is cut off there misses all that "
        "lies beyond.",
    )
    for study in studies:
        shown = sorted(study.matrices, key=lambda matrix: -matrix.whole)[:_MAX_MATRICES]
        if not shown:
            continue
        figure, (left, right) = new_figure(1, 2)
        for matrix in shown:
            name = matrix.name.removeprefix("layers.")
            left.plot(range(len(matrix.norm)), _drawn(matrix.norm), label=name)
            right.plot(range(len(matrix.share)), _running_sum(matrix.share), label=name)
        _logarithmic(left)
        for axes in (left, right):
            axes.set_xlabel("steps before the loss")
        left.set_ylabel("norm of what is added")
        right.set_ylabel("share of the whole, added up")
        right.set_xscale("symlog", linthresh=1)
        _name_lines(figure, right)
        error = max(matrix.error for matrix in study.matrices)
        page.figure(
            figure,
            f"{_named(study)}. The sums agree with the gradients that training computes to {error:.1g} of "
            "their length.",
        )


def _running_sum(shares: tuple[float, ...]) -> list[float]:
    total, sums = 0.0, []
    for share in shares:
        total += share
        sums.append(total)
    return sums


def _add_state_maps(page: Page, studies: list[Study]) -> None:
    page.section(
        "What reading does to small changes of the state",
        "The Jacobian of one step says how a small change of the state goes on; a gradient takes the same way back. A "
        "direction whose singular value in the product of many Jacobians is far below one is forgotten after so many "
        "tokens. The Lyapunov exponent is the rate in the long run: below zero, changes die out; above, they grow, and "
        "the network is chaotic along this text.",
    )
    mapped = [(study, study.state_map) for study in studies if study.state_map is not None]
    figure, panels = _small_pictures(len(mapped), 2.7)
    for index, ((study, state_map), one) in enumerate(zip(mapped, panels, strict=True)):
        for steps, logs in state_map.products.items():
            one.plot(range(1, len(logs) + 1), logs, label=f"{steps} step{'s' * (steps > 1)}", marker=".", markersize=3)
        one.set_title(study.name, fontsize=10)
        one.set_xlabel("direction")
        lowest = min(logs[0] for logs in state_map.products.values()) - _MOST_DECADES
        one.set_ylim(bottom=max(one.get_ylim()[0], lowest))
        if index % _IN_A_ROW == 0:
            one.set_ylabel("log10 of the singular value")
    _name_lines(figure, panels[0])
    whole = "" if all(state_map.is_complete for _, state_map in mapped) else " Of large states, the largest alone."
    page.figure(figure, f"Singular values of products of Jacobians.{whole}")
    page.table(
        ["", "numbers of state", "spectral radius", "largest exponent", "standard error", "e-fold in tokens"],
        [
            (
                _named(study),
                state_map.size,
                state_map.spectral_radius,
                finite(state_map.exponents[0]),
                finite(state_map.errors[0]),
                1 / abs(state_map.exponents[0]) if state_map.exponents[0] else None,
            )
            for study, state_map in mapped
        ],
    )


def _add_saturation(page: Page, studies: list[Study]) -> None:
    rows = [
        (f"{study.name}: {gate.name}", gate.low, gate.high, gate.mean, f"{gate.stuck} of {gate.units}")
        for study in studies
        for gate in study.saturation
    ]
    if rows:
        page.section(
            "Gates that stand open or shut",
            "Between 0 and 1, below 0.1 or above 0.9; between -1 and 1, beyond 0.95 on either side: there less than a "
            "tenth of a gradient passes. A forget gate near 1 keeps its memory, and passes gradients along it "
            "unchanged. The memory of an LSTM is read through a tanh, and gradients enter it the same way: where that "
            "is saturated, hardly anything is learned into a memory, however well it is kept.",
        )
        page.table(["", "low", "high", "mean", "units stuck at an end"], rows)


def _add_clipping(page: Page, clipping: Clipping) -> None:
    page.section("Gradients while it trained")
    share = clipping.num_clipped / clipping.num_updates
    page.numbers(
        {
            "updates": clipping.num_updates,
            "clipped": f"{share:.1%}",
            "batches skipped": clipping.num_skipped,
            "median norm": clipping.median_norm,
            "largest norm": clipping.largest_norm,
        }
    )
    figure, axes = new_figure()
    axes.plot(clipping.updates, clipping.largest_norms, label="largest", linewidth=1)
    axes.plot(clipping.updates, clipping.median_norms, label="median", linewidth=1.8)
    if clipping.max_grad_norm is not None:
        axes.axhline(
            clipping.max_grad_norm, color="#444444", linestyle="--", linewidth=1, label="training.max_grad_norm"
        )
    axes.set_yscale("log")
    axes.set_xlabel("update")
    axes.set_ylabel("norm before clipping")
    _name_lines(figure, axes)
    page.figure(figure, "The norm of the whole gradient before clipping, in stretches of equal length.")
