"""What acts against vanishing and exploding gradients, as a page to look at."""

from __future__ import annotations

from elman.inspection.mitigations import ArmResult, Mitigations
from elman.page import Page, new_figure


def mitigations_page(found: Mitigations) -> Page:
    """Table, gradients by lag, norms before clipping, and the copying task."""
    num_seeds = len(found.arms[0].trials)
    page = Page(
        "What acts against vanishing and exploding gradients",
        f"Small networks on {found.corpus}, {found.updates:,} updates each, {num_seeds} seeds; one thing is switched "
        "at a time. Then a copying task, whose networks have three times as many updates.",
    )
    page.section("What came of each")
    for sentence in found.words:
        page.text(f"{sentence[:1].upper()}{sentence[1:]}.")
    page.section("All arms")
    page.table(
        ["", "", "diverged", "bits per token", "state is worth", "median norm", "largest norm", "clipped"],
        [_row(arm) for arm in found.arms],
        "Bits per token of the held-out part, and what carrying the state through it saves, in bits, means over the "
        "trials that did not diverge; norms of the gradient before clipping, and the share of updates that were "
        "clipped, means over all.",
    )
    page.section("How far back gradients reach after training")
    figure, axes = new_figure(height=4.0)
    for arm in found.arms:
        if arm.by_lag:
            axes.plot(range(1, len(arm.by_lag)), [ratio or float("nan") for ratio in arm.by_lag[1:]], label=arm.name)
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-12))
    axes.set_xlabel("tokens back")
    axes.set_ylabel("gradient, one token back = 1")
    axes.legend(frameon=False, fontsize=9)
    page.figure(
        figure, "The norm of the gradient of the loss with respect to the state so many tokens before, medians."
    )
    page.section(
        "Copying, with back-propagation shorter and longer than the way",
        f"A letter has to be written again {found.lag} steps after it was read. Back-propagation over fewer tokens "
        "never leads from the answer to the letter: the state is carried, but nothing teaches the network to keep it. "
        f"{found.of_copying}",
    )
    page.table(
        ["", "tokens of back-propagation", "answers right", "bits per token"],
        [(arm.what, arm.bptt, _percent(arm.mean("accuracy")), arm.mean("bits")) for arm in found.copying],
    )
    return page


def _row(arm: ArmResult) -> list[object]:
    figures = [arm.mean("bits"), arm.state_is_worth, arm.mean("median_norm"), arm.mean("largest_norm")]
    diverged = f"{arm.num_diverged} of {len(arm.trials)}"
    return [arm.name, arm.what, diverged, *figures, _percent(arm.mean("clipped"))]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
