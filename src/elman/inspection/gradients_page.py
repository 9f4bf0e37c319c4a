"""Gradients through time as a page to look at."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from elman.inspection.gradients import Clipping, GradientReport, Study, finite
from elman.page import Page, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST = 1e-20
"""What a logarithmic scale reaches down to."""
_MAX_MATRICES = 6
_STAGES_IN_A_ROW = 3


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
            along_training(report), "One picture for each time, on the same scale; above is what the runs have become."
        )
    detailed = [study for study in report.studies if study.matrices]  # not the stages in between
    for study in detailed:
        page.text(f"{study.name} ({study.kind}): {study.verdict.words}.")
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
    for study in studies:
        axes.plot(lags, _drawn(study.by_lag[1:]), label=_label(study, studies), linewidth=1.8)
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
    axes.legend(frameon=False, fontsize=9)
    return figure


def along_training(report: GradientReport) -> Figure:
    """The gradient by lag of several runs, a picture for each time of their training."""
    columns = min(_STAGES_IN_A_ROW, len(report.stages))
    rows = math.ceil(len(report.stages) / columns)
    figure, axes = new_figure(rows, columns, height=0.6 + 2.7 * rows)
    panels = np.ravel(axes)
    labels = {study.name: _label(study, report.studies) for study in report.studies}
    for stage, panel in zip(report.stages, panels, strict=False):
        for name, ratios in stage.by_lag.items():
            panel.plot(range(1, len(ratios)), _drawn(ratios[1:]), label=labels[name], linewidth=1.8)
        panel.set_title(stage.name, fontsize=11)
        panel.set_xscale("log")
        _logarithmic(panel)
    lowest = min(panel.get_ylim()[0] for panel in panels[: len(report.stages)])
    highest = max(panel.get_ylim()[1] for panel in panels[: len(report.stages)])
    for index, panel in enumerate(panels):
        panel.set_visible(index < len(report.stages))
        panel.set_ylim(lowest, highest)
        panel.set_xlabel("tokens back")
        if index % columns == 0:
            panel.set_ylabel("gradient, one token back = 1")
        else:
            panel.tick_params(labelleft=False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def _label(study: Study, studies: tuple[Study, ...]) -> str:
    same_kind = len({one.kind for one in studies}) == 1
    says_kind = PurePath(study.name).name == study.kind
    return study.name if same_kind or says_kind else f"{study.name} ({study.kind})"


def _drawn(values: tuple[float, ...] | list[float]) -> list[float]:
    """Values for a logarithmic scale: what lies too low is left out."""
    return [value if value > _LEAST else math.nan for value in values]


def _logarithmic(axes: Axes) -> None:
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
            axes.plot(lags, _drawn(norms[1:]), label=f"by {name}", linestyle=":", color=f"C{index + 2}", linewidth=1)
        _logarithmic(axes)
        axes.set_xlabel("tokens back")
        axes.set_ylabel("norm")
        axes.legend(frameon=False, fontsize=9)
        none = "" if passes else " Nothing comes by the additive way."
        dotted = " Dotted: by each part of the state." if len(study.parts) > 1 else ""
        caption = f"{study.name} ({study.kind}): norms of the gradient, medians over the places.{dotted}{none}"
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
        right.legend(frameon=False, fontsize=9)
        error = max(matrix.error for matrix in study.matrices)
        page.figure(
            figure,
            f"{study.name} ({study.kind}). The sums agree with the gradients that training computes to {error:.1g} of "
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
    figure, axes = new_figure(1, len(mapped), height=3.2)
    for (study, state_map), one in zip(mapped, [axes] if len(mapped) == 1 else axes, strict=True):
        for steps, logs in state_map.products.items():
            one.plot(range(1, len(logs) + 1), logs, label=f"{steps} step{'s' * (steps > 1)}", marker=".", markersize=3)
        one.set_title(study.name, fontsize=10)
        one.set_xlabel("direction")
        one.set_ylim(bottom=max(one.get_ylim()[0], -30))
        one.legend(frameon=False, fontsize=9)
    (axes if len(mapped) == 1 else axes[0]).set_ylabel("log10 of the singular value")
    whole = "" if all(state_map.is_complete for _, state_map in mapped) else " Of large states, the largest alone."
    page.figure(figure, f"Singular values of products of Jacobians.{whole}")
    page.table(
        ["", "numbers of state", "spectral radius", "largest exponent", "standard error", "e-fold in tokens"],
        [
            (
                f"{study.name} ({study.kind})",
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
            "unchanged.",
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
    axes.legend(frameon=False, fontsize=9)
    page.figure(figure, "The norm of the whole gradient before clipping, in stretches of equal length.")
