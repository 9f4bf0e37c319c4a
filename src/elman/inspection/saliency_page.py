"""What predictions rest on, as a page to look at."""

from __future__ import annotations

from elman.inspection.saliency import METHODS, Attribution, Saliency
from elman.page import Page, Piece, new_figure

_NUM_SHOWN = 4


def saliency_page(found: Saliency) -> Page:
    """Coloured contexts, figures by distance, and the horizon."""
    part = found.corpus if found.split == "text" else f"the {found.split} part of {found.corpus}"
    page = Page(
        "What the next token rests on",
        f"A model of kind {found.kind} reads {part}. Orange tokens speak for the token that follows, blue ones against "
        "it.",
    )
    if found.horizon is not None:
        horizon = found.horizon
        page.numbers(
            {
                f"memory horizon at {horizon.threshold:g} nats, in tokens": (
                    f"beyond {horizon.distances[-1]:,}" if horizon.tokens is None else horizon.tokens
                ),
                "contexts": len(found.attributions),
                "tokens in each": len(found.attributions[0].tokens),
            }
        )
    page.section(
        "Token by token",
        "Deletion is measured: how much less probable the next token becomes when this one is left out. Integrated "
        "gradients share out what the whole context adds over a context of mean embeddings. Gradient x input is their "
        "first guess.",
    )
    for attribution in found.attributions[:_NUM_SHOWN]:
        _add_context(page, attribution)
    if len(found.attributions) > 1:
        _add_distances(page, found)
    if found.horizon is not None:
        _add_horizon(page, found)
    return page


def _add_context(page: Page, attribution: Attribution) -> None:
    page.text(f"Before {attribution.target!r}, token {attribution.position:,}, which cost {attribution.nats:.2f} nats:")
    rows = {
        METHODS["deletion"]: attribution.deletion,
        METHODS["integrated"]: attribution.integrated,
        METHODS["gradient"]: attribution.gradient,
    }
    for name, nats in rows.items():
        if nats is None:
            continue
        largest = max(map(abs, nats)) or 1.0
        pieces = [
            Piece(token, value / largest, f"{value:+.3f} nats")
            for token, value in zip(attribution.tokens, nats, strict=True)
        ]
        missed = ""
        if attribution.gap is not None and name == METHODS["integrated"]:
            missed = f"; sum {sum(nats):.3f}, which misses the change that it explains by {abs(attribution.gap):.1g}"
        page.coloured(pieces, f"-{largest:.2g} nats", f"{largest:.2g} nats", f"{name}{missed}")


def _add_distances(page: Page, found: Saliency) -> None:
    page.section("By distance", "The mean size of what the token at each distance adds, over all contexts.")
    figure, axes = new_figure()
    for method, name in METHODS.items():
        sizes = found.by_distance(method)
        if sizes:
            axes.plot(range(1, len(sizes) + 1), [size or float("nan") for size in sizes], label=name)
    axes.set_yscale("log")
    axes.set_xlabel("tokens before the prediction")
    axes.set_ylabel("nats")
    axes.legend(frameon=False, fontsize=9)
    page.figure(figure, "Zeros, where leaving a token out changes nothing at all, are left out.")


def _add_horizon(page: Page, found: Saliency) -> None:
    horizon = found.horizon
    if horizon is None:
        return
    words = (
        f"Beyond {horizon.tokens:,} tokens the past is worth less than {horizon.threshold:g} nats per prediction."
        if horizon.tokens is not None
        else f"Even {horizon.distances[-1]:,} tokens back the past is worth more than {horizon.threshold:g} nats."
    )
    page.section(
        "How far back it remembers",
        "Whatever stands further back than so many tokens was exchanged for another piece of the text. The divergence "
        f"of the two predictions is what the past beyond is worth. {words}",
    )
    figure, axes = new_figure()
    axes.plot(horizon.distances, [mean or float("nan") for mean in horizon.mean], marker=".", label="mean")
    axes.plot(
        horizon.distances, [high or float("nan") for high in horizon.high], linestyle=":", label="nine in ten below"
    )
    axes.axhline(horizon.threshold, color="#444444", linestyle="--", linewidth=1, label="threshold")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens that stay")
    axes.set_ylabel("nats per prediction")
    axes.legend(frameon=False, fontsize=9)
    page.figure(figure, "Zeros are left out: there the predictions are the same bit for bit.")
