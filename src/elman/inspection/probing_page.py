"""The page about what families of models can remember."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from elman.inspection.probing import GROUPS, TASKS, Probed
from elman.page import COLOURS, Page, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TASKS_IN_A_ROW = 3
_GROUP_OF = {kind: what for what, kinds in GROUPS.items() for kind in kinds}


def probed_page(found: Probed) -> Page:
    """Accuracy against length, all tasks in one picture and task by task, to be looked at."""
    rates = " or ".join(f"{rate:g}" for rate in found.rates)
    page = Page(
        "What can they remember?",
        f"Questions of known answer, learned at short lengths and asked at longer ones. Every family that is trained "
        f"had {found.updates:,} updates at a learning rate of {rates}, and about {found.parameters:,} parameters.",
    )
    page.section(
        "All tasks",
        "An answer is right if all of it is. A guess is what one answers who has kept nothing but the end of the "
        "question.",
    )
    page.figure(
        overview(found),
        "Of a hundred answers so many are right, by family and length; the darker, the further above the guess, white "
        f"at it and below. The lengths right of the orange line were not learned.{_grouped(found)}",
    )
    page.table(
        ["family", *found.learned],
        [
            *((kind, *lengths.values()) for kind, lengths in found.reach().items()),
            ("learned up to", *found.learned.values()),
        ],
        "The greatest length asked up to which nine of ten answers are right.",
    )
    for name, longest in found.learned.items():
        own, task, lengths = found.of(name), TASKS[name], found.lengths(name)
        question, answer = task.example()
        guess = f"A guess: {task.guessed}." if task.guessed else "A guess is next to never right."
        page.section(
            name,
            f"“{question.strip()}” is answered by “{answer}”. Its length is {task.asked[0]}, which counts {task.unit}. "
            f"Learned up to length {longest}. {guess}",
        )
        page.figure(
            _by_length(found, name),
            "The lengths right of the dashed line were not learned. Nothing was asked between the dots: the lines only "
            "show which belong together.",
        )
        page.table(
            ["family", "parameters", "state", "rate", *(f"length {length}" for length in lengths)],
            [
                *(
                    (
                        trial.kind,
                        trial.parameters,
                        "grows" if trial.state_size is None else trial.state_size,
                        None if trial.learning_rate is None else f"{trial.learning_rate:g}",
                        *(f"{one.accuracy:.1%}" for one in trial.by_length),
                    )
                    for trial in own
                ),
                ("guess", None, None, None, *(f"{share:.1%}" for share in found.guess(name))),
            ],
            "State: numbers carried from one token to the next. Different questions asked: "
            + ", ".join(f"{one.cases:,} of length {one.length}" for one in own[0].by_length)
            + ".",
        )
    return page


def _grouped(found: Probed) -> str:
    """What the grey lines between families mean, a sentence; none where there is no line to explain."""
    groups: dict[str, list[str]] = {}
    for kind in found.reach():
        groups.setdefault(_GROUP_OF.get(kind, "others"), []).append(kind)
    if len(groups) < 2:
        return ""
    named = "; ".join(f"{what} ({', '.join(kinds)})" for what, kinds in groups.items())
    return f" Grey lines part families by what carries their past: {named}."


def overview(found: Probed) -> Figure:
    """A panel for each task: families by lengths, coloured by how far the right answers are above the guess."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("right", ["#ffffff", COLOURS[0]])
    columns = min(_TASKS_IN_A_ROW, len(found.learned))
    rows = math.ceil(len(found.learned) / columns)
    kinds = list(found.reach())
    figure, axes = new_figure(rows, columns, height=rows * (1.2 + 0.2 * len(kinds)))
    panels = np.ravel(axes)
    for index, (panel, task) in enumerate(zip(panels, found.learned, strict=False)):
        guess = np.array(found.guess(task))
        right = np.array([[one.accuracy for one in trial.by_length] for trial in found.of(task)] + [guess])
        above = np.clip((right - guess) / (1 - guess), 0, 1)
        panel.imshow(above, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(above):
            shade = "#ffffff" if share > 0.6 else "#444444"
            figure_there = f"{100 * right[row, column]:.0f}"
            panel.text(column, row, figure_there, ha="center", va="center", fontsize=8, color=shade)
        for row, (upper, lower) in enumerate(pairwise(kinds)):
            if _GROUP_OF.get(upper) != _GROUP_OF.get(lower):
                panel.axhline(row + 0.5, color="#888888", linewidth=1)
        panel.axhline(len(kinds) - 0.5, color="#444444", linewidth=1.5)  # below it, the guess
        panel.axvline(_border(found, task), color=COLOURS[1], linewidth=2)
        panel.set_xticks(range(len(guess)), found.lengths(task))
        panel.set_yticks(range(len(right)), [*kinds, "guess"] if index % columns == 0 else [""] * len(right))
        panel.set_title(task, fontsize=10)
        panel.set_xlabel(TASKS[task].unit, fontsize=8, color="#666666")
        panel.grid(False)
        panel.tick_params(length=0)
    for panel in panels[len(found.learned) :]:
        panel.set_visible(False)
    return figure


def _by_length(found: Probed, task: str) -> Figure:
    """The lengths stand side by side as they were asked, as far apart as there is room, not as they differ."""
    figure, axes = new_figure(height=3.8)
    places = range(len(found.lengths(task)))
    for index, trial in enumerate(found.of(task)):
        dashes = "-" if index < len(COLOURS) else ":"  # the colours come round again
        axes.plot(places, [one.accuracy for one in trial.by_length], f"o{dashes}", linewidth=0.8, label=trial.kind)
    axes.plot(places, found.guess(task), "_--", color="#444444", linewidth=0.8, markersize=14, label="guess")
    axes.axvline(_border(found, task), color="#888888", linestyle="--", linewidth=1)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xticks(places, found.lengths(task))
    axes.set_xlabel(f"length: {TASKS[task].unit}")
    axes.set_ylabel("answers right")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _border(found: Probed, task: str) -> float:
    """Between the lengths that were learned, counted from 0, and those that were not."""
    return sum(length <= found.learned[task] for length in found.lengths(task)) - 0.5
