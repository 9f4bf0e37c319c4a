"""The page about what families of models can remember."""

from __future__ import annotations

from elman.inspection.probing import Probed
from elman.page import Page, new_figure


def probed_page(found: Probed) -> Page:
    """Accuracy against length, task by task, to be looked at."""
    page = Page(
        "What can they remember?",
        f"Tasks of known answer, learned at short lengths and asked at longer ones. Every family had {found.updates:,} "
        f"updates and about {found.parameters:,} parameters.",
    )
    for task, longest in found.learned.items():
        own = [trial for trial in found.trials if trial.task == task]
        page.section(task, f"Learned up to length {longest}.")
        figure, axes = new_figure()
        for trial in own:
            lengths = [one.length for one in trial.by_length]
            axes.plot(lengths, [one.accuracy for one in trial.by_length], "o-", label=trial.kind)
        axes.axvline(longest, color="#888888", linestyle="--", linewidth=1)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("length")
        axes.set_ylabel("answers right")
        axes.legend(frameon=False, fontsize=9)
        page.figure(figure, "Right of the dashed line nothing was learned.")
        lengths = [one.length for one in own[0].by_length]
        page.table(
            ["family", "parameters", *(f"length {length}" for length in lengths)],
            [
                (trial.kind, trial.parameters, *(f"{one.accuracy:.1%} of {one.cases:,}" for one in trial.by_length))
                for trial in own
            ],
        )
    return page
