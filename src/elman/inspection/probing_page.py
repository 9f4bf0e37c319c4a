"""The page about what families of models can remember."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from elman.inspection.probing import Probed, Trial
from elman.page import COLOURS, Page, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TASKS_IN_A_ROW = 3


def probed_page(found: Probed) -> Page:
    """Accuracy against length, all tasks in one picture and task by task, to be looked at."""
    page = Page(
        "What can they remember?",
        f"Tasks of known answer, learned at short lengths and asked at longer ones. Every family had {found.updates:,} "
        f"updates and about {found.parameters:,} parameters.",
    )
    page.section("All tasks", "An answer is right if all of its characters are.")
    page.figure(
        overview(found),
        "Of a hundred answers so many are right, by family and length. Right of the orange line: lengths that were "
        "not learned.",
    )
    page.table(
        ["family", *(f"{task} (learned to {longest})" for task, longest in found.learned.items())],
        [(kind, *lengths.values()) for kind, lengths in found.reach().items()],
        "The greatest length up to which nine of ten answers are right.",
    )
    for task, longest in found.learned.items():
        own = found.of(task)
        page.section(task, f"Learned up to length {longest}.")
        page.figure(_by_length(own, longest), "Right of the dashed line nothing was learned.")
        lengths = [one.length for one in own[0].by_length]
        page.table(
            ["family", "parameters", *(f"length {length}" for length in lengths)],
            [
                (trial.kind, trial.parameters, *(f"{one.accuracy:.1%} of {one.cases:,}" for one in trial.by_length))
                for trial in own
            ],
        )
    return page


def overview(found: Probed) -> Figure:
    """A panel for each task: families by lengths, coloured by how many answers are right."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("right", ["#ffffff", COLOURS[0]])
    columns = min(_TASKS_IN_A_ROW, len(found.learned))
    rows = math.ceil(len(found.learned) / columns)
    num_families = max(len(found.of(task)) for task in found.learned)
    figure, axes = new_figure(rows, columns, height=rows * (0.75 + 0.24 * num_families))
    panels = np.ravel(axes)
    for index, (panel, (task, longest)) in enumerate(zip(panels, found.learned.items(), strict=False)):
        own = found.of(task)
        lengths = [one.length for one in own[0].by_length]
        right = np.array([[one.accuracy for one in trial.by_length] for trial in own])
        panel.imshow(right, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(right):
            shade = "#ffffff" if share > 0.6 else "#444444"
            panel.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=shade)
        panel.axvline(sum(length <= longest for length in lengths) - 0.5, color=COLOURS[1], linewidth=2)
        panel.set_xticks(range(len(lengths)), lengths)
        panel.set_yticks(range(len(own)), [trial.kind for trial in own] if index % columns == 0 else [""] * len(own))
        panel.set_title(task, fontsize=10)
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
