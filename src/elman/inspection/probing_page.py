"""The page about what families of models can remember."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from elman.inspection.probing import GROUPS, TASKS, Probed, Trial
from elman.page import COLOURS, Page, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TASKS_IN_A_ROW = 3


def probed_page(found: Probed) -> Page:
    """Accuracy against length, all tasks in one picture and task by task, to be looked at."""
    rates = " or ".join(f"{rate:g}" for rate in found.rates)
    page = Page(
        "What can they remember?",
        f"Questions of known answer, learned at short lengths and asked at longer ones. Every family had "
        f"{found.updates:,} updates at a learning rate of {rates}, and about {found.parameters:,} parameters.",
    )
    page.section("All tasks", "An answer is right if all of it is.")
    page.figure(
        overview(found),
        "Of a hundred answers so many are right, by family and length; the darker, the further above a guess. Right of "
        "the orange line: lengths that were not learned. Grey lines part families by what carries their past: "
        + "; ".join(f"{what} ({', '.join(kinds)})" for what, kinds in _groups(found).items())
        + ".",
    )
    page.table(
        ["family", *(f"{task} (learned to {longest})" for task, longest in found.learned.items())],
        [(kind, *lengths.values()) for kind, lengths in found.reach().items()],
        "The greatest length asked up to which nine of ten answers are right.",
    )
    for task, longest in found.learned.items():
        own = found.of(task)
        page.section(task, f"Learned up to length {longest}.")
        page.figure(_by_length(own, longest), "Right of the dashed line nothing was learned.")
        page.table(
            ["family", "parameters", "state", "rate", *(f"length {one.length}" for one in own[0].by_length)],
            [
                (
                    trial.kind,
                    trial.parameters,
                    "grows" if trial.state_size is None else trial.state_size,
                    trial.learning_rate,
                    *(f"{one.accuracy:.1%}" for one in trial.by_length),
                )
                for trial in own
            ],
            "State: numbers carried from one token to the next. Different questions asked: "
            + ", ".join(f"{one.cases:,} of length {one.length}" for one in own[0].by_length)
            + ".",
        )
    return page


def _groups(found: Probed) -> dict[str, list[str]]:
    """The families that were asked, by what carries their past."""
    asked = found.reach()
    groups = {what: [kind for kind in kinds if kind in asked] for what, kinds in GROUPS.items()}
    return {what: kinds for what, kinds in groups.items() if kinds}


def overview(found: Probed) -> Figure:
    """A panel for each task: families by lengths, coloured by how far the right answers are above a guess."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("right", ["#ffffff", COLOURS[0]])
    columns = min(_TASKS_IN_A_ROW, len(found.learned))
    rows = math.ceil(len(found.learned) / columns)
    num_families = max(len(found.of(task)) for task in found.learned)
    figure, axes = new_figure(rows, columns, height=rows * (0.8 + 0.2 * num_families))
    panels = np.ravel(axes)
    group_of = {kind: what for what, kinds in GROUPS.items() for kind in kinds}
    for index, (panel, (task, longest)) in enumerate(zip(panels, found.learned.items(), strict=False)):
        own, guess = found.of(task), TASKS[task].guess
        lengths = [one.length for one in own[0].by_length]
        right = np.array([[one.accuracy for one in trial.by_length] for trial in own])
        above = np.clip((right - guess) / (1 - guess), 0, 1)
        panel.imshow(above, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(above):
            shade = "#ffffff" if share > 0.6 else "#444444"
            figure_there = f"{100 * right[row, column]:.0f}"
            panel.text(column, row, figure_there, ha="center", va="center", fontsize=8, color=shade)
        for row, (upper, lower) in enumerate(pairwise(own)):
            if group_of.get(upper.kind) != group_of.get(lower.kind):
                panel.axhline(row + 0.5, color="#888888", linewidth=1)
        panel.axvline(sum(length <= longest for length in lengths) - 0.5, color=COLOURS[1], linewidth=2)
        panel.set_xticks(range(len(lengths)), lengths)
        panel.set_yticks(range(len(own)), [trial.kind for trial in own] if index % columns == 0 else [""] * len(own))
        panel.set_title(f"{task} (guess: {100 * guess:.0f})" if guess else task, fontsize=10)
        panel.grid(False)
        panel.tick_params(length=0)
    for panel in panels[len(found.learned) :]:
        panel.set_visible(False)
    return figure


def _by_length(trials: Sequence[Trial], longest: int) -> Figure:
    figure, axes = new_figure(height=3.8)
    for index, trial in enumerate(trials):
        lengths = [one.length for one in trial.by_length]
        dashes = "-" if index < len(COLOURS) else ":"  # the colours come round again
        axes.plot(lengths, [one.accuracy for one in trial.by_length], f"o{dashes}", label=trial.kind)
    axes.axvline(longest, color="#888888", linestyle="--", linewidth=1)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("length")
    axes.set_ylabel("answers right")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure
